"""Slices whose ends torch leaves open where sizes of 0 and 1 stay symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config

import moe_ops
from moe_ops.passes.inductor import sizes, slices
from tests.chosen import one_in

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


def few(x_BSD: Tensor) -> tuple[Tensor, ...]:
    """Fewer than there are to be had, in some calls."""
    return (
        x_BSD[:2] * 2,
        x_BSD[:, :3] * 2,
        x_BSD[:, -3:].flip(1),
        x_BSD[:, 2:] * 2,
        x_BSD[:, :-2] * 2,
    )


def few_of_sums(x_BSD: Tensor) -> tuple[Tensor, ...]:
    """Of sizes that are no symbol: s + 2 and b * s."""
    x_ND, padded = x_BSD.flatten(0, 1), F.pad(x_BSD, (0, 0, 2, 0))
    return padded[:, -2:] * 2, padded[:, 3:] * 2, padded[:, -4:].flip(1), x_ND[1:] * 2, x_ND[3:] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        last,
        *(pytest.param(f, marks=pytest.mark.every) for f in (heads, head, padding, strided)),
    ],
)
def test_compiled_equals_eager_at_every_size(function: Callable[[Tensor], Any]) -> None:
    module = nn.Module()
    module.forward = function
    with config.patch(fx_graph_cache=False):
        compiled = moe_ops.compile(module, strict=True)
        for shape in [(1, 128, 8), (3, 48, 8), (2, 70, 8), (1, 1, 8), (2, 200, 8)]:
            x_BSD = torch.randn(shape)
            with torch.inference_mode():
                torch.testing.assert_close(compiled(x_BSD), function(x_BSD))


@pytest.mark.slow
@one_in(2, pytest.mark.parametrize("function", [few, few_of_sums]))
def test_a_size_that_ends_a_slice_is_not_taken_for_more_than_one(
    function: Callable[[Tensor], Any],
) -> None:
    """One graph, made for several rows, serves calls with fewer rows than a slice asks for."""
    backend, counter = moe_ops.backend(strict=True), counters["stats"]
    with config.patch(fx_graph_cache=False):
        compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
        before = counter["unique_graphs"]
        for shape in [(3, 48, 8), (1, 1, 8), (2, 2, 8), (1, 3, 8)]:
            x_BSD = torch.randn(shape)
            found = sizes.call_oblivious(compiled, x_BSD)
            torch.testing.assert_close(found, function(x_BSD), rtol=0, atol=0)
        assert counter["unique_graphs"] == before + 1


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
    with scalars, config.patch(fx_graph_cache=False), torch.inference_mode():
        compiled = torch.compile(function, options=options, fullgraph=True)
        for n in (5, 2, 20):
            torch.testing.assert_close(compiled(x_T, torch.tensor(n)), x_T[:n] * 2)
    assert seen and all(before == after and before for before, after in seen)
