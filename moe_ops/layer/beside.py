"""Shared experts of a layer that runs eagerly, or is captured as it runs, beside routed ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_ops import streams
from moe_ops.registry.gradients import needs_grad


def start(
    module: nn.Module,
    run: Callable[[Tensor], Tensor],
    x_TD: Tensor,
    asked: bool | None,
    priority: int = streams.AHEAD,
) -> Callable[[], Tensor]:
    """Start `run(x_TD)`, a call of the module; what is returned waits for the result and gives it,
    once.

    The module runs on a second stream of a GPU, in a graph that is captured, too, if that is
    `asked`; None: if it was measured to pay. Where `refusal` has a reason it runs when its result
    is asked for.
    """
    if refusal(module, x_TD) is not None or not _pays(module, x_TD, asked, priority):
        return lambda: run(x_TD)
    with torch.cuda.stream(streams.fork(x_TD.device, priority)):
        out_TD: Tensor = run(x_TD)

    def wait() -> Tensor:  # it holds the tokens, or their memory may be given away before
        streams.join(x_TD.device, priority)
        return out_TD

    return wait


def refusal(module: nn.Module, x_TD: Tensor) -> str | None:
    """Why shared experts run in the order of the code, whatever is asked for, or None."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return "a graph is traced, in which a pass of moe_ops.compile places them"
    if x_TD.device.type != "cuda":
        return f"a {x_TD.device.type} has no second stream"
    if needs_grad(x_TD, *module.parameters()):
        return "a gradient is asked for, which runs in the order of the forward"
    return None


def _pays(module: nn.Module, x_TD: Tensor, asked: bool | None, priority: int) -> bool:
    nbytes = sum([weight.nbytes for weight in module.parameters()])
    limits, _ = streams.limits(asked, x_TD.device, nbytes)
    if limits is streams.IN_ORDER:
        return False
    streams.reserve(x_TD.device, priority)  # for a capture, if not yet for this call
    return limits.beside(x_TD)
