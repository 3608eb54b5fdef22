"""`bench tiles`: what is tried, in which order, and that it is checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton_tiles import (
    CODES_TILES,
    FLOAT8_TILES,
    codes_tile,
    float8_tile,
    rows_of_codes,
)
from moe_ops.bench import cells, formats, tiles, timing
from moe_ops.bench.__main__ import parse
from moe_ops.bench.rates import Rates
from moe_ops.kernels.triton import Weight
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.products.grouped_tile import CodesTile
from moe_ops.kernels.triton.experts.products.register_stream import Stream, Streams
from moe_ops.kernels.triton.experts.products.tiny import TinyTiles
from moe_ops.testing import DEVICE, F16, Case
from tests.chosen import one_in

NONE = torch.empty(0)
CODES = Codes(
    w13_scale_EFG=NONE, w2_scale_EDG=NONE, w13_zero_EFG=None, w2_zero_EDG=None,
    weight=Weight("int4", 1, 128, "bfloat16", False, 4),
)  # fmt: skip


def near(n: int) -> Iterator[int]:
    return (m for m in (n - 1, n + 1) if 0 <= m <= 9)


def test_the_fastest_of_a_valley_is_found() -> None:
    found = tiles.climb(2, near, lambda n: tiles.Tried(tiles=n, us=float((n - 7) ** 2)), 40)
    assert [t.tiles for t in found][:3] == [7, 6, 8]
    assert len(found) == len({t.tiles for t in found}) == 8


def test_no_more_are_tried_than_asked_for() -> None:
    found = tiles.climb(2, near, lambda n: tiles.Tried(tiles=n, us=10.0 - n), 4)
    assert len(found) == 4


def test_what_is_wrong_is_last_and_leads_nowhere() -> None:
    def measure(n: int) -> tiles.Tried:
        return tiles.Tried(tiles=n, us=None if n > 3 else 5.0 - n, wrong="too large" * (n > 3))

    found = tiles.climb(2, near, measure, 40)
    assert [t.tiles for t in found] == [3, 2, 1, 4]
    assert found[-1].us is None and found[-1].wrong == "too large"


def test_one_size_of_a_tile_of_codes_changes_and_its_stages_fit() -> None:
    weight = CODES.weight
    start = codes_tile(CodesTile(32, 0, blocks=2), weight)
    changed = list(tiles.around_codes(weight, start))
    assert codes_tile(CodesTile(64, 0, blocks=2), weight) in changed
    assert codes_tile(CodesTile(32, 0), weight) in changed
    assert {t.tokens for t in changed} == {16, 32, 64} and start not in changed
    assert all(t == codes_tile(t, weight) for t in changed)


def test_every_tile_of_float8_is_tried() -> None:
    start = float8_tile(*FLOAT8_TILES[0])
    found = tiles.climb(start, tiles.others_of_float8, lambda t: tiles.Tried(tiles=t, us=1.0), 40)
    assert sorted(str(t.tiles) for t in found) == sorted(str(float8_tile(*t)) for t in FLOAT8_TILES)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_no_tile_of_codes_has_one_stage(bits: int) -> None:
    """Its consumers would wait for the next stage, and its producer for them."""
    weight = replace(CODES.weight, bits=bits)
    for _, tile in CODES_TILES:
        changed = tiles.around_codes(weight, codes_tile(tile, weight))
        assert all(t.stages > 1 for t in changed)


def test_one_size_of_one_product_changes() -> None:
    start = TinyTiles()
    changed = list(tiles.around("tiny", "up", start))
    assert TinyTiles(BI=16) in changed and TinyTiles(BD=256) in changed
    assert all(t.BG == start.BG and t != start for t in changed)
    rows = rows_of_codes(4.0, 768, CODES, 227 * 1024)
    for tried in tiles.around("rows", "down", rows):
        assert tried.up == rows.up and tried.down != rows.down
    streams = Streams(up=Stream(S=4, C=4), down=Stream(S=8))
    changed = list(tiles.around("tiny", "up", streams))
    assert replace(streams, up=Stream(S=4, C=4, ahead=3)) in changed
    assert all(tried.down == streams.down and tried != streams for tried in changed)
    assert all(tried.up.C == 4 for tried in changed)  # the first product does not read it
    changed = list(tiles.around("tiny", "down", streams))
    assert replace(streams, down=Stream(S=8, C=2)) in changed
    assert replace(streams, down=Stream(S=8, rounds=True)) in changed
    assert replace(streams, down=Stream(S=8, registers=128)) in changed
    # Few tokens are not rounded where they are loaded.
    assert not any(tried.down.rounds for tried in tiles.around("rows", "down", streams))


def test_a_format_that_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["tiles", "--layer", "gpt_oss_20b", "--format", "int4:1x128:bfloat16"])
    assert "choose groups of 32 or 64" in capsys.readouterr().err


def small_grid() -> tuple[Case, cells.Grid]:
    case = Case(name="small", T=1, E=3, K=2, D=128, I=64)
    grid = cells.Grid(
        layers=[case],
        tokens=[2],
        routings=["uniform"],
        contenders=lambda _: [],
        dtype=F16,
        device=torch.device(DEVICE),
        seconds=0.01,
        quant=formats.parse("mxfp4"),
    )
    return case, grid


@pytest.mark.slow
@one_in(2, pytest.mark.parametrize("kernel", ["tiny", "rows"]))
def test_tiles_of_a_layer_are_checked_and_timed(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter takes long for a call: one set of inputs, and one replay.
    monkeypatch.setattr(cells, "sets_for", lambda *_: 1)
    once = timing.Timing(us=1.0, low_us=1.0, high_us=1.0, replays=1)
    if DEVICE == "cpu":
        monkeypatch.setattr(cells, "time_replays", lambda *_: once)
    case, grid = small_grid()
    rates = Rates(copy_tbs=1.0, matmul_tflops=100.0)
    found = tiles.measure(grid, rates, case, 2, kernel, "up", 2)
    assert len(found) == 2 and any(t.us is not None for t in found), found
    assert case.name in tiles.table(case, 2, grid, found)


def test_a_path_without_tiles_says_so() -> None:
    """Widths that no tile of codes has are decoded first."""
    case, grid = small_grid()
    rates = Rates(copy_tbs=1.0, matmul_tflops=100.0)
    with pytest.raises(ValueError, match="grouped/plain, which runs this layer, takes no tiles"):
        tiles.measure(grid, rates, case, 2, "grouped", "up", 2)


@pytest.mark.parametrize("start", [Stream(ahead=3, tokens_ahead=3), Stream(rounds=True)], ids=str)
def test_tokens_are_tried_no_further_ahead_than_codes(start: Stream) -> None:
    found = [t.up for t in tiles.around("tiny", "up", Streams(up=start, down=start))]
    assert all(t.tokens_ahead <= (1 if t.rounds else t.ahead) for t in found)
    assert {t.tokens_ahead for t in found} == ({1} if start.rounds else {1, 2, 3})
