"""The Triton backends of a decoding step's ops beside its experts, for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.triton_ahead import begins_alone
from moe_ops.backends.triton_arithmetic import IN_ORDER, placed
from moe_ops.backends.triton_device import refuse_device
from moe_ops.decode_ops.convolution_step import ConvolutionStepCall, convolution_step
from moe_ops.decode_ops.delta_rule import DeltaRuleCall, delta_rule
from moe_ops.decode_ops.delta_rule_step import EPS, DeltaRuleStepCall, delta_rule_step
from moe_ops.decode_ops.linears import LinearsCall, linears
from moe_ops.decode_ops.normed_linears import NormedLinearsCall, normed_linears
from moe_ops.decode_ops.one_query import OneQueryCall, one_query
from moe_ops.decode_ops.one_query_latents import OneQueryLatentsCall, one_query_latents
from moe_ops.decode_ops.rope_attention import RopeAttentionCall, rope_attention
from moe_ops.decode_ops.state_space_scan import StateSpaceScanCall, state_space_scan
from moe_ops.decode_ops.state_space_step import StateSpaceStepCall, state_space_step
from moe_ops.kernels.triton.decode.latents_plan import MOST_SLOTS
from moe_ops.kernels.triton.decode.states_plan import MOST_WIDTH
from moe_ops.registry.gradients import grad_wanted
from moe_ops.registry.invariance import INVARIANT, Arithmetic, Refused, unknown
from moe_ops.registry.spec import Op

# Of attention the slots of a program are so many from the first that is seen on; of layers with a
# state a program has some channels of a sequence's head, whatever other sequences there are.
SPANS, A_HEAD = "spans of slots in their order", "channels by themselves"
OVER_LATENTS = "its programs share slots by the number of sequences, and by where these begin"


def supports(call: Any) -> str | None:
    """Why kernels cannot run a call of one of these ops, or None."""
    given = [getattr(call, field.name) for field in fields(call)]
    if grad_wanted(tuple(given), {}):
        return "is not differentiable, and an argument requires grad"
    return refuse_device(given[0])


def _kernels(
    op: Op, supports: Callable[[Any], str | None] = supports, arithmetic: Arithmetic = unknown
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    register = op.backend(
        "triton", reads=op.optional, supports=supports, devices=("cuda",), priority=1,
        arithmetic=arithmetic,
    )  # fmt: skip

    def of(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        register(run)
        begins_alone(op, "triton", run)
        return run

    return of


def supports_state(call: Any) -> str | None:
    """Why kernels cannot run a layer that keeps a state, for one token or a prompt, or None."""
    given = [getattr(call, field.name) for field in fields(call)]
    if isinstance(call, (DeltaRuleCall, DeltaRuleStepCall)):
        key, k, v, g, _, state = given[:6]
        dense = {"q": key, "k": k, "v": v, "g": g if g.dim() == key.dim() else None}
    else:
        x, _, a, key, c, state = given[:6]
        dense = {"x": x, "a": a, "b": key, "c": c, "skip": call.skip_H, "dt_bias": call.dt_bias_H}
    if key.shape[-1] > MOST_WIDTH:
        return f"holds {MOST_WIDTH} numbers of a key, got {key.shape[-1]}"
    if state is not None and not state.is_contiguous():
        return f"the state has the strides {state.stride()}; make it contiguous"
    for name, t in dense.items():
        if t is not None and t.stride(-1) != 1 and t.shape[-1] != 1:
            return f"{name} has the strides {t.stride()}; make its last axis contiguous"
    return supports(call)


def supports_convolution(call: ConvolutionStepCall) -> str | None:
    """Why kernels cannot run one token of a convolution, or None."""
    dense = {"state": call.state_BDW, "weight": call.weight_DW, "bias": call.bias_D}
    for name, t in dense.items():
        if t is not None and not t.is_contiguous():
            return f"the {name} has the strides {t.stride()}; make it contiguous"
    if call.x_BD.stride(1) != 1:
        return f"x has the strides {call.x_BD.stride()}; make its rows contiguous"
    return supports(call)


def _changed(t: Tensor) -> None:
    """Show autograd that a kernel wrote to a tensor."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


@_kernels(linears, arithmetic=lambda call: IN_ORDER)
def launch_linears(call: LinearsCall) -> list[Tensor]:
    from moe_ops.kernels.triton.decode.linears import run

    invariant = INVARIANT.get()
    if invariant:
        call = replace(call, x_TK=placed(call.x_TK))
    return run(*linears.arguments.flat(call), invariant=invariant)


