"""b12x with CUTLASS in captured graphs, by stand-ins that compute with torch's operators on a GPU:
experts move in place between replays, and both sets of scales with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moe_ops import experts, flashinfer_options
from moe_ops.ops.experts import ExpertsCall, weights_of
from moe_ops.parallel.moves import Moves, apply_moves
from tests.flashinfer.conftest import fake, installed, on  # noqa: F401  fixtures
from tests.flashinfer.layers import call_of, error_of, stored, wanted
from tests.gpu.captures import captured, warmed_up

pytestmark = pytest.mark.gpu
N = 32
SWAPS = (
    Moves(4, ((0, 2), (2, 0), (1, 3), (3, 1))), Moves(4, ((0, 1), (1, 2), (2, 0))),
    Moves(4, ((3, 0), (0, 3))),
)  # fmt: skip


def on_gpu(call: ExpertsCall) -> ExpertsCall:
    given = {n: getattr(call, n) for n in experts.arguments.paths}
    return replace(call, **{n: t.cuda() for n, t in given.items() if isinstance(t, Tensor)})


def first(call: ExpertsCall, tokens: int) -> ExpertsCall:
    """Some tokens of a layer, its weights at the same places."""
    t = tokens
    return replace(call, x_TD=call.x_TD[:t], weights_TK=call.weights_TK[:t], ids_TK=call.ids_TK[:t])


@pytest.mark.parametrize("upstream", [False, True], ids=["ours", "upstream"])
def test_moved_experts_under_captured_graphs(
    fake: ModuleType, on: Callable[[int, int], None], upstream: bool,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Few tokens by b12x and many by CUTLASS, or all by a wrapper that knows both."""
    if upstream:
        from flashinfer.fused_moe import b12x

        monkeypatch.setattr(fake.fused_moe, "B12xMoEWrapper", b12x.LaterB12xMoEWrapper)
    on(12, 0)
    loaded = call_of("nvfp4", tokens=N + 1)
    long = on_gpu(stored(loaded, "flashinfer.up_gate"))
    factors = {n: getattr(long, n) for n in ("global_scale13_E", "global_scale2_E")}
    held = {**weights_of(long), **factors}
    calls = (first(long, 5), long)
    options = {"b12x_prefill_threshold": N, "upstream_prefill": upstream, "max_tokens": 64}
    with torch.no_grad(), flashinfer_options(**options):
        picked = [experts.pick(call).name for call in calls]
        assert picked == [
            "flashinfer_b12x",
            "flashinfer_b12x" if upstream else "flashinfer_cutlass",
        ]
        runs = [partial(experts.pick(call).run, call) for call in calls]
        for run in runs:
            warmed_up(run)
        graphs = [captured(run) for run in runs]
        places = [t.data_ptr() for t in held.values()]
        order = torch.arange(4)
        for swap in SWAPS:
            apply_moves(held, swap)
            sources = order.clone()
            for source, to in swap.pairs:
                sources[to] = order[source]
            order = sources
            assert [t.data_ptr() for t in held.values()] == places
            moved_to = torch.empty(4, dtype=torch.int32)
            moved_to[order] = torch.arange(4, dtype=torch.int32)
            for (graph, out), call in zip(graphs, calls, strict=True):
                graph.replay()
                replayed = out.clone()
                fresh = replace(call, **{n: t.clone() for n, t in held.items()})
                assert torch.equal(replayed, experts.pick(fresh).run(fresh))
                # As before the moves, by the ids of experts as they now lie.
                back = moved_to.cuda()[call.ids_TK.long()]
                call.ids_TK.copy_(back), graph.replay()
                want = wanted(first(loaded, len(call.x_TD))).cuda()
                assert error_of(out, want) < 0.08
                call.ids_TK.copy_(loaded.ids_TK[: len(call.x_TD)])
