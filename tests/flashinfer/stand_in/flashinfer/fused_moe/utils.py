"""Numbers of tokens for which tactics are measured."""

from __future__ import annotations

from flashinfer.signed import signed


@signed("map_to_hybrid_bucket")
def map_to_hybrid_bucket(x: int, max_num_tokens: int) -> int:
    """The least of them that is no less: powers of two to 256, then multiples of 256 to 2048, of
    512 to 4096, then powers of two."""
    steps = [2**i for i in range(9)]
    steps += [*range(512, 2049, 256), *range(2560, 4097, 512), *(2**i for i in range(13, 24))]
    return min(next(step for step in steps if step >= x), max_num_tokens)
