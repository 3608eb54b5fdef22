"""Which options of `bench layer` go together, and what they are if they are left out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moe_ops.bench import __main__ as cli
from moe_ops.bench import formats
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
        ("--ours ops --format mxfp4", "--format is for --ours moe"),
        ("--ours moe --format int3:1x32", "has the unknown element 'int3'"),
        ("--ours moe --format mxfp4+", "names no inputs after the +"),
        ("--ours moe --format mxfp4+mxfp4", "have 4 bits, for which there is neither a rate"),
        ("--ours moe --format int8:row+float8_e4m3fn:row", "no scheme has int8:row weights"),
        (
            "--ours moe --format float8_e4m3fn:64x64+float8_e4m3fn:1x128",
            "inputs in groups of 128 columns go with weights in blocks of as many columns",
        ),
        (
            "--ours moe --format mxfp4 --against aten,batched_mm",
            "--against batched_mm has weights in 16 bits alone; drop it",
        ),
        (
            "--ours moe --layer qwen3_30b,gpt_oss_20b --format int4:1x128:bfloat16",
            "w13 of gpt_oss_20b has 2880 columns, which do not fill int4:1x128:bfloat16 groups of "
            "128; choose groups of 32 or 64, or measure other layers",
        ),
        (
            "--ours moe --device cpu --format int8:row+int8:row",
            "in 8 bits cannot be measured on cpu; give it: --rates COPY_TBS,MATMUL_TFLOPS,MATMUL8",
        ),
        (
            "--ours moe --format int8:row+int8:row --rates 4.26,780",
            "--rates has no rate of products in 8 bits, which this format needs; give --rates COPY",
        ),
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
    err = capsys.readouterr().err
    assert why in " ".join(err.split())


@pytest.mark.parametrize(
    "format",
    [
        "int4:1x64:bfloat16", "mxfp4", "float8_e4m3fn:128x128",
        "float8_e4m3fn:128x128+float8_e4m3fn:1x128",
    ],
)  # fmt: skip
def test_formats_of_all_layers(format: str) -> None:
    """Float8 blocks may be cut short; the others divide 2880."""
    words = ["layer", "--ours", "moe", "--device", "cpu", "--layer", "all", "--format", format]
    args = cli.parse([*words, "--rates", "4.26,780,1430"])
    assert formats.spelled(args.format) == format
    assert args.rates.matmul8_tflops == 1430


def test_two_spellings_are_one_format() -> None:
    args = cli.parse(["layer", "--ours", "moe", "--format", "float4_e2m1:1x32:e8m0"])
    assert formats.spelled(args.format) == "mxfp4"


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


@pytest.mark.parametrize("words", ["layer --ours moe --device cuda", "counters", "tiles"])
def test_what_needs_a_gpu_says_so(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench", *words.split()])
    with pytest.raises(SystemExit):
        cli.main()
    assert "this needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.every
@pytest.mark.slow
def test_ranks_that_torchrun_did_not_start_are_told_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moe_ops.bench", "ep"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "start it by torchrun" in done.stderr
