"""What is timed for a layer: our `moe` on the backends it picks or on one, and transformers'."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops.backends.flashinfer.options import flashinfer_options
from moe_ops.bench.inputs import Routed, Weights
from moe_ops.ops import experts, moe
from moe_ops.ops.experts import WEIGHTS
from moe_ops.registry.layouts import Layout
from moe_ops.registry.spec import NAMESPACE, OPS, REFERENCE, Op
from moe_ops.registry.using import using
from moe_ops.testing import Case

OURS = "moe_ops"
STOCK = ("grouped_mm", "batched_mm")  # transformers' names
DIRECT = "cutlass_fused_moe"  # FlashInfer's

Call = Callable[[Weights, Routed], Tensor]


class Refused(Exception):
    """Why a contender does not take a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One implementation of a layer. `around` is entered before it is called."""

    name: str
    call: Call
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    compiled: bool = False


def ours(case: Case, device: str, name: str = OURS, backend: str | None = None) -> Contender:
    """The op `moe`, from logits to the result, on the backends that it picks or on one."""

    def call(weights: Weights, routed: Routed) -> Tensor:
        w13_EFD, w2_EDI = weights.w13_EFD, weights.w2_EDI
        given = {"renormalize": True, **weights.keywords}
        return moe(routed.x_TD, routed.logits_TE, w13_EFD, w2_EDI, case.K, **given)

    if backend is None:
        return Contender(name=name, call=call)
    having = ops_with(backend, device)
    layout = experts.backends[backend].layout if backend in experts.backends else None
    if layout is not None:
        stored = Prepared(layout)
        return Contender(
            name=name,
            call=lambda weights, routed: call(stored.of(weights), routed),
            around=lambda: on(backend),
        )
    return Contender(name=name, call=call, around=lambda: forced(backend, having))


@contextlib.contextmanager
def on(backend: str) -> Iterator[None]:
    """A backend of prepared weights, which leaves routing to who is best at it; FlashInfer's with
    the tactics that it measures to be the best."""
    with using(backend, experts), flashinfer_options(autotune=True):
        yield


class Prepared:
    """Weights as a backend reads them, made once of each copy that takes turns."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._made: dict[int, tuple[Weights, Weights]] = {}  # by address; the first stays, too

    def of(self, weights: Weights) -> Weights:
        found = self._made.get(weights.w13_EFD.data_ptr())
        if found is None:
            given = {"w13_EFD": weights.w13_EFD, "w2_EDI": weights.w2_EDI, **weights.beside}
            held = {n: t.clone() for n, t in given.items()}
            try:
                self._layout.prepare_({n: t for n, t in held.items() if n in WEIGHTS})
            except ValueError as error:  # weights or sizes that the layout has no order for
                raise Refused(str(error)) from error
            w13_EFD, w2_EDI = held.pop("w13_EFD"), held.pop("w2_EDI")
            made = replace(weights, w13_EFD=w13_EFD, w2_EDI=w2_EDI, beside=held,
                           layout=self._layout.name)  # fmt: skip
            found = self._made[weights.w13_EFD.data_ptr()] = weights, made
        return found[1]


def direct(case: Case) -> Contender:
    """FlashInfer's `cutlass_fused_moe` itself, given the ids and weights of a routing."""
    from moe_ops.backends.flashinfer import arguments, cutlass, stored

    weights_of = Prepared(stored.UP_GATE)

    def call(weights: Weights, routed: Routed) -> Tensor:
        made = weights_of.of(weights)
        record = experts.call(
            routed.x_TD, routed.weights_TK, routed.ids_TK, made.w13_EFD, made.w2_EDI,
            **made.keywords,
        )  # fmt: skip
        reason = cutlass.supports(record)
        if reason is not None:
            raise Refused(f"{cutlass.NAME} {reason}")
        to = arguments.routed(record)
        launch, tokens = cutlass.launch_of(record, to), routed.x_TD.shape[0]
        with launch.runs.around(tokens, cutlass.tuning(launch, tokens)):
            out_TD = torch.empty_like(routed.x_TD)
            workspace = cutlass.workspace(launch, out_TD.device)
            launch.function(
                **launch.given,
                output=out_TD, workspace_buffer=workspace, **cutlass.tensors_of(record, to)
            )  # fmt: skip
        return out_TD

    return Contender(name=DIRECT, call=call, around=lambda: flashinfer_options(autotune=True))


def ops_with(backend: str, device: str) -> list[Op]:
    """The ops that have this backend on a device. Raises ValueError if there is none."""
    having = [op for op in OPS.values() if backend in {b.name for b in op.candidates(device)}]
    if not having:
        known = sorted({b.name for op in OPS.values() for b in op.candidates(device)})
        raise ValueError(
            f"no op has a backend {backend!r} on {device}; there are {', '.join(known)}"
        )
    return having


@contextlib.contextmanager
def forced(backend: str, having: list[Op]) -> Iterator[None]:
    """Run these ops on this backend, and all other ops by their definitions."""
    others = [op for op in OPS.values() if op not in having]
    with contextlib.ExitStack() as stack:
        if others:
            stack.enter_context(using(REFERENCE, *others))
        stack.enter_context(using(backend, *having))
        yield


def stock(case: Case, implementation: str) -> Contender:
    """transformers' experts under torch.compile, given the ids and weights of a routing."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=case.D,
        num_experts=case.E,
        num_experts_per_tok=case.K,
        moe_intermediate_size=case.I,
    )
    config._experts_implementation = implementation
    modules: dict[int, nn.Module] = {}

    def module_of(weights: Weights) -> nn.Module:
        found = modules.get(weights.w13_EFD.data_ptr())
        if found is None:
            with torch.device("meta"):
                found = Qwen3MoeExperts(config).eval()
            found.gate_up_proj = nn.Parameter(weights.w13_EFD, requires_grad=False)
            found.down_proj = nn.Parameter(weights.w2_EDI, requires_grad=False)
            modules[weights.w13_EFD.data_ptr()] = found
        return found

    def run(module: nn.Module, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return module(x_TD, ids_TK, weights_TK)

    compiled = torch.compile(run, fullgraph=True)

    def call(weights: Weights, routed: Routed) -> Tensor:
        return compiled(module_of(weights), routed.x_TD, routed.wide_TK, routed.rounded_TK)

    return Contender(name=implementation, call=call, compiled=True)


def backends_of(call: Callable[[], Any]) -> dict[str, str]:
    """The backend of every op of ours that a call runs, as the ops pick them."""
    with _Recorder() as recorder:
        call()
    return recorder.ran


class _Recorder(TorchDispatchMode):
    """Picks as an op does, and watches what the backend calls in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) != NAMESPACE:
            return func(*args, **kwargs)
        op = OPS[func.overloadpacket.__name__]
        call = op.call(*args, **kwargs)
        op.check(call)
        backend = op.pick(call)
        self.ran[op.name] = backend.name
        with self:
            return backend.run(call)


def label(ran: dict[str, str]) -> str:
    """A few words for what ran: the backend of `moe`, else the backends of the ops that it is
    composed of."""
    if ran.get(moe.name, REFERENCE) != REFERENCE:
        return ran[moe.name]
    named = [f"{op}:{backend}" for op, backend in ran.items() if backend != REFERENCE]
    return " ".join(named) or (REFERENCE if ran else "")
