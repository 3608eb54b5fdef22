"""The nine paths of the Triton backends of experts: which one a call takes, why no better one does,
and each by its name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import experts, experts_batched, using
from moe_ops.backends import triton_device, triton_hopper, triton_paths
from moe_ops.backends.flashinfer import package
from moe_ops.backends.triton_batched import as_expected, kernel_of
from moe_ops.backends.triton_limits import most_rows_tokens
from moe_ops.kernels.triton import replay
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.experts_batched import Batches, ExpertsBatchedCall
from moe_ops.planning.choose import Node, Rules, choose
from moe_ops.planning.tune import usable_backends
from moe_ops.planning.tuned import Cell, TunedLayer
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, DEVICE, F16, TOL, Case, assert_close, float32, make_layer
from tests.kernels.test_quantized_experts import call_of as quantized
from tests.kernels.test_quantized_experts import definition

NAMES = (
    "tiny", "tiny/stream", "rows", "rows/stream", "grouped/wgmma", "grouped/row_scales",
    "grouped/blocks", "grouped/float8", "grouped/registers", "grouped/plain",
)  # fmt: skip
FLOATS, ROWS = ("", ""), ("int8:row", "int8:row")
BLOCKS = ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128")
# Of each path a layer that it takes: formats, tokens, widths.
TAKEN: dict[str, tuple[tuple[str, str], int, tuple[int, int]]] = {
    "tiny": (FLOATS, 2, (256, 224)),
    "tiny/stream": (("mxfp4", ""), 1, (256, 224)),
    "rows": (FLOATS, 40, (256, 224)),
    "rows/stream": (("mxfp4", ""), 4, (256, 224)),
    "grouped/row_scales": (ROWS, 40, (512, 448)),
    "grouped/blocks": (BLOCKS, 40, (512, 448)),
    "grouped/float8": (("mxfp4", "float8_e4m3fn:row"), 200, (4096, 2048)),
    "grouped/registers": (("mxfp4", ""), 40, (512, 448)),
    "grouped/wgmma": (FLOATS, 40, (512, 448)),
    "grouped/plain": (("mxfp4", ""), 40, (512, 448)),
}
ON_HOPPER = [n for n in NAMES if n not in ("tiny", "rows", "grouped/plain")]
PATHS = {path.name: path for path in triton_paths.PATHS}
each_path = pytest.mark.parametrize("name", NAMES)
each_on_hopper = pytest.mark.parametrize("name", ON_HOPPER)


def call_of(formats: tuple[str, str], T: int, widths: tuple[int, int], off: int = 0) -> ExpertsCall:
    """A call of tokens on a GPU that is not here; weights begin so many bytes behind their
    memory."""
    (w_format, x_format), (D, I), E, K = formats, widths, 4, 2  # noqa: E741
    of = Format.of(w_format).parsed if w_format else None
    weights, scales = [], {}
    for name, rows, columns in (("w13_scale_EFG", 2 * I, D), ("w2_scale_EDG", D, I)):
        dtype = BF16 if of is None else of.storage.dtype
        shape = (E, rows, columns if of is None else of.packed(columns))
        size = torch.Size(shape).numel() + off // dtype.itemsize
        weights.append(torch.empty(size, dtype=dtype)[off // dtype.itemsize :].view(shape))
        if of is not None:
            scales[name] = torch.empty(E, *of.scale_shape(rows, columns), dtype=of.scale_dtype)
    with FakeTensorMode():
        x_TD = torch.empty_strided((T, D), (D, 1), dtype=BF16, device="cuda")
    routed = torch.empty(T, K), torch.empty(T, K, dtype=torch.int64)
    return ExpertsCall(x_TD, *routed, *weights, w_format=w_format, x_format=x_format, **scales)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, (9, 0))


def say(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(package, "_refusal", package._refusal.__wrapped__)
    monkeypatch.setattr(package, "capability", lambda device: capability)
    monkeypatch.setattr(triton_device, "unavailable", lambda: None)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes what is not on a GPU."""
    for name, path in experts.paths.items():
        monkeypatch.setitem(experts.paths, name, replace(path, devices=None))
    yield


def taken(name: str, **given: Any) -> ExpertsCall:
    return call_of(*TAKEN[name], **given)


def test_the_table_names_all_ten() -> None:
    assert sorted(PATHS) == sorted(NAMES)
    assert {p.forced for p in PATHS.values()} == experts.paths.keys()
    for path in PATHS.values():
        assert callable(path.launcher())
        for invariant in (False, True) if path.tiles else ():
            assert callable(path.tiles_of(invariant=invariant))


