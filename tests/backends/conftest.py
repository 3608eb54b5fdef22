"""What tests of kernels for the CPU share: instructions that they are confined to, and threads."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from moe_ops.kernels.cpu import quantized as kernels


@pytest.fixture(autouse=True)
def confined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Confine kernels of codes to the instructions that a test names."""
    made = kernels.Kind
    named = getattr(request.node, "callspec", None)
    instructions = named.params.get("instructions", "") if named else ""
    with_these = partial(made, instructions=instructions)
    monkeypatch.setattr(kernels, "Kind", with_these)


@pytest.fixture
def threads() -> Iterator[None]:
    """Let a test set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
