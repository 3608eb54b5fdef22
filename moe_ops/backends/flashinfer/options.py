"""What a caller allows FlashInfer's backends, read each time one of them runs or is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from moe_ops.checks.options import MOST_SIZE, check_fields, check_int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferOptions:
    """Options of the backends of FlashInfer.

    b12x_prefill_threshold: calls of so many tokens or more go to CUTLASS, fewer to b12x; 0, the
    default, gives b12x all. In a plan this is two ranges, `31:flashinfer_b12x,:flashinfer_cutlass`
    for 32; where a tuned table has the layer, a plan goes by that. upstream_prefill: the wrapper of
    b12x decides instead, which FlashInfer must know how to; its own environment variable for the
    threshold then wins over ours.

    other_bits: sums over experts may be made by atomic additions, whose order, and so the last
    bits, change from call to call; quicker. max_tokens: buffers and wrappers are made for so many
    tokens at least, such as the largest graph or chunk of a prompt. autotune: a first call of each
    number of tokens (rounded up as FlashInfer does) measures its tactics, outside of
    captures; autotune_cache names the file that keeps them.

    Raises TypeError or ValueError for what an option cannot be.
    """

    b12x_prefill_threshold: int = 0
    upstream_prefill: bool = False
    other_bits: bool = False
    max_tokens: int = 0
    autotune: bool = False
    autotune_cache: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("b12x_prefill_threshold", "max_tokens"):
            check_int(name, getattr(self, name), least=0, most=MOST_SIZE)
        if self.upstream_prefill and not self.b12x_prefill_threshold:
            raise ValueError(
                "upstream_prefill says who decides by b12x_prefill_threshold, which is 0; give both"
            )


CURRENT: ContextVar[FlashInferOptions] = ContextVar(
    "moe_ops_flashinfer_options",
    default=FlashInferOptions(),  # noqa: B039  frozen
)


def current() -> FlashInferOptions:
    """The options of this call."""
    return CURRENT.get()


@contextmanager
def flashinfer_options(**options: Any) -> Iterator[FlashInferOptions]:
    """Set options of FlashInfer's backends inside the block; see `FlashInferOptions`.

        with moe_ops.flashinfer_options(b12x_prefill_threshold=32):
            out = layer(x)

    The inner of two nested blocks wins, whole. A plan is made with the options at compilation, and
    a CUDA graph keeps the backend of the size that was captured.
    """
    token = CURRENT.set(FlashInferOptions(**options))
    try:
        yield CURRENT.get()
    finally:
        CURRENT.reset(token)
