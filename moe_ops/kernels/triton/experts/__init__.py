"""Experts on sorted rows, or on a few tokens that nobody sorts.

`driver.py` runs a call on every path. `formats/` knows codes, `operands/` what x, h and weights
become first, `schedule/` who multiplies which rows, `products/` the loops and what launches them,
each of which takes the weights of `weights.py`.
"""
