"""`python -m moe_ops invariant`: which parts of a model differ in company, and what it says."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import Tensor, nn

from moe_ops.__main__ import main
from moe_ops.invariant.command import place_of, text
from moe_ops.invariant.compare import (
    OTHERS,
    Call,
    Generated,
    Part,
    difference,
    reason_of,
    same_bits,
)

PARTS = [
    Part(name="model.layers.0.norm", kind="Norm", why=""),
    Part(name="model.layers.1.norm", kind="Norm", why="its sums vary"),
    Part(name="head", kind="Linear", why=""),
]


def test_a_report_has_a_line_for_each_place() -> None:
    made = Generated(steps=4, tokens=4, logits=1)
    given = argparse.Namespace(model="some", tokens=9, batch=3)
    assert text(given, PARTS, made).splitlines() == [
        "some: a prompt of 9 tokens alone and beside 2 more",
        "",
        "part                 class   same bits",
        "model.layers.*.norm  Norm    1 of 2     its sums vary",
        "head                 Linear  1 of 1",
        "",
        "generate: 4 of 4 tokens are the same, and the logits of 1 steps have the same bits",
    ]
    refused = text(given, PARTS, Generated(steps=4, why="it cannot"))
    assert refused.splitlines()[-1] == "generate: it cannot"
    assert place_of("a.12.b.3") == "a.*.b.*"


def test_the_first_sequence_of_a_call() -> None:
    """What counts sequences is cut, in tuples, too; what they share stays."""
    x, shared = torch.randn(3, 5), torch.randn(1, 5)
    own = Call((x, (x, shared)), {"at": x, "flag": True}).alone(3)
    assert own.args[0].shape == own.args[1][0].shape == own.kwargs["at"].shape == (1, 5)
    assert own.args[1][1] is shared and own.kwargs["flag"] is True


def test_bits_are_compared() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone()) and not same_bits(torch.tensor([0.0]), -torch.zeros(1))
    assert not same_bits(nan, nan.double())


def test_the_innermost_cause_is_told() -> None:
    inner = ValueError("no backend runs it:\n  cpu: too narrow")
    outer = RuntimeError("torch failed")
    outer.__cause__ = inner
    assert reason_of(outer) == "no backend runs it:; cpu: too narrow"
    assert reason_of(RuntimeError("")) == "RuntimeError"


class FromMean(nn.Module):
    """Differences from the mean of a batch, which every row changes."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class OfRows(nn.Module):
    """What each row has of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(33, 17)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sigmoid()


@pytest.mark.slow
def test_what_differs_by_itself() -> None:
    call = Call((torch.randn(4, 33),), {})
    assert difference(FromMean(), call, 4) == OTHERS
    assert difference(OfRows(), call, 4) == ""


def test_a_prompt_needs_company(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["invariant", "qwen3_moe", "--tiny", "--batch", "1"])
    assert left.value.code == 2
    assert "--batch=1 leaves the prompt alone both times; give 2" in capsys.readouterr().err


@pytest.mark.every
def test_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["invariant", "qwen3_moe", "--tiny", "--layers", "1", "--dtype", "float32"]
    failed = main([*words, "--device", "cpu", "--generate", "2"])
    lines = capsys.readouterr().out.splitlines()
    ours = [line for line in lines if "SparseMoeBlock" in line or line.startswith("lm_head")]
    assert len(ours) == 2 and all(line.endswith("1 of 1") for line in ours)
    differs = any("0 of 1" in line for line in lines) or "of 2 steps" not in lines[-1]
    assert failed == differs
