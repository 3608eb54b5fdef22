"""Options of ops that are declared again in a layer's, which are frozen and so cannot share a base
with records: they have the same names, types, defaults and order."""

from __future__ import annotations

import typing
from dataclasses import MISSING, fields
from typing import Any

import pytest

from moe_ops.layer.options import ROUTE_OPTIONS, Routing
from moe_ops.ops.activate import ActivateCall, Activation
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.route import RouteCall

Declared = list[tuple[str, Any, Any]]
ACTIVATION = [field.name for field in fields(Activation)]
NOT_ROUTING = {"logits_TE", "top_k", "bias_E", "per_expert_scale_E", "out_dtype"}


def declared(record: type, names: typing.Iterable[str]) -> Declared:
    """The fields of these names, with type and default, in the record's order."""
    hints = typing.get_type_hints(record)
    return [(f.name, hints[f.name], f.default) for f in fields(record) if f.name in names]


@pytest.mark.parametrize("record", [ActivateCall, ExpertsCall])
def test_a_layer_is_told_its_activation_as_the_ops_are(record: type) -> None:
    want = declared(ActivateCall, ACTIVATION)
    assert declared(record, ACTIVATION) == want
    (name, kind, default), *others = declared(Activation, ACTIVATION)
    assert ((name, kind), default) == (want[0][:2], MISSING)  # a layer has to name it
    assert others == want[1:]
    assert [f.name for f in fields(ActivateCall)] == ["y_RF", *ACTIVATION]


def test_a_layer_is_told_its_routing_as_route_is() -> None:
    assert {f.name for f in fields(RouteCall)} == NOT_ROUTING | set(ROUTE_OPTIONS)
    assert declared(Routing, ROUTE_OPTIONS) == declared(RouteCall, ROUTE_OPTIONS)
    ((_, *given),) = declared(RouteCall, ["out_dtype"])
    assert declared(Routing, ["weights_dtype"]) == [("weights_dtype", *given)]
