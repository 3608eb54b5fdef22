"""What passes are told and checkpoints are read with: options, plans, styles and loads."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_ops import OPS, MoELayer, experts, using
from moe_ops.passes.rewriting.context import Options
from moe_ops.planning.layers import Shape, fake_arguments_of
from moe_ops.planning.plan import Plan, Range
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import TOL, assert_close
from moe_ops.weights import STYLES, LoadRecord, LoadReport, Style, load_checkpoint, load_expert
from moe_ops.weights.layouts import PLAIN, TRANSPOSED
from tests.fuzz.attempts import (
    FLAG,
    NAN,
    NO_COUNT,
    NO_INT,
    NO_LAYER_SIZE,
    NO_NAME,
    NO_NUMBER,
    NO_OBJECT,
    NO_TEXT,
    Attempt,
    Slot,
    Target,
    attempt_of,
    kept,
    optional,
    tensors,
    worded,
)
from tests.fuzz.constructors import NO_FORMAT, one_of

E, D, I = 4, 64, 32  # noqa: E741  the legend's letter


def right_shape(got: Shape, given: dict[str, Any]) -> None:
    """Arguments of `experts` can be made of it."""
    if given.get("quant") is not None:
        given = {n: v for n, v in given.items() if n not in ("w_format", "x_format")}
        assert got.w_format == "int8:row"
    kept(got, given)
    arguments = fake_arguments_of(got)
    assert arguments.w13_EFD.shape[0] == got.E


THRESHOLDS = Slot(
    legal=(None, ((64, "cpu"), (None, "aten")), ((None, "cpu"),)),
    illegal=(
        *NO_OBJECT[1:], (), ((64, "cpu"),), ((64.0, "cpu"), (None, "aten")), ((None, "cpuu"),),
        ((8, "cpu"), (4, "aten"), (None, "cpu")), ((True, "cpu"), (None, "aten")),
        ((2**70, "cpu"), (None, "aten")), ((None, None),), ((None, ["cpu"]),), (None, "cpu"),
    ),
)  # fmt: skip
OPTIONS = {
    "thresholds": THRESHOLDS,
    "tuned": optional(Slot(legal=("table.json",), illegal=NO_TEXT)),
    "strict": FLAG,
    "linears": FLAG,
    "stop_after": optional(Slot(legal=("pick_backend",), illegal=NO_TEXT)),
    "dump": FLAG,
}
RANGE = {
    "upto": optional(Slot(legal=(1, 64), illegal=NO_COUNT)),
    "backend": Slot(legal=("cpu", "aten"), illegal=NO_TEXT),
    "source": one_of("forced", "tuned", "limit", "only candidate"),
    "at": optional(Slot(legal=(1, 64), illegal=NO_INT)),
    "predicted_us": optional(Slot(legal=(1.5, 3), illegal=NO_NUMBER[:-3])),
    "measured_us": optional(Slot(legal=(1.5, 3), illegal=NO_NUMBER[:-3])),
}
JSON = Plan(device="cpu", choices=()).to_json()
BAD_PLANS = (
    '{"version": 9}', '{"version": 1}', '{"version": 1, "device": "cpu", "choices": 3}',
    '{"version": 1, "device": 3, "choices": []}', '{"version": 1, "device": "cpu", "choices": [3]}',
    '{"version": 1, "device": "cpu", "choices": [{"op": "experts"}]}',
    '{"version": 1, "device": "cpu", "choices": [], "more": 1}',
)  # fmt: skip


def used(backend: Any, op: Any) -> str:
    with using(backend, op):
        return backend


STYLE = {
    "name": Slot(legal=("mine",), illegal=NO_TEXT),
    "projections": Slot(
        legal=({"w1": "w1", "w2": "w2", "w3": "w3"}, {"up": "w13", "down": "w2"}),
        illegal=(*NO_OBJECT[:4], {}, {"w1": "w4"}, {3: "w1"}, {"w1": None}, ("w1", "w2")),
    ),
    "experts": Slot(legal=("experts", "mlp.experts", ""), illegal=NO_TEXT),
    "stacked": FLAG,
    "transposed": FLAG,
    "interleaved": FLAG,
    "others": Slot(
        legal=({}, {"router.": "gate."}), illegal=(*NO_OBJECT[:4], {3: "gate"}, {"router.": None})
    ),
}


def right_style(got: Style, given: dict[str, Any]) -> None:
    """It reads a name of its own."""
    kept(got, given)
    first = next(iter(got.projections))
    parts = (*filter(None, [got.experts]), *([] if got.stacked else ["3"]), first, "weight")
    assert getattr(got.entry(".".join(parts)), "shard", None) == got.projections[first]


LAYER = MoELayer(E, 2, D, I)
G = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(I, D, generator=G)
LOAD = {
    "layer": Slot(legal=(LAYER,), illegal=(*NO_OBJECT, torch.nn.Linear(2, 2))),
    "parameter_name": Slot(legal=("w13_weight",), illegal=NO_NAME),
    "tensor": worded(tensors((WEIGHT,), WEIGHT.int(), WEIGHT[:-1], WEIGHT.T), "entry"),
    "name": Slot(legal=("entry",), illegal=NO_TEXT),
    "shard": Slot(legal=("w1", "w3"), illegal=(*NO_NAME, "w4", "w2")),
    "expert_id": Slot(legal=(0, 1, E - 1), illegal=(*NO_COUNT[1:], E), words=("expert",)),
    "coding": Slot(legal=(PLAIN,), illegal=(*NO_OBJECT, TRANSPOSED), words=("entry",)),
    "interleaved": FLAG,
    "sharded": FLAG,
    "record": Slot(legal=(None, LoadRecord()), illegal=NO_OBJECT[1:]),
}  # fmt: skip


def right_load(got: bool, given: dict[str, Any]) -> None:
    """The rows are there."""
    rows = slice(0, I) if given["shard"] == "w1" else slice(I, 2 * I)
    assert got and torch.equal(LAYER.w13_weight[given["expert_id"], rows], WEIGHT)


@functools.cache
def checkpoint() -> tempfile.TemporaryDirectory[str]:
    """A folder with one expert's tensors, for as long as the process lives."""
    folder = tempfile.TemporaryDirectory()
    save_file({"mlp.experts.0.w1.weight": WEIGHT}, Path(folder.name) / "model.safetensors")
    return folder


