"""Triton device code, from router logits to the sum of expert outputs; importing it loads Triton."""
