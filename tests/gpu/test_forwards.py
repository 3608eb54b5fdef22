"""Forwards of compiled models on a CUDA GPU: captured, the callers' own, seen after changes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import moe_ops
from moe_ops.forward.layer_cache import CACHE
from moe_ops.graphs.cuda_graph import capture_call
from moe_ops.testing import BF16, TOL, Tol, assert_close
from tests.hf import families

pytestmark = pytest.mark.gpu
WHOLE = Tol(1e-4, "float32 sums in another order through a whole model")
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.inference_mode():
        yield


def twins(family: str) -> tuple[Any, Any, int]:
    model = families.build(family).model.cuda()
    return model, moe_ops.compile(model), model.config.get_text_config().vocab_size


def forwards_of(compiled: Any) -> Any:
    return compiled._compiled_call_impl.by_layers.forwards


def tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(3, vocabulary, shape, device="cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_give_what_the_model_gives_and_their_caches_go_on(family: str) -> None:
    model, fast, vocabulary = twins(family)
    for i in range(6):
        ids = tokens(vocabulary, 2, 37 + i % 3)  # which share a graph
        want, got = model(input_ids=ids), fast(input_ids=ids)
        assert_close(got.logits, want.logits, WHOLE, family)
        more = tokens(vocabulary, 2, 1 + i)
        want = model(input_ids=more, **{CACHE: want[CACHE]})
        got = fast(input_ids=more, **{CACHE: got[CACHE]})
        assert_close(got.logits, want.logits, WHOLE, family)
    served = [r for r in forwards_of(fast).report() if r.replays]
    assert [(r.batch, r.tokens) for r in served] == [(2, 40)] and served[0].replays == 3


def test_left_padding_is_captured_too() -> None:
    model, fast, vocabulary = twins("qwen3_moe")
    for i in range(6):
        ids, mask = tokens(vocabulary, 3, 24), torch.ones(3, 24, dtype=torch.int64, device="cuda")
        mask[0, : 5 + i], mask[1, :2] = 0, 0
        seen = mask.bool()
        got = fast(input_ids=ids, attention_mask=mask, use_cache=False).logits[seen]
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[seen]
        assert_close(got, want, WHOLE)
    assert [r.masked for r in forwards_of(fast).report() if r.replays] == [True]


def test_a_replay_has_the_bits_of_the_uncaptured_forward() -> None:
    model = families.build("qwen3_moe").model.cuda().to(BF16)
    fast, ids = moe_ops.compile(model), tokens(model.config.vocab_size, 2, 64)
    outs = [fast(input_ids=ids, use_cache=False).logits for _ in range(6)]
    assert forwards_of(fast).report()[-1].replays == 3
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_results_are_the_callers_and_replaced_weights_are_seen() -> None:
    model, fast, vocabulary = twins("qwen3_moe")
    calls = [tokens(vocabulary, 1, 16) for _ in range(8)]
    results = [fast(input_ids=ids).logits for ids in calls]
    for ids, got in zip(calls, results, strict=True):
        assert_close(got, model(input_ids=ids).logits, WHOLE)
    proj = model.model.layers[0].self_attn.q_proj
    changes = (
        lambda: proj.weight.mul_(1.5),
        lambda: setattr(proj.weight, "data", torch.randn_like(proj.weight) * 0.1),
        lambda: setattr(proj, "weight", nn.Parameter(torch.randn_like(proj.weight) * 0.1)),
        lambda: model.cpu() and model.cuda(),
    )
    for change in changes:
        change()
        for _ in range(5):
            ids = calls[0]
            assert_close(fast(input_ids=ids).logits, model(input_ids=ids).logits, WHOLE)


def test_random_sizes_compile_nothing_and_memory_stays_flat() -> None:
    _, fast, vocabulary = twins("qwen3_moe")
    sizes = random.Random(0)
    for shape in ((2, 7), (1, 1)):
        for use_cache in (True, False):
            fast(input_ids=tokens(vocabulary, *shape), use_cache=use_cache)
    compiled, reserved = counters["stats"]["unique_graphs"], []
    for i in range(600):
        shape = sizes.choice((1, 1, 2, 3, 8)), sizes.randint(1, 300)
        fast(input_ids=tokens(vocabulary, *shape), use_cache=bool(i % 2), logits_to_keep=1)
        if i in (299, 599):
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert counters["stats"]["unique_graphs"] == compiled
    assert reserved[1] <= 1.02 * reserved[0] + 2**22


def test_threads_and_streams_get_their_own_results() -> None:
    model, fast, vocabulary = twins("qwen3_moe")
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(8):
                ids = torch.randint(3, vocabulary, (1, 32), device="cuda", generator=generator)
                got, want = fast(input_ids=ids).logits, model(input_ids=ids).logits
                if not torch.allclose(got, want, rtol=1e-3, atol=1e-4):
                    wrong.append(f"thread {seed}: {(got - want).abs().max()}")

    fast(input_ids=tokens(vocabulary, 1, 32))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_callers_own_capture_records_the_forward() -> None:
    model, fast, vocabulary = twins("qwen3_moe")
    ids = tokens(vocabulary, 1, 16)
    fast(input_ids=ids, use_cache=False)
    made = capture_call(lambda: fast(input_ids=ids, use_cache=False).logits)
    for _ in range(3):
        ids.copy_(tokens(vocabulary, 1, 16))
        made.replay()
        assert_close(made.output, model(input_ids=ids, use_cache=False).logits, WHOLE)


class Stack(nn.Module):
    """Two MoE layers of one's own, with a router each, that count their calls."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 64}
        self.layers = nn.ModuleList(moe_ops.MoELayer(**sizes) for _ in range(2))
        self.routers = nn.ModuleList(nn.Linear(128, 8) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer, router in zip(self.layers, self.routers, strict=True):
            x = x + layer(x, router(x))
        return x


def test_any_module_is_captured_by_the_backend() -> None:
    with torch.inference_mode(False), torch.no_grad():
        stack = Stack()
        for p in stack.parameters():
            p.normal_(0, 0.1)
        stack = stack.cuda().eval()
        backend = moe_ops.backend(capture=True, strict=True)
        fast = torch.compile(stack, backend=backend)
        done = [(x, fast(x)) for x in (torch.randn(20, 128, device="cuda") for _ in range(7))]
        assert stack.calls == 7
        for x, got in done:
            assert_close(got, stack(x), TOL["moe", torch.float32])
        (report,) = backend.report()
        assert (report.calls, report.replays, report.refusal) == (7, 4, None)
        stack.routers[0].weight.data = torch.randn(8, 128, device="cuda")
        x = torch.randn(20, 128, device="cuda")
        assert_close(fast(x), stack(x), TOL["moe", torch.float32])
