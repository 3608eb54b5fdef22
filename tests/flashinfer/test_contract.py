"""Each backend against the definition, by a stand-in that computes from what it is handed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moe_ops import experts, flashinfer_options
from moe_ops.backends.flashinfer import orders
from moe_ops.testing import Case
from tests.flashinfer.layers import (
    CASE,
    WRONG,
    call_of,
    check,
    error_of,
    run,
    stored,
    wanted,
    weights_of,
)
from tests.flashinfer.signatures import VERSIONS

UP_GATE, CHUNKS, SHUFFLED = "flashinfer.up_gate", "flashinfer.chunks", "flashinfer.shuffled"
CUTLASS, CUTE_DSL = "flashinfer_cutlass", "flashinfer_cute_dsl"
B12X, TRTLLM = "flashinfer_b12x", "flashinfer_trtllm"
WAYS = {
    "cutlass-bfloat16": (CUTLASS, UP_GATE, "bfloat16", (9, 0)),
    "cutlass-float8": (CUTLASS, UP_GATE, "float8", (9, 0)),
    "cutlass-blocks": (CUTLASS, UP_GATE, "blocks", (9, 0)),
    "cutlass-mxfp4": (CUTLASS, UP_GATE, "mxfp4", (9, 0)),
    "cutlass-nvfp4": (CUTLASS, UP_GATE, "nvfp4", (10, 0)),
    "cute_dsl-bfloat16": (CUTE_DSL, CHUNKS, "bfloat16", (9, 0)),
    "cute_dsl-nvfp4": (CUTE_DSL, CHUNKS, "nvfp4", (10, 0)),
    "b12x-nvfp4": (B12X, UP_GATE, "nvfp4", (12, 0)),
    "trtllm-bfloat16": (TRTLLM, SHUFFLED, "bfloat16", (10, 3)),
    "trtllm-blocks": (TRTLLM, SHUFFLED, "blocks", (10, 0)),
    "trtllm-mxfp8": (TRTLLM, SHUFFLED, "mxfp8", (10, 0)),
    "trtllm-mxfp4": (TRTLLM, SHUFFLED, "mxfp4", (10, 0)),
    "trtllm-mxfp4-mxfp8": (TRTLLM, SHUFFLED, "mxfp4-mxfp8", (10, 0)),
    "trtllm-nvfp4": (TRTLLM, SHUFFLED, "nvfp4", (10, 0)),
}
by_way = pytest.mark.parametrize(("name", "layout", "formats", "gpu"), WAYS.values(), ids=WAYS)
On = Callable[[int, int], None]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Every version that is known, and the published one."""
    found: str = request.param
    return found


@by_way
def test_a_layer(
    fake: ModuleType, on: On, name: str, layout: str, formats: str, gpu: tuple[int, int]
) -> None:
    on(*gpu)
    call = call_of(formats)
    want, prepared = wanted(call), stored(call, layout)
    check(name, formats, run(name, prepared), want)
    # Gate and up in each other's place, or any order but the layout's, are seen.
    loaded = replace(prepared, **weights_of(call))
    assert error_of(run(name, loaded), want) > WRONG, "weights as they are loaded would do as well"


@by_way
def test_calls_of_every_kind(
    fake: ModuleType, on: On, name: str, layout: str, formats: str, gpu: tuple[int, int]
) -> None:
    """Ungated experts, pairs that go nowhere, 64-bit ids, no tokens."""
    on(*gpu)
    holes = call_of(formats)
    ids = holes.ids_TK.long()
    ids[::3, 0], ids[1] = -1, CASE.E
    holes = replace(holes, ids_TK=ids)
    ungated = None if formats == "blocks" else call_of(formats, gated=False)
    for call in filter(None, (holes, ungated)):
        check(name, formats, run(name, stored(call, layout)), wanted(call))
    none = stored(call_of(formats, tokens=0), layout)
    assert run(name, none).shape == (0, CASE.D)


