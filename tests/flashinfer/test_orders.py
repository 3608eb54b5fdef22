"""Orders of weights: each undone exactly, per expert, and where they say that elements are."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from moe_ops import experts
from moe_ops.backends.flashinfer import orders
from moe_ops.parallel.moves import Moves, apply_moves
from tests.chosen import in_turn
from tests.flashinfer.layers import FORMATS, call_of, weights_of

READ = {
    "flashinfer.up_gate": tuple(name for name in FORMATS if name != "mxfp8"),
    "flashinfer.chunks": ("bfloat16", "nvfp4"),
    "flashinfer.shuffled": tuple(FORMATS),
}
CASES = [(layout, name) for layout, names in READ.items() for name in names]
SWAP = Moves(4, ((0, 2), (2, 0), (1, 3), (3, 1)))


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.contiguous().view(torch.uint8).clone() for n, t in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(x, b[n]) for n, x in a.items())


@in_turn(
    pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"]),
    pytest.mark.parametrize(("layout", "formats"), CASES),
)
def test_a_layout_is_undone_and_experts_move_in_it(layout: str, formats: str, gated: bool) -> None:
    call = call_of(formats, gated)
    F = call.w13_EFD.shape[1]
    tensors = weights_of(call) | {"b13_EF": torch.randn(4, F), "b2_ED": torch.randn(4, 256)}
    before, places = bits(tensors), [t.data_ptr() for t in tensors.values()]
    experts.layouts[layout].prepare_(tensors)
    assert not same(before, bits(tensors)) or (formats != "nvfp4" and not gated)
    assert [t.data_ptr() for t in tensors.values()] == places
    apply_moves(tensors, SWAP)
    moved = bits(tensors)
    experts.layouts[layout].restore_(tensors)
    apply_moves(tensors, SWAP)
    assert same(before, bits(tensors))
    apply_moves(tensors, SWAP)
    experts.layouts[layout].prepare_(tensors)
    assert same(moved, bits(tensors)), "moved, then prepared"


def test_elements_are_where_kernels_look_for_them(fake: ModuleType) -> None:
    numbers = fake.fused_moe.numbers
    scale = torch.randint(0, 256, (2, 256, 12), dtype=torch.uint8)
    swizzled, folded = orders.swizzled(scale), orders.folded(scale)
    assert torch.equal(numbers.scales_of_mma(orders.mma_view(swizzled), 256, 12), scale)
    assert torch.equal(numbers.linear_scales(swizzled[1], 256, 12), scale[1])
    assert not torch.equal(numbers.linear_scales(scale[1], 256, 12), scale[1])
    view = orders.folded_view(folded)[1].view(torch.uint8)
    assert torch.equal(numbers.folded_scales(view, 256, 12), scale[1])
    codes = torch.randint(0, 256, (2, 32, 64), dtype=torch.uint8)
    assert torch.equal(numbers.unmixed(orders.mixed(codes)[1]), codes[1])
    rows = torch.arange(2 * 64).view(1, 128, 1)
    assert orders.chunked(rows, 32).flatten()[:65].tolist() == [
        *range(64, 96), *range(32), 96,
    ]  # fmt: skip


WRONG = {
    "rows": (
        lambda: orders.swizzled(torch.zeros(1, 96, 4)),
        "rows of scales .* multiple of 128 .*, got 96",
    ),
    "groups": (lambda: orders.folded(torch.zeros(1, 64, 3)), "groups of a row .* of 4 .*, got 3"),
    "codes": (lambda: orders.mixed(torch.zeros(1, 16, 24)), "bytes of a row .* of 32 .*, got 24"),
    "chunks": (
        lambda: orders.chunked(torch.zeros(1, 96, 1), 32),
        "rows of the gate .* of 32 .*, got 48",
    ),
}


@pytest.mark.parametrize(("order", "said"), WRONG.values(), ids=WRONG)
def test_sizes_that_do_not_fit(order, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        order()


NOT_FOR = {
    "flashinfer.chunks": r"is for .*, got mxfp8 codes; take 'flashinfer\.shuffled'",
    "flashinfer.up_gate": "is not for mxfp8 codes; take 'flashinfer.shuffled'",
    "flashinfer.shuffled": None,
}


@pytest.mark.parametrize(("layout", "said"), NOT_FOR.items())
def test_formats_that_a_layout_is_not_for(layout: str, said: str | None) -> None:
    if said is not None:
        with pytest.raises(ValueError, match=said):
            experts.layouts[layout].prepare_(weights_of(call_of("mxfp8")))
    with pytest.raises(ValueError, match=r"no order for weights of torch\.int8"):
        w = torch.zeros(2, 64, 64, dtype=torch.int8)
        experts.layouts[layout].prepare_({"w13_EFD": w, "w2_EDI": w})
