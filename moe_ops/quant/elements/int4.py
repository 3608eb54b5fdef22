"""Integers of four bits, two in a byte: signed ones stored with an offset of 8, as GPTQ does, or
unsigned ones with a zero point for each group.
"""

import torch

from moe_ops.fake_impls.formats import Storage
from moe_ops.quant.elements.kinds import Integer
from moe_ops.quant.elements.table import add

TWO_IN_A_BYTE = Storage(dtype=torch.uint8, values=2)

add(Integer(name="int4", storage=TWO_IN_A_BYTE, lowest=-8, highest=7, offset=8))
add(Integer(name="uint4", storage=TWO_IN_A_BYTE, lowest=0, highest=15, zero_point=True))
