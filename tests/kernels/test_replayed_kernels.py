"""What the kernels of every backend compute when their launches are repeated, in the interpreter.

It stands in for compiled kernels: a launch that is repeated gets addresses, as those do, and runs
the kernel on tensors that lie there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction

from moe_ops import experts, route, route_recording, route_replaying
from moe_ops.backends import triton as backends
from moe_ops.kernels.triton import replay
from moe_ops.kernels.triton.experts.schedule import sort
from moe_ops.kernels.triton.static_factors import static_factors
from moe_ops.testing import Case, Layer, make_layer
from tests.chosen import one_in, those_of
from tests.published_routers import ROUTERS, arguments
from tests.replaying import STREAM, on_a_cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on a GPU"),
]

INTERLEAVED = {"interleaved": True, "alpha": 1.702, "limit": 7.0, "up_shift": 1.0}


class Compiled:
    """An interpreted kernel that takes addresses for the tensors of its first launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Any, grid: Any, given: dict[str, Any], options: Any) -> None:
        self.launch = functools.partial(interpret, kernel, grid)
        self.options = options
        self.like = {n: at if isinstance(at, Tensor) else None for n, at in given.items()}

    def run(self, *call: Any) -> None:
        _, _, _, stream, _, _, enter, hook, leave, *args = call
        assert (stream, enter, hook, leave) == (STREAM, None, None, None)
        pairs = zip(self.like.items(), args, strict=True)
        given = {n: at if like is None else lying_at(at, like) for (n, like), at in pairs}
        self.launch(**given, **self.options)


def lying_at(address: int, like: Tensor) -> Tensor:
    """A tensor at an address, of the shape, strides and dtype of another."""
    last = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_char * ((last + 1) * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def interpret(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
    with _disable_current_modes():
        kernel.run(*args, grid=grid, warmup=False, **options)


def launched(kernel: Any, grid: Any) -> Callable[..., Compiled]:
    def call(*args: Any, **named: Any) -> Compiled:
        interpret(kernel, grid, *args, **named)
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        options = {n: v for n, v in named.items() if n not in kernel.arg_names}
        return Compiled(kernel, grid, {n: given[n] for n in kernel.arg_names}, options)

    return call


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """All calls must have been recorded."""
    monkeypatch.setattr(InterpretedFunction, "__getitem__", launched)
    with on_a_cpu(monkeypatch) as found:
        yield found
        assert found and None not in found.values()


def check(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed as by the host code."""
    got = run()
    with monkeypatch.context() as patch:
        patch.setattr(replay, "_repeats", lambda t: False)
        want = run()
    for a, b in zip(as_tuple(got), as_tuple(want), strict=True):
        assert torch.equal(a, b)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def variants(layer: Layer) -> Iterator[tuple[bool, dict[str, Any]]]:
    """With launches of every number: whether weights are transposed, and other arguments."""
    E = layer.w13_EFD.shape[0]
    expert_map = torch.arange(E + 2, dtype=torch.int32).flip(0) - 1
    yield False, {}
    yield True, {"b13_EF": layer.b13_EF, "expert_map": expert_map}
    yield False, {"b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED, **INTERLEAVED}


@one_in(
    2,
    pytest.mark.parametrize(
        ("name", "T"),
        [
            ("triton.tiny", 1),
            ("triton.tiny", 5),
            ("triton.rows", 5),  # whose pairs three launches sort, as many are
            ("triton.grouped", 1),
            pytest.param("triton.grouped", 5, marks=pytest.mark.every),
        ],
    ),
)
def test_experts(
    name: str, T: int, recordings: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort, "ONE_LAUNCH", 8)
    case = Case(name="small", T=T, E=4, K=2, D=40, I=24)
    kept = []  # so that no address comes twice
    for seed in range(2):
        plain, transposed = (
            make_layer(case, torch.float16, seed=seed, transposed=t) for t in (False, True)
        )
        kept += [plain, transposed]
        for flip, more in variants(plain):
            layer = transposed if flip else plain
            tensors = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
            call = experts.call(*tensors, transposed=flip, **more)
            check(functools.partial(experts.backends[name].run, call), monkeypatch)
    assert len(recordings) == 3  # one for each variant, none for each seed
    assert len({getattr(k, f.name).data_ptr() for k in kept for f in fields(Layer)}) > 20


@pytest.mark.parametrize("name", ["tiny", "rows", "grouped"])
def test_a_residual_which_may_be_an_input_as_well(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(Case(name="small", T=3, E=4, K=2, D=40, I=24), torch.float16)
    tensors = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    for residual in (layer.x_TD, torch.randn_like(layer.x_TD), layer.x_TD):
        call = experts.call(*tensors)
        check(functools.partial(backends.run_experts, name, call, residual), monkeypatch)


# A scale for each expert, and a bias.
@pytest.mark.parametrize("name", those_of(("gemma4", "lfm2"), ROUTERS))
def test_routers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        call = arguments(ROUTERS[name])
        call["logits_TE"] = torch.randn_like(call["logits_TE"])
        check(functools.partial(route.backends["triton"].run, route.call(**call)), monkeypatch)


@pytest.mark.parametrize("weights", [False, True], ids=["ids", "weights"])
def test_routers_that_write_to_rings_and_take_ids(
    weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, replaying = (op.backends["triton"] for op in (route_recording, route_replaying))
    for at in (2, 7):
        call = arguments(ROUTERS["lfm2"])
        T, K = len(call["logits_TE"]), call["top_k"]
        ids = torch.full((T + 2, K), -1, dtype=torch.int16)
        kept = torch.full((T + 2, K), -1.0) if weights else None
        more = {"at": torch.tensor([at]), "ring_ids_SK": ids, "ring_weights_SK": kept}

        def record(call: Any, rings: list[Tensor]) -> Any:
            for ring in rings:
                ring.fill_(-1)
            version = rings[0]._version
            out = recording.run(call)
            assert rings[0]._version > version
            return (*out, *(ring.clone() for ring in rings))

        rings = [t for t in (ids, kept) if t is not None]
        record_call = route_recording.call(**call, **more)
        check(functools.partial(record, record_call, rings), monkeypatch)
        assert int((ids >= 0).sum()) == T * K
        given = {**call, "given_ids_SK": ids}
        check(functools.partial(replaying.run, route_replaying.call(**given)), monkeypatch)


@pytest.mark.parametrize("h_scales", [1, 5])
def test_factors_of_static_scales(
    h_scales: int, recordings: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []  # so that no address comes twice
    for _ in range(2):
        kept.append([torch.rand(n) + 0.1 for n in (1, h_scales, 5, 5)])
        x_scale, h_scale, w13_E, w2_E = kept[-1]
        scales = (x_scale, h_scale, w13_E.view(5, 1, 1), w2_E.view(5, 1, 1))
        check(functools.partial(replay.replay, static_factors, scales, ()), monkeypatch)
    assert len(recordings) == 1
