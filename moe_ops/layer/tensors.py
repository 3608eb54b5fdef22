"""The tensors of an MoE layer on one rank: sizes, and the shape, dtype and rest value of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_ops.checks.shapes import FLOATS, FLOATS_OR_DOUBLE
from moe_ops.ops.activate import Activation
from moe_ops.parallel.expert_map import ExpertPlacement
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.quant.arguments import check_divides
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.packing import E8M0_BIAS

# Tensors with one entry per slot on axis 0, and all tensors of a layer.
PER_EXPERT = tuple(
    f"{w}_{what}"
    for w in ("w13", "w2")
    for what in ("weight", "scale", "zero", "global_scale", "bias")
)
# By the arguments of `experts` that they are; what a layout may reorder.
EXPERT_NAMES = {
    "w13_EFD": "w13_weight", "w2_EDI": "w2_weight", "b13_EF": "w13_bias", "b2_ED": "w2_bias",
    "w13_scale_EFG": "w13_scale", "w2_scale_EDG": "w2_scale",
    "w13_zero_EFG": "w13_zero", "w2_zero_EDG": "w2_zero",
}  # fmt: skip
INPUT_SCALES = ("x_scale", "h_scale")  # with one entry per slot if `per_expert_inputs`
NAMES = (*PER_EXPERT, *INPUT_SCALES, "correction_bias")
# Those that mean something in their format alone, where weights are quantised.
CODED = tuple(name for name in NAMES if not name.endswith("bias"))
# Buffers that belong to what the weights are, and are saved with them.
STATE = ("physical_to_logical", "logical_to_physical", "replica_counts", "input_order")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """The sizes of a layer as a rank holds it, by the letters of the legend, and as it is told.

    D and I may be rounded up; then the first hidden_size of D, and the first `used` of I, mean
    something, and the rest of every weight is zero. Of the whole expert's intermediate_size rows
    this rank holds `first` to `first + used - 1`, of the gate and of the up half each; with tp = 1
    those are all.
    """

    E: int  # slots on this rank, fused shared experts included
    D: int
    I: int  # noqa: E741 the legend's letter
    F: int
    hidden_size: int
    intermediate_size: int
    first: int
    used: int

    @staticmethod
    def of(
        *,
        slots: int,
        hidden_size: int,
        intermediate_size: int,
        gated: bool,
        tp_size: int = 1,
        tp_rank: int = 0,
        hidden_multiple: int = 1,
        intermediate_multiple: int | None = None,
    ) -> LayerSizes:
        """The sizes on one tensor-parallel rank; D and a rank's I rounded up to multiples.

        Raises ValueError for sizes below 1, and where tp_size does not divide the intermediate size
        and no intermediate_multiple asks for rounding.
        """
        sizes = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "hidden_multiple": hidden_multiple,
            "intermediate_multiple": 1 if intermediate_multiple is None else intermediate_multiple,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if intermediate_multiple is None and intermediate_size % tp_size:
            raise ValueError(
                f"intermediate_size={intermediate_size} does not divide by the {tp_size} tensor "
                "parallel ranks; take another size, or pad each rank's share with zeros: "
                "intermediate_multiple=1"
            )
        share = _round_up(-(-intermediate_size // tp_size), sizes["intermediate_multiple"])
        first = min(tp_rank * share, intermediate_size)
        return LayerSizes(
            E=slots,
            D=_round_up(hidden_size, hidden_multiple),
            I=share,
            F=2 * share if gated else share,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            first=first,
            used=min(share, intermediate_size - first),
        )

    @property
    def rounded(self) -> str:
        """Which sizes are rounded up, and to what; "" if none is."""
        pairs = (("hidden", self.hidden_size, self.D), ("intermediate", self.used, self.I))
        found = [f"{what} size {told} held as {held}" for what, told, held in pairs if told != held]
        return ", ".join(found)

    def describe(self, tp_size: int) -> str:
        """The layer's sizes, and what of them one of `tp_size` ranks holds, for a log."""
        text = f"{self.hidden_size} -> {self.intermediate_size} -> {self.hidden_size}"
        if (self.D, self.I * tp_size) != (self.hidden_size, self.intermediate_size):
            text += f", held as {self.D} -> {self.I} -> {self.D}"
        if tp_size > 1:
            text += f", {self.used} of {self.intermediate_size} from {self.first} on"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a layer: its shape, its dtype, and what it holds until weights are loaded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # Repeated along the last axis; decodes to zeros in a weight, to one in a scale.
    rest: tuple[float, ...] = (0.0,)
    fan_in: int | None = None  # set for floating-point weights, which can be trained

    def make(self, device: torch.device | str | None) -> torch.nn.Parameter:
        """The parameter, its memory unwritten."""
        t = torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.nn.Parameter(t, requires_grad=self.trainable)

    @property
    def trainable(self) -> bool:
        return self.fan_in is not None

    def reset(self, t: Tensor) -> None:
        """Write the rest value."""
        with torch.no_grad():
            # float8 cannot be filled on every device; a conversion can be made anywhere.
            each = [torch.full((), value, device=t.device) for value in self.rest]
            rest = torch.stack(each).to(t.dtype)
            if len(self.rest) > 1:
                rest = rest.repeat(t.shape[-1] // len(self.rest))
            t.copy_(rest.expand_as(t))


def tensor_specs(
    sizes: LayerSizes,
    *,
    dtype: torch.dtype,
    formats: QuantConfig | None,
    bias: bool,
    holds_w2_bias: bool,
    num_biased: int,
) -> dict[str, TensorSpec | None]:
    """Every tensor that a layer may hold, by name; None for one that it does not.

    num_biased: how many experts have a correction bias, 0 for none. w2_bias is added once in the
    sum of the ranks, so the first tensor-parallel rank alone holds it.
    """
    dtypes = FLOATS_OR_DOUBLE if formats is None else FLOATS
    if dtype not in dtypes:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"dtype must be {wanted}, the dtype of tokens; got {dtype}")
    wide = torch.promote_types(dtype, torch.float32)
    E, F, D, I = sizes.E, sizes.F, sizes.D, sizes.I  # noqa: E741
    specs: dict[str, TensorSpec | None] = dict.fromkeys(NAMES)
    for name, rows, columns in (("w13", F, D), ("w2", D, I)):
        specs.update(_weight(name, (E, rows, columns), dtype, formats))
    if formats is not None and formats.two_global_scales:
        scales = specs["w13_global_scale"]
        assert scales is not None
        specs["w13_global_scale"] = replace(scales, shape=(E, 2))
    if formats is not None and formats.static_inputs:
        for name in INPUT_SCALES:
            held = E if formats.per_expert_inputs else 1
            specs[name] = TensorSpec(shape=(held,), dtype=torch.float32, rest=(1.0,))
    if bias:
        specs["w13_bias"] = TensorSpec(shape=(E, F), dtype=dtype, fan_in=D)
        if holds_w2_bias:
            specs["w2_bias"] = TensorSpec(shape=(E, D), dtype=dtype, fan_in=I)
    if num_biased:
        specs["correction_bias"] = TensorSpec(shape=(num_biased,), dtype=wide)
    return specs


