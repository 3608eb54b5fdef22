"""`load_expert`: what goes where, and what is refused without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import LoadRecord, load_expert
from moe_ops.weights.codings import coding_of
from moe_ops.weights.layouts import PLAIN, TRANSPOSED, awq, compressed, gptq

E, D, I = 4, 64, 96  # noqa: E741
FP8 = "float8_e4m3fn"


def layer_of(quant: str | QuantConfig | None = None, **more: Any) -> MoELayer:
    if isinstance(quant, str):
        quant = QuantConfig(weights=quant)
    return MoELayer(E, 2, D, I, quant=quant, dtype=torch.float32, **more)


def tp(rank: int, size: int = 3) -> ParallelConfig:
    return ParallelConfig.of(tp=size, tp_rank=rank)


def state(layer: MoELayer) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in layer.state_dict().items()}


def changed(layer: MoELayer, before: dict[str, Tensor]) -> list[str]:
    """Names of tensors whose bytes differ."""
    now = layer.state_dict()
    return [n for n, t in before.items()
            if not torch.equal(t.view(torch.uint8), now[n].view(torch.uint8))]  # fmt: skip


@pytest.mark.parametrize("rank", range(3))
def test_tensor_parallel_ranks_keep_rows_of_w1_and_w3_and_columns_of_w2(rank: int) -> None:
    layer, n = layer_of(parallel=tp(rank)), I // 3
    w1, w3, w2 = torch.randn(I, D), torch.randn(I, D), torch.randn(D, I)
    for shard, t in (("w1", w1), ("w3", w3)):
        assert load_expert(layer, "w13_weight", t, "x", shard, 2)
    assert load_expert(layer, "w2_weight", w2, "x", "w2", 2)
    cut = slice(rank * n, rank * n + n)
    assert torch.equal(layer.w13_weight[2], torch.cat((w1[cut], w3[cut])))
    assert torch.equal(layer.w2_weight[2], w2[:, cut])


@pytest.mark.parametrize("held", [False, True], ids=["halves_held", "alternating_held"])
@pytest.mark.parametrize("stored", [False, True], ids=["halves_stored", "alternating_stored"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_of_all_experts_in_one_tensor(
    transposed: bool, stored: bool, held: bool
) -> None:
    gate, up = torch.randn(E, I, D), torch.randn(E, I, D)

    def joined(gate: Tensor, up: Tensor, alternating: bool) -> Tensor:
        return torch.stack((gate, up), 2).flatten(1, 2) if alternating else torch.cat((gate, up), 1)

    t = joined(gate, up, stored)
    for rank in range(3):
        layer = layer_of(parallel=tp(rank), activation=Activation(kind="silu", interleaved=held))
        load_expert(
            layer, "w13_weight", t.transpose(1, 2).contiguous() if transposed else t, "x", "w13",
            None, coding=TRANSPOSED if transposed else PLAIN, interleaved=stored,
        )  # fmt: skip
        cut = slice(rank * 32, rank * 32 + 32)
        assert torch.equal(layer.w13_weight, joined(gate[:, cut], up[:, cut], held))


def test_experts_that_live_elsewhere_are_skipped() -> None:
    config = ParallelConfig.of(tp=2, tp_rank=1, expert_parallel=True)
    layer = layer_of(parallel=config)
    before = state(layer)
    t = torch.randn(I, D)
    assert not load_expert(layer, "w13_weight", t, "x", "w1", 1)
    assert changed(layer, before) == []
    assert load_expert(layer, "w13_weight", t, "x", "w1", 3)
    assert torch.equal(layer.w13_weight[1, :I], t)


def test_every_replica_is_written() -> None:
    layer = layer_of(redundant_experts=2)
    layer.replicas.update_(ExpertReplicas.of(torch.tensor([3, 0, 2, 1, 3, 3]), E))
    t = torch.randn(D, I)
    before = state(layer)
    assert load_expert(layer, "w2_weight", t, "x", "w2", 3)
    for slot in range(6):
        own = slot in (0, 4, 5)
        assert torch.equal(layer.w2_weight[slot], t if own else before["w2_weight"][slot])


def test_a_rank_loads_the_part_that_it_saved_itself() -> None:
    layer = layer_of(parallel=tp(1))
    t = torch.randn(I // 3, D)
    assert load_expert(layer, "w13_weight", t, "x", "w3", 0, sharded=True)
    assert torch.equal(layer.w13_weight[0, I // 3 :], t)
    with pytest.raises(ValueError, match=r"x: expected the shape \[32, 64\], found \[96, 64\]"):
        load_expert(layer, "w13_weight", torch.randn(I, D), "x", "w3", 0, sharded=True)


def test_without_a_gate_the_up_projection_is_all() -> None:
    layer = layer_of(activation=Activation(kind="relu2", gated=False))
    t = torch.randn(I, D)
    assert load_expert(layer, "w13_weight", t, "x", "w3", 1)
    assert torch.equal(layer.w13_weight[1], t)
    with pytest.raises(ValueError, match="x: holds gate and up, but the layer's experts have no"):
        load_expert(layer, "w13_weight", torch.randn(2 * I, D), "x", "w13", 1)


SCALES = {  # what one expert's w13 scale may look like: format, shape, shape in the layer
    "one_value_for_rows": (f"{FP8}:row", (), (2 * I, 1)),
    "one_for_gate_one_for_up": (f"{FP8}:row", (2,), (2 * I, 1)),
    "one_per_row": (f"{FP8}:row", (2 * I,), (2 * I, 1)),
    "one_per_row_and_axis": (f"{FP8}:row", (2 * I, 1), (2 * I, 1)),
    "one_value": (f"{FP8}:tensor", (1,), (1, 1)),
    "blocks": (f"{FP8}:32x32", (2 * I // 32, D // 32), (2 * I // 32, D // 32)),
    "groups": ("int8:1x32", (2 * I, D // 32), (2 * I, D // 32)),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("format", "shape", "want"), SCALES.values(), ids=SCALES)
def test_fused_scales(format: str, shape: Any, want: Any, stacked: bool) -> None:
    layer = layer_of(format)
    s = torch.rand(E, *shape) + 0.5
    for e in [None] if stacked else range(E):
        load_expert(layer, "w13_scale", s if stacked else s[e], "x", "w13", e)
    rows = s.reshape(E, -1, shape[1] if len(shape) > 1 else 1)
    every = rows.repeat_interleave(want[0] // rows.shape[1], 1)
    assert torch.equal(layer.w13_scale, every)


def test_scales_of_whole_rows_of_w2_are_on_every_rank() -> None:
    s, w1 = torch.rand(D, 1) + 0.5, torch.rand(I, 1) + 0.5
    for rank in range(3):
        layer = layer_of(f"{FP8}:row", parallel=tp(rank))
        load_expert(layer, "w2_scale", s, "x", "w2", 0)
        load_expert(layer, "w13_scale", w1, "x", "w1", 0)
        assert torch.equal(layer.w2_scale[0], s)
        assert torch.equal(layer.w13_scale[0, : I // 3], w1[rank * 32 : rank * 32 + 32])


def test_scales_keep_their_numbers_in_another_dtype() -> None:
    e8m0 = torch.tensor([120, 127, 130], dtype=torch.uint8).repeat(2)[:6].reshape(3, 2)
    layer = layer_of(f"{FP8}:32x32")
    load_expert(layer, "w13_scale", e8m0.view(torch.float8_e8m0fnu), "x", "w1", 0)
    assert torch.equal(layer.w13_scale[0, :3], torch.exp2(e8m0.float() - 127))
    layer = layer_of(f"{FP8}:32x32:e8m0")
    load_expert(layer, "w13_scale", torch.exp2(e8m0.float() - 127), "x", "w1", 0)
    assert torch.equal(layer.w13_scale[0, :3], e8m0)


def test_w1_and_w3_must_agree_where_one_value_serves_both() -> None:
    layer, record = layer_of(f"{FP8}:tensor"), LoadRecord()
    load_expert(layer, "w13_scale", torch.tensor(0.5), "a", "w1", 0, record=record)
    load_expert(layer, "w13_scale", torch.tensor(0.25), "b", "w1", 1, record=record)
    load_expert(layer, "w13_scale", torch.tensor(0.5), "c", "w3", 0, record=record)
    before = state(layer)
    with pytest.raises(ValueError, match=r"d: expert 1 has 0.75 here, but 0.25 in b, and one"):
        load_expert(layer, "w13_scale", torch.tensor(0.75), "d", "w3", 1, record=record)
    assert changed(layer, before) == []
    with pytest.raises(ValueError, match=r"e: one number serves w1 and w3.*pass this load's"):
        load_expert(layer, "w13_scale", torch.tensor(0.5), "e", "w1", 2)
    with pytest.raises(ValueError, match=r"f: expert 2 has 2.0 here, but 1.0 in f"):
        load_expert(layer, "w13_scale", torch.tensor([1.0, 2.0]), "f", "w13", 2)


def test_the_largest_input_scale_is_kept_of_w1_and_w3_and_of_all_experts() -> None:
    layer = layer_of(QuantConfig(weights=f"{FP8}:row", inputs=f"{FP8}:tensor", static_inputs=True))
    record = LoadRecord()
    for e, value in enumerate((0.5, 2.0, 1.0)):
        for shard in ("w1", "w3"):
            load_expert(layer, "x_scale", torch.tensor([value]), "a", shard, e, record=record)
    load_expert(layer, "h_scale", torch.tensor(3.0), "a", "w2", 0, record=record)
    assert (layer.x_scale.item(), layer.h_scale.item()) == (2.0, 3.0)
    load_expert(layer, "x_scale", torch.tensor(9.0), "a", "w1", 3, record=record)
    load_expert(layer, "x_scale", torch.tensor(0.1), "b", "w3", 3, record=record)
    with pytest.raises(ValueError, match=r"c: expert 0 has \[0.0\], but a scale is above 0"):
        load_expert(layer, "h_scale", torch.tensor(0.0), "c", "w2", 0, record=record)
    with pytest.raises(ValueError, match=r"d: one scale serves .* pass this load's LoadRecord"):
        load_expert(layer, "h_scale", torch.tensor(1.0), "d", "w2", 0)
    with pytest.raises(ValueError, match=r"e: expected the shape \[1\], found \[3\]; quantise the"):
        load_expert(layer, "h_scale", torch.ones(3), "e", "w2", 0, record=record)
    assert (layer.x_scale.item(), layer.h_scale.item()) == (9.0, 3.0)


def test_input_scales_of_each_expert_are_kept_where_the_layer_has_them() -> None:
    quant = QuantConfig(
        weights=f"{FP8}:row", inputs=f"{FP8}:tensor", static_inputs=True, per_expert_inputs=True
    )
    layer, record = layer_of(quant), LoadRecord()
    count = layer.num_experts
    values = torch.arange(1.0, count + 1)
    load_expert(layer, "x_scale", values[:, None].expand(-1, 2), "a", "w13", None, record=record)
    load_expert(layer, "h_scale", torch.tensor(7.0), "b", "w2", 2, record=record)
    assert torch.equal(layer.x_scale, values)
    assert layer.h_scale.tolist() == [1.0, 1.0, 7.0, *[1.0] * (count - 3)]
    load_expert(layer, "h_scale", torch.tensor(0.5), "c", "w2", None, record=LoadRecord())
    assert layer.h_scale.tolist() == [0.5] * count
    load_expert(layer, "x_scale", torch.tensor(9.0), "d", "w3", 3, record=record)
    load_expert(layer, "x_scale", torch.tensor(0.1), "d", "w3", 2, record=record)
    assert layer.x_scale.tolist() == [1.0, 2.0, 3.0, 9.0, *values[4:].tolist()]
    moving = layer.expert_tensors()
    assert {name for name in moving if name in ("x_scale", "h_scale")} == {"x_scale", "h_scale"}
    assert {t.shape[0] for t in moving.values()} == {count}


def test_a_layer_that_moved_is_written_where_it_is() -> None:
    layer, record = layer_of(), LoadRecord()
    load_expert(layer, "w2_weight", torch.ones(D, I), "a", "w2", 0, record=record)
    layer.double().float()
    load_expert(layer, "w2_weight", torch.ones(D, I), "b", "w2", 1, record=record)
    assert bool((layer.w2_weight[:2] == 1).all())


def plain(**more: Any) -> dict[str, Any]:
    return {"quant": None, "parameter": "w13_weight", "shard": "w1", "expert": 0, **more}


INT4, UINT4 = "int4:1x32:float16", "uint4:1x32:float16"
BAD: dict[str, tuple[dict[str, Any], Any, str]] = {
    "rows": (plain(), (I + 1, D), r"expected the shape \[96, 64\], found \[97, 64\]"),
    "axes": (plain(), (I,), r"expected the shape \[96, 64\], found \[96\]"),
    "transposed": (plain(), (D, I), r"expected the shape \[96, 64\], found \[64, 96\]"),
    "fused": (plain(shard="w13"), (I, D), r"expected the shape \[192, 64\], found \[96, 64\]"),
    "stack": (plain(expert=None), (E + 1, I, D), r"expected 4 experts .*\[5, .*; make the layer"),
    "bias": (plain(parameter="w13_bias", bias=True), (I + 1,), r"shape \[96\], found \[97\]"),
    "no_bias": (plain(parameter="w13_bias"), (I,), "the layer holds no w13_bias; make it with"),
    "no_scale": (plain(parameter="w13_scale"), (1,), "the layer holds no w13_scale; give it"),
    "no_static": (plain(parameter="x_scale"), (1,), "the layer holds no x_scale; make it"),
    "expert": (plain(expert=4), (I, D), "expert 4 does not exist: the layer has 4"),
    "codes": (
        plain(), torch.zeros(I, D, dtype=torch.uint8),
        "is uint8, but the layer's tensor is float32; give the layer the checkpoint's format",
    ),
    "floats": (plain(quant=f"{FP8}:row"), (I, D), "is float32, but the layer's tensor is float8"),
    "rounded": (
        plain(quant=INT4, parameter="w13_scale"), torch.full((I, D // 32), 1 / 3),
        "has float32 scales that float16 would round",
    ),
    "no_power": (
        plain(quant="mxfp4", parameter="w13_scale"), torch.full((I, D // 32), 1 / 3),
        "not a power of two",
    ),
    "group_count": (
        plain(quant=INT4, parameter="w13_scale"), torch.ones(I, 3, dtype=torch.float16),
        r"expected the shape \[96, 2\], found \[96, 3\]",
    ),
    "gptq": (
        plain(quant=UINT4, coding=gptq()), torch.zeros(I // 8, D, dtype=torch.int32),
        r"expected the shape \[8, 96\], found \[12, 64\]",
    ),
    "awq": (
        plain(quant=UINT4, coding=awq()), torch.zeros(D // 8, I, dtype=torch.int32),
        r"expected the shape \[64, 12\], found \[8, 96\]",
    ),
    "awq_words": (
        plain(quant="uint4:row", coding=awq(), parallel=tp(1, 24)),
        torch.zeros(D, I // 8, dtype=torch.int32), "cuts words of 8",
    ),
    "words": (
        plain(quant=INT4, coding=compressed()), torch.zeros(I, D // 8, dtype=torch.int64),
        "packed values must be int32 words, got torch.int64",
    ),
    "coding": (
        plain(quant=f"{FP8}:row", coding=gptq()), torch.zeros(D // 8, I, dtype=torch.int32),
        "GPTQ holds integers of 4 bits, but the layer has float8_e4m3fn:row; give the layer one",
    ),
    "shape_told": (
        plain(quant=INT4, parameter="w13_shape"), torch.tensor([I, D + 1]),
        r"expected \[96, 64\], found \[96, 65\]; make the layer with the checkpoint's hidden_size",
    ),
    "g_idx": (
        plain(quant=INT4, parameter="w13_g_idx"), torch.zeros(D, dtype=torch.int32),
        "its groups are no 2 of 32 columns each, as the layer's format has them; quantise without",
    ),
    "global_scale": (
        plain(quant="nvfp4", parameter="w13_global_scale"), (3,),
        r"expected the shape .* found \[3\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "tensor", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_named_and_changes_nothing(
    given: dict[str, Any], tensor: Any, message: str
) -> None:
    given = dict(given)
    parameter, shard, expert = (given.pop(k) for k in ("parameter", "shard", "expert"))
    coding = given.pop("coding", PLAIN)
    layer = layer_of(**given)
    before, record = state(layer), LoadRecord()
    t = tensor if isinstance(tensor, Tensor) else torch.randn(tensor)
    with pytest.raises((ValueError, TypeError), match=f"(?s)^a.name: .*{message}"):
        load_expert(
            layer, parameter, t, "a.name", shard, expert, coding=coding, record=record
        )  # fmt: skip
    assert changed(layer, before) == []
    assert not (record.seen or record.shared)


def test_unknown_names_are_refused() -> None:
    layer, t = layer_of(), torch.randn(I, D)
    with pytest.raises(ValueError, match="shard='w4' is unknown; choose one of w1, w2, w3, w13"):
        load_expert(layer, "w13_weight", t, "a", "w4", 0)
    with pytest.raises(ValueError, match="parameter_name='gate' is unknown; choose one of"):
        load_expert(layer, "gate", t, "a", "w1", 0)
    with pytest.raises(ValueError, match="a: shard 'w2' is no part of w13_weight"):
        load_expert(layer, "w13_weight", t, "a", "w2", 0)


def test_alternating_rows_cannot_share_a_scale() -> None:
    layer = layer_of(f"{FP8}:32x32")
    with pytest.raises(ValueError, match="a: scales of 32 rows would be shared by gate and up"):
        load_expert(
            layer, "w13_scale", torch.ones(6, 2), "a", "w13", 0, interleaved=True
        )  # fmt: skip


CONFIGS = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "'bitsandbytes' cannot be loaded: of its weights those of 4 bits alone are read",
    ),
    "ours": ({"quant_method": "moe_ops"}, "by from_pretrained of its class, where moe_ops is imp"),
    "unknown": ({"quant_method": "new"}, "'new' cannot be loaded: its layout is unknown; dequant"),
    "gptq_3": ({"quant_method": "gptq", "bits": 3}, "bits must be 4 or 8, got 3"),
    "awq_gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"),
    "mixed": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}},
        "give the coding of the experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "message"), CONFIGS.values(), ids=CONFIGS)
def test_codings_that_no_op_reads_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coding_of(config)
