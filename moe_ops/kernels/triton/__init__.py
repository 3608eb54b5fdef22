"""Triton device code, from router logits to the sum of expert outputs.

This file is free of Triton, which its modules import.
"""

# What `tiny` can run: every program compares all pairs of token and choice with each other, and
# all tokens are the columns of one tile.
TINY_PAIRS, TINY_TOKENS = 64, 16
