"""`quantize_model`: the experts of a transformers model, its linear layers and its head in other
weight formats, in place."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.checks.options import check_flag, check_text, check_type
from moe_ops.checks.signature import did_you_mean
from moe_ops.hf.adapters.added import without_class
from moe_ops.hf.fits import empty, stored_as
from moe_ops.hf.linears import Found, Linears, check_linear_format, in_layers, is_tied, untie
from moe_ops.hf.linears import find as find_linears
from moe_ops.hf.linears import quantize as quantize_linears
from moe_ops.hf.optimize import optimize
from moe_ops.hf.saved import write_config
from moe_ops.hf.stored import PROJECTIONS, store, stored_format
from moe_ops.quant import packing
from moe_ops.quant.arguments import named_format
from moe_ops.quant.config import QuantConfig, names_format
from moe_ops.quant.schemes import SCHEMES

log = logging.getLogger("moe_ops")
TIED = "its weight was the embedding's, which stays: the codes take {:.2f} GiB more"

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

    scheme: str  # empty where experts stayed as they were
    modules: int
    bytes_before: int
    bytes_after: int
    kept: tuple[str, ...]  # why modules kept their weights, one line each
    linears: Linears | None = None
    head: Linears | None = None
    linears_kept: Mapping[str, str] = field(default_factory=dict)  # reasons by names

    def __str__(self) -> str:
        text = []
        if self.scheme:
            sizes = _sizes(self.bytes_before, self.bytes_after)
            text.append(f"{self.modules} experts modules in {self.scheme}: {sizes}")
        if self.linears is not None:
            text.append(f"{self.linears.modules} linear layers in {_told(self.linears)}")
        if self.head is not None and self.head.modules:
            text.append(f"head in {_told(self.head)}")
        kept = [*self.kept, *grouped(self.linears_kept)]
        return "\n".join([*text, *(f"kept: {line}" for line in kept)])


def _sizes(before: int, after: int) -> str:
    gib = 2.0**30
    return f"{before / gib:.2f} GiB to {after / gib:.2f} GiB"


def _told(of: Linears) -> str:
    """Format, sizes and error of linear layers in words."""
    worst = f"; results differ by {of.error:.2%} at most ({of.worst})" if of.modules else ""
    note = f"; {of.note}" if of.note else ""
    return f"{of.format}: {_sizes(of.bytes_before, of.bytes_after)}{worst}{note}"


@torch.no_grad()
def quantize_model(
    model: PreTrainedModel,
    scheme: str | QuantConfig | None,
    *,
    weight_format: str | None = None,
    input_format: str | None = None,
    scale_rule: str = "floor",
    linear_format: str | None = None,
    head_format: str | None = None,
    progress: bool = True,
) -> Report:
    """Quantise the weights of all experts of a transformers model in place, and `optimize` it; and
    those of its linear layers and its head, if they are given formats.

    `scheme` is a key of `moe_ops.quant.schemes.SCHEMES`; docs/FORMATS.md lists them. Where it has
    several formats, `weight_format` and `input_format` choose. Or it is a `QuantConfig`, or the
    format of weights alone ("int8:row", "mxfp4"), or None: experts stay as they are, floats or
    codes. Inputs are quantised at run time, with scales of their own, or not at all. Weights are
    rounded to nearest, one expert at a time: besides the result, memory for one expert in float32
    is needed. Experts whose sizes the format does not divide (the last blocks of float8 need not be
    full), or that our ops cannot express, keep their weights, and the report says why. `scale_rule`
    is for weights with e8m0 scales: "floor", as OCP Microscaling has it, or "ceil", by which no
    weight saturates (see `moe_ops.quantize`); inputs are scaled by the first.

    `linear_format` is for the linear layers of the text decoder's layers: attention, dense MLPs,
    shared experts. Never for routers, gates of shared experts, what weighs the heads of an indexer,
    weights that code of the model reads itself, and what a model keeps in float32. `head_format` is
    for the output embedding. Both are formats of weights alone; inputs and biases stay floats, as
    do norms, the embedding and vision towers. A head that shares the weight of the embedding gets
    codes of its own beside it, which take memory, and the model's configuration says from then on
    that it is not tied. The report says by how much results of these layers differ, as a root of
    mean squares over inputs that vary alike in all directions; for the head these results are the
    logits. Layers that cannot hold the format keep their weight, and the report says why. With
    progress, a line per module of experts, and one for linear layers and the head each, is written
    to standard error.

    Codes and scales keep their dtype whatever the model is cast to afterwards. `save_pretrained`
    writes them and, in config.json, their formats; `from_pretrained` reads them where moe_ops is
    imported. Elsewhere transformers warns of an unknown quantization type and then raises
    RuntimeError, as the shapes of the experts differ; where the experts stayed floats it warns
    alone, and linear layers are random. The state dict loads into a model that is quantised to the
    same formats. What wraps the experts, as adapters of peft do, raises ValueError; `add_adapter`
    adds adapters of codes.

    Raises TypeError for anything but a transformers PreTrainedModel, ValueError for an unknown
    scheme or format, for a model without experts, for experts that are quantised already or have an
    adapter, for linear layers that are, and for weights without numbers, on the meta device or
    offloaded; nothing is changed then. There is no way back: load the model again.
    """
    check_flag("progress", progress)
    formats = {"linear_format": linear_format, "head_format": head_format}
    config = _config(scheme, weight_format, input_format, formats)
    if config is not None:
        packing.check_scale_rule(scale_rule, config.format)
    modules = _modules(model, config is None)
    _check_filled(model, modules, linear_format, head_format)
    found = find_linears(model, linear_format, head_format)
    optimize(model)
    before, after, done = 0, 0, 0
    left: list[tuple[str, str]] = []
    for i, (name, module) in enumerate(modules.items()):
        assert config is not None
        before += _bytes(module)
        reason = _quantize(module, config, scale_rule)
        after += _bytes(module)
        done += reason is None
        if reason is not None:
            left.append((name, reason))
        _say(progress, f"{config.scheme}: {i + 1} of {len(modules)}  {name}")
    linears = _quantize_linears(model, found, linear_format, scale_rule, progress)
    head = _quantize_head(model, found, head_format, scale_rule, progress)
    if done or found.linears or found.head:
        write_config(model, config, [name for name, _ in left])
    kept = tuple(f"{name} ({type(modules[name]).__name__}): {reason}" for name, reason in left)
    for line in (*kept, *grouped(found.kept)):
        log.warning("quantize_model keeps %s", line)
    return Report(
        scheme="" if config is None else config.scheme, modules=done, bytes_before=before,
        bytes_after=after, kept=kept, linears=linears, head=head, linears_kept=found.kept,
    )  # fmt: skip


def _quantize_linears(
    model: PreTrainedModel, found: Found, format: str | None, scale_rule: str, progress: bool
) -> Linears | None:
    if format is None:
        return None
    done = quantize_linears(model, found.linears, format, scale_rule)
    _say(progress, f"{format}: {done.modules} linear layers")
    return done


def _quantize_head(
    model: PreTrainedModel, found: Found, format: str | None, scale_rule: str, progress: bool
) -> Linears | None:
    if format is None:
        return None
    tied = {name: head for name, head in found.head.items() if is_tied(model, head)}
    done = quantize_linears(model, found.head, format, scale_rule)
    for name in tied:
        untie(model, name)
        done = replace(done, note=TIED.format(done.bytes_after / 2**30))
    _say(progress, f"{format}: {', '.join(found.head) or 'no head'}")
    return done


def _say(progress: bool, line: str) -> None:
    if progress:
        sys.stderr.write(f"{line}\n")


def grouped(kept: Mapping[str, str]) -> list[str]:
    """A line for each reason why linear layers keep their weight, with the first that has it."""
    names: dict[str, list[str]] = {}
    for name, reason in kept.items():
        names.setdefault(reason, []).append(name)
    return [
        f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {reason}"
        for reason, of in names.items()
    ]


def _modules(model: PreTrainedModel, stay: bool) -> dict[str, nn.Module]:
    """The experts modules of a model by their names, none if they stay; raises unless they can be
    quantised, and where a model has no experts."""
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
    if stay:
        return {}
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


def _check_filled(
    model: PreTrainedModel,
    experts: Mapping[str, nn.Module],
    linear_format: str | None,
    head_format: str | None,
) -> None:
    """Raise ValueError for a weight that is to be quantised, but has no memory."""
    holders = dict(experts)
    if linear_format is not None:
        holders.update(in_layers(model))
    if head_format is not None:
        head = model.get_output_embeddings()
        holders.update((name, m) for name, m in model.named_modules() if m is head)
    for name, module in holders.items():
        for own, t in module.named_parameters(recurse=False):
            if t.is_meta:
                raise ValueError(
                    f"{name}.{own} is on the meta device, so it has no numbers to quantise; load "
                    "the weights first, on devices with room for them: what a device_map offloads "
                    "to 'cpu' or 'disk' is there only while it runs"
                )


def _config(
    scheme: str | QuantConfig | None,
    weights: str | None,
    inputs: str | None,
    others: Mapping[str, str | None],
) -> QuantConfig | None:
    """What experts are quantised to, None if they stay; of a scheme, the given formats in place of
    the defaults. `others`: the formats of linear layers, which are checked, too."""
    for name, format in others.items():
        if format is not None:
            check_linear_format(name, format)
    if scheme is None:
        if weights is not None or inputs is not None or not any(others.values()):
            raise ValueError(
                "scheme=None leaves experts as they are; give a linear_format, a head_format, or "
                "both, and neither weight_format nor input_format"
            )
        return None
    return _config_of_experts(scheme, weights, inputs)


def _config_of_experts(
    scheme: str | QuantConfig, weights: str | None, inputs: str | None
) -> QuantConfig:
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
