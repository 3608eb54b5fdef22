"""What is made of tensors: once, and anew after each write, where it is."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from moe_ops.registry import derived
from moe_ops.registry.derived import Derived, written


class Doubled:
    """Twice the sum of two tensors, and how often it was made."""

    def __init__(self) -> None:
        self.out, self.made = torch.zeros(3), 0
        self.derived = Derived(self.write)

    def write(self, a: Tensor, b: Tensor) -> None:
        self.made += 1
        self.out.copy_(2 * (a + b))


@pytest.fixture
def sources() -> tuple[Tensor, Tensor]:
    return torch.ones(3), torch.arange(3.0)


def test_it_is_made_once(sources: tuple[Tensor, Tensor]) -> None:
    doubled = Doubled()
    for _ in range(3):
        doubled.derived.follow(*sources)
    assert doubled.made == 1 and torch.equal(doubled.out, 2 * sum(sources))


def test_a_write_is_seen_by_the_next_call(sources: tuple[Tensor, Tensor]) -> None:
    doubled = Doubled()
    doubled.derived.follow(*sources)
    sources[1].mul_(3)
    doubled.derived.follow(*sources)
    assert doubled.made == 2 and torch.equal(doubled.out, 2 * sum(sources))


def test_a_write_that_is_told_is_seen_at_once(sources: tuple[Tensor, Tensor]) -> None:
    """Also by another tensor on the same memory; and then not again."""
    doubled, other = Doubled(), Doubled()
    for of in (doubled, other):
        of.derived.follow(*sources)
    sources[0].data.add_(5)  # which no version tells of
    written((sources[0].detach(), sources[1], torch.ones(2)))
    for of in (doubled, other):
        of.derived.follow(*sources)
        assert of.made == 2 and torch.equal(of.out, 2 * sum(sources))


def test_other_tensors_are_other_sources(sources: tuple[Tensor, Tensor]) -> None:
    doubled = Doubled()
    doubled.derived.follow(*sources)
    doubled.derived.follow(sources[0].clone(), sources[1])
    assert doubled.made == 2
    first = torch.zeros(3)
    doubled.derived.follow(first, sources[1])
    first.data = torch.full((3,), 4.0)  # as a move to another device does
    doubled.derived.follow(first, sources[1])
    assert doubled.made == 4 and torch.equal(doubled.out, 2 * (4 + sources[1]))


def test_in_inference_mode_every_call_makes_it() -> None:
    doubled = Doubled()
    with torch.inference_mode():
        a, b = torch.ones(3), torch.ones(3)
        for _ in range(2):
            doubled.derived.follow(a, b)
    assert doubled.made == 2


def test_sources_and_followers_are_not_kept_alive(
    sources: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived, "_followers", {})
    monkeypatch.setattr(derived, "MOST_PLACES", 0)
    doubled, gone = Doubled(), torch.ones(3)
    doubled.derived.follow(gone, sources[1])
    del gone
    gc.collect()
    written((sources[1],))
    assert doubled.made == 1, "one of its sources is gone"
    del doubled
    gc.collect()
    written((sources[1],))
    assert derived._followers == {}
