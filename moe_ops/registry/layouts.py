"""The order in which a backend reads an expert's weights: made once in place, undone exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.checks.options import check_text
from moe_ops.checks.signature import described
from moe_ops.registry.gradients import needs_grad, without_gradient

Reorder = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Another order of the elements of each expert's weights, such as rows or blocks shuffled.

    `prepare` takes stacked tensors by their names as arguments of `experts` (w13_EFD [e, F, D],
    w2_EDI, and biases, scales and zeros if there are any) and returns those that it
    changes, each in the shape and dtype that it had; `restore` is the inverse. What becomes of an
    expert depends on that expert alone. So weights are prepared where they are, one expert at a
    time: addresses stay, for graphs that read them, and experts move as they did before.

    Raises TypeError for a name that is no string and for what cannot be called, ValueError for an
    empty name, which stands for weights as they are loaded.
    """

    name: str
    prepare: Reorder
    restore: Reorder

    def __post_init__(self) -> None:
        check_text("name", self.name)
        if not self.name:
            raise ValueError("a layout needs a name that is not empty, such as 'mine.paired'")
        for name in ("prepare", "restore"):
            given = getattr(self, name)
            if not callable(given):
                raise TypeError(
                    f"{name} must be a function of tensors by name, got {described(given)}"
                )

    @torch.no_grad()
    def prepare_(self, tensors: Mapping[str, Tensor]) -> None:
        """Prepare stacked tensors in place, with memory for one more expert.

        Raises ValueError, and changes nothing, if `restore` does not give the first expert back, or
        a tensor would get another shape or dtype.
        """
        first = {name: t[:1] for name, t in tensors.items()}
        before = {name: t.clone() for name, t in first.items()}
        after = {**before, **self._checked(self.prepare, before)}
        back = {**after, **self._checked(self.restore, after)}
        changed = [name for name, t in first.items() if not _same_bits(t, back[name])]
        if changed:
            raise ValueError(
                f"the layout {self.name!r} is not undone by its restore: {', '.join(changed)} of "
                "the first expert came back as other values"
            )
        self._rewrite(self.prepare, tensors)

    @torch.no_grad()
    def restore_(self, tensors: Mapping[str, Tensor]) -> None:
        """Undo `prepare_`, in place."""
        self._rewrite(self.restore, tensors)

    def _rewrite(self, reorder: Reorder, tensors: Mapping[str, Tensor]) -> None:
        for e in range(len(next(iter(tensors.values())))):
            expert = {name: t[e : e + 1] for name, t in tensors.items()}
            # Copied first: what is returned may be a view of what is written to.
            made = {n: t.clone() for n, t in self._checked(reorder, expert).items()}
            for name, t in made.items():
                expert[name].copy_(t)

    def _checked(self, reorder: Reorder, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        made = reorder(tensors)
        for name, t in made.items():
            was = tensors.get(name)
            if was is None or (t.shape, t.dtype) != (was.shape, was.dtype):
                wanted = "no such tensor" if was is None else f"{was.dtype} {list(was.shape)}"
                raise ValueError(
                    f"the layout {self.name!r} makes {name} {t.dtype} {list(t.shape)} of {wanted}; "
                    "it may change the order of elements, and nothing else"
                )
        return made


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether values are equal; NaN equals itself."""
    return torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def untrained(t: Tensor, stored: Tensor, name: str, layout: str) -> Tensor:
    """What a layout restored of a weight, which autograd does not see: a backward that wants the
    stored weight's gradient raises RuntimeError."""
    return without_gradient(t, no_gradient(name, layout), stored) if needs_grad(stored) else t


def no_gradient(name: str, layout: str) -> str:
    """Why a weight in a layout has no gradient, and what to do."""
    return (
        f"{name} is stored in the layout {layout!r}, in which weights have no gradient; to train "
        "them store them as they were loaded, by moe_ops.prepare(model, ''), or freeze them by "
        "requires_grad_(False)"
    )
