"""Rings that a model writes to: emptied in time, no larger than they are, and no row lost."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_ops.ops.route_recording import write_rows
from moe_ops.recorded.ring import Rings

CPU = torch.device("cpu")
LAYERS, K = ("a", "b"), 2


def rings(tokens: int, *, weights: bool = False) -> Rings:
    return Rings(LAYERS, 100, K, tokens, weights=weights, device=CPU)


class Model:
    """What writes to rings as layers do: experts by a number of the token, which each call has."""

    def __init__(self, rings: Rings) -> None:
        self.rings = rings
        self.written = 0
        self.want: list[Tensor] = []

    def call(self, rows: int, width: int, batch: int, tokens: int) -> None:
        """Write all rows of a padded batch, and note those that are the call's."""
        numbers = torch.arange(rows * width) + self.written
        self.written += rows * width
        for layer in range(len(LAYERS)):
            ids = torch.stack([numbers % 97, (numbers + 50 + layer) % 97], 1)
            write_rows(self.rings.ids[layer], self.rings.at, ids)
            if self.rings.weights is not None:
                write_rows(self.rings.weights[layer], self.rings.at, ids / 97.0)
        self.want.append(numbers.view(rows, width)[:batch, :tokens].flatten() % 97)


@pytest.mark.parametrize("weights", [False, True], ids=["ids", "weights"])
@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_taken_once_whatever_the_calls(seed: int, weights: bool) -> None:
    choose = random.Random(seed)
    made = rings(choose.randint(56, 70), weights=weights)
    model = Model(made)
    calls = []
    for _ in range(choose.randint(20, 80)):
        batch, tokens = choose.randint(1, 5), choose.randint(0, 6)
        rows, width = batch + choose.randint(0, 2), tokens + choose.randint(0, 1)
        made.begin(batch, tokens, rows, width)
        model.call(rows, width, batch, tokens)
        calls.append((batch, tokens))
        if choose.random() < 0.05:
            found = made.take()
            assert found.calls == tuple(calls)
            assert torch.equal(found.ids_TLK[:, 0, 0], torch.cat(model.want).short())
            model.want, calls = [], []
    found = made.take()
    want = torch.cat([torch.empty(0, dtype=torch.int64), *model.want])
    assert torch.equal(found.ids_TLK[:, 0, 0], want.short())
    if weights:
        assert found.weights_TLK is not None
        assert torch.equal(found.weights_TLK, found.ids_TLK.float() / 97.0)


def test_memory_stays_that_of_the_rings() -> None:
    made = rings(64)
    before, model = made.nbytes, Model(made)
    for _ in range(10_000):
        made.begin(32, 1, 32, 1)
        made.at.add_(0)
    assert made.nbytes == before == 64 * K * 2 * len(LAYERS) + 8
    assert model.written == 0
    assert made.take().tokens == 320_000


def test_a_call_that_is_tried_padded_first_and_padded_then() -> None:
    made = rings(200)
    model = Model(made)
    made.begin(2, 5, 2, 5, may_grow=True)
    model.call(2, 5, 2, 5)
    kept = model.want[-1]
    made.try_out(2, 6)
    model.call(2, 6, 2, 5)  # elsewhere
    made.begin(2, 5, 2, 5, may_grow=True)
    made.pad(2, 6)
    model.call(2, 6, 2, 5)
    found = made.take()
    assert found.calls == ((2, 5), (2, 5))
    assert torch.equal(found.ids_TLK[:, 0, 0], torch.cat([kept, model.want[-1]]).short())


def test_tokens_that_are_taken_back_are_none() -> None:
    made = rings(100)
    model = Model(made)
    for batch, tokens in ((2, 4), (2, 1), (2, 3)):
        made.begin(batch, tokens, batch, tokens)
        model.call(batch, tokens, batch, tokens)
    made.forget(2)
    assert made.take().calls == ((2, 4), (2, 1), (2, 1))
    made.begin(2, 4, 2, 4)
    model.call(2, 4, 2, 4)
    made.begin(2, 1, 2, 1)
    model.call(2, 1, 2, 1)
    made.forget(3)
    found = made.take()
    assert found.calls == ((2, 2),)
    assert torch.equal(found.ids_TLK[:, 0, 0], model.want[-2].view(2, 4)[:, :2].flatten().short())


@pytest.mark.parametrize(("may_grow", "room"), [(False, 12), (True, 27)])
def test_a_call_that_does_not_fit_is_refused(may_grow: bool, room: int) -> None:
    made = rings(room - 1)
    says = f"2 x 6 tokens does not fit into rings of {room - 1}; record with tokens={room} or more"
    with pytest.raises(ValueError, match=says):
        made.begin(2, 6, 2, 6, may_grow=may_grow)
    made.begin(2, 5, 2, 5, may_grow=may_grow)
    assert made.take().calls == ((2, 5),)
    fits = rings(room)
    fits.begin(2, 6, 2, 6, may_grow=may_grow)
    assert fits.take().calls == ((2, 6),)


def test_nothing_recorded_is_a_record_of_no_tokens() -> None:
    found = rings(4, weights=True).take()
    assert (found.tokens, found.calls, found.layers) == (0, (), LAYERS)
    assert found.weights_TLK is not None and found.weights_TLK.shape == (0, 2, K)


@pytest.mark.parametrize("tokens", [3, 5], ids=["fewer", "more"])
def test_a_layer_that_sees_other_tokens_is_told(tokens: int) -> None:
    made = rings(16)
    for _ in range(5):
        made.begin(1, 4, 1, 4)
        Model(made).call(1, 4, 1, 4)
    made.take()
    made.begin(1, 4, 1, 4)
    for layer, T in enumerate((4, tokens)):
        write_rows(made.ids[layer], made.at, torch.ones(T, K, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="b saw other tokens than the calls"):
        made.take()


def test_a_layer_that_a_call_leaves_out_has_no_experts() -> None:
    made = rings(16)
    for layers in ((0, 1), (0,)):
        made.begin(1, 4, 1, 4)
        for layer in layers:
            write_rows(made.ids[layer], made.at, torch.ones(4, K, dtype=torch.int64))
    found = made.take()
    assert (found.ids_TLK[:4] == 1).all()
    assert (found.ids_TLK[4:, 0] == 1).all() and (found.ids_TLK[4:, 1] == -1).all()
