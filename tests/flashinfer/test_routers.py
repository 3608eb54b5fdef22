"""`moe` by kernels that route themselves: given logits, each method against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import experts, flashinfer_options, moe, route
from moe_ops.backends.flashinfer import routers
from moe_ops.ops.experts import ExpertsCall, weights_of
from moe_ops.ops.moe import MoeCall
from moe_ops.ops.route import RouteCall
from moe_ops.passes.fuse_moe import fuse_moe
from moe_ops.passes.lower import lower
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.testing import Case
from tests.flashinfer.layers import call_of, check, stored
from tests.flashinfer.signatures import VERSIONS
from tests.ops.test_routing_methods import CASES as METHODS
from tests.passes.planned import Hook, plans
from tests.passes.post_grad import Compiled

NAME, SHUFFLED = "flashinfer_trtllm", "flashinfer.shuffled"
CASE = Case(name="routed", T=12, E=16, K=4, D=256, I=128)
KNOWN = {key: case for key, case in METHODS.items() if case[0]}
On = Callable[[int, int], None]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Every version that is known, and the published one."""
    found: str = request.param
    return found


def call_with(key: str, formats: str = "bfloat16", **more: Any) -> MoeCall:
    """A layer as weights are loaded, and logits without near ties, routed by a method."""
    _, options, biased, top_k = METHODS[key]
    torch.manual_seed(0)
    layer = call_of(formats, case=replace(CASE, K=top_k), **more)
    order = torch.stack([torch.randperm(CASE.E) for _ in range(CASE.T)])
    logits_TE = order / 4 - 2.0
    bias_E = torch.randn(CASE.E) if biased else None
    return MoeCall(layer, RouteCall(logits_TE, top_k, bias_E, **options))


def prepared(call: MoeCall) -> MoeCall:
    return replace(call, layer=stored(call.layer, SHUFFLED))


def refusal(call: MoeCall) -> str | None:
    return moe.backends[NAME].refusal("cpu", call.layer.x_TD.shape[0], call)


def run(call: MoeCall) -> Tensor:
    moe.check(call)
    assert refusal(call) is None
    out: Tensor = moe.backends[NAME].run(call)
    return out


@pytest.mark.parametrize("key", KNOWN)
def test_a_method(fake: ModuleType, on: On, key: str) -> None:
    on(10, 0)
    call = call_with(key)
    check(NAME, "bfloat16", run(prepared(call)), moe.body(call))
    name, given = fake.calls[-1]
    assert name == "trtllm_bf16_moe" and given["routing_logits"].dtype == torch.float32
    assert fake.fused_moe.RoutingMethodType(given["routing_method_type"]).name == KNOWN[key][0]
    # The first experts in the place of those that are chosen would be seen.
    other = replace(call.routing, logits_TE=call.routing.logits_TE.flip(1))
    with pytest.raises(AssertionError, match="an error of"):
        check(NAME, "bfloat16", run(prepared(call)), moe.body(replace(call, routing=other)))


@pytest.mark.parametrize("formats", ["blocks", "mxfp8", "mxfp4", "mxfp4-mxfp8", "nvfp4"])
def test_a_format(fake: ModuleType, on: On, formats: str) -> None:
    on(10, 3)
    call = call_with("deepseek", formats)
    check(NAME, formats, run(prepared(call)), moe.body(call))
    bits = "fp8" if formats in ("blocks", "mxfp8") else "fp4"
    assert fake.calls[-1][0] == f"trtllm_{bits}_block_scale_moe"


def test_experts_of_one_rank(fake: ModuleType, on: On) -> None:
    """By an offset; where experts do not follow each other it is refused."""
    on(10, 0)
    call = call_with("qwen3")
    parts = {n: t[4:8].contiguous() for n, t in weights_of(call.layer).items()}
    slots = torch.full((CASE.E,), -1, dtype=torch.int32)
    slots[4:8] = torch.arange(4, dtype=torch.int32)
    layer = replace(call.layer, expert_map=slots, expert_offset=4, **parts)
    call = replace(call, layer=layer)
    check(NAME, "bfloat16", run(prepared(call)), moe.body(call))
    said = refusal(replace(prepared(call), layer=replace(prepared(call).layer, expert_offset=None)))
    assert said == "routes to experts that follow each other; give their expert_offset"


