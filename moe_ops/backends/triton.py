"""The Triton backends for NVIDIA GPUs: routing, and the experts by their rows.

triton.tiny     up to 64 pairs of token and choice: nothing is sorted; two launches, of quantised
                weights up to four more
triton.rows     few rows an expert: weights stream past the rows
triton.grouped  many rows an expert: the rate of the matrix units decides; and all of float32.
                Quantised weights are decoded first, but on Hopper of most formats and widths

Each takes the first of its paths (`triton_paths.py`) that does not refuse a call.
Inputs of formats that no GPU here multiplies are emulated, by triton.rows and triton.grouped; of
float8 with weights of four bits triton.grouped multiplies codes on Hopper, where that is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends import reads
from moe_ops.backends import triton_paths as paths
from moe_ops.backends.strides import contiguous, in_words, with_rows
from moe_ops.backends.triton_ahead import Before, compiles_ahead
from moe_ops.backends.triton_arithmetic import placed, refuse_dynamic
from moe_ops.backends.triton_device import refuse_device
from moe_ops.backends.triton_hopper import refuse_many
from moe_ops.backends.triton_inputs import with_one_scale
from moe_ops.backends.triton_limits import max_tiny_tokens, most_rows_tokens, most_tiny_tokens
from moe_ops.backends.triton_support import (
    formats_of,
    inputs_of,
    supports_codes,
    supports_experts,
    supports_tiny,
)
from moe_ops.backends.widths import whole_rows
from moe_ops.checks.shapes import DTYPES
from moe_ops.decode_ops.experts_onto import ExpertsOntoCall, experts_onto
from moe_ops.ops.adapters import ADAPTER, OF_ADAPTER, Adapter
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.route import RouteCall, route
from moe_ops.registry.backend import ANY_NUMBER, Rows
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import INVARIANT, Arithmetic, Refused

A_WARP = "a warp for each token"
Supports = Callable[[ExpertsCall], str | None]
Formats = tuple[str, str, torch.dtype]  # of weights, of inputs; of results


def supports_many(call: ExpertsCall) -> str | None:
    """The support of the paths for many rows an expert: floats, quantised weights, which are
    decoded first, and on Hopper those with inputs of 8 bits."""
    if not call.w_format:
        return supports_experts(call)
    refusal = supports_codes(call)
    if refusal is None and call.x_format:
        refusal = refuse_many(call)
    return refusal


def supports_route(call: RouteCall) -> str | None:
    if needs_grad(call.logits_TE, call.bias_E, call.per_expert_scale_E):
        return "is not differentiable, and an argument requires grad"
    return refuse_device(call.logits_TE)


@route.backend(
    "triton", reads=reads.ROUTE, supports=supports_route, devices=("cuda",), priority=1,
    arithmetic=lambda call: A_WARP,
)  # fmt: skip
def route_tokens(call: RouteCall) -> tuple[Tensor, Tensor]:
    """`route` in one launch, a warp for each token."""
    return _route(call)


def _route(call: RouteCall, before: Before = None) -> tuple[Tensor, Tensor]:
    from moe_ops.kernels.triton import routing
    from moe_ops.kernels.triton.replay import replay

    return replay(routing.route, tensors_of_route(call), rest_of_route(call), before)


def tensors_of_route(call: RouteCall) -> tuple[Tensor | None, ...]:
    c = call
    logits_TE = placed(c.logits_TE) if INVARIANT.get() else with_rows(c.logits_TE)
    return logits_TE, contiguous(c.bias_E), contiguous(c.per_expert_scale_E)


def rest_of_route(call: RouteCall) -> tuple[Any, ...]:
    """The choices, the router as kernels take it, the dtype of weights, and whether each token has
    a program of its own."""
    c = call
    fill = float("-inf") if c.group_fill == "-inf" else 0.0
    router = (
        c.score, c.select_on == "logit", c.n_group, c.topk_group, c.group_reduce == "top2sum", fill,
        c.softmax_selected, c.renormalize, c.eps, c.min_sum, c.scale, c.group_fill == "zero_weight",
    )  # fmt: skip
    return c.top_k, router, DTYPES[c.out_dtype], INVARIANT.get()


compiles_ahead(route, "triton", _route)


# The tensors of a launch, in their order.
TENSORS = (
    "x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED", "expert_map",
    "residual_TD", "w13_scale_EFG", "w2_scale_EDG", "w13_zero_EFG", "w2_zero_EDG",
    "global_scale13_E", "global_scale2_E", "x_scale", "h_scale", "x_scale_TG",
)  # fmt: skip


def run_experts(
    kernel: str, call: ExpertsCall, residual_TD: Tensor | None = None, tiles: Any = None,
    before: Before = None, adapter: Adapter | None = None,
) -> Tensor:  # fmt: skip
    """`experts` by a Triton backend, named without "triton.", or by one of its paths, named as
    `using` names it; with adapters, or added to a residual, if there are any. `tiles` are for it to
    take in the place of those of its tables; `before` is called ahead of the first call of a
    kind."""
    if call.x_TD.shape[0] == 0:
        return torch.empty_like(call.x_TD, dtype=call.dtype)
    from moe_ops.kernels.triton.replay import replay

    # Names of formats are looked up faster than what they stand for.
    invariant = INVARIANT.get()
    if invariant:
        call = replace(call, x_TD=placed(call.x_TD))
    rest = (kernel, call.transposed, call.activation, formats_named(call), tiles, invariant)
    tensors = (*tensors_of(call, residual_TD), *of_adapter(adapter))
    return replay(_launch_experts, tensors, rest, before)


def formats_named(call: ExpertsCall) -> Formats:
    return call.w_format, call.x_format, call.dtype


def tensors_of(call: ExpertsCall, residual_TD: Tensor | None = None) -> tuple[Tensor | None, ...]:
    c = call if call.x_scale is None else with_one_scale(call)
    x_TD = with_rows(c.x_TD) if c.x_scale_TG is None else in_words(c.x_TD)
    return (
        x_TD, contiguous(c.weights_TK), contiguous(c.ids_TK), c.w13_EFD, c.w2_EDI,
        with_rows(c.b13_EF), with_rows(c.b2_ED), contiguous(c.expert_map), contiguous(residual_TD),
        c.w13_scale_EFG, c.w2_scale_EDG, c.w13_zero_EFG, c.w2_zero_EDG,
        contiguous(c.global_scale13_E), contiguous(c.global_scale2_E), contiguous(c.x_scale),
        contiguous(c.h_scale), contiguous(c.x_scale_TG),
    )  # fmt: skip


def of_adapter(adapter: Adapter | None) -> tuple[Tensor | None, ...]:
    """The tensors of adapters in the order of ADAPTER."""
    if adapter is None:
        return (None,) * len(ADAPTER)
    given = {name: getattr(adapter, name) for name in ADAPTER}
    return tuple(t if name in OF_ADAPTER else contiguous(t) for name, t in given.items())


def tiles_of(kernel: str, call: ExpertsCall) -> Any:
    """The tiles that a call of `tiny` or `rows` takes by the tables."""
    named = dict(zip(TENSORS, tensors_of(call), strict=True))
    layer = layer_of(named, call.transposed, call.activation, formats_named(call))
    found = paths.pick(kernel, call).path.tiles_of(invariant=False)
    assert found is not None, f"{kernel} takes no tiles"
    return found(call.x_TD, call.ids_TK, layer, call.expert_map)


def _launch_experts(*given: Any) -> Tensor:
    """Launch with the tensors of `run_experts`, and its other arguments behind them. What chooses
    the path is all among what `replay` tells calls apart by."""
    named, adapters, rest = parts_of(given)
    kernel, transposed, act, formats, tiles, invariant = rest
    call = call_of(named, transposed, act, formats)
    path = paths.BY_FORCED.get(f"triton.{kernel}")
    if path is None and tiles is not None:
        path = paths.of_tiles(kernel, tiles)
    if path is None:
        taken = paths.pick(kernel, call, adapted=adapters is not None)
        paths.tell(kernel, str(taken))
        path = taken.path
    routed = (named[n] for n in ("x_TD", "weights_TK", "ids_TK"))
    layer = layer_of(named, transposed, act, formats)
    tiles_of = path.tiles_of(invariant=invariant)
    if tiles is None and tiles_of is not None:
        tiles = tiles_of(call.x_TD, call.ids_TK, layer, call.expert_map)
    rest = (named["expert_map"], named["residual_TD"], tiles, adapters)
    options = {**path.options(call), "invariant": invariant}
    out_TD: Tensor = path.launcher()(*routed, layer, *rest, **options)
    return out_TD


def parts_of(given: tuple[Any, ...]) -> tuple[dict[str, Any], Any, tuple[Any, ...]]:
    """The tensors of a launch by their names in TENSORS, its adapters as kernels take them, if
    there are any, and what stands behind both."""
    named = dict(zip(TENSORS, given, strict=False))
    adapters, behind = None, len(TENSORS) + len(ADAPTER)
    found = dict(zip(ADAPTER, given[len(TENSORS) : behind], strict=True))
    if found["scale_N"] is not None:
        from moe_ops.kernels.triton.experts.adapters import Adapters

        adapters = Adapters(**found)
    return named, adapters, given[behind:]


def call_of(named: dict[str, Any], transposed: bool, act: Any, formats: Formats) -> ExpertsCall:
    """The call whose tensors are given by their names in TENSORS, for a path to be chosen."""
    w_format, x_format, dtype = formats
    given = {n: t for n, t in named.items() if n != "residual_TD"}
    kind, gated, interleaved, alpha, limit, up_shift = act
    return ExpertsCall(
        **given, transposed=transposed, w_format=w_format, x_format=x_format, kind=kind,
        gated=gated, interleaved=interleaved, alpha=alpha, limit=limit, up_shift=up_shift,
        out_dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip


def layer_of(named: dict[str, Any], transposed: bool, act: Any, formats: Formats) -> Any:
    """The weights of a call, its tensors given by their names in TENSORS and its formats by
    their names, as kernels take them."""
    from moe_ops.kernels.triton import Act
    from moe_ops.kernels.triton.experts.formats.codes import Codes, as_stored, scales_as_stored
    from moe_ops.kernels.triton.experts.weights import Experts

    codes, (weight, inputs, scaled, dtype) = None, formats_of(*formats)
    if weight is not None:
        named |= {n: as_stored(named[n], weight) for n in ("w13_EFD", "w2_EDI")}
        named |= {n: scales_as_stored(named[n], weight) for n in ("w13_scale_EFG", "w2_scale_EDG")}
        codes = Codes(
            **{n: named[n] for n in TENSORS[9:]},
            weight=weight,
            inputs=inputs,
            scaled=scaled,
            result=dtype,
        )
    held = {n: named[n] for n in ("w13_EFD", "w2_EDI", "b13_EF", "b2_ED")}
    return Experts(**held, transposed=transposed, act=Act(*act), codes=codes)


def _run_onto(kernel: str, call: ExpertsOntoCall, before: Before = None) -> Tensor:
    return run_experts(kernel, call.layer, call.residual_TD, before=before)


def emulates(kernel: str, call: ExpertsCall) -> bool:
    """Whether a backend emulates the inputs of a call; triton.grouped has a path for codes of some
    of them."""
    if inputs_of(call) is None or kernel != "grouped":
        return inputs_of(call) is not None
    codes = paths.BY_FORCED["triton.grouped/float8"]
    return (codes.refuses(call) or codes.is_slower(call)) is not None


def _register(
    kernel: str,
    supports: Supports,
    read: tuple[str, ...],
    priority: int,
    rows: Rows = ANY_NUMBER,
) -> None:
    """A backend of experts, alone and onto a residual."""
    given: dict[str, Any] = {"devices": ("cuda",), "priority": priority}
    computes = functools.partial(paths.arithmetic_of_backend, kernel)
    of_tokens = {**given, "reads": (*read, *reads.CODES), "supports": supports, "rows": rows}

    def run(call: ExpertsCall) -> Tensor:
        return run_experts(kernel, call)

    experts.backend(f"triton.{kernel}", arithmetic=computes, **of_tokens)(run)
    by_kernel = functools.partial(emulates, kernel)
    experts.emulates(f"triton.{kernel}", by_kernel)
    experts.remembers(f"triton.{kernel}")
    experts.rounds(f"triton.{kernel}", whole_rows)

    def supports_onto(call: ExpertsOntoCall) -> str | None:
        if needs_grad(call.residual_TD):
            return "is not differentiable, and an argument requires grad"
        return supports(call.layer)

    def run_onto(call: ExpertsOntoCall) -> Tensor:
        return _run_onto(kernel, call)

    rows = Rows(preferred=_of_layer(rows.preferred), possible=_of_layer(rows.possible))
    onto = {**given, "reads": read, "supports": supports_onto, "rows": rows}
    computes = _of_layer(computes)
    experts_onto.backend(f"triton.{kernel}", arithmetic=computes, **onto)(run_onto)
    experts_onto.emulates(f"triton.{kernel}", _of_layer(by_kernel))
    _register_paths(kernel)


def _register_paths(kernel: str) -> None:
    """The paths of a backend, of both ops, and what it tells of them."""
    backend = f"triton.{kernel}"
    for path in paths.paths_of(kernel):
        name = path.forced.removeprefix("triton.")

        def run(call: ExpertsCall, name: str = name) -> Tensor:
            return run_experts(name, call)

        def run_onto(call: ExpertsOntoCall, name: str = name) -> Tensor:
            return _run_onto(name, call)

        asked: dict[str, Any] = {
            "refusal": path.refusal,
            "most": path.most,
            "arithmetic": _of_path(path),
        }
        experts.path(backend, path.forced, run, **asked)
        onto = {name: _of_layer(asks) for name, asks in asked.items()}
        experts_onto.path(backend, path.forced, run_onto, **onto)
    for name in (backend, *(path.forced for path in paths.paths_of(kernel))):
        of = name.removeprefix("triton.")
        compiles_ahead(experts, name, functools.partial(run_experts, of))
        compiles_ahead(experts_onto, name, functools.partial(_run_onto, of))
    experts.tells(backend, functools.partial(paths.told, kernel))
    experts_onto.tells(backend, lambda call: paths.told(kernel, call.layer))


def _of_path(path: paths.Path) -> Arithmetic:
    """The arithmetic of a path that is asked for by its name."""

    def named(call: ExpertsCall) -> str:
        why = refuse_dynamic(call)
        return path.computes(call) if why is None else Refused(why)

    return named


def _of_layer(asked: Callable[[ExpertsCall], Any] | None) -> Any:
    """What asks the layer of a call onto a residual."""
    return None if asked is None else lambda call: asked(call.layer)


def _most_tiny(call: ExpertsCall) -> int:
    """The most tokens that triton.tiny can run: if rows are to have the same bits in any number,
    one."""
    return 1 if INVARIANT.get() else max_tiny_tokens(call)


TINY = Rows(preferred=most_tiny_tokens, possible=_most_tiny)
_register("tiny", supports_tiny, reads.SCALED_EXPERTS, 3, TINY)
_register("rows", supports_codes, reads.SCALED_EXPERTS, 2, Rows(preferred=most_rows_tokens))
_register("grouped", supports_many, reads.SCALED_EXPERTS, 1)