@pytest.mark.parametrize("offset", [True, False], ids=["offset", "map"])
@by_way
def test_experts_of_one_rank(
    fake: ModuleType, on: On, name: str, layout: str, formats: str, gpu: tuple[int, int],
    offset: bool,
) -> None:  # fmt: skip
    """Global ids and an offset where experts are consecutive, else slots by the map."""
    on(*gpu)
    whole = call_of(formats)
    slots = [-1, -1, 0, 1] if offset else [1, -1, 0, -1]
    here = [slots.index(0), slots.index(1)]
    parts = {n: t[here].contiguous() for n, t in weights_of(whole).items()}
    for n in ("global_scale13_E", "global_scale2_E"):
        if getattr(whole, n) is not None:
            parts[n] = getattr(whole, n)[here]
    mapped = torch.tensor(slots, dtype=torch.int32)
    call = replace(whole, expert_map=mapped, expert_offset=2 if offset else None, **parts)
    prepared = stored(call, layout)
    if name == B12X:
        said = experts.refusals_of(prepared)[name]
        assert said == "has no expert parallelism in nvfp4: every expert must be here"
        return
    check(name, formats, run(name, prepared), wanted(call))
    if name == CUTLASS:
        share = fake.calls[-1][1]
        assert (share["ep_size"], share["ep_rank"]) == ((2, 1) if offset else (1, 0))


def test_scales_in_another_order_or_of_another_expert_are_seen(fake: ModuleType, on: On) -> None:
    for gpu, name, layout in (((12, 0), B12X, UP_GATE), ((10, 0), CUTLASS, UP_GATE)):
        on(*gpu)
        call = call_of("nvfp4")
        want, prepared = wanted(call), stored(call, layout)
        assert prepared.w13_scale_EFG is not None and prepared.global_scale2_E is not None
        for wrong in (
            {"w13_scale_EFG": orders.unswizzled(prepared.w13_scale_EFG)},
            {"w13_scale_EFG": prepared.w13_scale_EFG.view(torch.uint8).roll(1, 0)
                .view(torch.float8_e4m3fn)},
            {"global_scale2_E": prepared.global_scale2_E.roll(1)},
        ):  # fmt: skip
            got = run(name, replace(prepared, **wrong))
            assert error_of(got, want) > WRONG, (name, *wrong)


def test_biases(fake: ModuleType, on: On) -> None:
    on(9, 0)
    for formats in ("bfloat16", "mxfp4"):
        biases = {"b13_EF": torch.randn(4, 256).bfloat16(), "b2_ED": torch.randn(4, 256).bfloat16()}
        call = call_of(formats, **biases)
        check(CUTLASS, formats, run(CUTLASS, stored(call, UP_GATE)), wanted(call))


