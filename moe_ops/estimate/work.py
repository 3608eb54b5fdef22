"""What a step and a prompt have to do, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ops.decode_ops.linears import MOST_TILED
from moe_ops.estimate.measured import Formats, Rates
from moe_ops.estimate.shares import floor
from moe_ops.estimate.sizes import Layer, Sizes, bits_of

FLOAT_BITS = 16
EXPERTS, LINEARS, HEAD, CACHE = "experts", "linear layers", "head", "cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One part of a step, or of a prompt: bytes, operations and the least milliseconds."""

    part: str
    bytes: float
    flops: float
    floor_ms: float


def step_of(sizes: Sizes, formats: Formats, batch: int, length: float, rates: Rates) -> list[Work]:
    """The parts of a step of so many sequences, with so many tokens each in the cache."""
    cache, pairs = 0.0, 0.0
    for layer in sizes.layers:
        seen = min(length, layer.window or length)
        # A state is read and written; keys, values and latents are read.
        cache += layer.count * batch * (seen * layer.token_bytes + 2 * layer.state_bytes)
        pairs += layer.count * batch * seen * layer.pair_flops
    return [
        _experts(sizes, formats, batch, rates),
        _linears(sizes, formats, batch, rates),
        _head(sizes, formats, batch, rates),
        _work(CACHE, cache, pairs, rates),
    ]


def prompt_of(sizes: Sizes, formats: Formats, batch: int, prompt: int, rates: Rates) -> list[Work]:
    """The parts of prompts of so many tokens each, whose last ones alone get logits."""
    tokens, cache, pairs = batch * prompt, 0.0, 0.0
    for layer in sizes.layers:
        cache += layer.count * batch * (prompt * layer.token_bytes + layer.state_bytes)
        seen = min(prompt, layer.window or prompt)
        pairs += layer.count * batch * prompt * seen / 2 * layer.pair_flops
    return [
        _experts(sizes, formats, tokens, rates),
        _linears(sizes, formats, tokens, rates),
        _head(sizes, formats, batch, rates),
        _work(CACHE, cache, pairs, rates),
    ]


def launches_of(sizes: Sizes, batch: int) -> int:
    """The launches of a step, as its kernels are joined."""
    return sum(layer.count * _launches(layer, batch) for layer in sizes.layers)


def _launches(layer: Layer, batch: int) -> int:
    """Attention: the products before it as one, itself with rotary embeddings, the one after it. Of
    latents there are two products before it, two norms, and two that absorb what expands them; a
    state has a convolution besides. Experts: the router's product, the router, two products, and
    for several tokens a sort and a sum. Shared ones: their products, a gate, the sum. Norms are a
    part of the product behind them for one token, unless that before them has a bias."""
    norms = 0 if batch == 1 and not layer.biased else 1
    attention = 9 if layer.latents else 3
    if layer.state_bytes:
        attention = 4 + (3 if layer.token_bytes else 0)
    experts = 2 if layer.experts is None else 4 + (0 if batch == 1 else 2)
    return attention + experts + 2 * norms + (3 if layer.shared else 0)


def weight_bytes(sizes: Sizes, formats: Formats) -> float:
    """All weights of a model."""
    total = float(sizes.other_bytes) + sizes.head_values * bits_of(formats.head) / 8
    for layer in sizes.layers:
        own = layer.linear_values * bits_of(formats.linears) / 8 + layer.kept_bytes
        if layer.experts is not None:
            own += layer.experts.E * layer.experts.values * bits_of(formats.weights) / 8
        total += layer.count * own
    return total


def cache_bytes(sizes: Sizes, batch: int, length: float) -> float:
    """What sequences of this length keep."""
    return sum(
        layer.count
        * batch
        * (min(length, layer.window or length) * layer.token_bytes + layer.state_bytes)
        for layer in sizes.layers
    )


def _experts(sizes: Sizes, formats: Formats, tokens: int, rates: Rates) -> Work:
    read = flops = least = 0.0
    for layer in sizes.layers:
        if layer.experts is not None:
            at = floor(layer.experts, formats, tokens, rates)
            read += layer.count * at.bytes
            flops += layer.count * at.flops
            least += layer.count * at.us / 1e3
    return Work(part=EXPERTS, bytes=read, flops=flops, floor_ms=least)


def _linears(sizes: Sizes, formats: Formats, tokens: int, rates: Rates) -> Work:
    values = sum(layer.count * layer.linear_values for layer in sizes.layers)
    kept = sum(layer.count * layer.kept_bytes for layer in sizes.layers)
    read = _moved(values, formats.linears, tokens) + kept
    return _work(LINEARS, read, 2.0 * tokens * (values + kept / 2), rates)


def _head(sizes: Sizes, formats: Formats, rows: int, rates: Rates) -> Work:
    read = _moved(sizes.head_values, formats.head, rows)
    return _work(HEAD, read, 2.0 * rows * sizes.head_values, rates)


def _moved(values: float, format: str, rows: int) -> float:
    """Bytes of weights of linear layers: codes that more rows meet than a kernel decodes them for
    are written as floats of 16 bits, which are read."""
    bits = bits_of(format)
    decoded = 2 * FLOAT_BITS if bits < FLOAT_BITS and rows > MOST_TILED else 0
    return values * (bits + decoded) / 8


def _work(part: str, read: float, flops: float, rates: Rates) -> Work:
    least = max(read / rates.bytes_per_second, flops / rates.flops) * 1e3
    return Work(part=part, bytes=read, flops=flops, floor_ms=least)
