"""`fuse_norm`: the norm of a few rows goes into the linear layers that read it, no other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.nn.functional import linear
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from moe_ops.passes.fuse_norm import fuse_norm
from moe_ops.passes.merge_linears import merge_linears
from moe_ops.passes.rewriting.context import Context
from moe_ops.testing import BF16, F16, Tol, assert_close
from tests import decoding
from tests.passes.post_grad import Compiled, text

pytestmark = pytest.mark.slow  # compiles many graphs
ROUNDED = Tol(1e-2, "roundings to 8 bits of mantissa, one more or one less")
D, N = 16, 24


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding.on_any_device(monkeypatch)


class Fuse:
    """The passes as a hook that keeps what the second said."""

    def __init__(self) -> None:
        self.context, self.count = Context(), 0

    def __call__(self, graph: fx.Graph) -> None:
        merge_linears(graph, Context())
        graph.eliminate_dead_code()
        self.count = fuse_norm(graph, self.context)
        graph.eliminate_dead_code()
        graph.lint()
        assert fuse_norm(graph, Context()) == 0


def fused(model: Any, *args: Tensor) -> tuple[Fuse, Any, fx.Graph]:
    hook = Fuse()
    compiled = Compiled(model, hook)
    got = compiled(*args)
    return hook, got, compiled.graphs[0]


def parameter(*shape: int, dtype: torch.dtype = BF16) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape).to(dtype), requires_grad=False)


def norm(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """As Llama, Mixtral and Qwen3 norm."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * wide.to(x.dtype)


def shifted(shift: float) -> Callable[[Tensor, Tensor], Tensor]:
    """As Gemma, Qwen3-Next and Qwen3.5 norm with a shift of 1, rounding once."""

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (shift + gain.float())).type_as(x)

    return norm


def of_gpt_oss(x: Tensor, gain: Tensor) -> Tensor:
    """Rounded once, of a gain that no code converts."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (gain * wide).to(x.dtype)


# Norms, and the shift of the gain in each.
FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None]] = {
    "of_llama": (norm, None), "of_gpt_oss": (of_gpt_oss, 0.0), "of_gemma": (shifted(1), 1.0),
    "half": (shifted(0.5), 0.5),
}  # fmt: skip


def block(
    x: Tensor, y: Tensor, gain: Tensor, a: Tensor, b: Tensor, norm: Any = norm
) -> tuple[Tensor, ...]:
    """A sum that goes on, what is normed, and two products of that."""
    s = x + y
    n = norm(s, gain)
    return s - n, n.sigmoid(), linear(n, a), linear(n, b)


def the_op(graph: fx.Graph) -> fx.Node:
    target = torch.ops.moe_ops.normed_linears.planned
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def test_golden() -> None:
    x, y = (torch.randn(1, 1, D, dtype=BF16) for _ in range(2))
    given = x, y, parameter(D), parameter(N, D), parameter(8, D)
    hook, _, graph = fused(block, *given)
    assert hook.count == 1
    assert_expected_inline(
        text(graph),
        """\
arg0_1: bfloat16[1, 1, 16]
arg1_1: bfloat16[1, 1, 16]
arg2_1: bfloat16[16]
arg3_1: bfloat16[24, 16]
arg4_1: bfloat16[8, 16]
reshape_default = aten.reshape(arg0_1, [1, 16])  # bfloat16[1, 16]
reshape_default_1 = aten.reshape(arg1_1, [1, 16])  # bfloat16[1, 16]
normed_linears_planned = moe_ops.normed_linears.planned(reshape_default, reshape_default_1, arg2_1, 1e-06, [arg3_1, arg4_1], [None, None], plan=triton)
getitem_2 = getitem(normed_linears_planned, 0)  # bfloat16[1, 16]
getitem_3 = getitem(normed_linears_planned, 1)  # bfloat16[1, 16]
getitem_4 = getitem(normed_linears_planned, 2)  # bfloat16[1, 24]
getitem_5 = getitem(normed_linears_planned, 3)  # bfloat16[1, 8]
reshape_default_2 = aten.reshape(getitem_3, [1, 1, 16])  # bfloat16[1, 1, 16]
reshape_default_3 = aten.reshape(getitem_2, [1, 1, 16])  # bfloat16[1, 1, 16]
sub = aten.sub.Tensor(reshape_default_3, reshape_default_2)  # bfloat16[1, 1, 16]
sigmoid = aten.sigmoid(reshape_default_2)  # bfloat16[1, 1, 16]
view_1 = aten.reshape(getitem_4, [1, 1, 24])  # bfloat16[1, 1, 24]
view_3 = aten.reshape(getitem_5, [1, 1, 8])  # bfloat16[1, 1, 8]
return [sub, sigmoid, view_1, view_3]""",  # noqa: E501
    )


def test_golden_of_a_shifted_gain() -> None:
    x = torch.randn(1, 1, D, dtype=BF16)
    model = lambda x, gain, w: linear(shifted(1.0)(x, gain), w)  # noqa: E731
    _, _, graph = fused(model, x, parameter(D), parameter(N, D))
    assert_expected_inline(
        text(graph),
        """\
