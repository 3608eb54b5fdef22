"""Calls of few tokens to one backend and the rest to another: b12x with CUTLASS, and any two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import MoELayer, QuantConfig, experts, flashinfer_options, tune, using
from moe_ops.backends.flashinfer import b12x
from moe_ops.backends.flashinfer.fits import READS
from moe_ops.backends.flashinfer.stored import UP_GATE
from moe_ops.layer.operands import operands_of
from moe_ops.ops.experts import ExpertsCall, restored
from moe_ops.parallel.moves import Moves, apply_moves
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.planning import tuned
from moe_ops.planning.layers import Shape
from tests.flashinfer.layers import CASE, call_of, error_of, run, stored, wanted, weights_of
from tests.flashinfer.signatures import NEWEST
from tests.layer.shards import randomize
from tests.passes.planned import Hook, any_rows, plans
from tests.passes.planned import call_of as compiled_call

B12X, CUTLASS = "flashinfer_b12x", "flashinfer_cutlass"
SWAP = Moves(4, ((0, 2), (2, 0), (1, 3), (3, 1)))
N = 32
AROUND = {N - 1: B12X, N: CUTLASS, N + 1: CUTLASS}
On = Callable[[int, int], None]
# Of results of the same backend, and of one against the other: in norms, and as a cosine.
SAME, ACROSS = (0.02, 0.9998), (0.05, 0.999)
FEW: dict[str, Any] = {"tokens": (4, 64), "routings": ("uniform",), "progress": None}


@pytest.fixture
def later(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A FlashInfer whose wrapper hands long prompts to CUTLASS itself."""
    from flashinfer.fused_moe import b12x

    monkeypatch.setattr(fake.fused_moe, "B12xMoEWrapper", b12x.LaterB12xMoEWrapper)
    return fake


def prepared(tokens: int, **more: Any) -> ExpertsCall:
    return stored(call_of("nvfp4", tokens=tokens, **more), UP_GATE.name)


def first(call: ExpertsCall, tokens: int) -> ExpertsCall:
    """Some tokens of a layer, its weights at the same places."""
    t = tokens
    return replace(call, x_TD=call.x_TD[:t], weights_TK=call.weights_TK[:t], ids_TK=call.ids_TK[:t])


def near(got: Tensor, want: Tensor, limits: tuple[float, float]) -> None:
    cosine = torch.cosine_similarity(got.flatten().double(), want.flatten().double(), dim=0)
    assert error_of(got, want) < limits[0]
    assert float(cosine) > limits[1]


def picked(call: ExpertsCall) -> Tensor:
    out: Tensor = experts.pick(call).run(call)
    return out


def names(fake: ModuleType) -> list[str]:
    """What was run, and how, in order."""
    ran = ("B12xMoEWrapper.run", "prefill", "cutlass_fused_moe")
    found = [name for name, _ in fake.calls if name in ran]
    fake.calls.clear()
    return found


def test_without_a_threshold_all_is_b12x(fake: ModuleType, on: On) -> None:
    on(12, 0)
    for tokens in AROUND:
        call = prepared(tokens)
        assert experts.pick(call).name == B12X
        want = run(B12X, call)
        with flashinfer_options():
            assert torch.equal(picked(call), want)


def test_calls_around_the_threshold(fake: ModuleType, on: On) -> None:
    on(12, 0)
    with flashinfer_options(b12x_prefill_threshold=N):
        for tokens, name in AROUND.items():
            call = prepared(tokens)
            assert experts.pick(call).name == name
            got = picked(call)
            other = CUTLASS if name == B12X else B12X
            near(got, run(name, call), SAME)
            near(got, run(other, call), ACROSS)
            assert error_of(got, wanted(call)) < 0.06