@each_path
def test_a_call_that_a_path_takes(hopper: None, name: str) -> None:
    """Its backend takes it, as the first that does not refuse; by its own name any runs."""
    path, call = PATHS[name], taken(name)
    rows = call.x_TD.shape[0]
    assert experts.paths[path.forced].refusal("cuda", rows, call) is None
    if name != "grouped/plain":
        found = triton_paths.pick(path.kernel, call)
        assert found.path is path, str(found)
        assert triton_paths.told(path.kernel, call) == str(found)


WRONG_WIDTHS = {
    "tiny/stream": "needs widths that 32 divides, got 264 and 232",
    "rows/stream": "needs widths that 32 divides, got 264 and 232",
    "grouped/row_scales": "needs widths above 384 that 16 divides, got 520 and 456",
    "grouped/blocks": "needs a width of experts that 64 divides, got 456",
    "grouped/float8": "needs widths above 512 that 32 divides, got 4104 and 2056",
    "grouped/registers": "needs widths above 256 that 32 divides, got 520 and 456",
    "grouped/wgmma": "needs rows of inputs that begin at a multiple of 16 elements, got every 520 "
    "(first product), needs rows of inputs that begin at a multiple of 16 elements, got every 456 "
    "(second product)",
}
MISALIGNED = "needs tensors that begin at a multiple of 16 bytes"
OF_CODES = "needs quantised weights that begin at a multiple of 16 bytes"


@each_on_hopper
def test_a_wrong_width_is_refused(hopper: None, name: str) -> None:
    formats, T, (D, I) = TAKEN[name]  # noqa: E741
    formats = ("int4:row", formats[1]) if formats[0] == "mxfp4" else formats
    call = call_of(formats, T, (D + 8, I + 8))
    refusal = experts.paths[PATHS[name].forced].refusal("cuda", T, call)
    assert refusal == WRONG_WIDTHS[name]


@each_on_hopper
def test_a_misaligned_address_is_refused(hopper: None, name: str) -> None:
    call = taken(name, off=8)
    refusal = experts.paths[PATHS[name].forced].refusal("cuda", call.x_TD.shape[0], call)
    eight_bits = name in ("grouped/row_scales", "grouped/blocks")
    assert refusal == (OF_CODES if eight_bits else MISALIGNED)


@each_on_hopper
def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    say(monkeypatch, (8, 9))
    refusal = experts.paths[PATHS[name].forced].refusal("cuda", 1, taken(name))
    assert refusal is not None and refusal.endswith(", got 8.9"), refusal


def test_more_rows_than_a_path_takes(hopper: None) -> None:
    for name, most in (("tiny/stream", 1), ("rows/stream", 20)):
        call = replace(taken(name), **{n: torch.empty(21, 2) for n in ("weights_TK", "ids_TK")})
        call.x_TD = call_of(("mxfp4", ""), 21, (256, 224)).x_TD
        refusal = experts.paths[PATHS[name].forced].refusal("cuda", 21, call)
        assert refusal == f"takes at most {most} rows, got 21"


def test_one_product_of_two(hopper: None) -> None:
    """Where the kernel for Hopper runs one, the path is its own, and the other is told of."""
    call = call_of(FLOATS, 40, (512, 192))
    why = "needs more than 192 columns, got 192 (second product)"
    found = triton_paths.pick("grouped", call)
    assert found.path.name == "grouped/wgmma"
    assert found.refusals["grouped/wgmma"] == why
    assert found.path.options(call) == {"wgmma": (True, False)}
    assert experts.paths["triton.grouped/wgmma"].refusal("cuda", 40, call) == why


def test_codes_meet_tokens_of_float8_where_that_is_faster(hopper: None) -> None:
    formats = "mxfp4", "float8_e4m3fn:row"
    many, few = call_of(formats, 16, (4096, 2048)), call_of(formats, 15, (4096, 2048))
    assert most_rows_tokens(many) < 15
    assert triton_paths.pick("grouped", many).path.name == "grouped/float8"
    small = call_of(formats, 400, (768, 576))
    for call, why in ((few, "is for 16 rows or more"), (small, "is no faster with small experts")):
        found = triton_paths.pick("grouped", call)
        assert found.path.name == "grouped/registers"
        assert found.refusals["grouped/float8"] == why
        assert experts.paths["triton.grouped/float8"].refusal("cuda", 400, call) is None


def test_codes_with_a_scale_for_32_columns_meet_weights_in_small_tiles_alone(hopper: None) -> None:
    few, many = (call_of(("mxfp4", "mxfp8"), T, (4096, 2048)) for T in (48, 49))
    assert triton_paths.pick("grouped", few).path.name == "grouped/float8"
    found = triton_paths.pick("grouped", many)
    assert found.path.name == "grouped/registers"
    assert found.refusals["grouped/float8"] == "takes at most 48 rows"
    groups = call_of(("int4:1x128:bfloat16", "float8_e4m3fn:1x128"), 4000, (4096, 2048))
    assert triton_paths.pick("grouped", groups).path.name == "grouped/float8"