def loaded(**given: Any) -> LoadReport:
    """A source that is legal stands for a folder that is there."""
    if isinstance(given.get("source"), str):
        given["source"] = checkpoint().name
    return load_checkpoint(**{"progress": False, **given})


def right_report(got: LoadReport, given: dict[str, Any]) -> None:
    """The one tensor that there is was loaded, and others are missed."""
    assert got.loaded == ("mlp.experts.0.w1.weight",) and got.missing and not got.unexpected


CHECKPOINT = {
    "layers": Slot(
        legal=({"mlp": LAYER},),
        illegal=(*NO_OBJECT[:5], LAYER, [LAYER], {"mlp": None}, {3: LAYER}, {"mlp": WEIGHT}),
    ),
    "source": Slot(
        legal=("folder",),
        illegal=(None, 3, True, 2.5, NAN, object(), [3], [None]),
    ),
    "style": Slot(legal=("mixtral", STYLES["mixtral"]), illegal=(*NO_NAME, Style)),
    "coding": Slot(legal=(None, PLAIN), illegal=NO_OBJECT[1:]),
    "sharded": Slot(legal=(False,), illegal=FLAG.illegal),
    "progress": Slot(legal=(False,), illegal=FLAG.illegal),
}

X_TD, LOGITS_TE = torch.randn(3, D, generator=G), torch.randn(3, E, generator=G)
FORWARD = {
    "x": worded(
        tensors((X_TD, X_TD[None]), X_TD[:, 1:], X_TD.int(), X_TD.double(), X_TD.T), "x_TD"
    ),
    "logits": worded(
        tensors((LOGITS_TE, LOGITS_TE[None]), LOGITS_TE[:, 1:], LOGITS_TE.int(), LOGITS_TE[1:]),
        "logits_TE", "x_TD",
    ),
}  # fmt: skip


