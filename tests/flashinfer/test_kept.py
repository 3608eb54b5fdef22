"""What is made at a first call: when, in which mode, for how many tokens; and what never is."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import MoELayer, arena, experts, flashinfer_options
from moe_ops.backends.flashinfer import b12x, cutlass, fits, kept, package
from moe_ops.ops.experts import ExpertsCall
from tests.chosen import in_turn
from tests.flashinfer.layers import CASE, call_of, check, run, stored, wanted

UP_GATE, CHUNKS = "flashinfer.up_gate", "flashinfer.chunks"
WAYS = {
    "cutlass": ("flashinfer_cutlass", UP_GATE, "bfloat16", (9, 0)),
    "cute_dsl": ("flashinfer_cute_dsl", CHUNKS, "bfloat16", (9, 0)),
    "b12x": ("flashinfer_b12x", UP_GATE, "nvfp4", (12, 0)),
}
by_way = pytest.mark.parametrize(("name", "layout", "formats", "gpu"), WAYS.values(), ids=WAYS)
On = Callable[[int, int], None]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether a CUDA graph is captured."""
    return lambda on: monkeypatch.setattr(kept, "capturing", lambda: on)


def test_it_is_imported_by_the_first_call_alone(installed: None, on: On) -> None:
    on(9, 0)
    call = stored(call_of("bfloat16"), UP_GATE)
    assert experts.refusals_of(call)["flashinfer_cutlass"] is None
    assert experts.pick(call).name == "flashinfer_cutlass"
    assert "flashinfer" not in sys.modules
    run("flashinfer_cutlass", call)
    assert "flashinfer" in sys.modules


def test_what_a_machine_can_run_is_found_once(fake: ModuleType, on: On) -> None:
    """Every call asks b12x and CUTLASS, which read weights alike."""
    on(9, 0)
    calls = [stored(call_of("bfloat16", tokens=tokens), UP_GATE) for tokens in (1, 5)]
    for call in (*calls, *calls):
        assert experts.pick(call).name == "flashinfer_cutlass"
    assert (fits._way.cache_info().misses, fits._way.cache_info().hits) == (2, 6)


def test_what_belongs_to_a_tensor_stays_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST", 2)
    found: kept.Kept[int] = kept.Kept("a number")
    weight = torch.zeros(1)
    for n in range(4):
        found.get(("of", n), lambda n=n: n, of=(weight,))
        found.get(("loose", n), lambda n=n: n)
    assert [key for key in found._held if key[0] == "of"] == [("of", n) for n in range(4)]
    assert [key for key in found._held if key[0] == "loose"] == [("loose", 2), ("loose", 3)]
    del weight
    gc.collect()
    assert [key for key in found._held if key[0] == "of"] == []


@by_way
def test_nothing_is_made_while_a_graph_is_captured(
    fake: ModuleType, on: On, capture: Callable[[bool], None],
    name: str, layout: str, formats: str, gpu: tuple[int, int],
) -> None:  # fmt: skip
    on(*gpu)
    call = stored(call_of(formats, tokens=5), layout)
    capture(True)
    with pytest.raises(
        RuntimeError, match=r"made at a first call, which may not be in the capture"
    ):
        run(name, call)
    capture(False)
    want = run(name, call)
    capture(True)
    made = len(fake.calls)
    assert torch.equal(run(name, call), want)
    with flashinfer_options(max_tokens=8, autotune=True):
        assert run(name, first_of(call, 4)).shape[0] == 4
    assert {n for n, _ in fake.calls[made:]} <= {"B12xMoEWrapper.run", "cutlass_fused_moe"}


WARMED = 0  # the stream of the first calls


@by_way
@pytest.mark.parametrize("stream", [WARMED, 7], ids=["one stream", "a stream of its own"])
def test_a_capture_makes_use_of_the_warm_up(
    fake: ModuleType, on: On, capture: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch,
    name: str, layout: str, formats: str, gpu: tuple[int, int], stream: int,
) -> None:  # fmt: skip
    """Of every size that was called, wherever it was; no buffer of the stream is asked for."""
    on(*gpu)
    call = stored(call_of(formats, tokens=12), layout)
    some = [first_of(call, tokens) for tokens in (12, 1, 5)]
    wants = [run(name, one) for one in some]
    made = len(fake.calls)
    monkeypatch.setattr(arena, "current_stream", lambda device: stream)
    monkeypatch.delattr(arena, "take")
    capture(True)
    for one, want in zip(some, wants, strict=True):
        assert torch.equal(run(name, one), want)
    ran = {"B12xMoEWrapper.run", "cutlass_fused_moe", "CuteDslBf16MoEWrapper.run"}
    assert {n for n, _ in fake.calls[made:]} <= ran
    assert sizes("CUTLASS") == []


