"""Formats of other packages that bring a decoder, in Triton's interpreter without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

import triton.language as tl
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, compute_cache_key

from moe_ops import OPS, expert_gemm, experts
from moe_ops.backends import triton_formats, triton_paths
from moe_ops.fake_impls.formats import Storage
from moe_ops.kernels.triton import RegisteredWeight, Weight
from moe_ops.kernels.triton.experts.formats.registered import decoder_at
from moe_ops.ops.expert_gemm import ExpertGemmCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, DEVICE, F16, TOL, assert_close
from tests.chosen import in_turn
from tests.docs.pages import pages
from tests.docs.served import FAKE, _made, calls, machine, refusals
from tests.kernels import decoders
from tests.kernels.codes import any_codes, product
from tests.kernels.test_decoded import decoded
from tests.kernels.test_quantized_experts import ODD, check, each_dtype, run
from tests.kernels.test_quantized_experts import call_of as quantized_call

ELEMENTS = (decoders.INT2, decoders.UINT3, decoders.FLOAT5, decoders.FLOAT8)
FORMATS = (
    "int2:1x32", "int2:row", "int2:16x64:bfloat16", "int2:tensor", "uint3:1x32:float16",
    "uint3:row", "float5_e2m2:1x32:e8m0", "float5_e2m2:1x16:float8_e4m3fn",
    "float8_e4m3fnuz:1x32", "float8_e4m3fnuz:row",
)  # fmt: skip
KERNELS = ("triton.tiny", "triton.rows", "triton.grouped")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_format = pytest.mark.parametrize("w_format", FORMATS)


@pytest.fixture(autouse=True)
def all_registered() -> Iterator[None]:
    with decoders.registered(*ELEMENTS):
        yield


def codes(w_format: str, rows: int, columns: int) -> Any:
    """Any codes but NaN."""
    weights = any_codes(w_format, rows=rows, columns=columns)
    if w_format.startswith("float8"):
        stored = weights.values.view(torch.uint8)
        stored[stored == 0x80] = 0
    return weights


@each_dtype
@each_format
def test_every_code_is_decoded_exactly(w_format: str, dtype: torch.dtype) -> None:
    """The product with the unit matrix is the matrix that the codes stand for."""
    weights = codes(w_format, rows=32, columns=128)
    unit = torch.eye(128, dtype=dtype, device=DEVICE)
    assert torch.equal(product(weights, unit), weights.decoded())


@in_turn(
    pytest.mark.parametrize("dtype", [F16, BF16], ids=str),
    pytest.mark.parametrize("columns", [96, 320]),
    each_format,
)
def test_every_code_is_decoded_for_many_rows(
    w_format: str, columns: int, dtype: torch.dtype
) -> None:
    weights = codes(w_format, rows=32, columns=columns)
    assert torch.equal(decoded(weights, dtype)[0], weights.decoded().to(dtype))


@each_dtype
@pytest.mark.parametrize("columns", [32, 160, 184])
def test_widths_that_fill_no_step(columns: int, dtype: torch.dtype) -> None:
    for w_format in FORMATS:
        weights = codes(w_format, rows=16, columns=columns)
        x_ND = torch.randn(16, columns, device=DEVICE).to(dtype)
        got, want = product(weights, x_ND), weights.decoded() @ x_ND.float().T
        assert_close(got, want, TOL["experts", dtype], w_format)


# Widths that fill neither a step nor groups; and what else a call may have.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("int2:1x32", {"biases": True}),
    "one scale a row": ("int2:row", {}),
    "no gate": ("int2:1x32", {"gated": False, "kind": "relu2"}),
    "interleaved": ("int2:16x64:bfloat16", {"interleaved": True, "biases": True}),
    "zero points": ("uint3:1x32:float16", {"biases": True}),
    "global scales": ("float5_e2m2:1x16:float8_e4m3fn", {}),
    "bytes": ("float8_e4m3fnuz:1x32", {}),
    "inputs of groups": ("int2:1x32", {"x_format": "mxfp8"}),
    "inputs of rows": ("float5_e2m2:1x32:e8m0", {"x_format": "int8:row"}),
}


@in_turn(each_dtype, each_kernel, pytest.mark.parametrize("case", CASES))
def test_a_layer(case: str, kernel: str, dtype: torch.dtype) -> None:
    w_format, more = CASES[case]
    call = quantized_call(ODD, w_format, dtype=dtype, **more)
    if "x_format" in more and kernel == "triton.tiny":
        assert experts.backends[kernel].refusal(DEVICE, len(call.x_TD), call) is not None
    else:
        check(kernel, call)


@each_kernel
def test_the_decoder_of_the_page(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (block,) = (block for block in pages()["CONTRIBUTING.md"] if block.file)
    block.run({})
    place = f"{Path(block.file).stem}:decode"
    storage = decoders.INT2.storage
    with decoders.registered(
        decoders.UINT3, name="uint2", storage=storage, highest=3, triton_decoder=place
    ):
        check(kernel, quantized_call(ODD, "uint2:1x32", biases=True))


@in_turn(each_kernel, pytest.mark.parametrize("T", [1, 12]))
def test_experts_of_another_rank_are_left_out(kernel: str, T: int) -> None:
    call = quantized_call(replace(ODD, T=T), "int2:1x32", biases=True)
    expert_map = torch.tensor([1, -1, 0], device=DEVICE)
    check(kernel, replace(call, expert_map=expert_map))


def test_a_product() -> None:
    """Of `expert_gemm`, whose inputs may be codes of such an element, too."""
    w = codes("uint3:1x32", rows=48, columns=96)
    x_RD = torch.randn(9, 96, device=DEVICE)
    of_x = packing.quantize(x_RD, Format.of("int2:row"))
    given = (torch.tensor([9], device=DEVICE, dtype=torch.int32),)
    call = ExpertGemmCall(
        of_x.values, w.values, *given, w_scale_EFG=w.scale, w_zero_EFG=w.zero,
        x_scale_RG=of_x.scale, w_format="uint3:1x32", x_format="int2:row", out_dtype="float32",
    )  # fmt: skip
    expert_gemm.check(call)
    assert expert_gemm.backends["triton"].refusal("cuda", 9, call) is None
    got = expert_gemm.backends["triton"].run(call)
    assert_close(got, expert_gemm.body(call), TOL["expert_gemm", torch.float32])


BY_KERNELS = {"triton", *KERNELS}
OF_MACHINES = re.compile("needs a (tensor on|GPU of)")  # reasons that are found before formats


@in_turn(pytest.mark.parametrize("x_format", ["", "int8:row", "mxfp8"]), each_format)
def test_what_runs_it_and_who_refuses_it_by_name(w_format: str, x_format: str) -> None:
    given = dict(calls(w_format, x_format))
    given.pop("quantize", None)
    element, found = w_format.partition(":")[0], {}
    with machine():
        for name, call in given.items():
            for backend, reason in refusals(OPS[name], call, "cuda").items():
                found[name, backend] = reason
    runs = {backend for (_, backend), reason in found.items() if reason is None}
    assert runs <= {"reference", *BY_KERNELS} and "triton" in runs
    # Products with float32 scales of codes of eight bits would be rounded twice.
    assert ("triton.rows" in runs) == (element != "float8_e4m3fnuz" or x_format != "int8:row")
    assert x_format or runs >= BY_KERNELS
    refused = [r for r in found.values() if r and not OF_MACHINES.match(r)]
    emulates = "emulates no inputs, as triton.rows does"
    assert all(element in reason for reason in refused if reason != emulates), refused


def test_paths_say_why_they_do_not_run_it() -> None:
    call = calls("int2:1x32", "")["experts"]
    with machine(), FAKE:
        record = experts.call(*_made(call, "cuda"))
        assert triton_paths.told("tiny", record) == "tiny; tiny/stream has no decoder of int2:1x32"
        assert triton_paths.told("rows", record) == "rows; rows/stream has no decoder of int2:1x32"
        assert "; grouped/registers has no decoder of int2; " in (
            triton_paths.told("grouped", record).replace(", ", "; ") + "; "
        )


def test_a_format_that_is_forgotten_has_no_decoder() -> None:
    call = ("other:1x32", "", (128, 128))
    with decoders.registered(decoders.INT2, name="other"):
        assert triton_formats.refusal(*call) is None
        assert isinstance(triton_formats.weight_of(*call[:2]), RegisteredWeight)
    with decoders.registered(decoders.INT2, name="other", triton_decoder=""):
        reason = triton_formats.refusal(*call)
        assert reason is not None and reason.endswith(", got other")
        assert type(triton_formats.weight_of(*call[:2])) is Weight


@pytest.mark.parametrize(
    ("storage", "text"),
    [
        (
            Storage(dtype=torch.uint8, values=12, units=3),
            "decodes words of 1, 2, 4, 8 or 16 codes in 8 bytes at most, got 12 of other in 3",
        ),
        (Storage(dtype=torch.uint8, values=32, units=8), "got 32 of other in 8"),
        (Storage(dtype=torch.int16), "got 1 of other in 2"),
    ],
)
def test_codes_that_fill_no_words_are_refused(storage: Storage, text: str) -> None:
    with decoders.registered(decoders.INT2, name="other", storage=storage):
        assert text in str(triton_formats.refusal("other:1x32", "", (128, 128)))


def test_a_decoder_that_gives_another_shape_is_refused() -> None:
    place = f"{decoders.HERE}:of_another_shape"
    with decoders.registered(decoders.INT2, name="other", triton_decoder=place):
        call = quantized_call(ODD, "other:1x32")
        with pytest.raises(Exception, match=re.escape("gives floats [M, N * values] in the order")):
            run("triton.rows", call)


@pytest.mark.parametrize("name", ["NO_FUNCTION", "registered", "nothing"])
def test_what_is_no_decoder_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"'{decoders.HERE}:{name}' must be a triton.jit function"):
        decoder_at(f"{decoders.HERE}:{name}")


def one(words):  # type: ignore[no-untyped-def]
    return words + 1


def two(words):  # type: ignore[no-untyped-def]
    return words + 2


def kernel(out_ptr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, W.decoder(W.units))


def test_caches_know_a_kernel_by_the_source_of_the_decoder() -> None:
    """In memory and on the disk; packaged formats by what they were known by."""
    fields = ("int2", 1, 32, "float32", False, 2)
    weights = [RegisteredWeight(*fields, 4, 1, JITFunction(f)) for f in (one, two, one)]
    plain = Weight(*fields)
    in_memory = [compute_cache_key({}, [("constexpr", w)], {}) for w in (*weights, plain)]
    source = {"fn": JITFunction(kernel), "signature": {"out_ptr": "*i32", "W": "constexpr"}}
    on_disk = [ASTSource(**source, constexprs={"W": w}).hash() for w in (*weights, plain)]
    for first, second, again, other in (in_memory, on_disk):
        assert first == again and len({first, second, other}) == 3
    assert len({*weights[:2], plain}) == 3
    assert repr(plain) == (
        "Weight(element='int2', down=1, across=32, kind='float32', inputs_8=False, bits=2)"
    )


MODULE = """
import triton
import triton.language as tl

