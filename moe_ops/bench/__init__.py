"""Benchmarks: `python -m moe_ops.bench overhead|layer|op|accuracy|compile|packing|report`."""
