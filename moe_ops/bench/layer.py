"""One Mixture-of-Experts layer, compiled: transformers' experts against ours, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.ops import experts, route
from moe_ops.passes.inductor.compiled import inductor_options
from moe_ops.testing import Case, Tol, assert_close

AGREEMENT = Tol(2e-2, "two computations in bfloat16 with roundings in other places")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median milliseconds of each implementation at one number of tokens."""

    tokens: int
    milliseconds: dict[str, float]

    def ratio(self, other: str) -> float:
        return self.milliseconds[other] / self.milliseconds["moe_ops"]


def stock_block(case: Case, dtype: torch.dtype) -> Any:
    """transformers' Qwen3-MoE block of the case's sizes, with random weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=case.D,
        num_experts=case.E,
        num_experts_per_tok=case.K,
        moe_intermediate_size=case.I,
        norm_topk_prob=True,
    )
    block = Qwen3MoeSparseMoeBlock(config).to(dtype).eval().requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return block


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One implementation: its experts given a routing, and the block with the router."""

    experts: Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens, ids, weights
    block: Callable[[Tensor], Tensor]


def implementations(
    case: Case, dtype: torch.dtype, names: list[str], ours: str
) -> dict[str, Compiled]:
    """Each implementation by its name, "moe_ops" last: compiled functions on the same weights.

    ours: "lifted", transformers' code under our passes, or "ops", code that calls the ops.
    """
    block = stock_block(case, dtype)
    module = block.experts
    out_dtype = str(dtype).removeprefix("torch.")

    def our_experts(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return experts(x_TD, weights_TK, ids_TK, module.gate_up_proj, module.down_proj)

    def our_block(x_TD: Tensor) -> Tensor:
        logits_TE = F.linear(x_TD, block.gate.weight)
        weights_TK, ids_TK = route(logits_TE, case.K, renormalize=True, out_dtype=out_dtype)
        return our_experts(x_TD, ids_TK, weights_TK)

    def stock(name: str, options: dict[str, Any] | None = None) -> Compiled:
        def stock_experts(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            module.config._experts_implementation = name
            return module(x_TD, ids_TK, weights_TK)

        def whole_block(x_TD: Tensor) -> Tensor:
            module.config._experts_implementation = name
            return block(x_TD[None])[0]

        return Compiled(
            experts=_compile(stock_experts, options), block=_compile(whole_block, options)
        )

    if ours == "lifted":
        last = stock("grouped_mm", inductor_options(strict=True))
    else:
        last = Compiled(experts=_compile(our_experts), block=_compile(our_block))
    return {name: stock(name) for name in names} | {"moe_ops": last}


def _compile(
    function: Callable[..., Tensor], options: dict[str, Any] | None = None
) -> Callable[..., Tensor]:
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def random_routing(case: Case, T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh tokens, ids uniform over the experts, and weights that sum to 1."""
    ids_TK = torch.rand(T, case.E).topk(case.K).indices
    return torch.randn(T, case.D).to(dtype), ids_TK, torch.rand(T, case.K).softmax(-1).to(dtype)


def check(case: Case, dtype: torch.dtype, compiled: dict[str, Compiled], T: int) -> None:
    """Raise AssertionError unless all implementations give the same for the same routing."""
    inputs = random_routing(case, T, dtype)
    want = compiled["moe_ops"].experts(*inputs)
    for name, implementation in compiled.items():
        got = implementation.experts(*inputs)
        assert_close(got, want, AGREEMENT, f"{name}, {T} tokens: not timing what is wrong; it")


def measure(
    case: Case,
    dtype: torch.dtype,
    tokens: list[int],
    names: list[str],
    repeats: int,
    part: str,
    ours: str = "lifted",
) -> list[Timing]:
    """Time each implementation at each number of tokens; tokens and routing are new every call."""
    timings = []
    with torch.inference_mode():
        compiled = implementations(case, dtype, names, ours)
        for T in tokens:
            torch._dynamo.reset()
            check(case, dtype, compiled, T)
            seconds: dict[str, list[float]] = {name: [] for name in compiled}
            for i in range(max(5, repeats // max(1, T // 4)) + 2):
                for name, implementation in compiled.items():
                    inputs = random_routing(case, T, dtype)
                    start = time.perf_counter()
                    if part == "experts":
                        implementation.experts(*inputs)
                    else:
                        implementation.block(inputs[0])
                    if i >= 2:  # the first calls compile and warm up
                        seconds[name].append(time.perf_counter() - start)
            medians = {n: sorted(s)[len(s) // 2] * 1e3 for n, s in seconds.items()}
            timings.append(Timing(tokens=T, milliseconds=medians))
    return timings


def table(case: Case, dtype: torch.dtype, timings: list[Timing]) -> str:
    names = list(timings[0].milliseconds)
    others = [n for n in names if n != "moe_ops"]
    head = f"{'tokens':>6}" + "".join(f"{n + ' ms':>16}" for n in names)
    lines = [head + "".join(f"{'vs ' + n:>16}" for n in others)]
    for t in timings:
        cells = "".join(f"{t.milliseconds[n]:>16.2f}" for n in names)
        lines.append(f"{t.tokens:>6}" + cells + "".join(f"{t.ratio(n):>15.2f}x" for n in others))
    threads = torch.get_num_threads()
    title = f"{case.name}: E={case.E} K={case.K} D={case.D} I={case.I}, {dtype}, {threads} threads"
    return "\n".join([title, *lines])
