"""`generate` by captured steps: the tokens of transformers, no recompilation, no growth."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from transformers.models.gpt_oss import modeling_gpt_oss

import moe_ops
from moe_ops.decode_ops.linears import linears
from moe_ops.decode_ops.one_query import one_query
from moe_ops.generation.one_query import in_place_of
from tests.gpu.captures import captured
from tests.hf import families, overrides, twins

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
PLAIN = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}


def pair(family: str) -> tuple[Any, Any]:
    model = families.build(family).model.cuda()
    return model, moe_ops.compile(model)


def check(model: Any, twin: Any, ids: Tensor, **kwargs: Any) -> None:
    twins.check(model, twin, ids, **{**PLAIN, **kwargs})


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "deepseek_v3"])
def test_tokens_are_those_of_transformers(family: str) -> None:
    model, twin = pair(family)
    ids = torch.randint(16, 90, (3, 9), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    check(model, twin, ids)
    check(model, twin, ids[:1, :4])
    check(model, twin, ids, attention_mask=mask)
    check(model, twin, ids, num_beams=2)
    check(model, twin, ids, repetition_penalty=1.5)
    check(model, twin, torch.randint(16, 90, (1, 255), device="cuda"), max_new_tokens=2)
    assert all(report.captured for report in moe_ops.generation_report(twin))


def test_transposed_experts_are_stored_by_rows_at_the_first_call() -> None:
    model = families.build("gpt_oss").model.to("cuda", torch.bfloat16)
    stock, twin = copy.deepcopy(model), moe_ops.compile(model)
    weights = [p for name, p in model.named_parameters() if name.endswith("experts.down_proj")]
    ids = torch.randint(16, 90, (2, 5), device="cuda")
    before = [weight.data_ptr() for weight in weights]
    for _ in range(2):
        twin.generate(ids, **PLAIN)
        assert all(weight.transpose(1, 2).is_contiguous() for weight in weights)
    assert before != [weight.data_ptr() for weight in weights]
    assert all(report.captured for report in moe_ops.generation_report(twin))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [256, 512, 2048, 8192])
def test_attention_of_one_query_is_compiled_without_a_break(slots: int, dtype: torch.dtype) -> None:
    from moe_ops.generation.one_query import one_query_attention, register

    register()
    q = torch.randn(2, 32, 1, 128, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, 4, slots, 128, device="cuda", dtype=dtype) for _ in range(2))
    mask = torch.zeros(2, 1, 1, slots, dtype=torch.bool, device="cuda")
    mask[0, ..., :70] = True
    mask[1, ..., 3:200] = True
    module = torch.nn.Module()

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return one_query_attention(module, q, k, v, mask, scaling=128**-0.5)[0] * 2

    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(),
        k.double().repeat_interleave(8, 1),
        v.double().repeat_interleave(8, 1),
        attn_mask=mask,
    )
    with torch.no_grad():
        compiled = torch.compile(attention, fullgraph=True)
        got, (code,) = run_and_get_code(compiled, q, k, v, mask)
    assert code.count("moe_ops.one_query.default(") == 1
    got = got / 2
    tol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.transpose(1, 2).double(), want, rtol=tol, atol=tol)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe_swa", "mixtral"])
@pytest.mark.parametrize("prompt", [9, 1100])
def test_tokens_by_the_attention_kernels(
    family: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads large enough for them, shared out to several programs or not."""
    for name, size in (("head_dim", 16), ("hidden_size", 64)):
        monkeypatch.setitem(overrides.SIZES, name, size)
    model, twin = pair(family)
    ids = torch.randint(16, 90, (2, prompt), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    check(model, twin, ids, attention_mask=mask)


# Sequences, heads of the cache, queries for each, head size, slots, and how many of them are used.
SHAPES = [
    (1, 4, 8, 128, 256, 190),
    (3, 2, 5, 64, 256, 256),
    (1, 8, 8, 64, 1024, 700),
    (8, 4, 8, 128, 1024, 700),
    (2, 1, 17, 256, 2048, 1),
    (40, 8, 4, 128, 4096, 3000),
    (1, 8, 8, 64, 12288, 9000),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_with_sinks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compiled without a break, by our kernels, the same in every run and every replay, whatever is
    behind the last slot in use."""
    B, N, group, D, slots, used = shape
    eager = modeling_gpt_oss.eager_attention_forward
    step = in_place_of(eager)
    module = torch.nn.Module()
    module.sinks = torch.nn.Parameter(torch.randn(N * group, device="cuda", dtype=dtype))
    module.num_key_value_groups = group
    q = torch.randn(B, N * group, 1, D, device="cuda", dtype=dtype)
    k, v = (torch.randn(B, N, slots, D, device="cuda", dtype=dtype) for _ in range(2))
    mask = torch.full((B, 1, 1, slots), torch.finfo(dtype).min, device="cuda", dtype=dtype)
    mask[..., max(0, used - 300) : used] = 0  # a window
    mask[0, ..., : used - 1] = torch.finfo(dtype).min

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        call = {"scaling": D**-0.5, "s_aux": module.sinks, "sliding_window": 300}
        return step(module, q, k, v, mask, **call)[0] * 2

    with torch.no_grad():
        double = copy.deepcopy(module).double()
        exact = mask.double().masked_fill(mask != 0, torch.finfo(torch.float64).min)
        want = eager(double, q.double(), k.double(), v.double(), exact, scaling=D**-0.5)[0]
        k[:, :, used:] = v[:, :, used:] = float("nan")
        compiled = torch.compile(attention, fullgraph=True)
        first, (code,) = run_and_get_code(compiled, q, k, v, mask)
        graph, out = captured(lambda: compiled(q, k, v, mask))
        graph.replay()
        again = compiled(q, k, v, mask)
    assert code.count("moe_ops.one_query.default(") == 1
    tol = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(first.double() / 2, want, rtol=tol, atol=tol)
    assert torch.equal(out, first) and torch.equal(again, first)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("slots", [256, 4096])
def test_attention_that_begins_while_launches_before_it_end(slots: int) -> None:
    """In a graph, between launches that write what it reads and read what it writes."""
    H, N, D, layers = 32, 4, 128, 12
    make: Any = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(H * D, H * D, **make) / 64 for _ in range(layers)]
    caches = [torch.randn(2, 1, N, slots, D, **make) for _ in range(layers)]
    mask = torch.ones(1, slots, dtype=torch.bool, device="cuda")
    x = torch.randn(1, H * D, **make)

    def chain(x: Tensor, pause: Callable[[], None]) -> Tensor:
        for w, (k, v) in zip(weights, caches, strict=True):
            (x,) = linears(x, [w], [None])
            pause()
            x = one_query(x.view(1, H, D), k, v, mask, 1.0).view(1, H * D)
            pause()
        return x

    chain(x, torch.cuda.synchronize)
    graph, out = captured(lambda: chain(x, lambda: None))
    for _ in range(20):
        x.copy_(4 * torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, chain(x, torch.cuda.synchronize))


def test_ends_are_found_though_they_are_checked_late() -> None:
    model, twin = pair("qwen3_moe")
    ids = torch.randint(16, 90, (2, 9), device="cuda")
    tokens = model.generate(ids, **PLAIN)
    for column in range(9, tokens.shape[1]):
        check(model, twin, ids, eos_token_id=tokens[:, column].tolist())


def test_other_streams_and_modes() -> None:
    model, twin = pair("qwen3_moe")
    ids = torch.randint(16, 90, (2, 9), device="cuda")
    check(model, twin, ids)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        check(model, twin, ids)
    check(model, twin, ids + 1)


def test_a_model_that_is_moved_after_it_was_compiled() -> None:
    model = families.build("qwen3_moe").model
    twin = moe_ops.compile(model)
    ids = torch.randint(16, 90, (2, 9))
    check(model, twin, ids)
    model.cuda()
    check(model, twin, ids.cuda())
    (report,) = moe_ops.generation_report(twin)
    assert report.captured


def test_replaced_weights() -> None:
    model, twin = pair("qwen3_moe")
    ids = torch.randint(16, 90, (2, 9), device="cuda")
    check(model, twin, ids)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    check(model, twin, ids)
    model.lm_head.weight.data = model.lm_head.weight.data.clone().neg_()
    check(model, twin, ids)


class Synchronizing(nn.Module):
    """Reads a value on the host, which no capture allows."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        float(x.sum())
        out: Tensor = self.norm(x)
        return out


def test_a_model_that_cannot_be_captured_says_so_and_generates(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, twin = pair("qwen3_moe")
    model.model.norm = Synchronizing(model.model.norm)
    ids = torch.randint(16, 90, (2, 9), device="cuda")
    with caplog.at_level(logging.WARNING, "moe_ops"):
        check(model, twin, ids)
        check(model, twin, ids)
    assert sum("run uncaptured" in r.getMessage() for r in caplog.records) == 1
    assert torch.rand(4, device="cuda").sum().item() > 0


def test_nothing_grows_and_nothing_is_compiled_after_the_warm_up() -> None:
    _, twin = pair("qwen3_moe")
    rng = random.Random(0)

    def some() -> None:
        shape = (rng.randint(1, 8), rng.randint(1, 100))
        twin.generate(torch.randint(16, 90, shape, device="cuda"), **PLAIN)

    for _ in range(3):  # until prompts are captured
        for rows in (1, 2, 4, 8):
            for length in (1, 50, 100):
                twin.generate(torch.randint(16, 90, (rows, length), device="cuda"), **PLAIN)
    for _ in range(20):
        some()
    torch.cuda.synchronize()
    counters.clear()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(60):
        some()
    torch.cuda.synchronize()
    assert counters["stats"]["unique_graphs"] == 0
    assert torch.cuda.memory_allocated() <= before[0]
    assert torch.cuda.memory_reserved() <= before[1] + (2 << 20)


def prompts_of(twin: Any) -> tuple[int, int]:
    """The graphs of prompts that are kept, and the prompts that they served."""
    reports = moe_ops.generation_report(twin)
    return sum(r.prompt_graphs for r in reports), sum(r.prompts_replayed for r in reports)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "deepseek_v3"])
def test_prompts_of_sizes_that_come_again_are_captured(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without anything compiled for it, and with transformers' tokens, at first, when captured and
    when replayed; in between come other sizes, masks, and weights."""
    model, twin = pair(family)
    generator = torch.Generator().manual_seed(0)  # of its own, as `check` sets the seed

    def tokens(rows: int, length: int) -> Tensor:
        return torch.randint(16, 90, (rows, length), generator=generator).cuda()

    def every_size() -> None:
        for rows, length in ((3, 9), (1, 9), (4, 40), (1, 1), (1, 300)):
            ids = tokens(rows, length)
            check(model, twin, ids)
            if length > 1:
                mask = torch.ones_like(ids)
                mask[0, : int(torch.randint(1, length, (), generator=generator))] = 0
                check(model, twin, ids, attention_mask=mask)
        check(model, twin, tokens(2, 9), num_beams=2)

    with caplog.at_level(logging.WARNING, "moe_ops"):
        for time in range(6):
            if time == 2:
                counters.clear()
            every_size()
            assert prompts_of(twin) == (10 * (time >= 2), 10 * max(0, time - 1))
    assert counters["stats"]["unique_graphs"] == 0
    assert not caplog.records
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        every_size()
    model.lm_head.weight.data = model.lm_head.weight.data.clone().neg_()
    every_size()
    assert prompts_of(twin) == (0, 50)
    for _ in range(3):
        every_size()
    assert prompts_of(twin) == (10, 70)
    assert all(report.captured for report in moe_ops.generation_report(twin))


def test_graphs_of_prompts_share_memory() -> None:
    """Each needs some MB for itself; all together need little more than the largest."""
    _, twin = pair("qwen3_moe")

    def some(lengths: range) -> int:
        for length in lengths:
            for _ in range(4):
                twin.generate(torch.randint(16, 90, (4, length), device="cuda"), **PLAIN)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    largest = some(range(1000, 1001))
    assert some(range(980, 990)) <= largest + (20 << 20)
    assert prompts_of(twin) == (11, 22)
    allocated = torch.cuda.memory_allocated()
    reserved = some(range(980, 990))
    assert prompts_of(twin) == (11, 62)
    assert torch.cuda.memory_allocated() <= allocated
    assert some(range(1000, 1001)) <= reserved


def test_continuous_batching() -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = families.build("qwen3_moe").model.cuda()
    ids = torch.randint(16, 90, (3, 9), device="cuda")
    config = GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=1)
    want = [model.generate(row[None], generation_config=config)[0, 9:] for row in ids]
    twin = moe_ops.compile(model)
    blocks = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)
    with torch.no_grad():
        out = twin.generate_batch(
            ids.tolist(), generation_config=config, continuous_batching_config=blocks
        )
    assert [r.generated_tokens for r in out.values()] == [w.tolist() for w in want]
