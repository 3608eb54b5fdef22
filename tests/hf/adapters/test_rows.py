"""Several adapters in one batch: each sequence gives what its adapter alone gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.testing import F32, TOL, assert_close
from tests.hf.adapters.models import choose, ids_of, logits, randomised, tokens, twin_of, wrapped
from tests.hf.adapters.test_added import coded
from tests.hf.test_quantize import gpt_oss, qwen

MODEL = TOL["model", F32]
NAMES = ["two", None, "one"]
Choose = Callable[[Any, str | None], None]


def by_peft(make: Any) -> tuple[Any, Choose]:
    return wrapped(make(), "one", "two"), choose


def by_ours(make: Any) -> tuple[Any, Choose]:
    model = coded(make)
    moe_ops.add_adapter(model, 4, name="one")
    moe_ops.add_adapter(model, 2, name="two", target="w2")
    randomised(model)
    return model, moe_ops.set_adapter


WAYS = {"peft": by_peft, "ours": by_ours}
RUNS: dict[str, Callable[[Any], Any]] = {"optimized": moe_ops.optimize, "twin": twin_of}


def alone(model: Any, chosen: Choose, ids: Tensor, **options: Any) -> Any:
    """What each sequence gives with its adapter alone."""
    parts = []
    for row, name in enumerate(NAMES):
        chosen(model, name)
        one = ids[row : row + 1]
        parts.append((logits(model, one), tokens(model, one, **options)))
    chosen(model, "one")
    states, found = zip(*parts, strict=True)
    return torch.cat(states), torch.cat(found)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", [qwen, gpt_oss])
def test_each_sequence_has_its_adapter(make: Any, way: Any, run: Callable[[Any], Any]) -> None:
    model, chosen = way(make)
    ids = ids_of(3)
    want, theirs = alone(model, chosen, ids)
    plain = logits(model, ids)
    ours = run(model)
    with moe_ops.adapters(ours, NAMES):
        assert_close(logits(ours, ids), want, MODEL)
        assert torch.equal(tokens(ours, ids), theirs)
        assert_close(logits(ours, ids), want, MODEL)
    assert_close(logits(ours, ids), plain, MODEL)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_beams_have_the_adapter_of_their_sequence(run: Callable[[Any], Any]) -> None:
    model, chosen = by_ours(qwen)
    ids, options = ids_of(3), {"num_beams": 2}
    _, theirs = alone(model, chosen, ids, **options)
    ours = run(model)
    with moe_ops.adapters(ours, NAMES):
        assert torch.equal(tokens(ours, ids, **options), theirs)


def test_gradients_go_to_the_adapters_of_their_sequences() -> None:
    model, chosen = by_ours(qwen)
    ids = ids_of(3)
    want: dict[str, Tensor] = {}
    for row, name in enumerate(NAMES):
        chosen(model, name)
        out = model(input_ids=ids[row : row + 1]).logits
        if name is not None:
            out.square().sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            want[name] = p.grad.clone()
    model.zero_grad()
    with moe_ops.adapters(model, NAMES):
        model(input_ids=ids).logits.square().sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert_close(found[name], gradient, MODEL, name)


def test_one_inside_of_another() -> None:
    model, chosen = by_ours(qwen)
    ids = ids_of(3)
    want, _ = alone(model, chosen, ids)
    with moe_ops.adapters(model, NAMES):
        with moe_ops.adapters(model, NAMES[:2]):
            assert_close(logits(model, ids[:2]), want[:2], MODEL)
        assert_close(logits(model, ids), want, MODEL)


def test_an_adapter_that_is_merged_cannot_be_one_of_several() -> None:
    model = moe_ops.optimize(wrapped(qwen(), "one", "two"))
    model.base_model.merge_adapter()
    message = "of their own: adapters are merged into the weights"
    with pytest.raises(ValueError, match=message), moe_ops.adapters(model, NAMES):
        raise AssertionError("it began")
    model.base_model.unmerge_adapter()
    with moe_ops.adapters(model, NAMES):
        pass


BAD: dict[str, tuple[Callable[[], Any], Any, Any, str]] = {
    "a_name": (lambda: by_ours(qwen)[0], ["three"], ValueError, "no adapter 'three'; there are"),
    "a_text": (lambda: by_ours(qwen)[0], "one", TypeError, "an adapter or None for each sequence"),
    "empty": (lambda: by_ours(qwen)[0], [], TypeError, "an adapter or None for each sequence"),
    "none": (qwen, ["one"], ValueError, "has no adapters of experts; add them by add_adapter"),
    "stock": (lambda: by_peft(qwen)[0], ["one"], ValueError, "peft adds, to all sequences alike"),
    "elsewhere": (
        lambda: moe_ops.optimize(wrapped(qwen(), "one", target_modules=["q_proj"])),
        ["one"], ValueError, r"self_attn\.q_proj has an adapter 'one', too, which is no module of",
    ),
    "embeddings": (
        lambda: moe_ops.optimize(wrapped(qwen(), "one", target_modules=["embed_tokens"])),
        ["one"], ValueError, r"embed_tokens has an adapter 'one', too, which is no module of",
    ),
    "whole": (
        lambda: moe_ops.optimize(wrapped(qwen(), "one", modules_to_save=["lm_head"])),
        ["one"], ValueError, r"lm_head has an adapter 'one', too, which is no module of",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "names", "kind", "message"), BAD.values(), ids=BAD)
def test_names_that_cannot_be(make: Callable[[], Any], names: Any, kind: Any, message: str) -> None:
    model = make()
    with pytest.raises(kind, match=message), moe_ops.adapters(model, names):
        raise AssertionError("it began")


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_another_number_of_sequences_is_refused(run: Callable[[Any], Any]) -> None:
    model = run(by_ours(qwen)[0])
    message = "adapters were given for 3 sequences, "
    with moe_ops.adapters(model, NAMES), pytest.raises(ValueError, match=message):
        tokens(model, ids_of(2))
    logits(model, ids_of(2))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_another_number_is_refused_where_tokens_could_be_divided(way: Any) -> None:
    model = moe_ops.optimize(way(qwen)[0])
    message = "given for 3 sequences, but the call has 2"
    with moe_ops.adapters(model, NAMES), pytest.raises(ValueError, match=message):
        logits(model, ids_of(2, 6))
    logits(model, ids_of(2, 6))


def test_calls_of_a_compiled_model_are_counted_off_its_layers_path_too() -> None:
    model = twin_of(by_ours(qwen)[0])
    message = "given for 3 sequences, but the call has 2"
    with moe_ops.adapters(model, NAMES):
        with pytest.raises(ValueError, match=message):
            logits(model, ids_of(2, 6))
        assert logits(model, ids_of(3)).shape[0] == 3
    logits(model, ids_of(2, 6))


@pytest.mark.parametrize("remove", [moe_ops.remove_adapter, moe_ops.merge_adapter])
def test_none_is_removed_while_sequences_have_it(remove: Callable[[Any, str], None]) -> None:
    model, _ = by_ours(qwen)
    with moe_ops.adapters(model, NAMES):
        want = logits(model, ids_of(3))
        with pytest.raises(ValueError, match="leave `adapters`, and remove then"):
            remove(model, "one")
        assert torch.equal(logits(model, ids_of(3)), want)
    moe_ops.remove_adapter(model, "one")


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "disabled": (lambda m: m.base_model.disable_adapter_layers(), "adapters are disabled"),
    "merged": (lambda m: m.base_model.merge_adapter(), "adapters are merged into the weights"),
    "deleted": (lambda m: m.delete_adapter("two"), "adapters one, two, of which some were removed"),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_what_peft_changes_inside_is_refused(
    change: Callable[[Any], None], message: str, run: Callable[[Any], Any]
) -> None:
    model, _ = by_peft(qwen)
    ours = run(model)
    with moe_ops.adapters(ours, NAMES):
        tokens(ours, ids_of(3))
        change(model)
        with pytest.raises(ValueError, match=message):
            tokens(ours, ids_of(3))