def test_a_graph_has_the_buffers_of_the_stream_that_it_was_warmed_up_on(
    fake: ModuleType, on: On, capture: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that graphs of two streams may run at the same time, also beside calls."""
    on(12, 0)
    call = stored(call_of("nvfp4", tokens=5), UP_GATE)
    layers = []
    for stream in (0, 1, 2):
        monkeypatch.setattr(arena, "current_stream", lambda device, stream=stream: stream)
        run("flashinfer_b12x", call)
        capture(True)
        layers.append(b12x._layer(call))
        capture(False)
    assert len({layer.wrapper.output.data_ptr() for layer in layers}) == 3
    assert len({id(layer.wrapper._static_workspace) for layer in layers}) == 3
    assert len({id(layer.lock) for layer in layers}) == 3
    monkeypatch.setattr(arena, "current_stream", lambda device: 3)
    capture(True)
    assert b12x._layer(call) in layers
    other = stored(call_of("nvfp4", tokens=5), UP_GATE)
    with pytest.raises(RuntimeError, match="made at a first call"):
        b12x._layer(other)


LAUNCHED = {name: way for name, way in WAYS.items() if name != "cutlass"}
LAUNCHED["trtllm"] = ("flashinfer_trtllm", "flashinfer.shuffled", "bfloat16", (10, 0))


@pytest.mark.parametrize(("name", "layout", "formats", "gpu"), LAUNCHED.values(), ids=LAUNCHED)
def test_kernels_are_launched_where_their_tensors_are(
    fake: ModuleType, on: On, monkeypatch: pytest.MonkeyPatch,
    name: str, layout: str, formats: str, gpu: tuple[int, int],
) -> None:  # fmt: skip
    """All of a call, so that what is made at the first one is made there, too."""
    on(*gpu)
    call = stored(call_of(formats), layout)

    @contextlib.contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        fake.calls.append(("on", {"device": device}))
        yield
        fake.calls.append(("off", {}))

    monkeypatch.setattr(package, "on", noted)
    run(name, call)
    names = [n for n, _ in fake.calls]
    assert len(names) > 2 and (names[0], names[-1]) == ("on", "off")
    assert fake.calls[0][1]["device"] == call.x_TD.device


def test_another_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", made.append)
    for device in ("cpu", "cuda:1"):
        assert package.on(torch.device(device)) is package.HERE
    package.on(torch.device("cuda:0"))
    assert made == [torch.device("cuda:0")]


def first_of(call: ExpertsCall, tokens: int) -> ExpertsCall:
    t = tokens
    return replace(call, x_TD=call.x_TD[:t], weights_TK=call.weights_TK[:t], ids_TK=call.ids_TK[:t])


MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)
FIRST = {
    **WAYS,
    "blocks": ("flashinfer_cutlass", UP_GATE, "blocks", (9, 0)),
    "cute_dsl nvfp4": ("flashinfer_cute_dsl", CHUNKS, "nvfp4", (10, 0)),
    "trtllm": ("flashinfer_trtllm", "flashinfer.shuffled", "bfloat16", (10, 0)),
}


@in_turn(
    pytest.mark.parametrize("first", MODES),
    pytest.mark.parametrize(("name", "layout", "formats", "gpu"), FIRST.values(), ids=FIRST),
)
def test_a_first_call_in_any_mode(
    fake: ModuleType, on: On, name: str, layout: str, formats: str, gpu: tuple[int, int],
    first: Callable[[], torch.no_grad],
) -> None:  # fmt: skip
    """What it made, and FlashInfer in it, can be written to in any other mode: at a first run, in
    one of more tokens than ever, and where tactics are measured."""
    on(*gpu)
    call = stored(call_of(formats, tokens=5), layout)
    for some in (first_of(call, 3), call):
        with first(), flashinfer_options(max_tokens=8):
            want = run(name, some)
        for mode in MODES:
            with mode(), flashinfer_options(max_tokens=8):
                assert torch.equal(run(name, some), want)
    with first(), flashinfer_options(max_tokens=8, autotune=True):
        assert torch.equal(run(name, call), want)
    for mode in MODES:
        kept._tuned.clear()
        with mode(), flashinfer_options(max_tokens=8, autotune=True):
            assert torch.equal(run(name, call), want)
    measured = formats != "blocks"  # of whose kernels there is nothing to measure
    assert [n for n, _ in fake.calls].count("autotune") == 4 * measured
    layers = b12x._LAYERS._held.values()
    assert not any(t.is_inference() for layer in layers for t in (layer.scales.x, layer.scales.one))


def test_only_what_may_make_buffers_leaves_inference_mode(fake: ModuleType, on: On) -> None:
    on(9, 0)
    call = stored(call_of("bfloat16", tokens=5), UP_GATE)
    results = []
    with torch.inference_mode(), flashinfer_options(max_tokens=8):
        for tokens in (3, 3, 2, 5, 4, 5):
            results.append(run("flashinfer_cutlass", first_of(call, tokens)))
    assert [out.is_inference() for out in results] == [False, True, True, False, True, True]


def test_its_modules_are_imported_outside_of_inference_mode(installed: None, on: On) -> None:
    on(10, 0)
    with torch.inference_mode():
        run("flashinfer_cutlass", stored(call_of("nvfp4"), UP_GATE))
    assert not sys.modules["flashinfer.fused_moe.numbers"].FP4.is_inference()


def sizes(purpose: str) -> list[int]:
    return [use.bytes for use in arena.report() if use.purpose == f"FlashInfer {purpose}"]


def test_workspaces_are_as_large_as_the_largest_bucket(fake: ModuleType, on: On) -> None:
    on(9, 0)
    call = stored(call_of("bfloat16", tokens=5), UP_GATE)
    with flashinfer_options(max_tokens=48):
        run("flashinfer_cutlass", call)
    run("flashinfer_cutlass", stored(call_of("bfloat16", tokens=33), UP_GATE))
    asked = [given for n, given in fake.calls if n == "cutlass_fused_moe_workspace_size"]
    assert [given["max_num_tokens"] for given in asked] == [48, 64]
    ran = [given["workspace_buffer"].nbytes for n, given in fake.calls if n == "cutlass_fused_moe"]
    bytes_of = fake.fused_moe.cutlass.workspace_bytes
    assert ran == [bytes_of(tokens, CASE.D, CASE.E) for tokens in (48, 64)]


@pytest.mark.parametrize("formats", ["bfloat16", "blocks"])
def test_few_tokens_run_again_after_many_of_another_layer(
    fake: ModuleType, on: On, formats: str
) -> None:
    """Of blocks FlashInfer wants bytes for the most rows that it ever had."""
    on(9, 0)
    few, many = (stored(call_of(formats, tokens=tokens), UP_GATE) for tokens in (3, 40))
    want = run("flashinfer_cutlass", few)
    run("flashinfer_cutlass", many)
    assert torch.equal(run("flashinfer_cutlass", few), want)


def test_layers_of_b12x_share_a_workspace_and_the_output(fake: ModuleType, on: On) -> None:
    on(12, 0)
    calls = [stored(call_of("nvfp4", tokens=5), UP_GATE) for _ in range(3)]
    calls[2].ids_TK = calls[2].ids_TK[:, :1].contiguous()  # another size
    calls[2].weights_TK = calls[2].weights_TK[:, :1].contiguous()
    results = [run("flashinfer_b12x", call) for call in calls]
    a, b, c = (layer.wrapper for layer in b12x._LAYERS._held.values())
    for part in ("_static_workspace", "_dynamic_workspace"):
        assert getattr(a, part) is getattr(b, part) is not getattr(c, part)
    assert a.output.data_ptr() == b.output.data_ptr() == c.output.data_ptr()
    assert sizes("b12x") == [8 * CASE.D * 2]
    for call, got in zip(calls, results, strict=True):
        check("flashinfer_b12x", "nvfp4", got, wanted(call))


def test_tactics_are_measured_once_for_each_number_of_tokens(
    fake: ModuleType, on: On, capture: Callable[[bool], None]
) -> None:
    """For no more than these, and in one table, which FlashInfer keeps by the largest number."""
    on(9, 0)

    def measured(tokens: int, formats: str = "bfloat16") -> list[int]:
        fake.calls.clear()
        run("flashinfer_cutlass", stored(call_of(formats, tokens=tokens), UP_GATE))
        tunings = [given for n, given in fake.calls if n == "autotune"]
        assert {given["cache"] for given in tunings} <= {"tactics.json"}
        (given,) = (given for n, given in fake.calls if n == "cutlass_fused_moe")
        assert given["tune_max_num_tokens"] == cutlass.MOST_TUNED
        return [size for given in tunings for size in given["tuning_buckets"]]

    assert measured(5) == []
    with flashinfer_options(autotune=True, autotune_cache="tactics.json"):
        assert [measured(n) for n in (5, 8, 9, 16, 700, 6)] == [[8], [], [16], [], [768], []]
        assert measured(5, "blocks") == [], "its kernels have no tactics"
    with flashinfer_options(autotune=True, autotune_cache="tactics.json", max_tokens=16):
        capture(True)
        kept._tuned.clear()
        assert measured(16) == []


def test_a_wrapper_goes_with_its_weights(fake: ModuleType, on: On) -> None:
    """Also one that keeps views; not with a view of them that a caller makes for one call."""
    on(12, 0)
    calls = [stored(call_of("nvfp4", tokens=5), UP_GATE) for _ in range(2)]
    wants = [run("flashinfer_b12x", call) for call in calls]
    viewed = replace(calls[1], w13_EFD=calls[1].w13_EFD.view(-1).view_as(calls[1].w13_EFD))
    assert torch.equal(run("flashinfer_b12x", viewed), wants[1])
    del viewed
    wrappers = [weakref.ref(layer.wrapper) for layer in b12x._LAYERS._held.values()]
    assert len(wrappers) == 2
    fake.calls.clear()
    del calls[0]
    gc.collect()
    assert wrappers[0]() is None and len(b12x._LAYERS._held) == 1
    assert torch.equal(run("flashinfer_b12x", calls[0]), wants[1])
    assert b12x._LAYERS._held.popitem()[1].wrapper is wrappers[1]()


def test_a_compiler_sees_one_op(fake: ModuleType, on: On) -> None:
    on(9, 0)
    call = stored(call_of("bfloat16"), UP_GATE)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def function(x: Tensor) -> Tensor:
        args = (call.weights_TK, call.ids_TK, call.w13_EFD, call.w2_EDI)
        return moe_ops.experts(x, *args, layout=UP_GATE)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert torch.equal(compiled(call.x_TD), run("flashinfer_cutlass", call))
    assert [n.target for n in graphs[0].graph.nodes if n.op == "call_function"] == [
        torch.ops.moe_ops.experts.default
    ]
    assert [name for name, _ in fake.calls].count("cutlass_fused_moe") == 2


QUANT = {
    "bfloat16": None,
    "mxfp4": moe_ops.QuantConfig(weights="mxfp4"),
    "nvfp4": moe_ops.QuantConfig.with_static_inputs("nvfp4", "nvfp4"),
}


@pytest.mark.parametrize("formats", QUANT)
def test_a_prepared_layer(fake: ModuleType, on: On, formats: str) -> None:
    """It runs on the backend that reads its layout, and saves what was loaded."""
    on(*((10, 0) if formats == "nvfp4" else (9, 0)))
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 256, "intermediate_size": 128}
    layer = MoELayer(**sizes, internal_gate=True, dtype=torch.bfloat16, quant=QUANT[formats])
    load(layer, call_of(formats))
    before = {n: bits(t).clone() for n, t in layer.eval().state_dict().items()}
    x = torch.randn(6, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        want = layer(x)
        moe_ops.prepare(layer, UP_GATE)
        check("flashinfer_cutlass", formats, layer(x), want)
    assert [n for n, _ in fake.calls].count("cutlass_fused_moe") == 1
    assert any(not torch.equal(bits(p), before[n]) for n, p in layer.named_parameters())
    assert all(torch.equal(bits(t), before[n]) for n, t in layer.state_dict().items())


@torch.no_grad()
def load(layer: MoELayer, call: ExpertsCall) -> None:
    """Weights of a call, and factors of its own for each expert."""
    given = {
        "w13_weight": call.w13_EFD, "w2_weight": call.w2_EDI, "w13_scale": call.w13_scale_EFG,
        "w2_scale": call.w2_scale_EDG, "x_scale": call.x_scale, "h_scale": call.h_scale,
    }  # fmt: skip
    if call.global_scale13_E is not None and call.global_scale2_E is not None:
        given["w13_global_scale"] = call.global_scale13_E / call.x_scale
        given["w2_global_scale"] = call.global_scale2_E / call.h_scale
    for name, t in given.items():
        if t is not None:
            bits(getattr(layer, name)).copy_(bits(t.expand_as(getattr(layer, name))))


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(torch.uint8)


def test_gradients_are_refused(fake: ModuleType, on: On) -> None:
    on(9, 0)
    call: ExpertsCall = stored(call_of("bfloat16"), UP_GATE)
    wants = replace(call, x_TD=call.x_TD.clone().requires_grad_())
    said = experts.refusals_of(wants)["flashinfer_cutlass"]
    assert said == "is not differentiable, and an argument requires grad"
    with torch.no_grad():
        assert experts.refusals_of(wants)["flashinfer_cutlass"] is None
