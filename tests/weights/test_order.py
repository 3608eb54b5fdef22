"""Weights that were quantised in the order of their activations: loaded exactly, or refused."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant import packing
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.weights import LoadRecord, load_checkpoint, load_expert
from moe_ops.weights.layouts import gptq
from tests.chosen import in_turn, one_in, those_of
from tests.peak import Peak
from tests.weights.checkpoints import (
    GROUP,
    PREFIX,
    PROJECTIONS,
    D,
    E,
    I,
    codes,
    packed_config,
    scales,
    store,
)
from tests.weights.checkpoints import words as in_words

SPLITS = {
    "one": [ParallelConfig()],
    "tp2": [ParallelConfig.of(tp=2, tp_rank=r) for r in range(2)],
    "ep2": [ParallelConfig.of(tp=2, tp_rank=r, expert_parallel=True) for r in range(2)],
}
FORMATS = {  # what writes it: bits, symmetric, GPTQ or compressed-tensors
    "gptq_int4": (4, True, "gptq", "int4:1x32:float16"),
    "gptq_uint4": (4, False, "gptq", "uint4:1x32:float16"),
    "gptq_int8": (8, True, "gptq", "int8:1x32:float16"),
    "packed_uint4": (4, False, "packed", "uint4:1x32:float16"),
}
GATED, SPREAD = Activation(kind="silu"), Activation(kind="silu", interleaved=True)


def groups(g: torch.Generator, columns: int) -> Tensor:
    """A g_idx: each group has GROUP columns, of no order."""
    return (torch.randperm(columns, generator=g) // GROUP).int()


def matrix(
    g: torch.Generator, rows: int, g_idx: Tensor, bits: int, symmetric: bool, kind: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Entries and what they stand for, by the definition of g_idx."""
    columns, n = len(g_idx), len(g_idx) // GROUP
    q, s = codes(g, rows, columns, 2**bits), scales(g, rows, n)
    zero = codes(g, rows, n, 2**bits - 1) + 1
    if symmetric:
        zero = torch.full_like(zero, 2 ** (bits - 1))
    of = g_idx.long()
    value = (q - zero[:, of]).float() * s.float()[:, of]
    if kind == "gptq":
        return {
            "qweight": in_words(q, bits).T.contiguous(),
            "qzeros": in_words((zero - 1).T.contiguous(), bits),
            "scales": s.T.contiguous(),
            "g_idx": g_idx,
        }, value
    return {
        "weight_packed": in_words(q, bits),
        "weight_scale": s,
        "weight_shape": torch.tensor([rows, columns]),
        "weight_zero_point": in_words(zero.T.contiguous(), bits).T.contiguous(),
        "weight_g_idx": g_idx,
    }, value


