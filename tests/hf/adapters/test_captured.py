"""Captured calls of models with adapters: none is used for adapters that it did not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.arena import Arena
from moe_ops.graphs.capture import GraphRunner
from moe_ops.testing import F32, TOL, assert_close
from tests.forward.layered import Layered
from tests.graphs.tape import Tape
from tests.hf.adapters.models import choose, ids_of, logits, tokens, twin_of, wrapped
from tests.hf.adapters.test_rows import NAMES, WAYS, Choose, by_ours, by_peft
from tests.hf.test_quantize import experts_of, qwen
from tests.hf.twins import uncompiled

MODEL = TOL["model", F32]


def set_scale(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("one", 0.5)
        elif hasattr(module, "by_name"):
            module.by_name["one"].scale = 0.3


@torch.no_grad()
def train(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if "lora_B" in name or ".b_w" in name:
            p.mul_(-2)


@torch.no_grad()
def replace(model: nn.Module) -> None:
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and name.startswith(("a_w", "b_w")):
                module._parameters[name] = nn.Parameter(p * 2, requires_grad=False)


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def adapted(request: pytest.FixtureRequest) -> tuple[Any, Choose]:
    model, chosen = request.param(qwen)
    chosen(model, "one")
    return model, chosen


class Generating:
    """A twin whose steps and prompts are captured on a tape."""

    def __init__(self, model: Any) -> None:
        self.model, self.tape = model, Tape()
        self.twin = twin_of(model, uncompiled(self.tape))

    def check(self, times: int = 4) -> None:
        want = tokens(self.model)
        for _ in range(times):  # prompts are captured when they come the third time
            assert torch.equal(tokens(self.twin), want)


def test_generate_reads_the_adapters_that_are(adapted: tuple[Any, Choose]) -> None:
    model, chosen = adapted
    run = Generating(model)
    run.check()
    assert run.tape.captures == 2
    for name in ("two", "one"):
        chosen(model, name)
        run.check()
    for change in (set_scale, train, replace):
        before = tokens(model)
        change(model)
        run.check()
        assert change is replace or not torch.equal(tokens(model), before)
    if chosen is choose:  # adapters come to lie where the ones before were
        assert run.tape.captures == 2
    for name in (None, "two"):
        chosen(model, name)
        run.check()


def test_what_trained_is_read_once_it_is_frozen() -> None:
    model, _ = by_ours(qwen)
    trained_ones = [p for n, p in model.named_parameters() if "expert_adapters" in n]
    run = Layered(model, Tape())
    ids = ids_of()

    def check() -> None:
        got = run.twin(input_ids=ids, use_cache=False).logits
        assert_close(got.detach(), logits(model, ids), MODEL)

    for trained in (False, True, False, True, False):
        for p in trained_ones:
            p.requires_grad_(trained)
        train(model)
        for _ in range(3):
            check()


def test_generate_of_several_adapters(adapted: tuple[Any, Choose]) -> None:
    model, chosen = adapted
    run, ids = Generating(model), ids_of(3)
    want = {}
    for name in (None, "one", "two"):
        chosen(model, name)
        want[name] = tokens(model, ids)
    for names in (NAMES, NAMES[::-1], [None] * 3):
        with moe_ops.adapters(run.twin, names):
            for _ in range(4):
                found = tokens(run.twin, ids)
                for row, name in enumerate(names):
                    assert torch.equal(found[row], want[name][row])
    assert run.tape.captures == 2
    run.check()


def test_beams_and_sequences_of_one_size_share_no_numbers() -> None:
    model, _ = by_ours(qwen)
    run, ids, names = Generating(model), ids_of(6), [*NAMES, *NAMES]
    with moe_ops.adapters(model, names):
        want = tokens(model, ids)
    with moe_ops.adapters(model, NAMES):
        beams = tokens(model, ids[:3], num_beams=2)
    for _ in range(4):
        with moe_ops.adapters(run.twin, names):
            assert torch.equal(tokens(run.twin, ids), want)
        with moe_ops.adapters(run.twin, NAMES):
            assert torch.equal(tokens(run.twin, ids[:3], num_beams=2), beams)
    assert run.tape.replayed > 20


def test_adapters_of_other_layers_are_captured_again_when_they_change() -> None:
    model = wrapped(qwen(), "one", "two", target=(), target_modules=["q_proj"])
    run = Generating(model.get_base_model())
    forwards = Layered(model.get_base_model(), Tape())

    def check() -> None:
        run.check()
        for _ in range(4):
            forwards(input_ids=ids_of(), use_cache=False)

    for name in ("one", "two", None, "one"):
        choose(model, name)
        check()
    set_scale(model)
    check()


@pytest.mark.parametrize("saved", ["lm_head", "mlp.gate"])
def test_modules_that_peft_trains_whole_are_captured_again(saved: str) -> None:
    model = wrapped(qwen(), "one", "two", modules_to_save=[saved])
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if "modules_to_save" in name:
            nn.init.normal_(p)
    run = Generating(model)
    for name in ("one", "two", None, "one"):
        choose(model, name)
        run.check()


def write_unsaid(parameters: list[nn.Parameter]) -> None:
    """A step of a fused optimizer, of which the versions of parameters say nothing."""
    for p in parameters:
        p.requires_grad_(True).grad = torch.randn(p.shape)
    torch.optim.SGD(parameters, 5.0, fused=True).step()


def test_what_a_fused_optimizer_writes_is_read() -> None:
    model, _ = by_ours(qwen)
    moe_ops.set_adapter(model, "one")
    run = Generating(model)
    trained_ones = [p for n, p in model.named_parameters() if "by_name.one" in n]
    for _ in range(3):
        before = tokens(model)
        write_unsaid(trained_ones)
        run.check(2)
        assert not torch.equal(tokens(model), before)
    for p in trained_ones:
        p.requires_grad_(False)
    run.check(2)


def test_memory_of_adapters_is_not_taken_again_while_it_is_what_was_seen() -> None:
    model, _ = by_ours(qwen)
    moe_ops.set_adapter(model, "one")
    run = Layered(model, Tape())
    parameters = [p.requires_grad_(False) for n, p in model.named_parameters() if ".a_w" in n]
    for _ in range(3):
        run(input_ids=ids_of(), use_cache=False)
        before = [p.data_ptr() for p in parameters]
        for p in (*parameters, *parameters):
            p.data = torch.randn(p.shape)
        assert not set(before) & {p.data_ptr() for p in parameters}
        run(input_ids=ids_of(), use_cache=False)


def test_forwards_read_the_adapters_that_are(adapted: tuple[Any, Choose]) -> None:
    model, chosen = adapted
    run = Layered(getattr(model, "get_base_model", lambda: model)(), Tape())
    for name in ("one", "two", None, "one"):
        chosen(model, name)
        for _ in range(4):
            run(input_ids=ids_of(), use_cache=False)
    for change in (set_scale, train, replace):
        change(model)
        for _ in range(4):
            run(input_ids=ids_of(), use_cache=False)
    assert run.whole == 0 and run.graphs.replayed >= 6


def test_forwards_of_several_adapters(adapted: tuple[Any, Choose]) -> None:
    model, chosen = adapted
    ids = ids_of(3)
    want = {}
    for name in (None, "one", "two"):
        chosen(model, name)
        want[name] = logits(model, ids)
    run = Layered(getattr(model, "get_base_model", lambda: model)(), Tape())

    def check(names: list[str | None], each: int = 1) -> None:
        given = ids.repeat_interleave(each, 0)
        for _ in range(4):
            found = logits(run.twin, given)
            for row in range(len(given)):
                place = row // each
                assert_close(found[row], want[names[place % len(names)]][place], MODEL)

    check(["two"])  # which was chosen last
    for names in (NAMES, NAMES[::-1], [None] * 3):
        with moe_ops.adapters(run.twin, names):
            check(names, 2)  # the largest first, as buffers then stay
            check(names)
    assert run.graphs.captures == 3
    check(["two"])


def test_forwards_of_one_size_share_no_numbers() -> None:
    model, _ = by_ours(qwen)
    run, ids = Layered(model, Tape()), ids_of(6)
    for names in (NAMES * 2, NAMES, NAMES[:2], NAMES * 2):
        with moe_ops.adapters(model, names):
            want = logits(model, ids)
        with moe_ops.adapters(run.twin, names):
            for _ in range(4):
                assert_close(logits(run.twin, ids), want, MODEL)
    assert run.graphs.captures == 1


def block_of(way: Callable[[Any], tuple[Any, Choose]]) -> tuple[Any, Choose, Any]:
    model, chosen = way(qwen)
    moe_ops.optimize(model)
    chosen(model, "one")
    return model, chosen, next(m for m in model.modules() if hasattr(m, "experts"))


@pytest.mark.parametrize("way", [by_peft, by_ours])
def test_a_captured_function_reads_the_adapters_that_are(way: Any) -> None:
    model, chosen, block = block_of(way)
    tape = Tape()
    run = GraphRunner(
        lambda x_TD, block: block(x_TD[None])[0], buckets=(4,), capture=tape, arena=Arena()
    )

    def check() -> None:
        x_TD = torch.randn(3, 64)
        with torch.no_grad():
            want: Tensor = block(x_TD[None])[0]
            assert_close(run(x_TD, block), want, MODEL)

    for name in ("one", "two", None, "one"):
        chosen(model, name)
        check()
    for change in (set_scale, train):
        change(model)
        check()
    assert tape.captures == 4 and not run.refused
    assert len(experts_of(model)) == 2


def test_a_captured_function_runs_uncaptured_while_sequences_have_adapters() -> None:
    model, _, block = block_of(by_ours)
    x_TD, names = torch.randn(3, 64), ["one", None, "two"]
    run = GraphRunner(
        lambda x_TD, block: block(x_TD[None])[0], buckets=(6,), capture=Tape(), arena=Arena()
    )
    with torch.no_grad(), moe_ops.adapters(model, names):
        assert_close(run(x_TD, block), block(x_TD[None])[0], MODEL)
    assert list(run.refused) == [
        "sequences have adapters of their own, which padded tokens would be counted among"
    ]
