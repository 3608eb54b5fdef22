"""Slices whose ends torch leaves open where sizes of 0 and 1 stay symbolic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config

import moe_ops
from moe_ops.passes.inductor import slices

CHUNK = 64


def summed(x_BSD: Tensor) -> Tensor:
    """Sums within chunks of a padded length, as linear attention has them."""
    B, S, D = x_BSD.shape
    padded = F.pad(x_BSD, (0, 0, 0, (CHUNK - S % CHUNK) % CHUNK))
    return padded.reshape(B, -1, CHUNK, D).cumsum(2).reshape(B, -1, D)


def head(x_BSD: Tensor) -> Tensor:
    return summed(x_BSD)[:, : x_BSD.shape[1]] + x_BSD


def heads(x_BSD: Tensor) -> Tensor:
    """Of the second slice Inductor knows the answer by the first."""
    twice = summed(head(x_BSD) * 2)[:, : x_BSD.shape[1]]
    return twice[:, : x_BSD.shape[1] // 2].sum(1)


def padding(x_BSD: Tensor) -> Tensor:
    return summed(x_BSD)[:, x_BSD.shape[1] :].sum(1)


def last(x_BSD: Tensor) -> Tensor:
    """As a state of a convolution keeps them."""
    return F.pad(x_BSD, (0, 0, 4, 0))[:, -x_BSD.shape[1] :] * 2


def strided(x_BSD: Tensor) -> Tensor:
    """Past the end: eager stops there."""
    return summed(x_BSD)[:, x_BSD.shape[1] // 2 : 2 * x_BSD.shape[1] : 3].sum(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [last, *(pytest.param(f, marks=pytest.mark.every) for f in (heads, head, padding, strided))],
)
def test_compiled_equals_eager_at_every_size(function: Callable[[Tensor], Tensor]) -> None:
    module = nn.Module()
    module.forward = function
    with config.patch(force_disable_caches=True):
        compiled = moe_ops.compile(module, strict=True)
        for shape in [(1, 128, 8), (3, 48, 8), (2, 70, 8), (1, 1, 8), (2, 200, 8)]:
            x_BSD = torch.randn(shape)
            with torch.inference_mode():
                torch.testing.assert_close(compiled(x_BSD), function(x_BSD))


@pytest.mark.slow
def test_a_slice_that_depends_on_data_stays_as_it_is() -> None:
    seen: list[object] = []

    def bindings(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
            before = dict(node.meta.get(slices.BINDINGS, {}))
            slices.settle(graph)
            seen.append((before, node.meta.get(slices.BINDINGS)))

    def function(x_T: Tensor, n: Tensor) -> Tensor:
        return x_T[: n.item()] * 2

    x_T = torch.arange(9.0)
    options = {"post_grad_custom_post_pass": bindings}
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with scalars, config.patch(force_disable_caches=True), torch.inference_mode():
        compiled = torch.compile(function, options=options, fullgraph=True)
        for n in (5, 2, 20):
            torch.testing.assert_close(compiled(x_T, torch.tensor(n)), x_T[:n] * 2)
    assert seen and all(before == after and before for before, after in seen)