def write(
    folder: Path,
    name: str,
    *,
    input_order: bool,
    alike: bool = True,
    D: int = D,
    I: int = I,  # noqa: E741
) -> dict[str, Tensor]:
    """A checkpoint whose w2 have orders of their own, and whose w13 have one, if any."""
    bits, symmetric, kind, _ = FORMATS[name]
    g = torch.Generator().manual_seed(3)
    entries: dict[str, Tensor] = {}
    values: dict[str, list[Tensor]] = {shard: [] for shard in PROJECTIONS}
    first = groups(g, D) if input_order else (torch.arange(D) // GROUP).int()
    for e in range(E):
        for shard, projection in PROJECTIONS.items():
            second = shard == "w2"
            g_idx = groups(g, I) if second else first
            if e == 2 and not second and not alike:
                g_idx = first.flip(0).contiguous()
            made, value = matrix(g, D if second else I, g_idx, bits, symmetric, kind)
            values[shard].append(value)
            for suffix, t in made.items():
                entries[f"{PREFIX}.experts.{e}.{projection}.{suffix}"] = t.clone()
    config = {"quant_method": "gptq", "bits": bits, "desc_act": True}
    store(folder, entries, config if kind == "gptq" else packed_config(bits))
    return {s: torch.stack(v) for s, v in values.items()}


def layer_of(name: str, *, ordered: bool, per_expert: bool = False, **more: Any) -> MoELayer:
    quant = QuantConfig(
        weights=FORMATS[name][3], ordered_input=ordered, per_expert_order=per_expert
    )
    return MoELayer(E, 2, D, I, quant=quant, dtype=torch.float32, **more)


def load(layer: MoELayer, folder: Path) -> Any:
    return load_checkpoint({PREFIX: layer}, folder, style="qwen", progress=False)


@in_turn(
    pytest.mark.parametrize("activation", [GATED, SPREAD], ids=["halves", "alternating"]),
    pytest.mark.parametrize("input_order", [True, False], ids=["input_ordered", "w2_alone"]),
    pytest.mark.parametrize("name", FORMATS),
)
def test_outputs_are_those_of_the_weights(
    name: str, input_order: bool, activation: Activation, tmp_path: Path
) -> None:
    v = write(tmp_path, name, input_order=input_order)
    plain = MoELayer(E, 2, D, I, dtype=torch.float32)
    x, logits = torch.randn(9, D), torch.randn(9, E)
    with torch.no_grad():
        plain.w13_weight.copy_(torch.cat((v["w1"], v["w3"]), 1))
        plain.w2_weight.copy_(v["w2"])
        want = plain(x, logits)
        for split in SPLITS.values():
            total = torch.zeros_like(want)
            for config in split:
                layer = layer_of(name, ordered=input_order, parallel=config, activation=activation)
                report = load(layer, tmp_path)
                assert report.complete, str(report)
                total += layer(x, logits)
            torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@in_turn(
    pytest.mark.parametrize("shared", [0, 1], ids=["routed", "shared"]),
    pytest.mark.parametrize("split", SPLITS),
    pytest.mark.parametrize("name", FORMATS),
)
def test_each_expert_may_have_an_order_of_its_input(
    name: str, split: str, shared: int, tmp_path: Path
) -> None:
    """Of the shared one, which is in a slot of every rank, too."""
    v = write(tmp_path, name, input_order=True, alike=False)
    entries = load_file(tmp_path / "model.safetensors")
    for entry in list(entries) if shared else ():
        if ".experts.2." in entry:
            entries[entry.replace(".experts.2.", ".shared_experts.")] = entries[entry].clone()
    bits, _, kind, _ = FORMATS[name]
    store(tmp_path, entries, {"quant_method": "gptq", "bits": bits} if kind == "gptq"
          else packed_config(bits))  # fmt: skip
    plain = MoELayer(E, 2, D, I, dtype=torch.float32, shared_experts=shared)
    x, logits = torch.randn(9, D), torch.randn(9, E)
    with torch.no_grad():
        plain.w13_weight[:E].copy_(torch.cat((v["w1"], v["w3"]), 1))
        plain.w2_weight[:E].copy_(v["w2"])
        if shared:
            plain.w13_weight[E].copy_(plain.w13_weight[2])
            plain.w2_weight[E].copy_(plain.w2_weight[2])
        want = plain(x, logits)
        total = torch.zeros_like(want)
        for config in SPLITS[split]:
            layer = layer_of(
                name, ordered=True, per_expert=True, parallel=config, shared_experts=shared
            )
            report = load(layer, tmp_path)
            assert report.complete, str(report)
            total += layer(x, logits)
            assert layer(x[:0], logits[:0]).shape == (0, D)
        torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_orders_of_experts_move_with_them_and_are_reset(tmp_path: Path) -> None:
    write(tmp_path / "a", "gptq_int4", input_order=True, alike=False)
    write(tmp_path / "b", "gptq_int4", input_order=False)
    layer = layer_of("gptq_int4", ordered=True, per_expert=True)
    load(layer, tmp_path / "a")
    assert layer.input_order.shape == (E, D)
    assert not torch.equal(layer.input_order[1], layer.input_order[2])
    x, logits = torch.randn(5, D), torch.randn(5, E)
    want = layer(x, logits)
    moved = torch.tensor([2, 0, 1])
    for t in layer.expert_tensors().values():
        t.copy_(t[moved].clone())
    torch.testing.assert_close(layer(x, logits[:, moved]), want)
    load(layer, tmp_path / "b")
    assert torch.equal(layer.input_order, torch.arange(D).repeat(E, 1))
    without = layer_of("gptq_int4", ordered=True)
    assert "input_order" not in without.expert_tensors()
    with pytest.raises(ValueError, match="per_expert_order goes with ordered_input"):
        QuantConfig(weights="int4:row", per_expert_order=True)


@pytest.mark.slow
def test_orders_of_experts_are_compiled(tmp_path: Path) -> None:
    write(tmp_path, "gptq_int4", input_order=True, alike=False)
    layer = layer_of("gptq_int4", ordered=True, per_expert=True)
    load(layer, tmp_path)
    x, logits = torch.randn(5, D), torch.randn(5, E)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True)
        torch.testing.assert_close(compiled(x, logits), layer(x, logits))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_same_numbers_in_another_order(name: str, tmp_path: Path) -> None:
    v = write(tmp_path, name, input_order=True)
    layer = layer_of(name, ordered=True)
    load(layer, tmp_path)
    format = Format.of(FORMATS[name][3])
    w13, w2 = (
        packing.dequantize(
            getattr(layer, f"{w}_weight"), getattr(layer, f"{w}_scale"), format,
            getattr(layer, f"{w}_zero"),
        )
        for w in ("w13", "w2")
    )  # fmt: skip
    back = layer.input_order.argsort()
    for e in range(E):
        # What makes the inner order is not told outside: find it by the columns of w2.
        order = (w2[e][:, :, None] == v["w2"][e][:, None, :]).all(0).int().argmax(1)
        assert torch.equal(order.sort().values, torch.arange(I))
        assert torch.equal(w2[e], v["w2"][e][:, order])
        for half, shard in ((w13[e, :I], "w1"), (w13[e, I:], "w3")):
            assert torch.equal(half[:, back], v[shard][e][order])


