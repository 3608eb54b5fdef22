"""Experts on sorted rows, or on a few tokens that nobody sorts.

`formats/` knows codes, `operands/` what x, h and weights become first, `schedule/` who multiplies
which rows, `products/` the loops, each of which takes the weights of `weights.py`.
"""
