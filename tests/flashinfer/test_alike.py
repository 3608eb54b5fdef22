"""Calls of CUTLASS like one before go straight to FlashInfer's function, with what is theirs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import Parameter, Signature
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from moe_ops import experts, flashinfer_options, using
from moe_ops.backends.flashinfer import cutlass, kept
from moe_ops.ops.experts import ExpertsCall
from tests.flashinfer.layers import call_of, check, stored, wanted, weights_of

UP_GATE, CUTLASS = "flashinfer.up_gate", "flashinfer_cutlass"
On = Callable[[int, int], None]


@pytest.fixture
def hopper(fake: ModuleType, on: On) -> ModuleType:
    on(9, 0)
    return fake


def given(call: ExpertsCall) -> tuple[Any, ...]:
    return experts.arguments.flat(call)


def made(formats: str = "bfloat16", **more: Any) -> tuple[ExpertsCall, ExpertsCall]:
    """A call as weights are loaded, and as CUTLASS reads them, with nothing to convert."""
    loaded = call_of(formats, **more)
    loaded = replace(loaded, weights_TK=loaded.weights_TK.float(), ids_TK=loaded.ids_TK.int())
    return loaded, stored(loaded, UP_GATE)


def bound(call: ExpertsCall) -> bool:
    """Whether a call like this one goes straight to the function."""
    args = given(call)
    alike = experts.memo.find(tuple(map(type, args)))
    found = None if alike is None else alike.find(args)
    return found is not None and found.direct is not None


def run(call: ExpertsCall) -> Tensor:
    out: Tensor = experts(*given(call))
    return out


def mapped(call: ExpertsCall, offset: int | None) -> ExpertsCall:
    """Half of the experts, of which the rest lies elsewhere."""
    parts = {n: t[:2].contiguous() for n, t in weights_of(call).items()}
    slots = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    return replace(call, expert_map=slots, expert_offset=offset, **parts)


BIASES = {"b13_EF": torch.randn(4, 256).bfloat16(), "b2_ED": torch.randn(4, 256).bfloat16()}
STRAIGHT: dict[str, Callable[[], ExpertsCall]] = {
    "plain": lambda: call_of("bfloat16"),
    "biases": lambda: call_of("bfloat16", **BIASES),
    "ungated": lambda: call_of("bfloat16", gated=False),
    "offset": lambda: mapped(call_of("bfloat16"), 2),
}
BY_RUN: dict[str, Callable[[], ExpertsCall]] = {
    "map": lambda: mapped(call_of("bfloat16"), None),
    "long_ids": lambda: replace(made()[0], ids_TK=made()[0].ids_TK.long()),
    "weights_of_16_bits": lambda: replace(made()[0], weights_TK=made()[0].weights_TK.bfloat16()),
    "no_tokens": lambda: call_of("bfloat16", tokens=0),
    "blocks": lambda: call_of("blocks"),
}


def plain(call: ExpertsCall) -> ExpertsCall:
    return replace(call, weights_TK=call.weights_TK.float(), ids_TK=call.ids_TK.int())


@pytest.mark.parametrize(
    ("make", "straight"),
    [(lambda f=f: plain(f()), True) for f in STRAIGHT.values()]
    + [(f, False) for f in BY_RUN.values()],
    ids=[*STRAIGHT, *BY_RUN],
)
def test_calls_alike_give_the_same(
    hopper: ModuleType, make: Callable[[], ExpertsCall], straight: bool
) -> None:
    loaded = make()
    call, formats = stored(loaded, UP_GATE), "blocks" if loaded.w_format else "bfloat16"
    assert experts.pick(call).name == CUTLASS
    hopper.calls.clear()
    outs = [run(call) for _ in range(4)]
    assert bound(call) == straight
    for out in outs:
        assert torch.equal(out, outs[0])
    if call.x_TD.shape[0]:
        check(CUTLASS, formats, outs[-1], wanted(loaded))
    described = [
        {n: (v.shape, v.dtype) if isinstance(v, Tensor) else str(v) for n, v in said.items()}
        for name, said in hopper.calls
        if name == "cutlass_fused_moe"
    ]
    assert all(said == described[0] for said in described)
    assert len(described) == (4 if call.x_TD.shape[0] else 0)


def test_calls_alike_pass_by_what_is_the_same_for_them(
    hopper: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, call = made()
    for _ in range(2):
        run(call)
    monkeypatch.setattr(cutlass.package.module("flashinfer.fused_moe"), "cutlass_fused_moe", None)
    check(CUTLASS, "bfloat16", run(call), wanted(loaded))


OTHERS: dict[str, tuple[str, ...] | None] = {
    "no_function": None,
    "another_order": (*cutlass.FIRST[1::-1], *cutlass.FIRST[2:], *cutlass.NAMED),
    "fewer_names": cutlass.FIRST,
}


def test_calls_that_flashinfer_logs_go_on_to_be_seen(
    hopper: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutlass.package.module("flashinfer.api_logging"), "_API_LOG_LEVEL", 1)
    loaded, call = made()
    for _ in range(4):
        check(CUTLASS, "bfloat16", run(call), wanted(loaded))
    assert not bound(call)


@pytest.mark.parametrize("names", OTHERS.values(), ids=OTHERS)
def test_another_function_behind_is_left_alone(
    hopper: ModuleType, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] | None
) -> None:
    """Calls alike are right all the same, by the function that is documented."""

    def other(*args: Any, **named: Any) -> None:
        pytest.fail("was called")

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names or ()]
    monkeypatch.setattr(other, "__signature__", Signature(parameters), raising=False)
    found = SimpleNamespace() if names is None else SimpleNamespace(cutlass_fused_moe=other)
    core = cutlass.package.module("flashinfer.fused_moe.core")
    monkeypatch.setattr(core, "get_cutlass_fused_moe_module", lambda architecture: found)
    loaded, call = made()
    for _ in range(4):
        check(CUTLASS, "bfloat16", run(call), wanted(loaded))
    assert not bound(call)


def test_tokens_and_weights_of_the_call_are_taken(hopper: ModuleType) -> None:
    loaded, call = made()
    for _ in range(2):
        run(call)
    assert bound(call)
    other, prepared = made()
    other = replace(other, x_TD=other.x_TD.flip(0), ids_TK=other.ids_TK.flip(0))
    changed = {n: t * 0.5 for n, t in weights_of(prepared).items()}
    halved = {n: t * 0.5 for n, t in weights_of(other).items()}
    mine = replace(prepared, x_TD=other.x_TD, ids_TK=other.ids_TK, **changed)
    check(CUTLASS, "bfloat16", run(mine), wanted(replace(other, **halved)))
    with torch.no_grad():
        call.w2_EDI.mul_(2)
        loaded.w2_EDI.mul_(2)
    check(CUTLASS, "bfloat16", run(call), wanted(loaded))


def test_memory_is_of_the_call_alone(hopper: ModuleType) -> None:
    _, call = made()
    for _ in range(2):
        run(call)
    hopper.calls.clear()
    outs = [run(call) for _ in range(2)]
    spaces = [
        said["workspace_buffer"] for name, said in hopper.calls if name == "cutlass_fused_moe"
    ]
    assert len({t.data_ptr() for t in (*outs, *spaces)}) == 4
    with torch.inference_mode():
        assert run(call).is_inference() and run(call).is_inference()
    assert not run(call).is_inference() and not run(call).requires_grad


OPTIONS: dict[str, dict[str, Any]] = {
    "other_bits": {"other_bits": True}, "max_tokens": {"max_tokens": 4096},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_are_seen(hopper: ModuleType, options: dict[str, Any]) -> None:
    _, call = made()

    def said() -> tuple[bool, int]:
        hopper.calls.clear()
        run(call)
        found = hopper.calls[-1][1]
        return found["use_fused_finalize"], found["workspace_buffer"].numel()

    without = said()
    for _ in range(2):
        assert said() == without
    with flashinfer_options(**options):
        within = said()
        assert within != without and said() == within
    with flashinfer_options(**options):
        assert said() == within
    assert said() == without


def test_autotune_is_seen(hopper: ModuleType) -> None:
    _, call = made()
    for _ in range(2):
        run(call)
    hopper.calls.clear()
    with flashinfer_options(autotune=True):
        run(call)
        run(call)
    assert [name for name, _ in hopper.calls].count("autotune") == 1


def moved(t: Tensor) -> Tensor:
    """The same values, which begin between two words of memory."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


