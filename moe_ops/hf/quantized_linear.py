"""A linear layer whose weight is codes, in the place of a model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.decode_ops import quantized_linears
from moe_ops.hf.stored import format_of, format_text
from moe_ops.quant import packing
from moe_ops.quant.arguments import check_packing, ragged_axis
from moe_ops.quant.formats import ALL, Format
from moe_ops.quant.module import HoldsCodes

FLOATS_FIRST = (
    "read, resize, tie, prune or adapt the weight of a model in floats, and quantise it then; "
    "dequantize() gives what the codes stand for, as the weight of a torch.nn.Linear in its place"
)
MOST_VALUES = 1 << 24  # that are in float32 at once, unless one group has more
CODES, SCALE, ZERO, GLOBAL_SCALE, FORMAT = (
    f"weight_{part}" for part in ("codes", "scale", "zero", "global_scale", "format")
)


class QuantizedLinear(HoldsCodes):
    """y = x Wᵀ + b, where W is what codes of a format stand for: `quantized_linears` as a module.

    In the state dict are weight_codes, weight_scale, weight_zero and weight_global_scale (of
    formats that have them), and weight_format: the format, as text in bytes. These keep their dtype
    whatever the model is cast to; the bias is a float as before. There is no `weight`, and none can
    be put in, which AttributeError and ValueError say; `dequantize` gives its values. What is made
    is empty: `round_from` fills it.

    x: float [..., in_features]; the result has x's dtype. Codes have no gradient; the input and the
    bias have one. `load_state_dict` raises for a weight of floats and for codes of another format.
    """

    weight_scale: Tensor
    weight_zero: Tensor | None
    weight_global_scale: Tensor | None

    def __init__(
        self, rows: int, columns: int, format: str, bias: nn.Parameter | None, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.w_format = columns, rows, format
        parsed = Format.of(format).parsed
        groups = parsed.scale_shape(rows, columns)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        codes = empty((rows, parsed.packed(columns)), parsed.storage.dtype)
        self.weight_codes = nn.Parameter(codes, requires_grad=False)
        text = format_text(format).to(device)
        self.weight_format = nn.Parameter(text, requires_grad=False)
        self.register_buffer(SCALE, empty(groups, parsed.scale_dtype))
        has_zero, has_global = Format.of(format).has_zero, Format.of(format).has_global_scale
        self.register_buffer(ZERO, empty(groups, torch.uint8) if has_zero else None)
        self.register_buffer(GLOBAL_SCALE, empty((1,), torch.float32) if has_global else None)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        (y_TN,) = quantized_linears(
            x.reshape(-1, self.in_features),
            [self.weight_codes],
            [self.weight_scale],
            [self.weight_zero],
            [self.weight_global_scale],
            [self.bias],
            self.w_format,
        )
        return y_TN.reshape(*x.shape[:-1], self.out_features)

    def dequantize(self) -> Tensor:
        """The weight [out_features, in_features] in float32."""
        return packing.dequantize(
            self.weight_codes, self.weight_scale, Format.of(self.w_format), self.weight_zero,
            self.weight_global_scale,
        )  # fmt: skip

    @torch.no_grad()
    def round_from(self, w_NK: Tensor, scale_rule: str) -> float:
        """Fill the module with the codes of a weight, and say by how much their values differ from
        it: the root of the sum of squares, relative to that of the weight. That is by how much
        results differ, too, on average over inputs that vary alike in all directions."""
        format, parts = Format.of(self.w_format), self._parts()
        if self.weight_global_scale is not None:
            self.weight_global_scale.copy_(packing.global_scale_of(w_NK, format))
        wrong, all_of_it = w_NK.new_zeros(2, dtype=torch.float64)
        down = format.group[0]
        each = self.out_features if down == ALL else down
        for rows, groups in packing.row_blocks(
            self.out_features, self.in_features, each, MOST_VALUES
        ):
            w = w_NK[rows].float()
            common = self.weight_global_scale
            done = packing.quantize(w, format, global_scale=common, scale_rule=scale_rule)
            for part, t, at in zip(
                parts, (done.values, done.scale, done.zero), (rows, groups, groups), strict=True
            ):
                if part is not None and t is not None:
                    part[at] = t
            values = packing.dequantize(done.values, done.scale, format, done.zero, common)
            wrong += (values - w).double().square().sum()
            all_of_it += w.double().square().sum()
        return float((wrong / all_of_it).sqrt()) if all_of_it else 0.0

    def coded(self) -> Iterator[str]:
        return iter((CODES, SCALE, ZERO, GLOBAL_SCALE, FORMAT))

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(f"{self._holds()}, and no weight: {FLOATS_FIRST}")
        return super().__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # Nobody would read a weight, as transformers ties it to the embedding; and torch.nn.utils
        # moves what it prunes.
        if name == "weight" or name.removesuffix("_orig") in set(self.coded()) - {name}:
            raise ValueError(f"{self._holds()}, beside which {name} would be: {FLOATS_FIRST}")
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        # As torch's parametrizations do with what they compute from then on.
        if name in self.coded():
            raise ValueError(f"{self._holds()}, of which {name} is a part: {FLOATS_FIRST}")
        super().__delattr__(name)

    def _holds(self) -> str:
        return f"{type(self).__name__} holds codes of {self.w_format}"

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.w_format!r}"
        )

    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.weight_codes, self.weight_scale, self.weight_zero

    def _refusals(self, state_dict: dict[str, Any], prefix: str) -> Iterable[str]:
        given = state_dict.get(prefix + FORMAT)
        if f"{prefix}weight" in state_dict:
            yield (
                f"{prefix}weight is no quantised weight in the state dict, but this "
                f"{type(self).__name__} holds codes of {self.w_format}; load the weights before "
                "quantize_model"
            )
        elif (text := _text(given)) is not None and text != self.w_format:
            yield (
                f"{prefix}weight is {text} in the state dict, but this "
                f"{type(self).__name__} holds codes of {self.w_format}; quantise the model to the "
                "same format"
            )
        yield from super()._refusals(state_dict, prefix)


def _text(given: Any) -> str | None:
    """The format that a state dict says, or None if it says none."""
    if not isinstance(given, Tensor) or given.is_meta or given.dtype != torch.uint8:
        return None  # of another dtype is what all parts are asked for
    return format_of(given)


def refusal(rows: int, columns: int, format: str) -> str | None:
    """Why a weight of these sizes cannot be in a format, or None."""
    found = Format.of(format)
    try:
        check_packing("the format", found, columns)
    except ValueError as error:
        return str(error)
    ragged = ragged_axis(found, rows, columns)
    if ragged is None:
        return None
    axis, size, group = ragged
    return f"{format} wants {axis} of a multiple of {group}, got {size}"
