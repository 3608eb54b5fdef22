"""Split equals whole: the sum of what the ranks give is what the unsharded layer gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.ops import route
from moe_ops.ops.activate import Activation
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import ROW, TENSOR, Format
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import GPT_OSS, Tol, assert_close
from tests.chosen import in_turn
from tests.layer.shards import Split, pair, take_share

EXACT = Tol(1e-5, "float32 sums in another order")

TP = Split(name="tp2", tp=2)
DP_TP = Split(name="dp2_tp2", dp=2, tp=2)
EP = Split(name="ep3", tp=3, ep=True)  # 5 experts: 2, 2, 1
DP_TP_EP = Split(name="dp2_tp2_ep", dp=2, tp=2, ep=True)  # 5 experts: 2, 1, 1, 1
PCP_EP = Split(name="dp2_pcp2_tp2_ep", dp=2, pcp=2, tp=2, ep=True)
EP64 = Split(name="dp8_tp8_ep", dp=8, tp=8, ep=True)
TP64 = Split(name="dp4_pcp2_tp8", dp=4, pcp=2, tp=8)


def formats() -> list[QuantConfig]:
    """Every weight format with every input format of every scheme, static scales too, but for
    blocks, which are wider than a rank's part: tests/weights/test_gguf_blocks.py splits them."""
    found = []
    for scheme in SCHEMES.values():
        for w, x in scheme.pairs():
            inputs = Format.of(x) if x else None
            one = inputs is not None and (inputs.group == TENSOR or inputs.has_global_scale)
            kinds = [{}, {"static_inputs": True}][: 1 + one]
            if one:
                kinds.append({"static_inputs": True, "per_expert_inputs": True})
            some = w and not Format.of(w).in_blocks
            found += [QuantConfig(weights=w, inputs=x, **kind) for kind in kinds if some]
    return found


def scales_its_share(quant: QuantConfig, split: Split) -> bool:
    """Whether a rank scales the second input by what it holds of it, not by all of it."""
    inputs = quant.input_format
    if inputs is None or quant.static_inputs:
        return False
    if inputs.group == TENSOR or inputs.has_global_scale:
        return True
    return inputs.group == ROW and not split.ep


FORMATS = formats()
SIZES: dict[str, Any] = {
    "num_experts": 5, "top_k": 2, "hidden_size": 128, "intermediate_size": 256,
}  # fmt: skip


def tokens(whole: MoELayer, T: int = 6) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(T, whole.sizes.hidden_size)
    return x, None if whole.gate is not None else torch.randn(T, whole.num_experts)


def whole_and_sum(split: Split, **options: Any) -> tuple[Tensor, Tensor]:
    """The whole layer's result, and the sum of the ranks'."""
    whole, parts = pair(split, **options)
    given = tokens(whole)
    with torch.inference_mode():
        return whole(*given), sum(part(*given) for part in parts)


def test_every_scheme_is_here() -> None:
    blocks = {"q4_k_w4a16", "q5_k_w5a16", "q6_k_w6a16"}
    assert {quant.scheme for quant in FORMATS} == set(SCHEMES) - {"none"} - blocks


@pytest.mark.slow
@in_turn(
    pytest.mark.parametrize("split", [TP, EP, DP_TP_EP], ids=lambda s: s.name),
    pytest.mark.parametrize("quant", FORMATS, ids=str),
)
def test_every_format(quant: QuantConfig, split: Split) -> None:
    whole, parts = pair(split, **SIZES, quant=quant)
    given = tokens(whole)
    with torch.inference_mode():
        want, got = whole(*given), sum(part(*given) for part in parts)
        if not scales_its_share(quant, split):
            assert_close(got, want, EXACT, str(quant))
            return
        # The ranks' scales differ from that of the whole, so the codes do: against inputs that are
        # not quantised, they must be as good.
        floats = take_share(whole, MoELayer(**SIZES, quant=QuantConfig(weights=quant.weights)))
        exact = floats(*given)
    assert (got - exact).norm() <= 1.3 * (want - exact).norm()


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "gate": {"internal_gate": True},
    "fused_shared": {"shared_experts": 2, "bias": True},
    "fused_shared_mxfp4": {"shared_experts": 1, "quant": "mxfp4_w4a16"},
    "correction_bias": {"routing": Routing(score="sigmoid", correction_bias=True, scale=2.5)},
    "on_input": {"top_k": 1, "routing": Routing(score="sigmoid", weight_on_input=True)},
    "gpt_oss": {
        "bias": True,
        "activation": Activation(kind="silu", **GPT_OSS),
        "quant": "mxfp4_w4a16",
    },
    "interleaved_blocks": {
        "activation": Activation(kind="silu", interleaved=True),
        "quant": QuantConfig(weights="float8_e4m3fn:16x32"),
    },
    "ungated": {"activation": Activation(kind="relu2", gated=False), "bias": True},
    "ungated_int4": {
        "activation": Activation(kind="silu", gated=False),
        "quant": QuantConfig(weights="uint4:1x32"),
    },
    "wider": {"hidden_multiple": 96, "bias": True},
    "wider_experts": {"intermediate_multiple": 96, "bias": True},
    "wider_int4": {"intermediate_multiple": 96, "quant": QuantConfig(weights="int4:1x32")},
    "wider_uint4": {"intermediate_multiple": 96, "quant": QuantConfig(weights="uint4:1x32")},
    "wider_blocks": {
        "intermediate_multiple": 96,
        "quant": QuantConfig(weights="float8_e4m3fn:32x32", inputs="float8_e4m3fn:1x32"),
    },
}  # fmt: skip


