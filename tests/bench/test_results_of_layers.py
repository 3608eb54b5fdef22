"""What follows from a run of `bench layer`, its file, its tables and its picture."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from moe_ops.bench import __main__ as cli
from moe_ops.bench import formats, plot, report, tables
from moe_ops.bench.rates import Rates, work_of
from moe_ops.bench.results import Skew, dump, load, read_peers, write
from moe_ops.testing import LAYERS
from tests.bench.runs import cell, results

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers" / "h200_bf16.json"
# Names and tokens, and the layers that were not measured.
PEERS_OF_FORMATS = {
    "h200_float8_blocks": ({"vllm", "flashinfer"}, 16384, {"gpt_oss_20b"}),
    "h200_float8_rows": ({"vllm"}, 4096, {"olmoe", "qwen3_next"}),
    "h200_int8_rows": ({"vllm"}, 4096, {"olmoe", "qwen3_next"}),
    "h200_int4": ({"marlin"}, 4096, {"gpt_oss_20b", "olmoe", "qwen3_next"}),
    "h200_mxfp4": ({"marlin", "triton_kernels"}, 4096, {"olmoe", "qwen3_next"}),
}


def text(written: str) -> str:
    """As expecttest can hold it."""
    return written.replace("µ", "u")


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(path, dump(results()))
    assert load(path) == results()
    without = replace(results(), given=None, peers={})
    write(path, dump(without))
    assert load(path) == without
    rates = Rates(copy_tbs=4.0, matmul_tflops=800.0, matmul8_tflops=1400.0)
    more = {"format": "mxfp4", "backend": "aten", "seconds": 0.1, "rates": rates}
    quantized = replace(results(), **more, earlier_rates=[results().rates])
    write(path, dump(quantized))
    assert load(path) == quantized


def test_a_file_from_before_there_were_formats_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    values = dump(results())
    for name in ("format", "backend", "seconds", "earlier_rates"):
        del values[name]
    del values["rates"]["matmul8_tflops"], values["given"]["matmul8_tflops"]
    write(path, values)
    assert load(path) == results()


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(path, dump(results()) | {"schema": 0})
    with pytest.raises(ValueError, match="schema 0, this reads 1"):
        load(path)


def test_bands_are_geometric_means_over_layers() -> None:
    # 10/12.5 and 10/20; a wrong cell is in no mean. The given rates are twice those of the run.
    shares = [(0.8 * 0.5) ** 0.5, 0.5, 10 / 15, 8 / 12]
    found = results().bands()
    assert [(b.routing, b.low, b.high, b.cells) for b in found] == [
        ("uniform", 1, 4, 2), ("uniform", 16, 256, 1), ("zipf", 1, 4, 1), ("zipf", 16, 256, 1),
    ]  # fmt: skip
    assert [b.share for b in found] == pytest.approx(shares)
    assert [b.given_share for b in found] == pytest.approx([share / 2 for share in shares])
    assert {b.given_share for b in replace(results(), given=None).bands()} == {None}


def test_skew_is_compared_where_the_floors_are_equal() -> None:
    one, many = results().skews()
    assert one == Skew(layer="tiny", tokens=1, routing="zipf", time_ratio=1.2, floor_ratio=1.0)
    assert one.same_work and not many.same_work
    assert many.floor_ratio == 0.8


def test_peers_are_compared_at_uniform_routing() -> None:
    found = results()
    assert found.best_peer(found.cells[0]) == ("one", 13.0)
    assert found.best_peer(found.cells[2]) is None  # zipf
    assert [(c.tokens, *peer) for c, *peer in found.slower()] == [(64, "one", 19.0)]


def test_peers_are_compared_by_the_work_that_was_drawn() -> None:
    """Given the floors of the peers' routings: 64 tokens of theirs used fewer experts."""
    found = replace(results(), peer_floors={"tiny": {1: 5.0, 64: 4.0}})
    first, many = found.cells[0], found.cells[4]
    assert found.times_as_fast(first) == 13.0 / 12.5
    assert found.times_as_fast(many) == pytest.approx(5 / 4 * 19 / 20)
    assert found.slower() == []
    assert "0 of 2 cells, as multiples of their floors" in tables.summary(found)


def test_what_ran_beside_ours_is_a_control_of_the_peers() -> None:
    assert results().controls() == {"grouped_mm": [30.0 / 40.0]}
    assert replace(results(), peers={}).controls() == {}


