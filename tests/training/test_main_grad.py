"""Gradients of expert weights that a backward adds to a float32 `main_grad`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import moe_ops
from moe_ops.conformance.tensors import with_holes
from moe_ops.testing import BF16, F32, Case, Tol, assert_close, make_layer

TOL = Tol(1e-5, "float32 sums in another order")
E, D, I = 5, 16, 12  # noqa: E741
F = 2 * I
BATCHES = 3
Run = Callable[..., Tensor]


class Experts(nn.Module):
    """The weights and biases of a layer, which lie as `transposed` says."""

    def __init__(self, dtype: torch.dtype = F32, transposed: bool = False) -> None:
        super().__init__()
        case = Case(name="tiny", T=6, E=E, K=2, D=D, I=I)
        made = make_layer(case, dtype, transposed=transposed)
        self.w13, self.w2 = nn.Parameter(made.w13_EFD), nn.Parameter(made.w2_EDI)
        self.b13, self.b2 = nn.Parameter(made.b13_EF), nn.Parameter(made.b2_ED)
        self.ids, self.weights_TK = with_holes(made.ids_TK, E), made.weights_TK
        self.transposed = transposed

    def forward(self, x: Tensor, main: bool = True) -> Tensor:
        given = (self.weights_TK, self.ids, self.w13, self.w2, self.b13, self.b2)
        if not main:
            return moe_ops.experts(x, *given, transposed=self.transposed)
        sums: Any = {f"main_grad{n}": getattr(self, f"w{n.partition('_')[0]}").main_grad
                     for n in ("13_EFD", "2_EDI")}  # fmt: skip
        return moe_ops.experts_accumulating(x, *given, transposed=self.transposed, **sums)

    def with_sums(self) -> Experts:
        """Both main_grads as parts of one buffer, as trainers lay them."""
        buffer = torch.zeros(self.w13.numel() + self.w2.numel())
        parts = buffer.split([self.w13.numel(), self.w2.numel()])
        for w, part in zip((self.w13, self.w2), parts, strict=True):
            w.main_grad = part.view_as(w)  # type: ignore[attr-defined]
        return self

    def sums(self) -> tuple[Tensor, Tensor]:
        return self.w13.main_grad, self.w2.main_grad  # type: ignore[return-value]


def batches(dtype: torch.dtype = F32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(6, D).to(dtype) for _ in range(BATCHES)]


def loss(out: Tensor) -> Tensor:
    return out.float().square().sum()


def in_turn(run: Run, given: list[Tensor]) -> None:
    for x in given:
        loss(run(x)).backward()


def wanted(module: Experts, given: list[Tensor]) -> list[Tensor]:
    """The float32 sum, in this order, of the gradients of both weights, each by itself."""
    found = [torch.zeros(w.shape) for w in (module.w13, module.w2)]
    for x in given:
        grads = torch.autograd.grad(loss(module(x, main=False)), [module.w13, module.w2])
        for total, grad in zip(found, grads, strict=True):
            total += grad
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_micro_batches_give_the_bits_of_their_sum(transposed: bool) -> None:
    module, given = Experts(transposed=transposed).with_sums(), batches()
    want = wanted(module, given)
    in_turn(module, given)
    for got, w in zip(module.sums(), want, strict=True):
        assert torch.equal(got, w)
    assert module.w13.grad is None and module.w2.grad is None


def test_the_bits_of_a_sum_of_bfloat16_are_those_of_float32_results() -> None:
    """Nothing is rounded to bfloat16 on the way."""
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    got = torch.randn(3, 12, 20)
    want = got.clone()
    for _ in range(BATCHES):
        a, b = torch.randn(9, 12).to(BF16), torch.randn(9, 20).to(BF16)
        moe_ops.expert_wgrad_onto(a, b, ends, got)
        want += moe_ops.expert_wgrad(a, b, ends, out_dtype="float32")
    assert torch.equal(got, want)


def saves_experts(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    saved = op is torch.ops.moe_ops.experts_saving.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def by_checkpoint(module: Experts, **options: Any) -> Run:
    return lambda x: checkpoint(module, x.requires_grad_(), **options)


def by_inductor(module: Experts) -> Run:
    return torch.compile(module, options=moe_ops.inductor_options(), fullgraph=True)


WAYS: dict[str, Callable[[Experts], Run]] = {
    "eager": lambda module: module,
    "aot_eager": partial(torch.compile, backend="aot_eager", fullgraph=True),  # type: ignore[dict-item]
    "dynamic": partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=True),  # type: ignore[dict-item]
    "inductor": by_inductor,
    "checkpoint": partial(by_checkpoint, use_reentrant=False),
    "reentrant checkpoint": partial(by_checkpoint, use_reentrant=True),
    "selective checkpoint": partial(
        by_checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, saves_experts),
    ),
    "compiled checkpoint": lambda module: torch.compile(
        lambda x: checkpoint(module, x, use_reentrant=False), backend="aot_eager", fullgraph=True
    ),
}
SLOW = ("inductor",)
each_way = pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.slow] * (w in SLOW)) for w in WAYS]
)


@each_way
def test_every_way_adds_what_the_gradients_are(way: str) -> None:
    torch._dynamo.reset()
    module, given = Experts().with_sums(), batches()
    want = wanted(module, given)
    in_turn(WAYS[way](module), given)
    for got, w in zip(module.sums(), want, strict=True):
        assert_close(got, w, TOL, way)
    other = Experts()
    in_turn(partial(other, main=False), given)
    for name in ("b13", "b2"):
        assert_close(getattr(module, name).grad, getattr(other, name).grad, TOL, name)
    assert module.w13.grad is None and module.w2.grad is None


def test_compiled_autograd_adds_too() -> None:
    torch._dynamo.reset()
    module, given = Experts().with_sums(), batches()
    want = wanted(module, given)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        in_turn(module, given)
    for got, w in zip(module.sums(), want, strict=True):
        assert_close(got, w, TOL)


@pytest.mark.parametrize("way", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_backwards_may_come_after_several_forwards(way: str) -> None:
    """As pipelines order them: what one backward adds is no value of another's graph."""
    torch._dynamo.reset()
    module, given = Experts().with_sums(), batches()
    want = wanted(module, given)
    run = WAYS[way](module)
    for one in [loss(run(x)) for x in given]:
        one.backward()
    for got, w in zip(module.sums(), want, strict=True):
        assert_close(got, w, TOL, way)


