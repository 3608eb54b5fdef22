"""Decoder layers of transformers' models in two halves, with caches, masks and positions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import plan_halves, two_halves
from moe_ops.testing import TOL, assert_close
from tests.distributed.ranks import processes, results
from tests.distributed.test_transformers import SIZES, generated, make

CLOSE = TOL["model", torch.float32]


class InHalves(nn.Module):
    """A layer that runs in halves, whatever its number of tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.plans: dict[Any, Any] = {}

    def forward(self, x: Tensor, **given: Any) -> Any:
        plan = plan_halves(self.layer, x, halves=True)
        self.plans[x.shape] = plan
        return two_halves(self.layer, x, plan=plan, **given)


def in_halves(whole: Any, group: str, collective: str = "gather") -> Any:
    model = moe_ops.share_experts(copy.deepcopy(whole), group, tokens="own", collective=collective)
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = InHalves(layer)
    return model


def of_families(rank: int, group: str) -> None:
    """Prompts and steps of two families, the second with windows and sinks; padded and not."""
    for family, window in (("qwen3_moe", None), ("gpt_oss", 4)):
        whole = make(family, SIZES if window is None else {**SIZES, "sliding_window": window})
        ids = torch.randint(64, (6, 7))
        padding = torch.ones_like(ids)
        padding[1, :3] = padding[4, :2] = 0
        first, last = (0, 3) if rank == 0 else (3, 6)
        for collective in ("gather", "exchange"):
            model = in_halves(whole, group, collective)
            want, got = whole(ids).logits, model(ids[first:last]).logits
            assert_close(got, want[first:last], CLOSE, f"{family} by {collective}")
            want = whole(ids, attention_mask=padding).logits
            got = model(ids[first:last], attention_mask=padding[first:last]).logits
            seen = padding[first:last].bool()
            assert_close(got[seen], want[first:last][seen], CLOSE, f"{family}, padded")
            assert torch.equal(generated(model, ids[first:last]), generated(whole, ids)[first:last])
            plans = [plan for layer in model.model.layers for plan in layer.plans.values()]
            assert len(plans) > 2 and all(plan.split for plan in plans)


@pytest.mark.slow
@pytest.mark.every
def test_models_in_halves_are_as_whole(tmp_path: Path) -> None:
    processes(2, tmp_path, of_families)


def in_codes(rank: int, group: str, whole: Any) -> None:
    """Experts in codes, whose tokens travel as codes, too."""
    model = in_halves(whole, group)
    moe_ops.quantize_model(
        model, "fp8_w8a8", weight_format="float8_e4m3fn:row", input_format="float8_e4m3fn:row",
        progress=False,
    )  # fmt: skip
    ids = torch.arange(12).view(3, 4) + rank
    layer = model.model.layers[0]
    got = model(ids).logits
    (plan,) = layer.plans.values()
    assert plan.split and plan.rows == 12
    model.model.layers[0] = layer.layer
    assert_close(got, model(ids).logits, CLOSE)


def test_experts_in_codes_run_in_halves() -> None:
    whole = make("qwen3_moe", {**SIZES, "num_hidden_layers": 1, "hidden_size": 64})
    results(2, in_codes, whole)


def alone(rank: int, group: str, whole: Any) -> None:
    """One rank sends nothing, and may run in halves all the same."""
    model = in_halves(whole, group)
    ids = torch.arange(12).view(3, 4)
    assert_close(model(ids).logits, whole(ids).logits, CLOSE)
    (plan,) = model.model.layers[0].plans.values()
    assert plan.split


def test_a_group_of_one_rank_runs_in_halves() -> None:
    results(1, alone, make("qwen3_moe", {**SIZES, "num_hidden_layers": 1}))


def a_prompt(rank: int, group: str, whole: Any) -> Any:
    """The caches of a prompt, and of one more token behind it."""
    model = in_halves(whole, group)
    mine = torch.arange(4 * 5).view(4, 5)[: (3, 1)[rank]] % 64
    out, want = (m(mine, use_cache=True) for m in (model, whole))
    for step in range(2):
        assert_close(out.logits, want.logits, CLOSE, f"rank {rank}, step {step}")
        caches = [o.get("past_key_values", o.get("cache")) for o in (out, want)]
        for layer, other in zip(*(c.layers for c in caches), strict=True):
            assert layer.keys.shape == other.keys.shape
            assert_close(layer.keys, other.keys, CLOSE)
            assert_close(layer.values, other.values, CLOSE)
        last = mine[:, :1] + step
        name = "cache" if "cache" in out else "past_key_values"
        out, want = (
            m(last, use_cache=True, **{name: c})
            for m, c in zip((model, whole), caches, strict=True)
        )


def test_caches_are_split_and_put_together() -> None:
    whole = make("qwen3_moe", {**SIZES, "num_hidden_layers": 1})
    results(2, a_prompt, whole)


def with_a_static_cache(rank: int, group: str, whole: Any) -> None:
    from transformers import StaticCache

    model = in_halves(whole, group)
    cache = StaticCache(config=whole.config, max_cache_len=8)
    ids = torch.arange(10).view(2, 5)
    with pytest.raises(ValueError, match="is a StaticCache with a StaticLayer, and halves take a"):
        try:
            model(ids, cache=cache)
        except TypeError:
            model(ids, past_key_values=cache)


def test_caches_that_cannot_be_split_are_named() -> None:
    whole = make("qwen3_moe", {**SIZES, "num_hidden_layers": 1})
    results(2, with_a_static_cache, whole)
