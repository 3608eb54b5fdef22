"""`bench ep`: layers over the ranks of a group, collectives alone, and ranks that are simulated."""

from __future__ import annotations

import gc
import weakref
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_ops.bench import __main__ as cli
from moe_ops.bench import ep, ep_peers, ep_simulated
from moe_ops.testing import LAYERS, Case
from tests.distributed.ranks import processes

TINY = Case(name="tiny", T=1, E=8, K=2, D=64, I=32)


def measured(rank: int, group: str) -> None:
    LAYERS["tiny"] = TINY
    ep.REPEATS["cpu"], ep.PROBED = 2, (64, 256)
    device = torch.device("cpu")
    modes = {
        part: [m for m in every if m not in ("push", "vdev2d")] for part, every in ep.PARTS.items()
    }
    found = []
    for part in ep.PARTS:
        cells = [cell_of(T, part=part) for T in (1, 5)]
        spent = ep.measure(cells, None, device)
        assert [(s.how, s.size) for s in spent] == [(m, T) for T in (1, 5) for m in modes[part]]
        found += spent
    probed = ep.probe(device)
    assert [s.size for s in probed] == [64] * 3 + [256] * 3
    assert all(0 < s.low_us <= s.us <= s.high_us and not s.captured for s in (*found, *probed))
    assert len(ep.table([*found, *probed]).splitlines()) == 1 + len(found) + len(probed)
    auto = {s.taken for s in found if s.how == "auto"}
    assert auto == {"gather"} and {s.taken for s in found if s.how != "auto"} == {""}
    assert "auto (gather)" in ep.table(found)
    for x_format in ("", "int8:row"):
        torch.manual_seed(rank)
        cell = cell_of(5, x_format=x_format)
        held = ep.weights_of(cell, device)
        want, *others = (ep.layer_call(cell, mode, held)() for mode in modes["layer"])
        for other in others:
            torch.testing.assert_close(other, want, rtol=2e-2, atol=2e-2)
    cell = cell_of(5, part="transport")
    want, other = (ep.transport(cell, mode, device)() for mode in ("gather", "exchange"))
    assert torch.equal(other, want)
    own = ep.own_of(cell, device)[0]
    assert torch.equal(ep.transport(cell, "pairs", device)(), own.sorted_RD)
    coded = cell_of(5, part="transport", x_format="int8:row", routing="zipf")
    spent = ep.measure([coded], ["gather", "exchange"], device)
    assert [s.what for s in spent] == ["tiny transport zipf int8:row"] * 2


def cell_of(T: int, **more: Any) -> ep.Cell:
    return ep.Cell(case=TINY, T=T, **more)


def popular(rank: int, group: str) -> None:
    """Of every rank's tokens most choose the same experts, where these are popular."""
    case = Case(name="popular", T=1, E=64, K=2, D=64, I=32)
    chosen = {}
    for routing in ("uniform", "zipf"):
        cell = ep.Cell(case=case, T=512, routing=routing)
        loads_E = torch.bincount(
            ep.own_of(cell, torch.device("cpu"))[0].ids_TK.flatten(), minlength=64
        )
        chosen[routing] = loads_E.argmax(), loads_E.max() / loads_E.sum()
    assert chosen["uniform"][1] < 0.05 < 0.15 < chosen["zipf"][1]
    first = torch.randperm(64, generator=torch.Generator().manual_seed(0)).argmin()
    assert chosen["zipf"][0] == first, "the same one on every rank"


def with_one_that_fails(rank: int, group: str) -> None:
    """A contender that cannot run, on one rank or on all, says so, and the others are measured."""
    LAYERS["tiny"] = TINY
    ep.REPEATS["cpu"] = 2
    device, said = torch.device("cpu"), StringIO()
    modes = ["packed", "vdev2d", "pairs"]

    def broken(own: ep.Own) -> Any:
        if rank == 1:
            raise ValueError("no\nmore")
        return ep_peers.packed(own)

    with patch.dict(ep_peers.PEERS, packed=broken), redirect_stdout(said):
        spent = ep.measure([cell_of(3, part="transport")], modes, device)
    assert [s.how for s in spent] == ["pairs"]
    assert said.getvalue().splitlines() == ([] if rank else [
        "tiny transport by packed of 3 tokens: left out: another rank could not",
        "tiny transport by vdev2d of 3 tokens: left out: RuntimeError: needs CUDA, got cpu",
    ])  # fmt: skip


