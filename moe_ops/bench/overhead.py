"""What calling an op costs beyond running its backend: validation, the dispatcher, the choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.decode_ops import (
    convolution_step,
    delta_rule,
    delta_rule_step,
    experts_onto,
    linears,
    normed_linears,
    normed_quantized_linears,
    one_query,
    one_query_latents,
    quantized_linears,
    rope_attention,
    state_space_scan,
    state_space_step,
)
from moe_ops.ops import (
    activate,
    activate_backward,
    combine,
    combine_tokens,
    dispatch,
    dispatch_tokens,
    expert_gemm,
    expert_loads,
    expert_wgrad,
    expert_wgrad_onto,
    experts,
    experts_accumulating,
    experts_adapted,
    experts_adapted_backward,
    experts_adapted_saving,
    experts_backward,
    experts_batched,
    experts_over_ranks,
    experts_saving,
    moe,
    quantize,
    route,
    route_recording,
    route_replaying,
    sum_ranks,
)
from moe_ops.registry.spec import Op
from moe_ops.testing import Case, make_layer

ROUNDS, CALLS = 25, 400
TINY = Case(name="tiny", T=1, E=8, K=2, D=16, I=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Microseconds per call of one op on tiny CPU tensors."""

    op: str
    backend: str
    body_us: float  # the backend's function, called directly
    call_us: float  # the op
    validation_us: float  # the part of the difference that checks the arguments, if every call does

    @property
    def dispatch_us(self) -> float:
        return self.call_us - self.body_us - self.validation_us


def calls() -> dict[Op, tuple[Any, ...]]:
    """One call of each op of a layer on the smallest sensible one."""
    layer = make_layer(TINY)
    x_RD, rows_R, ends_E = dispatch(layer.x_TD, layer.ids_TK, 8)
    y_RF = expert_gemm(x_RD, layer.w13_EFD, ends_E)
    y_RD = expert_gemm(activate(y_RF), layer.w2_EDI, ends_E)
    weights = (layer.w13_EFD, layer.w2_EDI)
    adapter = (torch.ones(1), torch.ones(8, 4, TINY.D), torch.ones(8, 2 * TINY.I, 4))
    tables = (torch.zeros(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32))
    sent = (layer.x_TD, layer.weights_TK, layer.ids_TK)
    _, _, _, _, *handle = dispatch_tokens(*sent, *tables, 1)
    return {
        route: (layer.logits_TE, 2),
        route_recording: (
            layer.logits_TE,
            2,
            layer.ids_TK[:, :2].to(torch.int16).contiguous(),
            torch.zeros(1, dtype=torch.int64),
        ),
        route_replaying: (layer.logits_TE, 2, layer.ids_TK[:, :2].to(torch.int16).contiguous()),
        quantize: (layer.x_TD,),
        dispatch: (layer.x_TD, layer.ids_TK, 8),
        expert_gemm: (x_RD, layer.w13_EFD, ends_E),
        activate: (y_RF,),
        combine: (y_RD, layer.weights_TK, rows_R),
        experts: (layer.x_TD, layer.weights_TK, layer.ids_TK, *weights),
        moe: (layer.x_TD, layer.logits_TE, *weights, 2),
        expert_loads: (layer.ids_TK, 8),
        dispatch_tokens: (*sent, *tables, 1),
        combine_tokens: (layer.x_TD, layer.ids_TK, *tables, *handle, 1),
        experts_over_ranks: (*sent, *weights, *tables, 1),
        sum_ranks: (layer.x_TD,),
        experts_batched: (layer.x_TD.expand(8, -1, -1).contiguous(), ends_E, *weights),
        experts_saving: (*sent, *weights),
        experts_accumulating: (*sent, *weights),
        experts_backward: (layer.x_TD, y_RF, rows_R, ends_E, *sent, *weights),
        experts_adapted: (*sent, *weights, *adapter),
        experts_adapted_saving: (*sent, *weights, *adapter),
        experts_adapted_backward: (layer.x_TD, y_RF, rows_R, ends_E, *sent, *weights, *adapter),
        activate_backward: (activate(y_RF), y_RF, layer.weights_TK, rows_R),
        expert_wgrad: (y_RF, x_RD, ends_E),
        expert_wgrad_onto: (y_RF, x_RD, ends_E, torch.zeros(8, y_RF.shape[1], x_RD.shape[1])),
    }


