"""Widths of a layer are rounded up as the backend that it is made for asks, and its formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_ops
from moe_ops import MoELayer, QuantConfig
from moe_ops.layer import Padding
from moe_ops.layer.exchange import Exchange
from moe_ops.layer.padding import Asked
from moe_ops.layer.tensors import own_part
from moe_ops.parallel.config import ParallelConfig
from moe_ops.ranks import transport

SIZES: dict[str, Any] = {
    "num_experts": 4, "top_k": 2, "hidden_size": 100, "intermediate_size": 36,
    "dtype": torch.bfloat16,
}  # fmt: skip
FP8 = QuantConfig(weights="float8_e4m3fn:128x128", inputs="float8_e4m3fn:1x128")
# By backend and formats the widths D and I that 100 and 36 are held as.
ASKED: dict[str, tuple[str, str | QuantConfig | None, tuple[int, int]]] = {
    "nothing": ("reference", None, (100, 36)),
    "cpu_floats": ("cpu", None, (100, 36)),
    "cpu_groups": ("cpu", "int4:1x32", (128, 64)),
    "cpu_mxfp6": ("cpu", "mxfp6_e2m3", (128, 64)),
    "triton_floats": ("triton.grouped", None, (104, 40)),
    "triton_float8": ("triton.rows", "float8_e4m3fn:row", (112, 48)),
    "triton_int4": ("triton.tiny", "int4:row", (128, 64)),
    "cutlass_floats": ("flashinfer_cutlass", None, (104, 40)),
    "cutlass_blocks": ("flashinfer_cutlass", FP8, (128, 128)),
    "trtllm": ("flashinfer_trtllm", "mxfp8", (256, 128)),
    "cute_dsl": ("flashinfer_cute_dsl", None, (104, 64)),
}


@pytest.mark.parametrize(("name", "quant", "widths"), ASKED.values(), ids=ASKED)
def test_a_backend_is_asked(
    name: str, quant: str | QuantConfig | None, widths: tuple[int, int]
) -> None:
    layer = MoELayer(**SIZES, quant=quant, padding=name)
    assert widths == (layer.sizes.D, layer.sizes.I)
    assert MoELayer(**SIZES, quant=quant, padding=Padding(padding=name)).sizes == layer.sizes
    assert bool(layer.padding) == (widths != (100, 36))
    assert not layer.padding or f"hidden size 100 held as {widths[0]}" in layer.padding
    asks = f"{name} asks for multiples of"
    assert (asks in layer.padding) == (name not in ("reference", "cpu"))


def test_what_is_added_is_not_seen() -> None:
    plain, wide = MoELayer(**SIZES), MoELayer(**SIZES, padding="flashinfer_cute_dsl")
    with torch.no_grad():
        for name in ("w13_weight", "w2_weight"):
            parts = (own_part(name, getattr(m, name), m.sizes, m.activation) for m in (plain, wide))
            of, to = parts
            to.copy_(of)
        x, logits = torch.randn(5, 100).bfloat16(), torch.randn(5, 4)
        torch.testing.assert_close(wide(x, logits), plain(x, logits), rtol=1.6e-2, atol=1e-4)


def test_what_is_told_and_what_is_asked_are_both_met() -> None:
    layer = MoELayer(
        **SIZES, padding=Padding(hidden_multiple=12, padding="triton.grouped"),
        parallel=ParallelConfig.of(tp=5, tp_rank=4),
    )  # fmt: skip
    assert layer.sizes.D == 120  # of 12 and of 8
    # Of ranks that do not divide the width each has a share that is rounded up.
    assert (layer.sizes.I, layer.sizes.first, layer.sizes.used) == (8, 32, 4)
    assert layer.padding.startswith("hidden size 100 held as 120, intermediate size 4 held as 8")


@pytest.mark.parametrize("collective", transport.TRANSPORTS)
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.bfloat16, 2), (torch.float32, 1)])
def test_a_transport_is_asked(collective: str, dtype: torch.dtype, hidden: int) -> None:
    """`push` copies words of four bytes; the others pack bytes."""
    exchange = Exchange(group="", tp_group="", sharers=1, most=8, collective=collective)
    asked = Asked.of(Padding(), None, dtype, exchange)
    pushes = collective in (transport.PUSH, transport.AUTO) and hidden > 1
    assert asked.hidden_multiple == (hidden if pushes else 1)
    assert asked.by == (("push asks for multiples of 2 (hidden)",) if pushes else ())
    assert asked.intermediate_multiple is None  # so that shares of ranks are not rounded up


@pytest.mark.parametrize("html", [False, True])
def test_explain_says_it(html: bool, tmp_path: Any) -> None:
    model = torch.nn.Sequential(MoELayer(**SIZES, internal_gate=True, padding="triton.grouped"))
    page = tmp_path / "page.html"
    found = moe_ops.explain(model, torch.randn(3, 100).bfloat16(), html=str(page))
    (region,) = found.regions
    assert region.padding == model[0].padding != ""
    assert "padded       hidden size 100 held as 104" in str(found)
    assert "hidden size 100 held as 104" in page.read_text()
    assert type(found).from_json(found.to_json()) == found


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": ("cutlass", ValueError, "padding='cutlass' is unknown; choose one of reference, "),
    "formats": (
        "flashinfer_b12x", ValueError,
        "padding='flashinfer_b12x' asks a backend that does not run this layer, as it runs nvfp4 "
        "weights with nvfp4 inputs; got .*; name one that does, or the multiples themselves",
    ),
    "type": (8, TypeError, "padding must be a moe_ops.layer.Padding, a backend's name or None,"),
}  # fmt: skip


@pytest.mark.parametrize(("padding", "error", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_asked(padding: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        MoELayer(**SIZES, padding=padding)