def layer_buffers(
    placement: ExpertPlacement, sizes: LayerSizes, formats: QuantConfig | None, own_tokens: bool
) -> dict[str, Tensor | None]:
    """The tensors that say where experts and columns are, as a new layer has them, on the CPU; None
    for those that it does not need. Not shared with the placement. own_tokens: it sends tokens.
    """
    order = None
    if formats is not None and formats.ordered_input:
        order = torch.arange(sizes.hidden_size, device="cpu")
        order = order.repeat(sizes.E, 1) if formats.per_expert_order else order
    replicas = loads = physical_loads = counted_part = None
    if placement.balanced:
        loads = torch.zeros(placement.num_experts, dtype=torch.int64, device="cpu")
        physical_loads = torch.zeros(placement.num_physical, dtype=torch.int64, device="cpu")
        counted_part = torch.ones(2, dtype=torch.int64, device="cpu")
    if placement.balanced or placement.redundant:
        replicas = ExpertReplicas.initial(placement.num_experts, placement.redundant)
    expert_map = placement.expert_map
    ranks, slots = (t.clone() for t in placement.serving) if own_tokens else (None, None)
    return {
        "expert_map": None if expert_map is None else expert_map.clone(),
        "loads": loads,
        "physical_loads": physical_loads,
        "counted_part": counted_part,
        "physical_to_logical": None if replicas is None else replicas.physical_to_logical,
        "logical_to_physical": None if replicas is None else replicas.logical_to_physical,
        "replica_counts": None if replicas is None else replicas.counts,
        "input_order": order,
        # Last: torch.export counts those that are None where it counts what comes before others.
        "rank_of_P": ranks,
        "slot_of_P": slots,
    }