def decode_calls() -> dict[Op, tuple[Any, ...]]:
    """One call of each op of a decoding step, of one sequence in a cache of four slots."""
    layer = make_layer(TINY)
    tensors = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bfloat16)

    x_TK, gain, weights, biases = ones(1, 16), ones(16), [ones(8, 16), ones(8, 16)], [ones(8), None]
    q_BHD, k_BND, keys_BNSD, cos_BW = ones(1, 2, 16), ones(1, 1, 16), ones(1, 1, 4, 16), ones(1, 16)
    seen = (torch.ones(1, 4, dtype=torch.bool), 0.25)  # every slot, and the scale of scores
    turned = (q_BHD, k_BND, k_BND, cos_BW, cos_BW, torch.tensor([3]))
    return {
        linears: (x_TK, weights, biases),
        quantized_linears: (
            x_TK,
            [torch.ones(8, 16, dtype=torch.int8)],
            [torch.ones(8, 1)],
            *[[None]] * 3,
            "int8:row",
        ),
        normed_linears: (x_TK, x_TK, gain, 1e-6, weights, biases),
        normed_quantized_linears: (
            *(x_TK, x_TK, gain, 1e-6),
            [torch.ones(8, 16, dtype=torch.int8)],
            [torch.ones(8, 1)],
            *[[None]] * 3,
            "int8:row",
        ),
        one_query: (q_BHD, keys_BNSD, keys_BNSD, *seen),
        one_query_latents: (q_BHD, q_BHD, keys_BNSD[:, 0], keys_BNSD[:, 0], *seen),
        rope_attention: (*turned, keys_BNSD, keys_BNSD.clone(), *seen, gain, gain),
        experts_onto: (layer.x_TD, *tensors),
        **state_calls(),
    }


def state_calls() -> dict[Op, tuple[Any, ...]]:
    """One call of each op of layers that keep a state, of one sequence and one token."""
    q_BND, gates_BH, heads_H = torch.ones(1, 2, 16), torch.ones(1, 2), torch.ones(2)
    q_BTND, gates_BTH, state_BHDV = q_BND[None], gates_BH[None], torch.ones(1, 2, 16, 16)
    return {
        convolution_step: (heads_H[None], torch.ones(1, 2, 4), torch.ones(2, 4)),
        delta_rule_step: (q_BND, q_BND, q_BND, -gates_BH, gates_BH, state_BHDV, 0.25),
        delta_rule: (q_BTND, q_BTND, q_BTND, -gates_BTH, gates_BTH, state_BHDV, 0.25),
        state_space_step: (q_BND, gates_BH, -heads_H, q_BND, q_BND, state_BHDV),
        state_space_scan: (q_BTND, gates_BTH, -heads_H, q_BTND, q_BTND, state_BHDV, 0.0, 1.0),
    }


def fastest_us(*functions: Callable[[], Any]) -> list[float]:
    """The fastest round of each function, the rounds interleaved, in microseconds per call."""
    best = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            for _ in range(CALLS):
                function()
            best[i] = min(best[i], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def measure() -> list[Overhead]:
    """The overhead of every op in inference mode."""
    found = []
    with torch.inference_mode():
        for op, args in (calls() | decode_calls()).items():
            record = op.call(*args)
            backend = op.pick(record)
            body, call, validation = fastest_us(
                lambda run=backend.run, record=record: run(record),  # type: ignore[misc]
                lambda op=op, args=args: op(*args),  # type: ignore[misc]
                lambda op=op, record=record: op.check(record),  # type: ignore[misc]
            )
            found.append(
                Overhead(
                    op=op.name,
                    backend=backend.name,
                    body_us=body,
                    call_us=call,
                    validation_us=0.0 if op.memo.remembers else validation,
                )
            )
    return found


def table(found: list[Overhead]) -> str:
    head = (
        f"{'op':<26}{'backend':<11}{'body µs':>9}{'call µs':>9}{'dispatch µs':>13}{'checks µs':>11}"
    )
    lines = [
        f"{o.op:<26}{o.backend:<11}{o.body_us:>9.1f}{o.call_us:>9.1f}"
        f"{o.dispatch_us:>13.1f}{o.validation_us:>11.1f}"
        for o in found
    ]
    return "\n".join([head, *lines])
