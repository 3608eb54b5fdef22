"""`bench ep`: layers over the ranks of a group, collectives alone, and ranks that are simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ops.bench import __main__ as cli
from moe_ops.bench import ep, ep_simulated
from moe_ops.testing import LAYERS, Case
from tests.distributed.ranks import processes

TINY = Case(name="tiny", T=1, E=8, K=2, D=64, I=32)


def measured(rank: int, group: str) -> None:
    LAYERS["tiny"] = TINY
    ep.REPEATS["cpu"], ep.PROBED = 2, (64, 256)
    device = torch.device("cpu")
    modes = {part: [m for m in every if m != "push"] for part, every in ep.PARTS.items()}
    found = []
    for part in ep.PARTS:
        spent = ep.measure(["tiny"], [1, 5], None, device, part)
        assert [(s.how, s.size) for s in spent] == [(m, T) for T in (1, 5) for m in modes[part]]
        found += spent
    probed = ep.probe(device)
    assert [s.size for s in probed] == [64] * 3 + [256] * 3
    assert all(0 < s.low_us <= s.us <= s.high_us and not s.captured for s in (*found, *probed))
    assert len(ep.table([*found, *probed]).splitlines()) == 1 + len(found) + len(probed)
    auto = {s.taken for s in found if s.how == "auto"}
    assert auto == {"gather"} and {s.taken for s in found if s.how != "auto"} == {""}
    assert "auto (gather)" in ep.table(found)
    want, *others = (ep._layer(TINY, 5, mode, WEIGHTS)[0]() for mode in modes["layer"])
    for other in others:
        torch.testing.assert_close(other, want, rtol=2e-2, atol=2e-2)
    want, other = (ep._transport(TINY, 5, mode, device)() for mode in ("gather", "exchange"))
    assert torch.equal(other, want)


WEIGHTS = (torch.full((4, 64, 64), 0.02).bfloat16(), torch.full((4, 64, 32), 0.02).bfloat16())


def test_two_processes_time_every_mode(tmp_path: Path) -> None:
    processes(2, tmp_path, measured)


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


def test_options_of_ep() -> None:
    words = ("ep", "--simulate", "--ranks", "8,64", "--zipf", "0", "1", "--tokens", "4")
    args = cli.parse(words)
    assert (args.simulate, args.ranks, args.zipf, args.tokens) == (True, [8, 64], [0.0, 1.0], [4])
    assert (cli.parse(["ep"]).modes, cli.parse(["ep"]).part) == (None, "layer")
    chosen = cli.parse(["ep", "--part", "transport", "--modes", "push", "packed"])
    assert (chosen.part, chosen.modes) == ("transport", ["push", "packed"])


def test_modes_of_another_part_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["ep", "--part", "layer", "--modes", "packed"])
    assert "--part layer has the modes gather, exchange, push, auto, unpacked, got packed" in (
        capsys.readouterr().err
    )
