"""Kernels run in Triton's interpreter where there is no GPU, which must be said before the import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
