"""Formats of weights: their words, order of columns, decoders and scales."""
