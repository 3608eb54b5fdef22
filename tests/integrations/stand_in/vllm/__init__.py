"""A stand-in of vLLM: what the plugin meets, under vLLM's names, on tensors of a CPU."""

__version__ = "0.33.0"