arg0_1: bfloat16[1, 1, 16]
arg1_1: bfloat16[16]
arg2_1: bfloat16[24, 16]
reshape_default = aten.reshape(arg0_1, [1, 16])  # bfloat16[1, 16]
normed_linears_planned = moe_ops.normed_linears.planned(reshape_default, None, arg1_1, 1e-06, [arg2_1], [None], plan=triton, gain_shift=1.0)
getitem_2 = getitem(normed_linears_planned, 1)  # bfloat16[1, 24]
view_1 = aten.reshape(getitem_2, [1, 1, 24])  # bfloat16[1, 1, 24]
return [view_1]""",  # noqa: E501
    )


@pytest.mark.parametrize(
    ("form", "dtype", "shape"),
    [
        ("of_llama", BF16, (1, D)),
        ("of_llama", F16, (1, 1, D)),
        ("of_gpt_oss", BF16, (1, 1, D)),
        ("of_gemma", F16, (1, D)),
        ("of_llama", BF16, (3, 1, D)),
        ("of_gpt_oss", F16, (64, D)),
        pytest.param("of_gemma", BF16, (1, 1, D), marks=pytest.mark.every),
        pytest.param("half", BF16, (1, D), marks=pytest.mark.every),
    ],
    ids=str,
)
def test_numbers_stay(form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    of, shift = FORMS[form]
    x, y = (torch.randn(shape, dtype=dtype) for _ in range(2))
    given = x, y, *(parameter(*s, dtype=dtype) for s in ((D,), (N, D), (8, D)))
    model = functools.partial(block, norm=of)
    hook, got, graph = fused(model, *given)
    assert hook.count == 1, hook.context.refusals
    assert the_op(graph).args[6] == shift and the_op(graph).args[1] is not None
    for g, w in zip(got, model(*given), strict=True):
        assert g.shape == w.shape
        assert_close(g.float(), w.float(), ROUNDED)


@pytest.mark.every
@pytest.mark.parametrize(
    ("kind", "shift"), [(Qwen3NextRMSNorm, 1.0), (GptOssRMSNorm, 0.0)], ids=["qwen", "gpt_oss"]
)
def test_modules_of_transformers(kind: Any, shift: float) -> None:
    model = nn.Sequential(kind(D), nn.Linear(D, N, bias=False)).bfloat16().requires_grad_(False)
    model[0].weight.normal_()
    x = torch.randn(1, 1, D, dtype=BF16)
    hook, got, graph = fused(model, x)
    assert hook.count == 1 and the_op(graph).args[6] == shift
    assert_close(got.float(), model(x).float(), ROUNDED)


def test_a_norm_without_a_sum() -> None:
    x, gain, w = torch.randn(1, 1, D, dtype=BF16), parameter(D), parameter(N, D)
    hook, got, graph = fused(lambda x, gain, w: linear(norm(x, gain), w) + x.sum(), x, gain, w)
    assert hook.count == 1
    assert the_op(graph).args[1] is None
    assert_close(got.float(), (linear(norm(x, gain), w) + x.sum()).float(), ROUNDED)


def test_a_sum_that_is_read_before_the_norm_stays() -> None:
    def model(x: Tensor, y: Tensor, gain: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + y
        return s * 2, linear(norm(s, gain), w)

    x, y = (torch.randn(1, D, dtype=BF16) for _ in range(2))
    given = x, y, parameter(D), parameter(N, D)
    hook, got, graph = fused(model, *given)
    assert hook.count == 1
    assert the_op(graph).args[1] is None
    for g, w in zip(got, model(*given), strict=True):
        assert_close(g.float(), w.float(), ROUNDED)


def near(change: str) -> Any:
    """A norm that is not the op's."""

    def model(x: Tensor, gain: Tensor, w: Tensor) -> Any:
        wide = x.float() if change != "narrow" else x
        square = wide.pow(3) if change == "cube" else wide.pow(2)
        dims = [0] if change == "axis" else [-1]
        mean = square.mean(dims, keepdim=True)
        shift = x.float().sum() if change == "eps" else 1e-6
        inverse = torch.rsqrt(mean + shift)
        if change == "square":  # torch 2.14 makes rsqrt of 1 / sqrt
            inverse = torch.reciprocal(mean + shift)
        row = wide * inverse
        n = gain * row.to(x.dtype)
        if change in GAINS:  # of what is rounded after the gain alone
            n = (row * GAINS[change](gain)).to(x.dtype)
        out = linear(n, w)
        return (out, inverse) if change == "read" else out

    return model


GAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "rounded": lambda gain: 1.0 + gain,
    "converted": lambda gain: (1.0 + gain).float(),
    "summed": lambda gain: gain.float() + gain.float().sum(),
    "scaled": lambda gain: torch.rsub(gain.float(), 1.0),
    "wide": lambda gain: gain.double(),
    "later": lambda gain: 1.0 + gain.float() * 2,
}

NEAR_MISSES = {
    "cube": "another row is squared", "axis": "the mean is another", "eps": "epsilon is",
    "square": "the inverse of the norm is", "read": "is also used by", "narrow": "",
    "rows": "", "rounded": "the shifted gain is rounded", "summed": "the gain is another sum",
    "converted": "the gain is no parameter", "scaled": "the gain is no parameter",
    "wide": "the gain is not of float32", "later": "the gain is no parameter",
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), NEAR_MISSES.items(), ids=NEAR_MISSES)
def test_near_misses(change: str, reason: str) -> None:
    x = torch.randn(65 if change == "rows" else 1, D, dtype=BF16)
    hook, _, _ = fused(near(change), x, parameter(D), parameter(N, D))
    assert hook.count == 0
    assert len(hook.context.refusals) <= 1
    assert all(reason in note.text for note in hook.context.refusals)
    assert bool(hook.context.refusals) or not reason