def test_no_tokens(fake: ModuleType, on: On) -> None:
    on(10, 0)
    call = prepared(call_with("qwen3"))
    none = replace(call.layer, x_TD=call.layer.x_TD[:0])
    routing = replace(call.routing, logits_TE=call.routing.logits_TE[:0])
    assert run(MoeCall(none, routing)).shape == (0, CASE.D)
    assert not [n for n, _ in fake.calls if n.startswith("trtllm")]


def wide(E: int, K: int, **options: Any) -> RouteCall:
    return RouteCall(torch.empty(2, E), K, **options)


GROUPED = {"score": "sigmoid", "renormalize": True, "group_fill": "-inf"}
REFUSED: dict[str, tuple[RouteCall, str | None]] = {
    "no_method": (wide(16, 4, scale=2.0), "these options of `route` are none of them"),
    "experts": (wide(320, 4), "by Default to at most 8 of 256 experts, got 4 of 320"),
    "choices": (wide(64, 9), "by Default to at most 8 of 256 experts, got 9 of 64"),
    "groups": (wide(64, 8, n_group=16, topk_group=4, **GROUPED), "at most 4 of 8 groups"),
    "of_a_group": (wide(256, 8, n_group=4, topk_group=2, **GROUPED), "groups of at most 32"),
    "kept": (wide(16, 4, n_group=4, topk_group=1, **GROUPED), "to fewer experts than the kept"),
    "grad": (RouteCall(torch.randn(2, 16, requires_grad=True), 4), "is not differentiable"),
    "deepseek_v3": (wide(256, 8, n_group=8, topk_group=4, **GROUPED), None),
}


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call: RouteCall, said: str | None) -> None:
    route.check(call)
    got = routers.refusal(call)
    assert got == said is None or (said is not None and got is not None and said in got)


def test_an_odd_number_of_experts_in_float8(fake: ModuleType, on: On) -> None:
    """Which of these kernels alone want a multiple of 4, and more experts than choices."""
    on(10, 0)
    for E, K in ((6, 2), (4, 4)):
        call = stored(call_of("blocks", case=replace(CASE, E=E, K=K)), SHUFFLED)
        said = experts.backends[NAME].refusal("cpu", CASE.T, call)
        assert said is not None and said.endswith(f"got {E} and {K}")
        plain = stored(call_of("bfloat16", case=replace(CASE, E=E, K=K)), SHUFFLED)
        assert experts.backends[NAME].refusal("cpu", CASE.T, plain) is None


GRAPHS = {"qwen3": f"moe {NAME}", "scaled_softmax": f"experts {NAME}"}


@pytest.mark.parametrize(("key", "plan"), GRAPHS.items())
def test_a_graph_gives_logits(fake: ModuleType, on: On, key: str, plan: str) -> None:
    """Where the method is one of its own; else it is given ids and weights."""
    on(10, 0)
    call = prepared(call_with(key))
    rest, (_, options, _, top_k) = experts.arguments.flat(call.layer)[3:], METHODS[key]

    def forward(x_TD: Tensor, logits_TE: Tensor) -> Tensor:
        weights_TK, ids_TK = route(logits_TE, top_k, **options)
        out: Tensor = experts(x_TD, weights_TK, ids_TK, *rest)
        return out

    compiled = Compiled(forward, Hook(fuse_moe, pick_backend, lower, strict=True))
    with torch.no_grad():
        compiled(call.layer.x_TD, call.routing.logits_TE)
    assert [found for found in plans(compiled.graphs[0]) if NAME in found] == [plan]


def test_tactics_are_measured_once_for_each_function(fake: ModuleType, on: On) -> None:
    on(10, 0)
    call = prepared(call_with("qwen3"))
    with flashinfer_options(autotune=True):
        for _ in range(2):
            run(call)
            experts.backends[NAME].run(call_of_experts(call))
    assert [n for n, _ in fake.calls] == [
        "autotune", "trtllm_bf16_moe", "autotune", "trtllm_bf16_routed_moe",
        "trtllm_bf16_moe", "trtllm_bf16_routed_moe",
    ]  # fmt: skip


def call_of_experts(call: MoeCall) -> ExpertsCall:
    weights_TK, ids_TK = route.body(call.routing)
    return replace(call.layer, weights_TK=weights_TK, ids_TK=ids_TK)
