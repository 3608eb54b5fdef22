"""What users make a layer of, and share it with: constructors, and functions that check options."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_ops import MoELayer, QuantConfig, Routing, activate, route, using
from moe_ops.fake_impls.formats import ELEMENTS, PUBLISHED, SCALES
from moe_ops.ops.activate import KINDS, Activation
from moe_ops.parallel.config import COLLECTIVES, HIGH_THROUGHPUT, ParallelConfig
from moe_ops.parallel.expert_map import PLACEMENTS, ExpertPlacement, place
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import TOL, assert_close
from tests.fuzz.attempts import (
    FLAG,
    INF,
    NAN,
    NO_COUNT,
    NO_FLAG,
    NO_LAYER_SIZE,
    NO_NAME,
    NO_NUMBER,
    NO_OBJECT,
    NO_SIZE,
    Attempt,
    Slot,
    Target,
    attempt_of,
    kept,
    optional,
)

E, K, D, I = 8, 2, 16, 8  # noqa: E741  the legend's letter
NUMBER = Slot(legal=(0.0, 0.5, 1, 2.5), illegal=NO_NUMBER)
EP, TP = ParallelConfig(ep_size=4, ep_rank=1), ParallelConfig(tp_size=2, tp_rank=1)
APART = ParallelConfig.of(dp=2, tp=2, tp_rank=1, expert_parallel=True)
PARALLEL = Slot(
    legal=(ParallelConfig(), EP, TP, APART, ParallelConfig(ep_size=2, collective=HIGH_THROUGHPUT)),
    illegal=(*NO_OBJECT, ParallelConfig),
)


def one_of(*choices: str) -> Slot:
    return Slot(legal=choices, illegal=NO_NAME)


ROUTING = {
    "score": one_of("softmax", "sigmoid"),
    "select_on": one_of("score", "logit"),
    "n_group": Slot(legal=(1, 2, 4), illegal=(*NO_SIZE, 3, 2**31)),
    "topk_group": Slot(legal=(1, 2), illegal=(*NO_SIZE, 5, 2**31)),
    "group_reduce": one_of("top2sum", "max"),
    "group_fill": one_of("-inf", "zero", "zero_weight"),
    "softmax_selected": FLAG,
    "renormalize": FLAG,
    "eps": NUMBER,
    "min_sum": NUMBER,
    "scale": NUMBER,
    "weights_dtype": Slot(
        legal=("float32", "bfloat16", "float16"), illegal=NO_NAME, words=("out_dtype",)
    ),
    "correction_bias": FLAG,
    "custom": Slot(legal=(None,), illegal=NO_OBJECT[1:-1]),
    "weight_on_input": FLAG,
}


def checked_routing(**given: Any) -> Routing:
    routing = Routing(**given)
    routing.check(E, K)
    return routing


def right_routing(got: Routing, given: dict[str, Any]) -> None:
    """The op takes its arguments, and chooses K different experts of those there are."""
    kept(got, given)
    bias_E = torch.zeros(E) if got.correction_bias else None
    weights_TK, ids_TK = route(torch.randn(3, E), K, bias_E, **got.options)
    assert weights_TK.shape == ids_TK.shape == (3, K)
    assert str(weights_TK.dtype) == f"torch.{got.weights_dtype}"
    assert all(len({*row}) == K and min(row) >= 0 and max(row) < E for row in ids_TK.tolist())


ACTIVATION = {
    "kind": one_of(*KINDS),
    "gated": FLAG,
    "interleaved": FLAG,
    "alpha": NUMBER,
    "limit": Slot(legal=(None, 0.5, 7), illegal=(*NO_NUMBER[1:-3], NAN, -INF, 0, -1.0)),
    "up_shift": NUMBER,
}


def taken_activation(**given: Any) -> Activation:
    """An activation is checked by the layer that takes it."""
    return MoELayer(E, K, D, I, activation=Activation(**given), device="meta").activation


def right_activation(got: Activation, given: dict[str, Any]) -> None:
    """The op takes its arguments, and halves the width if it is gated."""
    kept(got, given)
    h = activate(torch.randn(3, 2 * I), *got.args)
    assert h.shape == (3, I if got.gated else 2 * I) and bool(h.isfinite().all())


FORMATS = ("int8:row", "uint4:1x64", "float8_e4m3fn:128x128", *PUBLISHED)
NO_FORMAT = (*NO_NAME, "int8:0x1", "int8:row:row", "int8:1x", "float8_e4m3fn:-1x128", "mxfp5")
QUANT_CONFIG = {
    "weights": Slot(legal=FORMATS, illegal=NO_FORMAT),
    "inputs": Slot(legal=("", *FORMATS), illegal=tuple(f for f in NO_FORMAT if f != "")),
    "static_inputs": FLAG,
    "per_expert_inputs": FLAG,
    "ordered_input": FLAG,
    "per_expert_order": FLAG,
}


def right_formats(got: QuantConfig, given: dict[str, Any]) -> None:
    """They are those of a scheme."""
    kept(got, given)
    assert got.scheme in SCHEMES and got.format == Format.of(given["weights"])


def right_scheme(got: QuantConfig | None, given: dict[str, Any]) -> None:
    quant = given["quant"]
    names = () if got is None else (got, got.scheme, got.weights)
    assert got is None if quant in (None, "none") else quant in names


FORMAT = {
    "element": one_of(*ELEMENTS),
    "group": Slot(
        legal=((-1, -1), (1, -1), (128, 128), (1, 32)),
        illegal=(
            *NO_OBJECT, (0, 1), (1,), (1, 2, 3), (1.0, 2), (True, 1), (-2, 1), "row", [1, 32],
            (1, NAN), (1, 2**70), (None, 1),
        ),
    ),
    "scale": one_of(*SCALES),
}  # fmt: skip


def right_format(got: Format, given: dict[str, Any]) -> None:
    """Its name says all of it."""
    kept(got, given)
    assert Format.of(got.name) == got


GROUPS = ("tp", "dp", "pcp", "sp", "ep")
SIZES = Slot(legal=(1, 2, 4), illegal=NO_SIZE)
RANKS = Slot(legal=(0, 1), illegal=(*NO_COUNT, 2**31))
COLLECTIVE = one_of(*COLLECTIVES)
CONFIG = {
    **{f"{group}_size": SIZES for group in GROUPS},
    **{f"{group}_rank": RANKS for group in GROUPS},
    "collective": COLLECTIVE,
}
OF = {
    **dict.fromkeys(("tp", "dp", "pcp"), SIZES),
    **dict.fromkeys(("tp_rank", "dp_rank", "pcp_rank"), RANKS),
    "sequence_parallel": FLAG,
    "expert_parallel": FLAG,
    "collective": COLLECTIVE,
}


def right_rank(got: ParallelConfig, given: dict[str, Any]) -> None:
    """The rank is one of the flattened group, which has a rank for each of its parts."""
    sizes = [given.get(group, 1) for group in ("tp", "dp", "pcp")]
    assert got.size == sizes[0] * sizes[1] * sizes[2] and 0 <= got.rank < got.size
    assert got.uses_ep == (got.size > 1 and given.get("expert_parallel", False))
    assert got.describe()


class Mesh:
    """What is asked of a DeviceMesh of 2 x 2 ranks."""

    mesh_dim_names = ("data", "model")

    def size(self, place: int) -> int:
        return 2

    def get_local_rank(self, place: int) -> int:
        return place


DIMENSION = Slot(legal=(None, "data", "model"), illegal=(*NO_NAME[1:], "tp"))
FROM_MESH = {
    "mesh": Slot(legal=(Mesh(),), illegal=NO_OBJECT),
    **dict.fromkeys(("tp", "dp", "pcp"), DIMENSION),
    "sequence_parallel": FLAG,
    "expert_parallel": FLAG,
    "collective": COLLECTIVE,
}


def right_mesh(got: ParallelConfig, given: dict[str, Any]) -> None:
    named = [given.get(group) for group in ("tp", "dp", "pcp")]
    assert got.size == 2 ** sum(name is not None for name in named)


PLACE = {
    "num_experts": Slot(legal=(E, 4, 7), illegal=NO_LAYER_SIZE),
    "config": PARALLEL,
    "placement": one_of(*PLACEMENTS),
    "redundant": Slot(legal=(0, 1, 3), illegal=(*NO_COUNT, 2**31)),
    "shared": Slot(legal=(0, 2), illegal=(*NO_COUNT, 2**31)),
    "num_groups": Slot(legal=(1, 2), illegal=(*NO_SIZE, 2**31)),
    "balanced": FLAG,
}


def right_placement(got: ExpertPlacement, given: dict[str, Any]) -> None:
    """Each expert lies on one rank, and the maps say where."""
    ranks = range(got.config.ep_size)
    everywhere = sorted(e for rank in ranks for e in got.ids_of(rank))
    assert everywhere == list(range(got.num_physical)) == sorted(got.physical_to_global.tolist())
    assert [got.local_id(e) for e in got.local_to_global.tolist()] == list(range(got.num_local))
    assert int(got.mask.sum()) == got.num_slots
    assert got.num_experts == given["num_experts"] and got.config == given["config"]


NO_MODULE = (*NO_OBJECT[1:], nn.Linear, torch.ones)
LAYER = {
    "num_experts": Slot(legal=(E, 4), illegal=NO_LAYER_SIZE),
    "top_k": Slot(legal=(1, 2), illegal=(*NO_LAYER_SIZE, 9)),
    "hidden_size": Slot(legal=(D, 32), illegal=NO_LAYER_SIZE),
    "intermediate_size": Slot(legal=(I, 6, 7), illegal=NO_LAYER_SIZE),
    "routing": Slot(
        legal=(
            Routing(), Routing(renormalize=True), Routing(n_group=2, group_reduce="max"),
            Routing(score="sigmoid", correction_bias=True, scale=2.5),
            Routing(weight_on_input=True),
        ),
        illegal=(*NO_OBJECT, Routing),
    ),
    "activation": Slot(
        legal=(
            Activation(kind="silu"), Activation(kind="relu2", gated=False),
            Activation(kind="silu", interleaved=True, limit=1.0),
        ),
        illegal=(*NO_OBJECT, Activation, "silu"),
    ),
    "bias": FLAG,
    "shared_experts": Slot(
        legal=(0, 1, 2, nn.Linear(D, D)), illegal=(*NO_COUNT, 2**31, nn.Linear)
    ),
    "shared_reduction": one_of("partial", "replicated"),
    "internal_gate": Slot(
        legal=(True, False, nn.Linear(D, E)), illegal=(*NO_FLAG, nn.Linear, nn.Linear(D, 3))
    ),
    "routed_input_transform": Slot(legal=(None, nn.Linear(D, D)), illegal=NO_MODULE),
    "routed_output_transform": Slot(legal=(None, nn.Linear(D, D, bias=False)), illegal=NO_MODULE),
    "separate": FLAG,
    "beside": optional(FLAG),
    "quant": Slot(
        legal=(None, "none", "int8:row", QuantConfig(weights="int4:1x4")),
        illegal=(*NO_NAME[1:], "mxfp5", "fp8_w8a8", SCHEMES, Format.of("int8:row")),
        words=("scheme",),
    ),
    "parallel": PARALLEL,
    "tokens": Slot(legal=(None, "replicated"), illegal=(*NO_NAME[1:], "all")),
    "group": Slot(legal=("",), illegal=(None, 3, "no group", b"x")),
    "tp_group": Slot(legal=("",), illegal=(None, 3, "no group", b"x")),
    "max_num_tokens": optional(Slot(legal=(), illegal=(0, -1, 2.5, "8", True, 16))),
    "placement": one_of(*PLACEMENTS),
    "redundant_experts": Slot(legal=(0, 1, 3), illegal=(*NO_COUNT, 2**31)),
    "balanced": FLAG,
    "reduce_results": Slot(
        legal=(None, False, torch.nn.Identity()), illegal=(3, 2.5, [], {}, "", "no group", b"x")
    ),
    "hidden_multiple": Slot(legal=(1, 4, 64), illegal=NO_LAYER_SIZE),
    "intermediate_multiple": optional(Slot(legal=(1, 4, 64), illegal=NO_LAYER_SIZE)),
    "padding": optional(Slot(legal=("cpu", "triton.rows"), illegal=("", "cup", 3, ["cpu"]))),
    "dtype": Slot(
        legal=(None, torch.float32, torch.bfloat16),
        illegal=("float32", torch.int8, torch.complex64, torch.float8_e4m3fn, 3, float, ""),
    ),
    "device": Slot(
        legal=(None, "cpu", torch.device("cpu"), "meta"),
        illegal=("gpu0", "", "cpu:x", 3, True, b"cpu", ["cpu"], torch.float32, "cuda:12345"),
    ),
}  # fmt: skip


def right_layer(got: MoELayer, given: dict[str, Any]) -> None:
    """The layer has the sizes that were given, and its forward is that of the reference."""
    assert got.num_experts == given["num_experts"] and got.top_k == given["top_k"]
    assert got.sizes.hidden_size == given["hidden_size"] and str(got)
    dtype = given.get("dtype") or torch.float32
    if not isinstance(got.gate, nn.Linear) or got.gate.weight.dtype == dtype:
        check_forward(got, dtype)


def check_forward(layer: MoELayer, dtype: torch.dtype) -> None:
    """One call on three tokens; modules of another width or dtype were given by a call's rules."""
    modules = (layer.shared_experts, layer.routed_input_transform, layer.routed_output_transform)
    width = layer.sizes.hidden_size
    if any(isinstance(m, nn.Linear) for m in modules) and (width, dtype) != (D, torch.float32):
        return
    device = layer.w13_weight.device
    x_TD = torch.randn(3, width, device=device).to(dtype)
    logits_TE = torch.randn(3, layer.num_experts, device=device)
    args = (x_TD,) if layer.gate is not None else (x_TD, logits_TE)
    if layer._missing_exchange is not None:
        return
    with torch.no_grad():
        got = layer(*args)
        if device.type == "meta":
            return
        with using("reference"):
            want = layer(*args)
    pairs = zip(got, want, strict=True) if layer.separate else ((got, want),)
    for g, w in pairs:
        assert g.shape == (3, width)
        assert_close(g, w, TOL["experts", dtype], "the layer's result")