def test_only_wanted_gradients_are_added() -> None:
    module = Experts().with_sums()
    module.w13.requires_grad_(False)
    loss(module(batches()[0])).backward()
    assert not module.w13.main_grad.any()  # type: ignore[union-attr]
    assert bool(module.w2.main_grad.any())  # type: ignore[union-attr]


def test_every_backward_adds() -> None:
    """Again, and for the gradient of tokens alone: what is added is no result that is asked for."""
    module, x = Experts().with_sums(), batches()[0].requires_grad_()
    (want,) = wanted(module, [x])[1:]
    out = loss(module(x))
    out.backward(retain_graph=True)
    torch.autograd.grad(out, x)
    assert torch.equal(module.w2.main_grad, want + want)  # type: ignore[arg-type]


@pytest.mark.parametrize("main", [True, False], ids=["main_grad", "grad"])
def test_no_gradient_of_a_weights_size_is_in_the_graph(main: bool) -> None:
    """None of the weight's dtype; without main_grad, as the test shows, there is one of each."""
    torch._dynamo.reset()
    module, (x, *_) = Experts(BF16).with_sums(), batches(BF16)
    made: list[str] = []

    def look(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            for t in torch.utils._pytree.tree_leaves(node.meta.get("val")):
                large = isinstance(t, Tensor) and t.numel() in (E * F * D, E * D * I)
                if large and t.dtype is BF16 and node.op == "call_function":
                    made.append(str(node.target))
        return graph

    aot = torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda g, _: g, bw_compiler=look)
    loss(torch.compile(module, backend=aot, fullgraph=True)(x, main)).backward()
    assert made.count("moe_ops.expert_wgrad.default") == (0 if main else 2)
    assert [op for op in made if op.startswith("moe_ops")] == made[: 0 if main else 2]


@pytest.mark.parametrize("main", [True, False], ids=["main_grad", "grad"])
def test_no_memory_of_a_weights_size_is_allocated(main: bool) -> None:
    """By the profiler, which sees each allocation of an eager backward."""
    experts, width = 64, 32
    made = make_layer(Case(name="many", T=4, E=experts, K=1, D=width, I=width), BF16)
    weights = [made.w13_EFD.requires_grad_(), made.w2_EDI.requires_grad_()]
    sums = [torch.zeros(w.shape) for w in weights] if main else []
    op = moe_ops.experts_accumulating if main else moe_ops.experts
    names = dict(zip(("main_grad13_EFD", "main_grad2_EDI"), sums, strict=False))
    out = loss(op(made.x_TD, made.weights_TK, made.ids_TK, *weights, **names))
    with torch.profiler.profile(profile_memory=True) as watched:
        out.backward()
    events = watched.profiler.kineto_results.events()
    largest = max(e.nbytes() for e in events if e.name() == "[memory]")
    assert (largest >= made.w2_EDI.nbytes) == (not main)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": BF16}, r"float32 .* got torch.bfloat16; make it"),
    "shape": ({"size": (E, D, F)}, rf"float32 tensor \({E}, {F}, {D}\) .* got the shape"),
    "device": ({"device": "meta"}, ".* on cpu without gradient, got a tensor on meta"),
    "strides": ({"size": (E, D, F), "turned": True}, ".* got the strides"),
    "gradient": ({"requires_grad": True}, ".* got a tensor that requires grad"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_main_grad_that_does_not_fit_is_refused(fault: str) -> None:
    module = Experts().with_sums()
    given, said = REFUSED[fault]
    options = {"size": (E, F, D), **given}
    turned = options.pop("turned", False)
    made = torch.zeros(**options)
    module.w13.main_grad = made.transpose(1, 2) if turned else made  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"main_grad13_EFD must be a contiguous {said}"):
        module(batches()[0])


def test_a_gradient_of_gradients_is_refused() -> None:
    module = Experts().with_sums()
    out = loss(module(batches()[0]))
    with pytest.raises(ValueError, match="leave out create_graph=True"):
        torch.autograd.grad(out, [module.b2], create_graph=True)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp], ids=["grad", "vjp"])
def test_transforms_are_refused(transform: Any) -> None:
    module, x = Experts().with_sums(), batches()[0]
    with pytest.raises(ValueError, match="transforms of torch"):
        made = transform(lambda t: loss(module(t)), *([x] if transform is torch.func.vjp else []))
        made(x)


def test_a_forced_backend_is_refused() -> None:
    module = Experts().with_sums()
    with moe_ops.using("reference"), pytest.raises(ValueError, match="a formula of its own"):
        module(batches()[0])
    with moe_ops.using("reference"), torch.no_grad():
        module(batches()[0])


def test_operands_that_want_a_gradient_are_refused() -> None:
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(4, 5)
    with pytest.raises(ValueError, match=r"call it under torch.no_grad\(\)"):
        moe_ops.expert_wgrad_onto(a, b, torch.tensor([4], dtype=torch.int32), torch.zeros(1, 3, 5))
