"""Benchmarks: `python -m moe_ops.bench overhead|layer|op|accuracy|task|compile|packing|report`."""
