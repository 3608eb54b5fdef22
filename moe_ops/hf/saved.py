"""Models with quantised weights on disk: what is written of them, and how they are read again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoQuantizationConfig

from moe_ops.hf.fits import empty, stored_as
from moe_ops.hf.linears import in_layers, linears_of, made_of, replace_everywhere
from moe_ops.hf.optimize import optimize
from moe_ops.hf.quantized_linear import CODES as LINEAR_CODES
from moe_ops.hf.quantized_linear import FORMAT, QuantizedLinear, refusal
from moe_ops.hf.stored import (
    CODES,
    INPUT_SCALE,
    PROJECTIONS,
    QuantizedExperts,
    format_of,
    refuse_to_save,
    store,
    stored_format,
)
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.quant.scales import wrong_scale, wrong_zero

METHOD = "moe_ops"  # in config.json
IN_CODES = (QuantizedExperts, QuantizedLinear)
AGAIN = "complete the download, or save the model again"
# How the names of codes in files end: of linear layers, and of experts.
CODED = (f".{LINEAR_CODES}", *(f".{projection}{CODES}" for projection in PROJECTIONS))
MOST_LISTED = 8
# What safetensors calls the dtypes of codes, scales and the rest.
NAMES = {
    torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float32: "F32", torch.bfloat16: "BF16",
    torch.float16: "F16",
}  # fmt: skip


def write_config(
    model: PreTrainedModel, config: QuantConfig | None, kept: Iterable[str], *, replaces: str = ""
) -> None:
    """Write into the configs of a model and of the models in it how their experts, and which linear
    layers, are quantised; without a `config` what was said of experts stays.

    `save_pretrained` then saves the tensors under the model's own names, and `from_pretrained`
    finds them. A model that another method than `replaces` quantised beside it cannot be saved.
    """
    before = getattr(model.config, "quantization_config", None)
    other = _method(before)
    said = fields_of(config, kept)
    if config is None and before is not None and other == METHOD:
        said = before if isinstance(before, dict) else before.to_dict()
    saved = AutoQuantizationConfig.from_dict({**said, **_linears_said(model)})
    if other not in ("", METHOD, replaces):
        refuse_to_save(model, f"beside what {other} quantised, and config.json names one method")
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(_quantized(module)):
            module.config.quantization_config = saved.to_dict()
            module._weight_conversions = []  # of names and layouts, which are left as they are


def fields_of(config: QuantConfig | None, kept: Iterable[str]) -> dict[str, Any]:
    """What config.json says of experts, all of floats without a `config`; of flags only those that
    are set, as releases that do not know them would refuse it."""
    if config is None:
        return {"quant_method": METHOD, "weights": "", "inputs": "", "kept": []}
    said = {"quant_method": METHOD, "weights": config.weights, "inputs": config.inputs}
    flags = ("static_inputs", "two_global_scales")
    return {**said, **{f: True for f in flags if getattr(config, f)}, "kept": list(kept)}


def _linears_said(model: PreTrainedModel) -> dict[str, Any]:
    """What config.json says of linear layers: nothing if none are in codes."""
    linears = linears_of(model)
    return {"linears": linears} if linears else {}


def make_empty(
    model: PreTrainedModel,
    config: QuantConfig | None,
    kept: Iterable[str],
    linears: Mapping[str, Sequence[str]],
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Give the experts of a model without memory the empty codes and scales of a format, and linear
    layers those of theirs; says what they are by name.

    Raises ValueError for experts that cannot have it, unless their names are among those kept, for
    linear layers that cannot, and for names of linear layers that the model has for something else.
    """
    kept = tuple(kept)
    for format, names in linears.items():
        _empty_linears(model, format, frozenset(names))
    if config is None:
        return {name: (t.dtype, t.shape) for name, t in _coded(model)}
    for name, module in list(model.named_modules()):
        if not hasattr(module, "has_gate") or _is_one_of(name, kept):
            continue
        stored = stored_as(module, config)
        if isinstance(stored, str):
            raise ValueError(
                f"config.json says that {name} ({type(module).__name__}) is quantised to "
                f"{config.weights}, but {stored}; load it with the releases of moe_ops and "
                "transformers that saved it"
            )
        flip = bool(module.is_transposed)
        for projection in stored.projections:
            w = getattr(module, projection)
            store(module, stored, empty(w, flip, config, projection))
    return {name: (t.dtype, t.shape) for name, t in _coded(model)}


def _empty_linears(model: PreTrainedModel, format: str, names: frozenset[str]) -> None:
    modules = dict(model.named_modules())
    # Of a head that was saved or is loaded without; a name that the model has is no part of others.
    others = names - modules.keys()
    for name, module in modules.items():
        if name not in names and not (isinstance(module, nn.Linear) and _is_one_of(name, others)):
            continue
        reason: str | None = f"it is {type(module).__name__}, not a linear layer"
        if isinstance(module, nn.Linear):
            reason = refusal(module.out_features, module.in_features, format)
        if reason is not None:
            raise ValueError(
                f"config.json says that {name} is quantised to {format}, but {reason}; load it "
                "with the releases of moe_ops and transformers that saved it"
            )
        replace_everywhere(model, module, made_of(module, format))


