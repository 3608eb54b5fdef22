"""`quantize_model`: the experts of a transformers model in another weight format, in place."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.hf.experts import describe
from moe_ops.hf.optimize import optimize
from moe_ops.hf.stored import PROJECTIONS, StoredFormat, refuse_to_save, store, stored_format
from moe_ops.options import check_flag, check_text, check_type
from moe_ops.quant import packing
from moe_ops.quant.arguments import check_input_format, check_packing, named_format, ragged_axis
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES

log = logging.getLogger("moe_ops")

# Weight and input formats of schemes that have several: (the finest that kernels exist for).
DEFAULTS = {
    "fp8_w8a8": ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
    "fp8_w8a16": ("float8_e4m3fn:row", ""),
    "int8_w8a8": ("int8:row", "int8:row"),
    "int8_w8a16": ("int8:row", ""),
    "int4_w4a16": ("uint4:1x64", ""),  # 16 codes where int4 has 15, and a range of its own
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `quantize_model` did; sizes are those of the experts' weights, scales included."""

    scheme: str
    modules: int
    bytes_before: int
    bytes_after: int
    kept: tuple[str, ...]  # why modules kept their weights, one line each

    def __str__(self) -> str:
        gib = 2.0**30
        text = (
            f"{self.modules} experts modules in {self.scheme}: "
            f"{self.bytes_before / gib:.2f} GiB to {self.bytes_after / gib:.2f} GiB"
        )
        return "\n".join([text, *(f"kept: {line}" for line in self.kept)])


@torch.no_grad()
def quantize_model(
    model: PreTrainedModel,
    scheme: str | QuantConfig,
    *,
    weight_format: str | None = None,
    input_format: str | None = None,
    progress: bool = True,
) -> Report:
    """Quantise the weights of all experts of a transformers model in place, and `optimize` it.

    `scheme` is a key of `moe_ops.quant.schemes.SCHEMES`; docs/FORMATS.md lists them. Where it has
    several formats, `weight_format` and `input_format` choose. Or it is a `QuantConfig`, or the
    format of weights alone. Inputs are quantised at run time, with scales of their own, or not at
    all. Weights are rounded to nearest, one expert at a time: besides the result, memory for one
    expert in float32 is needed. Experts whose sizes the format does not divide (the last blocks of
    float8 need not be full), or that our ops cannot express, keep their weights, and the report
    says why.
    Routers, attention and shared experts stay as they are. With progress, a line per module is
    written to standard error.

    Codes and scales keep their dtype whatever the model is cast to afterwards. Its state dict loads
    into a model that is quantised to the same formats; `save_pretrained` raises ValueError, and so
    does an adapter on the experts.

    Raises TypeError for anything but a transformers PreTrainedModel, ValueError for an unknown
    scheme, for a model without experts, and for experts that are quantised already or have an
    adapter; nothing is changed then. There is no way back: load the model again.
    """
    check_flag("progress", progress)
    config = _config(scheme, weight_format, input_format)
    modules = _modules(model)
    optimize(model)
    before, after, kept, done = 0, 0, [], 0
    for i, (name, module) in enumerate(modules.items()):
        before += _bytes(module)
        reason = _quantise(module, config)
        after += _bytes(module)
        done += reason is None
        if reason is not None:
            kept.append(f"{name} ({type(module).__name__}): {reason}")
            log.warning("quantize_model keeps %s", kept[-1])
        if progress:
            sys.stderr.write(f"{config.scheme}: {i + 1} of {len(modules)}  {name}\n")
    if done:
        refuse_to_save(model)
    return Report(
        scheme=config.scheme, modules=done, bytes_before=before, bytes_after=after, kept=tuple(kept)
    )


def _modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The experts modules of a model by their names; raises unless they can be quantised."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers PreTrainedModel, got {kind}; of a PeftModel give "
            "what merge_and_unload() returns, and in a model of your own take MoELayer(quant=...)"
        )
    modules = {n: m for n, m in model.named_modules() if hasattr(m, "has_gate")}
    if not modules:
        raise ValueError(
            f"{kind} has no experts modules of transformers, so there is nothing to quantise; give "
            "a Mixture-of-Experts model"
        )
    for name, module in modules.items():
        if stored_format(module) is not None:
            raise ValueError("the experts are quantised already; load the model again")
        if name.endswith(".base_layer"):
            raise ValueError(
                f"{name.replace('.base_layer', '')} has an adapter, which would be added to codes; "
                "merge it first: "
                "model = peft_model.merge_and_unload()"
            )
    return modules


