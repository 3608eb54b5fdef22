"""Which calls of a decoder a graph can repeat, and which share one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.utils import ModelOutput

from moe_ops.forward import calls
from moe_ops.forward.calls import Call, call_of, capture_refusal, is_dense, output_refusal
from moe_ops.forward.layer_cache import CACHE
from tests.forward.layered import left_padded, tokens
from tests.hf import families


def test_calls_that_share_a_graph() -> None:
    ids, mask = tokens(2, 7), left_padded(2, 7, 3)
    config = families.build("qwen3_moe").model.config

    def key(**kwargs: Any) -> Any:
        call = call_of({"input_ids": ids, **kwargs}, config)
        assert isinstance(call, Call)
        return call.key

    first = key()
    assert first == key(input_ids=ids + 1) == key(use_cache=True) == key(inputs_embeds=None)
    assert first == key(attention_mask=torch.ones(2, 7)) == key(**{CACHE: DynamicCache()})
    others = [key(attention_mask=mask), key(input_ids=ids[:1]), key(input_ids=ids[:, :1])]
    others += [key(use_cache=False), key(is_causal=True)]
    assert len({first, *others}) == 6
    assert key(input_ids=tokens(1, calls.MOST_TOKENS))
    near = call_of({"input_ids": tokens(3, 1365)}, config)  # padded there would be too many
    assert isinstance(near, Call) and near.tokens == 1365


def full_cache() -> DynamicCache:
    full = DynamicCache()
    full.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    return full


NO_IDS, OTHER_MASK = "it has no input_ids [seq", "its attention_mask is not one of its tokens"
UNREPEATED = {
    "no ids": ({"input_ids": None}, NO_IDS),
    "one sequence": ({"input_ids": tokens(2, 7)[0]}, NO_IDS),
    "no tokens": ({"input_ids": tokens(0, 7)}, "it has no tokens"),
    "many tokens": ({"input_ids": tokens(1, calls.MOST_TOKENS + 1)}, "it has more than 4096 tok"),
    "embeddings": ({"inputs_embeds": torch.zeros(2, 7, 4)}, "it takes inputs_embeds, too"),
    "positions": ({"position_ids": torch.arange(7)[None]}, "it takes position_ids, too"),
    "a mask of 4 dims": ({"attention_mask": torch.ones(2, 1, 7, 7)}, OTHER_MASK),
    "masks by kind": ({"attention_mask": {"full_attention": None}}, OTHER_MASK),
    "a cache": ({CACHE: full_cache()}, f"its {CACHE} is no empty DynamicCache"),
}


@pytest.mark.parametrize(("given", "reason"), UNREPEATED.values(), ids=UNREPEATED)
def test_calls_that_no_graph_repeats(given: dict[str, Any], reason: str) -> None:
    config = families.build("qwen3_moe").model.config
    got = call_of({"input_ids": tokens(2, 7), **given}, config)
    assert isinstance(got, str) and got.startswith(reason)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_moe", None),
        ("gpt_oss", None),
        ("openai_privacy_filter", "its attention is not causal"),
        ("qwen3_next", "it has layers of linear_attention"),
        ("deepseek_v32", "it has layers of indexed_attention"),
        ("granitemoehybrid", "it has layers of linear_attention"),
    ],
)
def test_which_decoders_are_captured(family: str, reason: str | None) -> None:
    assert capture_refusal(families.build(family).model.base_model) == reason


def test_outputs_that_no_graph_gives() -> None:
    config = families.build("qwen3_moe").model.config
    call = call_of({"input_ids": tokens(1, 3)}, config)
    assert isinstance(call, Call)
    states = torch.zeros(1, 3, 4)

    def refusal(out: Any) -> str | None:
        return output_refusal(out, call, config)

    good = {"last_hidden_state": states, CACHE: DynamicCache(config=config)}
    assert refusal(ModelOutput(**good)) is None
    assert refusal((states,)) == "its decoder gives tuple"
    assert refusal(ModelOutput(**good, router_logits=(states,))) == (
        "its decoder gives router_logits, too"
    )
    assert refusal(ModelOutput(last_hidden_state=states)) == (
        "its decoder gives a NoneType for a cache"
    )
    other = DynamicCache([(torch.zeros(1, 1, 3, 4),) * 2])
    assert refusal(ModelOutput(**{**good, CACHE: other})) == "its cache has layers of DynamicLayer"


def test_dense_tensors() -> None:
    x = torch.zeros(2, 3, 4)
    assert is_dense(x) and is_dense(x.transpose(0, 2)) and is_dense(x[:1])
    assert (
        not is_dense(x[:, :2])
        and not is_dense(x[:, :, :1])
        and not is_dense(x.expand(2, 3, 4)[:, ::2])
    )
