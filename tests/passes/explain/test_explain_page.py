"""The page of an explanation, its plot, and the command line."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from moe_ops.__main__ import main, parser
from moe_ops.checks.config_sizes import shrink
from moe_ops.passes.explain.explanation import LEGEND, At, Explanation
from moe_ops.passes.explain.html import page
from moe_ops.passes.explain.roofline import HEIGHT, LEFT, RIGHT, WIDTH, _box, _overlap, roofline
from tests.passes.explain.test_explanation import EXPLANATION, OTHER, REGION

pytestmark = pytest.mark.slow  # compiles many graphs

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Requires that every element is closed in its turn; keeps the text and the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []
        self.values: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.seen.append(tag)
        self.values += [value or "" for _, value in attrs]

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)


def read(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def test_a_page_is_well_formed_and_needs_nothing_else() -> None:
    found = page(EXPLANATION)
    read(found)
    assert not re.search(r"https?:|//|src=|@import|url\(|<link|<script", found)


def test_a_page_has_all_that_was_found() -> None:
    checker = read(page(EXPLANATION))
    text = "".join(checker.text)
    for part in (
        LEGEND, "Model under moe_ops", "model.layers.{0-2,4}.mlp.experts", "E=128 K=8 D=2048 I=768",
        "lift_router: top_k=8, score=softmax", "cpu up to 40 rows, aten beyond", "2.10 ms",
        "triton: needs a tensor on cuda, got cpu", "the scores of <all> the experts", "fuse_moe",
        "2 graphs, breaks at 1 place", "model.py:7", "aten.nonzero.default", str(EXPLANATION.plan),
        "Before: 2 nodes", "topk = aten.topk(x, 2)", "After: 2 nodes", "moe_ops.moe(x, a<b)",
        "model.layers.{0-3}.self_attn.q_proj", "triton to 64 rows, then triton.decoded",
    ):  # fmt: skip
        assert part in text, part
    assert [checker.values.count(style) for style in ("gone", "new", "ours")] == [1, 1, 1]
    assert checker.seen.count("svg") == 1


def test_a_page_without_regions() -> None:
    checker = read(page(replace(EXPLANATION, regions=(), layer=None, left_alone=())))
    assert "No MoE region was found. Looked for: " in "".join(checker.text)
    assert "svg" not in checker.seen


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    found = re.findall(r'<text class="[^"]*" x="(.*?)" y="(.*?)" text-anchor="(.*?)">(.*?)<', svg)
    return [_box(float(x), float(y), text, anchor) for x, y, anchor, text in found]


def test_labels_of_a_plot_do_not_overlap() -> None:
    near = [replace(at, flops=(at.flops or 0) * 1.02) for at in REGION.curve]
    many = [
        At(tokens=n, backend="cpu", bytes=1e8 + n, flops=1e8 + n, floor_us=4e3) for n in range(40)
    ]
    regions = [REGION, replace(REGION, curve=tuple(near)), replace(REGION, curve=tuple(many))]
    placed = boxes(roofline(EXPLANATION.device, regions))
    assert len(placed) > 15
    for i, one in enumerate(placed):
        assert one[0] >= 0 and one[2] <= WIDTH and one[1] >= 0 and one[3] <= HEIGHT
        assert not any(_overlap(one, other) for other in placed[i + 1 :])


def test_points_of_a_plot_lie_under_the_roof() -> None:
    svg = roofline(EXPLANATION.device, [REGION])
    lines = [
        tuple(map(float, found))
        for found in re.findall(r'class="roof" x1="(.*?)" y1="(.*?)" x2="(.*?)" y2="(.*?)"', svg)
    ]
    assert len(lines) == 3  # two rates, and the memory's
    top = min(y1 for _, y1, _, _ in lines)
    dots = re.findall(r'class="s0 dot" cx="(.*?)" cy="(.*?)"', svg)
    assert len(dots) == 3
    assert all(LEFT <= float(x) <= WIDTH - RIGHT and float(y) >= top for x, y in dots)
    assert svg.count('class="s0 ring"') == 1
    assert "region 1, 128 tokens on aten: at most 193 GFLOP/s" in svg


def test_a_region_without_products_is_not_plotted() -> None:
    flat = replace(OTHER, curve=(At(tokens=1, backend="cpu", bytes=5.0, flops=0.0, floor_us=1.0),))
    assert roofline(EXPLANATION.device, [flat]) == ""


def test_the_command_line_explains_a_tiny_model(tmp_path: Path, capsys) -> None:
    html, written = tmp_path / "page.html", tmp_path / "found.json"
    files = ["--html", str(html), "--json", str(written)]
    assert (
        main(["explain", "qwen3_moe", "--tiny", "--layers", "1", "--tokens", "1,64", *files]) == 0
    )
    found = Explanation.from_json(written.read_text())
    assert str(found) == capsys.readouterr().out.rstrip("\n")
    assert [len(region.layers) for region in found.regions] == [1]
    assert [at.tokens for at in found.regions[0].at] == [1, 64]
    assert found.regions[0].dtype == "bfloat16"
    text = "".join(read(html.read_text()).text)
    assert found.layer is not None
    for line in (*found.layer.before.splitlines(), *found.layer.after.splitlines()):
        assert line in text
    assert str(found.plan) in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["explain"], "the following arguments are required: MODEL"),
        (["explain", "qwen3_moe", "--tokens", "1,0"], "must be an integer above 0, got '0'"),
        (["explain", "qwen3_moe", "--layers", "x"], "must be an integer above 0, got 'x'"),
        (["explain", "{folder}"], "{folder}: "),
        (["explain", "{folder}/none"], "{folder}/none: there is no such folder"),
        (["explain", "llama", "--tiny"], "llama: LlamaForCausalLM has no experts"),
    ],
)
def test_bad_usage_exits_with_two(words, said, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as exit:
        main([word.format(folder=tmp_path) for word in words])
    assert exit.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m moe_ops") and said.format(folder=tmp_path) in last


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qwen3_moee"], "qwen3_moee: transformers has no such model type, and a hub id names its "
         "owner too, as in Qwen/Qwen3-30B-A3B; did you mean 'qwen3_moe'?"),
        (["zzzzzz"], "zzzzzz: transformers has no such model type, and a hub id names its owner"),
        (["qwen3_moe", "--html", "{folder}/none/x.html"],
         "--html='{folder}/none/x.html': there is no folder '{folder}/none'; make it first"),
        (["qwen3_moe", "--html", "{folder}"], "--html='{folder}' is a folder; give a file in it"),
        (["qwen3_moe", "--json", "{folder}"], "--json='{folder}' is a folder; give a file in it"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_the_work(
    words, said, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_: pytest.fail("began to build"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(SystemExit) as exit:
        main(["explain", *(word.format(folder=tmp_path) for word in words)])
    assert exit.value.code == 2
    (last,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert last == f"python -m moe_ops: error: {said.format(folder=tmp_path)}" or (
        words == ["zzzzzz"] and said in last
    )


def test_a_gpu_that_is_not_there_is_said(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["explain", "qwen3_moe", "--tiny", "--device", "cuda"])
    assert "finds no CUDA GPU here; leave out --device" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_is_full_is_a_line_too(capsys, monkeypatch) -> None:
    monkeypatch.setattr("moe_ops.passes.explain.explain", lambda *args, **options: EXPLANATION)
    with pytest.raises(SystemExit) as exit:
        main(["explain", "qwen3_moe", "--tiny", "--json", "/dev/full"])
    assert exit.value.code == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    from moe_ops.__main__ import build

    config = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, inputs = build(parser().parse_args(["explain", str(tmp_path), "--layers", "2"]))
    assert len(model.model.layers) == 2
    assert model.config.num_experts == 5
    assert inputs["input_ids"].shape == (1, 16)


def test_configs_are_shrunk_inside_too() -> None:
    class Config:
        def __init__(self, **values) -> None:
            self.__dict__.update(values)

        def to_dict(self) -> dict:
            return vars(self)

    inner = Config(num_hidden_layers=3, kinds=["a", "b", "a"], hidden_size=[1, 2], other=7)
    outer = Config(text_config=inner, hidden_size=99)
    shrink(outer, {"hidden_size": 8}, 2)
    assert outer.hidden_size == 8
    assert vars(inner) == {
        "num_hidden_layers": 2, "kinds": ["a", "b"], "hidden_size": [1, 2], "other": 7,
    }  # fmt: skip
