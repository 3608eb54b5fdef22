"""Which linear layers of a transformers model may hold codes, and how they get them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from moe_ops.checks.options import check_text
from moe_ops.checks.shapes import FLOATS
from moe_ops.hf.quantized_linear import QuantizedLinear, refusal
from moe_ops.hf.source import source_of
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES

ROUTER = re.compile(r"router|gate$", re.IGNORECASE)  # of names of modules and of classes
EXPANDS = "expand_kv", "kv_b_proj"  # a method of attention over latents, and what it reads
INDEXER = re.compile(r"indexer", re.IGNORECASE)  # of names of modules and of classes
WEIGHS = "weights_proj"  # gives each head of an indexer its weight
PEFT = "base_layer", "original_module"  # what its adapters, and copies that it trains, are beside
PRECISE = "is among what its model keeps in float32"
BESIDE = "is beside experts, as routers and gates of shared experts are"


def check_linear_format(name: str, format: str) -> None:
    """Raise ValueError, which lists those that are, unless linear layers can be in a format."""
    check_text(name, format)
    try:
        QuantConfig(weights=format)
    except ValueError as error:
        known = (f for s in SCHEMES.values() if "" in s.input_formats for f in s.weight_formats)
        raise ValueError(
            f"{name}={format!r} is no format of weights with inputs in 16 bits: {error}; such are "
            f"{', '.join(filter(None, dict.fromkeys(known)))}"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Linears:
    """What `quantize_model` made of linear layers, or of the head; sizes are those of weights,
    scales included. `error`: by how much the values of the codes differ from the weight, as a root
    of sums of squares, relative to the weight, at most; `worst`: where."""

    format: str
    modules: int
    bytes_before: int
    bytes_after: int
    error: float
    worst: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The linear layers of a model by their names, its head, and why others stay as they are."""

    linears: dict[str, nn.Linear]
    head: dict[str, nn.Linear]
    kept: dict[str, str]


def find(model: PreTrainedModel, linear_format: str | None, head_format: str | None) -> Found:
    """The linear layers in decoder layers that are to hold codes, and the head; of those that
    cannot, the reasons. Raises ValueError for some that do already, and for layers of stages."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        asked = head_format if module is head else linear_format
        if isinstance(module, QuantizedLinear) and asked is not None:
            raise ValueError(f"{name} is quantised already; load the model again")
    found = Found(linears={}, head={}, kept={})
    if linear_format is not None:
        check_no_stages(model)
        for name, linear in in_layers(model):
            reason = _refusal(model, name, linear, linear_format)
            if reason is None:
                found.linears[name] = linear
            else:
                found.kept[name] = reason
    if head_format is not None:
        name = next((n for n, m in model.named_modules() if m is head), "the head")
        reason = _refusal_of_head(model, name, head, head_format)
        if reason is None:
            found.head[name] = head
        else:
            found.kept[name] = reason
    return found


def check_no_stages(model: PreTrainedModel) -> None:
    """Raise ValueError for a model whose linear layers in codes would be of pipeline stages."""
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        raise ValueError(
            f"distributed_config has pp_size={stages}, and stages send activations in the dtype of "
            "their first weight, which would be that of codes of a linear layer; quantise experts "
            "alone, or load the model without stages"
        )


def quantize(
    model: PreTrainedModel, found: dict[str, nn.Linear], format: str, scale_rule: str
) -> Linears:
    """Give layers codes, one at a time, wherever the model holds them."""
    before, after, error, worst = 0, 0, 0.0, ""
    rule = scale_rule if Format.of(format).scale == "e8m0" else "floor"
    for name, linear in found.items():
        new = made_of(linear, format)
        differs = new.round_from(linear.weight, rule)
        replace_everywhere(model, linear, new)
        before += linear.weight.nbytes
        after += bytes_of(new)
        if not differs < error and not math.isnan(error):  # a NaN is the worst
            error, worst = differs, name
    return Linears(
        format=format, modules=len(found), bytes_before=before, bytes_after=after, error=error,
        worst=worst,
    )  # fmt: skip


def made_of(linear: nn.Linear, format: str) -> QuantizedLinear:
    """A layer for the codes of a weight, with the bias that it has."""
    (rows, columns), bias = linear.weight.shape, linear.bias
    new = QuantizedLinear(rows, columns, format, bias, linear.weight.device)
    return new.train(linear.training)


def replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, under every name that it has."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def untie(model: PreTrainedModel, name: str) -> None:
    """Have a model know that its head has a weight of its own."""
    for key in [k for k in model.all_tied_weights_keys if k.startswith(f"{name}.")]:
        del model.all_tied_weights_keys[key]
    # Configurations of models with images take over what the one of their text says when read.
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False


def is_tied(model: PreTrainedModel, head: nn.Linear) -> bool:
    """Whether the weight of a head is that of the embedding."""
    embedding = model.get_input_embeddings()
    return getattr(embedding, "weight", None) is head.weight


def linears_of(model: nn.Module) -> dict[str, list[str]]:
    """The names of the layers in codes by their formats."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            found.setdefault(module.w_format, []).append(name)
    return found


