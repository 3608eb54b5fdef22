"""Recorded launches on a GPU: the bits of the host code, whatever moved in memory since then."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import experts, route
from moe_ops.backends import triton as backends
from moe_ops.testing import BF16, F32, Case, Layer, make_layer
from tests.published_routers import ROUTERS, arguments

pytestmark = pytest.mark.gpu

# Tokens for one launch of sort and for three; a step of one and of a few.
CASES = (
    Case(name="one", T=1, E=128, K=8, D=2048, I=768),
    Case(name="few", T=5, E=32, K=4, D=512, I=256),
    Case(name="some", T=128, E=128, K=8, D=2048, I=768),
    Case(name="many", T=2048, E=32, K=4, D=512, I=256),
    Case(name="odd", T=70, E=8, K=3, D=321, I=137),
)
ACT = {"interleaved": True, "alpha": 1.702, "limit": 7.0, "up_shift": 1.0}


@pytest.fixture(autouse=True)
def no_recordings() -> Iterator[dict[Any, Any]]:
    from moe_ops.kernels.triton.replay import _recordings

    _recordings.clear()
    yield _recordings
    assert None not in _recordings.values(), "a call was not recorded"
    _recordings.clear()


def variants(layer: Layer) -> Iterator[tuple[str, dict[str, Any]]]:
    E, K = layer.w13_EFD.shape[0], layer.ids_TK.shape[1]
    yield "plain", {}
    yield "biases", {"b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED}
    ids = torch.randperm(2 * E, device="cuda", dtype=torch.int32) - K
    yield "map", {"expert_map": ids[: E + 3].contiguous()}
    yield "activation", {"b13_EF": layer.b13_EF, **ACT}


def by_host_code(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr("moe_ops.kernels.triton.replay._repeats", lambda t: False)
        return run()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", [b for b in experts.backends if b.startswith("triton.")])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bfloat16", "float32"])
def test_the_bits_of_the_host_code_for_other_tensors(
    backend: str,
    case: Case,
    dtype: torch.dtype,
    no_recordings: dict[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = []  # so that no address comes twice
    for seed, transposed in itertools.product(range(3), (False, True)):
        layer = make_layer(case, dtype, "cuda", seed, transposed=transposed)
        tensors = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
        for name, more in variants(layer):
            if (
                experts.backends[backend].refusal("cuda", case.T, experts.call(*tensors, **more))
                is not None
            ):
                pytest.skip(f"{backend} takes no such call")

            run = functools.partial(experts, *tensors, transposed=transposed, **more)
            with moe_ops.using(backend, "experts"):
                out, want = run(), by_host_code(run, monkeypatch)
            assert torch.equal(out, want), (name, seed, transposed)
            kept.append((layer, more, out))
    assert len(no_recordings) == 8  # one for each variant, none for each seed


def test_a_residual_which_may_be_an_input_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(CASES[2], BF16, "cuda")
    tensors = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    other = torch.randn_like(layer.x_TD)
    for residual in (layer.x_TD, other, layer.x_TD, other.clone()):
        run = functools.partial(backends.run_experts, "rows", experts.call(*tensors), residual)
        assert torch.equal(run(), by_host_code(run, monkeypatch))


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        call = arguments(ROUTERS[name], BF16)
        call = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in call.items()}
        call["logits_TE"] = torch.randn_like(call["logits_TE"])
        run = functools.partial(route.backends["triton"].run, route.call(**call))
        assert all(map(torch.equal, run(), by_host_code(run, monkeypatch)))


def test_launches_go_to_the_stream_of_the_call() -> None:
    """Behind work that this stream has to do first."""
    layer = make_layer(CASES[3], BF16, "cuda")
    tensors = (layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    want = [experts(x, *tensors) for x in (layer.x_TD, layer.x_TD)][1]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x = layer.x_TD.clone()
        out = experts(x, *tensors)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, want)


def test_what_lies_between_launches_is_not_what_the_allocator_left() -> None:
    """The buffer of a call holds NaN before; tests fill what is not initialised."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    layer = make_layer(CASES[2], BF16, "cuda")
    layer.ids_TK[::2] = -1
    tensors = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    first, second = (experts(*tensors) for _ in range(2))
    assert torch.equal(first, second) and not first[::2].any() and first.isfinite().all()


@pytest.mark.parametrize("backend", [b for b in experts.backends if b.startswith("triton.")])
def test_a_recording_keeps_no_memory(backend: str) -> None:
    """Of the call that was recorded: neither weights nor what lay between its launches."""
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left would be freed in between
    before = torch.cuda.memory_allocated()
    layer = make_layer(CASES[1], BF16, "cuda")
    with moe_ops.using(backend, "experts"):
        experts(layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    assert torch.cuda.memory_allocated() > before
    del layer
    assert torch.cuda.memory_allocated() == before


def test_launches_are_of_functions_in_c(no_recordings: dict[Any, Any]) -> None:
    """Of all launchers that this version of Triton has, with TMA descriptors and without."""
    layer = make_layer(CASES[3], BF16, device="cuda")
    given = layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI
    for t in given:
        if t.is_floating_point():
            t.requires_grad_()
    for _ in range(2):
        experts(*given).sum().backward()
    launches = [each for recording in no_recordings.values() for each in recording.launches]
    assert any(each.descriptors for each in launches)
    assert {type(each.function).__name__ for each in launches} == {"builtin_function_or_method"}
