"""Shadows: what host code sees of tensors, without their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from moe_ops.kernels.triton.shadows import Shadow, Shadows, shadow_of


def seen(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16, t.is_contiguous()


MEMORY = torch.zeros(4096, dtype=torch.uint8)
TENSORS = {
    "in order": torch.zeros(4, 6),
    "transposed": torch.zeros(4, 6).T,
    "every other row": torch.zeros(8, 6)[::2],
    "not aligned": torch.zeros(25)[1:].view(4, 6),
    "bytes that begin with a word": MEMORY[4:28].view(4, 6),
    "empty": torch.zeros(0, 6),
    "one number": torch.zeros(()),
    "codes": torch.zeros(4, 6, dtype=torch.float8_e4m3fn),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda t: t[:, 1:3],
    "transposed": lambda t: t.transpose(0, 1),
    "flat": lambda t: t.flatten(),
    "bytes": lambda t: t.view(torch.uint8),
    "words": lambda t: t.view(torch.int64),
    "a copy": lambda t: t.T.contiguous(),
    "new": lambda t: t.new_empty(3, 5, dtype=torch.int32),
    "another dtype": lambda t: torch.empty_like(t, dtype=torch.float64),
    "apart": lambda t: torch.empty(3, 5, device=t.device),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_shadow_looks_like_its_tensor(name: str) -> None:
    assert seen(shadow_of(TENSORS[name])) == seen(TENSORS[name])


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_made_of_a_shadow_looks_like_what_is_made_of_its_tensor(name: str) -> None:
    t = torch.zeros(4, 6)
    with Shadows():
        got = VIEWS[name](shadow_of(t))
    want = VIEWS[name](t)
    assert isinstance(got, Shadow)
    assert seen(got)[:4] == seen(want)[:4] and got.is_contiguous() == want.is_contiguous()


@pytest.mark.parametrize(
    ("given", "stride"),
    [
        (torch.zeros(1, 6), (6, 1)),
        (torch.zeros(4, 6), (6, 1)),
        (torch.zeros(8, 6)[::2], (12, 1)),
        (torch.zeros(4, 9)[:, 1:7], (9, 1)),
    ],
)
def test_more_rows_lie_as_far_apart(given: Tensor, stride: tuple[int, int]) -> None:
    shadow = shadow_of(given, 100)
    assert shadow.shape == (100, 6) and shadow.stride() == stride
    assert shadow.data_ptr() == given.data_ptr() % 16


def test_sizes_that_no_memory_has_room_for() -> None:
    with Shadows():
        shadow = shadow_of(torch.zeros(1, 2**20), 2**30)
        assert shadow.new_empty(2**50).numel() == 2**50


def test_there_are_no_values() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        shadow_of(torch.zeros(1)).item()
