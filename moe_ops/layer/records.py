"""What a `MoELayer` is told that belongs together, as records; each field is a keyword, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

from torch import nn

from moe_ops.checks.options import check_type
from moe_ops.checks.signature import did_you_mean
from moe_ops.layer.exchange import OWN_TOKENS
from moe_ops.layer.parts import PARTIAL
from moe_ops.parallel.expert_map import LINEAR


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Experts that every token goes to: `MoELayer(..., shared_experts=SharedExperts(module))`.

    shared_experts: a module that is given the layer's input, or a number of shared experts with the
    shape of a routed one that take slots after those. shared_reduction says what a module returns
    on each of several ranks: "partial", its part of the sum, or "replicated", all of it, which is
    then added once. Where ranks exchange tokens the module runs meanwhile, and must not do so
    itself. Each rank holds fused ones; under expert parallelism it serves every ep-th token, from
    its rank on.

    With separate, forward returns (shared, routed) instead of their sum, each reduced or a part as
    the sum would be, and a "replicated" shared one on every rank.

    beside: run a module on a second stream of a GPU, beside routed experts; None: where ranks
    exchange tokens, and elsewhere where that was measured to pay. On a CPU, where a gradient is
    asked for, and while a graph is traced it runs in the order of the code: in graphs the option
    `beside` of `moe_ops.compile` says it.
    """

    shared_experts: nn.Module | int = 0
    shared_reduction: str = PARTIAL
    separate: bool = False
    beside: bool | None = None


@dataclass(frozen=True, slots=True)
class Latent:
    """What makes a latent layer, whose experts have another width: `latent=Latent(down, up)`.

    routed_input_transform changes what routed experts are given, not what the gate and shared
    experts are; its result has hidden_size columns. routed_output_transform changes what they
    return, to the width that shared experts have. It is given the sum over the ranks if
    reduce_results makes it, else this rank's part: then it has to be linear, without bias.
    """

    routed_input_transform: nn.Module | None = None
    routed_output_transform: nn.Module | None = None


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """Ranks start with tokens of their own, and exchange them: `tokens=OwnTokens(group, most)`.

    group: the name of the process group of all ranks. max_num_tokens: the most tokens that a rank
    sends at once, alike on all ranks; a call with more runs in parts, and workspaces and buffers
    are as large as one part needs. tp_group: that of neighbours with the same tokens (tensor
    parallel attention without sequence parallelism), which send a part each.
    """

    group: str = ""
    max_num_tokens: int | None = None
    tp_group: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where experts are: `placement=Placement(redundant_experts=2, balanced=True)`.

    placement: see `place`. redundant_experts: physical experts beyond num_experts. balanced: count
    in `loads` how many pairs each expert gets, and let experts change places.
    """

    placement: str = LINEAR
    redundant_experts: int = 0
    balanced: bool = False


@dataclass(frozen=True, slots=True)
class Padding:
    """What sizes are rounded up for where a backend cannot take them as they are; what is added is
    zero, and is not seen outside: `padding="flashinfer_cutlass"` or `Padding(hidden_multiple=128)`.

    padding: the backend of `experts` for which the layer is made: it says of which multiples sizes
    are to be, and so do the layer's formats. hidden_multiple, intermediate_multiple: multiples as
    they are told, beside those. What a transport needs of tokens that a rank sends is asked anyway.
    """

    hidden_multiple: int = 1
    intermediate_multiple: int | None = None
    padding: str | None = None


class Fields(TypedDict, total=False):
    """The fields of records that a `MoELayer` takes by themselves."""

    shared_reduction: str
    separate: bool
    beside: bool | None
    routed_input_transform: nn.Module | None
    routed_output_transform: nn.Module | None
    group: str
    max_num_tokens: int | None
    tp_group: str
    redundant_experts: int
    balanced: bool
    hidden_multiple: int
    intermediate_multiple: int | None


Record = TypeVar("Record", SharedExperts, Latent, Placement, Padding)
RECORDS: dict[str, type[Any]] = {
    "shared_experts": SharedExperts, "latent": Latent, "tokens": OwnTokens,
    "placement": Placement, "padding": Padding,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of a layer, whichever were given; in `given` every argument by its own name,
    fields of records among them."""

    shared: SharedExperts
    latent: Latent
    placement: Placement
    padding: Padding
    given: dict[str, Any]

    @classmethod
    def of(cls, arguments: Mapping[str, Any], by_field: Mapping[str, Any]) -> Records:
        """The records of a layer's arguments, and of fields that were given by themselves.

        Raises TypeError for a field that there is not and for what is no record, and ValueError for
        a field that is given beside its record.
        """
        unknown = [name for name in by_field if name not in Fields.__annotations__]
        if unknown:
            hint = did_you_mean(unknown[0], [*arguments, *Fields.__annotations__])
            raise TypeError(f"MoELayer takes no keyword {unknown[0]!r}{hint}")
        given = dict(arguments)
        for keyword, kind in RECORDS.items():
            given.update(_values(keyword, kind, given[keyword], by_field))
        if isinstance(arguments["tokens"], OwnTokens):
            given["tokens"] = OWN_TOKENS
        return cls(
            shared=_made(SharedExperts, given), latent=_made(Latent, given),
            placement=_made(Placement, given), padding=_made(Padding, given), given=given,
        )  # fmt: skip


def _made(kind: type[Record], given: Mapping[str, Any]) -> Record:
    return kind(**{field.name: given[field.name] for field in fields(kind)})


def _values(
    keyword: str, kind: type[Any], value: Any, by_field: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a record that was given, or else of those that were given by themselves."""
    names = [f.name for f in fields(kind)]
    beside = [name for name in names if name in by_field]
    if isinstance(value, kind):
        if beside:
            raise ValueError(
                f"{', '.join(beside)} is given by itself and in {keyword}={kind.__name__}(...); "
                "give it there alone"
            )
        return {name: getattr(value, name) for name in names}
    if keyword not in (*names, "tokens") and value is not None:
        check_type(keyword, value, kind, f"a moe_ops.layer.{kind.__name__} or None")
    by_itself = {keyword: value} if keyword in names else {}
    made = kind(**{name: by_field[name] for name in beside}, **by_itself)
    return {name: getattr(made, name) for name in names}