@triton.jit
def offset():
    return {offset}

@triton.jit
def decode(words):
    codes = (words[:, :, None] >> (2 * tl.arange(0, 4))[None, None, :]) & 3
    return tl.reshape(codes - offset(), (words.shape[0], 4 * words.shape[1])).to(tl.float32)
"""
# Each source in a process of its own, all of which share the imports.
COMPILE = """
import os
import sys
from pathlib import Path
from unittest.mock import patch

from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from tests.kernels import decoders, offline
from tests.kernels.offline_codes import quantized_layer
from moe_ops.testing import LAYERS

def call():
    for backend in ("tiny", "rows", "grouped"):
        quantized_layer(LAYERS["gpt_oss_20b"], backend, 4, "int2:1x32", "")

sys.dont_write_bytecode = True
module, *sources = sys.argv[1:]
for source in sources:
    Path(module).write_text(source)
    child = os.fork()
    if not child:
        with decoders.registered(decoders.INT2, triton_decoder="outside:decode"):
            with patch.object(CUDABackend, "make_cubin", lambda *_: b""):
                offline.compile_launches(call, 90, set(), lambda made: {})
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    names = [path.stem for path in Path(knobs.cache.dir).glob("*/*.ttir")]
    print(len(names), *{*names})
"""


@pytest.mark.slow
@pytest.mark.every
def test_another_body_is_compiled_anew(tmp_path: Path) -> None:
    """Also where it is that of what a decoder calls, and after another process compiled both."""
    root = Path(__file__).resolve().parents[2]
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(root), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    kept |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    sources = [MODULE.format(offset=offset) for offset in (2, 1, 2)]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path / "outside.py"), *sources],
        capture_output=True, text=True, env=kept, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    counts = []
    for line in done.stdout.splitlines():
        count, *names = line.split()
        assert {"tiny_up", "tiny_down", "rows_up", "rows_down", "decode_kernel"} <= {*names}
        counts.append(int(count))
    first, other, both = counts
    assert first < other == both < 2 * first  # those that sort tokens are kept
