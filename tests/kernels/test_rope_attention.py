"""The op from projections to attention: its kernels, CPU code, schema and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.decode_ops.rope_attention import RopeAttentionCall, refusal, rope_attention
from moe_ops.testing import BF16, F16, Tol, assert_close

pytest.importorskip("triton")
from moe_ops.kernels.triton.decode import rope_attention as kernels
from tests.chosen import in_turn

TOL = Tol(3e-3, "float16, rounded up to three times")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sequences, heads of q and of the cache, slots, sizes of heads of keys and of values.
SIZES = [(1, 8, 2, 40, 32, 32), (3, 5, 1, 17, 16, 64), (2, 4, 4, 36, 128, 16)]
NAMES = (
    "q_BHD", "k_BND", "v_BND", "cos_BW", "sin_BW", "slot", "keys_BNSD", "values_BNSD", "mask_BS",
    "scale", "q_gain_D", "k_gain_D", "eps", "sinks_H",
)  # fmt: skip
OTHER = "use torch's attention"


def tensors(
    size: tuple[int, ...], dtype: torch.dtype = F16, gains: bool = True, halves: bool = False,
    sinks: bool = False, slot: int = -5,
) -> dict[str, Any]:  # fmt: skip
    """Slots from the one that is written on are no numbers; the first two are hidden from the first
    sequence, where others are left."""
    B, H, N, S, D, DV = size
    slot %= S

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    angles = torch.randn(1 if halves else B, D // 2 if halves else D, device=DEVICE)
    keys, values = noise(B, N, S, D), noise(B, N, S, DV)
    keys[:, :, slot:] = values[:, :, slot:] = float("nan")
    mask = torch.arange(S, device=DEVICE).expand(B, S) <= slot
    mask[0, : min(2, slot)] = False
    if sinks:  # then a mask that adds
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    given = (
        noise(B, H, D), noise(B, N, D), noise(B, N, DV), angles.cos().to(dtype),
        angles.sin().to(dtype), torch.tensor([slot], device=DEVICE), keys, values, mask, 0.3,
        noise(D) if gains else None, noise(D) if gains else None, 1e-5,
        noise(H) if sinks else None,
    )  # fmt: skip
    return dict(zip(NAMES, given, strict=True))


def definition(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """In float64."""
    (q, k, v, cos, sin, slot, keys, values, mask, scale, q_gain, k_gain, eps, sinks) = (
        given.values()
    )
    (B, H, D), N = q.shape, k.shape[1]
    used = int(slot) + 1

    def turned(x: Tensor, gain: Tensor | None) -> Tensor:
        x = x.double()
        if gain is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain.double()
        h = x.shape[-1] // 2
        c, s = (t.double()[:, None].repeat(1, 1, 2 * h // t.shape[-1]) for t in (cos, sin))
        return x * c + torch.cat([-x[..., h:], x[..., :h]], -1) * s

    keys, values = keys.double(), values.double()
    keys[:, :, int(slot)], values[:, :, int(slot)] = turned(k, k_gain), v.double()
    heads = turned(q, q_gain).view(B, N, H // N, D)
    scores = heads @ keys[:, :, :used].transpose(2, 3) * scale  # [B, N, H / N, used]
    seen = mask if mask.dtype == torch.bool else mask == 0
    scores = scores.masked_fill(~seen[:, None, None, :used], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, N, -1, 1).expand(B, -1, -1, -1)], -1)
    out = scores.softmax(-1)[..., :used] @ values[:, :, :used]
    return out.reshape(B, H, -1), keys, values


def three_launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(kernels, "MOST_BYTES", 0)
    return kernels.run


@in_turn(
    pytest.mark.parametrize("halves", [False, True]),
    pytest.mark.parametrize("gains", [False, True]),
    pytest.mark.parametrize(
        "size", [SIZES[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SIZES[1:])], ids=str
    ),
    pytest.mark.parametrize("of", ["one launch", "three launches", "op"]),
)
def test_against_float64(
    of: str, size: tuple[int, ...], gains: bool, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tensors(size, gains=gains, halves=halves, sinks=gains)
    want = definition(given)
    before = given["keys_BNSD"].clone(), given["values_BNSD"].clone()
    if of == "op" and DEVICE == "cpu":  # in torch's own code what is hidden has to be a number
        for cache in (given["keys_BNSD"], given["values_BNSD"]):
            cache.nan_to_num_()
    call = {"one launch": kernels.run, "op": rope_attention}.get(of) or three_launches(monkeypatch)
    got = call(**given)
    slot = int(given["slot"])
    assert_close(got.float(), want[0].float(), TOL)
    places = zip(("keys_BNSD", "values_BNSD"), before, want[1:], strict=True)
    for name, old, exact in places:
        assert_close(given[name][:, :, slot].float(), exact[:, :, slot].float(), TOL)
        assert torch.equal(given[name][:, :, :slot], old[:, :, :slot])
        behind = given[name][:, :, slot + 1 :]
        assert of == "op" or bool(behind.isnan().all())


@pytest.mark.parametrize("of", ["one launch", "three launches"])
@pytest.mark.parametrize("slot", [0, 1, -1])
def test_the_first_slots_and_the_last(slot: int, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(SIZES[0], slot=slot, sinks=slot == 1)
    want, *_ = definition(given)
    run = kernels.run if of == "one launch" else three_launches(monkeypatch)
    assert_close(run(**given).float(), want.float(), TOL)


@pytest.mark.parametrize("of", ["one launch", "three launches"])
@pytest.mark.parametrize("alone", [False, True], ids=["others seen", "nothing seen"])
def test_a_new_slot_that_is_hidden(alone: bool, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a row that is finished; with nothing seen there are sinks alone."""
    given = tensors(SIZES[0], sinks=True)
    low = torch.finfo(F16).min
    given["mask_BS"][:, given["slot"]] = low
    if alone:
        given["mask_BS"][:] = low
    want, *_ = definition(given)
    run = kernels.run if of == "one launch" else three_launches(monkeypatch)
    assert_close(run(**given).float(), want.float(), TOL)