@pytest.mark.slow
@in_turn(
    pytest.mark.parametrize("split", [TP, DP_TP, EP, DP_TP_EP], ids=lambda s: s.name),
    pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS),
)
def test_every_option(options: dict[str, Any], split: Split) -> None:
    want, got = whole_and_sum(split, **{**SIZES, **options})
    assert_close(got, want, EXACT)


@pytest.mark.parametrize(("tp", "size"), [(3, 50), (3, 7), (8, 9)])
def test_a_width_that_does_not_divide_is_padded_with_zeros(tp: int, size: int) -> None:
    options = {**SIZES, "intermediate_size": size, "bias": True, "intermediate_multiple": 4}
    whole, parts = pair(Split(name="tp", tp=tp), **options)
    assert sum(part.sizes.used for part in parts) == size
    given = tokens(whole)
    with torch.inference_mode():
        assert_close(sum(part(*given) for part in parts), whole(*given), EXACT)


GROUPED = Routing(score="sigmoid", correction_bias=True, n_group=4, topk_group=2)


@pytest.mark.parametrize("experts", [8, 12])
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_grouped_routing(placement: str, experts: int) -> None:
    options = {**SIZES, "num_experts": experts, "routing": GROUPED, "placement": placement}
    whole, parts = pair(PCP_EP, **options)
    assert {part.placement.placement for part in parts} == {placement}
    given = tokens(whole)
    with torch.inference_mode():
        assert_close(sum(part(*given) for part in parts), whole(*given), EXACT)


MANY: dict[str, tuple[Split, dict[str, Any]]] = {
    "ep": (EP64, {"num_experts": 100, "bias": True, "shared_experts": 1}),
    "ep_fp8": (
        EP64,
        {
            "num_experts": 70,
            "quant": QuantConfig(weights="float8_e4m3fn:16x32", inputs="float8_e4m3fn:1x32"),
        },
    ),
    "ep_mxfp4": (EP64, {"num_experts": 65, "quant": "mxfp4_w4a16"}),
    "tp": (TP64, {"num_experts": 3, "bias": True, "shared_experts": 1}),
    "tp_int8": (TP64, {"num_experts": 3, "quant": QuantConfig(weights="int8:row")}),
}  # fmt: skip


@pytest.mark.parametrize(("split", "options"), MANY.values(), ids=MANY)
def test_64_ranks(split: Split, options: dict[str, Any]) -> None:
    sizes = {"top_k": 3, "hidden_size": 64, "intermediate_size": 64}
    whole, parts = pair(split, **sizes, **options)
    assert len(parts) == 64
    given = tokens(whole, T=33)
    with torch.inference_mode():
        assert_close(sum(part(*given) for part in parts), whole(*given), EXACT)


@pytest.mark.parametrize("split", [TP, EP], ids=lambda s: s.name)
@pytest.mark.parametrize("reduction", ["partial", "replicated"])
def test_a_module_of_shared_experts_counts_once(split: Split, reduction: str) -> None:
    shared = nn.Linear(128, 128)
    ranks = sum(1 for _ in split.ranks())

    def module(size: int) -> nn.Module:
        return nn.Sequential(shared, Scaled(1 / size)) if reduction == "partial" else shared

    whole, parts = pair(split, **SIZES)
    given = tokens(whole)
    with torch.inference_mode():
        want = whole(*given) + shared(given[0])
        for part in (whole, *parts):
            part.shared_experts = module(1 if part is whole else ranks)
            part.shared_reduction = reduction
        assert_close(whole(*given), want, EXACT)
        assert_close(sum(part(*given) for part in parts), want, EXACT)


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


@pytest.mark.parametrize("redundant", [0, 3])
@pytest.mark.parametrize("split", [TP, EP, DP_TP_EP], ids=lambda s: s.name)
def test_redundant_experts_change_nothing(split: Split, redundant: int) -> None:
    whole, _ = pair(TP, **SIZES, bias=True)
    given = tokens(whole, T=16)
    options = {**SIZES, "bias": True, "redundant_experts": redundant, "balanced": True}
    options["tokens"] = "replicated"
    parts = [MoELayer(**options, parallel=rank) for rank in split.ranks()]
    # Physical experts in another order than at first, as after rebalancing.
    order = torch.randperm(5 + redundant) % 5
    with torch.inference_mode():
        for part in parts:
            part.replicas.update_(ExpertReplicas.of(order, 5))
            take_share(whole, part)
        assert_close(sum(part(*given) for part in parts), whole(*given), EXACT)
    pairs = route(given[1], 2)[1].flatten()
    for part in parts:
        assert torch.equal(part.loads, torch.bincount(pairs, minlength=5))


def test_no_tokens() -> None:
    whole, parts = pair(EP, **SIZES, shared_experts=1)
    for layer in (whole, *parts):
        assert layer(torch.empty(0, 128), torch.empty(0, 5)).shape == (0, 128)
