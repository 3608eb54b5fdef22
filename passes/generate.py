"""What `generate` of a compiled Hugging Face model compiles and captures with."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import mark_static, maybe_mark_dynamic
from torch.utils import _pytree as pytree

from moe_ops.passes.cuda_graph import GraphPool
from moe_ops.passes.net import Net
from moe_ops.passes.sizes import call_oblivious

# With few rows a product is a reduction, which Inductor fuses and tunes by coordinate descent;
# without it calls a library made for many. A step is many kernels of a few microseconds: where a
# GPU can, they begin while the ones before them end (PDL), as ours do and as ours allow.
STEP_OPTIONS = {"coordinate_descent_tuning": True, "triton.enable_pdl": True}


def is_transformers_model(model: nn.Module) -> bool:
    """Without importing transformers: it has been, if there is such a model."""
    utils = sys.modules.get("transformers.modeling_utils")
    return utils is not None and isinstance(model, utils.PreTrainedModel)


def quicken(twin: nn.Module, model: nn.Module, options: Mapping[str, Any]) -> None:
    """Give a transformers model's compiled twin our `generate`."""
    from moe_ops.hf.generate import quicken as give
    from moe_ops.hf.steps import Tools

    # The graphs are ours; Inductor's own, of each region, would be in their way.
    prompt_options = {**options, "triton.cudagraphs": False}

    def compile_prompt(function: Callable[..., Any]) -> Callable[..., Any]:
        return PromptRegion(torch.compile(function, backend=Net(prompt_options)))

    def compile_step(function: Callable[..., Any]) -> Callable[..., Any]:
        on_gpu = any(p.is_cuda for p in model.parameters())  # by now, which may be later
        step_options = {**(STEP_OPTIONS if on_gpu else {}), **prompt_options}
        return torch.compile(function, dynamic=False, backend=Net(step_options, False))

    tools = Tools(
        compile_prompt=compile_prompt,
        compile_step=compile_step,
        capture=functools.partial(capture_into, GraphPool()),
    )
    give(twin, model, tools)


def capture_into(
    pool: GraphPool, function: Callable[[], None], state: Sequence[Tensor]
) -> Callable[[], None] | None:
    """What repeats `function`, in the one pool of all graphs of a model; None without a GPU."""
    if not all(t.is_cuda for t in state):
        return None
    return pool.capture(function, state, device=state[0].device).replay


class PromptRegion:
    """Calls compiled code such that one graph serves every number of sequences and tokens.

    The first tensor of the call, [B, S, D] or [B, S], tells these. A prompt of one token has
    a graph of its own, as attention functions branch on it.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        B, S = tensors[0].shape[:2]
        for x in tensors:
            mark(x, B, S)
        return call_oblivious(self.call, module, *args, **kwargs)


def mark(x: Tensor, B: int, S: int) -> None:
    """Mark the dims that count sequences and tokens: [B, S], [B, S, D], and masks [B, 1, S, S]."""
    if x.dim() < 2:
        return
    if x.shape[0] == B:
        maybe_mark_dynamic(x, 0)
    for dim in (1,) if x.dim() < 4 else (2, 3):
        if x.shape[dim] == S:
            (maybe_mark_dynamic if S > 1 else mark_static)(x, dim)