def _weight(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, formats: QuantConfig | None
) -> dict[str, TensorSpec]:
    E, rows, columns = shape
    if formats is None:
        return {f"{name}_weight": TensorSpec(shape=shape, dtype=dtype, fan_in=columns)}
    format, parsed = formats.format, formats.format.parsed
    groups = (E, *parsed.scale_shape(rows, columns))
    specs = {
        f"{name}_weight": TensorSpec(
            shape=(E, rows, parsed.packed(columns)),
            dtype=parsed.storage.dtype,
            rest=format.element_type.zeros,
        ),
        f"{name}_scale": TensorSpec(
            shape=groups,
            dtype=parsed.scale_dtype,
            rest=(E8M0_BIAS if format.scale == "e8m0" else 1.0,),
        ),
    }
    if format.has_zero:
        specs[f"{name}_zero"] = TensorSpec(shape=groups, dtype=torch.uint8)
    if format.has_global_scale:
        specs[f"{name}_global_scale"] = TensorSpec(shape=(E,), dtype=torch.float32, rest=(1.0,))
    return specs


def check_fits(formats: QuantConfig, sizes: LayerSizes, shards: int) -> None:
    """Raise ValueError unless the rows of both weights fill bytes and groups of the format, and, of
    several shards, each holds whole groups, and experts have a gate if it has a scale.
    """
    format = formats.format
    if formats.two_global_scales and sizes.F == sizes.I:
        raise ValueError(
            "two_global_scales are those of gate and up, and these experts have no gate; leave it "
            "out"
        )
    try:
        check_divides("w13", format, sizes.F, sizes.D)
        check_divides("w2", format, sizes.D, sizes.I)
    except ValueError as error:
        raise ValueError(
            f"{error}: hidden_multiple and intermediate_multiple of the layer do that, or padding, "
            "the backend for which it is made"
        ) from None
    if shards == 1:
        return
    for axis, group in zip(("rows of w13", "columns of w2"), format.group, strict=True):
        if group > 1 and sizes.I % group:
            raise ValueError(
                f"each of {shards} tensor parallel ranks holds {sizes.I} {axis}, which cuts a "
                f"{format.name} group of {group}; pad each rank's share with zeros: "
                f"intermediate_multiple={group}"
            )


def own_part(name: str, t: Tensor, sizes: LayerSizes, activation: Activation) -> Tensor:
    """The part of a floating-point weight or bias that sizes were not rounded up by, as a view.

    With a gate, w13 gets an axis of gate and up: [E, 2, used, ...], or [E, used, 2, ...] where the
    activation is interleaved.
    """
    if name.startswith("w13"):
        if activation.gated and activation.interleaved:
            t = t.unflatten(1, (sizes.I, 2))[:, : sizes.used]
        elif activation.gated:
            t = t.unflatten(1, (2, sizes.I))[:, :, : sizes.used]
        else:
            t = t[:, : sizes.used]
        return t if name.endswith("bias") else t[..., : sizes.hidden_size]
    t = t[:, : sizes.hidden_size]
    return t if name.endswith("bias") else t[..., : sizes.used]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
