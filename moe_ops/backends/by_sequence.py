"""Ops of a decoding step on CPUs where calls have to be batch invariant: the definition of each
sequence by itself, so that nothing it computes knows of the others.

Sequences are copied: how libraries sum may depend on where in its memory a tensor begins.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from moe_ops.decode_ops.convolution_step import ConvolutionStepCall, convolution_step
from moe_ops.decode_ops.delta_rule import DeltaRuleCall, delta_rule
from moe_ops.decode_ops.delta_rule_step import DeltaRuleStepCall, delta_rule_step
from moe_ops.decode_ops.one_query import OneQueryCall, formula, one_query
from moe_ops.decode_ops.state_space_scan import StateSpaceScanCall, state_space_scan
from moe_ops.decode_ops.state_space_step import StateSpaceStepCall, state_space_step
from moe_ops.registry.gradients import grad_wanted
from moe_ops.registry.spec import Op

NAME = "by_sequence"


def supports(call: Any) -> str | None:
    """Why a call is not run one sequence after the other, or None."""
    if grad_wanted(tuple(getattr(call, field.name) for field in fields(call)), {}):
        return "is not differentiable, and an argument requires grad"
    return None


def arithmetic(call: Any) -> str:
    """How a sequence is computed: as if it were alone."""
    return NAME


def options(op: Op) -> dict[str, Any]:
    """What all these backends have in common."""
    return {
        "reads": op.optional, "supports": supports, "devices": ("cpu",), "priority": 2,
        "arithmetic": arithmetic,
    }  # fmt: skip


def one_by_one(op: Op, call: Any, sequences: int) -> list[Any]:
    """The results of an op's definition for each sequence, which writes to states as the op does.
    Tensors with a B among the letters of their names have as many rows as there are sequences."""
    if not sequences:
        return [op.body(call)]
    rows = [f.name for f in fields(call) if "B" in f.name.rpartition("_")[2]]
    given = {name: t for name in rows if isinstance(t := getattr(call, name), Tensor)}
    results = []
    for b in range(sequences):
        own = {name: t[b : b + 1].clone() for name, t in given.items()}
        results.append(op.body(replace(call, **own)))
        for name in op.arguments.mutated:
            given[name][b : b + 1].copy_(own[name])
    return results


@convolution_step.backend(NAME, **options(convolution_step))
def convolve(call: ConvolutionStepCall) -> Tensor:
    """`convolution_step` of one sequence after the other."""
    return torch.cat(one_by_one(convolution_step, call, len(call.x_BD)))


@delta_rule_step.backend(NAME, **options(delta_rule_step))
def step_by_delta_rule(call: DeltaRuleStepCall) -> Tensor:
    """`delta_rule_step` of one sequence after the other."""
    return torch.cat(one_by_one(delta_rule_step, call, len(call.q_BND)))


@delta_rule.backend(NAME, **options(delta_rule))
def scan_by_delta_rule(call: DeltaRuleCall) -> tuple[Tensor, Tensor]:
    """`delta_rule` of one sequence after the other."""
    results = one_by_one(delta_rule, call, len(call.q_BTND))
    return torch.cat([out for out, _ in results]), torch.cat([state for _, state in results])


@state_space_step.backend(NAME, **options(state_space_step))
def step_state_space(call: StateSpaceStepCall) -> Tensor:
    """`state_space_step` of one sequence after the other."""
    return torch.cat(one_by_one(state_space_step, call, len(call.x_BHV)))


@state_space_scan.backend(NAME, **options(state_space_scan))
def scan_state_space(call: StateSpaceScanCall) -> tuple[Tensor, Tensor]:
    """`state_space_scan` of one sequence after the other."""
    results = one_by_one(state_space_scan, call, len(call.x_BTHV))
    return torch.cat([out for out, _ in results]), torch.cat([state for _, state in results])


@one_query.backend(NAME, **options(one_query))
def attend(call: OneQueryCall) -> Tensor:
    """`one_query` of one sequence after the other, over the slots that it sees: how many there are
    beside them, and where they lie, is nothing to it."""
    q_BHD, mask_BS, outs = call.q_BHD, call.mask_BS, []
    shared = len(q_BHD) // len(call.k_BNSD)
    for b in range(len(q_BHD)):
        at_S = seen(mask_BS[b])
        k_NSD, v_NSD = (t[b // shared].index_select(1, at_S) for t in (call.k_BNSD, call.v_BNSD))
        mask_1S = mask_BS[b].index_select(0, at_S)[None]
        q_1HD = q_BHD[b : b + 1].clone()
        outs.append(formula(q_1HD, k_NSD[None], v_NSD[None], mask_1S, call.scale, call.sinks_H))
    return torch.cat(outs)


def seen(mask_S: Tensor) -> Tensor:
    """The slots that a mask does not hide."""
    if mask_S.dtype != torch.bool:
        mask_S = mask_S > torch.finfo(mask_S.dtype).min / 2
    return mask_S.nonzero()[:, 0]


for op in (
    convolution_step, delta_rule_step, delta_rule, state_space_step, state_space_scan, one_query,
):  # fmt: skip
    op.keeps_for_invariant(NAME)