def _config(scheme: str | QuantConfig, weights: str | None, inputs: str | None) -> QuantConfig:
    """What experts are quantised to; of a scheme, the given formats in place of the defaults."""
    check_type("scheme", scheme, (str, QuantConfig), "the name of a scheme or a QuantConfig")
    choices = [name for name in SCHEMES if name != "none"]
    if isinstance(scheme, str) and scheme not in choices and ":" not in scheme:
        raise ValueError(f"scheme {scheme!r} is unknown; choose one of {', '.join(choices)}")
    if isinstance(scheme, str) and scheme in choices:
        info = SCHEMES[scheme]
        default = DEFAULTS.get(scheme, (info.weight_formats[0], info.input_formats[0]))
        w, x = (d if g is None else g for g, d in zip((weights, inputs), default, strict=True))
        for name, value in (("weight_format", w), ("input_format", x)):
            check_text(name, value)
            if value or name == "weight_format":
                named_format(name, value)
        config = QuantConfig(weights=w, inputs=x)
        if config.scheme != scheme:
            raise ValueError(
                f"weight_format={w!r} and input_format={x!r} are the scheme {config.scheme}, not "
                f"{scheme}; give those of one scheme"
            )
        return config
    found = QuantConfig.of(scheme)
    assert found is not None
    if weights is not None or inputs is not None:
        raise ValueError(
            f"weight_format and input_format choose among the formats of a scheme, but {scheme!s} "
            "names one of each; leave them out"
        )
    if found.static_inputs or found.ordered_input:
        raise ValueError(
            f"scheme: {found} wants a layer that holds scales or an order of its inputs; "
            "take moe_ops.MoELayer(quant=...), or leave out static_inputs and ordered_input"
        )
    return found


def _quantise(module: nn.Module, config: QuantConfig) -> str | None:
    """Quantise one experts module in place; or why that cannot be."""
    found = describe(module)
    if isinstance(found, str):
        return found
    format = config.format
    names = ("gate_up_proj" if found.gated else "up_proj", "down_proj")
    flip = bool(module.is_transposed)
    try:
        for name in names:
            _check_sizes(getattr(module, name), flip, format, config.inputs)
    except ValueError as error:
        return str(error)
    tensors: dict[str, Tensor] = {}
    for name in names:
        # Each weight takes its place before the next is made, so that only one is there twice.
        tensors = _quantise_weight(getattr(module, name), flip, format, name)
        stored = StoredFormat(activation=found, w_format=config.weights, x_format=config.inputs)
        store(module, stored, tensors)
    return None


def _check_sizes(w: Tensor, flip: bool, format: Format, x_format: str) -> None:
    rows, width = (w.shape[2], w.shape[1]) if flip else (w.shape[1], w.shape[2])
    check_packing("w_format", format, width)
    ragged = ragged_axis(format, rows, width)
    if ragged is not None:
        axis, size, group = ragged
        across = "columns" if axis == "rows" else "rows"
        raise ValueError(
            f"w_format={format.name!r} wants {across} of a multiple of {group}, got {size}"
        )
    if x_format:
        check_input_format("x_format", x_format, width)


def _quantise_weight(w: Tensor, flip: bool, format: Format, name: str) -> dict[str, Tensor]:
    """The tensors of one stacked weight by attribute name, made one expert at a time."""
    E = w.shape[0]
    tensors: dict[str, Tensor] = {}
    for e in range(E):
        w_FD = (w[e].T if flip else w[e]).float()
        parts: dict[str, Tensor | None] = {}
        global_scale = None
        if format.has_global_scale:
            global_scale = packing.global_scale_of(w_FD, format)
            parts[f"{name}_global_scale"] = global_scale
        done = packing.quantize(w_FD, format, global_scale=global_scale)
        parts |= {name: done.values, f"{name}_scale": done.scale, f"{name}_zero": done.zero}
        for key, part in parts.items():
            if part is not None:
                if key not in tensors:
                    tensors[key] = part.new_empty((E, *part.shape))
                tensors[key][e] = part
    return tensors


def _bytes(module: nn.Module) -> int:
    """Bytes of a module's weights and of the scales that belong to them."""
    own = {**module._parameters, **module._buffers}
    if stored_format(module) is not None:  # the names of weights then hold the names of formats
        own = {name: t for name, t in own.items() if name not in PROJECTIONS}
    return sum(t.nbytes for t in own.values() if t is not None)
