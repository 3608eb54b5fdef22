"""The example of training: losses fall, and are those of transformers' own code."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from moe_ops.testing import F32, TOL, assert_close
from tests.examples.loaded import load
from tests.hf.test_quantize import decoded, experts_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train.py"
TINY = ("--model", "tiny", "--steps", "6", "--batch", "4", "--length", "16")
CPU = torch.device("cpu")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return load(monkeypatch, "train.py", "train_example")


def parsed(example: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    return example.parse()


WAYS: dict[str, tuple[str, ...]] = {
    "whole": (), "lora": ("--lora",), "experts": ("--lora", "--experts"),
}  # fmt: skip


@pytest.mark.parametrize("by", ["trainer", "loop"])
@pytest.mark.parametrize("way", WAYS)
def test_losses_fall_and_are_those_of_stock(
    example, monkeypatch: pytest.MonkeyPatch, way: str, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("accelerate", *(["peft"] if WAYS[way] else [])):
        pytest.importorskip(package)
    if by == "loop":  # where there is no accelerate
        monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    args = parsed(example, monkeypatch, *TINY, *WAYS[way])
    rows_BS = example.tokens_of(args)
    ours, stock = (example.run(n, rows_BS, args, CPU) for n in (example.OURS, example.STOCK))
    how = "Trainer" if by == "trainer" else "a loop"
    assert f"moe_ops: 6 steps by {how}" in capsys.readouterr().err
    assert len(ours.losses) == 6 and ours.losses[-1] < ours.losses[0]
    assert_close(torch.tensor(ours.losses), torch.tensor(stock.losses), TOL["model", F32])
    assert ours.step_s > 0 and ours.tokens_per_s == 64 / ours.step_s and ours.peak > 0


def test_adapters_train_on_experts_that_stay_codes(
    example, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    models: list[Any] = []
    with_adapters = example.with_adapters

    def noted(model: Any) -> Any:
        models.append((model, {n: t.clone() for n, t in codes(model)}))
        return with_adapters(model)

    monkeypatch.setattr(example, "with_adapters", noted)
    args = parsed(example, monkeypatch, *TINY, "--qlora", "--model", "small")
    found = example.run(example.OURS, example.tokens_of(args), args, CPU)
    assert found.losses[-1] < found.losses[0]
    ((model, before),) = models
    after = dict(codes(model))
    assert before and before.keys() == after.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())
    adapters = [p for n, p in model.named_parameters() if p.requires_grad]
    assert adapters and all(float(p.detach().abs().max()) > 0 for p in adapters)
    # As stock trains on the weights that the codes stand for.
    torch.manual_seed(0)
    floats = example.AutoModelForCausalLM.from_config(example.small(None))
    with torch.no_grad():
        for coded, own in zip(experts_of(model), experts_of(floats), strict=True):
            for projection in ("gate_up_proj", "down_proj"):
                getattr(own, projection).copy_(decoded(coded, projection))
    want, _ = example.trainer(with_adapters(floats), example.tokens_of(args), args)
    assert_close(torch.tensor(found.losses), torch.tensor(want), TOL["model", F32])


def test_adapters_of_codes_train(example, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    adapted: list[Any] = []
    adapt = example.adapt_experts

    def noted(model: Any, in_codes: bool) -> None:
        adapt(model, in_codes)
        adapted.append([p for n, p in model.named_parameters() if ".experts." in n])

    monkeypatch.setattr(example, "adapt_experts", noted)
    args = parsed(example, monkeypatch, *TINY, "--qlora", "--experts", "--model", "small")
    found = example.run(example.OURS, example.tokens_of(args), args, CPU)
    assert found.losses[-1] < found.losses[0]
    trained = [p for p in adapted[0] if p.requires_grad]
    assert trained and all(float(p.detach().abs().max()) > 0 for p in trained)


def test_experts_that_no_format_fits_are_told(example, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(example, monkeypatch, *TINY, "--qlora")
    with pytest.raises(SystemExit, match=r"--model tiny is not quantised: .* multiple of 64"):
        example.run(example.OURS, example.tokens_of(args), args, CPU)


def codes(model: Any) -> list[tuple[str, torch.Tensor]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(n, t) for n, t in tensors if ".experts." in n and not t.is_floating_point()]


def test_the_script_prints_a_table_and_draws_both_losses(
    example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    drawn: list[Any] = []
    monkeypatch.setattr(example, "pyplot", lambda: None)
    monkeypatch.setattr(example, "draw", lambda *given: drawn.append(given))
    words = (*TINY, "--stock", "--plot", str(tmp_path / "loss.png"))
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["experts", "moe_ops", "stock"]
    ((runs, title, path),) = drawn
    assert [one.name for one in runs] == ["moe_ops", "stock"]
    assert title == "tiny, float32, 4 x 16 tokens a step" and path == tmp_path / "loss.png"


def run_of(example: Any, name: str, losses: list[float], step_s: float) -> Any:
    return example.Run(
        name=name, losses=losses, step_s=step_s, tokens_per_s=64 / step_s, peak=12_340_000
    )


def test_table_text(example) -> None:
    runs = [
        run_of(example, "moe_ops", [5.5, 2.0, 1.25], 0.1),
        run_of(example, "stock", [5.5, 1.26], 0.2),
    ]
    assert_expected_inline(
        example.table(runs),
        """\
