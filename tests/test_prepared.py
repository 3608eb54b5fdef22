"""Weights that are stored for a backend: what it reads, and that nobody else sees a difference."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import Layout, MoELayer, experts, moe, using
from moe_ops.forward.regions import addresses
from moe_ops.graphs.addresses import identities, state_of
from moe_ops.kernels.cpu import quantized
from moe_ops.ops.activate import Activation
from moe_ops.parallel.moves import Moves, apply_moves
from moe_ops.prepared import HoldsExperts
from moe_ops.registry import advice
from moe_ops.testing import CASES, TOL, assert_close, make_layer
from moe_ops.weights import Coding, load_expert
from tests.hf import families

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
CASE = next(case for case in CASES if case.name == "plain")
SIZES = {"num_experts": CASE.E, "top_k": CASE.K, "hidden_size": CASE.D, "intermediate_size": CASE.I}
EXACT = replace(TOL["experts", torch.float32], rel=1e-6)
PAIRED = "mine.paired"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The backend that CONTRIBUTING.md shows, in a file outside of the package."""
    monkeypatch.setattr(experts, "_backends", dict(experts.backends))
    monkeypatch.setattr(experts, "_layouts", dict(experts.layouts))
    monkeypatch.setattr(experts, "_order", {})
    monkeypatch.setattr(experts, "_plans", {})
    (shown,) = re.findall(r"<!-- backend -->\n\n```python\n(.*?)```", PAGE.read_text(), re.S)
    file = tmp_path / "mine.py"
    file.write_text(shown)
    spec = importlib.util.spec_from_file_location("mine", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


@pytest.fixture
def layer(mine: ModuleType) -> MoELayer:
    return MoELayer(**SIZES, internal_gate=True).eval()


def places(module: nn.Module) -> list[int]:
    return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().flatten().view(torch.uint8).clone()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(bits(t), bits(b[n])) for n, t in a.items())


def test_the_backend_that_the_page_shows_is_picked_and_right(layer: MoELayer) -> None:
    x = torch.randn(5, CASE.D)
    with torch.inference_mode():
        want, before = layer(x), places(layer)
        report = moe_ops.prepare(layer, PAIRED)
        assert (report.layout, report.modules) == (PAIRED, ("",))
        assert report.bytes_rewritten == layer.w13_weight.nbytes + layer.w2_weight.nbytes
        assert places(layer) == before
        with using("mine", "experts"):
            assert_close(layer(x), want, EXACT, "prepared", "")
        routed = layer.route(x, layer.gate(x))
        call = experts.call(x, *routed, layer.w13_weight, layer.w2_weight, layout=PAIRED)
        assert experts.pick(call).name == "mine"
        assert moe_ops.prepare(layer, "").bytes_rewritten == report.bytes_rewritten
        assert torch.equal(layer(x), want)
        assert moe_ops.prepare(layer, "").bytes_rewritten == 0


def test_it_says_why_it_cannot_run(mine: ModuleType) -> None:
    made = make_layer(CASE)
    args = (made.x_TD, made.weights_TK, made.ids_TK, made.w13_EFD, made.w2_EDI)
    said = {
        "reads weights prepared as 'mine.paired', got weights as they are loaded; "
        "moe_ops.prepare(model, 'mine.paired') stores them so": {},
        "computes silu alone, got 'gelu'": {"layout": PAIRED, "kind": "gelu"},
        "does not read limit=7.0": {"layout": PAIRED, "limit": 7.0},
        "does not read b2_ED": {"layout": PAIRED, "b2_ED": torch.zeros(made.w2_EDI.shape[:2])},
    }
    for reason, more in said.items():
        found = experts.refusals(*args, **more)
        assert found["mine"] == reason
        others = {found[name] for name in ("aten", "cpu")}
        assert ("does not read layout='mine.paired'" in others) == ("layout" in more)
    with pytest.raises(
        ValueError, match=r"layout='paired' is unknown; .* registered .*mine\.paired"
    ):
        experts(*args, layout="paired")


