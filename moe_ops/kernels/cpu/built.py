"""C++ compiled on first use, which takes seconds and is said, and kept for later processes."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence

log = logging.getLogger("moe_ops")


def built(source: str, what: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of a C++ source, compiled with Inductor's compiler unless its disk cache has it.

    Raises what Inductor raises where nothing can be compiled.
    """
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    def tell(_: Callable[[], None]) -> None:
        """Called if there is something to compile, before the caller does so."""
        log.info(
            "compiling the CPU kernels%s, which takes seconds, the first time; kept in %s",
            *(what, cache_dir()),
        )

    library: ctypes.CDLL = CppCodeCache.load(source, submit_fn=tell, extra_flags=tuple(flags))
    return library
