"""Work, counted: what it takes on any machine, where seconds would be those of this one."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Calls:
    """How many functions were called inside, of Python and of C."""

    def __init__(self) -> None:
        self.count = 0

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        self.count += event in ("call", "c_call")

    def __enter__(self) -> Calls:
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)


class Values(TorchDispatchMode):
    """How many ops ran inside, and how many values they gave."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops += 1
        self.count += sum(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result
