"""Shared experts on a second stream of a GPU: the bits of the layer in order, whatever memory does.

A tensor that is freed on one stream and taken on another is a wrong number without an error, so
tokens change, other work takes memory between calls, and many layers share a graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

import moe_ops
from moe_ops import streams
from moe_ops.graphs.capture import capture
from moe_ops.layer import MoELayer
from moe_ops.testing import BF16, Tol, assert_close
from tests.gpu.captures import captured, warmed_up

pytestmark = pytest.mark.gpu

D, LAYERS, ROUNDS = 512, 4, 100
SIZES: dict[str, Any] = {
    "num_experts": 32, "top_k": 4, "hidden_size": D, "intermediate_size": 256,
    "internal_gate": True, "dtype": BF16, "device": "cuda",
}  # fmt: skip
TWICE_ROUNDED = Tol(3e-2, "bfloat16 rounded in other places")
TOKENS = (1, 8, 64, 700)


class Shared(nn.Module):
    """A gated shared expert, wide, so that it ends after routed experts of few tokens."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": False, "dtype": BF16, "device": "cuda"}
        self.first, self.up = nn.Linear(D, width, **made), nn.Linear(D, width, **made)
        self.down, self.score = nn.Linear(width, D, **made), nn.Linear(D, 1, **made)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(nn.functional.silu(self.first(x)) * self.up(x))
        return torch.sigmoid(self.score(x)) * y


class Stack(nn.Module):
    """Layers one after the other, so that memory of one is taken by the next."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoELayer(**SIZES, shared_experts=Shared(width)) for _ in range(LAYERS)
        )
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.rms_norm(x + layer(x), (D,))
        return x

    def ask(self, beside: bool | None) -> None:
        for layer in self.layers:
            layer.beside = beside


def churn(step: int) -> None:
    """Other work takes and frees memory, and writes to it."""
    for n in range(4):
        torch.full((1 << (10 + (step + n) % 8), D), float("nan"), device="cuda", dtype=BF16)


@pytest.mark.parametrize("width", [256, 4096], ids=["narrow", "wide"])
@pytest.mark.parametrize("T", TOKENS)
@torch.inference_mode()
def test_eager_and_captured_layers_have_the_bits_of_those_in_order(T: int, width: int) -> None:
    model, x = Stack(width), torch.randn(T, D, device="cuda", dtype=BF16)
    model.ask(True)
    graph, out = captured(lambda: model(x), warmed_up(lambda: model(x)))
    for step in range(ROUNDS):
        x.normal_()
        model.ask(False)
        want = model(x)
        graph.replay()
        assert torch.equal(out, want), f"replay {step}"
        model.ask(True)
        churn(step)
        assert torch.equal(model(x), want), f"eager call {step}"


@pytest.mark.parametrize("T", TOKENS)
@torch.inference_mode()
def test_compiled_layers_replay_what_they_gave(T: int) -> None:
    """The pair of ops in Inductor's code, uncaptured and captured by hand."""
    model, x = Stack(), torch.randn(T, D, device="cuda", dtype=BF16)
    options = moe_ops.inductor_options(beside=True)
    run = torch.compile(model, options=options, dynamic=False)
    with config.patch(fx_graph_cache=False):  # a cached graph has met no pass
        assert_close(run(x), model(x), TWICE_ROUNDED)
    (found,) = options["post_grad_custom_post_pass"].runs
    assert [note.rule for note in found.rewrites].count("run_beside") == LAYERS, found.refusals
    graph, out = captured(lambda: run(x), warmed_up(lambda: run(x)))
    for step in range(ROUNDS):
        x.normal_()
        graph.replay()
        again = run(x).clone()
        churn(step)
        assert torch.equal(out, again), f"step {step}"
        if step % 20 == 0:
            assert_close(out, model(x), TWICE_ROUNDED, f"step {step}")


@torch.inference_mode()
def test_cuda_graphs_of_inductor_and_of_ours_hold_fork_and_join() -> None:
    model, x = Stack(), torch.randn(16, D, device="cuda", dtype=BF16)
    want = model(x)
    trees = torch.compile(
        model, options=moe_ops.inductor_options(beside=True, extra={"triton.cudagraphs": True})
    )
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(trees(x).clone(), want, TWICE_ROUNDED)
    model.ask(True)
    ours = capture(model, buckets=(16, 64))
    for T in (16, 5, 40):
        y = torch.randn(T, D, device="cuda", dtype=BF16)
        model.ask(False)
        assert_close(ours(y), model(y), TWICE_ROUNDED, f"{T} tokens")


@torch.inference_mode()
def test_streams_have_second_streams_of_their_own() -> None:
    model, x = Stack(), torch.randn(64, D, device="cuda", dtype=BF16)
    want = model(x)
    model.ask(True)
    others = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in others:
            with torch.cuda.stream(stream):
                results.append(model(x))
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got in results)
    keys = {(s.device_index, s.cuda_stream, streams.AHEAD) for s in others}
    seconds = [streams._seconds[key].cuda_stream for key in keys]
    assert len(set(seconds)) == len(others)


@torch.inference_mode()
def test_a_capture_takes_the_measured_way_without_a_warm_up_on_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eager calls run in order; the capture, on a stream that nothing ran on, beside."""
    limits = streams.Limits(captured=1, eager=streams.MOST)
    monkeypatch.setitem(streams.MEASURED, torch.cuda.get_device_name(), limits)
    monkeypatch.setattr(streams, "_pools", {})
    monkeypatch.setattr(streams, "_seconds", {})
    model, x = Stack(), torch.randn(8, D, device="cuda", dtype=BF16)
    want = model(x)
    assert streams._pools and not streams._seconds
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph, out = captured(lambda: model(x), stream)
    assert list(streams._seconds) == [(stream.device_index, stream.cuda_stream, streams.AHEAD)]
    graph.replay()
    assert torch.equal(out, want)
