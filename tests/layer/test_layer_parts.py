"""What a rank lacks of other ranks; latent layers; routed and shared parts apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import COLLECTIVES, ParallelConfig
from moe_ops.testing import Tol, assert_close
from tests.chosen import in_turn
from tests.layer.shards import Split, pair, randomize, take_share

LOOSE = Tol(1e-5, "float32 sums in another order")
SIZES: dict[str, Any] = {
    "num_experts": 6, "top_k": 2, "hidden_size": 32, "intermediate_size": 16,
}  # fmt: skip
EP: dict[str, Any] = {"tp": 2, "expert_parallel": True}

# The configuration, the tokens that a rank is given, and what is missing.
APART: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "dp_ep": ({"dp": 2, "expert_parallel": True}, None, "with dp_size=2 each starts with"),
    "dp": ({"dp": 2}, None, "with dp_size=2 each starts with"),
    "pcp": ({"pcp": 2, "tp": 2}, None, "with pcp_size=2 each starts with"),
    "dp_pcp": ({"dp": 2, "pcp": 4}, None, "with dp_size=2, pcp_size=4 each starts with"),
    "sp": ({**EP, "sequence_parallel": True}, None, "with sp_size=2 each starts with"),
    "sp_tp": ({"tp": 2, "sequence_parallel": True}, None, "with sp_size=2 each starts with"),
    "alltoall": ({**EP, "collective": COLLECTIVES[1]}, None, "'alltoall_high_throughput' is an"),
    "low_latency": ({**EP, "collective": COLLECTIVES[2]}, None, "'alltoall_low_latency' is an"),
    "alltoall_of_all": (
        {**EP, "collective": COLLECTIVES[2]},
        "replicated",
        "'alltoall_low_latency' is an",
    ),
}
TOGETHER: dict[str, tuple[dict[str, Any], str | None]] = {
    "one": ({}, None),
    "tp": ({"tp": 2}, None),
    "ep": (EP, None),
    "one_of_anything": ({"collective": COLLECTIVES[1], "sequence_parallel": True}, None),
    "dp_of_all": ({"dp": 2}, "replicated"),
    "sp_of_all": ({**EP, "sequence_parallel": True}, "replicated"),
}


@pytest.mark.parametrize(("asked", "tokens", "text"), APART.values(), ids=APART)
def test_a_forward_that_lacks_an_exchange_is_refused(
    asked: dict[str, Any], tokens: str | None, text: str
) -> None:
    config = ParallelConfig.of(**asked)
    layer = MoELayer(**SIZES, parallel=config, tokens=tokens)
    x, logits = torch.randn(4, 32), torch.randn(4, 6)
    for forward in (layer, torch.compile(layer, backend="eager")):
        with pytest.raises(NotImplementedError, match=text) as refused:
            forward(x, logits)
        for part in (
            config.describe(),
            "this rank's tokens alone",
            "tokens='own'",
            "`run_experts` around",
        ):
            assert part in str(refused.value)
    # What an exchange of the caller's own is made with.
    assert layer.run_experts(x, *layer.route(x, logits)).shape == x.shape


@pytest.mark.parametrize(("asked", "tokens"), TOGETHER.values(), ids=TOGETHER)
def test_a_part_of_the_sum_for_all_tokens_is_the_callers_to_add(
    asked: dict[str, Any], tokens: str | None
) -> None:
    layer = MoELayer(**SIZES, parallel=ParallelConfig.of(**asked), tokens=tokens)
    assert layer(torch.randn(4, 32), torch.randn(4, 6)).shape == (4, 32)


class Latent:
    """The modules of a latent layer: 48 columns outside, 32 for routed experts."""

    def __init__(self, bias: bool = False) -> None:
        self.down, self.up = nn.Linear(48, 32, bias), nn.Linear(32, 48, bias)
        self.shared, self.gate = nn.Linear(48, 48), nn.Linear(48, 6)

    def options(self) -> dict[str, Any]:
        return {
            **SIZES, "routed_input_transform": self.down, "routed_output_transform": self.up,
            "shared_experts": self.shared, "internal_gate": self.gate,
        }  # fmt: skip

    def routed(self, plain: MoELayer, x: Tensor) -> Tensor:
        return self.up(plain(self.down(x), self.gate(x)))


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@in_turn(
    pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"]),
    pytest.mark.parametrize("reduction", ["partial", "replicated"]),
    pytest.mark.parametrize("separate", [False, True], ids=["joined", "separate"]),
)
def test_a_latent_layer_adds_at_the_width_of_its_input(
    separate: bool, reduction: str, compiled: bool
) -> None:
    latent, plain, x = Latent(bias=True), randomize(MoELayer(**SIZES)), torch.randn(3, 5, 48)
    layer = MoELayer(**latent.options(), shared_reduction=reduction, separate=separate)
    take_share(MoELayer(**SIZES, internal_gate=latent.gate), layer)
    layer.load_state_dict({**layer.state_dict(), **plain.state_dict()})
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    want = (latent.shared(x), latent.routed(plain, x))
    got = run(x)
    if not separate:
        assert_close(got, sum(want), LOOSE)
        return
    for name, g, w in zip(("shared", "routed"), got, want, strict=True):
        assert_close(g, w, LOOSE, name)


@pytest.mark.parametrize("split", [Split(name="tp", tp=2), Split(name="ep", tp=3, ep=True)])
@pytest.mark.parametrize("reduction", ["partial", "replicated"])
@pytest.mark.parametrize("separate", [False, True], ids=["joined", "separate"])
def test_the_ranks_parts_of_a_latent_layer_sum_to_the_whole(
    separate: bool, reduction: str, split: Split
) -> None:
    latent, x = Latent(), torch.randn(5, 48)
    whole, parts = pair(split, **SIZES)
    shared = nn.Linear(48, 48, bias=False)
    ranks = len(parts)
    for part in parts:
        part.routed_input_transform, part.routed_output_transform = latent.down, latent.up
        part.shared_experts, part.shared_reduction = shared, reduction
        part.gate, part.separate = latent.gate, separate
    # A partial module returns as many parts as there are ranks.
    factor = ranks if reduction == "partial" else 1
    want = (factor * shared(x), latent.routed(whole, x))
    got = [part(x) for part in parts]
    if not separate:
        assert_close(sum(got), sum(want), LOOSE)
        return
    assert_close(sum(routed for _, routed in got), want[1], LOOSE)
    for one, _ in got:
        assert_close(one, shared(x), LOOSE)


@pytest.mark.parametrize("reduction", ["partial", "replicated"])
@pytest.mark.parametrize("separate", [False, True], ids=["joined", "separate"])
def test_what_reduces_is_given_the_smaller_width_before_the_transform(
    separate: bool, reduction: str
) -> None:
    widths: list[int] = []

    def double(part: Tensor) -> Tensor:
        widths.append(part.shape[-1])
        return 2 * part

    latent, plain, x = Latent(bias=True), randomize(MoELayer(**SIZES)), torch.randn(5, 48)
    layer = MoELayer(
        **latent.options(), shared_reduction=reduction, reduce_results=double, separate=separate,
        parallel=ParallelConfig.of(tp=2),
    )  # fmt: skip
    take_share(plain, layer_without_gate(layer))
    layer.gate = latent.gate
    alone = MoELayer(**SIZES, parallel=ParallelConfig.of(tp=2))
    take_share(plain, alone)
    routed = latent.up(2 * alone(latent.down(x), latent.gate(x)))
    shared = (2 if reduction == "partial" else 1) * latent.shared(x)
    got = layer(x)
    assert_close(sum(got) if separate else got, shared + routed, LOOSE)
    assert widths == ([32, 48] if reduction == "partial" else [32])


def layer_without_gate(layer: MoELayer) -> MoELayer:
    layer.gate = None
    return layer


def test_a_gate_of_its_own_is_as_wide_as_the_input() -> None:
    layer = MoELayer(**SIZES, internal_gate=True, routed_input_transform=nn.Linear(48, 32))
    assert layer.gate.weight.shape == (6, 48)
    assert layer(torch.randn(5, 48)).shape == (5, 32)


def test_gradients_reach_both_transforms() -> None:
    latent = Latent()
    layer = randomize(MoELayer(**latent.options()))
    x = torch.randn(5, 48)
    with torch.enable_grad():
        got = torch.autograd.grad(layer(x).sum(), [latent.down.weight, latent.up.weight])
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in got)


@pytest.mark.parametrize("reduction", ["partial", "replicated"])
def test_widths_that_cannot_be_added_are_refused(reduction: str) -> None:
    latent = Latent()
    options = {**latent.options(), "routed_output_transform": None, "shared_reduction": reduction}
    message = "routed experts return a width of 32 and the shared ones 48, which cannot be added; "
    with pytest.raises(ValueError, match=message + "give a routed_output_transform from 32 to 48"):
        MoELayer(**options)(torch.randn(5, 48))
    shared, routed = MoELayer(**options, separate=True)(torch.randn(5, 48))
    assert (shared.shape, routed.shape) == ((5, 48), (5, 32))


def test_parts_that_make_no_sum_are_refused() -> None:
    options, two = Latent(bias=True).options(), ParallelConfig.of(tp=2)
    with pytest.raises(ValueError, match="each of 2 ranks would add the bias of routed_output"):
        MoELayer(**options, parallel=two)
    MoELayer(**options, parallel=two, reduce_results=torch.clone)
    with pytest.raises(ValueError, match="there is no such module; give it as shared_experts"):
        MoELayer(**SIZES, separate=True)
    with pytest.raises(ValueError, match="there is no such module; give it as shared_experts"):
        MoELayer(**SIZES, separate=True, shared_experts=2)