def test_a_contender_that_fails_stops_no_other(tmp_path: Path) -> None:
    processes(2, tmp_path, with_one_that_fails)


def test_two_processes_time_every_mode(tmp_path: Path) -> None:
    processes(2, tmp_path, measured)


def test_popular_experts_are_those_of_every_rank(tmp_path: Path) -> None:
    processes(2, tmp_path, popular)


def test_simulated_rows_are_those_of_even_routing() -> None:
    case = Case(name="even", T=1, E=64, K=4, D=64, I=32)
    (even,) = ep_simulated.simulate(case, [8], [0.0], [0], 512)
    skewed, balanced = ep_simulated.simulate(case, [8], [1.0], [0, 16], 512)
    # Of 7 others a token misses one if none of its 4 of 64 experts is among 8: C(56, 4) / C(64, 4).
    assert even.mean_rows == pytest.approx(7 * (1 - 0.5779), rel=0.02)
    assert even.gather_us == skewed.gather_us, "gathering sends all to all"
    assert skewed.most_rows > 1.2 * even.most_rows
    assert balanced.most_pairs < skewed.most_pairs
    assert len(ep_simulated.table([even, skewed]).splitlines()) == 3
    assert even.push_us is not None and skewed.push_us is not None
    assert even.push_us < min(skewed.push_us, even.gather_us)
    (apart,) = ep_simulated.simulate(case, [16], [0.0], [0], 8)
    assert apart.push_us is None and ep_simulated.table([apart]).splitlines()[1].endswith(" -")


def test_options_of_ep() -> None:
    words = ("ep", "--simulate", "--ranks", "8,64", "--zipf", "0", "1", "--tokens", "4")
    args = cli.parse(words)
    assert (args.simulate, args.ranks, args.zipf, args.tokens) == (True, [8, 64], [0.0, 1.0], [4])
    assert (cli.parse(["ep"]).modes, cli.parse(["ep"]).part) == (None, "layer")
    chosen = cli.parse(["ep", "--part", "transport", "--modes", "push", "packed"])
    assert (chosen.part, chosen.modes) == ("transport", ["push", "packed"])
    assert cli.parse(["ep", "--x-format", "int8:row"]).x_format == "int8:row"
    both = cli.parse(["ep", "--routing", "uniform,zipf", "--tokens", "1,8"])
    cells = [(c.case.name, c.routing, c.T) for c in cli._cells(both)]
    assert cells == [("qwen3_30b", r, T) for r in ("uniform", "zipf") for T in (1, 8)]


def test_modes_of_another_part_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["ep", "--part", "layer", "--modes", "packed"])
    assert "has the modes gather, exchange, push, auto, unpacked, batched, got packed" in (
        capsys.readouterr().err
    )


def test_ways_that_share_memory_otherwise_want_runs_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["ep", "--part", "transport", "--modes", "push", "vdev2d"])
    assert "measure vdev2d in a run of its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["--part shared", "--probe", "--part transport --modes gather packed"]
)
def test_what_sends_floats_takes_no_format(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["ep", *words.split(), "--x-format", "int8:row"])
    said = words.replace("--part transport ", "").replace("gather ", "")
    assert f"that send codes, not with {said}" in capsys.readouterr().err


def test_what_a_graph_reads_stays_while_others_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows addresses alone: its inputs belonged to nobody, and were written over."""
    monkeypatch.setattr(ep, "_captured", lambda run, rounds: lambda: None)
    x = torch.zeros(3)
    read = weakref.ref(x)
    timed = ep._graph(partial(x.add, 1), 2, torch.device("cuda"))
    del x
    gc.collect()
    assert read() is not None and timed.calls == 2
    del timed
    gc.collect()
    assert read() is None


@pytest.mark.parametrize(("experts", "shared"), [(4, 1), (16, 1), (64, 4), (48, 3), (17, 17)])
def test_experts_share_splits_where_there_are_too_many(experts: int, shared: int) -> None:
    assert ep_peers.chunk_of(experts) == shared
