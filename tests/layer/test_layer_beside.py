"""Shared experts of a layer beside its routed ones: in which order, and where they may be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops import streams
from moe_ops.layer import MoELayer, beside
from moe_ops.parallel.config import ParallelConfig
from moe_ops.streams import Limits
from tests.layer.shards import randomize

SIZES: dict[str, Any] = {
    "num_experts": 6, "top_k": 2, "hidden_size": 32, "intermediate_size": 16,
    "internal_gate": True,
}  # fmt: skip
RANK = ParallelConfig.of(tp=2, tp_rank=1, expert_parallel=True)


class Shared(nn.Linear):
    """A shared expert that writes down when it runs."""

    def __init__(self, order: list[str]) -> None:
        super().__init__(32, 32)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        self.order.append("shared")
        return super().forward(x)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a layer does, in order, where a CPU stands for a GPU with streams."""
    done: list[str] = []
    run_here = MoELayer.run_experts

    def routed(self: MoELayer, *args: Tensor) -> Tensor:
        done.append("routed")
        return run_here(self, *args)

    @contextlib.contextmanager
    def second(stream: Any) -> Iterator[None]:
        done.append(stream.name)
        yield
        done.append("here")

    monkeypatch.setattr(MoELayer, "run_experts", routed)
    monkeypatch.setattr(beside, "refusal", lambda module, x: None)
    monkeypatch.setattr(beside.torch.cuda, "stream", second)
    monkeypatch.setattr(streams, "fork", lambda *at: SimpleNamespace(name="fork"))
    monkeypatch.setattr(streams, "join", lambda *at: done.append("join"))
    monkeypatch.setattr(streams, "reserve", lambda *at: [])
    monkeypatch.setattr(Limits, "beside", lambda self, x: self is streams.ASKED_FOR)
    return done


def limits_of_a_gpu(asked: bool | None, device: torch.device, nbytes: int) -> tuple[Limits, str]:
    """What `streams.limits` says of a GPU on which nothing was measured."""
    return (streams.ASKED_FOR, "") if asked else (streams.IN_ORDER, "")


BESIDE = ["fork", "shared", "here", "routed", "join"]
IN_ORDER = ["routed", "shared"]
WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "asked": ({"beside": True}, BESIDE),
    "of its own": ({"beside": None}, IN_ORDER),
    "not wanted": ({"beside": False}, IN_ORDER),
    "replicated": ({"beside": True, "shared_reduction": "replicated"}, BESIDE),
    "apart": ({"beside": True, "separate": True}, BESIDE),
    "latent": ({"beside": True, "routed_output_transform": nn.Linear(32, 32)}, BESIDE),
    "reduced": (
        {"beside": True, "shared_reduction": "replicated", "reduce_results": lambda t: t},
        BESIDE,
    ),
    "a rank that adds a part": ({"beside": True, "parallel": RANK}, BESIDE),
    "a rank that adds none": (
        {"beside": True, "parallel": RANK, "shared_reduction": "replicated"},
        ["routed"],
    ),
}


@pytest.mark.parametrize(("options", "wanted"), WAYS.values(), ids=WAYS)
def test_they_begin_before_routed_ones_and_are_awaited_behind(
    options: dict[str, Any], wanted: list[str], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "limits", limits_of_a_gpu)
    options = {"tokens": "replicated", **options}
    layer = randomize(MoELayer(**SIZES, shared_experts=Shared(order), **options))
    x = torch.randn(5, 32)
    with torch.no_grad():
        got = layer(x)
        done = [*order]
        layer.beside = False
        want = layer(x)
    assert done == wanted
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_no_device_but_a_gpu_has_a_second_stream() -> None:
    layer = randomize(MoELayer(**SIZES, shared_experts=nn.Linear(32, 32), beside=True))
    x = torch.randn(5, 32)
    reason = beside.refusal(layer.shared_experts, x)
    assert reason == "a cpu has no second stream"
    in_order = MoELayer(**SIZES, shared_experts=layer.shared_experts)
    in_order.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), in_order(x))


def test_a_gradient_runs_in_the_order_of_the_forward() -> None:
    x = SimpleNamespace(device=torch.device("cuda"), requires_grad=True)
    reason = beside.refusal(nn.Linear(2, 2), x)  # type: ignore[arg-type]
    assert reason == "a gradient is asked for, which runs in the order of the forward"


def test_a_traced_layer_leaves_it_to_a_pass() -> None:
    layer = nn.Linear(2, 2)

    @torch.compile(backend="eager", fullgraph=True)
    def run(x: Tensor) -> Tensor:
        reason = beside.refusal(layer, x)
        return x + len(reason or "")

    reason = "a graph is traced, in which a pass of moe_ops.compile places them"
    assert run(torch.zeros(1)).item() == len(reason)


MEASURED = Limits(captured=2, eager=4096, bytes=2**20)


@pytest.mark.parametrize(
    ("asked", "nbytes", "wanted", "reason"),
    [
        (True, 2**30, streams.ASKED_FOR, "it is asked for"),
        (False, 8, streams.IN_ORDER, "it is not wanted"),
        (None, 8, MEASURED, "on A it pays from 2 tokens on in CUDA graphs and from 4096 elsewhere"),
        (None, 2**21, streams.IN_ORDER, "it pays for weights of up to 1 MiB, and these have 2 MiB"),
    ],
)
def test_limits_of_a_device_that_was_measured(
    asked: bool | None, nbytes: int, wanted: Limits, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MEASURED", {"A": MEASURED})
    monkeypatch.setattr(streams, "_names", {torch.device("cuda"): "A"})
    found, why = streams.limits(asked, torch.device("cuda"), nbytes)
    assert found == wanted and why.startswith(reason)


@pytest.mark.parametrize(("capturing", "least"), [(True, 2), (False, 4096)])
def test_tokens_within_limits(capturing: bool, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for T, wanted in ((least - 1, False), (least, True), (2 * least, True)):
        x = SimpleNamespace(is_cuda=True, shape=(2, T // 2, 8), numel=lambda T=T: 8 * T)
        assert MEASURED.beside(x) is wanted  # type: ignore[arg-type]
    assert not MEASURED.beside(torch.ones(2 * least, 8))


def test_of_another_gpu_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_names", {torch.device("cuda"): "B"})
    found = streams.limits(None, torch.device("cuda"), 8)
    assert found == (streams.IN_ORDER, "on B it was not measured to pay")


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("weights", [1, 2], ids=["one weight", "two weights"])
def test_the_pair_of_ops_is_what_graphs_are_told(weights: int, gated: bool) -> None:
    x, w2 = torch.randn(2, 3, 8), torch.randn(8, 4)
    w13 = list(torch.randn(8, 8).chunk(weights))
    gate = torch.randn(1, 8) if gated else None
    begin, wait = torch.ops.moe_ops.begin_shared.default, torch.ops.moe_ops.await_shared.default
    torch.library.opcheck(begin, (x, w13, w2, gate, "silu"))
    torch.library.opcheck(wait, (x.clone(), x, x.clone()))
    up, down = torch.cat(w13).chunk(2)
    want = (nn.functional.silu(x @ up.T) * (x @ down.T)) @ w2.T
    if gate is not None:
        want = want * torch.sigmoid(x @ gate.T)
    torch.testing.assert_close(begin(x, w13, w2, gate, "silu"), want)