def check_files(model: PreTrainedModel, files: list[str] | None) -> dict[str, str]:
    """The file of each quantised tensor of a model by the tensor's name; nothing is read but names.

    Raises ValueError, naming file and tensor, for one that is missing or has another shape or dtype
    than the model, and for experts of floats that are missing and layers of floats that the files
    have codes for: both would be random. Without safetensors files, `check_loaded` alone looks at
    what came, apart from codes for layers of floats.
    """
    if files is None:
        return {}
    if not all(str(file).endswith(".safetensors") for file in files):
        for file in files:
            _check_all_are_said(model, files, _entries(file))
        return {}
    coded = dict(_coded(model))
    known = {key: name for name in coded for key in _names(model, name)}
    places: dict[str, str] = {}
    saved: set[str] = set()
    for file in map(str, files):
        with safe_open(file, framework="pt") as opened:
            saved.update(opened.keys())
            here = sorted(set(opened.keys()) & known.keys())
            here.sort(key=lambda key: not _says_format(known[key]))
            for key in here:
                name = known[key]
                what, stored = _holder(model, name)
                if _says_format(name):
                    _check_format(f"{key} in {file}", opened.get_tensor(key), what, stored)
                entry = opened.get_slice(key)
                is_there = entry.get_dtype(), entry.get_shape()
                wanted = NAMES[coded[name].dtype], list(coded[name].shape)
                if is_there != wanted:
                    raise ValueError(
                        f"{key} in {file} is {is_there[0]} {is_there[1]}, but the {what} of "
                        f"config.json have {wanted[0]} {wanted[1]}; {AGAIN}"
                    )
                places[name] = file
    _check_all_are_said(model, files, saved)
    tied = model.all_tied_weights_keys  # of which one name is saved
    lacking = next((n for n in coded if n not in places and tied.get(n) not in places), None)
    if lacking is not None:
        raise ValueError(
            f"{Path(files[0]).parent} lacks {lacking}, which config.json says the quantised "
            f"{_holder(model, lacking)[0]} have; {AGAIN}"
        )
    floats = (n for n in _experts_of_floats(model) if saved.isdisjoint(_names(model, n)))
    lacking = next((n for n in floats if n not in tied), None)
    if lacking is not None:
        raise ValueError(
            f"{Path(files[0]).parent} lacks {lacking}, the experts that config.json does not say "
            "are quantised, under the name that the model has for them; call quantize_model on the "
            "model that is saved, not on a model in it, and save it again"
        )
    return places


def _entries(file: str) -> Iterable[str]:
    """The names in a file of torch, which is read whole if it is of the format before zip files."""
    mapped = is_zipfile(file)
    device = "meta" if mapped else "cpu"
    entries: dict[str, Tensor] = torch.load(file, device, weights_only=True, mmap=mapped)
    return entries


def _check_all_are_said(model: PreTrainedModel, files: list[str], keys: Iterable[str]) -> None:
    """Raise ValueError, naming them, if a file has codes for layers that hold floats here."""
    modules = dict(model.named_modules(remove_duplicate=False))
    floats = {
        name
        for key in keys
        for path in (key.removesuffix(suffix) for suffix in CODED if key.endswith(suffix))
        for name in _names(model, path)
        if name in modules and not isinstance(modules[name], IN_CODES)
    }
    if floats:
        raise ValueError(
            f"{Path(files[0]).parent} has codes for {_listed(floats)}, which config.json does not "
            "say are quantised, so that they would be random; restore the config.json that was "
            "saved with the files, or save the model again"
        )


def _listed(names: Iterable[str]) -> str:
    """The first names, and how many others there are."""
    of = sorted(names)
    return ", ".join(of[:MOST_LISTED]) + (
        f" and {len(of) - MOST_LISTED} more" if len(of) > MOST_LISTED else ""
    )


