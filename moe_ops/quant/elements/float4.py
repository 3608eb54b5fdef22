"""Floats of four bits, two in a byte: OCP Microscaling (MX) 1.0, section 5.3. NVFP4 is theirs in
blocks of 16, as in NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
"""

import torch

from moe_ops.fake_impls.formats import Storage
from moe_ops.quant.elements.kinds import Minifloat
from moe_ops.quant.elements.table import add

add(
    Minifloat(
        name="float4_e2m1",
        storage=Storage(dtype=torch.uint8, values=2),
        exponent_bits=2,
        mantissa_bits=1,
        bias=1,
        largest=6.0,
        top_exponent=2,
    ),
    published={"mxfp4": "float4_e2m1:1x32:e8m0", "nvfp4": "float4_e2m1:1x16:float8_e4m3fn"},
)
