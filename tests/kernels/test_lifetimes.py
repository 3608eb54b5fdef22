"""Tensors of one call in one buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_ops.kernels.triton.lifetimes import ALIGNMENT, Life, offsets


def life(nbytes: int, first: int, last: int) -> Life:
    return Life(nbytes=nbytes, first=first, last=last)


def test_tensors_of_other_times_share_a_place() -> None:
    assert offsets([life(512, 0, 1), life(512, 1, 2), life(512, 2, 3)]) == ([0, 512, 0], 1024)


def test_a_small_tensor_fills_a_gap() -> None:
    lives = [life(1024, 0, 2), life(768, 3, 5), life(200, 2, 4)]
    assert offsets(lives) == ([0, 0, 1024], 1280)


def test_no_tensors_need_no_buffer() -> None:
    assert offsets([]) == ([], 0)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9), st.integers(0, 4)), max_size=12))
def test_what_is_needed_at_one_time_lies_apart(drawn: list[tuple[int, int, int]]) -> None:
    lives = [life(size, first, first + more) for size, first, more in drawn]
    at, end = offsets(lives)
    assert all(a % ALIGNMENT == 0 and a + of.nbytes <= end for a, of in zip(at, lives, strict=True))
    for i, one in enumerate(lives):
        for j, other in enumerate(lives[:i]):
            apart = at[i] + one.nbytes <= at[j] or at[j] + other.nbytes <= at[i]
            assert apart or not one.meets(other)
    assert end <= sum(of.nbytes + ALIGNMENT for of in lives)
