"""Loads of all layers and ranks in one view: sampled, written, and evened out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ops.layer import (
    LoadRecorder,
    ModelLoads,
    MoELayer,
    Rebalancing,
    model_loads,
    rebalance_layers,
    resize_layer,
)
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.load_balance import rebalance
from tests.distributed.ranks import processes, results, threads

E, K, D = 6, 2, 16
EP: dict[str, Any] = {"expert_parallel": True}


def make(rank: int, world: str, kind: str, ranks: int, layers: int = 2) -> nn.ModuleList:
    """A model of layers that count, for ranks that are given tokens in one of three ways."""
    more: dict[str, Any] = {"tokens": "replicated"}
    config = ParallelConfig.of(tp=ranks, tp_rank=rank, **EP)
    if kind == "own":
        config = ParallelConfig.of(dp=ranks, dp_rank=rank, **EP)
        more = {"tokens": "own", "group": world, "max_num_tokens": 8}
    if kind == "shared":  # by all ranks, each of which sends a part
        more = {"tokens": "own", "group": world, "max_num_tokens": 8, "tp_group": world}
    if kind == "shards":
        config = ParallelConfig.of(tp=ranks, tp_rank=rank)
    torch.manual_seed(0)
    return nn.ModuleList(
        MoELayer(E, K, D, 12, parallel=config, balanced=True, redundant_experts=2, **more)
        for _ in range(layers)
    )


def given(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and logits that prefer the first experts."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, D, generator=g), torch.randn(tokens, E, generator=g) - torch.arange(
        E
    )


def of_ranks(rank: int, world: str, kind: str, tokens: tuple[int, ...]) -> Any:
    """What a rank sees of the model, and what it counted itself."""
    model = make(rank, world, kind, len(tokens))
    pairs = []
    for i, layer in enumerate(model):
        x, logits = given(tokens[rank], 10 * i + (rank if kind == "own" else 0))
        layer(x, logits)
        pairs.append(layer.route(x, logits)[1].flatten())
    return model_loads(model, world), pairs


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("own", (3, 0, 5)), ("own", (0, 0)), ("replicated", (4, 4)), ("shared", (5, 5)),
        ("shards", (4, 4)),
    ],
)  # fmt: skip
def test_each_token_counts_once(kind: str, tokens: tuple[int, ...]) -> None:
    found = results(len(tokens), of_ranks, kind, tokens)
    counted = range(len(tokens)) if kind == "own" else range(1)
    for seen, _ in found:
        assert isinstance(seen, ModelLoads) and seen.layers == ("0", "1")
        for i in range(2):
            ids = torch.cat([found[rank][1][i] for rank in counted])
            if kind != "own":
                assert all(torch.equal(ids, pairs[i]) for _, pairs in found)
            assert torch.equal(seen.physical_LP[i], torch.bincount(ids, minlength=E + 2))
            logical = torch.bincount(seen.experts_LP[i][ids], minlength=E)
            assert torch.equal(seen.logical_LE[i], logical)
        assert torch.equal(seen.physical_P, seen.physical_LP.sum(0))
        assert int(seen.logical_E.sum()) == 2 * K * sum(tokens[rank] for rank in counted)
        assert sum(seen.slots) == E + 2
        assert len(seen.slots) == (1 if kind == "shards" else len(tokens))
        assert torch.equal(seen.ranks_LN.sum(1), seen.logical_LE.sum(1))
        assert (seen.imbalance_L >= 1).all()


def test_fused_shared_experts_are_not_counted() -> None:
    layer = MoELayer(E, K, D, 12, balanced=True, shared_experts=1)
    layer(*given(5, 0))
    seen = model_loads({"mine": layer})
    assert seen.layers == ("mine",) and int(seen.physical_P.sum()) == 5 * K
    assert json.loads(json.dumps(seen.as_json()))["logical"] == seen.logical_LE.tolist()


def test_layers_made_for_inference_are_sampled_too() -> None:
    with torch.inference_mode():
        layer = MoELayer(E, K, D, 12, balanced=True)
        layer(*given(5, 0))
    recorder = LoadRecorder([layer], every=1)
    recorder.step()
    assert int(recorder.last.logical_E.sum()) == 5 * K and not layer.loads.any()


def recorded(rank: int, world: str, path: str, how: dict[str, Any], steps: int) -> Any:
    model = make(rank, world, "own", 2)
    recorder = LoadRecorder(model, world, path=path, **how)
    done, samples = [], []
    for step in range(steps):
        for i, layer in enumerate(model):
            layer(*given(3 + rank, 100 * step + 10 * i + rank))
        before = recorder.last
        done.append(recorder.step())
        if recorder.last is not before:
            samples.append(recorder.last)
            assert not any(bool(layer.loads.any()) for layer in model)
            assert not any(bool(layer.physical_loads.any()) for layer in model)
    return done, samples


def test_samples_hold_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    (done, samples), (_, others) = results(2, recorded, str(path), {"every": 2}, 5)
    assert done == [None] * 5 and len(samples) == 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["first_step"], one["last_step"]) for one in lines] == [(1, 2), (3, 4)]
    for line, mine, theirs in zip(lines, samples, others, strict=True):
        assert torch.equal(mine.physical_LP, theirs.physical_LP)
        assert line["logical"] == mine.logical_LE.tolist() and line["rebalanced"] is None
        assert sum(line["logical_of_all_layers"]) == 2 * 2 * 7 * K  # steps, layers, tokens
        assert sum(line["physical_of_all_layers"]) == sum(line["logical_of_all_layers"])
        assert line["imbalance"] == mine.imbalance_L.tolist()


def test_layers_are_rebalanced_after_the_interval_by_all_of_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    how = {"every": 2, "rebalancing": Rebalancing(interval=3)}
    (done, samples), (others, _) = results(2, recorded, str(path), how, 6)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["first_step"], one["last_step"]) for one in lines] == [
        (1, 2),
        (3, 3),
        (4, 4),
        (5, 6),
    ]
    assert [one is not None for one in done] == [False, False, True, False, False, True]
    window = samples[0].logical_LE + samples[1].logical_LE
    want = rebalance(window, samples[1].experts_LP, ranks=2)
    assert torch.equal(done[2].physical_to_logical, want.physical_to_logical)
    assert torch.equal(samples[2].experts_LP, want.physical_to_logical)
    assert lines[1]["rebalanced"]["moved"] == [len(moves.pairs) for moves in want.moves]
    assert lines[1]["rebalanced"]["before"] == want.before.tolist()
    for mine, theirs in zip(done, others, strict=True):
        assert mine is theirs is None or torch.equal(
            mine.physical_to_logical, theirs.physical_to_logical
        )


def test_layers_below_the_threshold_stay(tmp_path: Path) -> None:
    alone = {"every": 9, "rebalancing": Rebalancing(interval=2)}
    (first, _), _ = results(2, recorded, str(tmp_path / "a"), alone, 2)
    threshold = float(first[1].before.mean())  # between both layers
    how = {"every": 9, "rebalancing": Rebalancing(interval=2, threshold=threshold)}
    (done, samples), _ = results(2, recorded, str(tmp_path / "b"), how, 4)
    low = first[1].before < threshold
    assert low.tolist() in ([True, False], [False, True])
    for stays, moves, before, new in zip(
        low.tolist(), done[1].moves, samples[0].experts_LP, done[1].physical_to_logical, strict=True
    ):
        assert (not moves.pairs) == torch.equal(before, new) == stays
    assert torch.equal(done[1].after[low], done[1].before[low])


def other_every(rank: int, world: str) -> None:
    LoadRecorder(make(rank, world, "own", 2), world, every=1 + rank)


def no_folder(rank: int, world: str) -> None:
    LoadRecorder(make(rank, world, "own", 2), world, every=1, path="/nowhere/loads.jsonl")


def one_step_more(rank: int, world: str) -> None:
    recorder = LoadRecorder(make(rank, world, "own", 2), world, every=2)
    recorder._step = rank * 2
    recorder.step(), recorder.step()


def another_group(rank: int, world: str) -> None:
    pair = [dist.new_group([0]), dist.new_group([1])][rank]
    model_loads(make(rank, world, "own", 2), pair.group_name)


def test_ranks_that_record_otherwise_are_named() -> None:
    for error in threads(2, other_every):
        assert "LoadRecorder: the ranks differ in every (rank 0: 1, rank 1: 2)" in str(error)
    for error in threads(2, one_step_more):
        assert "LoadRecorder.step: the ranks differ in last_step (rank 0: 2, rank 1" in str(error)
    for error in threads(2, another_group):
        assert isinstance(error, ValueError) and "give the group of the ranks that" in str(error)


def after_a_resize(rank: int, world: str) -> None:
    layer = make(rank, world, "own", 2, 1)[0]
    recorder = LoadRecorder([layer], world, every=1)
    resize_layer(layer, *((ParallelConfig(), "") if rank else (None, "")), over=world)
    if rank == 1:  # and the other one is not asked
        with pytest.raises(ValueError, match="layer '0' is one rank, but group="):
            recorder.step()


def test_a_layer_of_another_group_needs_another_recorder() -> None:
    results(2, after_a_resize)


# What one of two ranks gives to a recorder, and what both say; the other one gives what is right.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "every": ({"every": 0}, "every=0 must be at least 1"),
    "path": ({"path": 3}, "path must be a path or None, got an int: 3"),
    "rebalancing": ({"rebalancing": 3}, "rebalancing must be a Rebalancing or None, got an int: 3"),
    "nodes": (
        {"rebalancing": Rebalancing(interval=2, nodes=3)}, "ranks=2 must be a multiple of nodes=3",
    ),
    "uncounted": ({"layers": [MoELayer(E, K, D, 12)]}, "layer '0' counts no loads; make it with"),
    "quotes": ({"path": "/nowhere/" + '"' * 900}, "path='/nowhere/\"\"\"\"\"\""),
}  # fmt: skip


def wrong_recorder(rank: int, world: str, wrong: dict[str, Any]) -> None:
    given = {"layers": make(rank, world, "own", 2), "every": 1} | (wrong if rank == 0 else {})
    LoadRecorder(group=world, **given)


@pytest.mark.parametrize(("wrong", "text"), REFUSED.values(), ids=REFUSED)
def test_what_one_rank_cannot_record_every_rank_refuses(wrong: dict[str, Any], text: str) -> None:
    first, second = threads(2, wrong_recorder, wrong)
    assert isinstance(first, (TypeError, ValueError, OSError)) and text in str(first)
    assert isinstance(second, ValueError)
    assert "moe_ops.LoadRecorder: rank 0 of" in str(second) and text in str(second)


def twice_or_too_low(rank: int, world: str, threshold: float) -> None:
    layers = [*make(rank, world, "own", 2)]
    layers = layers[:1] * 2 if threshold == 1 and rank == 1 else layers
    rebalance_layers(layers, world, threshold=threshold if rank == 1 else 1.0)


@pytest.mark.parametrize(
    ("threshold", "text"), [(1.0, "a layer is given twice"), (0.5, "threshold=0.5 is of the")]
)
def test_what_one_rank_cannot_rebalance_every_rank_refuses(threshold: float, text: str) -> None:
    first, second = threads(2, twice_or_too_low, threshold)
    assert isinstance(first, ValueError) and isinstance(second, ValueError)
    assert "moe_ops.rebalance_layers: rank 1 of" in str(first)
    assert text in str(first) and text in str(second)


def viewed(rank: int, world: str, wrong: str) -> None:
    model = make(rank, world, "own", 2)
    if rank == 0 and wrong == "uncounted":
        model = nn.ModuleList([MoELayer(E, K, D, 12)])
    if rank == 0 and wrong == "another_group":
        model = nn.ModuleList([MoELayer(E, K, D, 12, balanced=True)])
    if rank == 0 and wrong == "no_memory":
        model = model.to("meta")
    model_loads(model, world)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("uncounted", "there is no MoELayer that counts loads"),
        ("another_group", "which this is 0; give the group of the ranks that share the layer"),
        ("no_memory", "layer '0' is on the meta device; give it memory first"),
    ],
)
def test_what_one_rank_cannot_view_every_rank_refuses(wrong: str, text: str) -> None:
    first, second = threads(2, viewed, wrong)
    assert isinstance(first, ValueError) and isinstance(second, ValueError)
    assert "moe_ops.model_loads: rank 0 of" in str(second)
    assert text in str(first) and text in str(second)


def shards_and_whole(rank: int, world: str) -> None:
    model_loads([make(rank, world, kind, 2)[0] for kind in ("own", "shards")], world)


def test_shards_and_whole_experts_are_viewed_apart() -> None:
    for error in threads(2, shards_and_whole):
        assert isinstance(error, ValueError) and "shards or whole experts; give" in str(error)


def told(rank: int, world: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match="there is no folder '/nowhere'"):
        no_folder(rank, world)


def test_every_rank_raises_where_one_cannot_write() -> None:
    results(2, told)


def test_what_cannot_be_recorded_says_why(tmp_path: Path) -> None:
    layer, plain = MoELayer(E, K, D, 12, balanced=True), MoELayer(E, K, D, 12)
    with pytest.raises(ValueError, match="layer '1' counts no loads; make it with balanced=True"):
        model_loads([layer, plain])
    with pytest.raises(ValueError, match="no MoELayer that counts loads; make some with balanced"):
        model_loads(nn.Sequential(plain))
    with pytest.raises(TypeError, match="layer 'a' must be a MoELayer, got"):
        model_loads({"a": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match="as many experts each, logical and physical ones"):
        model_loads([layer, MoELayer(E + 1, K, D, 12, balanced=True)])
    with pytest.raises(ValueError, match="a layer is given twice, and would count twice"):
        model_loads([layer, layer])
    with pytest.raises(ValueError, match="ranks=1 must be a multiple of nodes=2"):
        LoadRecorder([layer], every=1, rebalancing=Rebalancing(interval=2, nodes=2))
    with pytest.raises(IsADirectoryError, match="is a folder; give a file in it"):
        LoadRecorder([layer], every=1, path=tmp_path)
    with pytest.raises(ValueError, match=r"threshold=0\.9 is of the highest load"):
        Rebalancing(interval=1, threshold=0.9)
    with pytest.raises(ValueError, match="threshold=nan is of the highest load"):
        Rebalancing(interval=1, threshold=float("nan"))
    with pytest.raises(ValueError, match="interval=0 must be at least 1"):
        Rebalancing(interval=0)
    with pytest.raises(TypeError, match="interval must be an int, got"):
        Rebalancing(interval=1.5)


def in_processes(rank: int, world: str, path: str) -> None:
    recorded(rank, world, path, {"every": 2, "rebalancing": Rebalancing(interval=2)}, 4)


@pytest.mark.every
def test_two_processes_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    processes(2, tmp_path, in_processes, str(path))
    assert [json.loads(line)["last_step"] for line in path.read_text().splitlines()] == [2, 4]
