"""`python -m moe_ops backends`: every backend, what it needs, and whether it would run here."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from moe_ops.__main__ import main
from moe_ops.backends import available, triton_device
from moe_ops.backends.flashinfer import package
from moe_ops.registry.spec import DECODE_OPS, OPS, REFERENCE


def test_every_backend_is_listed_once_with_its_ops() -> None:
    found = {b.name: b for b in available.available()}
    assert len(found) == len(available.available())
    tables = (*OPS.values(), *DECODE_OPS.values())
    for op in tables:
        for name in op.backends:
            assert op.name in found[name].ops
    assert found[REFERENCE].missing is None and len(found[REFERENCE].ops) == len(tables)


def test_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    package.capability.cache_clear()
    package._refusal.cache_clear()
    monkeypatch.setenv("COLUMNS", str(available.WIDTH))
    assert main(["backends"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= available.WIDTH
    blocks = dict(re.findall(r"^(\S+)\n((?:   .*\n)+)", text, re.M))
    assert list(blocks) == [b.name for b in available.available()]
    assert blocks["flashinfer_b12x"] == (
        "   of         experts\n"
        "   needs      compute capability 12.0 or 12.1, CUDA 13; flashinfer-python 0.7.2 or newer "
        "and\n              nvidia-cutlass-dsl\n"
        f"   installed  {installed('flashinfer-python')}\n"
        "   runs here  no: needs a GPU of compute capability 12.0 or 12.1, and there is none\n"
    )
    assert "runs here  no: there is no GPU\n" in blocks["triton.rows"]
    assert "of         every op\n" in blocks["reference"]
    package.capability.cache_clear()
    package._refusal.cache_clear()


@pytest.mark.parametrize("columns", [80, 160])
def test_lines_are_as_wide_as_the_terminal(capsys, monkeypatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["backends"]) == 0
    widest = max(map(len, capsys.readouterr().out.splitlines()))
    assert 70 < widest <= min(columns, available.WIDTH)
    assert columns == 80 or widest > 80


PATHS = {
    "tiny": (8, 0), "tiny/stream": (9, 0), "rows": (8, 0), "rows/stream": (9, 0),
    "grouped/wgmma": (9, 0), "grouped/row_scales": (9, 0), "grouped/blocks": (9, 0),
    "grouped/float8": (9, 0), "grouped/registers": (9, 0), "grouped/plain": (8, 0),
}  # fmt: skip


@pytest.mark.parametrize("gpu", [(9, 0), (8, 0), None], ids=str)
def test_all_paths_are_named_with_a_reason(monkeypatch, capsys, gpu) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu)
    monkeypatch.setattr(package, "capability", lambda device: gpu)
    monkeypatch.setattr(package, "_refusal", package._refusal.__wrapped__)
    monkeypatch.setattr(triton_device, "unavailable", lambda: None)
    assert main(["backends"]) == 0
    lines = {line.removeprefix("   paths").strip() for line in capsys.readouterr().out.splitlines()}
    for name, least in PATHS.items():
        lacks = None if gpu is None or gpu >= least else "needs compute capability 9.0, got 8.0"
        said = "there is no GPU" if gpu is None else lacks or "can run"
        assert f"{name}: {said}" in lines


def installed(name: str) -> str:
    version = package.version(name)
    return f"{name} {version}" if version else f"no {name}"


def test_a_machine_without_a_compiler(monkeypatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    (cpu,) = (b for b in available.available() if b.name == "cpu")
    assert cpu.missing is not None and cpu.missing.startswith("no C++ compiler works")


REASONS = {
    "no gpu": (None, {}, "needs a GPU of compute capability 9.0, and there is none"),
    "another": ((8, 0), {}, "needs compute capability 9.0, got 8.0"),
    "no package": (
        (9, 0), {"flashinfer-python": None}, "needs the package flashinfer-python, which is not .*"
        r"pip install 'torch-moe-ops\[flashinfer\]'",
    ),
    "no dsl": (
        (9, 0), {"nvidia-cutlass-dsl": None}, "needs the package nvidia-cutlass-dsl, which is not",
    ),
    "old": (
        (9, 0), {"flashinfer-python": "0.6.13"}, "needs flashinfer-python 0.7.2 or newer, got 0.6",
    ),
    "cuda": ((9, 0), {"torch": "12.8"}, "needs a torch built for CUDA 13, got 12.8"),
    "all": ((9, 0), {}, None),
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "other", "said"), REASONS.values(), ids=REASONS)
def test_what_flashinfer_lacks_on_a_machine(monkeypatch, gpu, other, said) -> None:
    versions = {"flashinfer-python": "0.7.2.post1", "nvidia-cutlass-dsl": "4.7.1", **other}
    monkeypatch.setattr(package, "capability", lambda device: gpu)
    monkeypatch.setattr(package, "version", lambda name=package.DISTRIBUTION: versions[name])
    monkeypatch.setattr(torch.version, "cuda", other.get("torch", "13.0"))
    machine = package.Machine(capabilities=((9, 0),), packages=(package.CUTE_DSL,), cuda=13)
    found = package._refusal.__wrapped__(machine, torch.device("cuda"))
    assert (found is None) == (said is None)
    assert said is None or re.match(said, found)
    assert replace(machine, cuda=12).needs.said == (
        "compute capability 9.0; flashinfer-python 0.7.2 or newer and nvidia-cutlass-dsl"
    )


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch) -> None:
    """Of several kinds in a machine, each time anew."""
    for cached in (package.capability, package._refusal):
        cached.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((8, 9), (9, 0))[index])
    monkeypatch.setattr(package, "version", lambda name=package.DISTRIBUTION: package.LEAST)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    machine = package.Machine(capabilities=((9, 0),))
    for index, said in ((0, "needs compute capability 9.0, got 8.9"), (1, None)) * 2:
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        assert machine.refusal(torch.device("cuda")) == said
    for cached in (package.capability, package._refusal):
        cached.cache_clear()