def forward(**given: Any) -> Tensor:
    with torch.no_grad():
        return LAYER(**given)


def right_forward(got: Tensor, given: dict[str, Any]) -> None:
    """The result is that of the reference."""
    with using("reference"):
        assert_close(got, forward(**given), TOL["experts", torch.float32], "the layer's result")


TARGETS: dict[str, Target] = {
    "MoELayer.forward": Target(
        run=forward,
        slots=FORWARD,
        base={"x": X_TD, "logits": LOGITS_TE},
        right=right_forward,
    ),
    "Shape": Target(
        run=Shape,
        slots={
            **dict.fromkeys("ED", Slot(legal=(4, 8), illegal=NO_LAYER_SIZE)),
            "K": Slot(legal=(1, 2), illegal=(*NO_LAYER_SIZE, 9)),
            "I": Slot(legal=(4, 8), illegal=NO_LAYER_SIZE),
            "dtype": one_of("float32", "bfloat16", "float16"),
            "w_format": Slot(legal=("", "int8:row"), illegal=tuple(f for f in NO_FORMAT if f)),
            "x_format": Slot(legal=("", "int8:row"), illegal=tuple(f for f in NO_FORMAT if f)),
            "device": Slot(legal=("cpu",), illegal=(*NO_NAME, "gpu", "cpu:x")),
            "quant": Slot(
                legal=(None, "int8:row", QuantConfig(weights="int8:row", inputs="int8:row")),
                illegal=(*NO_NAME[1:], "mxfp5", "fp8_w8a8"),
                words=("scheme",),
            ),
        },
        base={"E": 4, "K": 2, "D": 8, "I": 8},
        right=right_shape,
    ),
    "Options": Target(run=Options, slots=OPTIONS, right=kept),
    "Range": Target(
        run=Range,
        slots=RANGE,
        base={"upto": None, "backend": "cpu", "source": "limit"},
        right=kept,
    ),
    "Plan.from_json": Target(
        run=Plan.from_json,
        slots={
            "text": Slot(
                legal=(JSON,), illegal=(*NO_TEXT, "", "{", "[]", "3", *BAD_PLANS), words=("plan",)
            )
        },
        base={"text": JSON},
        right=lambda got, given: kept(got, {"device": "cpu", "choices": ()}),
    ),
    "using": Target(
        run=used,
        slots={
            "backend": Slot(legal=("cpu", "aten", "reference"), illegal=NO_NAME),
            "op": Slot(
                legal=("experts", experts), illegal=(*NO_NAME, OPS, torch.relu), words=("op",)
            ),
        },
        base={"backend": "cpu", "op": "experts"},
        right=lambda got, given: kept(given["backend"], {}),
    ),
    "Style": Target(
        run=Style,
        slots=STYLE,
        base={"name": "mine", "projections": STYLE["projections"].legal[0]},
        right=right_style,
    ),
    "load_expert": Target(
        run=load_expert,
        slots=LOAD,
        base={
            "layer": LAYER, "parameter_name": "w13_weight", "tensor": WEIGHT, "name": "entry",
            "shard": "w1", "expert_id": 0,
        },
        right=right_load,
    ),
    "load_checkpoint": Target(
        run=loaded,
        slots=CHECKPOINT,
        base={"layers": {"mlp": LAYER}, "source": "folder", "style": "mixtral"},
        right=right_report,
    ),
}  # fmt: skip


def attempt(name: str, number: int) -> Attempt:
    return attempt_of(TARGETS, __name__, name, number)