TARGETS: dict[str, Target] = {
    "Routing": Target(run=checked_routing, slots=ROUTING, right=right_routing),
    "Activation": Target(
        run=taken_activation, slots=ACTIVATION, base={"kind": "silu"}, right=right_activation
    ),
    "QuantConfig": Target(
        run=QuantConfig, slots=QUANT_CONFIG, base={"weights": "int8:row"}, right=right_formats
    ),
    "QuantConfig.of": Target(
        run=QuantConfig.of,
        slots={
            "quant": Slot(
                legal=(
                    None,
                    "none",
                    "mxfp4_w4a16",
                    "mxfp8",
                    "int8:row",
                    QuantConfig(weights="mxfp4"),
                ),
                illegal=(*NO_NAME[1:], "mxfp5", "fp8_w8a8", Format.of("int8:row")),
                words=("scheme",),
            )
        },
        base={"quant": "mxfp8"},
        right=right_scheme,
    ),
    "Format": Target(
        run=Format, slots=FORMAT, base={"element": "int8", "group": (1, -1)}, right=right_format
    ),
    "Format.of": Target(
        run=Format.of,
        slots={"name": Slot(legal=FORMATS, illegal=NO_FORMAT, words=("format",))},
        base={"name": "int8:row"},
        right=lambda got, given: kept(Format.of(got.name), {"name": given["name"]}),
    ),
    "ParallelConfig": Target(run=ParallelConfig, slots=CONFIG, right=kept),
    "ParallelConfig.of": Target(run=ParallelConfig.of, slots=OF, right=right_rank),
    "ParallelConfig.from_mesh": Target(
        run=ParallelConfig.from_mesh, slots=FROM_MESH, base={"mesh": Mesh()}, right=right_mesh
    ),
    "place": Target(
        run=place, slots=PLACE, base={"num_experts": E, "config": EP}, right=right_placement
    ),
    "ExpertPlacement": Target(
        run=ExpertPlacement,
        slots={**PLACE, "requested": one_of(*PLACEMENTS)},
        base={"num_experts": E, "config": EP},
        right=right_placement,
    ),
    "MoELayer": Target(
        run=MoELayer,
        slots=LAYER,
        base={"num_experts": E, "top_k": K, "hidden_size": D, "intermediate_size": I},
        right=right_layer,
    ),
}


def attempt(name: str, number: int) -> Attempt:
    return attempt_of(TARGETS, __name__, name, number)