experts  step ms  tokens/s  first loss  last loss  peak MB
moe_ops    100.0       640      5.5000     1.2500     12.3
stock      200.0       320      5.5000     1.2600     12.3""",
    )


def test_equal_curves_are_both_seen(example, tmp_path: Path) -> None:
    """A thin line of one colour lies on a wide one of another."""
    pytest.importorskip("matplotlib")
    from matplotlib import image

    path, colours = tmp_path / "loss.png", []
    losses = [5.0, 3.0, 2.0]
    runs = [run_of(example, name, losses, 0.1) for name in ("moe_ops", "stock")]
    for shown in (runs, runs[:1], runs[1:]):
        example.draw(shown, "title", path)
        pixels = (image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
        colours.append({tuple(p) for p in pixels.tolist()})
    both, ours, stock = colours
    assert (0x00, 0x72, 0xB2) in both & ours and (0x00, 0x72, 0xB2) not in stock
    orange = {(r, g, b) for r, g, b in both if r > 220 and 150 < g < 220 and b < 130}
    assert orange & stock and not orange & ours


def test_rows_of_a_text_are_pieces_of_it(
    example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)))
    args = parsed(example, monkeypatch, *TINY, "--text", str(file))
    rows_BS = example.tokens_of(args)
    assert rows_BS.shape == (24, 16)
    assert torch.equal(rows_BS, rows_BS[:, :1] + torch.arange(16))
    assert len(rows_BS[:, 0].unique()) > 1
    file.write_bytes(b"short")
    with pytest.raises(SystemExit, match="has 5 bytes, fewer than --length 16"):
        example.tokens_of(args)


def test_four_bytes_may_follow_each_in_a_random_text(
    example, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_BS = example.tokens_of(parsed(example, monkeypatch, "--steps", "40"))
    followers: dict[int, set[int]] = {}
    for row in rows_BS.tolist():
        for byte, following in itertools.pairwise(row):
            followers.setdefault(byte, set()).add(following)
    assert max(len(found) for found in followers.values()) == 4
    assert len(followers) > 32


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--steps 2", "--steps 2 leaves none to time; the first 2 are warm-up"),
        ("--fsdp --lora", "--fsdp shards models that train whole; drop it, or the adapters"),
        ("--experts", "--experts goes with --lora or --qlora; without them experts train whole"),
        ("--lora --qlora", "argument --qlora: not allowed with argument --lora"),
    ],
)
def test_options_that_do_not_go_together(
    example, words: str, why: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        parsed(example, monkeypatch, *words.split())
    assert why in " ".join(capsys.readouterr().err.split())


def test_ranks_that_torchrun_did_not_start_are_told_of_it(
    example, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    args = parsed(example, monkeypatch, "--fsdp")
    with pytest.raises(SystemExit, match=r"start it by torchrun .* train\.py --fsdp"):
        example.begin(args)


# That FSDP2 gives the gradients of one process: tests/distributed/test_training.py.
@pytest.mark.slow
@pytest.mark.every
def test_two_processes_train_a_sharded_model_as_one_does(
    example, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launch, str(EXAMPLE), "--fsdp", *TINY],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = re.findall(r"^moe_ops .*$", done.stdout, re.MULTILINE)
    args = parsed(example, monkeypatch, *TINY)
    monkeypatch.setattr(example.importlib.util, "find_spec", lambda name: None)
    alone = example.run(example.OURS, example.tokens_of(args), args, CPU)
    got = torch.tensor([float(word) for word in line.split()[3:5]])
    want = torch.tensor([alone.losses[0], alone.losses[-1]])
    assert_close(got, want, TOL["model", F32], "the first and the last loss")