def test_the_definition_restores_a_copy(mine: ModuleType) -> None:
    made = make_layer(CASE)
    first = (made.x_TD, made.weights_TK, made.ids_TK)
    prepared = mine.PAIRED.prepare({"w13_EFD": made.w13_EFD})["w13_EFD"]
    want = experts(*first, made.w13_EFD, made.w2_EDI)
    for way in ("reference", "mine"):
        with using(way, "experts"):
            got = experts(*first, prepared, made.w2_EDI, layout=PAIRED)
        assert_close(got, want, EXACT, way, "")
    with using("reference"):
        routed = moe(made.x_TD, made.logits_TE, prepared, made.w2_EDI, CASE.K, layout=PAIRED)
        assert_close(routed, moe(made.x_TD, made.logits_TE, made.w13_EFD, made.w2_EDI, CASE.K),
                     EXACT, "moe", "")  # fmt: skip


@pytest.mark.slow
def test_a_compiled_layer_runs_it_and_explains_it(layer: MoELayer) -> None:
    torch._dynamo.reset()
    x = torch.randn(5, CASE.D)
    fast = moe_ops.compile(layer)
    with torch.inference_mode():
        want = layer(x)
        assert_close(fast(x), want, EXACT, "as loaded", "")
        moe_ops.prepare(layer, PAIRED)
        assert_close(fast(x), want, EXACT, "prepared after compiling", "")
        told = str(moe_ops.explain(layer, (x,)))
    assert "mine" in told and "does not read layout='mine.paired'" in told


@pytest.mark.slow
def test_a_compiled_twin_shares_the_layout(layer: MoELayer) -> None:
    torch._dynamo.reset()
    x, fast = torch.randn(5, CASE.D), moe_ops.compile(layer)
    with torch.inference_mode():
        want = layer(x)
        for one in (layer, fast):
            for layout in (PAIRED, ""):
                moe_ops.prepare(one, layout)
                assert fast.layout == layer.layout == layout
                assert_close(fast(x), want, EXACT, "the twin", "")
                assert_close(layer(x), want, EXACT, "the layer", "")


def test_a_captured_function_is_captured_again(layer: MoELayer) -> None:
    """The key of a graph tells the layouts of the modules that it reads."""
    before, where = identities(state_of(layer)), addresses(layer)
    moe_ops.prepare(layer, PAIRED)
    assert identities(state_of(layer)) != before and addresses(layer) != where
    moe_ops.prepare(layer, "")
    assert identities(state_of(layer)) == before and addresses(layer) == where


def test_a_state_dict_is_that_of_weights_as_loaded(layer: MoELayer) -> None:
    before = copy.deepcopy(layer.state_dict())
    moe_ops.prepare(layer, PAIRED)
    stored, where = bits(layer.w13_weight), places(layer)
    for keep_vars in (False, True):
        assert same(layer.state_dict(keep_vars=keep_vars), before)
    assert torch.equal(bits(layer.w13_weight), stored), "saving changes nothing"
    other = MoELayer(**SIZES, internal_gate=True)
    want = other(x := torch.randn(3, CASE.D))
    layer.load_state_dict(other.state_dict())
    assert same(layer.state_dict(), other.state_dict())
    assert places(layer) == where and layer.layout == PAIRED
    with using("mine", "experts"), torch.inference_mode():
        assert_close(layer(x), want.detach(), EXACT, "loaded", "")
    with pytest.raises(RuntimeError, match=r"is prepared as 'mine.paired', and preparing what"):
        layer.load_state_dict(other.state_dict(), assign=True)


def test_copies_and_pickles_are_prepared_as_well(layer: MoELayer) -> None:
    want = copy.deepcopy(layer.state_dict())
    moe_ops.prepare(layer, PAIRED)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.layout == PAIRED and same(twin.state_dict(), want)
        twin.prepare_weights("")
        assert layer.layout == PAIRED and torch.equal(
            bits(twin.w13_weight), bits(want["w13_weight"])
        )


def test_experts_move_as_they_are_stored(layer: MoELayer) -> None:
    moves = Moves(CASE.E, ((0, 3), (3, 0), (1, 2)))
    moved = copy.deepcopy(layer)
    apply_moves(moved.expert_tensors(), moves)
    moe_ops.prepare(layer, PAIRED)
    where = places(layer)
    apply_moves(layer.expert_tensors(), moves)
    assert places(layer) == where and same(layer.state_dict(), moved.state_dict())


