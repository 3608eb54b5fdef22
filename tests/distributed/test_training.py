"""Models on our ops under data parallelism: gradients are those of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moe_ops
from moe_ops.testing import Tol, assert_close
from tests.distributed.ranks import processes
from tests.hf import families
from tests.layer.shards import randomize

TOL = Tol(1e-5, "float32 sums in another order, in parts by rank")
RANKS = 2
WAYS = ("ddp", "fsdp", "fsdp checkpointed")


class Layers(nn.Module):
    """Two layers between linear ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(
            randomize(moe_ops.MoELayer(4, 2, 16, 8, internal_gate=True), seed) for seed in (0, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def model_of(kind: str) -> tuple[nn.Module, list[Tensor]]:
    """A model, and a batch for each rank."""
    if kind == "layers":
        return Layers(), [torch.randn(5, 16), torch.randn(5, 16)]
    tiny = families.build("qwen3_moe")
    model = moe_ops.optimize(tiny.model.float().eval())
    return model, [torch.randint(3, 60, (1, 7)) for _ in range(RANKS)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    if batch.is_floating_point():
        out: Tensor = model(batch)
        return out.square().mean()
    found: Tensor = model(input_ids=batch, use_cache=False).logits
    return found.square().mean()


def wrapped(model: nn.Module, way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (RANKS,))
    layers = model.layers if isinstance(model, Layers) else model.model.layers  # type: ignore
    if "checkpointed" in way:
        for layer in layers:
            whole = layer.forward
            layer.forward = lambda *a, _whole=whole, **kw: torch.utils.checkpoint.checkpoint(
                _whole, *a, use_reentrant=False, **kw
            )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def body(rank: int, group: str) -> None:
    for kind in ("layers", "qwen3_moe"):
        torch.manual_seed(1)
        model, batches = model_of(kind)
        alone = copy.deepcopy(model)
        for way in WAYS:
            hold(rank, alone, batches, wrapped(copy.deepcopy(model), way), f"{kind}, {way}")


def hold(rank: int, alone: nn.Module, batches: list[Tensor], spread: nn.Module, what: str) -> None:
    """Compare the gradients of a model that ranks share with the mean of those of all batches."""
    with torch.enable_grad():
        alone.zero_grad()
        torch.stack([loss_of(alone, batch) for batch in batches]).mean().backward()
        loss_of(spread, batches[rank]).backward()
    got: dict[str, Any] = {n.removeprefix("module."): p.grad for n, p in spread.named_parameters()}
    for name, p in alone.named_parameters():
        g = got[name]
        if p.grad is None:
            assert g is None, f"{what}: {name}"
            continue
        assert g is not None, f"{what}: {name}"
        assert_close(
            g.full_tensor() if isinstance(g, DTensor) else g, p.grad, TOL, f"{what}: {name}"
        )


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    processes(RANKS, tmp_path, body)
