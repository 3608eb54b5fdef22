"""One tensor of a checkpoint into a layer: checked whole, then written to the experts here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from moe_ops.checks.options import check_flag, check_int, check_text, check_type
from moe_ops.checks.shapes import FLOATS, check_choice
from moe_ops.layer import MoELayer
from moe_ops.weights.advice import advising, reworded
from moe_ops.weights.global_scales import Blocks
from moe_ops.weights.layouts import PLAIN, Coding, short
from moe_ops.weights.numbers import agree, load_input
from moe_ops.weights.order import order_of, ordered_sources
from moe_ops.weights.record import PARAMETER_NAMES, WEIGHTS, LoadRecord, Writes
from moe_ops.weights.shards import ShardPlan, check_shape, one_input_scale

SHARDS = ("w1", "w2", "w3", "w13")


def load_expert(
    layer: MoELayer,
    parameter_name: str,
    tensor: Tensor,
    name: str,
    shard: str,
    expert_id: int | None,
    *,
    coding: Coding = PLAIN,
    interleaved: bool = False,
    sharded: bool = False,
    record: LoadRecord | None = None,
) -> bool:
    """Write a tensor of a checkpoint to this rank's part of a layer; False if it lives elsewhere.

    parameter_name: of the layer, such as "w13_weight", "w2_scale" or "x_scale"; also "w13_shape"
    (and of w2), which is checked alone, and "w13_g_idx", which is to come before the other tensors
    of its expert, and puts them in order (see `order.py`). name: of the checkpoint's entry, for
    errors. shard: "w1" (gate), "w3" (up), "w2" (down), or "w13" for gate and up in one tensor,
    whose rows alternate if `interleaved`. expert_id: logical, of the whole layer; num_experts and
    above are fused shared experts; None: the tensor has all routed experts on its first axis. An
    expert with replicas is written to each of them that is here.

    tensor: whole, as the checkpoint has it, of which w1 and w3 are narrowed along their outputs and
    w2 along its inputs; or, if `sharded`, this rank's part already. coding: the checkpoint's
    layout. Floating-point weights and biases are rounded to the layer's dtype; codes and scales
    never are. Scales multiply: take `quant.scales.inverse` of others.

    Where one number serves w1 and w3, they must agree, but for scales of inputs: the largest one
    serves w1 and w3 and, unless the layer has per_expert_inputs, all experts. A `record` of what
    was loaded before is then needed. For one scale every rank is to be given those of all experts.

    Raises ValueError or TypeError, naming the entry, for a tensor that does not fit; the layer is
    then as it was.
    """
    check_type("layer", layer, MoELayer, "a MoELayer")
    if layer.layout:
        raise ValueError(
            f"the layer is prepared as {layer.layout!r}; load inside `with layer.as_loaded():`, "
            "which prepares it again at its end"
        )
    check_text("name", name)
    check_type(f"{name}: tensor", tensor, Tensor, "a Tensor")
    if expert_id is not None:
        check_int("expert_id", expert_id, least=0)
    check_type("coding", coding, Coding, "a Coding")
    check_flag("interleaved", interleaved)
    check_flag("sharded", sharded)
    if record is not None:
        check_type("record", record, LoadRecord, "a LoadRecord or None")
    piece = Piece(parameter_name, tensor, name, shard, expert_id, coding, interleaved, sharded)
    here, writes = prepare_expert(layer, piece, record)
    write(writes)
    return here


def write(writes: Writes) -> None:
    """Do the writes, one at a time."""
    for target, source in writes:
        target.copy_(source)


@dataclass(slots=True, eq=False)
class Piece:
    """A tensor of a checkpoint, and what it is in a layer: the arguments of `load_expert`."""

    parameter: str
    tensor: Tensor
    name: str
    shard: str
    expert: int | None
    coding: Coding
    interleaved: bool
    sharded: bool


def prepare_expert(layer: MoELayer, piece: Piece, record: LoadRecord | None) -> tuple[bool, Writes]:
    """`load_expert` up to the writes, which are still to be done: several can then be done at once.

    Checks everything, and keeps numbers that must agree in the record. Writes that are a list need
    no memory of their own; others make, one after the other, what they write.
    """
    parameter, name, shard, sharded = piece.parameter, piece.name, piece.shard, piece.sharded
    check_choice("shard", shard, SHARDS)
    check_choice("parameter_name", parameter, PARAMETER_NAMES)
    part, second = WEIGHTS[parameter]
    if second != (shard == "w2"):
        raise ValueError(f"{name}: shard {shard!r} is no part of {parameter}")
    stacked = piece.expert is None
    experts = range(layer.num_experts) if piece.expert is None else (piece.expert,)
    given, record = record, record or LoadRecord()
    try:
        slots = [record.slots_of(layer, e) for e in experts]
        t_E = _by_expert(piece.tensor, len(experts), stacked, part)
        if part == "input":
            writes = load_input(layer, parameter, t_E, experts, shard, given)
            return one_input_scale(layer) or any(slots), writes
        if part == "g_idx":
            _load_order(layer, shard, zip(experts, t_E, slots, strict=True), name, given, sharded)
            if given is None or second:
                return any(slots), ()
            return any(slots), given.orders.input_writes(
                layer, list(zip(experts, slots, strict=True))
            )
        if part == "shape":
            check_shape(layer, shard, t_E, sharded)
            return any(slots), ()
        held = getattr(layer, parameter)
        if held is None:
            _check_not_held(layer, piece, part, t_E, record)
            return False, ()
        if part == "weight" and layer.quant is not None and piece.tensor.dtype in FLOATS:
            raise advising(
                TypeError,
                f"is {short(piece.tensor.dtype)}, but the layer's tensor is {short(held.dtype)}",
                "give the layer the checkpoint's format: none (quant=None) where it leaves a layer "
                "unquantised, and a module where it leaves shared experts so",
            )
        order_writes: Writes = []
        if part == "weight" and not second and layer.input_order is not None:
            if given is None:
                raise ValueError("the layer's input is put in order; pass this load's LoadRecord")
            here_alone = [(e, s) for e, s in zip(experts, slots, strict=True) if s]
            record.orders.tell_none(layer, (e for e, _ in here_alone), name)
            order_writes = record.orders.input_writes(layer, here_alone)
        ordered = record.orders.some
        how = record.plan_of(layer, parameter, shard, piece.coding, piece.interleaved, sharded)
        here = [(e, t, s) for e, t, s in zip(experts, t_E, slots, strict=True) if s]
        orders = {e: record.orders.of(second, e) for e, *_ in here} if ordered else {}
        record.orders.written.update(e for e, *_ in here)
        # Gate and up in one tensor can be compared without a record.
        writes = _checked(how, here, orders, parameter, name, record if shard == "w13" else given)
        return any(slots), chain(order_writes, writes) if order_writes else writes
    except (ValueError, TypeError) as error:
        raise reworded(error, f"{name}: {error}") from error


def _by_expert(tensor: Tensor, experts: int, stacked: bool, part: str) -> Sequence[Tensor]:
    """The tensor of each expert; of a stacked one that is one value for all, the same for each."""
    if not stacked:
        return (tensor,)
    if tensor.numel() == 1 and part in ("scale", "global_scale", "input"):
        return (tensor.reshape(()),) * experts
    if part == "shape":
        return (tensor,) * experts
    if tensor.dim() == 0 or tensor.shape[0] != experts:
        raise advising(
            ValueError,
            f"expected {experts} experts on axis 0, found {list(tensor.shape)}",
            "make the layer with the checkpoint's num_experts",
        )
    return tensor.unbind(0)


def _checked(
    how: ShardPlan,
    here: list[tuple[int, Tensor, tuple[int, ...]]],
    orders: Mapping[int, tuple[Tensor | None, Tensor | None]],
    parameter: str,
    name: str,
    record: LoadRecord | None,
) -> Writes:
    """What is to be written, checked.

    Raises ValueError or TypeError unless every expert's tensor fits, and agrees with others. Of
    weights those that are converted are alike in shape and dtype, which is all that can be wrong
    with them, so the first block of the first one is looked at. What a conversion made is dropped,
    and made again when it is written, so memory is needed for one block at a time.
    """

    def sources(expert: int, t: Tensor) -> Iterator[tuple[Tensor, int, int]]:
        rows, columns = orders.get(expert, (None, None))
        if rows is None and columns is None:
            return how.sources(t)
        return ordered_sources(how, t, rows, columns)

    def writes(e: int, t: Tensor, slots: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        for source in sources(e, t):
            for slot in slots:
                yield how.region(slot, *source), source[0]

    later = (found for one in here for found in writes(*one))
    if how.part == "weight" and (how.matrix.convert is not None or orders):
        for e, t, _ in here[:1]:
            next(sources(e, t), None)
        return later
    made, scales = False, None if record is None else record.global_scales
    of_blocks = parameter == "w13_scale" and how.format is not None and how.format.has_global_scale
    for e, t, slots in here:
        for source, half, _ in sources(e, t):
            wrong = how.wrong_in(source)
            if wrong is not None:
                raise ValueError(
                    f"holds {wrong}; complete the download, or quantise the weights again"
                )
            made = made or source.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
            if scales is not None and how.shared and how.part == "global_scale":
                scales.tell(e, half, source, name)
            elif how.shared:
                agree(parameter, name, e, source, record)
            elif scales is not None and of_blocks:
                scales.blocks[e, half] = Blocks(plan=how, slots=slots, half=half, scales=source)
    return later if made else list(later)


def _load_order(
    layer: MoELayer,
    shard: str,
    found: Iterable[tuple[int, Tensor, tuple[int, ...]]],
    name: str,
    record: LoadRecord | None,
    sharded: bool,
) -> None:
    """Keep the order of the columns of experts here, for the tensors that follow."""
    for expert, t, slots in found:
        order = order_of(layer, shard, t, sharded=sharded)
        if order is not None and record is None:
            raise ValueError("orders the tensors that follow; pass this load's LoadRecord")
        # An expert that may come here later has to have the order of this rank's input too.
        if record is not None and (slots or layer.replicas is not None):
            record.orders.tell(layer, shard == "w2", expert, order, name)


def _check_not_held(
    layer: MoELayer, piece: Piece, part: str, t_E: Sequence[Tensor], record: LoadRecord
) -> None:
    """Raise ValueError unless the layer computes the same without this tensor."""
    parameter, coding = piece.parameter, piece.coding
    if parameter == "w2_bias" and layer.w13_bias is not None:
        return  # added once in the sum of the ranks, by the first
    format = None if layer.quant is None else layer.quant.format
    if part == "zero" and format is not None and format.integer is not None:
        # Symmetric weights whose checkpoint spells out that their zero is the middle.
        scale = parameter.replace("zero", "scale")
        how = record.plan_of(layer, scale, piece.shard, coding, piece.interleaved, piece.sharded)
        matrix = coding.matrix("zero", format)
        shape = matrix.shape(how.rows.whole * len(how.halves), how.columns.whole)
        for t in t_E:
            if tuple(t.shape) != shape:
                raise ValueError(f"expected the shape {shape}, found {tuple(t.shape)}")
            zero = t if matrix.convert is None else matrix.convert(t, format)
            if not bool((zero == format.middle).all()):
                raise advising(
                    ValueError,
                    f"has zero points other than {format.middle}, but the layer's {format.name} is "
                    "symmetric",
                    f"give it the format u{format.name}",
                )
        return
    advice = "make it with bias=True" if part == "bias" else "give it the format of the checkpoint"
    raise advising(ValueError, f"the layer holds no {parameter}", advice)
