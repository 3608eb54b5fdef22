"""FlashInfer among what `bench` times: our op on its backends, and its function itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from moe_ops import experts
from moe_ops.backends.flashinfer import arguments, cutlass
from moe_ops.bench import cells, contenders, rates
from moe_ops.bench.contenders import Contender
from moe_ops.bench.grid import contender
from moe_ops.quant.config import QuantConfig
from tests.chosen import one_in
from tests.flashinfer.layers import CASE, FORMATS, call_of, stored
from tests.work import Calls

RATES = rates.Rates(copy_tbs=0.03, matmul_tflops=0.1, matmul8_tflops=0.1)
On = Callable[[int, int], None]


def measured(formats: str, *of: Contender) -> list[cells.Cell]:
    weights, inputs = FORMATS[formats]
    grid = cells.Grid(
        layers=[CASE],
        tokens=[24],
        routings=["uniform"],
        contenders=lambda case: of,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        seconds=0.01,
        quant=QuantConfig(weights=weights, inputs=inputs) if weights else None,
    )
    return list(cells.measure(grid, RATES))


@one_in(3, pytest.mark.parametrize("formats", ["bfloat16", "blocks", "mxfp4"]))
def test_it_is_right_and_timed(fake: ModuleType, on: On, formats: str) -> None:
    on(9, 0)
    names = ("flashinfer_cutlass", contenders.DIRECT)
    ours, direct = measured(formats, *(contender(CASE, "cpu", name) for name in names))
    assert ours.wrong == direct.wrong == ""
    assert ours.us and direct.us
    assert ours.ran["experts"] == "flashinfer_cutlass" and direct.ran == {}
    called = {name for name, _ in fake.calls if "fused_moe" in name}
    # FlashInfer allocates the workspace of blocks itself.
    sized = set() if formats == "blocks" else {"cutlass_fused_moe_workspace_size"}
    assert called == {"cutlass_fused_moe"} | sized


def test_what_it_cannot_run_is_said(fake: ModuleType, on: On) -> None:
    on(9, 0)
    names = ("flashinfer_cute_dsl", "flashinfer_cutlass")
    dsl, cutlass = measured("mxfp8", *(contender(CASE, "cpu", name) for name in names))
    assert "the layout 'flashinfer.chunks' is for floats and nvfp4 codes, got mxfp8" in dsl.refused
    assert dsl.us is cutlass.us is None and dsl.wrong == cutlass.wrong == ""
    assert "the layout 'flashinfer.up_gate' is not for mxfp8 codes" in cutlass.refused
    on(8, 0)
    (direct,) = measured("bfloat16", contender(CASE, "cpu", contenders.DIRECT))
    assert "flashinfer_cutlass needs compute capability 9.0, 10.0, 10.3, 12.0 or 12.1, got 8.0" in (
        direct.refused
    )


def test_a_call_that_repeats_does_little_beside_flashinfers(fake: ModuleType, on: On) -> None:
    on(9, 0)
    call = stored(call_of("bfloat16", tokens=1), "flashinfer.up_gate")
    call = replace(call, weights_TK=call.weights_TK.float())
    args = (call.x_TD, call.weights_TK, call.ids_TK, call.w13_EFD, call.w2_EDI)
    to = arguments.routed(call, equal=True)
    launch = cutlass.launch_of(call, to)
    given = {**launch.given, **cutlass.tensors_of(call, to)}

    def ours() -> None:
        experts(*args, layout="flashinfer.up_gate")

    def direct() -> None:
        launch.function(output=torch.empty_like(call.x_TD), **given)

    counts = []
    with torch.no_grad():
        for function in (ours, direct):
            for _ in range(3):  # from the third one on it is only run
                function()
            with Calls() as calls:
                function()
            counts.append(calls.count)
    assert counts[0] - counts[1] <= 30  # it takes 18, and 188 where a call is not known
