"""Layers that keep states on a GPU: kernels at published widths, steps whose launches overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from moe_ops.decode_ops import (
    convolution_step,
    delta_rule,
    delta_rule_step,
    state_space_scan,
    state_space_step,
)
from moe_ops.registry.spec import Op
from moe_ops.testing import BF16, Tol, assert_close
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu
TOL = Tol(1.6e-2, "one rounding to 8 bits of mantissa, of outputs smaller than the largest")
TOL_STATE = Tol(1e-4, "float32 sums in another order, over hundreds of tokens")


def noise(*shape: int) -> Tensor:
    return torch.randn(shape).to(BF16)


def rule(B: int, T: int, channels: bool) -> list[Any]:
    """As in Qwen3-Next, or with a gate for each channel as in Kimi Linear."""
    N, H, D, V = (32 if channels else 16), 32, 128, 128
    g = -torch.rand((B, T, H, D) if channels else (B, T, H))
    beta, state = torch.rand(B, T, H).to(BF16), torch.randn(B, H, D, V)
    return [noise(B, T, N, D), noise(B, T, N, D), noise(B, T, H, V), g, beta, state]


def space(B: int, T: int) -> list[Any]:
    """As in Nemotron 3 Nano."""
    N, H, D, V = 8, 64, 128, 64
    given = [noise(B, T, H, V), noise(B, T, H), -torch.rand(H), noise(B, T, N, D)]
    return [*given, noise(B, T, N, D), torch.randn(B, H, V, D)]


def one(tokens: list[Any]) -> list[Any]:
    """The first token, and the state."""
    *rest, state = tokens
    return [*(t[:, 0] if t.dim() > 2 else t for t in rest), state]


def check(op: Op, tensors: list[Tensor], rest: tuple[Any, ...]) -> None:
    """On a GPU by kernels what is on a CPU by the definition, states included."""
    ours = [t.cuda() for t in tensors]
    on_gpu = [t.cuda() if isinstance(t, Tensor) else t for t in rest]
    assert op.pick(op.call(*ours, *on_gpu)).name == "triton"
    got, want = op(*ours, *on_gpu), op.reference(*tensors, *rest)
    if isinstance(want, Tensor):
        got, want = (got, ours[-1]), (want, tensors[-1])
    assert_close(got[0].float().cpu(), want[0].float(), TOL, "out")
    assert_close(got[1].float().cpu(), want[1].float(), TOL_STATE, "state")


@pytest.mark.parametrize("B", [1, 3, 32])
@pytest.mark.parametrize("channels", [False, True], ids=["a gate a head", "a gate a channel"])
def test_the_delta_rule(B: int, channels: bool) -> None:
    check(delta_rule_step, one(rule(B, 1, channels)), (128**-0.5, True, B == 1))
    if B < 32:
        check(delta_rule, rule(B, 150, channels), (128**-0.5, True))


@pytest.mark.parametrize("B", [1, 3, 32])
def test_a_state_space(B: int) -> None:
    of_heads = (torch.rand(64), torch.rand(64), True)
    check(state_space_step, one(space(B, 1)), (*of_heads, B == 1))
    if B < 32:
        check(state_space_scan, space(B, 150), (0.0, float("inf"), *of_heads))


@pytest.mark.parametrize("kept", [3, 4])
def test_a_convolution(kept: int) -> None:
    given = {"x_BD": noise(3, 8192), "state_BDW": noise(3, 8192, kept)}
    given |= {"weight_DW": noise(8192, 4), "bias_D": noise(8192)}
    ours = {name: t.cuda() for name, t in given.items()}
    got, want = convolution_step(**ours, silu=True), convolution_step(**given, silu=True)
    assert_close(got.float().cpu(), want.float(), TOL, "out")
    assert torch.equal(ours["state_BDW"].cpu(), given["state_BDW"])


def layer_step(wait: Callable[[], None], x: Tensor, held: dict[str, Tensor]) -> Tensor:
    """What a layer does between its products, as in Qwen3-Next."""
    mixed = convolution_step(x, held["inputs"], held["weight"], None, True)
    wait()
    q, k, v = (t.unflatten(1, (-1, 128)) for t in mixed.split([2048, 2048, 4096], 1))
    gates = softplus(mixed[:, :32].float())
    wait()
    out = delta_rule_step(q, k, v, -gates, gates.sigmoid(), held["state"], 0.1, True, ahead=True)
    wait()
    return torch.cat([out.flatten(1), x[:, 4096:]], 1)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("B", [1, 8])
def test_steps_whose_launches_overlap_in_a_graph(B: int) -> None:
    layers = [
        {
            "inputs": noise(B, 8192, 4).cuda(),
            "weight": noise(8192, 4).cuda(),
            "state": torch.randn(B, 32, 128, 128, device="cuda"),
        }
        for _ in range(12)
    ]
    first = [{name: t.clone() for name, t in held.items()} for held in layers]
    x = noise(B, 8192).cuda()

    def steps(wait: Callable[[], None]) -> Tensor:
        y = x
        for held in layers:
            y = layer_step(wait, y, held)
        return y

    def restore() -> None:
        for held, saved in zip(layers, first, strict=True):
            for name, t in held.items():
                t.copy_(saved[name])
        torch.cuda.synchronize()

    want = [steps(torch.cuda.synchronize) for _ in range(4)]
    restore()
    steps(lambda: None)  # compiles
    graph, out = captured(lambda: steps(lambda: None))
    restore()
    for wanted in want:
        graph.replay()
        assert torch.equal(out, wanted)
