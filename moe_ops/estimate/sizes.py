"""The sizes of a model that decide how long a step of `generate` takes, read off its modules."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from moe_ops.checks.shapes import DTYPES
from moe_ops.forward.regions import decoder_layers
from moe_ops.generation.refusals import shape_refusal
from moe_ops.hf.experts import describe, is_experts
from moe_ops.hf.linears import find
from moe_ops.hf.routed import Routed, routed_of
from moe_ops.quant.formats import Format

FLOAT = "bfloat16"  # what weights are in, unless something else is said
SQUARE = 4096  # of the matrix that a format's bits are counted on
# Names of modules and of what these hold, by transformers' conventions.
LATENT, KEYS, VALUES = "kv_a_proj_with_mqa", "k_proj", "v_proj"
FUSED = ("qkv_proj", "query_key_value", "qkv", "Wqkv")
OUTPUTS = ("o_proj", "dense", "out_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of a layer; `values` are the numbers in one expert, biases included."""

    E: int
    K: int
    D: int
    I: int  # noqa: E741
    values: int
    refusal: str = ""  # why ours do not run them
    routed: bool = True  # whether a rule says what the router computes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Decoder layers that are alike, `count` of them. A cached token takes `token_bytes`, of the
    last `window` tokens if there is one; a sequence `state_bytes` besides."""

    count: int
    token_bytes: int
    window: int | None
    state_bytes: int
    latents: bool
    pair_flops: int  # of one query and one cached token
    linear_values: int  # in linear layers that can hold codes
    kept_bytes: int  # of all other weights beside the experts
    biased: bool  # the projection that ends the attention
    shared: bool  # experts that every token goes to
    experts: Experts | None
    guess: str = ""  # what of this is no more than likely


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a step of a model reads, and what our ops run of it."""

    model: str
    hidden: int
    layers: tuple[Layer, ...]
    head_values: int
    other_bytes: int  # weights outside of the layers that no step reads: embeddings, towers
    refusal: str = ""  # why `generate` does not run by steps of ours

    @property
    def depth(self) -> int:
        return sum(layer.count for layer in self.layers)

    def guesses(self) -> list[str]:
        """What is not known of the layers, each said once."""
        return list(dict.fromkeys(layer.guess for layer in self.layers if layer.guess))

    @staticmethod
    def of_json(figures: dict[str, Any]) -> Sizes:
        """Sizes from what `dataclasses.asdict` made of them."""
        layers = tuple(
            Layer(**{**layer, "experts": layer["experts"] and Experts(**layer["experts"])})
            for layer in figures["layers"]
        )
        return Sizes(**{**figures, "layers": layers})


@functools.cache
def bits_of(format: str) -> float:
    """The bits that a weight takes in a format, with its part of the scales and zero points."""
    if format in DTYPES:
        return 8.0 * DTYPES[format].itemsize
    found = Format.of(format)
    parsed = found.parsed
    groups = parsed.scale_shape(SQUARE, SQUARE)
    scale = parsed.scale_dtype.itemsize + (1 if found.has_zero else 0)
    packed = parsed.packed(SQUARE) * parsed.storage.dtype.itemsize * SQUARE
    return 8 * (packed + groups[0] * groups[1] * scale) / SQUARE**2


def sizes_of(model: Any) -> Sizes:
    """The sizes of a model of transformers, whose tensors may be on the meta device.

    Raises ValueError for a model without experts, and for one whose layers cannot be told.
    """
    try:
        path = decoder_layers(model)
        routed = {r.name: r for r in routed_of(model)}
    except LookupError as error:
        raise ValueError(f"{type(model).__name__} {error}; it cannot be reckoned") from None
    if not routed:
        raise ValueError(f"{type(model).__name__} has no experts; name an MoE model")
    text = model.config.get_text_config(decoder=True)
    coded = {id(m) for m in find(model, "int8:row", None).linears.values()}
    kinds = _kinds(text)
    found: Counter[Layer] = Counter()
    inside = 0
    for n, layer in enumerate(model.get_submodule(path)):
        own = {k: r for k, r in routed.items() if k.startswith(f"{path}.{n}.")}
        kind = kinds[n] if n < len(kinds) else ""
        found[_layer(layer, text, kind, list(own.values()), coded)] += 1
        inside += sum(p.nbytes for p in layer.parameters())
    head = model.get_output_embeddings()
    head_values = 0 if head is None else head.weight.numel()
    return Sizes(
        model=type(model).__name__,
        hidden=text.hidden_size,
        layers=tuple(replace(layer, count=count) for layer, count in found.items()),
        head_values=head_values,
        other_bytes=sum(p.nbytes for p in _once(model)) - inside - 2 * head_values,
        refusal=shape_refusal(model) or "",
    )


