"""What the kernels of one skeleton are known by in Triton's cache on the disk; and by torch, which
steps of tiles their producer copies."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton.decode import quantized_tiles_gluon
from moe_ops.kernels.triton.experts.products import (
    grouped_blocks,
    grouped_float8_tokens,
    grouped_registers,
    grouped_wgmma,
    hopper,
    skeleton,
)
from tests.kernels.gluon_in_torch import functions_of

GIVEN = [
    (grouped_wgmma._grouped, grouped_wgmma._product),
    (grouped_wgmma._grouped, grouped_wgmma._tokens_of_tile),
    (grouped_wgmma._grouped, grouped_wgmma._copy_gathered),
    (grouped_wgmma._grouped, grouped_wgmma._note_tokens),
    (grouped_wgmma._grouped, hopper.both_halves),
    (grouped_wgmma._grouped, hopper.copy_rows),
    (grouped_blocks._grouped_float8, grouped_blocks._product),
    (grouped_blocks._grouped_float8, hopper.both_halves),
    (grouped_blocks._grouped_float8, hopper.copy_rows),
    (grouped_float8_tokens._grouped_float8_tokens, grouped_float8_tokens._product),
    (grouped_float8_tokens._grouped_float8_tokens, grouped_float8_tokens._boxes_of_tile),
    (grouped_float8_tokens._grouped_float8_tokens, grouped_float8_tokens._copy),
    (grouped_registers._grouped_codes, grouped_registers.product),
    (grouped_registers._grouped_codes, grouped_registers.boxes_of_tile),
    (grouped_registers._grouped_codes, grouped_registers.copy),
    (quantized_tiles_gluon._consume, grouped_registers.product),
    (quantized_tiles_gluon._produce, grouped_registers.copy),
    (quantized_tiles_gluon.quantized_linears_tiles, quantized_tiles_gluon._consume),
    (quantized_tiles_gluon.quantized_linears_tiles, quantized_tiles_gluon._produce),
]


def unnoticed(kernel: Any, given: Any) -> bool:
    """Whether a kernel has the same key when a function that it gives has another source."""
    kernel.hash = None
    before = kernel.cache_key
    given._unsafe_update_src(given.src.replace("HOW", "ANY_HOW"))
    kernel.hash = None
    return kernel.cache_key == before


def test_a_kernel_is_another_one_if_a_function_that_it_gives_is() -> None:
    # In a process of its own, as Triton interprets kernels in this one.
    root = Path(__file__).resolve().parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    source = "import tests.kernels.test_skeleton as t; print([t.unnoticed(*g) for g in t.GIVEN])"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, cwd=root, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == str([False] * len(GIVEN))


def copied(steps: int, ahead: tuple[int, ...], stages: int) -> list[tuple[int, int]]:
    """(step, stage) of what a producer copies for three tiles of so many steps."""
    found: list[tuple[int, int]] = []
    tiles = iter([(1, 0, 0, 0), (2, 0, 0, 0), (-1, 0, 0, 0)])
    barriers = SimpleNamespace(shape=(stages,), index=lambda stage: None)
    names = functions_of(
        (skeleton,),
        mbarrier=SimpleNamespace(wait=lambda *_: None),
        tile_scheduler=SimpleNamespace(
            draw=lambda *_: None, drawn_item=lambda *_: None, look_up=lambda *_: None,
            tile_with_rows=lambda *_: next(tiles), tell=lambda *_: None,
        ),
    )  # fmt: skip
    names["produce"](
        None, (None, None, barriers, barriers), (0, 64 * steps), None, None, None, (0, 0, 0, 0),
        lambda *_: None, lambda i, bar, stage, *_: found.append((int(i), stage)), None, 128, 64, 1,
        ahead, (),
    )  # fmt: skip
    return found


# How far ahead the kernels look for the next tile, and the fewest steps of the tiles that they run.
@pytest.mark.parametrize(
    ("ahead", "least"), [((3, 2, 1), 3), ((5, 3, 1), 4), ((6, 4, 2), 4)], ids=str
)
def test_a_producer_copies_every_step_of_a_tile_once(ahead: tuple[int, ...], least: int) -> None:
    for steps, stages in itertools.product((least, least + 1, 11), (3, 4)):
        want = [(i % steps, i % stages) for i in range(3 * steps)]
        assert copied(steps, ahead, stages) == want
