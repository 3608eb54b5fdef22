"""Modules that hold quantised weights: what a cast and a load may do to codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.checks.shapes import FLOATS

# Integers of the size of a floating-point element: a cast of a module leaves integers alone.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FORMAT = "moe_ops_format"  # in the metadata of a state dict


class HoldsCodes(nn.Module):
    """A module some of whose tensors are codes and scales, which no cast and no load converts.

    `.half()` and `.to(dtype)` cast the rest of the module; what moves it moves everything.
    `load_state_dict` raises, whether it is strict or not, for codes where the module holds floats,
    for floats where it holds codes, for codes or scales of another dtype than the module's, and for
    codes of another format, which `torch.save` keeps beside the version of the module.
    """

    def coded(self) -> Iterable[str]:
        """The names of the module's own tensors that keep their dtype."""
        raise NotImplementedError

    def coded_as(self) -> str:
        """The format of the codes; "" if there are none, or what is saved says it itself."""
        return ""

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        told = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if told is not None and self.coded_as():
            told[FORMAT] = self.coded_as()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = {**self._parameters, **self._buffers}
        kept = {id(t): name for name in self.coded() if (t := own.get(name)) is not None}

        def apply(t: Tensor) -> Tensor:
            name = kept.get(id(t))
            return fn(t) if name is None else _without_cast(fn, t, name)

        super()._apply(apply, recurse)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # torch's last argument; what is appended is raised when all modules had their turn.
        errors: list[str] = kwargs["error_msgs"] if kwargs else args[-1]
        told: dict[str, Any] = kwargs["local_metadata"] if kwargs else args[0]
        found = [*self._refusals(state_dict, prefix)]
        if any(prefix + name in state_dict for name in self.coded()):
            found += self._refusal_of_format(told, prefix)
        errors += found
        if not found:
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _refusal_of_format(self, told: dict[str, Any], prefix: str) -> Iterable[str]:
        """Why the module cannot take codes of the format that a state dict tells of, if it does:
        those of several formats have the same shapes."""
        given, own = told.get(FORMAT), self.coded_as()
        if given is not None and own and given != own:
            yield (
                f"{prefix or type(self).__name__} has codes of {given} in the state dict, but of "
                f"{own} in this {type(self).__name__}, and codes are not converted; load it into a "
                "module that is quantised to the same format"
            )

    def _refusals(self, state_dict: dict[str, Any], prefix: str) -> Iterable[str]:
        """Why the module cannot take what a state dict has for it."""
        coded = set(self.coded())
        for name, own in {**self._parameters, **self._buffers}.items():
            given = state_dict.get(prefix + name)
            if own is None or not isinstance(given, Tensor) or given.dtype == own.dtype:
                continue  # what is no tensor, torch refuses
            if name in coded or (given.dtype not in FLOATS and own.dtype in FLOATS):
                yield (
                    f"{prefix}{name} is {given.dtype} in the state dict, but {own.dtype} in this "
                    f"{type(self).__name__}, and codes are not converted; load it into a module "
                    "that is quantised to the same format"
                )


def _without_cast(fn: Callable[[Tensor], Tensor], t: Tensor, name: str) -> Tensor:
    """What `fn` makes of a tensor, with the dtype that it has."""
    bits = t.view(BITS[t.itemsize]) if t.is_floating_point() else t
    done = fn(bits)
    if done.dtype != bits.dtype:
        raise TypeError(
            f"{name} holds codes or scales of quantised weights, which {done.dtype} would make "
            "numbers of; cast with .to(dtype), which leaves them as they are"
        )
    return done.view(t.dtype)
