"""Two GPUs of one host: layers change groups, run in parts, and have their loads recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops import capture
from moe_ops.layer import LoadRecorder, MoELayer, Rebalancing, resize_layer
from moe_ops.parallel.config import ALLGATHER, AUTO, LOW_LATENCY, ParallelConfig
from moe_ops.ranks import peers
from moe_ops.testing import TOL, assert_close
from tests.distributed.on_gpus import NEEDS_TWO, RANKS, on_gpus
from tests.layer.shards import randomize, take_share

pytestmark = NEEDS_TWO
BF16 = torch.bfloat16
E, K, D = 8, 2, 128
SIZES: dict[str, Any] = {
    "num_experts": E, "top_k": K, "hidden_size": D, "intermediate_size": 64, "dtype": BF16,
}  # fmt: skip
CLOSE = TOL["experts_over_ranks", BF16]


def given(T: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(T, D, generator=g).to("cuda", BF16), torch.randn(T, E, generator=g).cuda()


def made(
    rank: int, group: str, tokens: str, collective: str, **options: Any
) -> tuple[MoELayer, MoELayer]:
    """The whole layer, and a rank's share of it."""
    quant = options.get("quant")
    whole = randomize(MoELayer(**SIZES, quant=quant)).cuda()
    name = "dp" if tokens == "own" else "tp"
    config = ParallelConfig.of(
        **{name: RANKS, f"{name}_rank": rank}, expert_parallel=True, collective=collective
    )
    own = {"group": group, "max_num_tokens": options.pop("most", 64)}
    more = own if tokens == "own" else {"reduce_results": group}
    layer = MoELayer(**SIZES, **options, parallel=config, tokens=tokens, **more, device="cuda")
    return whole, take_share(whole, layer)


def in_64(x: Tensor, logits: Tensor, layer: MoELayer) -> Tensor:
    return layer(x, logits, rows=64)


def resized(rank: int, group: str, tokens: str, quant: str | None) -> None:
    whole, layer = made(rank, group, tokens, ALLGATHER, quant=quant, redundant_experts=2)
    other, own = dist.new_group([0, 1]), tokens == "own"

    run = capture(in_64, buckets=(8,), varying=2)
    x, logits = given(5, rank if own else 0)
    for _ in range(2):
        assert_close(run(x, logits, layer), whole(x, logits), CLOSE)
    resize_layer(layer, layer.parallel, other.group_name, over=group)
    for _ in range(2):
        assert_close(run(x, logits, layer), whole(x, logits), CLOSE)
    assert [bucket.refusal for bucket in run.report()] == [None, None]
    run.reset()
    resize_layer(layer, *((ParallelConfig(), "") if rank == 0 else (None, "")), over=group)
    if rank == 0:
        assert_close(layer(x, logits), whole(x, logits), CLOSE)
    else:
        with pytest.raises(NotImplementedError, match="left its group by resize_layer"):
            layer(x, logits)


@pytest.mark.parametrize("quant", [None, "float8_e4m3fn:32x32"], ids=str)
@pytest.mark.parametrize("tokens", ["own", "replicated"])
def test_graphs_are_captured_again_in_another_group(
    tokens: str, quant: str | None, tmp_path: Path
) -> None:
    on_gpus(tmp_path, resized, tokens, quant)


def in_parts(rank: int, group: str, collective: str) -> None:
    whole, layer = made(rank, group, "own", collective, most=16)
    given_ = given(40 - 8 * rank, rank)
    want = whole(*given_)
    assert_close(layer(*given_), want, CLOSE, "asked")
    assert_close(layer(*given_, rows=40), want, CLOSE, "agreed")
    run = capture(lambda x, logits, layer: layer(x, logits, rows=48), buckets=(48,), varying=2)
    for _ in range(3):
        assert_close(run(*given_, layer), want, CLOSE, "captured")
    assert [bucket.refusal for bucket in run.report()] == [None]
    run.reset()
    said = "are more than max_num_tokens=16, and ranks cannot ask"
    with pytest.raises(ValueError, match=said), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(*given_)
    if collective == LOW_LATENCY:
        # A part has 32 rows of at most 1 KiB of both ranks, and what is kept is a power of two.
        assert peers.memory(group, peers.LEAST_BYTES + 1) is None


@pytest.mark.parametrize("collective", [ALLGATHER, LOW_LATENCY, AUTO])
def test_calls_run_in_parts(collective: str, tmp_path: Path) -> None:
    on_gpus(tmp_path, in_parts, collective)


def recorded(rank: int, group: str, path: str) -> None:
    whole, layer = made(rank, group, "own", LOW_LATENCY, balanced=True, redundant_experts=2)
    run = capture(in_64, buckets=(8, 64), varying=2)
    recorder = LoadRecorder([layer], group, every=2, path=path, rebalancing=Rebalancing(interval=4))
    for step in range(8):
        x, logits = given(7 + 20 * (step % 2), 10 * step + rank)
        logits -= torch.arange(E, device="cuda")
        assert_close(run(x, logits, layer), whole(x, logits), CLOSE, f"step {step}")
        recorder.step()
    run.reset()


def test_replays_are_recorded_and_rebalanced(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    on_gpus(tmp_path, recorded, str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["last_step"] for one in lines] == [2, 4, 6, 8]
    for one in lines:
        assert sum(one["physical_of_all_layers"]) == sum(one["logical_of_all_layers"])
        assert sum(one["logical_of_all_layers"]) == K * RANKS * (7 + 27)
    assert lines[1]["rebalanced"]["moved"][0] > 0
