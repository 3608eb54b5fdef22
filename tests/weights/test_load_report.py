"""Loading as a whole: what is reported, what is refused, and how much memory it takes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import Style, load_checkpoint
from moe_ops.weights.names import GATE_UP_DOWN, STYLES, Entry, style_of
from tests.chosen import those_of
from tests.peak import Peak
from tests.weights.checkpoints import LAYOUTS, PREFIX, store, write, write_gpt_oss
from tests.weights.checkpoints import D as WIDTH

E, D, I = 2, 16, 8  # noqa: E741
EXPERTS = f"{PREFIX}.experts"


def layer_of(**more: Any) -> MoELayer:
    return MoELayer(E, 1, D, I, dtype=torch.float32, **more)


def entries() -> dict[str, Tensor]:
    shapes = {"gate_proj": (I, D), "up_proj": (I, D), "down_proj": (D, I)}
    found = {
        f"{EXPERTS}.{e}.{p}.weight": torch.randn(s) for e in range(E) for p, s in shapes.items()
    }
    return found | {"model.embed_tokens.weight": torch.randn(4, 4)}


def load(folder: Path | list[Path], layer: MoELayer, **more: Any) -> Any:
    return load_checkpoint(
        {PREFIX: layer}, folder, **{"style": "qwen", "progress": False, **more}
    )  # fmt: skip


def test_missing_and_unexpected_entries_are_named(tmp_path: Path) -> None:
    have = entries()
    del have[f"{EXPERTS}.1.up_proj.weight"]
    have[f"{PREFIX}.gate.bias"] = torch.zeros(E)
    have[f"{EXPERTS}.0.up_proj.input_scale"] = torch.ones(1)
    store(tmp_path, have)
    layer = layer_of(internal_gate=True)
    before = layer.w13_weight.clone()
    report = load(tmp_path, layer)
    assert set(report.missing) == {f"{PREFIX}.w13_weight[1].w3", f"{PREFIX}.gate.weight"}
    assert set(report.unexpected) == {
        f"{PREFIX}.gate.bias", f"{EXPERTS}.0.up_proj.input_scale"
    }  # fmt: skip
    assert (len(report.loaded), report.twice, report.complete) == (5, (), False)
    assert torch.equal(layer.w13_weight[1, I:], before[1, I:])
    text = str(report)
    assert text.startswith("5 entries loaded, 0.00 GiB in ")
    assert f"missing: {PREFIX}.w13_weight[1].w3, {PREFIX}.gate.weight" in text


def test_an_entry_that_comes_twice_is_named_and_the_first_stays(tmp_path: Path) -> None:
    have = entries()
    name = f"{EXPERTS}.0.down_proj.weight"
    store(tmp_path / "a", have)
    store(tmp_path / "b", {name: torch.zeros(D, I)})
    layer = layer_of()
    files = [tmp_path / n / "model.safetensors" for n in ("a", "b")]
    report = load_checkpoint({PREFIX: layer}, files, style="qwen", progress=False)
    assert report.twice == (name,)
    assert torch.equal(layer.w2_weight[0], have[name])
    fused = f"{EXPERTS}.gate_up_proj"
    store(tmp_path / "c", {fused: torch.zeros(E, 2 * I, D)})
    both = Style(name="both", projections={"gate_up_proj": "w13", "down_proj": "w2"}, stacked=True)
    twice = [tmp_path / "c" / "model.safetensors"] * 2
    assert load_checkpoint({PREFIX: layer}, twice, style=both, progress=False).twice == (fused,)


def test_an_entry_goes_to_the_layer_of_the_longest_prefix(tmp_path: Path) -> None:
    layers = {PREFIX: layer_of(), f"{PREFIX}.inner": layer_of(), "model.layers.1.mlp": layer_of()}
    have = {
        name.replace(PREFIX, prefix): t + i
        for name, t in entries().items()
        for i, prefix in enumerate(layers)
    }
    store(tmp_path, have)  # the entries of the layers take turns
    report = load_checkpoint(layers, tmp_path, style="qwen", progress=False)
    assert report.complete and len(report.loaded) == 3 * len(layers) * E
    for prefix, layer in layers.items():
        for e in range(E):
            assert torch.equal(layer.w2_weight[e], have[f"{prefix}.experts.{e}.down_proj.weight"])


def test_tensors_of_one_name_may_differ_in_dtype_but_not_in_shape(tmp_path: Path) -> None:
    have = entries()
    names = [f"{EXPERTS}.{e}.down_proj.weight" for e in range(E)]
    have[names[1]] = have[names[1]].bfloat16()
    store(tmp_path / "a", have)
    layer = layer_of()
    assert load(tmp_path / "a", layer).complete
    assert torch.equal(layer.w2_weight[0], have[names[0]])
    assert torch.equal(layer.w2_weight[1], have[names[1]].float())
    have[names[1]] = torch.zeros(I, D)
    store(tmp_path / "b", have)
    with pytest.raises(ValueError, match=rf"{names[1]}: expected the shape"):
        load(tmp_path / "b", layer)


def test_ranks_report_what_lives_elsewhere(tmp_path: Path) -> None:
    store(tmp_path, entries())
    config = ParallelConfig.of(tp=2, tp_rank=1, expert_parallel=True)
    report = load(tmp_path, layer_of(parallel=config))
    assert report.complete
    assert {n.split(".")[5] for n in report.loaded} == {"1"}
    assert {n.split(".")[5] for n in report.elsewhere} == {"0"}
    assert report.bytes_loaded == 3 * I * D * 4


def test_a_bad_shape_names_everything_and_changes_nothing(tmp_path: Path) -> None:
    have = entries()
    name, file = f"{EXPERTS}.1.down_proj.weight", tmp_path / "model.safetensors"
    have[name] = torch.randn(D, I + 2)
    store(tmp_path, have)
    layer = layer_of()
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    with pytest.raises(ValueError) as error:
        load(tmp_path, layer)
    assert str(error.value) == f"{name}: expected the shape [16, 8], found [16, 10] (in {file})"
    assert all(torch.equal(before[n], t) for n, t in layer.state_dict().items())
    have[name] = torch.randn(D, I)
    have[f"{PREFIX}.gate.weight"] = torch.randn(E + 1, D)
    store(tmp_path, have)
    with pytest.raises(ValueError, match=r"gate.weight: expected the shape \[2, 16\], found \[3"):
        load(tmp_path, layer_of(internal_gate=True))


def test_shared_experts_take_slots_of_every_rank(tmp_path: Path) -> None:
    have = entries()
    gate, down = torch.randn(2 * I, D), torch.randn(D, 2 * I)
    have[f"{PREFIX}.shared_experts.gate_proj.weight"] = gate
    have[f"{PREFIX}.shared_experts.up_proj.weight"] = gate + 1
    have[f"{PREFIX}.shared_experts.down_proj.weight"] = down
    store(tmp_path, have)
    for rank in range(2):
        config = ParallelConfig.of(tp=2, tp_rank=rank, expert_parallel=True)
        layer = layer_of(parallel=config, shared_experts=2)
        assert load(tmp_path, layer).complete
        for s in range(2):
            cut = slice(s * I, s * I + I)
            assert torch.equal(layer.w13_weight[1 + s], torch.cat((gate[cut], gate[cut] + 1)))
            assert torch.equal(layer.w2_weight[1 + s], down[:, cut])


def test_progress_is_a_line_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, entries())
    load(tmp_path, layer_of(), progress=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("1 of 1  model.safetensors  0 MiB in 0.0 s")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no safetensors files in .*give a directory or"):
        load(tmp_path, layer_of())
    with pytest.raises(FileNotFoundError, match=r"none.safetensors does not exist; complete the"):
        load(tmp_path / "none.safetensors", layer_of())
    with pytest.raises(ValueError, match=r"pytorch_model.bin is no safetensors or GGUF file; co"):
        load(tmp_path / "pytorch_model.bin", layer_of())


def test_layers_without_memory_are_refused(tmp_path: Path) -> None:
    store(tmp_path, entries())
    with pytest.raises(ValueError, match=r"layer 'model.layers.0.mlp' is on the meta device; give"):
        load(tmp_path, layer_of(device="meta"))


NAMES = {
    "mixtral": ("mixtral", "experts.11.w3.weight", ("w13_weight", "w3", 11)),
    "phi": ("phi3.5", "experts.0.w2.weight", ("w2_weight", "w2", 0)),
    "gptq": ("qwen", "experts.7.gate_proj.qzeros", ("w13_zero", "w1", 7)),
    "modelopt_fp4": (
        "deepseek",
        "experts.7.down_proj.weight_scale_2",
        ("w2_global_scale", "w2", 7),
    ),
    "input": ("glm", "experts.7.down_proj.input_scale", ("h_scale", "w2", 7)),
    "blocks": ("gpt-oss", "experts.gate_up_proj_blocks", ("w13_weight", "w13", None)),
    "gguf": ("gguf", "ffn_gate_up_exps.weight", ("w13_weight", "w13", None)),
    "bias": ("gpt-oss", "experts.down_proj_bias", ("w2_bias", "w2", None)),
    "fused_fp8": ("transformers", "experts.gate_up_proj_scale_inv", ("w13_scale", "w13", None)),
}


@pytest.mark.parametrize(("style", "name", "want"), NAMES.values(), ids=NAMES)
def test_names_are_read(style: str, name: str, want: Any) -> None:
    parameter, shard, expert = want
    plain = name.endswith(".weight")
    want = Entry(parameter=parameter, shard=shard, expert=expert, plain=plain)
    assert style_of(style).entry(name) == want


def test_other_names() -> None:
    entry = GATE_UP_DOWN.entry("experts.3.up_proj.weight_global_scale")
    assert isinstance(entry, Entry) and entry.reciprocal
    assert STYLES["gguf"].entry("ffn_down_shexp.weight") == "shared_experts.down_proj.weight"
    assert STYLES["gguf"].entry("ffn_gate_inp_shexp.weight") == "ffn_gate_inp_shexp.weight"
    assert STYLES["gpt-oss"].entry("router.bias") == "gate.bias"
    assert GATE_UP_DOWN.entry("gate.e_score_correction_bias") == "correction_bias"
    assert GATE_UP_DOWN.entry("experts.3.up_projection.weight") == "experts.3.up_projection.weight"
    assert GATE_UP_DOWN.entry("experts.up_proj.weight") == "experts.up_proj.weight"
    with pytest.raises(
        ValueError, match=r"style 'llama' is unknown; choose one of mixtral, phi3.5"
    ):
        style_of("llama")


SOME = ("gptq_int4", "modelopt_nvfp4")
LARGE = 256  # rows and columns: of 64 the stand-ins of conversions would be no small part


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "gpt_oss", *those_of(SOME, LAYOUTS)])
def test_no_more_memory_than_one_tensor_is_needed(name: str, tmp_path: Path) -> None:
    """Counts what is made besides the layer; a tensor of the file is mapped, not read."""
    style, made = "qwen", 0
    if name == "plain":
        store(tmp_path, entries())
        layer = layer_of()
    elif name == "gpt_oss":
        style = "gpt-oss"
        write_gpt_oss(tmp_path)
        layer = MoELayer(3, 2, WIDTH, WIDTH, quant="mxfp4_w4a16", bias=True, dtype=torch.float32)
    else:
        layout = LAYOUTS[name]
        largest = max(t.nbytes for t in write(tmp_path, layout, LARGE, LARGE).entries.values())
        made = largest if name.startswith(("gptq", "awq", "packed", "w4afp8")) else 1024
        quant = QuantConfig(
            weights=layout.weights, inputs=layout.inputs, static_inputs=layout.static
        )
        layer = MoELayer(3, 2, LARGE, LARGE, quant=quant, dtype=torch.float32)
    gc.collect()
    with Peak() as peak:
        assert load(tmp_path, layer, style=style).complete
    assert peak.most <= made + 8  # the least and the largest scale


CORRUPT = {
    "empty": (lambda good: b"", "header too small"),
    "cut_header": (lambda good: good[:30], "invalid header"),
    "cut_data": (lambda good: good[:-20], "not fully covered"),
    "no_safetensors": (lambda good: b"version https://git-lfs.github.com/spec/v1\n", "too large"),
}


@pytest.mark.parametrize(("spoil", "why"), CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_named_before_a_weight_is_changed(
    spoil: Any, why: str, tmp_path: Path
) -> None:
    have = entries()
    for i in range(2):
        store(tmp_path / str(i), {n: t for n, t in have.items() if f"experts.{i}." in n})
    good, bad = (tmp_path / str(i) / "model.safetensors" for i in range(2))
    layer = layer_of()
    assert not load([good, bad], layer).missing
    bad.write_bytes(spoil(bad.read_bytes()))
    layer = layer_of()
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    with pytest.raises(ValueError, match=rf"1/model\.safetensors cannot be read as .*{why}.*; com"):
        load([good, bad], layer)
    assert all(torch.equal(before[n], t) for n, t in layer.state_dict().items())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_corrupt_json_file_is_named(name: str, tmp_path: Path) -> None:
    store(tmp_path, entries())
    (tmp_path / name).write_text('{"weight_map": {')
    with pytest.raises(ValueError, match=rf"{name} is no JSON \(.*\); complete the download"):
        load(tmp_path, layer_of())
