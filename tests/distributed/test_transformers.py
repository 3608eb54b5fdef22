"""transformers' models with experts over ranks give the tokens of one process."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.testing import TOL, assert_close
from tests.distributed.ranks import fake_group, processes

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
    "vocab_size": 64,
}  # fmt: skip
CLOSE = TOL["model", torch.float32]


def make(family: str, sizes: dict[str, Any] = SIZES) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if family == "gpt_oss":
        sizes = {k: v for k, v in sizes.items() if k != "moe_intermediate_size"}
        return GptOssForCausalLM(GptOssConfig(**{**sizes, "num_local_experts": 4})).eval()
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=8, norm_topk_prob=True)).eval()


def generated(model: Any, ids: Tensor) -> Tensor:
    return model.generate(
        ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )  # fmt: skip


def shared(rank: int, group: str) -> None:
    """Models of two families, whose experts lie by rows and by columns, in each way."""
    import moe_ops

    for family in ("qwen3_moe", "gpt_oss"):
        whole = make(family)
        ids = torch.randint(64, (4, 5))
        want = whole(ids).logits
        tokens = generated(whole, ids)
        ways = [{"tokens": "own", "collective": c} for c in ("gather", "auto", "exchange")]
        for how in ({}, *ways):
            model = moe_ops.share_experts(copy.deepcopy(whole), group, **how)
            mine = slice(None) if not how else slice(2 * rank, 2 * rank + 2)
            assert_close(model(ids[mine]).logits, want[mine], CLOSE, f"{family} {how}")
            assert torch.equal(generated(model, ids[mine]), tokens[mine])
            held = sum(p.numel() for n, p in model.named_parameters() if "experts" in n)
            assert 2 * held == sum(p.numel() for n, p in whole.named_parameters() if "experts" in n)
        mine = ids[: 1 + rank, : 3 + rank]  # an exchange takes other numbers of tokens on each
        assert_close(model(mine).logits, whole(mine).logits, CLOSE, f"{family} uneven")
        with pytest.raises(ValueError, match="is shared as Over"):
            moe_ops.share_experts(model, group)


WIDE = {**SIZES, "hidden_size": 64, "moe_intermediate_size": 64}
IN_CODES = {
    "int8_w8a16": {"weight_format": "int8:row"},
    "mxfp4_w4a16": {},
    "fp8_w8a8": {"weight_format": "float8_e4m3fn:row", "input_format": "float8_e4m3fn:row"},
    "nvfp4_w4a4": {},
}


def in_codes(rank: int, group: str) -> None:
    """A model that is shared, and then quantised, against the whole model in the same format."""
    import moe_ops

    whole = make("qwen3_moe", WIDE)
    ids = torch.randint(64, (4, 5))
    for scheme, formats in IN_CODES.items():
        quantized = copy.deepcopy(whole)
        moe_ops.quantize_model(quantized, scheme, **formats, progress=False)
        want = quantized(ids).logits
        for how, mine in (({}, slice(None)), ({"tokens": "own"}, slice(2 * rank, 2 * rank + 2))):
            model = moe_ops.share_experts(copy.deepcopy(whole), group, **how)
            report = moe_ops.quantize_model(model, scheme, **formats, progress=False)
            assert report.modules == 2 and not report.kept
            assert_close(model(ids[mine]).logits, want[mine], CLOSE, f"{scheme} {how}")
            assert not torch.equal(want, whole(ids).logits)
    with pytest.raises(ValueError, match="its weights are quantised; share the model first"):
        moe_ops.share_experts(quantized, group)


def by_transformers(rank: int, group: str) -> None:
    """transformers' plan of expert parallelism, which runs our implementation of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    import moe_ops.hf  # noqa: F401  registers it

    whole = make("qwen3_moe")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    plan: dict[str, str] = {}
    for i in range(2):
        name = f"model.layers.{i}.mlp.experts"
        plan |= {name: "ep_dispatch_experts", f"{name}.gate_up_proj": "grouped_gemm"}
        plan |= {f"{name}.down_proj": "grouped_gemm"}
    ids = torch.randint(64, (4, 5))
    # Ranks of one batch, and of a batch each: tensor parallel groups of two and of one.
    for tp, mine in (("two", slice(None)), ("one", slice(2 * rank, 2 * rank + 2))):
        model = apply_expert_parallelism(
            copy.deepcopy(whole), mesh["two"], mesh[tp], dict(plan), ep_implementation="moe_ops"
        )
        got = model(ids[mine]).logits
        assert_close(got, whole(ids[mine]).logits, CLOSE, tp)


