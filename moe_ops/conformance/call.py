"""One sample for one backend: arguments as the backend reads them, and the right results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.shapes import FLOATS
from moe_ops.conformance.memory import surrounded, tensors
from moe_ops.conformance.samples import INPUT_FORMATS, mutated, specified
from moe_ops.ops.experts import WEIGHTS
from moe_ops.quant.formats import Format
from moe_ops.registry.backend import LAYOUT, Backend
from moe_ops.registry.spec import Op
from moe_ops.registry.using import using
from moe_ops.testing import (
    BF16,
    F16,
    F32,
    TOL,
    Case,
    Tol,
    assert_close,
    float32,
    poisoned,
    tolerance,
)

EXACT = Tol(0.0, "integers and codes are exact")
DECODE_TOL = {
    F32: Tol(1e-5, "float32 sums in another order"),
    F16: Tol(3e-3, "outputs and what leads to them rounded to 11 bits of mantissa"),
    BF16: Tol(2.4e-2, "outputs and what leads to them rounded to 8 bits of mantissa"),
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A sample: its arguments on a CPU, as the op takes them of weights as they are loaded."""

    op: Op
    backend: Backend
    case: Case
    dtype: torch.dtype
    label: str
    loaded: tuple[Any, ...]
    device: torch.device

    @property
    def sample(self) -> str:
        return f"{self.case.name}/{str(self.dtype).removeprefix('torch.')}/{self.label}"

    @cached_property
    def named(self) -> dict[str, Any]:
        """The arguments by name, weights in the backend's layout."""
        found = self.op.arguments.by_name(self.op.call(*self.loaded))
        layout = self.backend.layout
        if layout is None:
            return found
        held = {n: found[n].clone() for n in WEIGHTS if isinstance(found.get(n), Tensor)}
        layout.prepare_(held)
        return {**found, **held, LAYOUT: layout.name}

    @cached_property
    def refusal(self) -> str | None:
        """What the backend says before weights are prepared, which changes nothing it looks at."""
        layout = self.backend.layout
        given = self.op.arguments.by_name(self.op.call(*self.loaded))
        given |= {} if layout is None else {LAYOUT: layout.name}
        return self.asked(self._copied(given))

    @cached_property
    def want(self) -> list[Tensor]:
        """The results by the definition, in float32 unless inputs are rounded to codes, which
        depends on how they were rounded before."""
        exact = any(arg in INPUT_FORMATS for arg in self.loaded if isinstance(arg, str))
        args = tuple(surrounded(a, torch.device("cpu")) for a in self.loaded)
        args = args if exact else float32(args)
        with using("reference", batch_invariant=False):
            return self.results(self.op.reference(*args), args)

    def copies(self) -> tuple[Any, ...]:
        """The arguments in fresh memory, in which all that is no value is NaN."""
        return self._copied(self.named)

    def _copied(self, named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Copies in fresh memory of the device, but for what the host reads."""
        host = self.op.arguments.host
        cpu = torch.device("cpu")
        return tuple(surrounded(v, cpu if n in host else self.device) for n, v in named.items())

    def asked(self, args: Sequence[Any]) -> str | None:
        """What the backend says to a call with these arguments."""
        record = self.op.call(*args)
        first = self.op.arguments.first(record)
        return self.backend.refusal(first.device.type, self.op.arguments.rows(record), record)

    def run(self, args: Sequence[Any]) -> Any:
        """The backend's result, NaN where it wrote nothing."""
        return self.ran(self.op, args)

    def ran(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The result of a function that calls the op, on memory that is filled with NaN."""
        with using(self.backend.name, self.op.name), poisoned():
            return function(*args)

    def results(self, got: Any, args: Sequence[Any]) -> list[Tensor]:
        """The tensors of a result, without the rows that the op leaves unspecified, and those that
        the op writes to, all on a CPU."""
        on_cpu = tuple(a.cpu() if isinstance(a, Tensor) else a for a in args)
        made = [t.detach().cpu() for t in tensors(got)]
        whole = made[0] if isinstance(got, Tensor) else made or None
        return [
            *specified(self.op.name, on_cpu, whole),
            *(t.cpu() for t in mutated(self.op, tuple(args))),
        ]

    def compare(self, got: Any, args: Sequence[Any], how: str = "") -> None:
        """Raise AssertionError unless a result is right."""
        results = self.results(got, args)
        if len(results) != len(self.want):
            raise AssertionError(f"{len(results)} results{how}, wanted {len(self.want)}")
        for i, (g, w) in enumerate(zip(results, self.want, strict=True)):
            assert_close(g, w, self._tolerance(g.dtype), f"result {i} of {self.op.name}{how}")

    def _tolerance(self, dtype: torch.dtype) -> Tol:
        if dtype not in FLOATS:
            return EXACT
        known = (self.op.name, dtype) in TOL
        tol = tolerance(self.op.name, dtype, self.dtype) if known else DECODE_TOL[dtype]
        format = self.named.get("x_format", "")
        if format and self.op.name != "expert_gemm":  # whose inputs are codes already
            codes = Format.of(format).parsed.storage.dtype
            coded = TOL.get(("experts", codes), TOL["experts", torch.float8_e4m3fn])
            tol = max(tol, coded, key=lambda t: t.rel)
        return tol