@pytest.mark.parametrize(
    ("expected", "widths", "emulated"),
    [(8, (4096, 2048), False), (1, (4096, 2048), True), (8, (768, 576), True)],
    ids=["many", "few", "small"],
)
def test_batches_are_not_said_to_be_emulated_where_codes_meet(
    expected: int, widths: tuple[int, int], emulated: bool, hopper: None
) -> None:
    layer = call_of(("mxfp4", "float8_e4m3fn:row"), 1, widths)
    with FakeTensorMode():
        x_EMD = torch.empty(4, 16, widths[0], dtype=BF16, device="cuda")
        counts_E = torch.empty(4, dtype=torch.int32, device="cuda")
    call = ExpertsBatchedCall(Batches(x_EMD, counts_E, expected=expected), layer)
    assert experts_batched.backends["triton"].emulates(call) == emulated
    taken = triton_paths.pick(kernel_of(as_expected(call)), as_expected(call)).path.name
    assert (taken != "grouped/float8") == emulated


def test_no_path() -> None:
    call = call_of(ROWS, 40, (512, 448))
    with pytest.raises(NotImplementedError, match=r"no path of triton\.grouped runs") as e:
        triton_paths.pick("grouped", replace(call, x_TD=torch.empty(40, 512)))
    assert "grouped/plain: multiplies floats, got int8:row and int8:row" in str(e.value)


def test_the_first_line_says_which_and_the_rest_why_no_other(hopper: None) -> None:
    told = experts.backends["triton.grouped"].told
    assert told is not None
    assert told(call_of(("mxfp4", ""), 40, (256, 224))) == (
        "grouped/wgmma; grouped/row_scales multiplies codes of 8 bits with a scale a row or tensor"
        ", got mxfp4; grouped/blocks multiplies codes of float8 with a scale for 128 columns, got "
        "mxfp4; grouped/float8 multiplies inputs of float8_e4m3fn:row, float8_e4m3fn:tensor, "
        "float8_e4m3fn:1x128, mxfp8, got floats; grouped/registers needs widths above 256 that 32 "
        "divides, got 256 and 224"
    )


RULES = Rules(thresholds=None, strict=False, table={})


