"""The expert kernels against the definition of `experts`; in Triton's interpreter without a GPU.

The interpreter multiplies float16 and float32 alone, so bfloat16 is left to tests/gpu.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import dispatch, expert_gemm, experts
from moe_ops.backends.triton import run_experts
from moe_ops.testing import (
    ACTIVATIONS,
    CASES,
    DEVICE,
    TOL,
    Case,
    Layer,
    assert_close,
    float32,
    make_layer,
)
from tests.chosen import in_turn

pytest.importorskip("triton", reason="the kernels are Triton's")

F16 = torch.float16
KERNELS = {name: b for name, b in experts.backends.items() if name.startswith("triton.")}
SMALL = {case.name: case for case in CASES if 0 < case.T <= 16}
SLOW = ("many_experts", "plain", "odd_unaligned", "every_expert", "one_expert")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def run(kernel: str, layer: Layer, **more: Any) -> Tensor:
    call = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    record = experts.call(*call, **more)
    refusal = KERNELS[kernel].refusal(DEVICE, len(layer.x_TD), record)
    if refusal not in (None, "needs a tensor on cuda, got cpu"):
        pytest.skip(f"{kernel} does not take it")
    return KERNELS[kernel].run(record)


def definition(layer: Layer, **more: Any) -> Tensor:
    call = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    more = {k: float32(v) for k, v in more.items()}
    return experts.reference(*map(float32, call), **more)


def check(kernel: str, layer: Layer, **more: Any) -> None:
    assert_close(run(kernel, layer, **more), definition(layer, **more), TOL["experts", F16], kernel)


# The interpreter takes a block at a time: many small experts and many activations take seconds.
QUICK = [pytest.param(c, id=n, marks=[pytest.mark.slow] * (n in SLOW)) for n, c in SMALL.items()]


@in_turn(each_kernel, pytest.mark.parametrize("case", QUICK))
def test_every_case(kernel: str, case: Case) -> None:
    layer = make_layer(case, F16, DEVICE)
    check(kernel, layer)
    check(kernel, layer, b13_EF=layer.b13_EF, b2_ED=layer.b2_ED.float())


@pytest.mark.slow
@each_kernel
def test_wide_experts(kernel: str) -> None:
    """Which have tiles of their own."""
    check(kernel, make_layer(Case(name="wide", T=3, E=2, K=2, D=24, I=1040), F16, DEVICE))


@pytest.mark.slow
@in_turn(each_kernel, pytest.mark.parametrize("name", ACTIVATIONS))
def test_every_activation(kernel: str, name: str) -> None:
    args = ACTIVATIONS[name]
    layer = make_layer(SMALL["odd"], F16, DEVICE, gated=args.get("gated", True))
    check(kernel, layer, b13_EF=layer.b13_EF, **args)


@each_kernel
def test_transposed_weights(kernel: str) -> None:
    layer = make_layer(SMALL["odd"], F16, DEVICE, transposed=True)
    check(kernel, layer, transposed=True, interleaved=True)


@pytest.mark.slow
@each_kernel
def test_experts_that_are_not_here_add_nothing(kernel: str) -> None:
    layer = make_layer(SMALL["odd"], F16, DEVICE)
    layer.ids_TK[0] = torch.tensor([-1, 5, 4])
    layer.ids_TK[1] = -1
    layer.x_TD[1] = float("nan")  # a token without experts is never read
    biases = {"b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED}
    out = run(kernel, layer, **biases)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    check(kernel, layer, **biases)


@pytest.mark.slow
@each_kernel
def test_the_shares_of_two_ranks_sum_to_the_whole(kernel: str) -> None:
    layer = make_layer(SMALL["plain"], F16, DEVICE)
    whole = definition(layer)
    parts = torch.zeros_like(whole)
    for rank in range(2):
        here = torch.arange(8, device=DEVICE) - 4 * rank
        own = slice(4 * rank, 4 * rank + 4)
        share = replace(layer, w13_EFD=layer.w13_EFD[own], w2_EDI=layer.w2_EDI[own])
        expert_map = torch.where((here >= 0) & (here < 4), here, -1)
        parts += run(kernel, share, expert_map=expert_map).float()
    assert_close(parts, whole, TOL["experts", F16])


@each_kernel
def test_one_token_with_more_choices_than_experts_here(kernel: str) -> None:
    layer = make_layer(Case(name="share", T=1, E=8, K=6, D=32, I=16), F16, DEVICE)
    layer.ids_TK[:] = torch.arange(6)
    share = {"w13_EFD": layer.w13_EFD[3:5], "w2_EDI": layer.w2_EDI[3:5]}
    expert_map = torch.tensor([-1, -1, -1, 0, 1, -1, -1, -1], device=DEVICE)
    share_layer = replace(layer, **share)
    check(kernel, share_layer, expert_map=expert_map)


@pytest.mark.slow
@each_kernel
def test_all_tokens_on_one_expert(kernel: str) -> None:
    layer = make_layer(SMALL["plain"], F16, DEVICE)
    layer.ids_TK[:, 0] = 5
    layer.ids_TK[:, 1] = -1
    check(kernel, layer)


@pytest.mark.slow
@in_turn(each_kernel, pytest.mark.parametrize("T", [1, SMALL["plain"].T]))
def test_an_expert_chosen_twice_by_a_token_counts_twice(kernel: str, T: int) -> None:
    layer = make_layer(replace(SMALL["plain"], T=T), F16, DEVICE)
    layer.ids_TK[:] = layer.ids_TK[:, :1]
    check(kernel, layer, b2_ED=layer.b2_ED)


@pytest.mark.slow
@in_turn(each_kernel, pytest.mark.parametrize("name", ACTIVATIONS))
def test_a_token_of_nan_leaves_the_others_alone(kernel: str, name: str) -> None:
    args = ACTIVATIONS[name]
    layer = make_layer(SMALL["odd"], F16, DEVICE, gated=args.get("gated", True))
    layer.x_TD[3] = float("nan")
    out = run(kernel, layer, **args)
    assert bool(out[3].isnan().all())
    others = torch.arange(layer.x_TD.shape[0], device=DEVICE) != 3
    assert_close(out[others], definition(layer, **args)[others], TOL["experts", F16])


@in_turn(each_kernel, pytest.mark.parametrize("mapped", [False, True]))
def test_ids_beyond_32_bits_are_experts_that_are_not_here(kernel: str, mapped: bool) -> None:
    layer = make_layer(SMALL["odd"], F16, DEVICE)
    ids = layer.ids_TK.long()
    ids[0, 0], ids[1, 1] = 2**32 + 1, -(2**32)
    here = torch.arange(SMALL["odd"].E, device=DEVICE)
    check(kernel, replace(layer, ids_TK=ids), expert_map=here if mapped else None)


@pytest.mark.slow
@each_kernel
def test_tokens_farther_apart_than_32_bits(kernel: str, tmp_path: Path) -> None:
    """Rows of a larger tensor, such as the last token of each of several sequences."""
    layer = make_layer(Case(name="apart", T=4, E=2, K=2, D=40, I=8), F16, DEVICE)
    far, size = 900_000_000, 2_800_000_000
    if DEVICE == "cuda":
        memory = torch.empty(size, dtype=F16, device=DEVICE)
    else:  # a file that takes no space where nothing is written
        memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=F16)
    x = memory.as_strided(layer.x_TD.shape, (far, 1))
    x.copy_(layer.x_TD)
    assert_close(run(kernel, replace(layer, x_TD=x)), definition(layer), TOL["experts", F16])


@pytest.mark.slow
@each_kernel
def test_strided_tokens_and_weights(kernel: str) -> None:
    layer = make_layer(SMALL["odd"], F16, DEVICE)
    twice = {name: getattr(layer, name).repeat_interleave(2, 0) for name in ("w13_EFD", "w2_EDI")}
    strided = replace(
        layer,
        x_TD=layer.x_TD.T.contiguous().T,
        weights_TK=layer.weights_TK.T.contiguous().T,
        ids_TK=layer.ids_TK.long().T.contiguous().T,
        w13_EFD=twice["w13_EFD"][::2],
        w2_EDI=twice["w2_EDI"][::2],
    )
    assert_close(run(kernel, strided), definition(layer), TOL["experts", F16])


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_one_product(transposed: bool) -> None:
    layer = make_layer(SMALL["odd"], F16, DEVICE, transposed=transposed)
    ids_TK = layer.ids_TK.clone()
    ids_TK[0] = -1
    x_RD, _, ends_E = dispatch(layer.x_TD, ids_TK, 5)
    used = int(ends_E[-1])
    x_RD[used:] = float("nan")
    call = (x_RD, layer.w13_EFD, ends_E, layer.b13_EF, transposed)
    got = expert_gemm.backends["triton"].run(expert_gemm.call(*call))
    want = expert_gemm.reference(*map(float32, call))
    assert_close(got[:used], want[:used], TOL["expert_gemm", F16])


@pytest.mark.slow
@in_turn(
    pytest.mark.parametrize("biases", [False, True]),
    pytest.mark.parametrize("T", [1, 3]),
    each_kernel,
)
def test_a_residual_is_added_to_what_was_rounded(kernel: str, T: int, biases: bool) -> None:
    layer = make_layer(Case(name="residual", T=T, E=5, K=3, D=33, I=16), F16, DEVICE)
    more = (layer.b13_EF, layer.b2_ED) if biases else (None, None)
    given = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI, *more)
    call = experts.call(*given)
    residual_TD = torch.randn(layer.x_TD.shape, device=DEVICE).to(F16)
    name = kernel.removeprefix("triton.")
    out, onto = (run_experts(name, call, r) for r in (None, residual_TD))
    assert torch.equal(onto, residual_TD + out)
    strided = residual_TD.T.contiguous().T
    assert torch.equal(onto, run_experts(name, call, strided))


def test_more_tokens_than_tiny_takes_are_refused() -> None:
    layer = make_layer(next(c for c in CASES if c.T == 70), F16, DEVICE)
    call = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    record = experts.call(*call)
    refusal = KERNELS["triton.tiny"].refusal("cuda", 70, record)
    assert refusal == "takes at most 16 rows, got 70"
    with pytest.raises(ValueError, match="takes 16 tokens and 64 pairs"):
        KERNELS["triton.tiny"].run(record)


@pytest.mark.parametrize("memory", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_of_few_rows_fit_shared_memory(memory: int) -> None:
    from moe_ops.backends.triton_tiles import TILES, rows_fitting

    for *_, tiles in TILES:
        fit = rows_fitting(tiles, True, 16, memory)
        for tile, weights in ((fit.up, 2 * fit.up.rows), (fit.down, fit.down.rows)):
            assert tile.stages >= 2
            assert 2 * tile.step * (weights + tile.BN) * tile.stages <= memory
        assert rows_fitting(tiles, True, 16, 227 * 1024) == tiles


@each_kernel
def test_no_tokens(kernel: str) -> None:
    layer = make_layer(next(c for c in CASES if c.T == 0), F16, DEVICE)
    assert run(kernel, layer).shape == layer.x_TD.shape