def test_tokens_that_begin_between_words_are_copied(hopper: ModuleType) -> None:
    """Also after a call that is the same but for that; ids and their weights are read singly."""
    loaded, call = made()
    for _ in range(2):
        run(call)
    assert bound(call)
    between = replace(call, x_TD=moved(call.x_TD))
    for _ in range(3):
        check(CUTLASS, "bfloat16", run(between), wanted(loaded))
        assert not bound(between)
    routed = replace(call, ids_TK=moved(call.ids_TK), weights_TK=moved(call.weights_TK))
    for _ in range(3):
        check(CUTLASS, "bfloat16", run(routed), wanted(loaded))
    assert bound(routed) and bound(call)


def test_weights_that_begin_between_words_are_refused_after_those_that_do_not(
    hopper: ModuleType,
) -> None:
    _, call = made()
    for _ in range(2):
        run(call)
    between = replace(call, w2_EDI=moved(call.w2_EDI))
    hopper.calls.clear()
    with using("reference", "experts"):
        want = run(between)
    for _ in range(3):
        assert torch.equal(run(between), want)
    assert hopper.calls == []
    with (
        using(CUTLASS, "experts"),
        pytest.raises(NotImplementedError, match="begin at a multiple of 16 bytes"),
    ):
        run(between)


def test_threads_have_options_of_their_own(hopper: ModuleType) -> None:
    cases = [(*made(tokens=tokens), bits) for tokens in (3, 5) for bits in (False, True)]

    def turns(case: tuple[ExpertsCall, ExpertsCall, bool]) -> list[Tensor]:
        _, call, bits = case
        with flashinfer_options(other_bits=bits):
            return [run(call) for _ in range(20)]

    with ThreadPoolExecutor(len(cases)) as pool:
        outs = list(pool.map(turns, cases))
    for (loaded, call, bits), found in zip(cases, outs, strict=True):
        check(CUTLASS, "bfloat16", found[0], wanted(loaded))
        assert all(torch.equal(out, found[0]) for out in found)
        ran = [said for _, said in hopper.calls if said.get("input") is call.x_TD]
        assert [said["use_fused_finalize"] for said in ran] == [bits] * 20
        assert len({said["workspace_buffer"].data_ptr() for said in ran}) == 20


