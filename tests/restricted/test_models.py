"""Models of transformers with some of their experts alone, in memory and on disk."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.hf.optimize import optimize
from moe_ops.ops import route
from moe_ops.testing import Tol, assert_close
from tests.hf import families
from tests.hf.test_quantize import logits, qwen
from tests.hf.test_saved import check_same
from tests.hf.twins import check, twin_of

TOL = Tol(2e-5, "float32 sums in another order through a whole model")
KEPT = (0, 2, 3, 5, 6, 7)  # as many of each group of four
GROUPS: dict[str, dict[str, Any]] = {"*": {"n_group": 2, "topk_group": 1}}
# With router biases, groups, shared experts, a softmax of all, pictures, and tables by attributes.
USED = ("deepseek_v3", "ernie4_5_moe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_vl_moe")
# Without a rule for their routers, of which some choose by the token.
UNKNOWN = ("deepseek_v4", "inkling", "phimoe", "zaya")
FAMILIES = [
    pytest.param(name, marks=() if name in USED else pytest.mark.every)
    for name in families.discover()
    if name not in UNKNOWN
]


def built(family: str) -> families.TinyModel:
    cls = families.model_class(family)
    tiny = families.build_class(cls, families.tiny_config(cls.config_class, GROUPS))
    optimize(tiny.model)
    return tiny


def without_others(logits_TE: Tensor, *args: Any, **options: Any) -> Any:
    """`route` with logits of -inf for the others, and biases likewise."""
    others = torch.ones(logits_TE.shape[1], dtype=torch.bool)
    others[list(KEPT)] = False
    if options.get("bias_E") is not None:
        options["bias_E"] = options["bias_E"].masked_fill(others, -torch.inf)
    return route(logits_TE.masked_fill(others, -torch.inf), *args, **options)


def numbers_of(model: nn.Module) -> set[int]:
    return {m.down_proj.shape[0] for m in families.experts(model).values()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_some_and_is_saved_as_an_ordinary_checkpoint(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = built(family)
    config, whole = tiny.model.config.to_dict(), families.run(tiny, tiny.inputs)
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["moe_ops.hf.optimize"], "route", without_others)
        want = families.run(tiny, tiny.inputs)
    report = moe_ops.restrict_experts(tiny.model, KEPT, removed="cpu")
    got = families.run(tiny, tiny.inputs)
    assert_close(got, want, TOL, family)
    assert numbers_of(tiny.model) == {len(KEPT)} and not torch.equal(got, whole)
    report.undo()
    assert torch.equal(families.run(tiny, tiny.inputs), whole)
    assert tiny.model.config.to_dict() == config
    moe_ops.restrict_experts(tiny.model, KEPT)
    assert torch.equal(families.run(tiny, tiny.inputs), got)
    tiny.model.save_pretrained(tmp_path)
    loaded = type(tiny.model).from_pretrained(tmp_path).eval()
    assert numbers_of(loaded) == {len(KEPT)}
    # On transformers' own code.
    assert_close(families.run(replace(tiny, model=loaded), tiny.inputs), got, TOL, "loaded")


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_family_whose_router_is_unknown_is_refused(family: str) -> None:
    tiny = families.build(family)
    state = {name: t.shape for name, t in tiny.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"cannot be restricted: no routers that moe_ops knows"):
        moe_ops.restrict_experts(tiny.model, KEPT)
    assert {name: t.shape for name, t in tiny.model.state_dict().items()} == state


def test_layers_that_share_weights_share_them_afterwards() -> None:
    tiny = families.build("diffusion_gemma")
    model: Any = tiny.model.model
    encoder, decoder = model.encoder.language_model.layers[0], model.decoder.layers[0]
    assert encoder.experts.down_proj is decoder.experts.down_proj
    name = "model.encoder.language_model.layers.0.experts"
    with pytest.raises(
        ValueError, match=r"is also model\.decoder\.layers\.0\..*; keep the same exp"
    ):
        moe_ops.restrict_experts(tiny.model, {name: KEPT})
    whole = encoder.experts.down_proj.clone()
    report = moe_ops.restrict_experts(tiny.model, KEPT, removed="cpu")
    for part in (lambda layer: layer.experts.down_proj, lambda layer: layer.router.proj.weight):
        assert part(encoder) is part(decoder) and part(encoder).shape[0] == len(KEPT)
    experts = families.experts(tiny.model).values()
    held = sum({id(t): t.nbytes for m in experts for t in m.parameters()}.values())
    assert held < report.bytes_after < 2 * held
    report.undo()
    assert encoder.experts.down_proj is decoder.experts.down_proj
    assert torch.equal(encoder.experts.down_proj, whole)


@pytest.mark.parametrize("scheme", ["int8_w8a16", "mxfp4_w4a16", "nvfp4_w4a16", "uint4:1x32"])
def test_quantized_experts_are_cut_and_saved_in_codes(scheme: str, tmp_path: Path) -> None:
    model, kept = qwen(), (1, 2, 5)
    moe_ops.quantize_model(model, scheme, progress=False)
    before, want = copy.deepcopy(model), qwen()
    moe_ops.restrict_experts(want, kept)
    moe_ops.quantize_model(want, scheme, progress=False)
    report = moe_ops.restrict_experts(model, kept, removed="cpu")
    check_same(model, want)
    assert torch.equal(logits(model), logits(want))
    model.save_pretrained(tmp_path)
    check_same(type(model).from_pretrained(tmp_path), model)
    report.undo()
    check_same(model, before)


def test_layers_may_keep_different_numbers_but_are_not_saved(tmp_path: Path) -> None:
    model, all_three = qwen(), (0, 1, 4)
    first, second = (f"model.layers.{i}.mlp.experts" for i in range(2))
    report = moe_ops.restrict_experts(model, {first: all_three, "model.layers.1.mlp": range(5)})
    assert report.kept == {first: all_three, second: (0, 1, 2, 3, 4)}
    assert logits(model).isfinite().all()
    assert model.config.num_experts == 6
    for part in (model, model.model):
        with pytest.raises(ValueError, match=r"cannot be saved .*: layers keep from 3 to 5 expert"):
            part.save_pretrained(tmp_path)
    moe_ops.restrict_experts(model, {second: all_three})
    assert model.config.num_experts == 3
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_close(logits(loaded), logits(model), TOL, "loaded")


def test_one_layer_alone_keeps_the_model_from_being_saved_until_it_is_undone(
    tmp_path: Path,
) -> None:
    model = qwen()
    want = logits(model)
    report = moe_ops.restrict_experts(model, {"model.layers.0.mlp": range(3)}, removed="cpu")
    with pytest.raises(ValueError, match="layers keep from 3 to 6 experts"):
        model.save_pretrained(tmp_path)
    report.undo()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path)), want)


def test_all_experts_are_a_restriction_that_changes_nothing() -> None:
    model = qwen()
    before = {name: t.data_ptr() for name, t in model.state_dict().items()}
    report = moe_ops.restrict_experts(model, range(6))
    assert report.bytes_before == report.bytes_after == 0
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == before


def test_generate_of_a_twin_follows() -> None:
    model = qwen()
    twin, ids = twin_of(model), torch.arange(3, 10)[None]
    with torch.inference_mode():
        check(model, twin, ids)
        moe_ops.restrict_experts(model, (0, 1, 4))
        check(model, twin, ids)


def test_the_loss_that_balances_knows_how_many_there_are() -> None:
    model, ids = qwen().requires_grad_(), torch.arange(3, 10)[None]
    moe_ops.restrict_experts(model, (0, 1, 4))
    model(ids, labels=ids, output_router_logits=True).loss.backward()
    grad = model.model.layers[0].mlp.gate.weight.grad
    assert grad.shape[0] == 3 and grad.isfinite().all()


@pytest.mark.slow
def test_a_compiled_model_runs_with_fewer_from_its_next_call_on() -> None:
    model = qwen()
    compiled, ids = moe_ops.compile(model), torch.arange(3, 10)[None]
    with torch.inference_mode():
        compiled(ids)
        moe_ops.restrict_experts(model, (0, 1, 4))
        assert_close(compiled(ids).logits, model(ids).logits, TOL, "compiled")


def adapted() -> nn.Module:
    model = qwen()
    moe_ops.add_adapter(model, 2)
    return model


def differing() -> nn.Module:
    model = qwen()
    model.model.layers[1].mlp.gate.weight = nn.Parameter(torch.zeros(7, 64))
    return model


def twin() -> nn.Module:
    return twin_of(qwen())


def held() -> nn.Module:
    return nn.Sequential(qwen())


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "adapters": (adapted, range(3), "it has adapters; merge or remove them first"),
    "another_shape": (
        differing, range(3), r"layers\.1\.mlp\.experts .*gate\.weight is of shape \[7, 64\], not w",
    ),
    "twin": (twin, range(3), "model is what moe_ops.compile returned; restrict the model that was"),
    "held": (held, range(3), "model is a Sequential, which holds a model of transformers; restric"),
    "too_few": (qwen, [0], "keeps 1 experts, and a token has top_k=2"),
    "no_layer": (qwen, {"model.layers.0": [0, 1]}, r"keep names 'model\.layers\.0', which is no l"),
    "groups": (
        lambda: built("deepseek_v3").model, range(5), "keeps 4, 1 experts of its 2 groups of 4",
    ),
    "meta": (lambda: qwen().to("meta"), range(3), "is on the meta device"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "keep", "text"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_changes_nothing(make: Callable[[], nn.Module], keep: Any, text: str) -> None:
    model = make()
    before = {name: (t.shape, t.data_ptr()) for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=text):
        moe_ops.restrict_experts(model, keep)
    after = {name: (t.shape, t.data_ptr()) for name, t in model.state_dict().items()}
    assert after == before
