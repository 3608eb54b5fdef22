"""What belongs together may be given to a MoELayer as a record, or each field by itself."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from moe_ops.layer import Latent, MoELayer, OwnTokens, Padding, Placement, SharedExperts
from moe_ops.layer.records import RECORDS, Fields
from moe_ops.parallel.config import ParallelConfig

SIZES = (4, 2, 16, 8)
DOWN, UP = nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False)
MLP = nn.Linear(16, 16)
EP = ParallelConfig(ep_size=2, ep_rank=1)
# By record, and each field by itself.
ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared module": (
        {"shared_experts": SharedExperts(MLP, "replicated", separate=True, beside=False)},
        {
            "shared_experts": MLP,
            "shared_reduction": "replicated",
            "separate": True,
            "beside": False,
        },
    ),
    "fused shared": ({"shared_experts": SharedExperts(2)}, {"shared_experts": 2}),
    "latent": (
        {"latent": Latent(DOWN, UP)},
        {"routed_input_transform": DOWN, "routed_output_transform": UP},
    ),
    "placement": (
        {"placement": Placement(redundant_experts=2, balanced=True), "parallel": EP},
        {"redundant_experts": 2, "balanced": True, "parallel": EP},
    ),
    "padding": (
        {"padding": Padding(hidden_multiple=32, intermediate_multiple=16)},
        {"hidden_multiple": 32, "intermediate_multiple": 16},
    ),
    "tokens of one rank": (
        {"tokens": OwnTokens("group", 64)},
        {"tokens": "own", "group": "group", "max_num_tokens": 64},
    ),
}


@pytest.mark.parametrize(("record", "keywords"), ALIKE.values(), ids=ALIKE)
def test_a_record_and_its_fields_make_the_same_layer(
    record: dict[str, Any], keywords: dict[str, Any]
) -> None:
    layers = [MoELayer(*SIZES, internal_gate=True, **given) for given in (record, keywords)]
    layers[1].load_state_dict(layers[0].state_dict())
    assert repr(layers[0]) == repr(layers[1])
    assert layers[0].placement == layers[1].placement and layers[0].sizes == layers[1].sizes
    x_TD = torch.randn(3, 32 if "latent" in record else 16)
    with torch.no_grad():
        got, want = (layer(x_TD) for layer in layers)
    torch.testing.assert_close(got, want, rtol=0, atol=0)  # both may be two tensors


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a field beside its record": (
        {"placement": Placement(balanced=True), "redundant_experts": 1},
        ValueError,
        "redundant_experts is given by itself and in placement=Placement(...); give it there alone",
    ),
    "two fields beside it": (
        {"tokens": OwnTokens("g"), "max_num_tokens": 3, "group": "g"},
        ValueError,
        "group, max_num_tokens is given by itself and in tokens=OwnTokens(...)",
    ),
    "no record": (
        {"latent": DOWN},
        TypeError,
        "latent must be a moe_ops.layer.Latent or None, got a Linear",
    ),
    "a size for a record": ({"padding": 16}, TypeError, "padding must be a moe_ops.layer.Padding"),
    "another record": (
        {"shared_experts": Placement()},
        TypeError,
        "shared_experts, where it is no module, must be an int, got a Placement",
    ),
    "a record of tokens for the placement": (
        {"placement": OwnTokens("g")},
        TypeError,
        "placement must be a str, got an OwnTokens",
    ),
    "a misspelt field": (
        {"redundant_expert": 1},
        TypeError,
        "MoELayer takes no keyword 'redundant_expert'; did you mean 'redundant_experts'?",
    ),
    "a wrong field of a record": (
        {"padding": Padding(hidden_multiple=0)},
        ValueError,
        "hidden_multiple=0 must be at least 1",
    ),
    "a wrong word in a record": (
        {"shared_experts": SharedExperts(MLP, "all")},
        ValueError,
        "shared_reduction='all' is unknown",
    ),
    "groups without an exchange": (
        {"group": "g"},
        ValueError,
        "group is read where ranks exchange tokens of their own, and tokens=None",
    ),
}


@pytest.mark.parametrize(("given", "error", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_together_is_refused(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match="^" + re.escape(said)):
        MoELayer(*SIZES, **given)


def test_each_field_has_one_name_and_is_a_keyword() -> None:
    names = [f.name for kind in RECORDS.values() for f in fields(kind)]
    assert len(names) == len(set(names))
    assert set(names) - set(RECORDS) == set(Fields.__annotations__)