def test_a_capture_remembers_nothing_that_it_could_not_run(
    hopper: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, call = made()
    monkeypatch.setattr(kept, "capturing", lambda: True)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="made at a first call"):
            run(call)
        assert not bound(call)
    monkeypatch.setattr(kept, "capturing", lambda: False)
    outs = [run(call) for _ in range(3)]
    monkeypatch.setattr(kept, "capturing", lambda: True)
    assert bound(call) and torch.equal(run(call), outs[0])


def test_fake_tensors_never_reach_the_function(hopper: ModuleType) -> None:
    _, call = made()
    for _ in range(2):
        run(call)
    assert bound(call)
    hopper.calls.clear()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(run(call), FakeTensor)
        held = {n: mode.from_tensor(t) for n, t in weights_of(call).items()}
        assert isinstance(run(replace(call, **held)), FakeTensor)
    assert hopper.calls == []


def test_other_calls_are_still_refused(hopper: ModuleType) -> None:
    loaded, call = made()
    for _ in range(2):
        run(call)
    wants_grad = replace(call, w2_EDI=call.w2_EDI.clone().requires_grad_())
    run(wants_grad).sum().backward()
    assert wants_grad.w2_EDI.grad is not None
    with using("reference", "experts"):
        hopper.calls.clear()
        run(call)
        assert hopper.calls == []
    with pytest.raises(ValueError, match="the top-k of ids_TK"):
        run(replace(call, weights_TK=call.weights_TK[:, :1]))
    with using(CUTLASS, "experts"), pytest.raises(NotImplementedError, match="prepared as"):
        run(loaded)


def test_a_call_on_another_gpu_than_the_current_one_goes_by_run(
    hopper: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory would lie on the current one."""
    _, call = made()
    want = run(call)
    monkeypatch.setattr(cutlass, "_current_device", lambda device: lambda: 1)
    nowhere = lambda *sizes: pytest.fail("memory of the current GPU")  # noqa: E731
    monkeypatch.setattr(cutlass.guards, "_empty_strided_cpu", nowhere)
    straight = cutlass.alike(call)
    assert straight is not None
    assert torch.equal(straight(*given(call)), want)
