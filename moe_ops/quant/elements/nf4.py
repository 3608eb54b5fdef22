"""Codes of four bits for values that are distributed normally: NF4 of Dettmers et al., "QLoRA",
arXiv:2305.14314, as bitsandbytes has it.
"""

from moe_ops.quant.elements.int4 import TWO_IN_A_BYTE
from moe_ops.quant.elements.kinds import Table
from moe_ops.quant.elements.table import add

NF4 = Table(
    name="nf4",
    storage=TWO_IN_A_BYTE,
    triton_decoder="moe_ops.kernels.triton.experts.formats.nf4:decode",
    table=(
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip

add(NF4, published={"nf4": "nf4:1x64"})
