"""Quantisation: formats, the packing of values, and the configuration of a layer."""
