"""What compiles, captures, measures or changes a model: calls that are refused before it begins."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ops
from moe_ops.passes.inductor.compiled import pipeline_of
from moe_ops.planning.layers import Shape
from moe_ops.planning.plan import Plan
from tests.fuzz.attempts import (
    FLAG,
    NO_NAME,
    NO_OBJECT,
    NO_SIZE,
    NO_TEXT,
    Attempt,
    Slot,
    Target,
    attempt_of,
    optional,
)
from tests.fuzz.loading import OPTIONS
from tests.moe_block import Block

X_TD = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


def causal_lm(seed: int = 0) -> PreTrainedModel:
    """A model of transformers with two small layers of experts."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=32, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, intermediate_size=32,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """A place for tables and pages, for as long as the process lives."""
    return tempfile.TemporaryDirectory()


class Made:
    """Stands for an argument that is made when a call is: `function()`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"<{self.function.__name__}()>"


def table() -> Path:
    return Path(folder().name) / "table.json"


def made(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function with what stands for arguments made."""

    def call(**given: Any) -> Any:
        return run(**{k: v.function() if isinstance(v, Made) else v for k, v in given.items()})

    return call


BLOCK, MODEL, TABLE = Block().eval(), Made(causal_lm), Made(table)
NO_MODEL = (*NO_OBJECT, nn.Linear, X_TD)
NO_PATH = (3, True, 2.5, b"x", ["x"], {}, object(), torch.float32)
EXTRA = Slot(
    legal=(None, {}, {"epilogue_fusion": False}, {"max-autotune": False}),
    illegal=(
        3, "max_autotune", ["max_autotune"], True, object(), {"max_autotun": True}, {3: True},
        {"": 1}, {None: True}, {"max_autotune": "yes"}, {"max_autotune": None},
        {"triton.cudagraphs": 1}, {"epilogue_fusion": "no"}, (("max_autotune", True),),
    ),
)  # fmt: skip
PASS_OPTIONS = {
    **OPTIONS,
    "tuned": Slot(legal=(None,), illegal=NO_TEXT[1:]),
    "stop_after": optional(
        Slot(legal=("pick_backend", "lower"), illegal=(*NO_NAME, "pick_backends", moe_ops.explain))
    ),
}
DYNAMIC = optional(FLAG)
COUNTS = Slot(
    legal=((1, 2), [4], {8}, range(1, 3)),
    illegal=(
        3, True, 2.5, "64", "", object(), (), [], (0,), (-1, 2), (2.0,), ("2",), (True,), [None],
        ((1, 2),), (2**70,), [torch.ones(2)], torch.float32,
    ),
)  # fmt: skip
ROUTINGS = Slot(
    legal=(("uniform",), ["zipf"], ("uniform", "zipf")),
    illegal=(None, 3, "zipf", "", (), ("zip",), (None,), (3,), [["zipf"]], True, object()),
    words=("routing",),
)
SHAPE = Shape(E=4, K=2, D=16, I=8, dtype="float32")
PROGRESS = Slot(legal=(None,), illegal=(3, True, "x", object(), ["x"]))


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("it began")


def nothing_is_right(got: Any, given: dict[str, Any]) -> None:
    raise AssertionError("this call was to be refused")


def captured(x: Any, y: Any) -> Any:
    """A call of a captured function of two tensors, which is not to be reached."""
    return moe_ops.capture(never, buckets=(8,), varying=2)(x, y)


TARGETS: dict[str, Target] = {
    "compile": Target(
        run=moe_ops.compile,
        slots={
            "model": Slot(legal=(BLOCK,), illegal=(*NO_MODEL, never)),
            "fullgraph": FLAG,
            "dynamic": DYNAMIC,
            "mode": optional(Slot(legal=("default", "max-autotune"), illegal=NO_NAME)),
            "extra": EXTRA,
            **PASS_OPTIONS,
        },
        base={"model": BLOCK},
        right=nothing_is_right,
    ),
    "inductor_options": Target(
        run=moe_ops.inductor_options, slots={"extra": EXTRA, **PASS_OPTIONS}, right=nothing_is_right
    ),
    "compile_config": Target(
        run=moe_ops.compile_config, slots={"extra": EXTRA, **PASS_OPTIONS}, right=nothing_is_right
    ),
    "pipeline_of": Target(
        run=pipeline_of,
        slots={"model": Slot(legal=(), illegal=(*NO_MODEL, BLOCK, never))},
        base={"model": BLOCK},
        right=nothing_is_right,
    ),
    "capture": Target(
        run=moe_ops.capture,
        slots={
            "function": Slot(legal=(never,), illegal=(*NO_OBJECT[:-1], X_TD)),
            "buckets": Slot(legal=COUNTS.legal, illegal=(None, *COUNTS.illegal)),
            "varying": Slot(legal=(1, 2), illegal=NO_SIZE),
            "most": Slot(legal=(1, 32), illegal=NO_SIZE),
        },
        base={"function": never, "buckets": (1, 2)},
        right=nothing_is_right,
    ),
    "GraphRunner.__call__": Target(
        run=captured,
        slots={
            "x": Slot(
                legal=(X_TD,),
                illegal=(*NO_OBJECT, torch.ones(()), X_TD[1:]),
                words=("arguments",),
            ),
            "y": Slot(legal=(X_TD,), illegal=(*NO_OBJECT, torch.ones(())), words=("arguments",)),
        },
        base={"x": X_TD, "y": X_TD},
        right=nothing_is_right,
    ),
    "buckets_of": Target(
        run=moe_ops.buckets_of,
        slots={
            "plan": Slot(legal=(Plan(device="cpu", choices=()),), illegal=(*NO_MODEL, Plan)),
            "most": Slot(legal=(1, 64), illegal=NO_SIZE),
        },
        base={"plan": Plan(device="cpu", choices=()), "most": 8},
        right=nothing_is_right,
    ),
    "tune": Target(
        run=made(moe_ops.tune),
        slots={
            "layers": Slot(
                legal=(SHAPE, [SHAPE], BLOCK),
                illegal=(*NO_OBJECT, (), [3], [SHAPE, None], Shape, {SHAPE}, nn.Linear),
            ),
            "table": Slot(legal=(TABLE,), illegal=(None, *NO_PATH)),
            "inputs": Slot(
                legal=((X_TD,), {"x_TD": X_TD}), illegal=(3, True, 2.5, "x", {3: X_TD}, object())
            ),
            "tokens": Slot(legal=COUNTS.legal, illegal=(None, *COUNTS.illegal)),
            "routings": ROUTINGS,
            "progress": PROGRESS,
        },
        base={"layers": SHAPE, "table": TABLE},
        right=nothing_is_right,
    ),
    "explain": Target(
        run=made(moe_ops.explain),
        slots={
            "model": Slot(legal=(BLOCK,), illegal=(*NO_OBJECT[:-1], X_TD)),
            "inputs": Slot(
                legal=(X_TD, (X_TD,), {"x_TD": X_TD}),
                illegal=(None, 3, True, 2.5, "x", {3: X_TD}, object(), torch.float32),
                words=("input",),
            ),
            "html": Slot(legal=(None, TABLE), illegal=NO_PATH),
            "depyf": Slot(legal=(None,), illegal=NO_PATH),
            "tokens": optional(COUNTS),
            "dynamic": DYNAMIC,
            "extra": EXTRA,
            **PASS_OPTIONS,
        },
        base={"model": BLOCK, "inputs": X_TD},
        right=nothing_is_right,
    ),
    **{
        name: Target(
            run=made(getattr(moe_ops, name)),
            slots={"model": Slot(legal=(), illegal=(*NO_MODEL, never, *modules))},
            base={"model": MODEL},
            right=nothing_is_right,
        )
        for name, modules in (
            ("optimize", [BLOCK]),
            ("restore", []),
            ("generation_report", [BLOCK]),
        )
    },
    "quantize_model": Target(
        run=made(moe_ops.quantize_model),
        slots={
            "model": Slot(legal=(), illegal=(*NO_MODEL, BLOCK, never)),
            "scheme": Slot(
                legal=("int8_w8a8", "int4_w4a16", "mxfp8"), illegal=(*NO_NAME, "none", "int8")
            ),
            "weight_format": optional(Slot(legal=("int8:row",), illegal=(*NO_NAME, "mxfp5"))),
            "input_format": optional(
                Slot(legal=("int8:row",), illegal=(*(n for n in NO_NAME if n != ""), "mxfp5"))
            ),
            "progress": FLAG,
        },
        base={"model": MODEL, "scheme": "int8_w8a8"},
        right=nothing_is_right,
    ),
    "restrict_experts": Target(
        run=made(moe_ops.restrict_experts),
        slots={
            "model": Slot(legal=(), illegal=(*NO_MODEL, BLOCK, never)),
            "keep": Slot(
                legal=([0, 1], {"model.layers.0.mlp": (0, 1)}),
                illegal=(None, 3, True, 2.5, "01", [], {}, [0, 0], [-1], [0.5], [9999], {3: [0]}),
            ),
            "removed": Slot(legal=("freed", "cpu"), illegal=(*NO_NAME, "gpu")),
        },
        base={"model": MODEL, "keep": [0, 1]},
        right=nothing_is_right,
    ),
}


def attempt(name: str, number: int) -> Attempt:
    return attempt_of(TARGETS, __name__, name, number, always_bad=True)
