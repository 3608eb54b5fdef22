"""What TensorRT-LLM's kernels make of shuffled weights, of factors and of tokens in codes."""

from __future__ import annotations

import torch
from torch import Tensor

from flashinfer.fused_moe.kinds import ActivationType, Fp8QuantizationType, SfLayout
from flashinfer.fused_moe.numbers import (
    Held,
    Layer,
    e8m0,
    fp4_values,
    linear_scales,
    nvfp4_codes,
    require_dense,
    unchunked,
)

Weights = tuple[Tensor, Tensor, Tensor, Tensor]  # of both products, each with its scales
Factors = tuple[Tensor | None, Tensor | None, Tensor | None]
scratch = Held()  # of the runner that all layers of a process share


def finish(
    layer: Layer, x: Tensor, routed: Tensor | tuple[Tensor, Tensor], offset: int, out: Tensor | None
) -> Tensor:
    assert isinstance(routed, tuple) and out is not None
    require_dense(out)
    return out.copy_(scratch.write(layer.run(x, *routed, offset)))


def floats(x: Tensor, w1: Tensor, w2: Tensor, activation_type: int) -> Layer:
    require_dense(x, w1, w2)
    kind = ActivationType(activation_type).name
    up_gate = _pairs(_unblocked(w1), kind)
    return Layer(up_gate.float(), _unblocked(w2).float(), kind)


def float8(weights: Weights, kind: Fp8QuantizationType, is_shuffled: bool, act: int) -> Layer:
    """Float8 with a scale for 128 x 128 values, plain, or for 32 of a row, shuffled."""
    w1, w1_scale, w2, w2_scale = weights
    require_dense(*weights)
    name = ActivationType(act).name
    if kind is Fp8QuantizationType.DeepSeekFp8:
        assert not is_shuffled and w1_scale.dtype == w2_scale.dtype == torch.float32
        first, second = (_in_blocks(w, s) for w, s in ((w1, w1_scale), (w2, w2_scale)))
        return Layer(first, second, name, second=lambda h, e: _rounded(h, 128))
    assert is_shuffled and w1_scale.dtype == w2_scale.dtype == torch.uint8
    first, second = (_in_groups(w.float(), s, 32) for w, s in ((w1, w1_scale), (w2, w2_scale)))
    return Layer(_pairs(first, name), second, name, second=lambda h, e: _mx_rounded(h))


def float8_tokens(x: Tensor, scale: Tensor, kind: Fp8QuantizationType) -> Tensor:
    require_dense(x, scale)
    assert x.dtype == torch.float8_e4m3fn
    if kind is Fp8QuantizationType.DeepSeekFp8:
        assert scale.shape == (x.shape[1] // 128, x.shape[0]) and scale.dtype == torch.float32
        return x.float() * scale.T.repeat_interleave(128, 1)
    assert scale.shape == (x.shape[0], x.shape[1] // 32) and scale.dtype == torch.uint8
    return x.float() * e8m0(scale).repeat_interleave(32, 1)


def float4(weights: Weights, factors: Factors, tokens: torch.dtype, act: int) -> Layer:
    """Four bits. Of nvfp4 the gate, or what has none, is multiplied by its factor before the
    activation, and up by its own, which is over the scale of the second input."""
    w1, w1_scale, w2, w2_scale = weights
    require_dense(*weights)
    assert w1_scale.dtype == w2_scale.dtype == torch.float8_e4m3fn
    name = ActivationType(act).name
    size = 2 * w1.shape[2] // w1_scale.shape[2]
    first, second = (
        _in_groups(fp4_values(w), s, size) for w, s in ((w1, w1_scale), (w2, w2_scale))
    )
    first = _pairs(first, name)
    if size == 32:
        assert factors == (None, None, None) and tokens != torch.uint8
        as_it_is = tokens == torch.bfloat16
        return Layer(first, second, name, second=lambda h, e: h if as_it_is else _mx_rounded(h))
    assert tokens == torch.uint8
    return _with_factors(first, second, name, factors)


def _with_factors(first: Tensor, second: Tensor, name: str, factors: Factors) -> Layer:
    up, gate, out = factors
    assert up is not None and gate is not None and out is not None
    for factor in (up, gate, out):
        assert factor.shape == first.shape[:1] and factor.dtype == torch.float32
        assert factor.is_contiguous()
    if name == "Relu2":
        scaled = first * gate[:, None, None]
        inverse = up
    else:
        halves = first.chunk(2, 1)
        scaled = torch.cat((halves[0] * up[:, None, None], halves[1] * gate[:, None, None]), 1)
        inverse = torch.ones_like(up)

    def rounded(h: Tensor, e: int) -> Tensor:
        codes, blocks = nvfp4_codes(h * inverse[e])
        return fp4_values(codes) * blocks.float().repeat_interleave(16, -1)

    return Layer(scaled, second * out[:, None, None], name, second=rounded)


def float4_tokens(x: Tensor, scale: Tensor | None, layout: SfLayout | None) -> Tensor:
    require_dense(x, scale)
    assert layout is SfLayout.layout_linear
    if scale is None:
        return x
    assert scale.dtype == torch.float8_e4m3fn and scale.shape[0] == x.shape[0]
    if x.dtype == torch.uint8:
        return fp4_values(x) * scale.float().repeat_interleave(16, 1)
    return x.float() * e8m0(scale.view(torch.uint8)).repeat_interleave(32, 1)


def _pairs(w: Tensor, kind: str) -> Tensor:
    """[up; gate] from rows of both in turn, where there is a gate."""
    return w if kind == "Relu2" else unchunked(w, 1)


def _unshuffled(w: Tensor) -> Tensor:
    old = torch.arange(w.shape[1])
    return w[:, old // 32 * 32 + old % 4 * 8 + old % 32 // 4]


def _unblocked(w: Tensor) -> Tensor:
    """[E, rows, columns] from blocks [E, columns / 64, rows, 64] of rows shuffled by 32."""
    assert w.shape[3] == 64 and w.dtype == torch.bfloat16
    return _unshuffled(w.permute(0, 2, 1, 3).flatten(2))


def _in_groups(values: Tensor, scale: Tensor, size: int) -> Tensor:
    """Shuffled values by the scales of groups of a row, in tiles and shuffled alike."""
    rows, groups = values.shape[1], values.shape[2] // size
    plain = torch.stack([linear_scales(s.view(torch.uint8), rows, groups) for s in scale])
    found = e8m0(plain) if size == 32 else plain.view(torch.float8_e4m3fn).float()
    return _unshuffled(values * found.repeat_interleave(size, 2))


def _in_blocks(w: Tensor, scale: Tensor) -> Tensor:
    return w.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)


def _rounded(h: Tensor, size: int) -> Tensor:
    """Float8 with a float32 scale for `size` columns of a row."""
    groups = h.unflatten(-1, (-1, size))
    scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def _mx_rounded(h: Tensor) -> Tensor:
    """Float8 with a power of two for 32 columns of a row."""
    groups = h.unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2**-100)
    scale = torch.exp2(largest.log2().floor() - 8)
    codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)
