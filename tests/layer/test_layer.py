"""MoELayer: what it computes, against plain loops; its state, its text, how parts are joined."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import moe_ops
from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.ops import route
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant import packing
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import BF16, Tol, assert_close
from tests.distributed.ranks import spawn
from tests.layer.shards import Split, pair, randomize, take_share

LOOSE = Tol(1e-5, "float32 sums in another order")
SIZES: dict[str, Any] = {
    "num_experts": 6, "top_k": 2, "hidden_size": 32, "intermediate_size": 16,
}  # fmt: skip
ONE = {**SIZES, "top_k": 1}


def by_hand(layer: MoELayer, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Every token through its experts in a loop, silu or as gpt-oss; fused shared ones too."""
    act, out = layer.activation, torch.zeros_like(x)
    for t in range(x.shape[0]):
        ids = [*experts[t].tolist(), *range(layer.num_experts, layer.sizes.E)]
        factors = [*weights[t], *torch.ones(layer.placement.shared)]
        for e, w in zip(ids, factors, strict=True):
            given = x[t] * w if layer.routing.weight_on_input else x[t]
            y = layer.w13_weight[e] @ given
            y = y if layer.w13_bias is None else y + layer.w13_bias[e]
            if not act.gated:
                h = F.silu(y)
            else:
                gate, up = (y[::2], y[1::2]) if act.interleaved else y.chunk(2)
                h = F.silu(gate) * (up + act.up_shift)
            y = layer.w2_weight[e] @ h
            y = y if layer.w2_bias is None else y + layer.w2_bias[e]
            out[t] += y if layer.routing.weight_on_input else y * w
    return out


