"""The fakes: for each op, a pure function from the shapes of its arguments to the shapes of its
results.

They import torch alone, so another compiler can take them without the rest of the package. One file
per op, named as the op; results are always contiguous.
"""

from moe_ops.fake_impls.activate import activate
from moe_ops.fake_impls.combine import combine
from moe_ops.fake_impls.dispatch import dispatch
from moe_ops.fake_impls.expert_gemm import expert_gemm
from moe_ops.fake_impls.experts import experts
from moe_ops.fake_impls.moe import moe
from moe_ops.fake_impls.quantize import quantize
from moe_ops.fake_impls.route import route

__all__ = ["activate", "combine", "dispatch", "expert_gemm", "experts", "moe", "quantize", "route"]
