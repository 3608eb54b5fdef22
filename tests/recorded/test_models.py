"""Routings of models recorded and replayed: uncompiled, and in `generate` by a stand-in for
captures."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import RecordedRouting
from moe_ops.testing import TOL, assert_close
from tests.hf import families
from tests.hf.twins import PLAIN, twin_of
from tests.recorded.records import Chosen, random_record

QUICK = ("qwen3_moe", "deepseek_v3", "gpt_oss", "deepseek_v4", "phimoe")
DIVIDED = "ernie4_5_vl_moe"  # whose layers divide tokens among two modules of experts
EACH = [
    pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow, pytest.mark.every])
    for family in families.discover()
    if family != DIVIDED
]
F32 = torch.float32


def tiny(family: str = "qwen3_moe") -> Any:
    return families.build(family).model


def text(batch: int, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, 90, (batch, tokens), generator=generator)


def record_of(model: nn.Module) -> RecordedRouting:
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        model(text(2, 3))
    return recording.take()


def others(record: RecordedRouting) -> RecordedRouting:
    """Experts that no router would choose, other ones for each token."""
    ids = (record.ids_TLK + 1) % record.num_experts
    return dataclasses.replace(record, ids_TLK=ids)


@pytest.mark.parametrize("family", EACH)
def test_what_is_recorded_is_what_experts_are_given(family: str) -> None:
    made = families.build(family)
    want = families.run(made, made.inputs)
    with moe_ops.record_routing(made.model, weights=True) as recording:
        chosen = Chosen(made.model)
        got = families.run(made, made.inputs)
    record = recording.take()
    assert torch.equal(got, want)
    assert record.calls == ((2, 7),)
    assert torch.equal(record.ids_TLK, chosen.stacked(chosen.ids).short())
    assert record.weights_TLK is not None
    assert torch.equal(record.weights_TLK, chosen.stacked(chosen.weights).float())


@pytest.mark.parametrize("family", EACH)
def test_what_was_recorded_gives_the_same_results(family: str) -> None:
    made = families.build(family)
    want = families.run(made, made.inputs)
    with moe_ops.record_routing(made.model, weights=True) as recording:
        families.run(made, made.inputs)
    record = recording.take()
    with moe_ops.replay_routing(made.model, record, weights=True):
        assert torch.equal(families.run(made, made.inputs), want)
    try:
        with moe_ops.replay_routing(made.model, record):
            got = families.run(made, made.inputs)
    except ValueError as error:
        assert "cannot weigh given experts" in str(error)
        assert family in ("deepseek_v4", "inkling", "phimoe", "zaya")
    else:
        assert_close(got, want, TOL["moe", F32])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_given_what_was_recorded(family: str) -> None:
    model = tiny(family)
    record = others(record_of(model))
    with moe_ops.replay_routing(model, record), torch.no_grad():
        chosen = Chosen(model)
        want = model(text(2, 3)).logits
    assert torch.equal(chosen.stacked(chosen.ids).short(), record.ids_TLK)
    # The weights that routers computed of these, taken as recorded ones.
    weights = chosen.stacked(chosen.weights).float()
    for factor in (1.0, 2.0):
        given = dataclasses.replace(record, weights_TLK=weights * factor)
        with moe_ops.replay_routing(model, given, weights=True), torch.no_grad():
            got = model(text(2, 3)).logits
        assert torch.equal(got, want) == (factor == 1.0)


def quantized(model: nn.Module) -> nn.Module:
    moe_ops.quantize_model(model, "int8_w8a16", progress=False)
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "made", [moe_ops.optimize, quantized, lambda model: moe_ops.optimize(quantized(model))],
    ids=["optimized", "quantized", "both"],
)  # fmt: skip
def test_optimized_and_quantized_models(family: str, made: Any) -> None:
    model, ids = made(tiny(family)), text(2, 5)
    with torch.no_grad():
        want = model(ids).logits
        with moe_ops.record_routing(model, weights=True) as recording:
            assert torch.equal(model(ids).logits, want)
        record = recording.take()
        with moe_ops.replay_routing(model, record, weights=True):
            assert torch.equal(model(ids).logits, want)
        with moe_ops.replay_routing(model, record):
            assert_close(model(ids).logits, want, TOL["moe", F32])
        assert torch.equal(model(ids).logits, want)


def test_autocast() -> None:
    model, ids = tiny(), text(2, 5)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = model(ids).logits
        with moe_ops.record_routing(model) as recording:
            assert torch.equal(model(ids).logits, want)
        with moe_ops.replay_routing(model, recording.take()):
            assert_close(model(ids).logits, want.float(), TOL["moe", torch.bfloat16])


def test_a_copy_of_a_recorded_model_is_not_recorded() -> None:
    model = tiny()
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        copied = copy.deepcopy(model)
        copied(text(1, 3))
    assert recording.take().tokens == 0
    assert [type(m) for m in copied.modules()] == [type(m) for m in model.modules()]


def test_tokens_without_a_record_are_routed_by_themselves() -> None:
    model = tiny()
    with torch.no_grad():
        want = model(text(2, 6)).logits
    with moe_ops.record_routing(model, weights=True) as recording, torch.no_grad():
        model(text(2, 6)[:, :4])
    record = recording.take().padded(6)
    for weights in (False, True):
        with moe_ops.replay_routing(model, record, weights=weights), torch.no_grad():
            assert_close(model(text(2, 6)).logits, want, TOL["moe", F32])


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_training_records_and_replays(family: str, checkpointed: bool) -> None:
    model = tiny(family).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = text(2, 5)
    want = gradients(model, ids)
    with moe_ops.record_routing(model) as recording:
        got = gradients(model, ids)
        gradients(model, ids)
    record = recording.take()
    assert record.calls == ((2, 5), (2, 5))
    assert torch.equal(record.of_calls(0, 1).ids_TLK, record.of_calls(1).ids_TLK)
    assert all(torch.equal(got[n], want[n]) for n in want)
    with moe_ops.replay_routing(model, record):
        for name, t in gradients(model, ids).items():
            assert_close(t, want[name], TOL["experts_backward", F32], name)
    routers = [n for n in want if n.endswith("gate.weight")]
    assert routers
    with moe_ops.replay_routing(model, others(record)):
        moved = gradients(model, ids)
    assert all(float(moved[n].abs().max()) > 0 for n in routers)
    assert not all(torch.equal(moved[n], want[n]) for n in routers)


def test_generate_in_a_large_batch_is_replayed_by_training_in_other_company() -> None:
    model = tiny()
    twin = twin_of(model)
    with moe_ops.record_routing(twin) as recording:
        made = twin.generate(text(32, 6), **PLAIN)
    record = recording.take().joined()
    assert record.calls == ((32, 6 + PLAIN["max_new_tokens"] - 1),)
    some = [17, 3, 31, 3]
    replayed = record.sequences(some).padded(made.shape[1])
    model.train()
    with moe_ops.replay_routing(model, replayed):
        chosen = Chosen(model)
        gradients(model, made[some])
    got = chosen.stacked(chosen.ids).short().view(4, made.shape[1], *record.ids_TLK.shape[1:])
    assert torch.equal(got[:, :-1], record.by_sequence()[some])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_captured_prompts_and_steps_are_recorded(family: str, batch: int) -> None:
    model = tiny(family)
    twin, ids = twin_of(model), text(batch, 6)
    with moe_ops.record_routing(model, weights=True) as recording:
        want = model.generate(ids, **PLAIN)
    of_model = recording.take()
    with moe_ops.record_routing(twin, weights=True, tokens=64) as recording:
        for _ in range(4):  # the last prompt is captured
            assert torch.equal(twin.generate(ids, **PLAIN), want)
            record = recording.take()
    assert record.calls == of_model.calls
    assert torch.equal(record.ids_TLK, of_model.ids_TLK)
    assert record.weights_TLK is not None and of_model.weights_TLK is not None
    # A state that is kept from step to step adds up roundings.
    assert_close(record.weights_TLK, of_model.weights_TLK, TOL["route", torch.float16])
    assert torch.equal(twin.generate(ids, **PLAIN), want)


@pytest.mark.parametrize("batch", [1, 3])
def test_captured_prompts_and_steps_replay(batch: int) -> None:
    model = tiny()
    twin, ids = twin_of(model), text(batch, 6)
    with moe_ops.record_routing(twin) as recording:
        own = twin.generate(ids, **PLAIN)
    record = recording.take()
    with moe_ops.replay_routing(model, others(record)):
        want = model.generate(ids, **PLAIN)
    with moe_ops.replay_routing(twin, record) as replay:
        for _ in range(4):
            replay.load(others(record))
            assert torch.equal(twin.generate(ids, **PLAIN), want)
        assert replay.calls_left == 0
        replay.load(record)
        assert torch.equal(twin.generate(ids, **PLAIN), own)
    assert not torch.equal(want, own)


@pytest.mark.parametrize(
    "more",
    [{"prefill_chunk_size": 3}, {"output_hidden_states": True, "return_dict_in_generate": True}],
    ids=["in_parts", "own_code"],
)
def test_generate_that_is_transformers_own_is_recorded(more: dict[str, Any]) -> None:
    model = tiny()
    twin, ids = twin_of(model), text(2, 6)
    with moe_ops.record_routing(model) as recording:
        model.generate(ids, **PLAIN, **more)
    want = recording.take()
    with moe_ops.record_routing(twin) as recording:
        twin.generate(ids, **PLAIN, **more)
    got = recording.take()
    assert got.calls == want.calls
    assert torch.equal(got.ids_TLK, want.ids_TLK)


def test_candidates_that_are_taken_back_are_not_recorded() -> None:
    model = tiny()
    twin = twin_of(model)
    ids = text(1, 4).repeat(1, 3)
    with moe_ops.record_routing(twin) as recording:
        made = twin.generate(ids, **PLAIN, prompt_lookup_num_tokens=3)
    record = recording.take().joined()
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        model(made)
    of_text = recording.take().by_sequence()
    S = record.calls[0][1]
    assert made.shape[1] - 1 <= S <= made.shape[1]
    assert torch.equal(record.by_sequence(), of_text[:, :S])


def test_models_are_what_they_were_afterwards() -> None:
    model = tiny()
    kinds = [type(m) for m in model.modules()]
    buffers, keys = list(dict(model.named_buffers())), list(model.state_dict())
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        assert list(model.state_dict()) == keys
        model(text(1, 3))
    with moe_ops.replay_routing(model, recording.take()):
        assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == kinds
    assert list(dict(model.named_buffers())) == buffers
    assert not any(m._forward_pre_hooks for m in model.modules())


class NoExperts(nn.Module):
    pass


def with_weights() -> None:
    model = tiny()
    with moe_ops.replay_routing(model, record_of(model), weights=True):
        pass


def twice() -> None:
    model = tiny()
    with moe_ops.record_routing(model), moe_ops.record_routing(model):
        pass


def replay(*calls: tuple[int, int], **more: Any) -> None:
    with moe_ops.replay_routing(tiny(), random_record(*calls, **more)):
        pass


def larger_record() -> None:
    model = tiny()
    with moe_ops.replay_routing(model, record_of(model)) as replaying:
        replaying.load(random_record((5000, 1), layers=2))


WRONG: dict[str, tuple[Any, str]] = {
    "no_model": (lambda: moe_ops.record_routing(NoExperts()).__enter__(), "model of transformers"),
    "divided": (lambda: record_of(tiny(DIVIDED)), "divides its tokens among"),
    "twice": (twice, "recorded or replayed already"),
    "no_weights": (with_weights, "recorded has no weights"),
    "no_record": (
        lambda: moe_ops.replay_routing(tiny(), torch.zeros(1)).__enter__(),
        "what record_routing recorded",
    ),
    "layers": (lambda: replay((1, 3), layers=3), "recorded has 3 layers of experts, and the model"),
    "experts": (lambda: replay((1, 3), layers=2, experts=9), "recorded has 9 experts"),
    "choices": (lambda: replay((1, 3), layers=2, top_k=3), "recorded has 3 choices"),
    "larger": (larger_record, "a call of 5000 tokens, and there is room for 4096"),
    "tokens": (lambda: moe_ops.record_routing(tiny(), tokens=0).__enter__(), "tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_with_a_remedy(name: str) -> None:
    call, says = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=says):
        call()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([(2, 4)], "call 0 of the record has 2 x 3 tokens, and this one 2 x 4"),
        ([(2, 3), (2, 3)], "the record has 1 calls, and this one is one more"),
    ],
    ids=["other", "more"],
)
def test_calls_that_are_not_those_of_the_record_are_refused(
    sizes: list[tuple[int, int]], says: str
) -> None:
    model = tiny()
    record = record_of(model)
    with moe_ops.replay_routing(model, record) as replaying, torch.no_grad():
        with pytest.raises(ValueError, match=says):
            for size in sizes:
                model(text(*size))
        replaying.rewind()
        model(text(2, 3))


def test_a_refused_record_changes_nothing() -> None:
    model = tiny()
    record = record_of(model)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="recorded has 9 experts"):
        replay((1, 3), layers=2, experts=9)
    with moe_ops.replay_routing(model, record) as replaying, torch.no_grad():
        with pytest.raises(ValueError, match="recorded has 3 choices"):
            replaying.load(random_record((2, 3), layers=2, top_k=3))
        model(text(2, 3))
    assert [type(m) for m in model.modules()] == kinds
