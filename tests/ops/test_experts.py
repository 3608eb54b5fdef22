"""`experts` and `moe` on every backend: what a plain loop over tokens and choices computes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import OPS, activate, combine, dispatch, expert_gemm, experts, moe, route, using
from moe_ops.checks.shapes import DTYPES, FLOATS
from moe_ops.conformance.tensors import distinct_logits, half_map, padded, strided, with_holes
from moe_ops.testing import CASES, F32, GPT_OSS, TOL, Case, assert_close, make_layer
from tests.chosen import in_turn
from tests.ops.refused import (
    FIRST_FLOAT_NAMES,
    Bad,
    assert_refused,
    wrong_device,
    wrong_dtype,
    wrong_rank,
    wrong_size,
)

NAN = float("nan")
TIGHT = TOL["experts", F32]
BY_NAME = {case.name: case for case in CASES}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt_oss": GPT_OSS,
    "ungated": {"kind": "relu2", "gated": False},
}
each_case = pytest.mark.parametrize("case", CASES, ids=BY_NAME)
# Few rows an expert, and more than the CPU kernels stream.
each_size = pytest.mark.parametrize(
    "case", [BY_NAME["plain"], BY_NAME["many_rows"]], ids=["few_rows", "many_rows"]
)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=DTYPES)
each_backend = pytest.mark.parametrize("backend", experts.backends)


def arguments(case: Case, dtype: torch.dtype = F32, *, gated: bool = True) -> dict[str, Any]:
    """A call of `experts` with biases."""
    layer = make_layer(case, dtype, gated=gated)
    names = ("x_TD", "weights_TK", "ids_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED")
    return {name: getattr(layer, name) for name in names}


def run(backend: str, x_TD: Tensor, **rest: Any) -> Tensor:
    """The op on a backend, or a skip with the reason why that refuses the call."""
    refusal = experts.refusals(x_TD, **rest)[backend]
    if refusal:
        pytest.skip(f"{backend} {refusal}")
    with using(backend, experts):
        return experts(x_TD, **rest)


def by_hand(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor,
    b2_ED: Tensor,
    form: str = "plain",
) -> Tensor:
    """A token and a choice at a time, in double precision."""
    x, weights, w13, w2, b13, b2 = (
        t.double() for t in (x_TD, weights_TK, w13_EFD, w2_EDI, b13_EF, b2_ED)
    )
    rows = []
    for t, ids in enumerate(ids_TK.tolist()):
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for k, e in enumerate(ids):
            if 0 <= e < w13.shape[0]:
                h = activate_by_hand(w13[e] @ x[t] + b13[e], form)
                total = total + weights[t, k] * (w2[e] @ h + b2[e])
        rows.append(total)
    return torch.stack(rows) if rows else x.new_zeros(x.shape)


def activate_by_hand(y: Tensor, form: str) -> Tensor:
    if form == "ungated":
        return y.clamp(min=0) ** 2
    if form == "plain":
        gate, up = y.chunk(2)
        return gate / (1 + (-gate).exp()) * up
    gate, up = y[::2].clamp(max=1.5), y[1::2].clamp(-1.5, 1.5)
    return gate / (1 + (-1.702 * gate).exp()) * (up + 1)


@in_turn(each_dtype, each_case, pytest.mark.parametrize("form", FORMS), each_backend)
def test_matches_a_plain_loop(backend: str, form: str, case: Case, dtype: torch.dtype) -> None:
    call = arguments(case, dtype, gated=form != "ungated")
    got = run(backend, **call, **FORMS[form])
    assert (got.shape, got.dtype) == ((case.T, case.D), dtype)
    assert_close(got, by_hand(**call, form=form), TOL["experts", dtype])


@each_size
@each_backend
def test_is_the_composition_of_the_stages(backend: str, case: Case) -> None:
    call = arguments(case)
    x_RD, rows_R, ends_E = dispatch(call["x_TD"], call["ids_TK"], case.E)
    h_RI = activate(expert_gemm(x_RD, call["w13_EFD"], ends_E, call["b13_EF"]))
    y_RD = expert_gemm(h_RI, call["w2_EDI"], ends_E, call["b2_ED"])
    assert_close(run(backend, **call), combine(y_RD, call["weights_TK"], rows_R), TIGHT)


@each_size
@each_backend
def test_permuting_the_tokens_permutes_the_rows(backend: str, case: Case) -> None:
    call = arguments(case)
    moved = torch.randperm(case.T)
    permuted = {k: call[k][moved] for k in ("x_TD", "weights_TK", "ids_TK")}
    assert_close(run(backend, **{**call, **permuted}), run(backend, **call)[moved], TIGHT)


@each_size
@each_backend
def test_permuting_the_experts_with_their_ids_changes_nothing(backend: str, case: Case) -> None:
    call = arguments(case)
    moved = torch.randperm(case.E)
    permuted = {k: call[k][moved] for k in ("w13_EFD", "w2_EDI", "b13_EF", "b2_ED")}
    permuted["ids_TK"] = moved.argsort()[call["ids_TK"].long()]
    assert_close(run(backend, **{**call, **permuted}), run(backend, **call), TIGHT)


@pytest.mark.parametrize("name", ["plain", "odd", "many_rows", "many_experts"])
@each_backend
def test_ranks_that_share_the_experts_add_up_to_one(backend: str, name: str) -> None:
    case = BY_NAME[name]
    call, ids = arguments(case), torch.arange(case.E)
    maps = (half_map(case.E), torch.where(ids % 2 == 1, ids // 2, -1))
    parts = []
    for first, expert_map in enumerate(maps):
        local = {k: call[k][first::2] for k in ("w13_EFD", "w2_EDI", "b13_EF", "b2_ED")}
        parts.append(run(backend, **{**call, **local, "expert_map": expert_map}))
    assert_close(parts[0] + parts[1], run(backend, **call), TIGHT)


@each_size
@each_backend
def test_pairs_that_are_not_here_add_nothing(backend: str, case: Case) -> None:
    call = arguments(case)
    call["ids_TK"] = with_holes(call["ids_TK"], case.E)
    assert_close(run(backend, **call), by_hand(**call), TIGHT)


@each_backend
def test_ids_are_not_cut_to_32_bits(backend: str) -> None:
    call = arguments(BY_NAME["plain"])
    call["ids_TK"] = call["ids_TK"].long() + 2**32
    assert int(run(backend, **call).count_nonzero()) == 0


@pytest.mark.parametrize("junk", ["x_TD", "weights_TK"])
@each_size
@each_backend
def test_padding_tokens_may_hold_nan(backend: str, case: Case, junk: str) -> None:
    call = arguments(case)
    want = run(backend, **call)
    call = {k: v.clone() for k, v in call.items()}
    call["ids_TK"][::3] = -1
    call[junk][::3] = NAN
    got = run(backend, **call)
    assert int(got[::3].count_nonzero()) == 0, got[::3]
    assert_close(got[1::3], want[1::3], TIGHT)


@each_size
@each_backend
def test_all_tokens_may_choose_one_expert(backend: str, case: Case) -> None:
    call = arguments(case)
    call["ids_TK"] = torch.full_like(call["ids_TK"], case.E - 1)
    assert_close(run(backend, **call), by_hand(**call), TIGHT)


@each_size
@each_backend
def test_strided_tokens_weights_and_ids(backend: str, case: Case) -> None:
    call = arguments(case)
    views = {k: strided(call[k]) for k in ("x_TD", "weights_TK", "ids_TK")}
    assert_close(run(backend, **{**call, **views}), run(backend, **call), TIGHT)


VIEWS = {
    "strided": strided,
    "padded": padded,
    "column_major": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every_second_expert": lambda t: t.repeat_interleave(2, dim=0)[::2],
}


@in_turn(pytest.mark.parametrize("view", VIEWS), each_size, each_backend)
def test_strides_of_the_weights_do_not_matter(backend: str, case: Case, view: str) -> None:
    call = arguments(case)
    views = {k: VIEWS[view](call[k]) for k in ("w13_EFD", "w2_EDI")}
    assert_close(run(backend, **{**call, **views}), by_hand(**call), TIGHT)


@pytest.mark.parametrize("T", [1, 40])
@each_backend
def test_products_round_as_the_dtypes_promote(backend: str, T: int) -> None:
    # Zero weights leave the biases: 1 + s for expert 0 and -(1 + 2s) for expert 1. The square of
    # 1 + s is 1 + 2s + s ** 2, whose last term a bfloat16 product drops.
    s = 2.0**-7
    call: dict[str, Any] = {
        "x_TD": torch.ones(T, 8).bfloat16(),
        "weights_TK": torch.tensor([[1 + s, 1.0]]).expand(T, 2),
        "ids_TK": torch.tensor([[0, 1]]).expand(T, 2),
        "w13_EFD": torch.zeros(2, 16, 8).bfloat16(),
        "w2_EDI": torch.zeros(2, 8, 8).bfloat16(),
        "b2_ED": torch.tensor([[1 + s], [-1 - 2 * s]]).expand(2, 8).bfloat16(),
    }
    assert torch.equal(run(backend, **call), torch.full((T, 8), s**2).bfloat16())
    call["weights_TK"] = call["weights_TK"].bfloat16()
    assert torch.equal(run(backend, **call), torch.zeros(T, 8).bfloat16())


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("holes", [False, True], ids=["all_here", "holes"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_a_plain_loop(form: str, holes: bool) -> None:
    case = BY_NAME["plain"]
    call = arguments(case, gated=form != "ungated")
    if holes:
        call["ids_TK"] = with_holes(call["ids_TK"], case.E)
    names = [k for k, v in call.items() if v.is_floating_point()]
    for name in names:
        call[name].requires_grad_()
    upstream = torch.randn(case.T, case.D)
    found = []
    for out in (experts(**call, **FORMS[form]), by_hand(**call, form=form)):
        leaves = [call[name] for name in names]
        found.append(torch.autograd.grad((out * upstream).sum(), leaves))
    for name, got, want in zip(names, *found, strict=True):
        assert_close(got, want, TIGHT, f"the gradient of {name}")


@pytest.mark.parametrize("holder", ["x_TD", "weights_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED"])
def test_only_a_differentiable_backend_takes_what_requires_grad(holder: str) -> None:
    call = arguments(BY_NAME["plain"])
    call[holder].requires_grad_()
    assert "is not differentiable" in (experts.refusals(*call.values())["cpu"] or "")
    assert experts(**call).requires_grad
    with torch.no_grad():
        assert "is not differentiable" not in (experts.refusals(*call.values())["cpu"] or "")


ROUTING: dict[str, dict[str, Any]] = {
    "mixtral": {"renormalize": True},
    "deepseek": {"score": "sigmoid", "n_group": 2, "topk_group": 1, "scale": 2.5},
    "gpt_oss": {"score": "logit", "softmax_selected": True},
}


@pytest.mark.parametrize("mapped", [False, True], ids=["whole", "mapped"])
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("routing", ROUTING.values(), ids=ROUTING)
def test_moe_is_route_and_experts(
    routing: dict[str, Any], weights_dtype: str, mapped: bool
) -> None:
    case = BY_NAME["plain"]
    x, _, _, w13, w2, b13, b2 = arguments(case, torch.bfloat16).values()
    here = half_map(case.E) if mapped else None
    if mapped:
        w13, w2, b13, b2 = w13[:4], w2[:4], b13[:4], b2[:4]
    logits, bias, scales = distinct_logits(case.T, case.E), torch.rand(8), torch.rand(8)
    weights, ids = route(logits, 2, bias, scales, **routing, out_dtype=weights_dtype)
    want = experts(x, weights, ids, w13, w2, b13, b2, here, **GPT_OSS)
    got = moe(
        x, logits, w13, w2, 2, bias, scales, b13, b2, here,
        **routing, **GPT_OSS, weights_dtype=weights_dtype,
    )  # fmt: skip
    assert torch.equal(got, want)


def test_moe_passes_transposed_weights_on() -> None:
    case = BY_NAME["plain"]
    layer, flipped = make_layer(case), make_layer(case, transposed=True)
    want = moe(layer.x_TD, layer.logits_TE, layer.w13_EFD, layer.w2_EDI, 2)
    got = moe(layer.x_TD, layer.logits_TE, flipped.w13_EFD, flipped.w2_EDI, 2, transposed=True)
    assert_close(got, want, TOL["moe", F32])


T, E, K, D, I = 3, 2, 2, 4, 5  # noqa: E741  (the legend's letter for the expert width)
SHARED = {
    "x_TD": torch.ones(T, D),
    "w13_EFD": torch.ones(E, 2 * I, D),
    "w2_EDI": torch.ones(E, D, I),
}
IDS = torch.zeros(T, K, dtype=torch.int32)
GOOD: dict[str, dict[str, Any]] = {
    "experts": {**SHARED, "weights_TK": torch.ones(T, K), "ids_TK": IDS},
    "moe": {**SHARED, "logits_TE": torch.ones(T, E), "top_k": K},
}
WIDTH, ROWS = "4 (the width of x_TD)", "the rows of one expert's weight"
# Bad values of the arguments that both ops share.
BAD = {
    "x_rank": wrong_rank("x_TD", (4,), 2),
    "x_dtype": wrong_dtype("x_TD", (T, D), "int32", FIRST_FLOAT_NAMES),
    "w13_scalar": wrong_rank("w13_EFD", (), 3),
    "w13_rank": wrong_rank("w13_EFD", (2, 4), 3),
    "w13_dtype": wrong_dtype("w13_EFD", (E, 2 * I, D), "float16", "float32"),
    "w13_width": wrong_size("w13_EFD", (E, 2 * I, 3), 2, WIDTH),
    "w13_device": wrong_device("w13_EFD", (E, 2 * I, D)),
    "transposed": Bad(
        {"transposed": True},
        "w13_EFD must have 4 (the width of x_TD) on axis 1, got shape (2, 10, 4)",
    ),
    "odd_gated_width": Bad(
        {"w13_EFD": torch.ones(E, 9, D)},
        "gated experts need an even number of rows, got w13_EFD (2, 9, 4); give as many of the "
        "gate as of up, or gated=False",
    ),
    "no_experts": Bad(
        {
            "w13_EFD": torch.ones(0, 2 * I, D),
            "w2_EDI": torch.ones(0, D, I),
            "expert_map": torch.tensor([-1, -1]),
        },
        f"w13_EFD holds no expert, got shape {(0, 2 * I, D)}; give one expert or more",
    ),
    "w2_rank": wrong_rank("w2_EDI", (4, 5), 3),
    "w2_dtype": wrong_dtype("w2_EDI", (E, D, I), "float16", "float32"),
    "w2_experts": wrong_size("w2_EDI", (3, D, I), 0, "2 (the experts of w13_EFD)"),
    "w2_rows": wrong_size("w2_EDI", (E, 3, I), 1, WIDTH),
    "w2_width": wrong_size("w2_EDI", (E, D, 9), 2, "5 (the width after the activation)"),
    "w2_device": wrong_device("w2_EDI", (E, D, I)),
    "ungated": Bad(
        {"gated": False},
        "w2_EDI must have 10 (the width after the activation) on axis 2, got shape (2, 4, 5)",
    ),
    "b13_rank": wrong_rank("b13_EF", (10,), 2),
    "b13_dtype": wrong_dtype("b13_EF", (E, 2 * I), "int64"),
    "b13_experts": wrong_size("b13_EF", (3, 2 * I), 0, "2 (the experts of w13_EFD)"),
    "b13_width": wrong_size("b13_EF", (E, I), 1, f"10 ({ROWS})"),
    "b13_device": wrong_device("b13_EF", (E, 2 * I)),
    "b2_rank": wrong_rank("b2_ED", (4,), 2),
    "b2_dtype": wrong_dtype("b2_ED", (E, D), "int32"),
    "b2_width": wrong_size("b2_ED", (E, I), 1, f"4 ({ROWS})"),
    "b2_device": wrong_device("b2_ED", (E, D)),
    "map_rank": wrong_rank("expert_map", (E, 1), 1),
    "map_dtype": wrong_dtype("expert_map", (E,), "float32", "int32, int64"),
    "map_device": wrong_device("expert_map", (E,), torch.int32),
    "kind": Bad({"kind": "tanh"}, "kind='tanh' is unknown; choose one of silu, gelu, gelu_tanh"),
    "limit": Bad({"limit": -1.0}, "limit=-1.0 must be positive, or None for no clamp"),
    "alpha": Bad(
        {"kind": "gelu", "alpha": 2.0}, "alpha=2.0 goes with kind='silu', got kind='gelu'"
    ),
}
BAD_EXPERTS = {
    "weights_rank": wrong_rank("weights_TK", (3,), 2),
    "weights_dtype": wrong_dtype("weights_TK", (T, K), "int32"),
    "weights_rows": wrong_size("weights_TK", (2, K), 0, "3 (the tokens of ids_TK)"),
    "weights_choices": wrong_size("weights_TK", (T, 1), 1, "2 (the top-k of ids_TK)"),
    "weights_device": wrong_device("weights_TK", (T, K)),
    "ids_rank": wrong_rank("ids_TK", (3,), 2),
    "ids_dtype": wrong_dtype("ids_TK", (T, K), "float32", "int32, int64"),
    "ids_rows": wrong_size("ids_TK", (2, K), 0, "3 (the tokens of x_TD)", torch.int32),
    "ids_device": wrong_device("ids_TK", (T, K), torch.int64),
}
BAD_MOE = {
    "top_k": Bad({"top_k": 3}, "top_k=3 must be from 1 to the 2 experts of logits_TE; lower top_k"),
    "logits_rank": wrong_rank("logits_TE", (T,), 2),
    "logits_rows": wrong_size("logits_TE", (2, E), 0, "3 (the tokens of x_TD)"),
    "logits_experts": wrong_size(
        "logits_TE", (T, 3), 1, "2 (the experts of w13_EFD, as there is no expert_map)"
    ),
    "logits_device": wrong_device("logits_TE", (T, E)),
    "bias_size": wrong_size("bias_E", (3,), 0, "2 (one per expert of logits_TE)"),
    "map_size": wrong_size("expert_map", (3,), 0, "2 (the experts of logits_TE)", torch.int64),
    "weights_dtype": Bad({"weights_dtype": "int8"}, "dtype='int8' is unknown; choose one of float"),
    "groups": Bad({"n_group": 3}, "n_group=3 must divide the 2 experts of logits_TE"),
}
CALLS = [
    pytest.param(name, bad, id=f"{name}-{label}")
    for name, table in {"experts": BAD | BAD_EXPERTS, "moe": BAD | BAD_MOE}.items()
    for label, bad in table.items()
]


@pytest.mark.parametrize(("name", "bad"), CALLS)
def test_refuses_a_bad_call(name: str, bad: Bad) -> None:
    assert_refused(OPS[name], GOOD[name], bad)
