"""What a MoELayer refuses, with words that say what to do; and what it takes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig

SIZES: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 48,
}  # fmt: skip
TP4 = ParallelConfig.of(tp=4, tp_rank=1)
EP = ParallelConfig.of(tp=16, expert_parallel=True)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "top_k": ({"top_k": 9}, ValueError, "top_k=9 must be from 1 to the 8 experts"),
    "groups": ({"routing": Routing(n_group=3)}, ValueError, "n_group=3 must divide the 8 experts"),
    "topk_group": (
        {"routing": Routing(n_group=4, topk_group=5)},
        ValueError,
        "topk_group=5 must be from 1 to n_group=4",
    ),
    "score": (
        {"routing": Routing(score="tanh")},
        ValueError,
        "score='tanh' is unknown; choose one of softmax, sigmoid",
    ),
    "on_input": (
        {"routing": Routing(weight_on_input=True)},
        ValueError,
        "weight_on_input scales a token for its one expert, got top_k=2; leave it out",
    ),
    "on_input_shared": (
        {"top_k": 1, "shared_experts": 1, "routing": Routing(weight_on_input=True)},
        ValueError,
        "give the shared experts as a module",
    ),
    "custom_is_no_function": (
        {"routing": Routing(custom="mine")},
        TypeError,
        "custom must be a function of (x_TD, logits_TE, top_k), got 'mine'",
    ),
    "custom_and_options": (
        {"routing": Routing(custom=torch.topk, score="sigmoid", correction_bias=True)},
        ValueError,
        "custom takes the place of `route`, which alone reads score, correction_bias; leave",
    ),
    "activation": (
        {"activation": Activation(kind="tanh")},
        ValueError,
        "kind='tanh' is unknown; choose one of silu, gelu",
    ),
    "activation_parts": (
        {"activation": Activation(kind="silu", gated=False, interleaved=True)},
        ValueError,
        "interleaved and up_shift speak of the `up` half",
    ),
    "reduction": (
        {"shared_reduction": "all"},
        ValueError,
        "shared_reduction='all' is unknown; choose one of partial, replicated",
    ),
    "beside_nothing": (
        {"beside": True, "shared_experts": 1},
        ValueError,
        "beside=True runs a module of shared experts on a second stream, but there is none (fused",
    ),
    "reduce_results": (
        {"reduce_results": 3},
        TypeError,
        "reduce_results must be the name of a process group, a function of a tensor, True for the",
    ),
    "scheme": ({"quant": "fp3"}, ValueError, "scheme 'fp3' is unknown; choose one of none, fp8"),
    "scheme_of_many": (
        {"quant": "fp8_w8a8"},
        ValueError,
        "name one of each: QuantConfig(weights=..., inputs=...)",
    ),
    "quant_type": ({"quant": 8}, TypeError, "quant must be None, the name of a scheme or a Q"),
    "packing": (
        {"quant": "mxfp4_w4a16"},
        ValueError,
        "w2 has 48 columns, which do not fill mxfp4 groups of 32",
    ),
    "tp": (
        {"parallel": TP4, "intermediate_size": 50},
        ValueError,
        "intermediate_size=50 does not divide by the 4 tensor parallel ranks; take another size, "
        "or pad each rank's share with zeros: intermediate_multiple=1",
    ),
    "tp_cuts_rows": (
        {"parallel": TP4, "quant": QuantConfig(weights="float8_e4m3fn:16x4")},
        ValueError,
        "each of 4 tensor parallel ranks holds 12 rows of w13, which cuts a float8_e4m3fn:16x4 "
        "group of 16; pad each rank's share with zeros: intermediate_multiple=16",
    ),
    "tp_cuts_columns": (
        {"parallel": TP4, "quant": QuantConfig(weights="float8_e4m3fn:4x16")},
        ValueError,
        "holds 12 columns of w2, which cuts a float8_e4m3fn:4x16 group of 16",
    ),
    "ep": ({"parallel": EP}, ValueError, "16 expert parallel ranks, but only 8 experts"),
    "placement": ({"placement": "spiral"}, ValueError, "placement='spiral' is unknown"),
    "width": ({"hidden_size": 0}, ValueError, "hidden_size=0 must be at least 1"),
    "multiple": ({"hidden_multiple": 0}, ValueError, "hidden_multiple=0 must be at least 1"),
    "shared": ({"shared_experts": -1}, ValueError, "shared_experts=-1 must be at least 0"),
    "redundant": ({"redundant_experts": -1}, ValueError, "redundant_experts=-1 must be at least 0"),
    "dtype": (
        {"dtype": torch.int32}, TypeError, "dtype must be float32, bfloat16, float16, float64"
    ),
    "float64_codes": (
        {"dtype": torch.float64, "quant": QuantConfig(weights="int8:row")},
        TypeError,
        "dtype must be float32, bfloat16, float16, the dtype of tokens; got torch.float64",
    ),
}  # fmt: skip


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{name}_{value}": ({name: value}, f"{name} must be an int, got a")
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size",
                     "redundant_experts", "hidden_multiple", "intermediate_multiple")
        for value in (2.0, "2", True)
    },
    "no_experts": ({"num_experts": None}, "num_experts must be an int, got None"),
    "routing": ({"routing": None}, "routing must be a moe_ops.Routing, such as Routing(renorm"),
    "activation": ({"activation": "silu"}, "activation must be an Activation, such as Activation("),
    "bias": ({"bias": "no"}, "bias must be True or False, got a str: 'no'"),
    "balanced": ({"balanced": 1}, "balanced must be True or False, got an int: 1"),
    "shared_experts": (
        {"shared_experts": None},
        "shared_experts, where it is no module, must be an int, got None",
    ),
    "internal_gate": (
        {"internal_gate": "yes"},
        "internal_gate, where it is no module, must be True or False, got a str: 'yes'",
    ),
    "routed_input_transform": (
        {"routed_input_transform": torch.relu},
        "routed_input_transform must be a module or None, got a builtin",
    ),
    "routed_output_transform": (
        {"routed_output_transform": 48},
        "routed_output_transform must be a module or None, got an int: 48",
    ),
    "separate": ({"separate": 1}, "separate must be True or False, got an int: 1"),
    "beside": (
        {"beside": "auto"}, "beside, where it is not None, must be True or False, got a str: 'auto'"
    ),
    "tokens": ({"tokens": True}, "tokens must be a str, got a bool: True"),
    "max_num_tokens": ({"max_num_tokens": 2.5}, "max_num_tokens must be an int, got a float: 2.5"),
    "parallel": ({"parallel": 4}, "parallel must be a ParallelConfig, such as ParallelConfig.of("),
    "placement": ({"placement": 3}, "placement must be a str, got an int: 3"),
    "shared_reduction": ({"shared_reduction": None}, "shared_reduction must be a str, got None"),
    "dtype_name": ({"dtype": "bfloat16"}, "dtype must be float32, bfloat16, float16"),
    "device": ({"device": 2.5}, "device must be a torch.device, its name or None, got a float: 2"),
    "of_activation": (
        {"activation": Activation(kind="silu", alpha="1")},
        "activation.alpha must be a number, got a str: '1'",
    ),
    "limit_of_activation": (
        {"activation": Activation(kind="silu", limit=True)},
        "activation.limit must be a number, got a bool: True",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG)
def test_options_of_a_wrong_type_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as raised:
        MoELayer(**{**SIZES, **options})
    assert str(raised.value).startswith(text)


def test_numbers_of_numpy_are_taken() -> None:
    sizes = {name: np.int64(value) for name, value in SIZES.items()}
    assert MoELayer(**sizes, intermediate_multiple=np.int32(2)).w13_weight.shape == (8, 96, 64)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "gpu"}, "device='gpu' is none: "),
        ({"quant": "mxfp4_w4a15"}, "did you mean 'mxfp4_w4a16'?"),
        ({"reduce_results": "foo"}, "reduce_results='foo': torch.distributed has no process group"),
        ({"routing": Routing(eps=float("nan"))}, "eps=nan must be a finite number"),
        ({"routing": Routing(group_reduce="top2")}, "did you mean 'top2sum'?"),
        ({"routing": Routing(topk_group=2)}, "topk_group=2 must be from 1 to n_group=1"),
    ],
)
def test_what_there_is_not_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        MoELayer(**{**SIZES, **options})


def test_the_default_group_adds_the_parts() -> None:
    two = ParallelConfig.of(tp=2, tp_rank=1)
    said = "reduce_results=True takes the default group of torch.distributed, and there is none yet"
    with pytest.raises(ValueError, match=said):
        MoELayer(**SIZES, parallel=two, reduce_results=True)
    alone = MoELayer(**SIZES, reduce_results=True)
    assert "reduced" not in str(alone)
    assert MoELayer(**SIZES, reduce_results=False).reduce_results is None
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        layer = MoELayer(**SIZES, parallel=two, reduce_results=True)
        assert layer.reduce_results == dist.group.WORLD.group_name
        assert "reduced over the ranks" in str(layer)
        for config in (ParallelConfig.of(tp=3), ParallelConfig.of(tp=2)):
            said = (
                f"which has 2 ranks, of which this is 1, but parallel says rank 0 of {config.size}"
            )
            with pytest.raises(ValueError, match=f"{said}; give the group_name of the group of"):
                MoELayer(**SIZES, parallel=config, reduce_results=True)
        with pytest.raises(ValueError, match="leave out reduce_results, which would add those"):
            MoELayer(
                **SIZES, parallel=ParallelConfig.of(dp=2, dp_rank=1), reduce_results=True,
                tokens="own", group=dist.group.WORLD.group_name, max_num_tokens=4,
            )  # fmt: skip
    finally:
        dist.destroy_process_group()


def test_a_process_group_that_there_is_not_is_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        MoELayer(**SIZES, reduce_results=dist.group.WORLD.group_name)
        with pytest.raises(ValueError, match="reduce_results='foo' names no process group; give"):
            MoELayer(**SIZES, reduce_results="foo")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_group": "3"}, "n_group must be an int, got a str: '3'"),
        ({"score": None}, "score must be a str, got None"),
        ({"renormalize": 1}, "renormalize must be True or False, got an int: 1"),
        ({"scale": "2"}, "scale must be a number, got a str: '2'"),
    ],
)
def test_routing_of_a_wrong_type_is_refused_where_it_is_made(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=text):
        Routing(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": None}, "weights must be a str, got None"),
        ({"weights": "mxfp4", "inputs": None}, "inputs must be a str, got None"),
        ({"weights": "mxfp4", "static_inputs": 1}, "static_inputs must be True or False, got an"),
    ],
)
def test_formats_of_a_wrong_type_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        QuantConfig(**options)


@pytest.mark.parametrize(("options", "error", "text"), BAD.values(), ids=BAD)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    MoELayer(**SIZES)  # good without them
    with pytest.raises(error) as raised:
        MoELayer(**{**SIZES, **options})
    assert text in str(raised.value)


BAD_FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "element": ({"weights": "int3:row"}, "has the unknown element 'int3'"),
    "pair": ({"weights": "int8:row", "inputs": "mxfp8"}, "no scheme has int8:row weights with"),
    "groups": (
        {"weights": "float8_e4m3fn:128x128", "inputs": "float8_e4m3fn:row"},
        "inputs with one scale per token or tensor go with weights in groups of tensor or row",
    ),
    "static": (
        {"weights": "int8:row", "inputs": "int8:row", "static_inputs": True},
        "static_inputs goes with one scale for the tensor or with nvfp4, got the inputs 'int8:row'",
    ),
    "per_expert_dynamic": (
        {"weights": "int8:row", "inputs": "int8:tensor", "per_expert_inputs": True},
        "per_expert_inputs says that static scales of inputs are each expert's own, got "
        "static_inputs=False; give both, or leave it out",
    ),
    "static_floats": (
        {"weights": "int8:row", "static_inputs": True},
        "static_inputs goes with one scale for the tensor or with nvfp4, got the inputs ''",
    ),
}


@pytest.mark.parametrize(("options", "text"), BAD_FORMATS.values(), ids=BAD_FORMATS)
def test_formats_that_do_not_fit_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        QuantConfig(**options)
    assert text in str(raised.value)


def test_schemes_by_name() -> None:
    assert QuantConfig.of("nvfp4_w4a4") == QuantConfig(weights="nvfp4", inputs="nvfp4")
    assert QuantConfig.of("none") is None
    assert QuantConfig.of(None) is None
    formats = QuantConfig(weights="int8:row")
    assert QuantConfig.of(formats) is formats
    assert formats.scheme == "int8_w8a16"


def test_weights_alone_by_their_format() -> None:
    assert QuantConfig.of("int8:row") == QuantConfig(weights="int8:row")
    for name in ("mxfp4", "mxfp6_e2m3", "nvfp4"):
        assert QuantConfig.of(name) == QuantConfig(weights=name)
    assert QuantConfig.of("mxfp8") == QuantConfig(weights="mxfp8", inputs="mxfp8")  # the scheme
    with pytest.raises(ValueError, match="no scheme has mxfp8_e5m2 weights"):
        QuantConfig.of("mxfp8_e5m2")


X, LOGITS = torch.randn(3, 64), torch.randn(3, 8)
CALLS: dict[str, tuple[dict[str, Any], tuple[Any, ...], type[Exception], str]] = {
    "no_logits": ({}, (X,), ValueError, "the layer has no gate; pass logits"),
    "two_gates": ({"internal_gate": True}, (X, LOGITS), ValueError, "has a gate of its own; leave"),
    "width": ({}, (X[:, :60], LOGITS), ValueError, "x must have 64 (the layer's hidden_size)"),
    "experts": (
        {},
        (X, LOGITS[:, :7]),
        ValueError,
        "logits_TE must have 8 (the experts of the layer) on axis 1",
    ),
    "tokens": ({}, (X, LOGITS[:2]), ValueError, "ids_TK must have 3 (the tokens of x_TD)"),
    "dtype": ({}, (X.bfloat16(), LOGITS), TypeError, "w13_EFD must be bfloat16; got float32"),
    "width_of_gate": (
        {"internal_gate": True},
        (X[:, 1:],),
        ValueError,
        "the width that the gate takes",
    ),
    "custom_top_k": (
        {"routing": Routing(custom=lambda x, logits, k: logits.topk(k + 1))},
        (X, LOGITS),
        ValueError,
        "the custom routing's ids_TK must have 2 (top_k) on axis 1",
    ),
    "custom_ids": (
        {"routing": Routing(custom=lambda x, logits, k: (logits[:, :k], logits[:, :k]))},
        (X, LOGITS),
        TypeError,
        "the custom routing's ids_TK must be one of int32, int64; got float32",
    ),
}


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize(("options", "args", "error", "text"), CALLS.values(), ids=CALLS)
def test_tokens_that_do_not_fit_are_refused(
    options: dict[str, Any], args: tuple[Any, ...], error: type[Exception], text: str, shared: int
) -> None:
    layer = MoELayer(**SIZES, **options, shared_experts=shared, balanced=True)
    with pytest.raises(error) as raised:
        layer(*args)
    assert text in str(raised.value)
    assert not layer.loads.any()
