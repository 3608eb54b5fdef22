"""One line where Triton compiles kernels of ours, which takes seconds the first time."""

from __future__ import annotations

import logging
import threading
from typing import Any

from triton import knobs

PACKAGE = __name__.partition(".")[0]

log = logging.getLogger(PACKAGE)


def tell_of_first_compilation() -> None:
    """From now on say, once, that kernels are compiled, how long the first took, and where they are
    kept. Whoever listens to Triton already keeps listening."""
    before = knobs.compilation.listener
    told = threading.Lock()  # held once it was: threads compile at the same time

    def listen(*, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **more)
        module = getattr(getattr(src, "fn", None), "__module__", None) or ""
        ours = module.startswith(f"{PACKAGE}.")
        if not cache_hit and ours and told.acquire(blocking=False):
            log.info(
                "Triton compiles kernels on first use: %s took %.1f s, and more may follow; kept "
                "in %s", src.fn.__name__, times.total / 1e6, knobs.cache.dir,
            )  # fmt: skip

    knobs.compilation.listener = listen
