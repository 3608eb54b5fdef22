"""`quantize_model`: the experts of a transformers model in another weight format, in place."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.checks.options import check_flag, check_text, check_type
from moe_ops.checks.signature import did_you_mean
from moe_ops.hf.adapters.added import without_class
from moe_ops.hf.fits import empty, stored_as
from moe_ops.hf.optimize import optimize
from moe_ops.hf.saved import write_config
from moe_ops.hf.stored import PROJECTIONS, store, stored_format
from moe_ops.quant import packing
from moe_ops.quant.arguments import named_format
from moe_ops.quant.config import QuantConfig, names_format
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
    scale_rule: str = "floor",
    progress: bool = True,
) -> Report:
    """Quantise the weights of all experts of a transformers model in place, and `optimize` it.

    `scheme` is a key of `moe_ops.quant.schemes.SCHEMES`; docs/FORMATS.md lists them. Where it has
    several formats, `weight_format` and `input_format` choose. Or it is a `QuantConfig`, or the
    format of weights alone ("int8:row", "mxfp4"). Inputs are quantised at run time, with scales of
    their own, or not at all. Weights are rounded to nearest, one expert at a time: besides the
    result, memory for one expert in float32 is needed. Experts whose sizes the format does not
    divide (the last blocks of float8 need not be full), or that our ops cannot express, keep their
    weights, and the report says why. `scale_rule` is for weights with e8m0 scales: "floor", as OCP
    Microscaling has it, or "ceil", by which no weight saturates (see `moe_ops.quantize`); inputs
    are scaled by the first. Routers, attention and shared experts stay as they are. With progress,
    a line per module is written to standard error.

    Codes and scales keep their dtype whatever the model is cast to afterwards. `save_pretrained`
    writes them and, in config.json, their formats; `from_pretrained` reads them where moe_ops is
    imported. Elsewhere transformers warns of an unknown quantization type and then raises
    RuntimeError, as the shapes of the experts differ. The state dict loads into a model that is
    quantised to the same formats. What wraps the experts, as adapters of peft do, raises
    ValueError; `add_adapter` adds adapters of codes.

    Raises TypeError for anything but a transformers PreTrainedModel, ValueError for an unknown
    scheme, for a model without experts, and for experts that are quantised already or have an
    adapter; nothing is changed then. There is no way back: load the model again.
    """
    check_flag("progress", progress)
    config = _config(scheme, weight_format, input_format)
    packing.check_scale_rule(scale_rule, config.format)
    modules = _modules(model)
    optimize(model)
    before, after, done = 0, 0, 0
    left: list[tuple[str, str]] = []
    for i, (name, module) in enumerate(modules.items()):
        before += _bytes(module)
        reason = _quantize(module, config, scale_rule)
        after += _bytes(module)
        done += reason is None
        if reason is not None:
            left.append((name, reason))
            log.warning("quantize_model keeps %s (%s): %s", name, type(module).__name__, reason)
        if progress:
            sys.stderr.write(f"{config.scheme}: {i + 1} of {len(modules)}  {name}\n")
    if done:
        write_config(model, config, [name for name, _ in left])
    kept = tuple(f"{name} ({type(modules[name]).__name__}): {reason}" for name, reason in left)
    return Report(
        scheme=config.scheme, modules=done, bytes_before=before, bytes_after=after, kept=kept
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
                "merge it first: model = peft_model.merge_and_unload(); or save it, quantise the "
                "model without it, and moe_ops.load_adapter"
            )
    return modules


def _config(scheme: str | QuantConfig, weights: str | None, inputs: str | None) -> QuantConfig:
    """What experts are quantised to; of a scheme, the given formats in place of the defaults."""
    check_type("scheme", scheme, (str, QuantConfig), "the name of a scheme or a QuantConfig")
    choices = [name for name in SCHEMES if name != "none"]
    if isinstance(scheme, str) and scheme not in choices and not names_format(scheme):
        raise ValueError(
            f"scheme {scheme!r} is unknown; choose one of {', '.join(choices)}"
            f"{did_you_mean(scheme, choices)}"
        )
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
    if found.static_inputs or found.ordered_input or found.two_global_scales:
        raise ValueError(
            f"scheme: {found} wants a layer that holds scales or an order of its inputs, or two "
            "global scales of its weights; take moe_ops.MoELayer(quant=...), or leave out "
            "static_inputs, ordered_input and two_global_scales"
        )
    return found


def _quantize(module: nn.Module, config: QuantConfig, scale_rule: str) -> str | None:
    """Quantise one experts module in place; or why that cannot be."""
    stored = stored_as(module, config)
    if isinstance(stored, str):
        return stored
    flip = bool(module.is_transposed)
    without_class(module)
    for name in stored.projections:
        # Each weight takes its place before the next is made, so that only one is there twice.
        w = getattr(module, name)
        store(module, stored, _quantize_weight(w, flip, config, name, scale_rule))
    return None


def _quantize_weight(
    w: Tensor, flip: bool, config: QuantConfig, name: str, scale_rule: str
) -> dict[str, Tensor]:
    """The tensors of one stacked weight by attribute name, made one expert at a time."""
    tensors, format = empty(w, flip, config, name), config.format
    for e in range(w.shape[0]):
        w_FD = (w[e].T if flip else w[e]).float()
        global_scale = None
        if format.has_global_scale:
            global_scale = packing.global_scale_of(w_FD, format)
            tensors[f"{name}_global_scale"][e] = global_scale
        done = packing.quantize(w_FD, format, global_scale=global_scale, scale_rule=scale_rule)
        for part, t in ((name, done.values), (f"{name}_scale", done.scale)):
            tensors[part][e] = t
        if done.zero is not None:
            tensors[f"{name}_zero"][e] = done.zero
    return tensors


def _bytes(module: nn.Module) -> int:
    """Bytes of a module's weights and of the scales that belong to them."""
    own = {**module._parameters, **module._buffers}
    if stored_format(module) is not None:  # the names of weights then hold the names of formats
        own = {name: t for name, t in own.items() if name not in PROJECTIONS}
    return sum(t.nbytes for t in own.values() if t is not None)
