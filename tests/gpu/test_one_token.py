"""One token alone that products on a GPU round to codes of 8 bits: the bits of the launches that do
so once for all programs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_ops.backends.triton import run_experts
from moe_ops.kernels.triton.experts.products.register_stream import Stream, Streams
from moe_ops.ops.experts import ExpertsCall
from moe_ops.testing import BF16, F16, Case
from tests.gpu.captures import captured
from tests.kernels.test_quantized_experts import call_of
from tests.kernels.test_rounded_tokens import FORMATS, TOKENS, same

pytestmark = pytest.mark.gpu
WIDTHS = {"small": (2048, 768), "wide": (4096, 14336), "ragged": (2880, 2896), "tiny": (96, 32)}
STREAMS = {
    "usual": Streams(up=Stream(S=4, C=4), down=Stream(S=8, C=2)),
    "ahead": Streams(up=Stream(S=4, C=4, ahead=4), down=Stream(S=8, C=1, ahead=4)),
    "others": Streams(up=Stream(S=2, MW=2, NT=2), down=Stream(S=4, MT=2, NT=2)),
}


def run(call: ExpertsCall, tiles: Streams, up: bool, down: bool) -> Tensor:
    tiles = Streams(up=replace(tiles.up, rounds=up), down=replace(tiles.down, rounds=down))
    return run_experts("tiny/stream", call, tiles=tiles)


def one_token(widths: str, formats: str, dtype: torch.dtype) -> ExpertsCall:
    torch.manual_seed(0)
    D, I = WIDTHS[widths]  # noqa: E741
    call = call_of(Case(name=widths, T=1, E=5, K=4, D=D, I=I), *FORMATS[formats], dtype=dtype)
    call.ids_TK[0, 2], call.weights_TK[0, 2] = 9, float("nan")  # an expert that is elsewhere
    return call


# Each of some widths and formats, the others in turns.
CASES = [
    (widths, formats, tiles, dtype)
    for (widths, formats), tiles, dtype in zip(
        itertools.product(WIDTHS, FORMATS),
        itertools.cycle((*STREAMS, "ahead")),
        itertools.cycle((BF16, F16)),
    )
]


@pytest.mark.parametrize(("widths", "formats", "tiles", "dtype"), CASES, ids=str)
def test_the_bits_of_launches_that_round_before(
    widths: str, formats: str, tiles: str, dtype: torch.dtype
) -> None:
    call, kept = one_token(widths, formats, dtype), torch.empty(0)
    for name, value in TOKENS.items():
        kept = call.x_TD.clone()
        if value is not None:
            wide = value in (0.0, 1e-14)
            call.x_TD[0, slice(None) if wide else 7] *= value
        want = run(call, STREAMS[tiles], False, False)
        for up, down in ((True, True), (True, False), (False, True)):
            assert same(run(call, STREAMS[tiles], up, down), want), name
        assert bool(want.isnan().all()) == (name in ("nan", "infinite"))
        call.x_TD.copy_(kept)


@pytest.mark.parametrize("formats", FORMATS)
def test_a_captured_call_rounds_the_token_that_it_finds(formats: str) -> None:
    """Overlapping launches of two calls, each with the token that the one before made."""
    call = one_token("small", formats, BF16)
    tiles = STREAMS["usual"]

    def twice() -> Tensor:
        return run(replace(call, x_TD=run(call, tiles, True, True)), tiles, True, True)

    twice()
    graph, out = captured(twice)
    for _ in range(5):
        call.x_TD.copy_(torch.randn_like(call.x_TD))
        graph.replay()
        first = run(call, tiles, False, False)
        assert torch.equal(out, run(replace(call, x_TD=first), tiles, False, False))