@pytest.mark.parametrize("gains", [False, True])
def test_the_schema(gains: bool) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for halves in (False, True):
        given = tensors(SIZES[1], BF16, gains, halves, sinks=halves)
        for cache in (given["keys_BNSD"], given["values_BNSD"]):
            cache.nan_to_num_()
        op = torch.ops.moe_ops.rope_attention.default
        torch.library.opcheck(op, tuple(given.values()), test_utils=tests)


def test_refusals_say_why() -> None:
    def why(size: tuple[int, ...] = SIZES[0], **but: Any) -> Any:
        given = tensors(size, BF16) | but
        return refusal(RopeAttentionCall(**given))

    def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    assert why() is None and why(q_gain_D=None, k_gain_D=None) is None
    assert why(cos_BW=zeros(1, 16), sin_BW=zeros(1, 16)) is None
    assert why(q_BHD=zeros(1, 1, 8, 32)) == (
        "q is [1, 1, 8, 32], not [B, H, D]; or the caches are no [B, N, S, D]; reshape them"
    )
    assert why((1, 8, 2, 40, 24, 32)) == f"heads of 24, no power of two from 16 to 256; {OTHER}"
    assert why((1, 8, 2, 40, 32, 8)) == f"heads of 8, no power of two from 16 to 256; {OTHER}"
    assert why(q_BHD=zeros(1, 8, 32, dtype=torch.float32)) == (
        f"q is torch.float32, not bfloat16 or float16; {OTHER}"
    )
    assert why(slot=zeros(2, dtype=torch.int64)) == (
        "the slot is torch.int64 [2], not an int64 [1]; convert it"
    )
    assert why(q_gain_D=None) == (
        "one of q and k has a gain, the other has none; give both or neither"
    )
    angles = "the angles are {}, not [1 or 1, 32 or 16]; reshape them"
    assert why(cos_BW=zeros(1, 8)) == angles.format([1, 8])
    assert why(cos_BW=zeros(2, 32)) == angles.format([2, 32])
    assert why(sin_BW=zeros(1, 16)) == (
        "the sin is [1, 16] with the strides (16, 1), not a contiguous [1, 32]; reshape it"
    )
    assert why(k_BND=zeros(1, 32, 2).transpose(1, 2)) == (
        "the k is [1, 2, 32] with the strides (64, 1, 2), not a contiguous [1, 2, 32]; reshape it"
    )
    assert why(keys_BNSD=zeros(1, 2, 41, 32)) == (
        "the cache of keys is [1, 2, 41, 32] with the strides (2624, 1312, 32, 1), not a "
        "contiguous [1, 2, 40, 32]; reshape it"
    )
    assert why(k_gain_D=zeros(32, dtype=F16)) == (
        f"the gain of k is torch.float16 on {zeros(1).device}, q torch.bfloat16 on "
        f"{zeros(1).device}; convert one of them"
    )
    assert why(mask_BS=zeros(1, 39)) == (
        "the mask is torch.bfloat16 [1, 39], not of 1 x 40 slots; give bools or floats of that "
        "shape"
    )
    given = tensors((1, 8, 2, 40, 24, 32), BF16)
    with pytest.raises(ValueError, match="rope_attention: heads of 24"):
        rope_attention(**given)
