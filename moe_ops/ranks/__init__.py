"""What ranks send each other: process groups by name, transports, and what all ranks must agree on.

A transport is a pair of functions, `dispatch` and `combine`: `gather.py` and `exchange.py`. A third
one, `push`, is made of kernels (`moe_ops/kernels/triton/push.py`) over the memory of `peers.py`;
so are sums of the ranks' parts.
"""
