"""The Triton kernels on a GPU: the grid of sizes against float32, bits that repeat, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import activate, experts, moe, using
from moe_ops.ops.dispatch import local_ids
from moe_ops.testing import (
    ACTIVATIONS,
    BF16,
    CASES,
    F16,
    F32,
    TOL,
    Case,
    Layer,
    assert_close,
    make_layer,
)
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu

BACKENDS = [name for name in experts.backends if name.startswith("triton.")]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_dtype = pytest.mark.parametrize(
    "dtype", [BF16, F16, F32], ids=["bfloat16", "float16", "float32"]
)

# Published widths that are no multiple of a tile, many experts, choices that are no power of two.
GRID = (
    Case(name="decode", T=1, E=128, K=8, D=2048, I=768),
    Case(name="two_tokens", T=2, E=32, K=4, D=2880, I=2880),
    Case(name="ten_choices", T=6, E=512, K=10, D=1024, I=512),
    Case(name="narrow", T=33, E=16, K=6, D=704, I=72),
    Case(name="sixteen_choices", T=40, E=60, K=16, D=256, I=200),
    Case(name="crowded", T=300, E=4, K=2, D=512, I=704),
    Case(name="prefill", T=1024, E=32, K=4, D=2880, I=720),
    Case(name="few_large", T=512, E=8, K=2, D=1024, I=3584),
    Case(name="long", T=5000, E=64, K=8, D=256, I=128),
)


def call_of(layer: Layer) -> tuple[Tensor, ...]:
    return (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)


def run(backend: str, layer: Layer, **more: Any) -> Tensor:
    refusal = experts.backends[backend].refusal(
        "cuda", len(layer.x_TD), experts.call(*call_of(layer), **more)
    )
    if refusal is not None:
        pytest.skip(f"{backend} {refusal}")
    with using(backend, "experts"):
        return experts(*call_of(layer), **more)


def definition(
    layer: Layer,
    expert_map: Tensor | None = None,
    b13_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    transposed: bool = False,
    **activation: Any,
) -> Tensor:
    """The experts in float32, one at a time: the definition itself gathers a weight per row."""
    E, K = layer.w13_EFD.shape[0], layer.ids_TK.shape[1]
    ids_R = local_ids(layer.ids_TK, E, expert_map)
    out_TD = torch.zeros(layer.x_TD.shape, device="cuda")
    for e in ids_R.unique().tolist():
        if e == E:
            continue
        pairs = (ids_R == e).nonzero()[:, 0]
        w13, w2 = layer.w13_EFD[e].float(), layer.w2_EDI[e].float()
        y = layer.x_TD[pairs // K].float() @ (w13 if transposed else w13.T)
        if b13_EF is not None:
            y += b13_EF[e].float()
        y = activate.reference(y, **activation) @ (w2 if transposed else w2.T)
        if b2_ED is not None:
            y += b2_ED[e].float()
        out_TD.index_add_(0, pairs // K, y * layer.weights_TK.flatten()[pairs, None].float())
    return out_TD


def check(backend: str, layer: Layer, **more: Any) -> None:
    tol = TOL["experts", layer.x_TD.dtype]
    assert_close(run(backend, layer, **more), definition(layer, **more), tol, backend)


@each_backend
@each_dtype
@pytest.mark.parametrize("case", [*GRID, *CASES], ids=lambda case: case.name)
def test_every_size(backend: str, case: Case, dtype: torch.dtype) -> None:
    layer = make_layer(case, dtype, "cuda")
    check(backend, layer)
    check(backend, layer, b13_EF=layer.b13_EF, b2_ED=layer.b2_ED)


@each_backend
@pytest.mark.parametrize("T", [3, 200])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(backend: str, name: str, T: int) -> None:
    args = ACTIVATIONS[name]
    case = Case(name=name, T=T, E=8, K=3, D=320, I=136)
    layer = make_layer(case, BF16, "cuda", gated=args.get("gated", True))
    check(backend, layer, b13_EF=layer.b13_EF, **args)


@each_backend
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("T", [3, 200])
def test_transposed_weights(backend: str, T: int, interleaved: bool) -> None:
    layer = make_layer(Case(name="t", T=T, E=8, K=3, D=320, I=136), BF16, "cuda", transposed=True)
    check(backend, layer, transposed=True, interleaved=interleaved, b13_EF=layer.b13_EF)


@each_backend
@pytest.mark.parametrize("T", [4, 300])
def test_extreme_skew_and_experts_that_are_not_here(backend: str, T: int) -> None:
    layer = make_layer(Case(name="s", T=T, E=32, K=4, D=512, I=256), BF16, "cuda")
    layer.ids_TK[:, 0] = 7  # every token, and many experts stay empty
    layer.ids_TK[:, 1:] %= 3
    layer.ids_TK[::3, 3] = -1
    layer.ids_TK[0] = 32
    biases = {"b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED}
    check(backend, layer, **biases)
    expert_map = torch.randperm(40, device="cuda", dtype=torch.int32)[:32] - 8
    check(backend, layer, expert_map=expert_map, **biases)


@pytest.fixture(params=["apart", "overlapping"])
def launches(request: pytest.FixtureRequest) -> None:
    """With fills of NaN between them, and as they are in use."""
    if request.param == "overlapping":
        request.getfixturevalue("overlapping")


@each_backend
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    "case", [c for c in GRID if c.T in (1, 6, 300, 1024)], ids=lambda c: c.name
)
def test_twenty_runs_give_the_same_bits(backend: str, case: Case) -> None:
    layer = make_layer(case, BF16, "cuda")
    first = run(backend, layer)
    for _ in range(19):
        assert torch.equal(run(backend, layer), first)


@pytest.mark.parametrize("case", [c for c in GRID if c.T <= 1024], ids=lambda case: case.name)
@each_backend
@pytest.mark.usefixtures("launches")
def test_replays_see_new_inputs_and_new_routing(backend: str, case: Case) -> None:
    layer = make_layer(case, BF16, "cuda")
    run(backend, layer)
    x, logits = layer.x_TD.clone(), layer.logits_TE.clone()

    def call() -> Tensor:
        with using(backend, "experts"):
            return moe(x, logits, layer.w13_EFD, layer.w2_EDI, case.K, renormalize=True)

    def twice() -> Tensor:
        """In a row, as their launches may overlap."""
        call()
        return call()

    twice()
    torch.cuda.synchronize()
    graph, out = captured(twice)
    for seed in (1, 2, 3):
        other = make_layer(case, BF16, "cuda", seed=seed)
        x.copy_(other.x_TD)
        logits.copy_(other.logits_TE)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, call())


@each_backend
def test_nothing_waits_for_the_gpu(backend: str) -> None:
    for T in (2, 400):
        layer = make_layer(Case(name="sync", T=T, E=16, K=4, D=256, I=128), BF16, "cuda")
        if experts.backends[backend].refusal("cuda", T, experts.call(*call_of(layer))) is not None:
            continue
        run(backend, layer)
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(backend, layer)
            moe(layer.x_TD, layer.logits_TE, layer.w13_EFD, layer.w2_EDI, 4)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@each_backend
def test_weights_of_more_than_two_to_the_31_elements(backend: str) -> None:
    # 2.4e9 elements in w13; the last experts lie behind 32-bit offsets.
    case = Case(name="large", T=4, E=72, K=2, D=4096, I=4096)
    x = torch.randn(case.T, case.D, device="cuda", dtype=BF16)
    w13 = torch.empty(case.E, 2 * case.I, case.D, device="cuda", dtype=BF16)
    w2 = torch.empty(case.E, case.D, case.I, device="cuda", dtype=BF16)
    assert w13.numel() > 2**31
    ids = torch.tensor([[0, 71], [70, 71], [36, 1], [64, 63]], device="cuda", dtype=torch.int32)
    for e in ids.unique().tolist():
        w13[e].normal_(std=case.D**-0.5)
        w2[e].normal_(std=case.I**-0.5)
    weights = torch.rand(case.T, case.K, device="cuda")
    with using(backend, "experts"):
        got = experts(x, weights, ids, w13, w2)
    want = torch.zeros(case.T, case.D, device="cuda")
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            gate, up = (w13[e].float() @ x[t].float()).chunk(2)
            want[t] += weights[t, k] * (w2[e].float() @ (torch.nn.functional.silu(gate) * up))
    assert_close(got, want, TOL["experts", BF16])


def test_backends_are_chosen_by_the_number_of_tokens() -> None:
    chosen = []
    for T in (1, 4, 5, 64, 4096):
        layer = make_layer(Case(name="pick", T=T, E=16, K=4, D=64, I=64), BF16, "cuda")
        chosen.append(experts.pick(experts.call(*call_of(layer))).name)
    assert chosen[:4] == ["triton.tiny", "triton.tiny", "triton.rows", "triton.rows"]
    assert chosen[4] == BACKENDS[-1]
