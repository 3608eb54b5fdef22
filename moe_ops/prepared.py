"""Modules whose experts may be stored in the order in which a backend reads them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.checks.options import check_text, check_type
from moe_ops.checks.shapes import check_choice
from moe_ops.ops.experts import experts
from moe_ops.registry.derived import written

log = logging.getLogger("moe_ops")


@dataclass(slots=True)
class Stored:
    """How the weights of a module are stored, and how often they went to another group of ranks.
    Shallow copies of it, as `compile` makes one, share this as they share the weights."""

    layout: str = ""
    resized: int = 0


class HoldsExperts(nn.Module):
    """A module of experts whose weights `prepare` may store in another layout.

    Parameters keep their names, shapes, dtypes and addresses, and an expert its place, so moves of
    experts, reloads and moves to other devices leave captured graphs right. `state_dict` holds the
    weights as they were loaded, and `load_state_dict` takes such and prepares them again.
    """

    _stored: Stored
    # The names of the module's own tensors, by the arguments of `experts` that they are.
    expert_names: Mapping[str, str]

    @property
    def padding(self) -> str:
        """Which sizes of the weights are rounded up, and why; "" if none is."""
        return ""

    @property
    def layout(self) -> str:
        """The layout of the weights, as a backend named it; empty: as they were loaded."""
        return self._stored.layout

    @property
    def stored_as(self) -> tuple[str, int]:
        """What a captured graph depends on besides addresses, which may come again: the layout, and
        which of the groups of ranks that shared the weights one after the other shares them."""
        return self._stored.layout, self._stored.resized

    def _expert_tensors(self) -> dict[str, Tensor]:
        found = ((given, getattr(self, name)) for given, name in self.expert_names.items())
        return {given: as_given(t.detach()) for given, t in found if t is not None}

    def prepare_weights(self, layout: str) -> None:
        """Store the weights in the layout of this name; "" for as they were loaded."""
        if layout == self.layout:
            return
        if self.layout:
            experts.layouts[self.layout].restore_(self._expert_tensors())
            self._stored.layout = ""
        if layout:
            experts.layouts[layout].prepare_(self._expert_tensors())
            self._stored.layout = layout

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Inside, the weights are as they were loaded, to be read or written; the layout is applied
        again at the end. No forward may run meanwhile that was captured or compiled before."""
        layout = self.layout
        self.prepare_weights("")
        try:
            yield
        finally:
            self.prepare_weights(layout)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout:
            tensors = {given: t.clone() for given, t in self._expert_tensors().items()}
            experts.layouts[self.layout].restore_(tensors)
            names = self.expert_names
            for given, t in tensors.items():
                own = getattr(self, names[given])
                destination[prefix + names[given]] = t.view(own.dtype)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if self.layout and local_metadata.get("assign_to_params_buffers", False):
            args[-1].append(  # what torch raises when all modules had their turn
                f"{prefix or type(self).__name__} is prepared as {self.layout!r}, and preparing "
                "what assign=True puts here would change the state dict; leave assign out"
            )
            return
        with self.as_loaded():
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        written(self.parameters(recurse=False))


def as_given(t: Tensor) -> Tensor:
    """A tensor as `experts` takes it: scales that are powers of two as the bytes that they are."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t


@contextmanager
def as_loaded(modules: Iterable[HoldsExperts]) -> Iterator[None]:
    """`HoldsExperts.as_loaded` of several."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.as_loaded())
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """What `prepare` did: the layout, the modules now in it, and the bytes that it rewrote."""

    layout: str
    modules: tuple[str, ...]
    bytes_rewritten: int


def prepare(model: nn.Module, layout: str) -> PrepareReport:
    """Store the experts of a model, or of a `MoELayer`, in the layout that a backend reads.

    `layout` is the name that the backend registered; "" stores them as they were loaded. It is done
    in place, one expert at a time, with memory for one expert more; call it after loading, before
    or after `compile`, and while no call runs. What `compile` and `capture` captured is captured
    again; a CUDA graph of your own is to be captured after it. Modules are `MoELayer` and experts
    that `quantize_model` quantised; experts in transformers' own modules stay as they are, as
    transformers' code reads them.

    Raises TypeError for what is no module; ValueError for a layout that no backend of `experts`
    registered, for a model without such modules, and for a layout that is not undone by its
    inverse, or makes other shapes. Whatever a layout raises, the modules before are put back.
    """
    check_type("model", model, nn.Module, "a module")
    check_text("layout", layout)
    reader = experts.backends.get(layout)
    if reader is not None and reader.layout is not None and layout not in experts.layouts:
        raise ValueError(
            f"layout={layout!r} is a backend; it reads weights in {reader.layout.name!r}, give that"
        )
    if layout:
        check_choice("layout", layout, tuple(experts.layouts))
    found = {name: m for name, m in model.named_modules() if isinstance(m, HoldsExperts)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that can be prepared: they are in MoELayer, "
            "and in transformers models after moe_ops.quantize_model"
        )
    before = {name: module.layout for name, module in found.items()}
    try:
        for module in found.values():
            module.prepare_weights(layout)
    except BaseException:  # a layout is code of others, and takes long enough to be interrupted
        for name, module in found.items():
            module.prepare_weights(before[name])
        raise
    changed = [found[name] for name, was in before.items() if was != layout]
    rewritten = sum(t.nbytes for m in changed for t in m._expert_tensors().values())
    said = f"as {layout!r}" if layout else "as they were loaded"
    log.info("%d modules of experts, %d bytes, are stored %s", len(changed), rewritten, said)
    return PrepareReport(layout=layout, modules=tuple(found), bytes_rewritten=rewritten)