def test_the_order_is_part_of_the_state_and_is_reset(tmp_path: Path) -> None:
    write(tmp_path / "a", "gptq_int4", input_order=True)
    write(tmp_path / "b", "gptq_int4", input_order=False)
    layer, other = (layer_of("gptq_int4", ordered=True) for _ in range(2))
    load(layer, tmp_path / "a")
    other.load_state_dict(layer.state_dict())
    x, logits = torch.randn(5, D), torch.randn(5, E)
    assert torch.equal(layer(x, logits), other(x, logits))
    assert not torch.equal(layer.input_order, torch.arange(D))
    load(layer, tmp_path / "b")
    assert torch.equal(layer.input_order, torch.arange(D))


def test_fused_shared_experts_have_the_same_order_of_their_input(tmp_path: Path) -> None:
    v = write(tmp_path, "gptq_uint4", input_order=True)
    entries = load_file(tmp_path / "model.safetensors")
    for name in list(entries):
        if ".experts.1." in name:
            shared = name.replace(".experts.1.", ".shared_experts.")
            entries[shared] = entries[name].clone()
    store(tmp_path, entries, {"quant_method": "gptq", "bits": 4})
    layer = layer_of("gptq_uint4", ordered=True, shared_experts=1)
    assert load(layer, tmp_path).complete
    for name in ("w13_weight", "w13_scale", "w13_zero", "w2_weight", "w2_scale", "w2_zero"):
        assert torch.equal(getattr(layer, name)[E], getattr(layer, name)[1])
    assert v["w1"].shape == (E, I, D)


