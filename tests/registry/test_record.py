"""Records of arguments, and the flat calls and schemas that are made from them."""

import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from moe_ops import OPS
from moe_ops.registry.record import Annotations, Arguments


@dataclass(slots=True)
class Inner:
    x: Tensor
    ids: Tensor
    scale: float = 1.0


@dataclass(slots=True)
class Other:
    y: Tensor
    kind: str = "silu"
    limit: float | None = None


@dataclass(slots=True)
class Both:
    inner: Inner
    other: Other

    FLAT: ClassVar[dict[str, str]] = {
        "x": "inner.x", "y": "other.y", "factor": "inner.scale", "kind": "other.kind",
    }  # fmt: skip


X, Y = torch.zeros(2), torch.ones(3)


def test_a_record_is_its_own_maker() -> None:
    arguments = Arguments(Inner)
    assert arguments.of is Inner
    assert arguments.flat(Inner(X, Y)) == (X, Y, 1.0)
    assert arguments.first(Inner(X, Y)) is X
    assert list(arguments.by_name(Inner(X, Y, 2.0)).items())[-1] == ("scale", 2.0)
    assert arguments.schema(Tensor) == "(Tensor x, Tensor ids, float scale=1.0) -> Tensor"


def test_arguments_by_name_are_put_in_order() -> None:
    arguments = Arguments(Other)
    assert arguments.in_order({"limit": 2.0, "y": Y}) == (Y, "silu", 2.0)
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        arguments.in_order({"kind": "gelu"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        arguments.in_order({"y": Y, "x": X})


def test_a_record_of_records_is_flat_in_its_own_order() -> None:
    arguments = Arguments(Both)
    schema = '(Tensor x, Tensor y, float factor=1.0, str kind="silu") -> Tensor'
    assert arguments.schema(Tensor) == schema
    for both in (arguments.of(X, Y, 2.0), arguments.of(y=Y, x=X, factor=2.0)):
        assert both.inner.x is X and both.inner.scale == 2.0
        assert both.inner.ids is None  # what FLAT leaves out
        assert both.other == Other(Y)
        assert arguments.flat(both) == (X, Y, 2.0, "silu")
        assert arguments.first(both) is X
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        arguments.of(X)


def test_what_takes_no_record_is_refused() -> None:
    def two(call: Inner, other: Other) -> Tensor: ...

    def plain(x: Tensor) -> Tensor: ...

    for function in (two, plain):
        with pytest.raises(TypeError, match="must take one record, such as `call: RouteCall`"):
            _ = Annotations.of(function).record
    assert str(Annotations.of(two)) == "(Inner, Other) -> Tensor"


def test_types_of_one_name_are_not_one_type() -> None:
    def ours(call: Inner) -> Tensor: ...

    def theirs(call: Inner) -> Tensor: ...

    theirs.__annotations__["call"] = type("Inner", (), {})
    assert str(Annotations.of(ours)) == str(Annotations.of(theirs))
    assert Annotations.of(ours) != Annotations.of(theirs)


@pytest.mark.parametrize("name", OPS)
def test_help_shows_the_arguments_of_an_op(name: str) -> None:
    op = OPS[name]
    shown = inspect.signature(op)
    assert [*shown.parameters] == [a.name for a in op.overload._schema.arguments]
    required = [a.name for a in op.overload._schema.arguments if not a.has_default_value()]
    assert [n for n, p in shown.parameters.items() if p.default is p.empty] == required
