"""Tokens travel as codes where the experts quantise them, which changes no bit of a result; and as
floats elsewhere, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import experts, experts_over_ranks, using
from moe_ops.ops.dispatch_tokens import DispatchTokensCall
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.experts_over_ranks import ExpertsOverRanksCall, sends_codes, traffic, why_floats
from moe_ops.testing import Tol, assert_close
from tests.chosen import in_turn
from tests.distributed.ranks import fake_group, results, threads
from tests.distributed.shares import SPREADS, Spread, Whole, run_share

OVER_RANKS = import_module("moe_ops.ops.experts_over_ranks")
BF16 = torch.bfloat16
SPREAD = {
    **{spread.name: spread for spread in SPREADS},
    "together": Spread(name="together", tokens=(5, 3), choose="together"),
    "uneven_together": Spread(name="uneven_together", tokens=(5, 0, 7, 1), choose="together"),
}
# Formats of weights and of inputs, and the width of tokens.
CODES = {
    "float8 rows": ("float8_e4m3fn:row", "float8_e4m3fn:row", 64),
    "int8 rows": ("int8:row", "int8:row", 64),
    "float8 groups": ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128", 192),
    "mxfp8": ("mxfp4", "mxfp8", 128),
}
# Each row has a global scale of its own, which its owner makes of floats that are sent.
ALONE = {**CODES, "nvfp4": ("nvfp4", "nvfp4", 128)}
each_format = pytest.mark.parametrize("formats", CODES)
each_row_alone = pytest.mark.parametrize("formats", ALONE)
each_transport = pytest.mark.parametrize("collective", ["gather", "exchange"])


def whole_of(formats: str, spread: str, dtype: torch.dtype = BF16) -> Whole:
    w_format, x_format, width = ALONE[formats]
    return Whole.of(SPREAD[spread], dtype, w_format, x_format, width)


@contextmanager
def seen() -> Iterator[list[DispatchTokensCall]]:
    """What the ranks send while this lasts."""
    calls: list[DispatchTokensCall] = []

    def note(*args: Any) -> DispatchTokensCall:
        calls.append(DispatchTokensCall(*args))
        return calls[-1]

    with patch.object(OVER_RANKS, "DispatchTokensCall", note):
        yield calls


@in_turn(
    each_transport,
    each_format,
    pytest.mark.parametrize("spread", ["even", "uneven", "one_sided", "none"]),
)
def test_codes_give_the_bits_of_floats(spread: str, formats: str, collective: str) -> None:
    whole = whole_of(formats, spread)
    ranks = whole.spread.ranks
    with seen() as sent:
        got = results(ranks, run_share, whole, collective)
    assert len(sent) == ranks
    for call in sent:
        assert call.x_TD.dtype.itemsize == 1 and call.scale_TS is not None
    with patch.object(OVER_RANKS, "why_floats", lambda layer: "asked for"), seen() as sent:
        want = results(ranks, run_share, whole, collective)
    assert all(call.x_TD.dtype is BF16 and call.scale_TS is None for call in sent)
    for g, w in zip(got, want, strict=True):
        assert g.dtype is w.dtype is BF16 and torch.equal(g, w)


@in_turn(
    each_transport,
    each_row_alone,
    pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"]),
    pytest.mark.parametrize("spread", ["together", "uneven_together", "one_expert"]),
)
def test_ranks_give_the_bits_of_one_process(
    spread: str, dtype: torch.dtype, formats: str, collective: str
) -> None:
    """Where one rank serves a token, so that nothing is summed over ranks."""
    whole = whole_of(formats, spread, dtype)
    got = torch.cat(results(whole.spread.ranks, run_share, whole, collective))
    assert torch.equal(got, whole.want())


@each_row_alone
def test_sums_over_ranks_are_those_of_one_process(formats: str) -> None:
    whole = whole_of(formats, "uneven", torch.float32)
    got = torch.cat(results(4, run_share, whole, "gather"))
    assert_close(got, whole.want(), Tol(1e-6, "a token's sum is in parts, one for each rank"))


def layer_of(w_format: str, x_format: str, width: int = 128, **more: Any) -> ExpertsCall:
    whole = Whole.of(SPREAD["even"], BF16, w_format, x_format, width)
    given = (whole.x_TD, whole.weights_TK, whole.ids_TK)
    return experts.call(*given, **whole.weights, **whole.options, **more)


STATIC = {"x_scale": torch.tensor(0.02), "h_scale": torch.tensor(0.02)}
FLOATS = {
    "static": (
        ("float8_e4m3fn:tensor", "float8_e4m3fn:tensor", 128), STATIC,
        "float8_e4m3fn:tensor has a scale that is not a token's own",
    ),
    "six bits": (("mxfp4", "mxfp6_e3m2", 128), {}, "mxfp6_e3m2 has codes of 6 bits"),
    "four bits": (("mxfp4", "mxfp4", 128), {}, "mxfp4 has codes of 4 bits"),
    "global scales": (("nvfp4", "nvfp4", 128), {}, "nvfp4 has a global scale above those of col"),
    "odd scales": (
        ("mxfp4", "mxfp8", 64), {},
        "codes and scales of a token are 64 and 2 bytes, which fill no words of 4",
    ),
    "prepared": (
        CODES["float8 groups"], {"layout": "flashinfer.up_gate"},
        "the experts run on flashinfer_cutlass, which quantises floats itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
def test_others_travel_as_floats(name: str) -> None:
    formats, more, reason = FLOATS[name]
    layer = layer_of(*formats, **more)
    assert reason in str(why_floats(layer)) and not sends_codes(layer)
    if name != "prepared":  # which runs on GPUs alone
        whole = Whole.of(SPREAD["even"], BF16, *formats)
        whole.options.update(more)
        with seen() as sent:
            results(2, run_share, whole, "gather")
        assert [call.x_TD.dtype for call in sent] == [BF16] * 2


def test_a_forced_backend_that_takes_floats_gets_floats() -> None:
    layer = layer_of(*CODES["float8 rows"])
    for backend in ("cpu", "reference", "triton.rows"):
        with using(backend, experts):
            assert why_floats(layer) is None
    with using("flashinfer_cutlass", experts):
        assert "run on flashinfer_cutlass, which" in str(why_floats(layer))
    with using("aten", experts):
        assert "run on aten, which" in str(why_floats(layer))


def with_gradients(rank: int, group: str, whole: Whole, of: str) -> Tensor:
    x, weights, ids = whole.own(rank)
    leaves = {"x": x.clone(), "weights": weights.clone()}
    leaves[of].requires_grad_()
    held = whole.held(rank, whole.tables())
    w13, w2 = held.pop("w13_EFD"), held.pop("w2_EDI")
    with torch.enable_grad():
        out = experts_over_ranks(
            leaves["x"], leaves["weights"], ids, w13, w2, *whole.tables(), whole.spread.rows,
            group, "gather", **held, **whole.options,
        )  # fmt: skip
        return torch.autograd.grad(out.float().sum(), leaves[of])[0]


@each_format
def test_gradients_are_those_of_experts_that_quantize(formats: str) -> None:
    whole = whole_of(formats, "even", torch.float32)
    for error in threads(2, with_gradients, whole, "x"):
        assert isinstance(error, ValueError) and "quantize has no gradient" in str(error)
    weights = whole.weights_TK.clone().requires_grad_()
    out = experts(whole.x_TD, weights, whole.ids_TK, **whole.weights, **whole.options)
    (want,) = torch.autograd.grad(out.sum(), weights)
    got = torch.cat(results(2, with_gradients, whole, "weights"))
    assert_close(got, want, Tol(1e-5, "sums in another order"))


SAID = {
    "float8 groups": "tokens are sent as float8_e4m3fn:1x128 codes",
    "static": "tokens are sent as bfloat16: float8_e4m3fn:tensor has a scale that is not",
}


@pytest.mark.parametrize("name", SAID)
@torch.no_grad()
def test_what_travels_is_counted_and_named(name: str) -> None:
    formats, more = (CODES[name], {}) if name in CODES else FLOATS[name][:2]
    whole = Whole.of(SPREAD["even"], BF16, *formats)
    held = whole.held(0, whole.tables())
    given = (*whole.own(0), held.pop("w13_EFD"), held.pop("w2_EDI"))
    layer = experts.call(*given, **held, **whole.options, **more)
    with fake_group(2) as group:
        ranks = OVER_RANKS.Ranks(*whole.tables(), whole.spread.rows, group, "gather")
        call = ExpertsOverRanksCall(layer, ranks)
        x_TD, *rest = experts_over_ranks.arguments.flat(call)
        said = str(moe_ops.explain(lambda x: experts_over_ranks(x * 2, *rest), (x_TD,)))
        there = traffic(call).there
    assert f"experts_over_ranks: gather; {SAID[name]}" in " ".join(said.split())
    # Weights and ids of three choices, and scales, fill 16 bytes each.
    D = x_TD.shape[1]
    assert there == (D + 3 * 16 if sends_codes(layer) else 2 * D + 2 * 16)
