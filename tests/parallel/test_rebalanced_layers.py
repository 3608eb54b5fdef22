"""Layers on several ranks, rebalanced from the loads that they recorded, compute what they did."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.load_balance import Rebalanced, rebalance
from moe_ops.parallel.moves import apply_moves
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.testing import Tol, assert_close

SUMMED = Tol(1e-5, "each token's experts are summed in another order")
E, K, D, I = 10, 3, 32, 16  # noqa: E741


def random_(layer: MoELayer, seed: int = 0) -> MoELayer:
    generator = torch.Generator().manual_seed(seed)
    for t in layer.expert_tensors().values():
        t.copy_(torch.randn(t.shape, generator=generator) * 0.1)
    return layer


def make(config: ParallelConfig, redundant: int, shared: int, whole: MoELayer) -> MoELayer:
    """The layer of a rank with its share of the experts of a whole one."""
    layer = MoELayer(
        E, K, D, I, bias=True, shared_experts=shared, parallel=config,
        redundant_experts=redundant, balanced=True,
    )  # fmt: skip
    mine = layer.replicas.physical_to_logical[layer.placement.local_to_global].tolist()
    rows = [*mine, *range(E, E + shared)]
    for name, t in layer.expert_tensors().items():
        t.copy_(whole.expert_tensors()[name][rows])
    return layer


def hot(T: int, seed: int) -> Tensor:
    """Logits that prefer a few experts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(T, E, generator=generator) - 0.5 * torch.randperm(E, generator=generator)


def exchange(layers: Sequence[MoELayer], done: Rebalanced) -> None:
    """What ranks do after rebalancing: read what goes away, move, write what comes."""
    moves, wire = done.moves[0], {}
    plans = [
        (layer, layer.placement, moves.of_rank(start, start + layer.placement.num_local))
        for layer, start in zip(layers, layers[0].placement.starts, strict=True)
    ]
    for layer, _, mine in plans:
        for row, to in mine.sends:
            wire[to] = {name: t[row].clone() for name, t in layer.expert_tensors().items()}
    for layer, placement, mine in plans:
        tensors = layer.expert_tensors()
        apply_moves(tensors, mine.local, shared=placement.shared)
        start = placement.starts[placement.config.ep_rank]
        for _, row in mine.receives:
            for name, t in tensors.items():
                t[row].copy_(wire[start + row][name])
        layer.replicas.update_(ExpertReplicas.of(done.physical_to_logical[0], E))
        layer.loads.zero_()


@pytest.mark.parametrize(("ranks", "redundant"), [(4, 0), (4, 3), (6, 8)])
@pytest.mark.parametrize("shared", [0, 2])
@torch.no_grad()
def test_ranks_go_on_with_the_same_sum(ranks: int, redundant: int, shared: int) -> None:
    whole = random_(MoELayer(E, K, D, I, bias=True, shared_experts=shared))
    configs = [
        ParallelConfig.of(tp=ranks, tp_rank=rank, expert_parallel=True) for rank in range(ranks)
    ]
    layers = [make(config, redundant, shared, whole) for config in configs]
    addresses = [t.data_ptr() for layer in layers for t in layer.expert_tensors().values()]
    written = 0
    for step in range(3):
        x, logits = torch.randn(24, D), hot(24, seed=step)
        got = sum(layer(x, logits) for layer in layers)
        assert_close(got, whole(x, logits), SUMMED, f"after {step} rebalancings")
        loads = layers[0].loads
        assert all(torch.equal(layer.loads, loads) for layer in layers), "all see all tokens"
        now = layers[0].physical_to_logical
        done = rebalance(loads[None], now[None], ranks=ranks)
        assert float(done.after) <= float(done.before)
        written += len(done.moves[0].pairs)
        exchange(layers, done)
    assert written > 0
    assert [t.data_ptr() for layer in layers for t in layer.expert_tensors().values()] == addresses


class Two(nn.Module):
    """Two layers in one graph."""

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, logits)
        return x


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.every)]
)
def test_a_compiled_graph_stays_valid(backend: str) -> None:
    wholes = [random_(MoELayer(E, K, D, I, bias=True), seed) for seed in range(2)]
    layers = [make(ParallelConfig(), 5, 0, whole) for whole in wholes]
    torch.compiler.reset()
    compiled = torch.compile(Two(layers), fullgraph=True, dynamic=True, backend=backend)
    compiled(torch.randn(8, D), hot(8, seed=9))
    written = 0
    for step in range(3):
        T = 16 + step
        x, logits = torch.randn(T, D), hot(T, seed=step)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_close(compiled(x, logits), Two(wholes)(x, logits), SUMMED, f"step {step}")
        loads = torch.stack([layer.loads for layer in layers])
        assert loads.sum(1).tolist() == [sum((8, 16, 17, 18)[: step + 2]) * K] * 2
        now = torch.stack([layer.physical_to_logical for layer in layers])
        done = rebalance(loads, now, ranks=5)
        written += sum(len(moves.pairs) for moves in done.moves)
        for i, layer in enumerate(layers):
            apply_moves(layer.expert_tensors(), done.moves[i])
            layer.replicas.update_(ExpertReplicas.of(done.physical_to_logical[i], E))
    assert written > 0
