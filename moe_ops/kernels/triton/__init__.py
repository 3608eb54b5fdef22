"""Triton device code, from router logits to the sum of expert outputs.

This file is free of Triton, which its modules import.
"""

# What `tiny` can run: every program compares all pairs of token and choice with each other, and
# all tokens are the columns of one tile.
TINY_PAIRS, TINY_TOKENS = 64, 16

WORD = 8  # codes of four bits in the words that kernels load
STEP = 128  # columns of codes that are multiplied at once
LARGE = 2**23  # elements of W2, from which on an expert is large
# The format of a weight: element, rows and columns of a group (-1: all), kind of scale, whether
# inputs have 8 bits, and the bits of a code.
Weight = tuple[str, int, int, str, bool, int]
