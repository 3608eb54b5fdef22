"""Any group of integer weights that divides the width is held, whatever kernels there are for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_ops.layer import MoELayer
from moe_ops.quant import packing
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import Tol, assert_close
from tests.chosen import one_in
from tests.layer.shards import Split, pair, randomize

EXACT = Tol(1e-5, "float32 sums in another order")
# Groups, and widths of the model and of an expert that they divide.
WIDTHS = {
    "1x3": (6, 12), "1x16": (64, 48), "1x24": (48, 72), "1x48": (96, 48), "1x96": (192, 96),
    "1x256": (512, 256), "1x640": (640, 640), "2x48": (96, 48),
}  # fmt: skip


def formats() -> Iterator[tuple[str, int, int]]:
    for group, widths in WIDTHS.items():
        for element in ("int4", "uint4", "int8", "uint8"):
            for scale in ("", ":bfloat16", ":float16"):
                yield f"{element}:{group}{scale}", *widths


@one_in(3, pytest.mark.parametrize(("format", "hidden", "inner"), list(formats())))
@torch.no_grad()
def test_a_layer_computes_with_the_weights_that_its_codes_stand_for(
    format: str, hidden: int, inner: int
) -> None:
    quant = QuantConfig(weights=format)
    layer, plain = (
        randomize(MoELayer(4, 2, hidden, inner, quant=format)),
        MoELayer(4, 2, hidden, inner),
    )
    for w in ("w13", "w2"):
        parts = [getattr(layer, f"{w}_{what}") for what in ("weight", "scale", "zero")]
        codes, scale, zero = parts
        getattr(plain, f"{w}_weight").copy_(packing.dequantize(codes, scale, quant.format, zero))
    x, logits = torch.randn(7, hidden), torch.randn(7, 4)
    assert_close(layer(x, logits), plain(x, logits), EXACT)


@pytest.mark.parametrize("group", ["1x16", "1x48", "1x96"])
@torch.no_grad()
def test_ranks_hold_whole_groups(group: str) -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 96, "intermediate_size": 192}
    whole, parts = pair(Split(name="tp2", tp=2), **sizes, quant=f"uint4:{group}")
    x, logits = torch.randn(7, 96), torch.randn(7, 4)
    assert_close(sum(part(x, logits) for part in parts), whole(x, logits), EXACT)


def test_a_group_that_does_not_divide_the_width_is_refused() -> None:
    with pytest.raises(ValueError, match="w13 has 64 columns, which do not fill int4:1x48 groups"):
        MoELayer(4, 2, 64, 48, quant="int4:1x48")
