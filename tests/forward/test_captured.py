"""Forwards whose sizes come again: captured by a stand-in, they give what they give uncaptured."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from moe_ops.forward import captured
from moe_ops.forward.calls import (
    bucket_of,
)
from moe_ops.forward.inputs import unlike
from moe_ops.forward.layer_cache import CACHE
from moe_ops.graphs import runner
from moe_ops.graphs.cuda_graph import CaptureError, capture_call
from moe_ops.graphs.runner import TIMES
from moe_ops.testing import assert_close
from tests.chosen import in_turn
from tests.forward.layered import MODEL, Layered, left_padded, tokens
from tests.hf import families


@pytest.fixture
def qwen() -> Layered:
    return Layered(families.build("qwen3_moe").model)


def report(run: Layered) -> list[tuple[Any, ...]]:
    return [(r.batch, r.tokens, r.masked, r.replays, r.refusal) for r in run.forwards.report()]


@in_turn(
    pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"]),
    pytest.mark.parametrize("attention", ["sdpa", "eager"]),
)
def test_a_size_that_comes_again_is_replayed(family: str, attention: str) -> None:
    model = families.build(family).model
    if attention not in ("eager", model.config._attn_implementation):
        pytest.skip(f"{family} has no {attention}")
    model.set_attn_implementation(attention)
    run = Layered(model)
    for seed in range(TIMES + 2):
        run(input_ids=tokens(3, 11, seed), use_cache=False)
        run(input_ids=tokens(3, 11, seed), attention_mask=left_padded(3, 11, seed, 0, 5))
        assert run.graphs.captures == 2 * (seed + 1 >= TIMES)
        assert run.graphs.replayed == 2 * max(0, seed + 1 - TIMES)
    assert report(run) == [(3, 11, False, 2, None), (3, 11, True, 2, None)]
    assert run.whole == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_cache_of_a_graph_can_be_continued(family: str) -> None:
    run = Layered(families.build(family).model)
    for seed in range(TIMES + 1):
        out = run(input_ids=tokens(2, 23, seed), use_cache=True)
    assert run.graphs.replayed == 1
    for S in (3, 1, 40, 1):
        out = run(input_ids=tokens(2, S, S), **{CACHE: out[CACHE]})
    given = DynamicCache(config=run.model.config)
    out = run(input_ids=tokens(2, 23), **{CACHE: given})
    assert run.graphs.replayed == 2 and given.get_seq_length() == 23


def test_outputs_are_the_callers(qwen: Layered) -> None:
    for seed in range(TIMES):
        qwen(input_ids=tokens(2, 7, seed))
    with torch.no_grad():
        outs = [qwen.twin(tokens(2, 7, seed)) for seed in range(2)]
        kept = [[x.clone() for x in tensors(out)] for out in outs]
        qwen.twin(tokens(2, 7, 9))
        outs[0].logits.zero_()
        outs[0][CACHE].layers[0].keys.zero_()
        qwen(input_ids=tokens(2, 7, 0))
    assert qwen.graphs.replayed == 4
    assert all(map(torch.equal, tensors(outs[1]), kept[1]))
    places = [x.untyped_storage().data_ptr() for out in outs for x in tensors(out)]
    assert len(set(places[: len(places) // 2]) & set(places[len(places) // 2 :])) == 0


def tensors(out: Any) -> list[Tensor]:
    return [out.logits, *(x for layer in out[CACHE].layers for x in (layer.keys, layer.values))]


def test_sizes_share_padded_graphs(qwen: Layered) -> None:
    for S in (17, 18, 18, 17, 18, 17):  # both are padded to 18
        qwen(input_ids=tokens(2, S, S))
    assert report(qwen) == [(2, 18, False, 3, None)]
    lengths = [bucket_of(S) for S in (1, 2, 15, 16, 17, 18, 31, 33, 63, 65, 1000, 4096)]
    assert lengths == [1, 2, 15, 16, 18, 18, 32, 36, 64, 72, 1024, 4096]
    assert all(S <= bucket_of(S) <= S + max(0, S - 1) // 8 for S in range(1, 5000))


def test_a_graph_gives_what_the_padded_forward_gives(qwen: Layered) -> None:
    """Bit for bit, but for how many tokens a product has at once."""
    for seed in range(TIMES + 1):
        out = qwen(input_ids=tokens(2, 17, seed))
    ids = torch.zeros(2, 18, dtype=torch.long)
    ids[:, :17] = tokens(2, 17, TIMES)
    with torch.no_grad():
        padded = Layered(qwen.model).twin(ids)
    assert_close(out.logits, padded.logits[:, :17], MODEL)
    for a, b in zip(out[CACHE].layers, padded[CACHE].layers, strict=True):
        assert torch.equal(a.keys, b.keys[:, :, :17]) and torch.equal(a.values, b.values[:, :, :17])


def test_a_window_of_a_padded_size() -> None:
    """Where padding alone reaches over the window, layers get a mask that hides nothing else."""
    model = families.build("gpt_oss").model
    window = model.config.sliding_window
    run = Layered(model)
    for S in (window - 1, window, window + 1, 5 * window - 1):
        for seed in range(TIMES + 1):
            out = run(input_ids=tokens(2, S, seed))
        run(input_ids=tokens(2, 1), **{CACHE: out[CACHE]})
    assert not [r.refusal for r in run.forwards.report() if r.refusal]


def test_other_addresses_drop_the_graphs(qwen: Layered) -> None:
    for _ in range(TIMES + 1):
        qwen(input_ids=tokens(2, 7))
    with torch.no_grad():
        qwen.model.lm_head.weight.mul_(-1)  # in place, which a graph sees
    qwen(input_ids=tokens(2, 7))
    assert report(qwen) == [(2, 7, False, 2, None)]
    up = qwen.model.model.layers[0].mlp.experts.gate_up_proj
    up.data = up.data.clone().neg_()
    qwen(input_ids=tokens(2, 7))
    assert report(qwen) == [(2, 7, False, 0, None)]
    for _ in range(TIMES):
        qwen(input_ids=tokens(2, 7))
    assert report(qwen) == [(2, 7, False, 1, None)] and qwen.graphs.captures == 2


def test_a_failed_capture_is_logged_and_not_tried_again(
    qwen: Layered, caplog: pytest.LogCaptureFixture
) -> None:
    qwen.graphs.errors = [CaptureError("a host sync")]
    with caplog.at_level(logging.WARNING, "moe_ops"):
        for _ in range(TIMES + 2):
            qwen(input_ids=tokens(2, 7))
    assert caplog.messages[-1:] == ["forwards of 2 x 7 run uncaptured: a host sync"]
    assert report(qwen) == [(2, 7, False, 0, "a host sync")] and not qwen.forwards.graphs
    for _ in range(TIMES):
        qwen(input_ids=tokens(2, 8))
    assert qwen.forwards.graphs == 1


def test_other_errors_of_a_capture_are_raised(qwen: Layered) -> None:
    qwen.graphs.errors = [ZeroDivisionError()]
    for _ in range(TIMES - 1):
        qwen(input_ids=tokens(2, 7))
    with pytest.raises(ZeroDivisionError):
        qwen(input_ids=tokens(2, 7))
    qwen(input_ids=tokens(2, 7))
    assert qwen.forwards.graphs == 1


def test_out_of_memory_drops_the_graphs(qwen: Layered, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(TIMES):
        qwen(input_ids=tokens(2, 7))
        given = DynamicCache(config=qwen.model.config)
        if _ < TIMES - 1:
            qwen(input_ids=tokens(2, 9), **{CACHE: given})
    assert qwen.forwards.graphs == 1
    qwen.graphs.errors = [torch.OutOfMemoryError("no room")]
    given = DynamicCache(config=qwen.model.config)
    with caplog.at_level(logging.WARNING, "moe_ops"):
        qwen(input_ids=tokens(2, 9), **{CACHE: given})
    assert "out of memory, so the graphs of forwards are dropped" in caplog.messages
    assert qwen.forwards.graphs == 0 and given.get_seq_length() == 9
    qwen.graphs.errors = [torch.OutOfMemoryError("no room")]
    for _ in range(TIMES - 2):
        qwen(input_ids=tokens(2, 9))
    with pytest.raises(torch.OutOfMemoryError):  # there is nothing to drop
        qwen(input_ids=tokens(2, 9))


def test_the_sizes_that_came_last_are_kept(qwen: Layered, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.MOST_SIZES == 48
    monkeypatch.setattr(runner, "MOST_SIZES", 2)
    for _ in range(TIMES + 1):
        for S in (6, 5):
            qwen(input_ids=tokens(1, S))
    assert [r[1] for r in report(qwen)] == [6, 5] and qwen.forwards.graphs == 2
    qwen(input_ids=tokens(1, 7))
    assert [r[1] for r in report(qwen)] == [5, 7] and qwen.forwards.graphs == 1
    made = qwen.graphs.captures
    for _ in range(2 * TIMES):  # more than are kept take turns
        for S in (5, 6, 7):
            qwen(input_ids=tokens(1, S))
    assert qwen.graphs.captures == made and qwen.forwards.graphs == 0


def test_graphs_of_a_model_share_memory(qwen: Layered) -> None:
    for _ in range(TIMES):
        for S in (9, 5):
            qwen(input_ids=tokens(1, S))
    assert len(qwen.graphs.memory) >= 2
    assert len({id(pool) for pool, _ in qwen.graphs.memory}) == 1


def test_buffers_that_grow_make_others_capture_again(qwen: Layered) -> None:
    for _ in range(TIMES + 1):
        qwen(input_ids=tokens(1, 5))
    for _ in range(TIMES + 1):
        qwen(input_ids=tokens(4, 64))
    assert qwen.graphs.captures == 2
    for _ in range(2):
        qwen(input_ids=tokens(1, 5))
    assert qwen.graphs.captures == 3
    qwen(input_ids=tokens(4, 64))
    assert qwen.graphs.captures == 3


def test_calls_that_no_graph_repeats_give_the_same(qwen: Layered) -> None:
    ids = tokens(2, 7)
    embedded = qwen.model.get_input_embeddings()(ids).detach()
    for _ in range(TIMES + 1):
        qwen(input_ids=ids, position_ids=torch.arange(3, 10)[None])
        qwen(inputs_embeds=embedded)
    assert qwen.graphs.captures == 0
    assert qwen.forwards.refused == {
        "it takes position_ids, too": TIMES + 1,
        "it has no input_ids [sequences, tokens]": TIMES + 1,
    }
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for _ in range(TIMES + 1):
            assert qwen.twin(ids).logits.dtype == torch.bfloat16
    assert qwen.graphs.captures == 0 and qwen.whole == 0


def test_heads_run_behind_a_graph(qwen: Layered) -> None:
    ids = tokens(2, 17)
    for keep in (0, 1, 3, torch.tensor([2, 6])):
        qwen(input_ids=ids, logits_to_keep=keep)
    assert qwen(input_ids=ids, labels=ids).loss is not None
    assert qwen.graphs.captures == 1 and qwen.graphs.replayed == 2


def test_one_attention_a_graph(qwen: Layered) -> None:
    for _ in range(TIMES + 1):
        qwen(input_ids=tokens(2, 7))
    before = qwen.model.config._attn_implementation
    qwen.model.config._attn_implementation = "eager"
    qwen(input_ids=tokens(2, 7))
    assert qwen.graphs.replayed == 1
    qwen.model.config._attn_implementation = before
    qwen(input_ids=tokens(2, 7))
    assert qwen.graphs.replayed == 2


def test_layers_that_get_another_mask_are_not_captured(
    qwen: Layered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = captured.masks_of

    def masks(*args: Any) -> Any:
        mask = made(*args)
        return None if mask is None else mask.logical_not()

    monkeypatch.setattr(captured, "masks_of", masks)
    for seed in range(TIMES + 1):
        qwen(input_ids=tokens(2, 7, seed), attention_mask=left_padded(2, 7, 1 + seed))
    reason = "padded their layers get another attention_mask"
    assert report(qwen) == [(2, 7, True, 0, reason)]
    assert f"forwards of 2 x 7 run uncaptured: {reason}" in caplog.messages


def test_layers_that_fail_on_padding_are_not_captured(
    qwen: Layered, monkeypatch: pytest.MonkeyPatch
) -> None:
    def masks(*args: Any) -> Any:
        return {"hybrid": None}["causal"]

    monkeypatch.setattr(captured, "masks_of", masks)
    for seed in range(TIMES + 1):
        qwen(input_ids=tokens(2, 7, seed))
    assert report(qwen) == [(2, 7, False, 0, "padded they fail: KeyError('causal')")]


def test_what_is_alike_but_for_padding() -> None:
    tril = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    x = torch.randn(2, 6, 8)
    plain = [{"mask": None, "cos": x[:, :5], "ids": torch.arange(5)[None]}]

    def changed(**more: Any) -> str | None:
        padded = {"mask": tril, "cos": x, "ids": torch.arange(6)[None], **more}
        return unlike([padded], plain)

    assert changed() is None and changed(mask=None) is None
    assert changed(mask=tril.logical_not()) == "mask"
    assert changed(cos=x + 1) == "cos" and changed(cos=x.double()) == "cos"
    assert changed(cos=x[:, :4]) == "cos" and changed(cos=None) == "cos"
    assert changed(ids=torch.arange(6)[None] + 1) == "ids"
    assert changed(more=x) == "more"
    assert unlike([], plain) == "0 layers in place of 1"


def test_without_a_gpu_nothing_is_captured() -> None:
    run = Layered(families.build("qwen3_moe").model, capture_call)
    for _ in range(TIMES + 1):
        run(input_ids=tokens(2, 7))
    assert report(run) == []
    assert run.forwards.refused == {"there is no CUDA GPU to capture on": TIMES + 1}
