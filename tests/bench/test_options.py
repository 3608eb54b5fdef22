"""Which options of `bench layer` go together, and what they are if they are left out."""

from __future__ import annotations

import pytest
import torch

from moe_ops.bench import __main__ as cli
from moe_ops.bench.rates import Rates
from moe_ops.testing import LAYERS


@pytest.fixture(params=[False, True], ids=["no_gpu", "gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return request.param


def test_a_gpu_measures_the_op_and_a_cpu_compiled_layers(gpu: bool) -> None:
    args = cli.parse(["layer"])
    assert (args.device, args.ours) == (("cuda", "moe") if gpu else ("cpu", "lifted"))
    assert args.tokens[-1] == (16384 if gpu else 512)
    assert args.against == ([] if gpu else ["grouped_mm", "batched_mm"])
    assert args.routing == (["uniform"] if gpu else None)


def test_ways_of_the_cpu_stay_on_the_cpu(gpu: bool) -> None:
    args = cli.parse(["layer", "--ours", "ops", "--part", "block"])
    assert (args.device, args.ours, args.part, args.repeats) == ("cpu", "ops", "block", 60)
    assert cli.parse(["op"]).device == ("cuda" if gpu else "cpu")


def test_options_of_the_op() -> None:
    words = "layer --ours moe --layer all --tokens 1,4 --routing uniform,zipf --rates 4.26,779"
    args = cli.parse([*words.split(), "--backend", "aten", "--against", "grouped_mm,aten"])
    assert args.layer == list(LAYERS)
    assert args.tokens == [1, 4]
    assert args.routing == ["uniform", "zipf"]
    assert args.rates == Rates(copy_tbs=4.26, matmul_tflops=779.0)
    assert (args.backend, args.against) == ("aten", ["grouped_mm", "aten"])
    assert args.seconds is None
    assert cli.parse(["layer", "--ours", "moe", "--seconds", "0.1"]).seconds == 0.1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--ours ops --routing zipf", "--routing is for --ours moe, but this is --ours ops"),
        ("--ours moe --part block", "--part is for --ours lifted or ops"),
        ("--ours lifted --device cuda", "--ours lifted is timed on the CPU; drop --device"),
        ("--ours ops --layer olmoe,qwen3_30b", "measures one layer; take --ours moe for several"),
        ("--ours moe --layer olmo", "'olmo' is no layer; there are qwen3_30b"),
        ("--ours moe --routing even", "'even' is no routing; there are uniform, zipf"),
        ("--ours moe --tokens 4,0", "'0' is no whole number from 1 on"),
        ("--ours moe --tokens few", "'few' is no whole number from 1 on"),
        ("--ours moe --rates 4", "are not COPY_TBS,MATMUL_TFLOPS"),
        ("--ours moe --seconds 0", "'0' is no number of seconds above 0"),
        ("--ours moe --seconds nan", "'nan' is no number of seconds above 0"),
        ("--ours ops --seconds 1", "--seconds is for --ours moe"),
    ],
)
def test_options_that_do_not_go_together(
    words: str, why: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["layer", *words.split()])
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("compile --layers 4,x", "'x' is no whole number from 1 on"),
        ("step --slots 0", "'0' is no whole number from 1 on"),
        ("step --layers 0", "'0' is no whole number from 1 on"),
        ("report none.json", "there is no file none.json"),
    ],
)
def test_options_that_cannot_be(words: str, why: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.parse(words.split())
    assert why in capsys.readouterr().err
