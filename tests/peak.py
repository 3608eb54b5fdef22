"""Memory that tensors hold, counted."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time; a file's own pages not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs))
                 if isinstance(t, Tensor)}  # fmt: skip
        for t in tree_leaves(result):
            storage = t.untyped_storage() if isinstance(t, Tensor) and not t.is_meta else None
            if storage is None or storage._cdata in given | self.seen:
                continue
            size = storage.nbytes()
            self.seen.add(storage._cdata)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.freed, storage._cdata, size)
        return result

    def freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size