def _once(model: nn.Module) -> Iterator[nn.Parameter]:
    yield from {id(p): p for p in model.parameters()}.values()


def _kinds(config: Any) -> list[str]:
    for name in ("layer_types", "layers_block_type"):
        if getattr(config, name, None):
            return list(getattr(config, name))
    return []


def _layer(
    layer: nn.Module, config: Any, kind: str, routed: list[Routed], coded: set[int]
) -> Layer:
    modules = dict(layer.named_modules())
    inside = {id(p) for m in modules.values() if is_experts(m) for p in m.parameters()}
    linears = [m for m in modules.values() if isinstance(m, nn.Linear)]
    codes = {id(m.weight) for m in linears if id(m) in coded}
    kept = [p for p in layer.parameters() if id(p) not in inside | codes]
    token, state, guess = _kept_of(modules, config, kind)
    sliding = kind.startswith(("sliding", "chunked"))
    window = getattr(config, "sliding_window", None) or getattr(
        config, "attention_chunk_size", None
    )
    heads = getattr(config, "num_attention_heads", 0) or 0
    return Layer(
        count=1,
        token_bytes=token,
        window=window if sliding else None,
        state_bytes=state,
        latents=_ending(modules, LATENT) is not None,
        pair_flops=4 * heads * _head_dim(config) if token else 0,
        linear_values=sum(m.weight.numel() for m in linears if id(m) in coded),
        kept_bytes=sum(p.nbytes for p in kept),
        biased=any(getattr(_ending(modules, name), "bias", None) is not None for name in OUTPUTS),
        shared=bool(routed) and any("shared" in name for name in modules),
        experts=_experts(routed, config) if routed else None,
        guess=guess,
    )


def _experts(routed: list[Routed], config: Any) -> Experts:
    """The experts of a layer; of several modules of them, as one."""
    first, values = routed[0], 0
    for r in routed:
        values += sum(p.numel() for p in r.experts.parameters()) // r.num_experts
    D = config.hidden_size
    down: Any = first.experts.down_proj
    reason = describe(first.experts)
    return Experts(
        E=first.num_experts,
        K=first.top_k,
        D=D,
        I=max(1, down.numel() // (first.num_experts * D)),
        values=values,
        refusal=reason if isinstance(reason, str) else "",
        routed=bool(first.key),
    )


def _kept_of(modules: dict[str, nn.Module], config: Any, kind: str) -> tuple[int, int, str]:
    """Bytes that a layer keeps of a token in 16 bits, and of a sequence; and what is a guess."""
    token, guess = 0, ""
    latent, keys, values = (_ending(modules, name) for name in (LATENT, KEYS, VALUES))
    if latent is not None:
        token = 2 * _width(latent)
    elif keys is not None:
        token = 2 * (_width(keys) + _width(values if values is not None else keys))
    elif any(_ending(modules, name) is not None for name in FUSED):
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        token = 4 * heads * _head_dim(config)
    state = next((s for s in map(_state_bytes, modules.values()) if s), 0)
    if any(word in kind for word in ("linear", "mamba", "conv", "recurrent", "hybrid")):
        token = 0 if "hybrid" not in kind else token
        if not state:
            guess = f"what layers of {kind} keep, taken for nothing"
    elif not token and not state and not kind.endswith(("mlp", "moe")):
        guess = f"what layers of {kind or 'this model'} keep, taken for nothing"
    if not guess and ("sparse" in kind or "index" in kind or "compressed" in kind):
        guess = f"how much of what they keep layers of {kind} read, taken for all"
    return token, state, guess


def _state_bytes(module: nn.Module) -> int:
    """The bytes that a module keeps of each sequence: a state in float32 and the last inputs of a
    convolution in 16 bits; 0 where it has none."""
    names = ("num_v_heads", "head_k_dim", "head_v_dim"), ("num_heads", "head_dim", "ssm_state_size")
    for three in names:
        sizes = [getattr(module, name, None) for name in three]
        if all(isinstance(n, int) for n in sizes) and hasattr(module, "conv1d"):
            convolution: Any = module.conv1d
            heads, rows, columns = (int(n) for n in sizes if n is not None)
            return 4 * heads * rows * columns + 2 * int(convolution.weight.numel())
    return 0


def _ending(modules: dict[str, nn.Module], name: str) -> nn.Module | None:
    """The first module of this name that has a weight and is no part of experts."""
    for path, module in modules.items():
        named = path.rpartition(".")[2] == name and "expert" not in path
        if named and getattr(module, "weight", None) is not None:
            return module
    return None


def _width(module: nn.Module) -> int:
    weight: Any = module.weight
    return int(weight.shape[0])


def _head_dim(config: Any) -> int:
    for name in ("qk_head_dim", "head_dim"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value:
            return value
    return int(config.hidden_size // config.num_attention_heads)