def test_a_plan_has_two_ranges(fake: ModuleType, on: On) -> None:
    """In graphs of any number of tokens, and only where tokens may be so many."""
    on(12, 0)
    call = prepared(N - 1)
    for tokens, dynamic, plan in (
        (N - 1, True, f"{N - 1}:{B12X},:{CUTLASS}"),
        (N - 1, False, B12X),
        (N, False, CUTLASS),
    ):
        call = prepared(tokens)
        hook = Hook(pick_backend)
        compiled, tensors = compiled_call(experts, experts.arguments.flat(call), hook)
        if dynamic:
            any_rows(tensors[:3])
        with flashinfer_options(b12x_prefill_threshold=N):
            compiled(*tensors)
        assert plans(compiled.graphs[0]) == [f"experts {plan}"]
    for tokens, name in AROUND.items():
        call = prepared(tokens)
        got = experts.planned(*experts.arguments.flat(call), plan=f"{N - 1}:{B12X},:{CUTLASS}")
        assert torch.equal(got, run(name, call))


class Prepared(nn.Module):
    """A model of one layer."""

    def __init__(self, call: ExpertsCall) -> None:
        super().__init__()
        self.rest = experts.arguments.flat(call)[1:]

    def forward(self, x_TD: Tensor) -> Tensor:
        out: Tensor = experts(x_TD, *self.rest)
        return out


