"""Weights from tensors instead of files: whole state dicts, and streams that update in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.weights import load_checkpoint
from moe_ops.weights.codings import coding_of
from moe_ops.weights.layouts import w4afp8
from tests.chosen import in_turn
from tests.weights import test_bitsandbytes as nf4
from tests.weights import test_order as orders
from tests.weights.checkpoints import LAYOUTS, PREFIX, D, E, I, write
from tests.weights.test_quantized_checkpoints import SPLITS, check_values, layer_of

ONE = ParallelConfig()
SHAPES = {"gate_proj": (I, D), "up_proj": (I, D), "down_proj": (D, I)}
KINDS = {"mapping": dict, "pairs": lambda t: list(t.items()), "stream": lambda t: iter(t.items())}


def load(layer: MoELayer, source: Any, **more: Any) -> Any:
    return load_checkpoint(
        {PREFIX: layer}, source, **{"style": "qwen", "progress": False, **more}
    )  # fmt: skip


def state(layer: MoELayer) -> dict[str, Tensor]:
    return {n: t.reshape(-1).view(torch.uint8).clone() for n, t in layer.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


def plain() -> dict[str, Tensor]:
    return {
        f"{PREFIX}.experts.{e}.{p}.weight": torch.randn(shape)
        for e in range(E)
        for p, shape in SHAPES.items()
    }


@in_turn(pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("name", LAYOUTS))
def test_tensors_are_loaded_as_files_are(name: str, kind: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    made = write(tmp_path, layout)
    coding = w4afp8() if name == "w4afp8" else coding_of(layout.config)
    for config in SPLITS["tp2"]:
        layer, of_files = (layer_of(layout, config) for _ in range(2))
        report = load(layer, KINDS[kind](made.entries), coding=coding)
        assert report.complete, str(report)
        assert report.loaded == tuple(made.entries) or name.startswith("gptq")
        check_values(layer, made.values)
        load(of_files, tmp_path)
        assert same(state(layer), state(of_files))


@pytest.mark.parametrize("kind", KINDS)
def test_a_running_layer_is_updated_in_place(kind: str) -> None:
    """All of it or a part; what holds its memory, as a captured graph does, sees it."""
    layer = MoELayer(E, 2, D, I, dtype=torch.float32)
    load(layer, plain())
    before = {n: t.data_ptr() for n, t in layer.state_dict().items()}
    new = plain()
    assert load(layer, KINDS[kind](new)).complete
    assert {n: t.data_ptr() for n, t in layer.state_dict().items()} == before
    assert torch.equal(layer.w2_weight[2], new[f"{PREFIX}.experts.2.down_proj.weight"])
    some = {f"{PREFIX}.experts.1.up_proj.weight": torch.ones(I, D)}
    rest = layer.w2_weight.clone()
    report = load(layer, KINDS[kind](some))
    assert len(report.missing) == 3 * E - 1 and report.loaded == tuple(some)
    assert bool((layer.w13_weight[1, I:] == 1).all()) and torch.equal(layer.w2_weight, rest)


def test_a_stream_may_use_its_memory_again() -> None:
    """And no tensor of it is kept: each is written before the next one is made."""
    buffer, want = torch.empty(I * D), plain()

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, t in want.items():
            yield name, buffer.view(t.shape).copy_(t)
            buffer.fill_(float("nan"))

    layer = MoELayer(E, 2, D, I, dtype=torch.float32)
    assert load(layer, stream()).complete
    other = MoELayer(E, 2, D, I, dtype=torch.float32)
    load(other, want)
    assert same(state(layer), state(other))


def test_tensors_that_are_trained_leave_no_graph() -> None:
    layer = MoELayer(E, 2, D, I, dtype=torch.float32)
    load(layer, {n: t.requires_grad_() for n, t in plain().items()})
    assert layer.w13_weight.is_leaf and layer.w13_weight.grad_fn is None


@pytest.mark.parametrize("kind", KINDS)
def test_orders_of_columns_come_first_in_a_stream(kind: str, tmp_path: Path) -> None:
    orders.write(tmp_path, "gptq_int4", input_order=True)
    entries = load_file(tmp_path / "model.safetensors")
    first = dict(sorted(entries.items(), key=lambda item: not item[0].endswith("g_idx")))
    last = dict(reversed(first.items()))
    coding = coding_of({"quant_method": "gptq"})
    want = orders.layer_of("gptq_int4", ordered=True)
    orders.load(want, tmp_path)
    layer = orders.layer_of("gptq_int4", ordered=True)
    assert load(layer, KINDS[kind](first), coding=coding).complete
    assert same(state(layer), state(want))
    layer = orders.layer_of("gptq_int4", ordered=True)
    if kind == "stream":
        with pytest.raises(
            ValueError, match=r"g_idx: .* weights are loaded already; load g_idx fi"
        ):
            load(layer, KINDS[kind](last), coding=coding)
    else:
        assert load(layer, KINDS[kind](last), coding=coding).complete
        assert same(state(layer), state(want))


def test_parts_of_bitsandbytes_are_put_together(tmp_path: Path) -> None:
    """Of tensors that are there; a stream brings parts one by one, which is refused."""
    nf4.write(tmp_path, nested=True)
    entries = load_file(tmp_path / "model.safetensors")
    layer, want = (MoELayer(E, 2, nf4.D, I, dtype=torch.float32) for _ in range(2))
    assert load(layer, entries).complete
    load(want, tmp_path)
    assert same(state(layer), state(want))
    with pytest.raises(ValueError, match=r"is of bitsandbytes|expected the shape"):
        load(layer, iter(entries.items()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_load_changes_nothing_but_what_a_stream_brought(kind: str) -> None:
    have = plain()
    bad = list(have)[-1]
    have[bad] = have[bad][:-1]
    layer = MoELayer(E, 2, D, I, dtype=torch.float32)
    before = state(layer)
    with pytest.raises(ValueError, match=rf"^{bad}: expected .* \(in the tensors given") as error:
        load(layer, KINDS[kind](have))
    assert ("of which those before it are written" in str(error.value)) == (kind == "stream")
    assert same(state(layer), before) == (kind != "stream")
    assert torch.equal(
        layer.w2_weight[-1].reshape(-1).view(torch.uint8),
        before["w2_weight"].view(E, -1)[-1],
    )


BAD = {
    "no_pair": (lambda t: [*t.items(), "x"], TypeError, r"source must give \(name, tensor\), got "),
    "name": (lambda t: {3: torch.ones(2)}, TypeError, "each name of source"),
    "tensor": (lambda t: {"a": [1.0]}, TypeError, "a of source"),
    "twice": (lambda t: [*t.items(), *t.items()], ValueError, "comes twice in the tensors given"),
    "meta": (lambda t: {"a": torch.ones(2, device="meta")}, ValueError, "a: is on the meta device"),
    "sparse": (lambda t: {"a": torch.eye(2).to_sparse()}, ValueError, "a: is torch.sparse_coo"),
    "stream_of_more": (lambda t: iter([*t.items(), ("a",)]), TypeError, "source must give"),
}


@pytest.mark.parametrize(("made", "kind", "message"), BAD.values(), ids=BAD)
def test_what_is_no_tensor_by_name(made: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        load(MoELayer(E, 2, D, I, dtype=torch.float32), made(plain()))


def test_an_iterator_of_files_is_one_of_files(tmp_path: Path) -> None:
    made = write(tmp_path, LAYOUTS["fp8_blocks"])
    layer = layer_of(LAYOUTS["fp8_blocks"], ONE)
    assert load(layer, iter(tmp_path.glob("*.safetensors"))).complete
    check_values(layer, made.values)
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        load(layer, iter(()))


def test_float8_outside_the_experts_is_refused_before_it_is_written() -> None:
    layer = MoELayer(E, 2, D, I, dtype=torch.float32, internal_gate=True)
    before = state(layer)
    gate = {f"{PREFIX}.gate.weight": torch.ones(E, D).to(torch.float8_e4m3fn)}
    for source in (gate, iter(gate.items())):
        with pytest.raises(ValueError, match=r"gate.weight in the tensors given.* is torch.float8"):
            load(layer, source)
    assert same(state(layer), before)
