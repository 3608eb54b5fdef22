"""Where Dynamo's limit of recompilations is reached, one warning of ours says what that means."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.testing import Tol, assert_close
from tests.passes.blocks import Block, D
from tests.passes.explain.test_explain import Layer
from tests.recompiling import few_graphs

pytestmark = pytest.mark.slow  # compiles many graphs

LIMIT = 3
TOL = Tol(1e-5, "float32 sums in another order")


class Scaled(nn.Module):
    """Has another graph for every factor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(Block())

    def forward(self, x: Tensor, factor: str) -> Tensor:
        return self.layer(x) * len(factor)


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.name == "moe_ops" and r.levelno == logging.WARNING]
    return [r.getMessage() for r in records]


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    with few_graphs(LIMIT):
        yield


def test_the_limit_is_told_of_once_and_results_stay_right(caplog) -> None:
    model, x = Scaled(), torch.randn(5, D)
    fast = moe_ops.compile(model, dynamic=False)
    for n in range(1, LIMIT + 3):
        with torch.inference_mode():
            assert_close(fast(x, "f" * n), model(x, "f" * n), TOL)
        assert len(ours(caplog)) == (n > LIMIT)
    (text,) = ours(caplog)
    assert f"{LIMIT} times" in text and "recompile_limit" in text and "uncompiled" in text
    assert "factor" in text  # what varied


def test_another_s_limit_is_not_ours_to_tell_of(caplog) -> None:
    moe_ops.compile(Scaled())
    function = torch.compile(lambda x, factor: x * len(factor), backend="eager", dynamic=False)
    for n in range(1, LIMIT + 3):
        function(torch.ones(2), "f" * n)
    assert not ours(caplog)
