"""Quantised experts keep their codes: through casts, state dicts, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.hf.stored import stored_format
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import Tol, assert_close
from tests.chosen import in_turn, one_in
from tests.hf.test_quantize import experts_of, gpt_oss, logits, qwen
from tests.quant.blocks import width_of

SCHEME = "int8_w8a16"
EVERY = [name for name in SCHEMES if name != "none"]
EXPERTS = "model.layers.0.mlp.experts"


def quantized(scheme: str = SCHEME, seed: int = 0, make: Any = qwen) -> Any:
    model = make(seed, width_of(scheme))
    weights = {"fp8_w8a8": "float8_e4m3fn:row"}.get(scheme)
    inputs = {"fp8_w8a8": "float8_e4m3fn:row"}.get(scheme)
    report = moe_ops.quantize_model(
        model, scheme, weight_format=weights, input_format=inputs, progress=False
    )
    assert report.modules == 2
    return model


def own(module: nn.Module) -> dict[str, Tensor]:
    """Codes, scales and the rest by name: every tensor but the biases."""
    found = {**module._parameters, **module._buffers}
    return {n: t.clone() for n, t in found.items() if t is not None and not n.endswith("bias")}


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules hold the same codes and scales, bit for bit."""
    a, b = own(one), own(other)
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))
        for n in a
    )


CASTS = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "float": (lambda m: m.float(), torch.float32),
    "to_dtype": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "to_both": (lambda m: m.to("cpu", torch.float16), torch.float16),
    "apart": (lambda m: [e.half() for e in experts_of(m)] and m.half(), torch.float16),
}


@pytest.mark.parametrize("make", [qwen, gpt_oss])
@pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS)
def test_a_cast_leaves_codes_and_scales_and_takes_the_rest(
    cast: Any, dtype: torch.dtype, make: Any
) -> None:
    model = quantized("int4_w4a16", make=make)
    before, want = [copy.deepcopy(m) for m in experts_of(model)], logits(model)
    cast(model)
    assert all(same(a, b) for a, b in zip(before, experts_of(model), strict=True))
    assert model.lm_head.weight.dtype == dtype
    biases = [p for n, p in experts_of(model)[0].named_parameters() if n.endswith("bias")]
    assert all(b.dtype == dtype for b in biases)
    assert len(biases) == (2 if make is gpt_oss else 0)
    got = logits(model)
    assert got.dtype == dtype
    assert_close(got.float(), want, Tol(0.1, "16 bits in every layer"))


@pytest.mark.parametrize("scheme", EVERY)
def test_a_cast_leaves_every_scheme_its_values(scheme: str) -> None:
    model = quantized(scheme)
    want, before = logits(model), copy.deepcopy(experts_of(model)[0])
    model.half().float()
    assert same(before, experts_of(model)[0])
    # Routers and attention went through 16 bits, which moves few tokens to other experts.
    error = (logits(model) - want).norm() / want.norm()
    assert float(error) < 0.05


def test_what_moves_a_model_moves_codes_and_scales() -> None:
    model = quantized("mxfp8_w8a16")
    dtypes = {n: t.dtype for n, t in own(experts_of(model)[0]).items()}
    model.share_memory()
    assert all(t.is_shared() for t in model.state_dict().values())
    moved = copy.deepcopy(model).to("meta", torch.float16)
    assert {n: t.dtype for n, t in own(experts_of(moved)[0]).items()} == dtypes
    assert all(t.is_meta for t in moved.state_dict().values())
    assert moved.lm_head.weight.dtype == torch.float16
    empty = moved.to_empty(device="cpu")
    assert {n: t.dtype for n, t in own(experts_of(empty)[0]).items()} == dtypes
    empty.float().load_state_dict(model.state_dict())
    assert same(experts_of(empty)[0], experts_of(model)[0])


def test_a_cast_of_every_tensor_is_refused() -> None:
    model = quantized()
    with pytest.raises(TypeError, match=r"holds codes or scales .* cast with \.to\(dtype\)"):
        experts_of(model)[0].type(torch.float16)