@pytest.mark.slow
@one_in(2, pytest.mark.parametrize("name", those_of(["gptq_int4", "packed_uint4"], FORMATS)))
def test_putting_in_order_takes_no_more_than_one_tensor(name: str, tmp_path: Path) -> None:
    size = 512
    write(tmp_path, name, input_order=True, D=size, I=size)
    quant = QuantConfig(weights=FORMATS[name][3], ordered_input=True)
    layer = MoELayer(E, 2, size, size, quant=quant, dtype=torch.float32)
    orders = (E + 2) * size * 8  # of w2 of every expert, and of the input
    gc.collect()
    with Peak() as peak:
        assert load(layer, tmp_path).complete
    assert peak.most <= layer.w2_weight[0].nbytes + orders


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", "gptq_int4", input_order=True)
    with pytest.raises(ValueError, match=r"gate_proj.g_idx: was .* QuantConfig\(ordered_input=T"):
        load(layer_of("gptq_int4", ordered=False), tmp_path / "a")
    write(tmp_path / "b", "gptq_int4", input_order=True, alike=False)
    with pytest.raises(
        ValueError,
        match=r"experts\.2\..*g_idx: expert 2 was .* per_expert_order=True\), ",
    ):
        load(layer_of("gptq_int4", ordered=True), tmp_path / "b")
    # On a rank of its own an expert may have its own order.
    for rank in range(3):
        config = ParallelConfig.of(tp=3, tp_rank=rank, expert_parallel=True)
        assert load(layer_of("gptq_int4", ordered=True, parallel=config), tmp_path / "b").complete
    # Unless experts may change their ranks.
    with pytest.raises(ValueError, match="expert 2 was quantised in another order of its input"):
        config = ParallelConfig.of(tp=3, tp_rank=0, expert_parallel=True)
        moves = layer_of("gptq_int4", ordered=True, parallel=config, balanced=True)
        load(moves, tmp_path / "b")
    with pytest.raises(ValueError, match="ordered_input goes with integer weights"):
        QuantConfig(weights="float8_e4m3fn:row", ordered_input=True)


def test_an_order_comes_before_what_it_orders() -> None:
    layer, record = layer_of("gptq_int4", ordered=False), LoadRecord()
    qweight, g_idx = torch.zeros(I // 8, D, dtype=torch.int32), groups(torch.Generator(), I)
    with pytest.raises(ValueError, match="a: orders the tensors that follow; pass this load's"):
        load_expert(layer, "w2_g_idx", g_idx, "a", "w2", 0)
    load_expert(layer, "w2_weight", qweight, "b", "w2", 0, coding=gptq(), record=record)
    with pytest.raises(ValueError, match="c: orders the columns of expert 0, whose weights are lo"):
        load_expert(layer, "w2_g_idx", g_idx, "c", "w2", 0, record=record)
    with pytest.raises(ValueError, match="d: the part of a rank cannot be put in order"):
        load_expert(layer, "w2_g_idx", g_idx, "d", "w2", 1, record=record, sharded=True)
    load_expert(layer, "w2_g_idx", g_idx, "e", "w2", 1, record=record)
    with pytest.raises(ValueError, match="f: expert 1 has another order of its columns in e"):
        load_expert(layer, "w2_g_idx", g_idx.flip(0), "f", "w2", 1, record=record)
    uneven = torch.zeros(I, dtype=torch.int32)
    with pytest.raises(ValueError, match="g: its groups are no 2 of 32 columns each"):
        load_expert(layer, "w2_g_idx", uneven, "g", "w2", 2, record=record)
    ordered = layer_of("gptq_int4", ordered=True)
    with pytest.raises(ValueError, match="h: the layer's input is put in order; pass this load's"):
        load_expert(
            ordered, "w13_weight", torch.zeros(D // 8, I).int(), "h", "w1", 0, coding=gptq()
        )
