"""Kernels of ours begin to compile while Inductor compiles the graphs that will launch them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.backends.triton_ahead import PlanAhead
from moe_ops.hf.linears import made_of, replace_everywhere
from moe_ops.testing import BF16
from tests.absent_gpu import absent_gpu
from tests.hf import real

pytest.importorskip("triton")
from moe_ops.kernels.triton.ahead import collected
from tests.kernels.offline_ahead import Compiler, absent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there they are compiled"),
]

# Of prompts of any length, and of a step of one sequence.
OF_PROMPTS = {
    "experts": {"tiny_up", "tiny_down", "rows_up", "rows_down", "_grouped", "sum_kernel"},
    "route": {"route_kernel"},
}
OF_STEPS = {
    "route": {"route_kernel"},
    "experts_onto": {"tiny_up", "tiny_down"},
    "linears": {"linears_one"},
    "normed_linears": {"linears_one"},
    "rope_attention": {"rope_attention_short"},
}


def test_kernels_of_prompts_and_steps_are_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[PlanAhead, Any]] = []

    def begin(self: PlanAhead, call: Any, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)
        begun.append((self, call))

    monkeypatch.setattr(PlanAhead, "begin", begin)
    with absent_gpu():
        model = real.build("qwen3_moe", device="cuda", dtype=BF16, layers=1)
        lease = moe_ops.compile(model)._moe_ops_generation.decoder.lease(1, 144)
        ids = torch.full((1, 128), real.FIRST_PLAIN_TOKEN, device="cuda")
        lease.read(ids, use_cache=True)
        of_prompts = len(begun)
        lease.steps.run(lease.code)
    assert launched(begun[:of_prompts]) == OF_PROMPTS
    assert launched(begun[of_prompts:]) == OF_STEPS


@pytest.mark.every
def test_kernels_of_steps_in_codes_are_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm before them is in their launch."""
    begun: list[tuple[PlanAhead, Any]] = []
    monkeypatch.setattr(PlanAhead, "begin", lambda self, call, _: begun.append((self, call)))
    with absent_gpu():
        model = real.build("qwen3_moe", device="cuda", dtype=BF16, layers=1)
        for name, module in list(model.named_modules()):
            if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head"):
                replace_everywhere(model, module, made_of(module, "int4:1x32"))
        lease = moe_ops.compile(model)._moe_ops_generation.decoder.lease(1, 144)
        ids = torch.full((1, 128), real.FIRST_PLAIN_TOKEN, device="cuda")
        lease.read(ids, use_cache=True)
        begun.clear()
        lease.steps.run(lease.code)
    found = launched(begun)
    assert found["normed_quantized_linears"] == {"quantized_row"}
    assert found["normed_linears"] == {"linears_one"}


def launched(begun: list[tuple[PlanAhead, Any]]) -> dict[str, set[str]]:
    """The kernels of products, routers and attention by the op that would launch them."""
    found = defaultdict(set)
    with absent(90, Compiler()):
        for plan, call in begun:
            launches = collected(plan.calls(call)).launches
            found[plan._op.name] |= {kernel.fn.__name__ for kernel, _, _ in launches}
    sorts = {
        "sort_kernel", "sort_beside_tokens_kernel", "count_kernel", "add_up_kernel", "place_kernel",
        "_tile_map",
    }  # fmt: skip
    return {name: kernels - sorts for name, kernels in found.items()}


def test_that_of_an_op_that_writes_to_an_argument_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which is in the graph as a functional call."""
    begun: list[tuple[PlanAhead, Any]] = []
    monkeypatch.setattr(PlanAhead, "begin", lambda self, call, _: begun.append((self, call)))

    def add(a: Any, b: Any, ends: Any, sums: Any) -> Any:
        torch.ops.moe_ops.expert_wgrad_onto(a, b, ends, sums)
        return a + 1

    with absent_gpu(), torch.no_grad():
        given = [torch.zeros(9, n, dtype=BF16, device="cuda") for n in (64, 32)]
        ends = torch.zeros(4, dtype=torch.int32, device="cuda")
        compiled = torch.compile(add, options=moe_ops.inductor_options(), fullgraph=True)
        compiled(*given, ends, torch.zeros(4, 64, 32, device="cuda"))
    assert launched(begun) == {"expert_wgrad_onto": {"wgrad_kernel"}}