def bytes_of(module: QuantizedLinear) -> int:
    """Bytes of codes and scales."""
    own = (getattr(module, name) for name in module.coded())
    return sum(t.nbytes for t in own if t is not None)


def in_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers in the layers of the text decoder, by their names."""
    # Not above: this module is imported while transformers imports that one.
    from transformers.modeling_layers import GradientCheckpointingLayer

    decoder = set(model.get_decoder().modules())
    layers = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and module in decoder
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith(layers):
            yield name, module


def _refusal(model: PreTrainedModel, name: str, linear: nn.Linear, format: str) -> str | None:
    """Why a linear layer of a decoder layer keeps its weight, or None."""
    path, _, own = name.rpartition(".")
    parent = model.get_submodule(path)
    within = _within(model, path)
    if any(hasattr(module, part) for module in within.values() for part in PEFT):
        return "is, or has, an adapter of peft; merge it first"
    if any(hasattr(child, "has_gate") for child in parent.children()):
        return BESIDE
    if any(ROUTER.search(n) or ROUTER.search(type(m).__name__) for n, m in within.items()):
        return "is a part of a router"
    if own == WEIGHS and any(INDEXER.search(n + type(m).__name__) for n, m in within.items()):
        return "weighs the heads of an indexer, which published checkpoints keep in 16 bits"
    if hasattr(parent, EXPANDS[0]) and own == EXPANDS[1]:
        return "steps of generate read its weight, in place of what it would expand"
    if _reads_weight(type(parent), own):
        return f"{type(parent).__name__} reads its weight itself"
    tied = model.all_tied_weights_keys
    if f"{name}.weight" in (*tied, *tied.values()):
        return "shares its weight with another part of the model"
    if _is_kept_precise(model, name):
        return PRECISE
    return _refusal_of(linear, format)


def _refusal_of_head(
    model: PreTrainedModel, name: str, head: nn.Module | None, format: str
) -> str | None:
    """Why a head keeps its weight, or None."""
    if not isinstance(head, nn.Linear):
        return f"is {type(head).__name__}, not a linear layer" if head is not None else "is none"
    path, _, own = name.rpartition(".")
    parent = type(model.get_submodule(path))
    if _reads_weight(parent, own):
        return f"{parent.__name__} reads its weight itself"
    tied = model.all_tied_weights_keys
    others = [key for key in tied if not key.startswith(f"{name}.")]
    if is_tied(model, head) and others:
        return f"is tied together with {others[0]}, which would come apart"
    if _is_kept_precise(model, name):
        return PRECISE
    return _refusal_of(head, format)


def _is_kept_precise(model: PreTrainedModel, name: str) -> bool:
    """Whether a weight is of those that a model keeps in float32, and other quantisers keep."""
    lists = (model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict)
    return any(f".{part}." in f".{name}.weight." for names in lists for part in names or ())


def _refusal_of(linear: nn.Linear, format: str) -> str | None:
    """Why a linear layer, wherever it is, cannot hold codes, or None."""
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
        return f"is {type(linear).__name__} with a weight of {type(linear.weight).__name__}"
    if linear.weight.dtype not in FLOATS:
        return f"has a weight of {linear.weight.dtype}"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(linear, kind) for kind in hooks) or "forward" in vars(linear):
        return "has hooks"
    return refusal(linear.out_features, linear.in_features, format)


def _within(model: PreTrainedModel, path: str) -> dict[str, nn.Module]:
    """A module and those that it is in, by their names in these."""
    parts = path.split(".")
    return {
        f"{n}.{part}": model.get_submodule(".".join(parts[: n + 1])) for n, part in enumerate(parts)
    }


def _reads_weight(cls: type, name: str) -> bool:
    """Whether code of a class of modules reads the weight of a part of these itself."""
    read = re.compile(rf"\.{re.escape(name)}\.weight\b")
    own = [c for c in cls.__mro__ if c not in nn.Module.__mro__]
    return any(read.search(text) for text in map(source_of, own))
