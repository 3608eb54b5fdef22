"""The head of last tokens, which are a slice of all tokens' states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops.forward.regions import _of_rows
from moe_ops.testing import assert_close
from tests.forward.layered import MODEL


class Called(TorchDispatchMode):
    """Keeps the names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("B", [1, 3])
def test_the_head_of_last_tokens_is_one_product(B: int) -> None:
    head = nn.Linear(8, 5, bias=False).requires_grad_(False)  # or torch itself folds the rows
    x_BSD = torch.randn(B, 4, 8)
    last = x_BSD[:, -1:]
    with Called() as called:
        got = _of_rows(head)(last)
    assert [name for name in called.names if name in ("mm", "bmm", "copy_")] == ["mm"]
    assert_close(got, head(last), MODEL)
    assert got.shape == (B, 1, 5)
