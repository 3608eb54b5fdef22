"""CUDA graphs: what is captured, by which sizes, and the buffers that stay where it reads them."""