CASES: dict[str, dict[str, Any]] = {
    "plain": {**SIZES},
    "renormalised": {**SIZES, "routing": Routing(renormalize=True, scale=2.5)},
    "grouped": {
        **SIZES,
        "routing": Routing(score="sigmoid", n_group=3, topk_group=1, correction_bias=True),
    },
    "on_input": {**ONE, "routing": Routing(score="sigmoid", weight_on_input=True)},
    "bias": {**SIZES, "bias": True},
    "ungated": {**SIZES, "bias": True, "activation": Activation(kind="silu", gated=False)},
    "interleaved": {
        **SIZES,
        "activation": Activation(kind="silu", interleaved=True, up_shift=1.0),
    },
    "shared": {**SIZES, "shared_experts": 2, "bias": True},
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_layer_computes_its_definition(options: dict[str, Any]) -> None:
    layer = randomize(MoELayer(**options))
    x, logits = torch.randn(3, 4, 32), torch.randn(3, 4, 6)
    routed = route(logits.view(12, 6), layer.top_k, layer.correction_bias, **layer.routing.options)
    with torch.no_grad():
        assert_close(layer(x, logits).view(12, 32), by_hand(layer, x.view(12, 32), *routed), LOOSE)


def test_a_gate_of_its_own() -> None:
    layer = randomize(MoELayer(**SIZES, internal_gate=True))
    x = torch.randn(5, 32)
    assert layer.gate.weight.shape == (6, 32)
    with torch.no_grad():
        got = layer(x)
        gate, layer.gate = layer.gate, None
        assert torch.equal(got, layer(x, gate(x)))
    given = nn.Linear(32, 6, bias=True)
    assert MoELayer(**SIZES, internal_gate=given).gate is given


def last_experts(x_TD: Tensor, logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    E = logits_TE.shape[1]
    ids_TK = torch.arange(E - top_k, E, dtype=torch.int32).expand(x_TD.shape[0], top_k)
    return x_TD[:, :top_k].contiguous(), ids_TK


def test_a_custom_routing_function_sees_tokens_and_logits() -> None:
    layer = randomize(MoELayer(**SIZES, routing=Routing(custom=last_experts)))
    x, logits = torch.randn(5, 32), torch.randn(5, 6)
    with torch.no_grad():
        assert_close(
            layer(x, logits), by_hand(layer, x, *last_experts(x, logits, layer.top_k)), LOOSE
        )


def test_the_input_transform_is_for_routed_experts_alone() -> None:
    seen: list[Tensor] = []

    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return torch.zeros(len(x), 32)

    gate, down = nn.Linear(48, 6), nn.Linear(48, 32)
    layer = randomize(
        MoELayer(**SIZES, internal_gate=gate, routed_input_transform=down, shared_experts=Shared())
    )
    x = torch.randn(5, 48)
    with torch.no_grad():
        want = by_hand(layer, down(x), *route(gate(x), 2))
        assert_close(layer(x), want, LOOSE)
    assert torch.equal(seen[0], x)


def test_rounded_sizes_are_not_seen_outside() -> None:
    plain = randomize(MoELayer(**SIZES, bias=True))
    wide = MoELayer(**SIZES, bias=True, hidden_multiple=40, intermediate_multiple=24)
    take_share(plain, wide)
    assert wide.w13_weight.shape == (6, 48, 40)
    assert wide.w2_weight.shape == (6, 40, 24)
    x, logits = torch.randn(5, 32), torch.randn(5, 6)
    with torch.no_grad():
        assert_close(wide(x, logits), plain(x, logits), LOOSE)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_new_layer_is_random_and_zero_where_sizes_were_rounded_up(interleaved: bool) -> None:
    activation = Activation(kind="silu", interleaved=interleaved)
    layer = MoELayer(
        **SIZES, bias=True, hidden_multiple=40, intermediate_multiple=24, activation=activation
    )
    x, logits = torch.randn(5, 32), torch.randn(5, 6)
    with torch.no_grad():
        small = MoELayer(**SIZES, bias=True, activation=activation)
        axis = 2 if interleaved else 1
        rows = layer.w13_weight.unflatten(1, (24, 2) if interleaved else (2, 24))
        inner = rows.narrow(1 if interleaved else 2, 0, 16)
        assert inner.count_nonzero() == inner[..., :32].count_nonzero() == 6 * 2 * 16 * 32
        assert layer.w13_weight.count_nonzero() == inner.count_nonzero(), axis
        small.w13_weight.copy_(inner[..., :32].flatten(1, 2))
        bias = layer.w13_bias.unflatten(1, (24, 2) if interleaved else (2, 24))
        small.w13_bias.copy_(bias.narrow(1 if interleaved else 2, 0, 16).flatten(1, 2))
        small.w2_weight.copy_(layer.w2_weight[:, :32, :16])
        small.w2_bias.copy_(layer.w2_bias[:, :32])
        assert layer.w2_weight.count_nonzero() == 6 * 32 * 16
        assert_close(layer(x, logits), small(x, logits), LOOSE)


@pytest.mark.parametrize(
    "quant",
    [
        "mxfp4_w4a16",
        "nvfp4_w4a4",
        QuantConfig(weights="int4:1x16"),
        QuantConfig(weights="uint4:1x16"),
        QuantConfig(weights="float8_e4m3fn:16x16", inputs="float8_e4m3fn:1x16"),
        QuantConfig(weights="int8:tensor", inputs="int8:tensor", static_inputs=True),
    ],
    ids=str,
)
def test_a_new_quantized_layer_is_zero(quant: str | QuantConfig) -> None:
    layer = MoELayer(6, 2, 32, 32, quant=quant, internal_gate=True)
    with torch.no_grad():
        assert not layer(torch.randn(5, 32)).any()
    assert not any(p.requires_grad for n, p in layer.named_parameters() if n != "gate.weight")


def test_static_nvfp4_inputs_are_multiplied_in() -> None:
    formats = QuantConfig(weights="nvfp4", inputs="nvfp4", static_inputs=True)
    layer = randomize(MoELayer(6, 2, 64, 64, quant=formats))
    plain = MoELayer(6, 2, 64, 64)
    with torch.no_grad():
        for w in ("w13", "w2"):
            decoded = packing.dequantize(
                getattr(layer, f"{w}_weight"), getattr(layer, f"{w}_scale"), formats.format,
                global_scale=getattr(layer, f"{w}_global_scale"),
            )  # fmt: skip
            getattr(plain, f"{w}_weight").copy_(decoded)
        x, logits = torch.randn(9, 64), torch.randn(9, 6)
        want, got = plain(x, logits), layer(x, logits)
    assert (got - want).norm() < 0.2 * want.norm()  # four bits


def test_gradients_are_those_of_the_loops() -> None:
    layer = randomize(MoELayer(**SIZES, bias=True, internal_gate=True))
    x = torch.randn(5, 32)
    names = ["w13_weight", "w2_weight", "w13_bias", "w2_bias", "gate.weight"]
    params = [layer.get_parameter(name) for name in names]
    got = torch.autograd.grad(layer(x).square().sum(), params)
    probability = layer.gate(x).softmax(-1)
    experts = probability.topk(2).indices
    out = by_hand(layer, x, probability.gather(1, experts), experts)
    want = torch.autograd.grad(out.square().sum(), params)
    for name, g, w in zip(names, got, want, strict=True):
        assert_close(g, w, LOOSE, name)


def test_bfloat16() -> None:
    layer = randomize(MoELayer(**SIZES, dtype=BF16, internal_gate=True))
    x = torch.randn(5, 32, dtype=BF16)
    with torch.no_grad():
        got, want = layer(x), layer.float()(x.float())
    assert got.dtype is BF16
    assert_close(got, want, Tol(3e-2, "a few roundings"))


def test_state_goes_to_another_layer_and_into_a_copy() -> None:
    options = {**SIZES, "bias": True, "redundant_experts": 2, "internal_gate": True,
               "quant": "mxfp4_w4a16", "hidden_size": 64, "intermediate_size": 32}  # fmt: skip
    layer = randomize(MoELayer(**options))
    x = torch.randn(5, 64)
    other = MoELayer(**options)
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        for same in (other, copy.deepcopy(layer)):
            assert torch.equal(same(x), layer(x))
    assert "expert_map" not in layer.state_dict()
    assert {"w13_scale", "physical_to_logical", "replica_counts"} <= layer.state_dict().keys()


def test_a_layer_without_memory_is_given_some_and_reset() -> None:
    rank = ParallelConfig.of(tp=2, tp_rank=1, expert_parallel=True)
    options = {**SIZES, "parallel": rank, "balanced": True, "bias": True}
    layer = MoELayer(**options, device="meta")
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    with torch.device("meta"):
        assert MoELayer(**options).expert_map.is_meta
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.expert_map.tolist() == [-1, -1, -1, 0, 1, 2]
    assert layer.physical_to_logical.tolist() == [0, 1, 2, 3, 4, 5]
    assert layer.w13_weight.abs().amax() <= 32**-0.5
    assert layer(torch.randn(5, 32), torch.randn(5, 6)).isfinite().all()


def test_expert_tensors_are_what_has_one_entry_a_slot() -> None:
    rank = ParallelConfig.of(tp=4, tp_rank=3, expert_parallel=True)
    formats = QuantConfig(weights="nvfp4", inputs="nvfp4", static_inputs=True)
    layer = MoELayer(6, 2, 64, 64, quant=formats, bias=True, parallel=rank, shared_experts=1)
    found = layer.expert_tensors()
    assert set(found) == {
        f"{w}_{what}" for w in ("w13", "w2") for what in ("weight", "scale", "global_scale", "bias")
    }
    assert {t.shape[0] for t in found.values()} == {2}
    found["w2_bias"][1] = 7.0
    assert layer.w2_bias[1].eq(7).all()


def test_text_of_a_batch_invariant_layer() -> None:
    plain, made = (MoELayer(**SIZES, batch_invariant=wanted) for wanted in (False, True))
    assert made.extra_repr() == f"{plain.extra_repr()}\nbatch_invariant=True"


def test_the_facade_has_it() -> None:
    assert (moe_ops.MoELayer, moe_ops.Routing) == (MoELayer, Routing)


def test_text() -> None:
    rank = ParallelConfig.of(tp=4, tp_rank=1, expert_parallel=True)
    routing = Routing(score="sigmoid", correction_bias=True, n_group=4, topk_group=2, scale=2.5)
    layer = MoELayer(
        32, 4, 64, 96, routing=routing, quant="mxfp4_w4a16", parallel=rank, shared_experts=1,
        redundant_experts=2, bias=True, internal_gate=True,
    )  # fmt: skip
    assert_expected_inline(
        repr(layer),
        """\
MoELayer(
  top 4 of 32 experts: sigmoid + correction bias in 2 of 4 groups x 2.5
  64 -> 96 -> 64, silu, gated, bias
  weights: mxfp4_w4a16 (mxfp4), 0.1 MiB on this rank
  ep 1/4 = tp 1/4, allgather_reducescatter
  rank 1/4 holds 9 of 34 experts (2 redundant), linear: 9-17; 1 shared in every rank
  (gate): Linear(in_features=64, out_features=32, bias=False)
)""",
    )


def test_text_of_a_shard() -> None:
    rank = ParallelConfig.of(dp=2, tp=2, tp_rank=1)
    layer = MoELayer(**SIZES, parallel=rank, hidden_multiple=64, intermediate_multiple=8)
    assert_expected_inline(
        layer.extra_repr(),
        """\
top 2 of 6 experts: softmax
32 -> 16 -> 32, held as 64 -> 8 -> 64, 8 of 16 from 8 on, silu, gated
weights: float32, 0.0 MiB on this rank
tp 1/4 = dp 0/2 x tp 1/2, allgather_reducescatter
all 6 experts on each rank, a shard of every one""",
    )


def test_a_function_reduces_the_routed_part_and_partial_shared_experts() -> None:
    calls: list[Tensor] = []

    def double(part: Tensor) -> Tensor:
        calls.append(part)
        return 2 * part

    shared, x, logits = nn.Linear(32, 32), torch.randn(5, 32), torch.randn(5, 6)
    layer = randomize(MoELayer(**SIZES, reduce_results=double, shared_experts=shared))
    alone = take_share(layer, MoELayer(**SIZES))
    with torch.no_grad():
        routed = alone(x, logits)
        assert_close(layer(x, logits), 2 * (routed + shared(x)), LOOSE)
        layer.shared_reduction = "replicated"
        assert_close(layer(x, logits), 2 * routed + shared(x), LOOSE)
    assert len(calls) == 2


def rank_main(rank: int, folder: Path) -> None:
    """One process of two: its part, all-reduced, is the whole on every rank."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    whole = randomize(MoELayer(**SIZES, bias=True))
    x, logits, shared = torch.randn(5, 32), torch.randn(5, 6), nn.Linear(32, 32)
    for ep in (False, True):
        parallel = list(Split(name="two", tp=2, ep=ep).ranks())[rank]
        layer = MoELayer(
            **SIZES, bias=True, parallel=parallel, shared_experts=shared,
            shared_reduction="replicated", reduce_results=dist.group.WORLD.group_name,
        )  # fmt: skip
        take_share(whole, layer)
        with torch.inference_mode():
            want = whole(x, logits) + shared(x)
            assert_close(layer(x, logits), want, LOOSE)
            assert type(layer(x, logits)) is Tensor
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            assert_close(compiled(x, logits), want, LOOSE)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_reduce_by_name(tmp_path: Path) -> None:
    spawn(rank_main, (tmp_path,), 2)


def test_one_process_group_of_one_rank(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        name = dist.group.WORLD.group_name
        (layer,) = pair(Split(name="one"), **SIZES, reduce_results=name)[1]
        x, logits = torch.randn(5, 32), torch.randn(5, 6)
        with torch.no_grad():
            exported = torch.export.export(layer, (x, logits))
            got = layer(x, logits)
            layer.reduce_results = None
            assert torch.equal(got, layer(x, logits))
    finally:
        dist.destroy_process_group()
    assert "sum_ranks" in str(exported.graph)
