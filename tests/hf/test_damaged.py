"""Saved models that were damaged, or whose config.json says something else, are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import moe_ops
from moe_ops.hf import saved
from tests.hf.test_quantize import experts_of, logits, qwen
from tests.hf.test_quantized_state import quantized
from tests.hf.test_saved import EXPERTS, FILE, check_same


def change(name: str, to: Callable[[Tensor], Tensor] | None) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        t = tensors.pop(name)
        if to is not None:
            tensors[name] = to(t)
        save_file(tensors, folder / FILE, metadata={"format": "pt"})

    return apply


def filled(value: float) -> Callable[[Tensor], Tensor]:
    def fill(t: Tensor) -> Tensor:
        t = t.clone()
        t.flatten()[-1] = value
        return t

    return fill


SCALE, CODES = f"{EXPERTS}.down_proj_scale", f"{EXPERTS}.gate_up_proj_codes"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no_scale": (change(SCALE, None), rf" lacks {SCALE}, which .*; complete the download"),
    "no_codes": (change(CODES, None), rf" lacks {CODES}, which .*; complete the download"),
    "no_format": (change(CODES[:-6], None), rf" lacks {CODES[:-6]}, which .*; complete the"),
    "shape": (
        change(SCALE, lambda t: t[:, :-1].contiguous()),
        rf"{SCALE} in .*/{FILE} is F32 \[6, 63, 1\], but .* F32 \[6, 64, 1\]",
    ),
    "dtype": (change(SCALE, Tensor.half), rf"{SCALE} in .*/{FILE} is F16 .*, but .* F32 "),
    "floats": (change(CODES, Tensor.float), rf"{CODES} in .*/{FILE} is F32 .*, but .* I8 "),
    "nan": (
        change(SCALE, filled(float("nan"))),
        rf"{SCALE} in .*/{FILE} holds nan, but a scale is ",
    ),
    "infinite": (change(SCALE, filled(float("inf"))), rf"{SCALE} in .*/{FILE} holds inf, but a sc"),
    "zero": (change(SCALE, filled(0.0)), rf"{SCALE} in .*/{FILE} holds 0\.0, but a scale is"),
    "negative": (change(SCALE, filled(-1.0)), rf"{SCALE} in .*/{FILE} holds -1\.0, but a scale"),
    "format": (
        change(CODES[:-6], lambda t: t.flip(1)),
        rf"{CODES[:-6]} in .*/{FILE} says that the experts are wor:8tni, but .* says int8:r",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    model = quantized("int8_w8a16")
    model.save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        type(model).from_pretrained(tmp_path)


def test_a_state_dict_that_lacks_a_scale_is_refused() -> None:
    model = quantized("int8_w8a16")
    state = {n: t for n, t in model.state_dict().items() if n != SCALE}
    with pytest.raises(ValueError, match=rf"the state dict lacks {SCALE} of the quantised experts"):
        type(model).from_pretrained(None, config=model.config, state_dict=state)


def test_what_is_offloaded_runs_and_is_checked_in_its_file(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = quantized("int8_w8a16")
    model.save_pretrained(tmp_path)
    want = logits(model)
    accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)
    files = saved.check_files(model, [str(tmp_path / FILE)])
    wanted = {name: (t.dtype, t.shape) for name, t in model.state_dict().items()}
    saved.check_loaded(model, files, wanted)
    assert experts_of(model)[0].down_proj_scale.is_meta
    assert torch.equal(logits(model), want)
    change(SCALE, filled(float("nan")))(tmp_path)
    with pytest.raises(ValueError, match=rf"{SCALE} in .*/{FILE} holds nan, but a scale is above"):
        saved.check_loaded(model, files, wanted)


@pytest.mark.parametrize("name", [SCALE, CODES])
def test_a_state_dict_of_other_shapes_is_refused(name: str) -> None:
    model = quantized("int8_w8a16")
    state = model.state_dict()
    state[name] = state[name][1:].contiguous()
    with pytest.raises((ValueError, RuntimeError), match=r"mismatch|but the experts of config"):
        type(model).from_pretrained(None, config=model.config, state_dict=state)


E8M0_NAN = 255


@pytest.mark.parametrize(("scheme", "name", "value", "said"), [
    ("mxfp4_w4a16", "down_proj_scale", E8M0_NAN, "NaN"),
    ("nvfp4_w4a16", "down_proj_scale", float("nan"), "NaN"),
    ("nvfp4_w4a16", "gate_up_proj_global_scale", 0.0, "0.0"),
])  # fmt: skip
def test_scales_of_other_types_are_checked(
    scheme: str, name: str, value: float, said: str, tmp_path: Path
) -> None:
    model = quantized(scheme)
    getattr(experts_of(model)[0], name).flatten()[0] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{EXPERTS}\.{name} in .* holds {said}, but a scale is "):
        type(model).from_pretrained(tmp_path)


def test_zero_points_that_kernels_do_not_take_are_named(tmp_path: Path) -> None:
    model = quantized("int4_w4a16")
    model.save_pretrained(tmp_path)
    name = SCALE.replace("scale", "zero")
    change(name, filled(17))(tmp_path)
    with pytest.raises(ValueError, match=rf"{name} in .*/{FILE} holds a zero point of 17, but "):
        type(model).from_pretrained(tmp_path)


def test_a_block_of_zeros_has_a_scale_of_zero(tmp_path: Path) -> None:
    model = qwen()
    experts_of(model)[0].down_proj[:, :, :16] = 0
    moe_ops.quantize_model(model, "nvfp4_w4a16", progress=False)
    assert int((experts_of(model)[0].down_proj_scale.float() == 0).sum()) == 6 * 64
    model.save_pretrained(tmp_path)
    check_same(model, type(model).from_pretrained(tmp_path))


def rewrite(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"weights": "int9:row"}, "quantization_config of moe_ops: .*int9"),
    "pair": ({"inputs": "mxfp4"}, "no scheme has int8:row weights with mxfp4 inputs"),
    "newer": ({"rotated": True}, "has rotated, which this release does not know; install a newer"),
    "other": (
        {"weights": "float8_e4m3fn:row"},
        r"down_proj in .* says .* int8:row, but config\.json says float8_e4m3fn:row",
    ),
    "blocks": ({"weights": "int8:1x48"}, r"config.json says that .*, but .* multiple of 48"),
    "kept": ({"kept": 1}, "kept must be a list of names"),
}


@pytest.mark.parametrize(("fields", "message"), CONFIGS.values(), ids=CONFIGS)
def test_what_config_json_says_is_checked(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = quantized("int8_w8a16")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, **fields)
    with pytest.raises((ValueError, TypeError), match=message):
        type(model).from_pretrained(tmp_path)