def test_a_plan_tells_the_path(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ops.planning.choose.device_of", lambda _: H200())
    call = call_of(FLOATS, 400, (512, 448), off=8)
    choice = choose(experts, call, Node(name="n", layer=""), RULES)
    assert choice.backends == ("triton.grouped",)
    assert choice.paths["triton.grouped"].startswith("grouped/plain; ")
    assert MISALIGNED in choice.paths["triton.grouped"]


class H200:
    name = "nvidia_h200"

    @staticmethod
    def microseconds(_: Any) -> float:
        return 1.0


def test_thresholds_and_tables_name_a_path(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ops.planning.choose.device_of", lambda _: H200())
    node, name = Node(name="n", layer=""), "triton.grouped/plain"
    call = taken("grouped/wgmma")
    forced = choose(experts, call, node, replace(RULES, thresholds=((None, name),)))
    assert forced.text == name and forced.ranges[0].source == "forced"
    odd = replace(RULES, thresholds=((None, "triton.grouped/wgmma"),))
    with pytest.raises(ValueError, match=MISALIGNED):
        choose(experts, taken("grouped/wgmma", off=8), node, odd)
    layer = TunedLayer(device="nvidia_h200", op="experts", E=4, K=2, D=512, I=448, dtype="bfloat16")
    able = choose(experts, call, node, RULES).candidates[:-1]
    others = (b for b in able if b != "triton.tiny")  # which has no room for so many tokens
    cells = {Cell(tokens=40, routing="uniform", backend=b): 2.0 for b in others}
    cells[Cell(tokens=40, routing="uniform", backend=name)] = 1.0
    tuned = choose(experts, call, node, replace(RULES, table={layer: cells}))
    assert tuned.text == name and tuned.ranges[0].source == "tuned"


def test_tune_measures_paths_where_asked(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_hopper, "refuse_hopper", lambda _: None)
    call = replace(taken("grouped/wgmma"), x_TD=torch.empty(40, 512, dtype=BF16))
    assert not usable_backends(call).keys() & experts.paths.keys()
    found = usable_backends(call, paths=True)
    assert {"triton.grouped/wgmma", "triton.grouped/plain", "triton.tiny/tiny"} <= found.keys()
    assert "triton.grouped/blocks" not in found and found["triton.grouped/wgmma"] is None


# What follows runs, in Triton's interpreter where there is no GPU.
CASE = Case(name="small", T=5, E=3, K=2, D=64, I=48)


def arguments() -> tuple[Tensor, ...]:
    layer = make_layer(CASE, F16, DEVICE)
    return layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI


@pytest.mark.parametrize("name", ["tiny", "rows", "grouped/plain"])
def test_a_path_is_forced(anywhere: None, name: str) -> None:
    args = arguments()
    want = experts.reference(*args)
    with using(PATHS[name].forced, experts):
        assert_close(experts(*args), want, TOL["experts", F16], name)


# The kernels of both products.
LAUNCHED = {
    "tiny": ("tiny_up", "tiny_down"), "tiny/stream": ("one_up", "one_down"),
    "rows": ("rows_up", "rows_down"), "rows/stream": ("few_up", "few_down"),
    "grouped/row_scales": ("_grouped", "_grouped"), "grouped/wgmma": ("_grouped", "_grouped"),
    "grouped/blocks": ("_grouped_float8", "_grouped_float8"),
    "grouped/float8": ("_grouped_float8_tokens", "_grouped_float8_tokens"),
    "grouped/registers": ("_grouped_codes", "_grouped_codes"),
    "grouped/plain": ("_grouped", "_grouped"),
}  # fmt: skip


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs them")
@each_path
def test_a_path_launches_its_kernels(
    anywhere: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(triton_hopper, "refuse_hopper", lambda _: None)
    for path in triton_paths.PATHS:
        path.launcher()  # whose modules then hold what launches
    launched: list[Any] = []

    def note(kernel: Any, *_: Any, **__: Any) -> None:
        launched.append(kernel.fn)

    for module in [m for n, m in sys.modules.items() if n.startswith("moe_ops.kernels.triton")]:
        if vars(module).get("launch") is replay.launch and module is not replay:
            monkeypatch.setattr(module, "launch", note)
    monkeypatch.setattr(replay, "launch", note)
    call = taken(name)
    tensors = {n: t for n, t in vars_of(call).items() if isinstance(t, Tensor)}
    call = replace(call, **{n: torch.empty(t.shape, dtype=t.dtype) for n, t in tensors.items()})
    with using(PATHS[name].forced, experts):
        out_TD = experts(*experts.arguments.flat(call))
    assert out_TD.shape == call.x_TD.shape and out_TD.dtype == BF16
    products = [f for f in launched if ".products." in f.__module__]
    assert tuple(f.__name__ for f in products) == LAUNCHED[name]
    plain = any(f.__module__.endswith("grouped_plain") for f in products)
    assert plain == (name == "grouped/plain")


def vars_of(call: ExpertsCall) -> dict[str, Any]:
    return {f.name: getattr(call, f.name) for f in fields(call)}


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU may run it")
def test_a_forced_path_that_refuses_says_why(anywhere: None) -> None:
    with using("triton.grouped/wgmma", experts), pytest.raises(NotImplementedError) as error:
        experts(*arguments())
    assert "triton.grouped/wgmma: needs a GPU of compute capability 9.0, got cpu" in str(
        error.value
    )
    with (
        pytest.raises(ValueError, match=r"did you mean .triton\.grouped/wgmma"),
        using("triton.grouped/wgmm", experts),
    ):
        pass


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU may take another path")
def test_a_backend_logs_its_path_once(caplog: pytest.LogCaptureFixture) -> None:
    triton_paths.tell.cache_clear()
    call = experts.call(*arguments())
    with caplog.at_level(logging.INFO, "moe_ops"):
        for _ in range(2):
            experts.backends["triton.grouped"].run(call)
    (line,) = caplog.messages
    assert line.startswith("triton.grouped runs by grouped/plain; ")
    assert "grouped/wgmma needs a GPU of compute capability 9.0, got cpu" in line


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="most of them are written for Hopper",
)
@each_path
def test_each_path_is_forced_on_a_gpu(name: str) -> None:
    formats, T, (D, I) = TAKEN[name]  # noqa: E741
    case = Case(name="layer", T=T, E=4, K=2, D=D, I=I)
    layer = make_layer(case, BF16, "cuda")
    given = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
    call = experts.call(*given) if formats == FLOATS else quantized(case, *formats, dtype=BF16)
    with using(PATHS[name].forced, experts):
        got = experts(*experts.arguments.flat(call))
    tol = TOL["experts", torch.float8_e4m3fn if formats[1] else BF16]
    want = experts.reference(*float32(given)) if formats == FLOATS else definition(call)
    assert_close(got, want, tol, name)
