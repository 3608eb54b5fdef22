"""How long a GPU is loaded by a measurement, and when it rests; there is none here."""

from __future__ import annotations

import pytest
import torch

from moe_ops.bench import timing

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("us", "seconds", "loads"),
    [
        (1000.0, None, [20]),
        (1000.0, 0.1, [100]),
        (4500.0, None, [4, 4]),  # five replays at least
        (30000.0, None, [1, 1, 1]),  # three of such as take longer than a measurement
        (10.0, None, [300]),
    ],
)
def test_a_gpu_rests_between_loads(
    us: float, seconds: float | None, loads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int | str] = []

    def queued(run: object, count: int, skip: int) -> list[float]:
        done.append(count)
        return [us] * count

    monkeypatch.setattr(timing, "_queued_us", queued)
    monkeypatch.setattr(timing.time, "sleep", lambda s: done.append("rest"))
    found = timing.time_replays(lambda: None, 2, CUDA, seconds)
    assert done == [1, *(x for count in loads for x in ("rest", count))]
    assert (found.us, found.replays) == (us / 2, sum(loads))
