"""The processes in which Inductor compiles the Triton kernels of its graphs."""

from __future__ import annotations

from torch._inductor.async_compile import AsyncCompile


def start_workers() -> None:
    """Have the processes start meanwhile, as they take seconds to, and until they can compile
    Inductor compiles in the process that waits. Without processes this does nothing."""
    AsyncCompile.use_process_pool()
