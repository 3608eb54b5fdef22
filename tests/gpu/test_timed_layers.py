"""`bench layer --ours moe` and `bench op` on a CUDA GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
import torch

from moe_ops.bench import cells, contenders, formats, humming, inputs, rates, stages, step
from moe_ops.testing import BF16, Case

pytestmark = pytest.mark.gpu

CASE = Case(name="small", T=1, E=32, K=4, D=512, I=256)
RATES = rates.Rates(copy_tbs=2.0, matmul_tflops=500.0, matmul8_tflops=1000.0)
CUDA = torch.device("cuda")


def measure(
    *of: contenders.Contender, tokens: Sequence[int] = (1, 50), format: str = ""
) -> list[cells.Cell]:
    grid = cells.Grid(
        layers=[CASE],
        tokens=tokens,
        routings=["uniform", "zipf"],
        contenders=lambda case: of,
        dtype=BF16,
        device=CUDA,
        quant=formats.parse(format) if format else None,
    )
    return list(cells.measure(grid, RATES))


def test_backends_and_transformers_are_checked_and_timed() -> None:
    found = measure(
        contenders.ours(CASE, "cuda"),
        contenders.ours(CASE, "cuda", "aten", "aten"),
        contenders.stock(CASE, "grouped_mm"),
    )
    assert len(found) == 2 * 2 * 3
    for cell in found:
        assert not cell.wrong
        assert cell.error is not None and 0 < cell.error < 0.01
        assert cell.us and cell.low_us and cell.high_us and cell.low_us <= cell.us <= cell.high_us
    assert {cell.ran.get("expert_gemm") for cell in found if cell.contender == "aten"} == {"aten"}


def test_a_result_that_a_replay_does_not_compute_is_wrong() -> None:
    ours = contenders.ours(CASE, "cuda")
    kept: dict[int, torch.Tensor] = {}

    def remember(weights: inputs.Weights, routed: inputs.Routed) -> torch.Tensor:
        key = routed.x_TD.data_ptr()
        if key not in kept:
            kept[key] = ours.call(weights, routed)
        return kept[key]

    cheat = contenders.Contender(name="cheat", call=remember)
    found = measure(cheat, tokens=(4,))
    assert all(cell.us is None and "are NaN" in cell.wrong for cell in found)


@pytest.mark.parametrize(
    "format",
    [
        "int4:1x128:bfloat16", "uint4:1x64:bfloat16", "mxfp4", "float8_e4m3fn:128x128",
        "float8_e4m3fn:128x128+float8_e4m3fn:1x128",
    ],
)  # fmt: skip
def test_formats_are_checked_and_timed(format: str) -> None:
    found = measure(contenders.ours(CASE, "cuda"), tokens=(16, 64), format=format)
    low, high = (0.02, 0.06) if "+" in format else (0.0, 0.01)
    for cell in found:
        assert not cell.wrong
        assert cell.us and cell.error is not None and low < cell.error < high


@pytest.mark.skipif(
    importlib.util.find_spec("humming") is None, reason="humming-kernels is not installed"
)
@pytest.mark.parametrize("format", humming.FORMATS)
def test_humming_is_checked_and_timed(format: str) -> None:
    found = measure(humming.humming(CASE), tokens=(1, 50), format=format)
    low, high = (0.02, 0.07) if "+" in format else (0.0, 0.01)
    for cell in found:
        assert not cell.wrong and not cell.refused
        assert cell.us and cell.error is not None and low < cell.error < high


def test_stages_are_checked_and_timed() -> None:
    found = list(stages.measure([CASE], [1, 50], BF16, CUDA, RATES))
    assert {"route", "dispatch", "expert_gemm 13", "combine"} <= {cell.stage for cell in found}
    assert not [cell.wrong for cell in found if cell.wrong]
    assert all(cell.us is not None and cell.us > 0 for cell in found)


def test_rates_of_this_device_are_those_of_a_gpu() -> None:
    found = rates.measure_rates(CUDA, BF16)
    assert 0.2 < found.copy_tbs < 20
    assert 20 < found.matmul_tflops < 5000
    assert found.matmul8_tflops is None


def test_the_rate_in_8_bits_is_above_that_in_16() -> None:
    if not rates.has_8bit_product(CUDA):
        pytest.skip("this GPU has no product of float8")
    # Of several, since another process may take the GPU during one of the two products.
    ratios = []
    for _ in range(5):
        found = rates.measure_rates(CUDA, BF16, eight_bit=True)
        assert found.matmul8_tflops is not None
        ratios.append(found.matmul8_tflops / found.matmul_tflops)
        if 1.2 < ratios[-1] < 3:
            return
    pytest.fail(f"products in 8 bits run at {ratios} times the rate in 16, not once at 1.2 to 3")


@pytest.mark.usefixtures("overlapping")
def test_the_launches_of_a_step() -> None:
    found = step.measure("qwen3_30b", 3, 256, CUDA)
    names = [launch.name for launch in found.launches]
    hopper = torch.cuda.get_device_capability() == (9, 0)
    attention = "rope_attention_short" if hopper else "rope_attention_kernel"
    want = ["tiny_up", "tiny_down", "linears_one", attention]
    assert names == [*want, "linears_one", "linears_one", "route_kernel"]
    ends = [launch.end_us for launch in found.launches]
    assert ends == sorted(ends) and 0 < found.us < 1000