@one_in(3, pytest.mark.parametrize("scheme", EVERY))
def test_a_saved_state_dict_loads_exactly_into_a_model_of_the_same_format(scheme: str) -> None:
    model, other = quantized(scheme), quantized(scheme, seed=1)
    assert not torch.equal(logits(model), logits(other))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert all(same(a, b) for a, b in zip(experts_of(model), experts_of(other), strict=True))
    assert torch.equal(logits(other), logits(model))
    another = quantized(scheme, seed=2)
    another.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(logits(another), logits(model))


@in_turn(pytest.mark.parametrize("strict", [True, False]), pytest.mark.parametrize("scheme", EVERY))
def test_a_plain_model_refuses_a_quantized_state_dict(scheme: str, strict: bool) -> None:
    plain = qwen(1)
    with pytest.raises(RuntimeError, match=rf"size mismatch for {EXPERTS}\.gate_up_proj"):
        plain.load_state_dict(quantized(scheme).state_dict(), strict=strict)
    assert all(w.isfinite().all() for w in plain.parameters())
    assert torch.equal(experts_of(plain)[0].gate_up_proj, experts_of(qwen(1))[0].gate_up_proj)


@pytest.mark.parametrize("strict", [True, False])
def test_a_quantized_model_refuses_plain_weights_and_other_formats(strict: bool) -> None:
    model = quantized()
    before = copy.deepcopy(experts_of(model)[0])
    with pytest.raises(RuntimeError, match=r"no quantised weight .* before quantize_model"):
        model.load_state_dict(qwen(1).state_dict(), strict=strict)
    with pytest.raises(
        RuntimeError, match=r"is float8_e4m3fn:row in the state dict, .* codes of int8:row; quan"
    ):
        model.load_state_dict(quantized("fp8_w8a16", seed=1).state_dict(), strict=strict)
    without = {n: t for n, t in quantized(seed=1).state_dict().items() if n[-5:] != "_proj"}
    with pytest.raises(RuntimeError, match="no quantised weight in the state dict"):
        model.load_state_dict(without, strict=strict)
    for name in ("gate_up_proj", "gate_up_proj_codes"):
        no_tensor = {**quantized(seed=1).state_dict(), f"{EXPERTS}.{name}": "int8:row"}
        with pytest.raises(RuntimeError, match=rf"{EXPERTS}\.{name}"):
            model.load_state_dict(no_tensor, strict=strict)
        model = quantized()
    scaled = quantized(seed=1).state_dict()
    scaled[f"{EXPERTS}.down_proj_scale"] = scaled[f"{EXPERTS}.down_proj_scale"].half()
    with pytest.raises(RuntimeError, match=r"down_proj_scale is torch.float16 .* torch.float32 in"):
        model.load_state_dict(scaled, strict=strict)
    assert same(before, experts_of(model)[0])


def test_a_quantized_model_loads_what_of_a_state_dict_is_not_of_experts() -> None:
    model, other = quantized(), qwen(1)
    before = copy.deepcopy(experts_of(model)[0])
    rest = {n: t for n, t in other.state_dict().items() if "experts" not in n}
    model.load_state_dict(rest, strict=False)
    assert same(before, experts_of(model)[0])
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_copies_and_pickles_are_quantized_too() -> None:
    model = quantized()
    want = logits(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(logits(twin), want)
        assert stored_format(experts_of(twin)[0]) == stored_format(experts_of(model)[0])
        assert same(experts_of(twin.half())[0], experts_of(model)[0])


def test_a_pickle_of_an_earlier_version_is_read() -> None:
    model = quantized()
    now, before = b"_new_quantized", b"_new_quantised"
    pickled = pickle.dumps(model)
    assert now in pickled
    twin = pickle.loads(pickled.replace(now, before))
    assert torch.equal(logits(twin), logits(model))


def test_a_model_whose_experts_were_all_kept_is_saved(tmp_path: Path) -> None:
    model = qwen()
    want = logits(model)
    moe_ops.quantize_model(model, "int4_w4a16", weight_format="int4:1x128", progress=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert_close(logits(loaded), want, Tol(1e-5, "float32 sums in another order"))
