"""Benchmarks: `python -m moe_ops.bench overhead|layer|accuracy|packing`."""