def between_words(t: Tensor) -> Tensor:
    """The same values, which begin at no multiple of 16 bytes."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


@by_way
def test_memory_that_kernels_cannot_read(
    fake: ModuleType, on: On, name: str, layout: str, formats: str, gpu: tuple[int, int]
) -> None:
    """Of weights and scales it is refused, which FlashInfer does not; tokens are copied."""
    on(*gpu)
    call = call_of(formats)
    prepared = stored(call, layout)
    for weight in weights_of(call):
        wrong = replace(prepared, **{weight: moved(getattr(prepared, weight))})
        said = experts.refusals_of(wrong)[name]
        assert said == "needs weights, scales and biases that begin at a multiple of 16 bytes"
    tokens = replace(prepared, x_TD=between_words(prepared.x_TD))
    check(name, formats, run(name, tokens), wanted(call))


def moved(t: Tensor) -> Tensor:
    """`between_words` of types that torch does not join."""
    whole = t.view(torch.uint8) if t.element_size() == 1 else t
    return between_words(whole).view(t.dtype)


BIASES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dtype": (Tensor.float, "takes biases of the tokens' dtype, torch.bfloat16, got torch.float32"),
    "strides": (
        lambda t: t.T.contiguous().T,
        "needs contiguous tokens, weights, scales and biases",
    ),
    "begin": (
        between_words,
        "needs weights, scales and biases that begin at a multiple of 16 byte",
    ),
}


@pytest.mark.parametrize(("change", "said"), BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("which", ["b13_EF", "b2_ED"])
def test_biases_that_kernels_cannot_read(
    fake: ModuleType, on: On, which: str, change: Callable[[Tensor], Tensor], said: str
) -> None:
    on(9, 0)
    for formats in ("bfloat16", "mxfp4"):
        biases = {"b13_EF": torch.randn(4, 256).bfloat16(), "b2_ED": torch.randn(4, 256).bfloat16()}
        call = stored(call_of(formats, **biases), UP_GATE)
        got = experts.refusals_of(replace(call, **{which: change(getattr(call, which))}))[CUTLASS]
        assert got is not None and got.startswith(said)


def test_sums_have_one_order_unless_other_bits_are_allowed(fake: ModuleType, on: On) -> None:
    for gpu, name, layout in (((9, 0), CUTLASS, UP_GATE), ((9, 0), CUTE_DSL, CHUNKS)):
        on(*gpu)
        call = stored(call_of("bfloat16"), layout)
        for allowed in (False, True):
            fake.calls.clear()
            with flashinfer_options(other_bits=allowed):
                run(name, call)
            flags = [given["use_fused_finalize"] for _, given in fake.calls
                     if "use_fused_finalize" in given]  # fmt: skip
            assert flags == [allowed]


ONE_SCALE = {"cutlass": CUTLASS, "cute_dsl": CUTE_DSL, "trtllm": TRTLLM, "b12x": B12X}


@pytest.mark.parametrize("name", ONE_SCALE.values(), ids=ONE_SCALE)
def test_one_scale_of_inputs_for_experts_with_scales_of_their_own(
    fake: ModuleType, on: On, name: str
) -> None:
    """The largest, the factors of experts with it in place of their own."""
    _, layout, _, gpu = next(way for way in WAYS.values() if way[0] == name and way[2] == "nvfp4")
    on(*gpu)
    call = call_of("nvfp4")
    assert call.x_scale is not None and call.global_scale13_E is not None
    each, largest = call.x_scale * torch.tensor([1.0, 4.0, 2.0, 1.0]), call.x_scale * 4
    factors_E = call.global_scale13_E / call.x_scale
    own = replace(call, x_scale=each, global_scale13_E=factors_E * each)
    one = replace(call, x_scale=largest, global_scale13_E=factors_E * largest)
    got = run(name, stored(own, layout))
    assert torch.equal(got, run(name, stored(one, layout)))
    check(name, "nvfp4", got, wanted(own))


def test_second_inputs_may_have_scales_of_experts(fake: ModuleType, on: On) -> None:
    """TensorRT-LLM's kernels take each expert's own."""
    on(10, 0)
    call = call_of("nvfp4")
    assert call.h_scale is not None and call.global_scale2_E is not None
    each = call.h_scale * torch.tensor([1.0, 4.0, 2.0, 8.0])
    own = replace(call, h_scale=each, global_scale2_E=call.global_scale2_E / call.h_scale * each)
    got = run(TRTLLM, stored(own, SHUFFLED))
    check(TRTLLM, "nvfp4", got, wanted(own))
    assert not torch.equal(fake.calls[-1][1]["output1_scale_scalar"], each)
    assert torch.equal(fake.calls[-1][1]["output2_scale_scalar"], own.global_scale2_E)


@pytest.mark.parametrize("name", [CUTLASS, CUTE_DSL, TRTLLM])
@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 4)], ids=["equal", "unequal"])
def test_shares_of_ranks_add_up(fake: ModuleType, on: On, name: str, cuts: tuple[int, ...]) -> None:
    """CUTLASS knows equal shares alone: the others go by slots."""
    _, layout, _, gpu = next(way for way in WAYS.values() if way[0] == name)
    on(*gpu)
    whole = call_of("bfloat16")
    total = torch.zeros(CASE.T, CASE.D, dtype=torch.float64)
    for first, end in pairwise(cuts):
        there = torch.full((CASE.E,), -1, dtype=torch.int32)
        there[first:end] = torch.arange(end - first)
        parts = {n: t[first:end].contiguous() for n, t in weights_of(whole).items()}
        call = replace(whole, expert_map=there, expert_offset=first, **parts)
        total += run(name, stored(call, layout)).double()
    check(name, "bfloat16", total.bfloat16(), wanted(whole))


@pytest.mark.parametrize(("K", "E"), [(33, 40), (2, 2049), (32, 40)], ids=str)
def test_what_cute_dsl_does_not_sort_is_refused(fake: ModuleType, on: On, K: int, E: int) -> None:
    on(9, 0)
    case = Case(name="many", T=3, E=E, K=K, D=32, I=32)
    call = stored(call_of("bfloat16", case=case), CHUNKS)
    said = experts.backends[CUTE_DSL].refusal("cpu", 3, call)
    most = "sorts at most 32 choices of a token among 2048 experts"
    assert said == (None if (K, E) == (32, 40) else f"{most}, got {K} among {E}")


@pytest.mark.parametrize("formats", ["bfloat16", "mxfp4", "mxfp8", "nvfp4"])
def test_half_of_a_long_tile_is_refused(fake: ModuleType, on: On, formats: str) -> None:
    on(10, 0)
    call = stored(call_of(formats, case=replace(CASE, D=384)), SHUFFLED)
    said = experts.backends[TRTLLM].refusal("cpu", CASE.T, call)
    if formats in ("bfloat16", "mxfp4"):
        assert said is None
    else:
        assert said == "needs widths of the model that are multiples of 256, got 384"