def test_fewer_experts_are_stored_as_all_were(layer: MoELayer) -> None:
    as_loaded, x = copy.deepcopy(layer), torch.randn(5, CASE.D)
    moe_ops.prepare(layer, PAIRED)
    report = moe_ops.restrict_experts(layer, range(1, 4), removed="cpu")
    moe_ops.restrict_experts(as_loaded, range(1, 4))
    assert layer.layout == PAIRED and same(layer.state_dict(), as_loaded.state_dict())
    assert_close(layer(x).detach(), as_loaded(x), EXACT, "stored for a backend")
    report.undo()
    assert layer.layout == PAIRED and layer.w13_weight.shape[0] == CASE.E


def test_loading_an_expert_wants_weights_as_loaded(layer: MoELayer) -> None:
    moe_ops.prepare(layer, PAIRED)
    tensor = torch.randn(CASE.I, CASE.D)
    args = (layer, "w13_weight", tensor, "gate", "w1", 2)
    with pytest.raises(ValueError, match=r"prepared as 'mine.paired'; load inside `with layer.as_"):
        load_expert(*args, coding=Coding(name="plain"))
    where = places(layer)
    with layer.as_loaded():
        load_expert(*args)
    assert places(layer) == where and layer.layout == PAIRED
    assert torch.equal(layer.state_dict()["w13_weight"][2, : CASE.I], tensor)


@pytest.mark.parametrize("scheme", ["int8_w8a16", "fp8_w8a8"])
def test_a_quantized_model_is_prepared(
    mine: ModuleType, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the definition runs before and after: bits are compared.
    monkeypatch.setattr(quantized, "unavailable", lambda element, inputs: "no compiler")
    tiny = families.build("qwen3_moe")
    model = tiny.model.eval()
    ids = families.inputs_for(tiny, 2, 5, 0)
    moe_ops.quantize_model(model, scheme, progress=False)
    with torch.inference_mode():
        want, before = model(**ids).logits, copy.deepcopy(model.state_dict())
        report = moe_ops.prepare(model, PAIRED)
        assert len(report.modules) > 1
        changed = [n for n, t in model.named_parameters() if n.endswith("gate_up_proj_codes")]
        stored = dict(model.named_parameters())
        assert changed and not any(torch.equal(bits(stored[n]), bits(before[n])) for n in changed)
        assert same(model.state_dict(), before)
        with pytest.raises(NotImplementedError, match="mine: does not read w_format"):  # noqa: SIM117
            with using("mine", "experts"):
                model(**ids)
        assert torch.equal(model(**ids).logits, want), "the definition restores a copy"
    twin = copy.deepcopy(model)
    assert same(twin.state_dict(), before)
    moe_ops.prepare(model, "")
    assert same(dict(model.named_parameters()), {n: before[n] for n in stored})


def broken(**more: Any) -> Layout:
    given = {"prepare": lambda t: {}, "restore": lambda t: {}, **more}
    return Layout(name="broken", **given)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            broken(prepare=lambda t: {"w13_EFD": t["w13_EFD"].flip(1)}),
            "is not undone by its restore: w13_EFD of the first expert",
        ),
        (
            broken(prepare=lambda t: {"w13_EFD": t["w13_EFD"].half()}),
            r"makes w13_EFD torch.float16 \[1, 64, 64\] of torch.float32 \[1, 64, 64\]; it may",
        ),
        (broken(prepare=lambda t: {"w3": t["w2_EDI"]}), "makes w3 .* of no such tensor"),
    ],
    ids=["not undone", "another dtype", "another tensor"],
)
def test_a_layout_that_is_none_changes_nothing(layer: MoELayer, layout: Layout, said: str) -> None:
    experts.layouts["broken"] = layout
    both = nn.ModuleList([copy.deepcopy(layer), layer])
    before = [bits(p) for p in both.parameters()]
    with pytest.raises(ValueError, match=f"the layout 'broken' {said}"):
        moe_ops.prepare(both, "broken")
    assert all(torch.equal(bits(p), was) for p, was in zip(both.parameters(), before, strict=True))
    assert {m.layout for m in both.modules() if isinstance(m, HoldsExperts)} == {""}


