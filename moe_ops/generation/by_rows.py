"""Expert weights whose outputs are columns, stored anew such that they are rows of memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moe_ops.backends.triton_device import HALF
from moe_ops.hf.stored import PROJECTIONS, stored_format

log = logging.getLogger("moe_ops")

ROW_BYTES = 16  # of which the kernels for Hopper, and torch's grouped_mm, want multiples


def store_by_rows(model: nn.Module) -> None:
    """Store a model's transposed expert weights by rows, in place.

    A module that is_transposed, as GPT-OSS has them, keeps [E, inputs, outputs] contiguous. Shape
    and values stay, and so do names, parameters and what a checkpoint holds; strides become those
    of a contiguous [E, outputs, inputs], of which the kernels read an output's weights in whole
    lines of memory. One weight at a time is there twice. Weights in float32, quantised ones and
    those whose rows would not be a multiple of 16 bytes stay as they are, as do all that are left
    where a GPU has no room for a second copy of one.
    """
    found = list(_by_columns(model))
    for done, weight in enumerate(found):
        try:
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
        except torch.OutOfMemoryError:
            log.warning(
                "%d of %d expert weights stay stored by columns, which is slower: a second copy of "
                "one, %.2f GB, does not fit into the memory of %s",
                *(len(found) - done, len(found), weight.nbytes / 1e9, weight.device),
            )
            return
        torch.cuda.empty_cache()  # or smaller weights split the memory of larger ones, for good
    if found:
        gigabytes = sum(weight.nbytes for weight in found) / 1e9
        log.info(
            "stored %d expert weights, %.2f GB, by rows instead of columns, in place in the model "
            "given to compile; values, names and checkpoints stay", len(found), gigabytes,
        )  # fmt: skip


def _by_columns(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if stored_format(module) is not None or not getattr(module, "is_transposed", False):
            continue
        for name in PROJECTIONS:
            weight = module._parameters.get(name)
            if weight is not None and _gains(weight):
                yield weight


def _gains(weight: Tensor) -> bool:
    return (
        type(weight.data) is Tensor
        and weight.dim() == 3
        and weight.dtype in HALF
        and weight.is_contiguous()
        and weight.shape[1] * weight.itemsize % ROW_BYTES == 0
    )