@_kernels(normed_linears, arithmetic=lambda call: IN_ORDER)
def launch_normed(call: NormedLinearsCall) -> list[Tensor]:
    from moe_ops.kernels.triton.decode.linears import run_normed

    invariant = INVARIANT.get()
    if invariant:
        call = with_rows_placed(call)
    return run_normed(*normed_linears.arguments.flat(call), invariant=invariant)


def with_rows_placed(call: Any) -> Any:
    """A call of normed layers whose rows lie as those of an invariant call do."""
    residual_TK = None if call.residual_TK is None else placed(call.residual_TK)
    return replace(call, x_TK=placed(call.x_TK), residual_TK=residual_TK)


@_kernels(one_query, arithmetic=lambda call: SPANS)
def launch_attention(call: OneQueryCall) -> Tensor:
    from moe_ops.kernels.triton.decode.one_query import attend

    out: Tensor = attend(*one_query.arguments.flat(call), invariant=INVARIANT.get())
    return out


def supports_latents(call: OneQueryLatentsCall) -> str | None:
    """Why kernels cannot run a call of `one_query_latents`, or None."""
    reason = supports(call)
    if reason is not None:
        return reason
    slots = (call.mask_BS if call.indices_BC is None else call.indices_BC).shape[1]
    if slots > MOST_SLOTS:
        return f"needs at most {MOST_SLOTS} slots to look at, got {slots}"
    R, D = call.latents_BSR.shape[2], call.rotated_BSD.shape[2]
    if not 16 <= R <= 512 or R & (R - 1):
        return f"needs latents of a power of two from 16 to 512, got {R}"
    if (D and not 16 <= D <= 256) or D & (D - 1):
        return f"needs rotated keys of none, or of a power of two from 16 to 256, got {D}"
    return None


@_kernels(one_query_latents, supports_latents, lambda call: Refused(OVER_LATENTS))
def launch_latents(call: OneQueryLatentsCall) -> Tensor:
    from moe_ops.kernels.triton.decode.latents import attend

    out: Tensor = attend(*one_query_latents.arguments.flat(call))
    return out


@_kernels(rope_attention, arithmetic=lambda call: SPANS)
def launch_rope(call: RopeAttentionCall) -> Tensor:
    """What reads the caches behind it for autograd is to see that they changed."""
    from moe_ops.kernels.triton.decode.rope_attention import run

    out: Tensor = run(*rope_attention.arguments.flat(call), invariant=INVARIANT.get())
    for cache in (call.keys_BNSD, call.values_BNSD):
        _changed(cache)
    return out


@_kernels(delta_rule, supports_state, lambda call: A_HEAD)
def launch_delta_rule(call: DeltaRuleCall) -> tuple[Tensor, Tensor]:
    from moe_ops.kernels.triton.decode.scans import scan_delta_rule

    out: tuple[Tensor, Tensor] = scan_delta_rule(*delta_rule.arguments.flat(call), eps=EPS)
    return out


@_kernels(delta_rule_step, supports_state, lambda call: A_HEAD)
def launch_delta_rule_step(call: DeltaRuleStepCall) -> Tensor:
    from moe_ops.kernels.triton.decode.states import step_delta_rule

    out: Tensor = step_delta_rule(*delta_rule_step.arguments.flat(call), eps=EPS)
    _changed(call.state_BHDV)
    return out


@_kernels(state_space_step, supports_state, lambda call: A_HEAD)
def launch_state_space_step(call: StateSpaceStepCall) -> Tensor:
    from moe_ops.kernels.triton.decode.states import step_state_space

    out: Tensor = step_state_space(*state_space_step.arguments.flat(call))
    _changed(call.state_BHVD)
    return out


@_kernels(state_space_scan, supports_state, lambda call: A_HEAD)
def launch_state_space(call: StateSpaceScanCall) -> tuple[Tensor, Tensor]:
    from moe_ops.kernels.triton.decode.scans import scan_state_space

    out: tuple[Tensor, Tensor] = scan_state_space(*state_space_scan.arguments.flat(call))
    return out


@_kernels(convolution_step, supports_convolution, lambda call: A_HEAD)
def launch_convolution(call: ConvolutionStepCall) -> Tensor:
    from moe_ops.kernels.triton.decode.states import step_convolution

    out: Tensor = step_convolution(*convolution_step.arguments.flat(call))
    _changed(call.state_BDW)
    return out