def test_a_layout_that_fits_some_modules_leaves_all_as_they_were(layer: MoELayer) -> None:
    """The second module has an odd number of rows."""

    def half(t: Any) -> Any:
        return {"w2_EDI": t["w2_EDI"].unflatten(1, (2, -1)).flip(1).flatten(1, 2)}

    experts.layouts["halves"] = Layout(name="halves", prepare=half, restore=half)
    both = nn.ModuleList([layer, MoELayer(**{**SIZES, "hidden_size": 33}).eval()])
    before = [bits(p) for p in both.parameters()]
    with pytest.raises(RuntimeError, match="unflatten"):
        moe_ops.prepare(both, "halves")
    assert all(torch.equal(bits(p), was) for p, was in zip(both.parameters(), before, strict=True))
    assert {m.layout for m in both.modules() if isinstance(m, HoldsExperts)} == {""}


def test_what_cannot_be_prepared_is_refused(layer: MoELayer) -> None:
    with pytest.raises(ValueError, match=r"layout='mine.pared' is unknown.*did you mean 'mine.pai"):
        moe_ops.prepare(layer, "mine.pared")
    with pytest.raises(
        ValueError, match=r"'mine' is a backend; it reads weights in 'mine\.paired'"
    ):
        moe_ops.prepare(layer, "mine")
    with pytest.raises(ValueError, match=r"layout='aten' is unknown"):  # which reads any weights
        moe_ops.prepare(layer, "aten")
    with pytest.raises(TypeError, match="model must be a module"):
        moe_ops.prepare({}, PAIRED)
    with pytest.raises(ValueError, match="Linear has no experts that can be prepared: they are in"):
        moe_ops.prepare(nn.Linear(2, 2), PAIRED)
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has no experts"):
        moe_ops.prepare(families.build("qwen3_moe").model, PAIRED)


def test_a_layout_has_one_meaning(mine: ModuleType) -> None:
    other = Layout(name=PAIRED, prepare=mine.PAIRED.prepare, restore=mine.PAIRED.restore)
    with pytest.raises(ValueError, match=r"another layout of moe_ops.experts is 'mine.paired'"):
        experts.backend("second", layout=other)(mine.run)
    experts.backend("third", layout=mine.PAIRED)(mine.run)
    with pytest.raises(ValueError, match="backend 'x' reads layout, but the arguments with"):
        moe_ops.route.backend("x", layout=mine.PAIRED)(mine.run)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"name": ""}, ValueError, "needs a name that is not empty"),
        ({"name": 3}, TypeError, "name must be a str, got an int: 3"),
        ({"restore": None}, TypeError, "restore must be a function of tensors by name, got None"),
    ],
)
def test_a_layout_is_checked_when_it_is_made(
    more: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        replace(broken(), **more)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "moe_ops.prepare(model" in r.message]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    advice._told.cache_clear()
    with caplog.at_level("INFO", logger="moe_ops"):
        yield caplog
    advice._told.cache_clear()


SAID = (
    "moe_ops.experts runs by cpu; the faster mine would run it if its weights were prepared, once "
    "after loading, by moe_ops.prepare(model, 'mine.paired')"
)


@torch.no_grad()
def test_one_line_says_which_call_prepares_weights(
    layer: MoELayer, log: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(3, CASE.D)
    layer(x)
    assert lines(log) == [SAID]
    layer(x)
    MoELayer(**SIZES, internal_gate=True)(x)
    assert len(lines(log)) == 1, "once"
    assert [r.levelname for r in log.records if r.message == SAID] == ["INFO"]
    advice._told.cache_clear()
    moe_ops.explain(layer, (x,))
    assert lines(log) == [SAID] * 2, "where a graph is planned, too"


def test_nothing_is_said_where_preparing_would_change_nothing(
    layer: MoELayer, log: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(3, CASE.D)
    layer(x)  # whose gradients may be wanted
    with torch.no_grad():
        gelu = Activation(kind="gelu")
        MoELayer(**SIZES, internal_gate=True, activation=gelu)(x)
        with using("aten", "experts"):
            layer(x)
        layer.double()(x.double())
        layer.float()
        moe_ops.prepare(layer, PAIRED)
        layer(x)
    assert lines(log) == []


@pytest.mark.parametrize("emulates", [True, False])
@torch.no_grad()
def test_one_asked_later_is_named_where_the_other_emulates(
    emulates: bool, layer: MoELayer, log: pytest.LogCaptureFixture
) -> None:
    experts._put(replace(experts.backends["mine"], priority=-1))
    experts.emulates("cpu", lambda call: emulates)
    layer(torch.randn(3, CASE.D))
    assert lines(log) == [SAID] * emulates
