"""Floats of eight bits, in dtypes of torch: OCP 8-bit Floating Point (OFP8) 1.0. MXFP8 is of OCP
Microscaling (MX) 1.0.
"""

import torch

from moe_ops.fake_impls.formats import Storage
from moe_ops.quant.elements.kinds import Minifloat
from moe_ops.quant.elements.table import add

add(
    Minifloat(
        name="float8_e4m3fn",
        storage=Storage(dtype=torch.float8_e4m3fn),
        exponent_bits=4,
        mantissa_bits=3,
        bias=7,
        largest=448.0,
        top_exponent=8,
    ),
    published={"mxfp8": "float8_e4m3fn:1x32:e8m0"},
)
add(
    Minifloat(
        name="float8_e5m2",
        storage=Storage(dtype=torch.float8_e5m2),
        exponent_bits=5,
        mantissa_bits=2,
        bias=15,
        largest=57344.0,
        top_exponent=15,
    ),
    published={"mxfp8_e5m2": "float8_e5m2:1x32:e8m0"},
)