def test_the_peers_of_the_h200_are_every_cell_of_the_target() -> None:
    peers, floors = read_peers(PEERS)
    assert peers.keys() == LAYERS.keys() == floors.keys()
    for name, by_tokens in peers.items():
        assert list(by_tokens) == [1, 4, 16, 64, 256, 1024, 4096, 16384] == list(floors[name])
        names = {"vllm", "grouped_mm"} | ({"triton_kernels"} if name != "qwen3_next" else set())
        assert all(times.keys() == names for times in by_tokens.values())
    assert min(peers["qwen3_30b"][1024].items(), key=lambda i: i[1]) == ("triton_kernels", 361.7)
    assert json.loads(PEERS.read_text())["conditions"]


@pytest.mark.parametrize("name", PEERS_OF_FORMATS)
def test_the_peers_of_formats(name: str) -> None:
    path = ROOT / "benchmarks" / "peers" / f"{name}.json"
    names, most, without = PEERS_OF_FORMATS[name]
    peers, floors = read_peers(path)
    assert peers.keys() == LAYERS.keys() - without == floors.keys()
    for layer, by_tokens in peers.items():
        assert list(by_tokens) == [4**i for i in range(8) if 4**i <= most] == list(floors[layer])
        alone = names - {"marlin"} if layer == "gpt_oss_20b" else names
        assert all(times.keys() == alone for times in by_tokens.values())
        for tokens, times in by_tokens.items():
            assert floors[layer][tokens] < min(times.values())
    assert json.loads(path.read_text())["conditions"]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("h200_float8_blocks", "float8_e4m3fn:128x128+float8_e4m3fn:1x128"),
        ("h200_float8_rows", "float8_e4m3fn:row+float8_e4m3fn:row"),
        ("h200_int8_rows", "int8:row+int8:row"),
        ("h200_int4", "int4:1x128:bfloat16"),
        ("h200_mxfp4", "mxfp4"),
    ],
)
def test_floors_of_peers_are_ours_where_the_routing_leaves_no_choice(
    name: str, format: str
) -> None:
    """A token uses K experts, and 1024 of them use all."""
    _, floors = read_peers(ROOT / "benchmarks" / "peers" / f"{name}.json")
    for layer, by_tokens in floors.items():
        case = LAYERS[layer]
        for tokens in (1, 1024):
            ids = torch.arange(tokens * case.K).reshape(tokens, case.K) % case.E
            work = work_of(case, ids, 2, formats.parse(format))
            floor = Rates.parse("4.26,780,1430").floor_us(work)
            assert floor == pytest.approx(by_tokens[tokens], rel=2e-3, abs=0.051)


def test_a_file_without_times_is_no_file_of_peers(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match='has no "us"'):
        read_peers(path)


def test_the_table_of_a_layer() -> None:
    assert_expected_inline(
        text(tables.layer_table(results(), "tiny")),
        """\
tiny: E=8 K=2 D=64 I=32, bfloat16
backend                tokens  routing    us  TB/s  TFLOP/s  floor us  % of floor  % of given  x vs grouped_mm  best peer us  x vs peer
route:cpu experts:cpu       1  uniform  12.5   3.2      0.8      10.0        80.0        40.0            2.00x      one 13.0      1.04x
route:cpu experts:cpu       1     zipf  15.0  2.67    0.667      10.0        66.7        33.3            wrong
route:cpu experts:cpu      64  uniform  20.0     2       32      10.0        50.0        25.0            1.50x      one 19.0    < 0.95x
route:cpu experts:cpu      64     zipf  12.0  2.67     42.7       8.0        66.7        33.3            2.50x
< slower than the best peer""",  # noqa: E501
    )


def test_the_table_of_a_layer_that_is_too_small_and_wrong() -> None:
    found = replace(results(), given=None, peers={})
    assert_expected_inline(
        text(tables.layer_table(found, "small")),
        """\
small: E=16 K=2 D=64 I=32, bfloat16
backend                tokens  routing     us  TB/s  TFLOP/s  floor us  % of floor  x vs grouped_mm
route:cpu experts:cpu       1  uniform  ~20.0     2      0.5      10.0        50.0
route:cpu experts:cpu      64  uniform  WRONG                     10.0
~ some weights may have come from the cache: the layer is too small""",
    )


def test_the_summary() -> None:
    assert_expected_inline(
        text(tables.summary(results())),
        """\
floor / time, geometric mean of 2 cells, uniform, 1 to 4 tokens: 63.2 %, 31.6 % by given rates
floor / time, geometric mean of 1 cells, uniform, 16 to 256 tokens: 50.0 %, 25.0 % by given rates
floor / time, geometric mean of 1 cells, zipf, 1 to 4 tokens: 66.7 %, 33.3 % by given rates
floor / time, geometric mean of 1 cells, zipf, 16 to 256 tokens: 66.7 %, 33.3 % by given rates
zipf / uniform where floors are equal, 1 cells: at most 1.20x (tiny, 1 tokens)
slower than the best peer in 1 of 2 cells
  tiny at 64 (one 19.0 us, ours 20.0: 0.950x)
grouped_mm in this run / in the file of peers, 1 cells: geometric mean 0.75, 0.75 to 0.75
WRONG, not timed: grouped_mm on tiny, 1 tokens zipf: AssertionError: set 0: relative error 0.1
WRONG, not timed: moe_ops on small, 64 tokens uniform: AssertionError: set 0: relative error 0.1""",
    )


