"""Floats of six bits, four in three bytes: OCP Microscaling (MX) 1.0, section 5.3."""

import torch

from moe_ops.fake_impls.formats import Storage
from moe_ops.quant.elements.kinds import Minifloat
from moe_ops.quant.elements.table import add

FOUR_IN_THREE_BYTES = Storage(dtype=torch.uint8, values=4, units=3)

add(
    Minifloat(
        name="float6_e3m2",
        storage=FOUR_IN_THREE_BYTES,
        exponent_bits=3,
        mantissa_bits=2,
        bias=3,
        largest=28.0,
        top_exponent=4,
    ),
    published={"mxfp6_e3m2": "float6_e3m2:1x32:e8m0"},
)
add(
    Minifloat(
        name="float6_e2m3",
        storage=FOUR_IN_THREE_BYTES,
        exponent_bits=2,
        mantissa_bits=3,
        bias=1,
        largest=7.5,
        top_exponent=2,
    ),
    published={"mxfp6_e2m3": "float6_e2m3:1x32:e8m0"},
)
