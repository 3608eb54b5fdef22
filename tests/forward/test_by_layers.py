"""Forwards that run layer by layer give what transformers' do, with caches, masks and heads; what
was done to a model since is seen; and what cannot run so runs as one graph, with the reason."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.models.qwen3_moe import Qwen3MoeForSequenceClassification

from moe_ops.forward.by_layers import shape_refusal
from moe_ops.forward.caches import keys_refusal
from moe_ops.forward.layer_cache import CACHE
from moe_ops.testing import assert_close
from tests.chosen import CHOSEN, those_of
from tests.forward.layered import MODEL, Layered, left_padded, tokens
from tests.graphs.recorder import Recorder
from tests.hf import families

# Of these families calls with a cache run whole: of what their layers keep transformers has no
# static cache, or a class of the family's own.
KEEP_MORE = {"deepseek_v4", "minimax"}
NO_CACHE = {"openai_privacy_filter"}  # whose tokens see those behind them


@pytest.fixture
def qwen() -> Layered:
    return Layered(families.build("qwen3_moe").model)


def layers_of(tiny: Any) -> Layered:
    if shape_refusal(tiny.model) is not None:
        pytest.skip(f"{tiny.name} is compiled as a whole: {shape_refusal(tiny.model)}")
    return Layered(tiny.model)


@pytest.mark.parametrize("family", those_of(CHOSEN, families.discover()))
def test_every_family_gives_the_same(family: str) -> None:
    tiny = families.build(family)
    run = layers_of(tiny)
    run(**tiny.inputs, use_cache=False)
    run(**tiny.inputs, use_cache=False, attention_mask=left_padded(2, 7, 3))
    assert run.whole == 0
    out = run(**families.inputs_for(tiny, 3, 9, 1), use_cache=True)
    for seed, S in enumerate((4, 1, 30, 1, 1), 2):  # over a window
        if family in NO_CACHE:
            break
        out = run(**families.inputs_for(tiny, 3, S, seed), **{CACHE: out[CACHE]})
    assert run.whole == (6 if family in KEEP_MORE else 0)


@pytest.mark.parametrize("family", those_of(CHOSEN, families.discover()))
def test_every_family_is_captured_or_says_why_not(family: str) -> None:
    tiny = families.build(family)
    run = layers_of(tiny)
    for seed in range(5):
        run(**families.inputs_for(tiny, 2, 23, seed), use_cache=False)
        mask = left_padded(2, 23, seed + 1)
        run(**families.inputs_for(tiny, 2, 23, seed), use_cache=False, attention_mask=mask)
    inputs = families.inputs_for(tiny, 2, 23, 0)
    asks_more = set(inputs) != {"input_ids"}
    keeps_more = keys_refusal(tiny.model.config.get_text_config(decoder=True)) is not None
    captured = 0 if family in KEEP_MORE | NO_CACHE or keeps_more or asks_more else 2
    assert run.graphs.captures == captured
    assert run.graphs.replayed == 2 * captured
    assert not [report.refusal for report in run.forwards.report() if report.refusal]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("B", [1, 3])
def test_masks_and_positions(family: str, B: int) -> None:
    run = Layered(families.build(family).model)
    ids, mask = tokens(B, 12), left_padded(B, 12, 5)
    out = run(input_ids=ids, attention_mask=mask)
    for S in (3, 1, 1):
        mask = torch.cat([mask, mask.new_ones(B, S)], 1)
        out = run(input_ids=tokens(B, S), attention_mask=mask, **{CACHE: out[CACHE]})
    run(input_ids=ids, position_ids=torch.arange(3, 15).expand(B, 12))
    run(input_ids=ids, position_ids=torch.arange(12)[None], attention_mask=torch.ones(B, 12))
    seen = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].expand(B, 1, 12, 12)
    run(input_ids=ids, attention_mask=seen)
    assert run.whole == 0


def test_what_else_a_forward_takes(qwen: Layered) -> None:
    ids = tokens(2, 7)
    for keep in (1, 3, torch.tensor([2, 6])):
        assert qwen(input_ids=ids, logits_to_keep=keep).logits.shape[1] in (1, 2, 3)
    assert qwen(input_ids=ids, labels=ids).loss is not None
    embedded = qwen.model.get_input_embeddings()(ids).detach()
    qwen(inputs_embeds=embedded)
    with torch.no_grad():
        got, want = (m(ids, return_dict=False) for m in (qwen.twin, qwen.model))
    assert type(got) is tuple and len(got) == len(want)
    assert_close(got[0], want[0], MODEL)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        qwen()
    assert qwen.whole == 0


def test_other_heads() -> None:
    model = families.build("qwen3_moe").model
    base = Layered(model.model)
    out = base(input_ids=tokens(2, 7))
    base(input_ids=tokens(2, 3), **{CACHE: out[CACHE]})
    model.config.num_labels, model.config.pad_token_id = 4, 0
    classifier = Qwen3MoeForSequenceClassification(model.config).eval()
    families.randomise(classifier, 0)
    run = Layered(classifier)
    for _ in range(4):
        run(input_ids=tokens(2, 7), labels=torch.tensor([1, 3]))
    assert base.whole == run.whole == 0 and run.graphs.replayed == 1


def test_like_layers_share_code(qwen: Layered) -> None:
    for shape in ((1, 12), (1, 7), (3, 9)):
        qwen(input_ids=tokens(*shape), use_cache=False)
    kinds = len(qwen.layers)  # a layer and a norm
    assert kinds == 2
    for shape in ((2, 1), (1, 1)):
        qwen(input_ids=tokens(*shape), use_cache=False)
    assert len(qwen.layers) == 2 * kinds


def test_modes_in_which_it_is_called(qwen: Layered) -> None:
    ids = tokens(2, 7)
    with torch.inference_mode():
        cached = qwen.twin(ids)[CACHE]
        qwen(input_ids=ids.clone())
    qwen.model.requires_grad_(False)
    got = qwen.twin(tokens(2, 3), **{CACHE: cached})  # made in inference mode, used in none
    assert got[CACHE].get_seq_length() == 10 and not got.logits.is_inference()
    assert qwen.whole == 0


def test_gradients_run_whole(qwen: Layered, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moe_ops"):
        for _ in range(2):
            qwen.twin(tokens(2, 7)).logits.sum().backward()
    assert qwen.whole == 2 and qwen.model.lm_head.weight.grad is not None
    said = [r.getMessage() for r in caplog.records if "one graph" in r.getMessage()]
    assert said == ["Qwen3MoeForCausalLM runs as one graph: a gradient is asked for"]


@pytest.mark.parametrize(
    "name", ["output_hidden_states", "output_attentions", "output_router_logits"]
)
def test_outputs_of_layers_run_whole(qwen: Layered, name: str) -> None:
    if name == "output_attentions":
        qwen.model.set_attn_implementation("eager")
    out = qwen(input_ids=tokens(2, 7), **{name: True})
    assert qwen.whole == 1 and out[name.removeprefix("output_")]
    for _ in range(2):  # transformers left hooks on the model, which record nothing now
        qwen(input_ids=tokens(2, 7))
        again = qwen(input_ids=tokens(2, 7), **{name: True})
        assert again[name.removeprefix("output_")]
    assert qwen.whole == 3


def test_a_hook_beside_those_of_transformers_is_run(qwen: Layered) -> None:
    ids, seen = tokens(2, 7), []
    qwen(input_ids=ids, output_router_logits=True)
    qwen.model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    qwen(input_ids=ids)
    assert qwen.whole == 2 and len(seen) == 2  # of the model and of its twin


def test_caches_that_run_whole(qwen: Layered, caplog: pytest.LogCaptureFixture) -> None:
    config, ids = qwen.model.config, tokens(2, 7)
    with caplog.at_level(logging.INFO, "moe_ops"):
        for _ in range(2):
            qwen(input_ids=ids, **{CACHE: StaticCache(config=config, max_cache_len=16)})
    assert qwen.whole == 2
    said = [m for m in caplog.messages if "one graph" in m]
    assert said == ["Qwen3MoeForCausalLM runs as one graph: the cache is a StaticCache"]


class Asking(nn.Module):
    """An attention that asks more of its cache than `update`."""

    def __init__(self, inner: nn.Module, ask: Any) -> None:
        super().__init__()
        self.inner, self.ask = inner, ask

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(CACHE) is not None:
            self.ask(kwargs[CACHE])
        return self.inner(*args, **kwargs)


def updated_before(cache: Any) -> None:
    cache.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), 1)


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda cache: cache.get_max_length(), "a layer asks its cache for get_max_length"),
        (updated_before, "a layer updates its cache twice"),
    ],
)
def test_a_layer_that_asks_more_of_its_cache_runs_whole(
    ask: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = families.build("qwen3_moe").model
    model.model.layers[-1].self_attn = Asking(model.model.layers[-1].self_attn, ask)
    run, ids = Layered(model), tokens(2, 7)
    with caplog.at_level(logging.INFO, "moe_ops"):
        for _ in range(2):
            run(input_ids=ids)
        ran = sum(run.layers.values())
        run(input_ids=ids)
        assert run.whole == 3 and sum(run.layers.values()) == ran  # known from the first on
        given = DynamicCache(config=model.config)
        run(input_ids=ids, **{CACHE: given})
        assert given.get_seq_length() == 7 and run.whole == 4
    assert f"Qwen3MoeForCausalLM runs as one graph: {reason}" in caplog.messages
    run(input_ids=ids, use_cache=False)
    assert run.whole == 4


def test_a_cache_given_by_its_place_is_seen() -> None:
    run = Layered(families.build("qwen3_moe").model)
    cache = StaticCache(config=run.model.config, max_cache_len=16)
    with torch.no_grad():
        out = run.twin(tokens(2, 7), None, None, cache)
    assert run.whole == 1 and out[CACHE] is cache and cache.get_seq_length() == 7


def test_an_error_leaves_the_cache_as_it_was(qwen: Layered) -> None:
    out = qwen(input_ids=tokens(2, 7))
    before = [(layer.keys, layer.values) for layer in out[CACHE].layers]
    last = qwen.model.model.layers[-1]
    last.mlp.register_parameter("broken", None)
    forward, last.forward = last.forward, broken
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        qwen.twin(tokens(2, 3), **{CACHE: out[CACHE]})
    for layer, (keys, values) in zip(out[CACHE].layers, before, strict=True):
        assert layer.keys is keys and layer.values is values
    last.forward = forward
    qwen(input_ids=tokens(2, 3), **{CACHE: out[CACHE]})
    assert qwen.whole == 0


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError


def test_what_was_done_to_a_model_is_seen(qwen: Layered) -> None:
    model, ids = qwen.model, tokens(2, 7)
    for _ in range(4):
        first = qwen(input_ids=ids).logits
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    qwen(input_ids=ids)
    model.model.layers[0].mlp.gate.weight = nn.Parameter(torch.randn(8, 32))
    second = qwen(input_ids=ids).logits
    assert not torch.allclose(first, second)
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()
    qwen(input_ids=ids)
    qwen.twin.model.layers[1].mlp = model.model.layers[0].mlp  # its own
    with torch.no_grad():
        third = qwen.twin(input_ids=ids).logits
    assert not torch.allclose(third, model(input_ids=ids).logits)
    assert qwen.whole == 0


def test_casts_and_moves_are_seen(qwen: Layered) -> None:
    for _ in range(4):
        qwen(input_ids=tokens(2, 7))
    qwen.model.to(torch.bfloat16)
    with torch.no_grad():
        assert qwen.twin(tokens(2, 7)).logits.dtype == torch.bfloat16
    qwen.twin.to(torch.float32)
    for _ in range(4):
        assert qwen(input_ids=tokens(2, 7)).logits.dtype == torch.float32


def test_training_is_seen(qwen: Layered) -> None:
    for layer in qwen.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = tokens(2, 7)
    for _ in range(4):
        qwen(input_ids=ids)
    replayed = qwen.graphs.replayed
    qwen.model.train()
    with torch.no_grad():
        outs = [qwen.twin(ids).logits for _ in range(5)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(outs))
    qwen.model.eval()
    qwen(input_ids=ids)
    assert qwen.graphs.replayed == replayed and qwen.whole == 0


@pytest.mark.parametrize("where", ["model", "twin", "all"])
def test_hooks_are_called(qwen: Layered, where: str) -> None:
    for _ in range(4):
        qwen(input_ids=tokens(2, 7))
    called: list[str] = []

    def hook(module: Any, args: Any, out: Any) -> None:
        called.append(type(module).__name__)

    if where == "all":
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
    else:
        handle = getattr(qwen, where).model.layers[1].mlp.register_forward_hook(hook)
    try:
        with torch.no_grad():
            qwen.twin(tokens(2, 7))
        assert qwen.whole == 1 and "Qwen3MoeSparseMoeBlock" in called
    finally:
        handle.remove()
    qwen(input_ids=tokens(2, 7))
    assert qwen.whole == 1


def test_an_adapter_is_seen(qwen: Layered) -> None:
    peft = pytest.importorskip("peft")
    ids = tokens(2, 7)
    for _ in range(4):
        plain = qwen(input_ids=ids).logits
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, qwen.model)
    for _ in range(4):
        adapted = qwen(input_ids=ids).logits
    assert not torch.allclose(plain, adapted)
    for part in qwen.model.modules():
        if isinstance(part, peft.tuners.tuners_utils.BaseTunerLayer):
            part.enable_adapters(False)
    for _ in range(4):
        assert_close(qwen(input_ids=ids).logits, plain, MODEL)
    assert qwen.whole == 0


def test_two_threads(qwen: Layered) -> None:
    failures: list[BaseException] = []
    shapes = [(3, 17), (2, 9), (1, 5), (1, 1)]  # the largest first, as buffers then stay
    with torch.no_grad():
        want = [[qwen.model(tokens(*s, i)).logits for s in shapes] for i in range(6)]

    def run() -> None:
        try:
            for i in range(6):
                for s, logits in zip(shapes, want[i], strict=True):
                    with torch.no_grad():
                        got = qwen.twin(tokens(*s, i))
                    assert_close(got.logits, logits, MODEL)
                    assert got[CACHE].get_seq_length() == s[1]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failures == [] and qwen.whole == 0 and qwen.graphs.captures == 4


def test_two_models_at_once() -> None:
    graphs = Recorder()
    runs = [Layered(families.build(f).model, graphs) for f in ("qwen3_moe", "gpt_oss")]
    for seed in range(5):
        for run in runs:
            out = run(input_ids=tokens(2, 9, seed))
            run(input_ids=tokens(2, 1, seed), **{CACHE: out[CACHE]})
    assert graphs.captures == 2 and [run.whole for run in runs] == [0, 0]


def test_which_models_are_compiled_whole() -> None:
    two = families.build("qwen3_vl_moe").model
    assert shape_refusal(two) == "it has 2 lists of decoder layers, not one"
    spread = families.build("qwen3_moe").model
    assert shape_refusal(spread) is None
    spread.hf_device_map = {"model": 0, "lm_head": 1}
    assert shape_refusal(spread) == "it is spread over devices"