def test_the_section_of_a_document() -> None:
    assert_expected_inline(
        text(report.section(results())),
        """\
One Made-up Device, bfloat16, torch 2.11.0; copy 4 TB/s, matrix product 800 TFLOP/s:

    python -m moe_ops.bench layer --layer tiny,small

Uniform routing: us (% of floor, times as fast as the best peer).

| tokens | tiny | small |
| --- | --- | --- |
| 1 | 12.5 (80 %, 1.04) | 20.0 (50 %) |
| 64 | 20.0 (50 %, 0.95) | wrong |

`grouped_mm` took 0.75 times as long as it did among the peers, 0.75 to 0.75.

| tokens | routing | cells | floor / time, geometric mean | by 8 TB/s, 900 TFLOP/s |
| --- | --- | --- | --- | --- |
| 1 to 4 | uniform | 2 | 63.2 % | 31.6 % |
| 16 to 256 | uniform | 1 | 50.0 % | 25.0 % |
| 1 to 4 | zipf | 1 | 66.7 % | 33.3 % |
| 16 to 256 | zipf | 1 | 66.7 % | 33.3 % |

Zipf's law against uniform routing, in the 1 cells where the floors are equal.

| tokens | cells | most zipf / uniform | in |
| --- | --- | --- | --- |
| 1 | 1 | 1.20 | tiny |""",
    )


def test_first_calls_are_those_of_ours() -> None:
    firsts = [(1, "", 2.5), (64, "", 4.0), (1, "grouped_mm", 30.0)]
    cells = [replace(cell("tiny", n, "uniform", 9.0, name=w), first_s=s) for n, w, s in firsts]
    cells.append(cell("small", 1, "uniform", 9.0))
    written = report.section(replace(results(), cells=cells))
    assert_expected_inline(
        written[written.index("The first call") :],
        """\
The first call of each cell, with what was compiled for it, in seconds.

| layer | longest | at tokens | all cells |
| --- | --- | --- | --- |
| tiny | 4.0 | 64 | 6.5 |""",
    )


def test_a_format_is_named_with_the_rate_that_its_inputs_have() -> None:
    found = replace(
        results(),
        format="float8_e4m3fn:128x128+float8_e4m3fn:1x128",
        rates=Rates(copy_tbs=4.0, matmul_tflops=800.0, matmul8_tflops=1400.0),
        given=Rates(copy_tbs=8.0, matmul_tflops=900.0, matmul8_tflops=1430.0),
    )
    written = report.section(found)
    assert written.startswith(
        "One Made-up Device, bfloat16, weights in float8_e4m3fn:128x128, inputs in "
        "float8_e4m3fn:1x128, torch 2.11.0; copy 4 TB/s, matrix product 800 TFLOP/s, in 8 bits "
        "1400:\n\n    python"
    )
    assert "by 8 TB/s, 1430 TFLOP/s" in written
    weights = replace(found, format="float8_e4m3fn:128x128")
    assert "by 8 TB/s, 900 TFLOP/s" in report.section(weights)
    assert "bfloat16, weights in float8_e4m3fn:128x128, torch" in report.section(weights)


def test_each_command_of_several_is_a_line() -> None:
    written = report.section(replace(results(), command="one --layer a\ntwo --layer b"))
    assert "TFLOP/s:\n\n    one --layer a\n    two --layer b\n\nUniform" in written


def test_without_skew_and_peers_a_section_has_no_word_of_them() -> None:
    alone = replace(results(), cells=[cell("tiny", 1, "uniform", 12.5)], peers={})
    written = report.section(alone)
    assert "12.5 (80 %)" in written
    assert not any(word in written for word in ("Zipf", "peer", "first call"))


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="pip install torch-moe-ops[bench]")
    path = tmp_path / "plot.png"
    plot.draw(results(), path)
    height, width, _ = image.imread(path).shape
    assert width == 1600 and height > 800
    assert image.imread(path)[..., :3].std() > 0.05  # something is on it


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"pip install 'torch-moe-ops\[bench\]'"):
        plot.draw(results(), Path("unused.png"))


def test_a_file_is_printed_as_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "results.json"
    write(path, dump(replace(results(), cells=results().cells[:3])))
    monkeypatch.setattr(sys, "argv", ["bench", "report", str(path)])
    cli.main()
    assert capsys.readouterr().out.startswith("One Made-up Device, bfloat16, torch 2.11.0;")
