"""Integers of eight bits, signed, or unsigned with a zero point for each group."""

import torch

from moe_ops.fake_impls.formats import Storage
from moe_ops.quant.elements.kinds import Integer
from moe_ops.quant.elements.table import add

add(Integer(name="int8", storage=Storage(dtype=torch.int8), lowest=-128, highest=127))
add(
    Integer(
        name="uint8", storage=Storage(dtype=torch.uint8), lowest=0, highest=255, zero_point=True
    )
)
