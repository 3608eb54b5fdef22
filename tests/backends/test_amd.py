"""GPUs of AMD: no kernel of ours or of FlashInfer is for them, whatever capability they state."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import moe_ops
from moe_ops.backends import available, triton_device, triton_hopper
from moe_ops.backends.flashinfer import b12x, cute_dsl, cutlass, fits, package, trtllm
from moe_ops.conformance.samples import MAKERS, samples
from moe_ops.generation import one_query
from moe_ops.kernels import gpus
from moe_ops.kernels.triton import launch
from moe_ops.ops.experts import ExpertsCall
from moe_ops.passes.merge_linears import runs_kernels
from moe_ops.planning import cost
from moe_ops.registry.invariance import invariant
from moe_ops.registry.spec import DECODE_OPS, OPS

GPUS = {
    "gfx90a": (9, 0),
    "gfx942": (9, 4),
    "gfx950": (9, 5),
    "gfx1100": (11, 0),
    "gfx1201": (12, 0),
}
CACHES = (package.capability, package._refusal, fits._way)
CUDA = torch.device("cuda", 0)


def say(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], architecture: str = ""
) -> None:
    """Let a GPU be there: of AMD if it has an architecture, else of NVIDIA."""
    is_ = SimpleNamespace(
        name="a GPU", major=capability[0], minor=capability[1], multi_processor_count=110,
        clock_rate=1_700_000, memory_clock_rate=1_600_000, memory_bus_width=4096,
        gcnArchName=f"{architecture}:sramecc+:xnack-" if architecture else "",
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "6.4.43482" if architecture else None)
    monkeypatch.setattr(torch.version, "cuda", None if architecture else "13.0")
    for name, answer in (
        ("is_available", True), ("current_device", 0), ("get_device_capability", capability),
        ("get_device_properties", is_), ("get_device_name", is_.name),
        ("is_current_stream_capturing", False),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(triton_device, "unavailable", lambda: None)
    monkeypatch.setattr(package, "version", lambda name=package.DISTRIBUTION: package.LEAST)
    for cached in CACHES:
        cached.cache_clear()
    launch.capability.cache_clear()


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    for cached in CACHES:
        cached.cache_clear()
    launch.capability.cache_clear()


def on_gpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, of fake tensors on a GPU."""

    def moved(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")

    with FakeTensorMode(allow_non_fake_inputs=True):
        found: tuple[Any, ...] = pytree.tree_map_only(Tensor, moved, args)
    return found


TRITON = [
    (op.name, name)
    for op in OPS.values()
    for name in op.backends
    if name.partition(".")[0] == "triton" and op.name in MAKERS
]


@pytest.mark.parametrize(("op_name", "name"), TRITON)
def test_triton_refuses_what_it_runs_on_hopper(
    monkeypatch: pytest.MonkeyPatch, op_name: str, name: str
) -> None:
    op, taken = OPS[op_name], 0
    backend = op.backends[name]
    for _, args in samples(op_name, moe_ops.testing.CASES[0], torch.bfloat16):
        call = op.call(*on_gpu(args))
        rows = args[0].shape[0]
        say(monkeypatch, (9, 0))
        with invariant(backend.only_invariant):
            if backend.refusal("cuda", rows, call) is not None:
                continue
        taken += 1
        for architecture, capability in GPUS.items():
            say(monkeypatch, capability, architecture)
            with invariant(backend.only_invariant):
                refusal = backend.refusal("cuda", rows, call)
            assert refusal is not None
            assert refusal.endswith(f", got a GPU of AMD ({architecture})"), refusal
    assert taken


FLASHINFER = {m.NAME: m for m in (b12x, cute_dsl, cutlass, trtllm)}


@pytest.mark.parametrize("name", FLASHINFER)
def test_flashinfer_refuses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = FLASHINFER[name].MACHINE
    for architecture, capability in (*GPUS.items(), *(("gfx90a", c) for c in machine.capabilities)):
        say(monkeypatch, capability, architecture)
        for device in (torch.device("cuda"), CUDA):
            refusal = machine.refusal(device)
            assert refusal is not None
            assert refusal.endswith(f", got a GPU of AMD ({architecture})"), refusal
    say(monkeypatch, machine.capabilities[0])
    assert machine.refusal(CUDA) is None


@pytest.mark.parametrize("architecture", GPUS)
def test_it_is_never_hopper_nor_newer(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    (x,) = on_gpu((torch.empty(2, 4),))
    for said, hopper in ((architecture, False), ("", GPUS[architecture] == (9, 0))):
        say(monkeypatch, GPUS[architecture], said)
        assert (triton_device.refuse_hopper(x) is None) == hopper
        assert launch.pdl_options(x) == (
            {"PDL": False} if said else {"PDL": True, "launch_pdl": True}
        )
        assert runs_kernels(CUDA) == one_query.has_kernels(x) == (not said)
    say(monkeypatch, GPUS[architecture], architecture)
    assert gpus.capability(CUDA) == (0, 0)
    # Neither its rate nor what is multiplied as stored are Hopper's.
    rate = cost.device_of(CUDA).flops_per_second["bfloat16"]
    assert rate == 512 * 110 * 1.7e9 * cost.REACHED


def test_a_kernel_of_hopper_alone_is_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    T, K, D, E = 64, 2, 288, 4
    x, *routed = torch.empty(T, D, dtype=torch.bfloat16), torch.empty(T, K), torch.zeros(T, K).int()
    codes = [torch.empty(E, *shape, dtype=torch.uint8) for shape in ((576, D // 2), (D, 144))]
    scales = [torch.empty(E, *shape, dtype=torch.uint8) for shape in ((576, 9), (D, 9))]
    call = ExpertsCall(
        *on_gpu((x,)), *routed, *codes, w_format="mxfp4",
        w13_scale_EFG=scales[0], w2_scale_EDG=scales[1],
    )  # fmt: skip
    for architecture in ("", "gfx90a"):
        say(monkeypatch, (9, 0), architecture)
        assert (triton_hopper.refuse_registers(call) is None) == (not architecture)


def test_the_list_of_backends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, (9, 0), "gfx90a")
    found = {b.name: b.missing for b in available.available()}
    ours = [n for n in found if n.partition(".")[0] in ("triton", "push") or "flashinfer" in n]
    assert len(ours) >= 9
    for name in ours:
        assert "got a GPU of AMD (gfx90a)" in (found[name] or ""), name
    assert found["aten"] is None and found["all_reduce"] is None
    assert "got a GPU of AMD (gfx90a)" in " ".join(available.text().split())


def test_every_backend_of_a_gpu_is_known_here() -> None:
    """One that is new has to refuse as these do, or to say that it may run."""
    names = {
        name
        for op in (*OPS.values(), *DECODE_OPS.values())
        for name, backend in op.backends.items()
        if backend.devices == {"cuda"} and name.partition(".")[0] != "triton"
    }
    assert names == {"push", "all_reduce", *FLASHINFER}


def test_ops_run_on_what_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["experts"]
    (sample, *_) = samples("experts", moe_ops.testing.CASES[0], torch.bfloat16)
    call = op.call(*on_gpu(sample.args))
    say(monkeypatch, (9, 0), "gfx90a")
    refusals = op.refusals_of(call)
    assert op.pick(call).name in ("aten", "reference")
    assert "got a GPU of AMD (gfx90a)" in (refusals["triton.grouped"] or "")
