"""Names and types of arguments: what an op says to a call that it cannot take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import moe_ops
from moe_ops import OPS, experts
from moe_ops.checks.signature import did_you_mean
from moe_ops.registry.memo import Memo
from tests.calls import CALLS

LOGITS = torch.randn(3, 4)
FAULTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "unknown": (
        (LOGITS, 2),
        {"renormalise": True},
        "moe_ops.route has no argument 'renormalise'; did you mean 'renormalize'?",
    ),
    "unlike_any": (
        (LOGITS, 2),
        {"zz": True},
        "moe_ops.route has no argument 'zz'; there are logits_TE, top_k, ",
    ),
    "missing": ((LOGITS,), {}, "moe_ops.route needs top_k, and was called without it"),
    "nothing": ((), {}, "moe_ops.route needs logits_TE, and was called without it"),
    "twice": ((LOGITS, 2), {"top_k": 2}, "moe_ops.route got top_k twice, by position and by name"),
    "too_many": (
        (LOGITS, 2, *[None] * 15),
        {},
        "moe_ops.route takes at most 16 arguments, got 17; they are logits_TE, top_k, ",
    ),
    "none": ((None, 2), {}, "moe_ops.route: logits_TE must be a Tensor, got None"),
    "none_by_name": (
        (),
        {"logits_TE": None, "top_k": 2},
        "moe_ops.route: logits_TE must be a Tensor, got None",
    ),
    "array": (
        (LOGITS.numpy(), 2),
        {},
        "moe_ops.route: logits_TE must be a Tensor, got a ndarray",
    ),
    "list": (
        (LOGITS, 2, [0.0] * 4),
        {},
        "moe_ops.route: bias_E must be a Tensor or None, got a list",
    ),
    "float_for_int": ((LOGITS, 2.0), {}, "moe_ops.route: top_k must be an int, got a float: 2.0"),
    "str_for_int": ((LOGITS, "2"), {}, "moe_ops.route: top_k must be an int, got a str: '2'"),
    "bool_for_int": ((LOGITS, True), {}, "moe_ops.route: top_k must be an int, got a bool: True"),
    "bool_for_float": (
        (LOGITS, 2),
        {"scale": True},
        "moe_ops.route: scale must be a float, got a bool: True",
    ),
    "none_for_float": (
        (LOGITS, 2),
        {"scale": None},
        "moe_ops.route: scale must be a float, got None",
    ),
    "str_for_bool": (
        (LOGITS, 2),
        {"renormalize": "no"},
        "moe_ops.route: renormalize must be a bool, got a str: 'no'",
    ),
    "float_for_bool": (
        (LOGITS, 2),
        {"renormalize": 1.0},
        "moe_ops.route: renormalize must be a bool, got a float: 1.0",
    ),
    "dtype_for_str": (
        (LOGITS, 2),
        {"out_dtype": torch.float32},
        "moe_ops.route: out_dtype must be a str, got a dtype",
    ),
}


@pytest.mark.parametrize(("args", "kwargs", "message"), FAULTS.values(), ids=FAULTS)
def test_a_call_that_an_op_cannot_take_names_op_and_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    for call in (moe_ops.route, moe_ops.route.refusals):
        with pytest.raises(TypeError) as raised:
            call(*args, **kwargs)
        assert str(raised.value).startswith(message)
    with torch.profiler.profile(), pytest.raises(TypeError) as raised:
        moe_ops.route(*args, **kwargs)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("name", OPS)
def test_every_tensor_of_every_op_is_asked_for_by_name(name: str) -> None:
    op, args = OPS[name], CALLS[name]
    names = list(op.signature._kinds)
    for i, arg in enumerate(args):
        if not isinstance(arg, Tensor) or names[i] in op.optional:
            continue
        message = rf"moe_ops\.{name}: {names[i]} must be a Tensor, got None"
        bad = (*args[:i], None, *args[i + 1 :])
        for call in (op, op.overload):  # the dispatcher lets None be a tensor
            with pytest.raises(TypeError, match=message):
                call(*bad)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in bad]
            with pytest.raises(TypeError, match=message):
                op(*fake)


@pytest.mark.parametrize("name", OPS)
def test_refusals_by_keyword_are_those_by_position(name: str) -> None:
    op, args = OPS[name], CALLS[name]
    by_name = dict(zip(op.signature._kinds, args, strict=False))
    assert op.refusals(**by_name) == op.refusals(*args)
    assert op.refusals(args[0], **dict(list(by_name.items())[1:])) == op.refusals(*args)


def test_refusals_of_a_call_that_no_backend_can_take_are_its_error() -> None:
    with pytest.raises(ValueError, match=r"top_k=5 must be from 1 to the 4 experts"):
        moe_ops.route.refusals(LOGITS, top_k=5)


def test_an_int_of_too_many_bits_is_refused() -> None:
    for _ in range(2):  # the types are known the second time
        with pytest.raises(
            TypeError, match="top_k must be an int of 64 bits, got an int: 11805916"
        ):
            moe_ops.route(logits_TE=LOGITS, top_k=2**70)
        # Whether the signature or the check refuses it depends on calls of these types before.
        with pytest.raises((TypeError, ValueError), match=r"top_k.*1180591620717411303424"):
            moe_ops.route(LOGITS, 2**70)


def test_numbers_of_other_packages_are_taken() -> None:
    want = moe_ops.route(LOGITS, 2, renormalize=True, scale=2.0)
    for top_k, flag, scale in (
        (np.int64(2), np.bool_(True), np.float32(2)),
        (torch.tensor(2), torch.tensor(True), torch.tensor(2.0)),
        (2, 1, 2),
        (2, True, np.float64(2)),
    ):
        got = moe_ops.route(LOGITS, top_k, renormalize=flag, scale=scale)  # type: ignore[arg-type]
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_types_that_were_seen_once_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    moe_ops.activate(LOGITS, kind="gelu")
    monkeypatch.setattr(Memo, "alike", lambda *_: pytest.fail("looked again"))
    moe_ops.activate(LOGITS, kind="silu")


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ("silo", "; did you mean 'silu'?"),
        ("cpi", "; did you mean 'cpu'?"),
        ("nosuchmodel", ""),  # 0.63 like neucodec
        ("xxxx", ""),
        (None, ""),
        (3, ""),
    ],
)
def test_the_closest_name_is_told(got: object, want: str) -> None:
    assert did_you_mean(got, ("silu", "gelu", "cpu", "neucodec")) == want


BACKENDS = ("aten", "cpu", "triton.grouped", "triton.rows", "triton.tiny")
SCHEMES = ("fp8_w8a8", "fp8_w8a16", "int4_w4a16", "mxfp4_w_fp8_a", "mxfp8", "mxfp4_w4a16")


@pytest.mark.parametrize(
    ("got", "known", "want"),
    [
        ("triton", BACKENDS, "'triton.grouped', 'triton.rows' or 'triton.tiny'"),
        ("gpu", BACKENDS, "'triton.grouped', 'triton.rows' or 'triton.tiny'"),
        ("gpu", ("cpu", "triton"), "'triton'"),
        ("gpu", ("cpu", "aten"), "'cpu'"),  # where nothing is called so, the closest
        ("Triton.Tiny", BACKENDS, "'triton.tiny'"),
        ("triton.tny", BACKENDS, "'triton.tiny'"),  # misspelled: the others are not meant
        ("torch", BACKENDS, "'aten'"),
        ("int4", SCHEMES, "'int4_w4a16'"),
        ("fp8", SCHEMES, "'fp8_w8a8' or 'fp8_w8a16'"),  # not mxfp8, which is closer by letters
        ("w4a16", SCHEMES, "'int4_w4a16' or 'mxfp4_w4a16'"),
        ("fp", SCHEMES, ""),  # a part of parts
        ("lift", ("lift_a", "lift_b", "lift_c", "lift_d", "lift_e"),
         "'lift_a', 'lift_b', 'lift_c' or 'lift_d'"),
    ],
)  # fmt: skip
def test_names_that_may_be_meant_are_told(got: str, known: tuple[str, ...], want: str) -> None:
    assert did_you_mean(got, known) == (f"; did you mean {want}?" if want else "")


def test_a_forced_family_of_backends_tells_its_members() -> None:
    layer = (torch.ones(1, 8), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))
    weights = (torch.ones(1, 16, 8), torch.ones(1, 8, 8))
    said = r"triton: not a backend of this op; .*'triton.tiny', 'triton.rows' or 'triton.grouped'\?"
    with pytest.raises(NotImplementedError, match=said), moe_ops.using("triton"):
        moe_ops.experts(*layer, *weights)


def test_using_tells_the_closest_names() -> None:
    with pytest.raises(ValueError, match=r"'gpu' of .*; did you mean 'triton', 'triton\."):
        moe_ops.using("gpu").__enter__()
    with pytest.raises(ValueError, match=r"no op named expert; .*did you mean 'experts'\?"):
        moe_ops.using("cpu", "expert").__enter__()
    with pytest.raises(ValueError, match=r"no backend 'cpuu' of .*; did you mean 'cpu'\?"):
        moe_ops.using("cpuu").__enter__()
    with pytest.raises(ValueError, match=r"no op named 3; the ops are"):
        moe_ops.using("cpu", 3).__enter__()  # type: ignore[arg-type]


IDS = torch.zeros(3, 1, dtype=torch.int32)
LAYER = {"w13_EFD": torch.randn(2, 8, 4), "w2_EDI": torch.randn(2, 4, 4)}
TOKENS = (torch.randn(3, 4), torch.ones(3, 1))


def test_an_old_keyword_works_and_warns() -> None:
    for function in (experts, experts.reference, experts.refusals):
        with pytest.warns(DeprecationWarning, match="experts_TK is ids_TK now; use") as warned:
            got = function(*TOKENS, experts_TK=IDS, **LAYER)
        assert [w.filename for w in warned] == [__file__]
        want = function(*TOKENS, IDS, **LAYER)
        assert torch.equal(got, want) if isinstance(got, Tensor) else got == want


def with_old_keyword(x_TD: Tensor, **more: Tensor) -> Tensor:
    return experts(x_TD, TOKENS[1], experts_TK=IDS, **more, **LAYER)


def test_an_old_keyword_works_in_compiled_code() -> None:
    run = torch.compile(with_old_keyword, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(TOKENS[0]), experts(*TOKENS, IDS, **LAYER))


def test_an_argument_has_one_name_in_a_call() -> None:
    fault = "moe_ops.experts: experts_TK is ids_TK now, and the call gives both; leave out"
    for function in (experts, experts.reference, experts.refusals):
        with pytest.raises(TypeError, match=fault):
            function(*TOKENS, ids_TK=IDS, experts_TK=IDS + 1, **LAYER)
    run = torch.compile(with_old_keyword, backend="eager")
    with pytest.raises(TypeError, match=fault):
        run(TOKENS[0], ids_TK=IDS + 1)


def test_an_old_keyword_means_nothing_to_other_ops() -> None:
    for function in (moe_ops.route, moe_ops.route.refusals):
        with pytest.raises(TypeError, match=r"moe_ops\.route has no argument 'experts_TK'"):
            function(LOGITS, 2, experts_TK=IDS)
