"""What a layer that trains keeps, and how large the tensors of its graphs are."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config

import moe_ops
from moe_ops.testing import GPT_OSS, Case, make_layer

T, E, K, D, I = 96, 6, 4, 64, 48  # noqa: E741
F, R = 2 * I, T * K
LAYER = make_layer(Case(name="kept", T=T, E=E, K=K, D=D, I=I))
COMPILES = (pytest.mark.slow, pytest.mark.every)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"b13_EF": LAYER.b13_EF, "b2_ED": LAYER.b2_ED},
    "gpt_oss": {"b13_EF": LAYER.b13_EF, "b2_ED": LAYER.b2_ED, **GPT_OSS},
}


def leaves(form: str) -> tuple[list[Tensor], dict[str, Any]]:
    given = [LAYER.x_TD, LAYER.weights_TK, LAYER.w13_EFD, LAYER.w2_EDI]
    rest = {
        k: v.clone().requires_grad_() if isinstance(v, Tensor) else v
        for k, v in FORMS[form].items()
    }
    return [t.clone().requires_grad_() for t in given], rest


def run(form: str) -> Tensor:
    (x, weights, w13, w2), rest = leaves(form)
    return moe_ops.experts(x, weights, LAYER.ids_TK, w13, w2, **rest)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_keeps_its_input_and_its_rows_before_the_activation(form: str) -> None:
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not t.is_leaf or not t.requires_grad or t.shape == (T, D):
            kept[t.untyped_storage().data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(form)
    per_token = sum(kept.values()) / T
    assert per_token <= 4 * (D + 2 * K * I) + 2048
    assert per_token >= 4 * (D + 2 * K * I), "the test sees what is kept"


def test_what_was_kept_is_free_before_gradients_of_weights_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for a graph that is kept for another backward."""
    kept: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    part = type(moe_ops.experts).part

    def watched(op: Any, call: Any) -> Any:
        if op is moe_ops.expert_wgrad:
            alive.append(kept[-1]() is not None)
        made = part(op, call)
        if op is moe_ops.experts_saving:
            kept.append(weakref.ref(made[1].untyped_storage()))
        return made

    monkeypatch.setattr(type(moe_ops.experts), "part", watched)
    out = run("plain").sum()
    out.backward(retain_graph=True)
    assert alive == [True, True]
    alive.clear()
    out.backward()
    assert alive == [False, False]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["ops", pytest.param("inductor", marks=COMPILES)])
def test_no_tensor_of_the_joint_graph_is_large(form: str, how: str) -> None:
    """No weight for each row, and nothing of [R, E]: in graphs as AOTAutograd makes them, and as
    passes leave them for Inductor."""
    torch._dynamo.reset()
    largest: list[tuple[int, str]] = []

    def look(graph: Any) -> None:
        for node in graph.nodes:
            for t in torch.utils._pytree.tree_leaves(node.meta.get("val")):
                if isinstance(t, Tensor):
                    largest.append((t.numel(), str(node)))

    def keep(graph: Any, _: Any) -> Any:
        look(graph.graph)
        return graph

    (x, weights, w13, w2), rest = leaves(form)

    def function(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return moe_ops.experts(x, weights, LAYER.ids_TK, w13, w2, **rest)

    if how == "ops":
        backend: Any = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        call = torch.compile(function, backend=backend, fullgraph=True)
    else:
        options = moe_ops.inductor_options()
        pipeline = options[moe_ops.passes.inductor.pipeline.HOOK]
        after = type(pipeline).__call__

        class Looks(type(pipeline)):  # type: ignore[misc]
            def __call__(self, graph: Any, is_inference: bool | None = None) -> None:
                after(self, graph, is_inference)
                look(graph)

        pipeline.__class__ = Looks
        call = torch.compile(function, options=options, fullgraph=True)
    with config.patch(fx_graph_cache=False):  # from which come graphs that no pass sees
        call(x, weights, w13, w2).square().sum().backward()
    assert len(largest) > 20
    assert max(largest)[0] <= max(E * F * D, R * (F + D)), max(largest)
