"""Scales and row orders resolved: against formulas by hand, round trips, and every refusal."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_ops.quant.resolve import (
    Multiplier,
    Reciprocal,
    alphas,
    as_multiplier,
    as_reciprocal,
    deinterleave_gate_up,
    e8m0_to_float32,
    float32_to_e8m0,
    interleave_gate_up,
    local_experts,
    merge_gate_up,
    one_input_scale,
    per_expert,
    swap_gate_up,
    swizzle_128x4,
    unswizzle_128x4,
)

E = 4
NAN, INF = math.nan, math.inf
scales = st.floats(2.0**-100, 2.0**100, width=32)
E8M0_CODES = torch.arange(256, dtype=torch.uint8)
BYTES = [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu]
STORED = [torch.int32, torch.float32, torch.bfloat16, *BYTES]


def raw(t: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN and dtypes without == compare."""
    return t.contiguous().reshape(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def counted(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A tensor of random bytes."""
    data = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def strided(t: Tensor) -> Tensor:
    """The same values with a gap after each."""
    wide = torch.stack((t, t), dim=-1)
    return wide[..., 0]


def own(t: Tensor, *sources: Tensor) -> bool:
    return all(t.untyped_storage() is not s.untyped_storage() for s in sources)


def test_a_reciprocal_becomes_a_multiplier_and_back() -> None:
    held = torch.tensor([[2.0, 0.5], [-4.0, 8.0]])
    before = held.clone()
    multiplier = as_multiplier(Reciprocal(held)).tensor
    assert torch.equal(multiplier, torch.tensor([[0.5, 2.0], [-0.25, 0.125]]))
    assert torch.equal(as_reciprocal(Multiplier(held)).tensor, multiplier)
    assert torch.equal(held, before)


def test_what_has_the_convention_already_is_not_touched() -> None:
    multiplier, reciprocal = Multiplier(torch.zeros(2)), Reciprocal(torch.zeros(2))
    assert as_multiplier(multiplier) is multiplier
    assert as_reciprocal(reciprocal) is reciprocal


@given(st.lists(scales, max_size=8))
def test_decoding_is_the_same_in_both_conventions(values: list[float]) -> None:
    held = torch.tensor(values)
    there = as_reciprocal(Multiplier(held))
    torch.testing.assert_close(as_multiplier(there).tensor, held, rtol=2.0**-22, atol=0.0)
    codes = torch.arange(len(values)).float()
    torch.testing.assert_close(codes / there.tensor, codes * held, rtol=2.0**-22, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_an_inverse_is_not_rounded_to_a_narrow_dtype(dtype: torch.dtype) -> None:
    inverse = as_multiplier(Reciprocal(torch.tensor([3.0]).to(dtype))).tensor
    assert torch.equal(inverse, torch.tensor([1.0]) / 3.0)


@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN, 2.0**-140])
@pytest.mark.parametrize(
    "convert", [lambda t: as_multiplier(Reciprocal(t)), lambda t: as_reciprocal(Multiplier(t))]
)
def test_what_has_no_inverse_is_refused(convert: Callable[[Tensor], object], value: float) -> None:
    with pytest.raises(ValueError, match=f"scale {value} has no finite inverse; every scale"):
        convert(torch.tensor([1.0, value]))


@pytest.mark.parametrize("convert", [as_multiplier, as_reciprocal])
def test_bare_tensors_and_codes_are_no_scales(convert: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="scale must be a Multiplier or a Reciprocal, got Tensor"):
        convert(torch.ones(1))
    with pytest.raises(TypeError, match="scale must be floating point, got uint8; decode e8m0"):
        convert((Reciprocal if convert is as_multiplier else Multiplier)(E8M0_CODES))


def test_alphas_by_hand() -> None:
    weight, given_scale = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor(0.5)
    before = weight.clone(), given_scale.clone()
    pairs = {
        (Multiplier, Multiplier): [0.5, 1.0, 2.0, 4.0],
        (Multiplier, Reciprocal): [2.0, 4.0, 8.0, 16.0],
        (Reciprocal, Multiplier): [0.5, 0.25, 0.125, 0.0625],
        (Reciprocal, Reciprocal): [2.0, 1.0, 0.5, 0.25],
    }
    for (of_weight, of_input), want in pairs.items():
        alpha_E = alphas(of_weight(weight), of_input(given_scale), E)
        assert torch.equal(alpha_E, torch.tensor(want))
        assert alpha_E.is_contiguous()
        assert own(alpha_E, weight, given_scale)
    assert torch.equal(alphas(Multiplier(weight), None, E), weight)
    assert own(alphas(Multiplier(weight), None, E), weight)
    assert torch.equal(weight, before[0])
    assert torch.equal(given_scale, before[1])


@pytest.mark.parametrize(("weight", "input", "got"), [(NAN, 1.0, "nan"), (2e38, 2e38, "inf")])
def test_an_alpha_that_is_not_finite_is_refused(weight: float, input: float, got: str) -> None:
    weight_E = torch.tensor([1.0, 1.0, weight, 1.0])
    message = f"weight scale x input scale of expert 2 is {got}; check that each scale is named"
    with pytest.raises(ValueError, match=message):
        alphas(Multiplier(weight_E), Multiplier(torch.tensor(input)), E)


def test_alphas_name_the_argument_that_is_wrong() -> None:
    one = torch.ones(1)
    with pytest.raises(TypeError, match="weight must be a Multiplier or a Reciprocal, got Tensor"):
        alphas(one, None, E)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="input must be a Multiplier or a Reciprocal, got Tensor"):
        alphas(Multiplier(one), one, E)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input is on meta, but the first argument is on cpu"):
        alphas(Multiplier(one), Multiplier(one.to("meta")), E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (E,), (E, 1), (E, 1, 1)], ids=str)
def test_per_expert_gives_each_expert_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scale = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(dtype)
    before = scale.clone()
    scale_E = per_expert(scale, E)
    assert scale_E.dtype == torch.float32
    assert scale_E.tolist() == ([1.0, 2.0, 3.0, 4.0] if scale.numel() == E else [1.0] * E)
    assert scale_E.stride() == (1,)
    assert own(scale_E, scale)
    assert same(scale, before)


@pytest.mark.parametrize("shape", [(0,), (E - 1,), (E, 2), (2, E), (1, E), (1, 1, E)], ids=str)
def test_per_expert_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    message = f"scale must be one value or one for each of 4 experts, got shape {shape}"
    with pytest.raises(ValueError, match=re.escape(message)):
        per_expert(torch.ones(shape), E)


@given(st.lists(scales, min_size=1, max_size=8))
def test_one_input_scale_covers_every_expert(values: list[float]) -> None:
    scale_E = torch.tensor(values)
    before = scale_E.clone()
    one = one_input_scale(scale_E)
    assert (one.dtype, one.shape) == (torch.float32, ())
    assert bool((one >= scale_E).all())
    assert float(one) in scale_E.tolist()
    assert torch.equal(scale_E, before)


@pytest.mark.parametrize("value", [0.0, -1.0, INF, NAN])
def test_one_input_scale_refuses_what_is_no_range(value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"scale_E[1] is {value}, but an input scale")):
        one_input_scale(torch.tensor([1.0, value]))


@pytest.mark.parametrize("shape", [(), (0,), (2, 1)], ids=str)
def test_one_input_scale_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"scale_E must be \[E\] with E > 0, got shape"):
        one_input_scale(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_equal_gate_and_up_merge(dtype: torch.dtype) -> None:
    scale_E2 = torch.tensor([[1.0, 1.0], [0.5, 0.5]]).to(dtype)
    merged = merge_gate_up(scale_E2)
    assert same(merged, torch.tensor([[[1.0]], [[0.5]]]).to(dtype))
    assert merged.is_contiguous()
    assert own(merged, scale_E2)
    assert same(merged, merge_gate_up(scale_E2[:, :, None]))


@pytest.mark.parametrize("up", [4.0, NAN])
def test_unequal_gate_and_up_do_not_merge(up: float) -> None:
    with pytest.raises(
        ValueError, match=f"expert 1 has the gate scale 3.0 and the up scale {up}, but one scale"
    ):
        merge_gate_up(torch.tensor([[1.0, 1.0], [3.0, up], [5.0, 6.0]]))


IDS = {
    "range": (range(1, 3), [1, 2], True),
    "empty": (range(2, 2), [], True),
    "beyond_but_empty": (range(9, 9), [], True),
    "slice": (slice(2, None), [2, 3], True),
    "from_the_back": (slice(-3, -1), [1, 2], True),
    "step": (range(0, 4, 2), [0, 2], False),
    "backwards": (slice(None, None, -1), [3, 2, 1, 0], False),
    "ids": (torch.tensor([3, 0, 3]), [3, 0, 3], False),
    "ids_int32": (torch.tensor([1, 2], dtype=torch.int32), [1, 2], False),
}


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize(("ids", "want", "is_view"), IDS.values(), ids=IDS)
def test_local_experts(
    ids: Tensor | range | slice, want: list[int], is_view: bool, dtype: torch.dtype
) -> None:
    t = counted(E, 3, 2, dtype=dtype)
    before = t.clone()
    local = local_experts(t, ids)
    assert same(local, torch.stack([t[i] for i in want]) if want else t[:0])
    assert own(local, t) is not is_view
    assert same(t, before)


OUTSIDE = {
    "range": (range(2, 5), "range(2, 5) holds 4, but the tensor has 4 experts"),
    "range_below": (range(-1, 2), "range(-1, 2) holds -1, but the tensor has 4 experts"),
    "slice": (slice(2, 6), "slice(2, 6, None) reaches beyond the 4 experts of the tensor"),
    "ids": (torch.tensor([0, 4]), "expert_ids holds 4, but the tensor has 4 experts"),
    "ids_below": (torch.tensor([0, -1]), "expert_ids holds -1, but the tensor has 4 experts"),
    "matrix": (torch.zeros(2, 2).long(), "expert_ids must have 1 axes, got shape (2, 2)"),
}


@pytest.mark.parametrize(("ids", "message"), OUTSIDE.values(), ids=OUTSIDE)
def test_experts_that_do_not_exist_are_refused(ids: Tensor | range | slice, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        local_experts(torch.ones(E, 2), ids)


def test_masks_and_scalars_have_no_expert_ids() -> None:
    with pytest.raises(TypeError, match="expert_ids must be int32, int64; got bool"):
        local_experts(torch.ones(2), torch.tensor([True, False]))
    with pytest.raises(ValueError, match="tensor must have experts on axis 0, got a scalar"):
        local_experts(torch.tensor(1.0), range(1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_is_the_power_of_two(dtype: torch.dtype) -> None:
    codes = strided(E8M0_CODES).view(dtype)
    got = e8m0_to_float32(codes)
    assert got.dtype == torch.float32
    assert got[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert bool(got[255].isnan())
    assert torch.equal(codes.view(torch.uint8), E8M0_CODES)


@given(st.lists(st.integers(0, 254), max_size=8))
def test_e8m0_round_trip(codes: list[int]) -> None:
    held = torch.tensor(codes, dtype=torch.uint8)
    assert same(float32_to_e8m0(e8m0_to_float32(held)), held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_powers_of_two_become_e8m0(dtype: torch.dtype) -> None:
    scale = torch.tensor([[0.5], [1.0], [2.0**-20]]).to(dtype)
    assert float32_to_e8m0(scale).tolist() == [[126], [127], [107]]
    assert float32_to_e8m0(scale[0, 0]).tolist() == 126


@given(st.floats(width=32).filter(lambda x: not (x > 0 and math.frexp(x)[0] == 0.5)))
def test_other_values_are_refused_and_named(value: float) -> None:
    message = re.escape(f"scale {value} is not a power of two") + ".*re-quantise the weights"
    with pytest.raises(ValueError, match=message):
        float32_to_e8m0(torch.tensor([1.0, value, 3.0]))


@pytest.mark.parametrize("value", [2.0**-128, 2.0**-149, -1.0, 0.0, INF])
def test_powers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"scale {value} is not a power of two from")):
        float32_to_e8m0(torch.tensor([value]))


@pytest.mark.parametrize(("convert", "got"), [(e8m0_to_float32, "float32"), (float32_to_e8m0, "")])
def test_e8m0_wants_its_dtypes(convert: Callable[[Tensor], Tensor], got: str) -> None:
    with pytest.raises(TypeError, match=f"scale must be .*; got {got or 'uint8'}; convert it"):
        convert(torch.ones(1) if got else E8M0_CODES)


ROWS = {
    swap_gate_up: [2, 3, 0, 1],
    interleave_gate_up: [0, 2, 1, 3],
    deinterleave_gate_up: [0, 2, 1, 3],
}
each_reorder = pytest.mark.parametrize("reorder", ROWS, ids=lambda f: f.__name__)


@each_reorder
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("columns", [(), (1,), (3, 2)], ids=str)
def test_rows_are_reordered(
    reorder: Callable[[Tensor], Tensor], columns: tuple[int, ...], dtype: torch.dtype
) -> None:
    for t in (counted(2, 4, *columns, dtype=dtype), counted(4, 2, *columns, dtype=dtype)[::2]):
        before = t.clone()
        rows = ROWS[reorder] if t.shape[1] == 4 else [1, 0] if reorder is swap_gate_up else [0, 1]
        got = reorder(t)
        assert same(got, torch.stack([t[:, row] for row in rows], dim=1))
        assert own(got, t)
        assert same(t, before)


@given(experts=st.integers(0, 3), half=st.integers(0, 5), columns=st.integers(0, 3))
def test_reordered_rows_come_back(experts: int, half: int, columns: int) -> None:
    t = counted(experts, 2 * half, columns)
    assert same(swap_gate_up(swap_gate_up(t)), t)
    assert same(deinterleave_gate_up(interleave_gate_up(t)), t)
    assert same(interleave_gate_up(deinterleave_gate_up(t)), t)


@each_reorder
def test_rows_without_halves_are_refused(reorder: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"as many rows of gate as of up .* shape \(2, 3, 4\)"):
        reorder(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"t must be \[E, rows, ...\], got shape \(2,\)"):
        reorder(torch.ones(2))


SIZES = [(128, 4), (256, 8), (1, 1), (130, 5), (96, 3), (128, 9)]


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_swizzle_by_hand(rows: int, columns: int, dtype: torch.dtype) -> None:
    scale = strided(counted(2, rows, columns, dtype=dtype))
    before = scale.clone()
    got = swizzle_128x4(scale)
    down, across = -(-rows // 128), -(-columns // 4)
    want = torch.zeros(2, down * across * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile, row, column = r // 128 * across + c // 4, r % 128, c % 4
            place = tile * 512 + row % 32 * 16 + row // 32 * 4 + column
            want[:, place] = scale.view(torch.uint8)[:, r, c]
    assert same(got, want.view(dtype).reshape(2, down * 128, across * 4))
    assert same(unswizzle_128x4(got, rows, columns), before)
    assert same(scale, before)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_swizzle_is_that_of_torchao(rows: int, columns: int) -> None:
    torchao = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scale = counted(2, rows, columns)
    for mine, plain in zip(swizzle_128x4(scale), scale, strict=True):
        assert same(mine.flatten(), torchao.to_blocked(plain))


@given(experts=st.integers(0, 2), rows=st.integers(0, 300), columns=st.integers(0, 12))
def test_swizzle_round_trip(experts: int, rows: int, columns: int) -> None:
    scale = counted(experts, rows, columns)
    blocked = swizzle_128x4(scale)
    assert blocked.shape == (experts, math.ceil(rows / 128) * 128, math.ceil(columns / 4) * 4)
    assert own(blocked, scale)
    plain = unswizzle_128x4(blocked, rows, columns)
    assert same(plain, scale)
    assert plain.is_contiguous()
    assert own(plain, blocked)


def test_swizzle_refuses_what_is_no_scale_factor() -> None:
    with pytest.raises(TypeError, match=r"scale must be uint8, .* got float32; convert it first"):
        swizzle_128x4(torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match=r"scale must have 3 axes, got shape \(2, 3\)"):
        swizzle_128x4(counted(2, 3))
    with pytest.raises(TypeError, match=r"t must be uint8, .* got float32; convert it first"):
        unswizzle_128x4(torch.ones(1, 128, 4), 2, 3)
    message = r"t must be \[E, 128, 4\] for 2 rows and 3 columns of scales, got shape \(1, 128, 8\)"
    with pytest.raises(ValueError, match=message):
        unswizzle_128x4(counted(1, 128, 8), 2, 3)