def uncompiled(rank: int, group: str) -> None:
    """One after the other, as to import transformers takes longer than any."""
    shared(rank, group)
    in_codes(rank, group)
    if has_registry():
        by_transformers(rank, group)


def has_registry() -> bool:
    """Whether this transformers has one of expert-parallel implementations."""
    if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:
        return False
    module = importlib.import_module("transformers.distributed.expert_parallel")
    return hasattr(module, "EPImplementationInterface")


def compiled(rank: int, group: str) -> None:
    """Our `generate`, by compiled steps, of a model with shared experts. Each layer is one graph,
    or no pass sees the router and the experts together."""
    from torch._dynamo.utils import counters

    import moe_ops

    whole, ids = make("qwen3_moe"), torch.randint(64, (4, 5))
    tokens = generated(whole, ids)
    for how, mine in (({}, slice(None)), ({"tokens": "own"}, slice(2 * rank, 2 * rank + 2))):
        fast = moe_ops.compile(moe_ops.share_experts(copy.deepcopy(whole), group, **how))
        assert torch.equal(generated(fast, ids[mine]), tokens[mine])
        assert moe_ops.generation_report(fast), "it fell back to transformers' own"
        assert not counters["graph_break"]


@pytest.mark.parametrize(
    "body",
    [uncompiled, pytest.param(compiled, marks=[pytest.mark.slow, pytest.mark.every])],
    ids=lambda body: body.__name__,
)
def test_two_processes_give_what_one_gives(body: Any, tmp_path: Path) -> None:
    processes(2, tmp_path, body)


def test_what_cannot_be_shared_is_refused_and_left_as_it_was() -> None:
    import moe_ops

    model = make("qwen3_moe")
    before = {n: p.shape for n, p in model.named_parameters()}
    with fake_group(3) as group:
        with pytest.raises(ValueError, match="8 experts, which do not divide among the 3 ranks"):
            moe_ops.share_experts(model, group)
        with pytest.raises(ValueError, match="group='mine' names no process group"):
            moe_ops.share_experts(model, "mine")
        with pytest.raises(ValueError, match="tokens='all' is unknown"):
            moe_ops.share_experts(model, group, tokens="all")
    with fake_group(2) as group:
        with pytest.raises(ValueError, match="collective='push' needs a model on cuda, got cpu"):
            moe_ops.share_experts(model, group, collective="push")
        assert model.model.layers[0].mlp.experts.down_proj.shape[0] == 8
    with fake_group(2) as group:
        model.model.layers[1].mlp.experts.gate_up_proj.data = torch.zeros(1, dtype=torch.float64)
        with pytest.raises(
            ValueError, match=r"layers\.1\.mlp\.experts .* weights are torch.float64"
        ):
            moe_ops.share_experts(model, group)
    assert {n: p.shape for n, p in model.named_parameters() if "layers.1" not in n} == {
        n: shape for n, shape in before.items() if "layers.1" not in n
    }


def test_a_model_without_memory_is_shared_before_it_is_made() -> None:
    import moe_ops

    with torch.device("meta"):
        model = make("qwen3_moe")
    with fake_group(2) as group:
        moe_ops.share_experts(model, group)
        model.to_empty(device="cpu")
        moe_ops.share_experts(model, group)
    experts = model.model.layers[0].mlp.experts
    assert experts.down_proj.shape == (4, 32, 16)
    assert experts._moe_ops_slot_of.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
