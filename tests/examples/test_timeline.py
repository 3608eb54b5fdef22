"""`examples/timeline.py`: a layer of a step, found among the kernels of a trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from timeline import Launch, Ran, median_layer, table

LAYERS, STEPS = 4, 3


def kernels(prompt: bool) -> list[Ran]:
    """A prompt and steps of layers of three kernels, the second of which begins before the first
    ends; one layer of each step is slow."""
    found, now = [], 0.0
    for step in range(STEPS + prompt):
        found.append(Ran(now, now + 5.0, "embed"))
        now += 6
        for layer in range(LAYERS):
            slow = 50.0 if layer == 1 else 0.0
            prompts = prompt and step == 0
            for name, start, took in (
                ("attend", 0.5, 4.0), ("dispatch" if not prompts else "gather", 4.0, 3.0 + slow),
                ("experts", 8.0 + slow, 9.0),
            ):  # fmt: skip
                found.append(Ran(now + start, now + start + took, name))
            now += 17 + slow
    return found[::-1]


@pytest.mark.parametrize("prompt", [False, True])
def test_a_layer_of_a_step_is_found(prompt: bool) -> None:
    layer = median_layer(kernels(prompt), STEPS, LAYERS)
    assert layer == [
        Launch(kernel="attend", us=4.0, gap_us=0.5),
        Launch(kernel="dispatch", us=3.0, gap_us=-0.5),
        Launch(kernel="experts", us=9.0, gap_us=1.0),
    ]
    *_, last = table(layer).splitlines()
    assert last.split() == ["a", "layer", "17.0"]


def test_kernels_that_no_layer_has_are_refused() -> None:
    with pytest.raises(ValueError, match="no kernel runs 15 times, once a layer in 3 steps"):
        median_layer(kernels(False), STEPS, LAYERS + 1)
