"""What tests on a GPU begin with: products of float32 in float32, and code that Dynamo kept."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """Products of float32 in float32, not in tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def fresh_dynamo() -> None:
    torch._dynamo.reset()