def check_loaded(
    model: PreTrainedModel,
    files: dict[str, str],
    wanted: Mapping[str, tuple[torch.dtype, torch.Size]],
) -> None:
    """Raise ValueError, naming the tensor and its file, unless what was loaded can be multiplied:
    all that is wanted, in the format of config.json, with scales that are positive numbers.

    What a device map offloads is in the module only while it runs, so it is looked at in its file.
    """
    for name, t in _coded(model):
        where = f"{name} in {files[name]}" if name in files else name
        what, format = _holder(model, name)
        if t.is_meta and name in files:
            t = _in_file(model, name, files[name])
        if name not in files and not getattr(t, "_is_hf_initialized", False):
            raise ValueError(f"the state dict lacks {name} of the quantised {what}; {AGAIN}")
        if _says_format(name):
            _check_format(where, t, what, format)
        if (t.dtype, t.shape) != wanted[name]:
            dtype, shape = wanted[name]
            raise ValueError(
                f"{where} is {t.dtype} {list(t.shape)}, but the {what} of config.json have "
                f"{dtype} {list(shape)}; {AGAIN}"
            )
        if name.endswith("scale"):
            wrong = wrong_scale(t, _scale_kind(name, format))
            if wrong is not None:
                raise ValueError(f"{where} holds {wrong}, but a scale is above 0; {AGAIN}")
        if name.endswith("zero"):
            wrong = wrong_zero(t, Format.of(format).element)
            if wrong is not None:
                raise ValueError(f"{where} holds {wrong}; {AGAIN}")


def check_given(model: PreTrainedModel) -> None:
    """Raise ValueError, naming them, for weights of layers that a state dict without files lacked:
    whether it has codes for them is not known here, and they are random."""
    head = model.get_output_embeddings()
    linears = [name for name, _ in in_layers(model)]
    linears += [n for n, m in model.named_modules() if m is head and isinstance(m, nn.Linear)]
    floats = (*(f"{name}.weight" for name in linears), *_experts_of_floats(model))
    lacking = [n for n in floats if not hasattr(model.get_parameter(n), "_is_hf_initialized")]
    if lacking:
        raise ValueError(
            f"the state dict lacks {_listed(lacking)}, and the config does not say that there are "
            "codes instead; give the state dict and the config of one model"
        )


def _in_file(model: PreTrainedModel, name: str, file: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        there = set(opened.keys())
        t: Tensor = opened.get_tensor(next(k for k in _names(model, name) if k in there))
    return t


def finish(model: PreTrainedModel, config: QuantConfig | None, kept: Iterable[str]) -> None:
    """Make a model that was loaded what `quantize_model` would have made of it."""
    for _, t in _coded(model):
        if isinstance(t, nn.Parameter):
            t.requires_grad_(False)  # transformers sets it for floats, and float8 is one to it
    # Casts are for the rest of the model, so they need not be refused.
    model.is_quantized = False
    optimize(model)
    write_config(model, config, kept)


def _coded(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Codes, scales and formats of a model by their names."""
    for prefix, module in model.named_modules():
        if not isinstance(module, IN_CODES):
            continue
        own = {**module._parameters, **module._buffers}
        for name in module.coded():
            t = own.get(name)
            if t is not None:
                yield f"{prefix}.{name}" if prefix else name, t


def _experts_of_floats(model: PreTrainedModel) -> Iterator[str]:
    """The names of the weights and biases of experts that hold no codes."""
    for prefix, module in model.named_modules():
        if hasattr(module, "has_gate") and not isinstance(module, QuantizedExperts):
            yield from (
                f"{prefix}.{name}" for name, t in module._parameters.items() if t is not None
            )


def _holder(model: PreTrainedModel, name: str) -> tuple[str, str]:
    """What a tensor of codes, or of what belongs to them, is of, in words, and its format."""
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, QuantizedLinear):
        return "linear layers", module.w_format
    stored = stored_format(module)
    assert stored is not None
    return "experts", stored.w_format


def _says_format(name: str) -> bool:
    """Whether a tensor of codes, or of what belongs to them, is the one that says the format."""
    return name.rpartition(".")[2] in (*PROJECTIONS, FORMAT)


def _check_format(where: str, text: Tensor, what: str, format: str) -> None:
    if text.dtype != torch.uint8 or format_of(text) != format:
        said = format_of(text) if text.dtype == torch.uint8 else str(text.dtype)
        raise ValueError(
            f"{where} says that the {what} are {said}, but config.json says {format}; {AGAIN}"
        )


def _scale_kind(name: str, format: str) -> str:
    """The type of scales of a format: those above others, and of inputs, are in float32."""
    in_float32 = name.endswith(("_global_scale", INPUT_SCALE))
    return "float32" if in_float32 else Format.of(format).scale


def _names(model: PreTrainedModel, name: str) -> tuple[str, ...]:
    """What a tensor may be called in a file: a head may have been saved or be loaded without."""
    base = f"{model.base_model_prefix}."
    return name, base + name, name.removeprefix(base)


def _is_one_of(name: str, kept: Iterable[str]) -> bool:
    return any(f".{a}".endswith(f".{b}") for k in kept for a, b in ((name, k), (k, name)))


def _quantized(model: nn.Module) -> Iterator[bool]:
    return (isinstance(module, IN_CODES) for module in model.modules())


def _method(config: Any) -> str:
    """The method that a quantization_config names, "" for none."""
    if config is None:
        return ""
    found = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    return str(getattr(found, "value", found))