def test_a_plan_goes_by_what_tune_measured(fake: ModuleType, on: On, tmp_path: Path) -> None:
    """Of both backends that read the layout, whatever the option says."""
    on(12, 0)
    call = prepared(8)
    path = tune(Prepared(call), tmp_path / "real.json", inputs=(call.x_TD,), **FEW)
    (layer, cells), *more = tuned.read(path).items()
    assert not more and (layer.w_format, layer.layout) == ("nvfp4", UP_GATE.name)
    assert {(c.tokens, c.backend) for c in cells} == {
        (n, b) for n in (4, 64) for b in (B12X, CUTLASS)
    }
    us = {(4, B12X): 1.0, (4, CUTLASS): 2.0, (64, B12X): 4.0, (64, CUTLASS): 3.0}
    table = tmp_path / "t.json"
    tuned.write(table, {layer: {cell: us[cell.tokens, cell.backend] for cell in cells}})
    hook = Hook(pick_backend, tuned=str(table))
    compiled, tensors = compiled_call(experts, experts.arguments.flat(call), hook)
    any_rows(tensors[:3])
    with flashinfer_options(b12x_prefill_threshold=N // 4):
        compiled(*tensors)
    assert plans(compiled.graphs[0]) == [f"experts 34:{B12X},:{CUTLASS}"]


def test_a_made_up_layer_is_tuned_in_a_layout(fake: ModuleType, on: On, tmp_path: Path) -> None:
    on(9, 0)
    shape = Shape(E=CASE.E, K=CASE.K, D=CASE.D, I=CASE.I, layout=UP_GATE.name)
    path = tune([shape, replace(shape, layout="")], tmp_path / "t.json", **FEW)
    by_layout = {
        layer.layout: {c.backend for c in cells} for layer, cells in tuned.read(path).items()
    }
    assert by_layout[UP_GATE.name] == {CUTLASS}
    assert CUTLASS not in by_layout[""] and by_layout[""]
    with pytest.raises(ValueError, match=r"layout='up' is unknown; choose one of flashinfer\.up_g"):
        replace(shape, layout="up")


def test_an_old_flashinfer(fake: ModuleType, on: On) -> None:
    """Nothing is said without a threshold; ours needs nothing; the other way says what it needs."""
    on(12, 0)
    run(B12X, prepared(4))
    with flashinfer_options(b12x_prefill_threshold=N):
        run(B12X, prepared(4))
        run(CUTLASS, prepared(N))
    with (
        flashinfer_options(b12x_prefill_threshold=N, upstream_prefill=True),
        pytest.raises(
            RuntimeError,
            match=rf"b12x_prefill_threshold={N} .* cutlass_prefill_threshold .*{NEWEST}",
        ),
    ):
        run(B12X, prepared(4))


def test_the_wrappers_own_threshold(later: ModuleType, on: On) -> None:
    """It is registered once, with the scales of CUTLASS, and decides for every number of tokens."""
    on(12, 0)
    run(B12X, prepared(N))
    assert names(later) == ["B12xMoEWrapper.run"]
    whole = prepared(N + 1)
    parts = [first(whole, tokens) for tokens in AROUND]
    with flashinfer_options(b12x_prefill_threshold=N, upstream_prefill=True, max_tokens=64):
        for call in parts:
            assert experts.pick(call).name == B12X
            near(picked(call), run(CUTLASS, call), ACROSS)
        made = [given for name, given in later.calls if name == "register_cutlass_prefill_weights"]
        assert len(made) == 1 and len(made[0]["quant_scales"]) == 6
        ran = [n for n in names(later) if n != "cutlass_fused_moe"]
        assert ran == ["B12xMoEWrapper.run", "prefill", "prefill"]


@pytest.mark.parametrize("upstream", [False, True], ids=["ours", "upstream"])
def test_moved_experts_keep_both_ways_right(later: ModuleType, on: On, upstream: bool) -> None:
    """In place, at the addresses that a wrapper holds, as if they had been loaded so."""
    on(12, 0)
    order = [2, 3, 0, 1]
    long = prepared(N)
    factors = {n: getattr(long, n) for n in ("global_scale13_E", "global_scale2_E")}
    held = {**weights_of(long), **factors}
    short = first(long, 4)
    with flashinfer_options(b12x_prefill_threshold=N, upstream_prefill=upstream, max_tokens=N):
        before = [picked(call) for call in (short, long)]
        apply_moves(held, SWAP)
        for call, was in zip((short, long), before, strict=True):
            assert error_of(picked(call), was) > 0.2, "experts moved, ids did not"
            fresh = replace(call, **{n: t.clone() for n, t in held.items()})
            assert torch.equal(picked(call), picked(fresh))
            there = torch.tensor(order, dtype=torch.int32)[call.ids_TK]
            assert torch.equal(picked(replace(call, ids_TK=there)), was)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows whenever factors of scales are written."""
    found, write = [], b12x.Scales.write

    def counted(*args: Any) -> None:
        found.append(1)
        write(*args)

    monkeypatch.setattr(b12x.Scales, "write", counted)
    return found


def live(call: ExpertsCall) -> dict[str, Tensor]:
    """What moves with experts: weights, scales of blocks and global ones."""
    factors = {n: getattr(call, n) for n in ("global_scale13_E", "global_scale2_E")}
    return {**weights_of(call), **factors}


def test_factors_are_made_once_after_a_move(fake: ModuleType, on: On, writes: list[int]) -> None:
    """Not in every call; after other writes in the next one."""
    on(12, 0)
    call = prepared(4)
    for _ in range(3):
        run(B12X, call)
    assert len(writes) == 1
    apply_moves(live(call), SWAP)
    assert len(writes) == 2, "by the move, as graphs run nothing of the host"
    for _ in range(2):
        run(B12X, call)
    assert len(writes) == 2
    assert call.x_scale is not None and call.global_scale13_E is not None
    call.x_scale.mul_(2)
    call.global_scale13_E.mul_(2)
    assert error_of(run(B12X, call), wanted(restored(call))) < 0.08
    assert len(writes) == 3


@pytest.mark.parametrize("upstream", [False, True], ids=["ours", "upstream"])
def test_a_replay_after_a_move_reads_the_moved_factors(
    later: ModuleType, on: On, monkeypatch: pytest.MonkeyPatch, upstream: bool
) -> None:
    """A replay is what a capture ran, on the tensors that it was given: here called once more."""
    on(12, 0)
    given: dict[int, tuple[Any, dict[str, Tensor]]] = {}
    run_wrapper = later.fused_moe.B12xMoEWrapper.run

    @functools.wraps(run_wrapper)
    def captured(wrapper: Any, *args: Any, **named: Any) -> Tensor:
        given[len(named["x"])] = wrapper, named
        out: Tensor = run_wrapper(wrapper, *args, **named)
        return out

    monkeypatch.setattr(later.fused_moe.B12xMoEWrapper, "run", captured)
    long = prepared(N)
    short = first(long, 4)
    with flashinfer_options(b12x_prefill_threshold=N, upstream_prefill=upstream, max_tokens=N):
        for call in (short, long)[: 1 + upstream]:
            for _ in range(2):
                run(B12X, call)
        held = {tokens: (w, dict(named)) for tokens, (w, named) in given.items()}
        (wrapper,) = {w for w, _ in held.values()}
        folded = wrapper._folded_w1_alpha
        apply_moves(live(long), SWAP)
        assert wrapper._folded_w1_alpha is folded, "at the address that a graph reads"
        for call in (short, long)[: 1 + upstream]:
            tokens = len(call.x_TD)
            replayed = run_wrapper(held[tokens][0], **held[tokens][1])
            assert wrapper._folded_w1_alpha is folded
            fresh = replace(call, **{n: t.clone() for n, t in live(call).items()})
            assert torch.equal(replayed, run(B12X, fresh))


NVFP4 = QuantConfig(weights="nvfp4", inputs="nvfp4", static_inputs=True)
SIZES: dict[str, Any] = {
    "num_experts": 4, "top_k": 2, "hidden_size": 256, "intermediate_size": 128,
    "dtype": torch.bfloat16, "quant": NVFP4,
}  # fmt: skip


def test_a_layer_hands_over_factors_at_one_address(
    fake: ModuleType, on: On, writes: list[int]
) -> None:
    """Which moves and loads of its tensors make anew, and with them what the backend made."""
    on(12, 0)
    layer, fresh = randomize(MoELayer(**SIZES)), MoELayer(**SIZES)
    moe_ops.prepare(layer, UP_GATE.name)
    x, logits = torch.randn(6, 256).bfloat16(), torch.randn(6, 4)
    with torch.no_grad(), using(B12X, experts):
        for _ in range(3):
            layer(x, logits)
        places = {operands_of(layer).options()["global_scale13_E"].data_ptr() for _ in range(2)}
        assert len(places) == 1 and len(writes) == 1
        apply_moves(layer.expert_tensors(), SWAP)
        made = len(writes)
        assert made > 1
        fresh.load_state_dict(layer.state_dict())
        moe_ops.prepare(fresh, UP_GATE.name)
        assert torch.equal(layer(x, logits), fresh(x, logits))
        state = {n: t * 2 if "global" in n else t for n, t in layer.state_dict().items()}
        layer.load_state_dict(state)
        fresh.load_state_dict(state)
        assert torch.equal(layer(x, logits), fresh(x, logits))
        assert operands_of(layer).options()["global_scale13_E"].data_ptr() in places
    plain = randomize(MoELayer(**SIZES))
    options = [operands_of(plain).options()["global_scale2_E"] for _ in range(2)]
    assert options[0].data_ptr() != options[1].data_ptr(), "weights as they are loaded keep none"


def test_any_two_backends_that_want_other_scales(
    fake: ModuleType, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same codes one wants factors of another convention, made of the live ones."""
    on(10, 0)
    doubled: list[Tensor] = []

    def few(call: ExpertsCall) -> Tensor:
        out: Tensor = experts.body(call)
        return out

    def many(call: ExpertsCall) -> Tensor:
        assert call.global_scale13_E is not None
        doubled.append(call.global_scale13_E * 2)
        out: Tensor = experts.body(replace(call, global_scale13_E=doubled[-1] / 2))
        return out

    for function in (few, many):
        given = {"reads": READS, "layout": UP_GATE, "priority": -9}
        experts.backend(function.__name__, **given)(function)
    hook = Hook(pick_backend, thresholds=((N - 1, "few"), (None, "many")))
    compiled, _ = compiled_call(experts, experts.arguments.flat(prepared(N - 1)), hook)
    for tokens in AROUND:
        call = prepared(tokens)
        args = [t for t in experts.arguments.flat(call) if isinstance(t, Tensor)]
        any_rows(args[:3])
        near(compiled(*args), wanted(call), SAME)
        assert len(doubled) == (tokens >= N)
        doubled.clear()
    assert [plans(graph) for graph in compiled.graphs] == [[f"experts {N - 1}:few,:many"]]
