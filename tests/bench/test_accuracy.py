"""The accuracy table compares what it says with what it says."""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from moe_ops.bench import __main__ as cli
from moe_ops.bench import accuracy
from moe_ops.bench.accuracy import Accuracy, Base
from moe_ops.hf import optimize
from moe_ops.kernels.cpu import quantized as kernels
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import Case

TINY = Case(name="tiny", T=48, E=4, K=2, D=128, I=128)  # blocks of 128 fit


@pytest.fixture(scope="module")
def base() -> Base:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "PROMPTS", (4, 16))
        return accuracy.make_base(TINY, seed=0)


def test_the_base_is_the_definition_in_float64(base: Base) -> None:
    first = base.model.model.layers[0].mlp.experts
    x = base.x_TD.double()
    for t in range(5):
        want = torch.zeros(TINY.D, dtype=torch.float64)
        for e, weight in zip(base.ids_TK[t].tolist(), base.weights_TK[t], strict=True):
            gate, up = (first.gate_up_proj[e].double() @ x[t]).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            want += weight * (first.down_proj[e].double() @ h)
        torch.testing.assert_close(base.want_TD[t].double(), want, rtol=1e-5, atol=1e-6)


def test_the_base_has_16_bit_weights_and_predicts_something(base: Base) -> None:
    assert base.x_TD.dtype == torch.bfloat16
    for p in base.model.parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, p.bfloat16().float())
    uniform = math.log(accuracy.VOCABULARY)
    assert 0.2 * uniform < base.entropy < 0.7 * uniform


def test_tokens_and_norms_have_outlier_channels(base: Base) -> None:
    norms = base.x_TD.float().norm(dim=0)
    assert int((norms > 4 * norms.median()).sum()) == 1  # of 128
    scale = base.model.model.layers[0].post_attention_layernorm.weight
    assert float(scale.max() / scale.median()) == pytest.approx(8, rel=0.01)
    assert float(base.model.model.norm.weight.max()) == 1


def test_kl_is_that_of_the_definition_and_none_to_the_same_model(base: Base) -> None:
    p, q = (
        torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log(),
        torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(),
    )
    want = (0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)) / 2
    assert accuracy.kl(p, q) == pytest.approx(want, rel=1e-6)
    same = accuracy.run_model(optimize(copy.deepcopy(base.model)), base.prompts)
    assert accuracy.kl(base.log_probs, same.log_probs_BSV) == 0


def test_16_bits_cost_their_rounding(base: Base) -> None:
    none = accuracy.accuracy(base, "none", "", "")
    assert none.bits_per_weight == 16
    assert 2**-10 < none.layer_error < 2**-7  # a few roundings to 8 bits of mantissa
    assert 0 < none.kl_nats < 0.05


def test_fewer_bits_cost_more(base: Base) -> None:
    formats = {"mxfp4_w4a16": "mxfp4", "mxfp6_e3m2_w6a16": "mxfp6_e3m2", "mxfp8_w8a16": "mxfp8"}
    found = [accuracy.accuracy(base, scheme, w, "") for scheme, w in formats.items()]
    assert [a.bits_per_weight for a in found] == [4.25, 6.25, 8.25]
    four, six, eight = (a.layer_error for a in found)
    assert four > 1.5 * six > 1.5**2 * eight > 0
    four, six, eight = (a.kl_nats for a in found)
    assert four > 1.5 * max(six, eight) > 0  # so few tokens do not tell six bits from eight


def test_quantized_inputs_cost_more_than_16_bit_ones(base: Base) -> None:
    plain = accuracy.accuracy(base, "mxfp4_w4a16", "mxfp4", "")
    both = accuracy.accuracy(base, "mxfp4_w_mxfp4_a", "mxfp4", "mxfp4")
    assert both.bits_per_weight == plain.bits_per_weight
    assert both.layer_error > 1.2 * plain.layer_error
    assert both.kl_nats > plain.kl_nats


def test_kernels_are_measured_beside_the_definition(base: Base) -> None:
    found = accuracy.accuracy(base, "int4_w4a16", "int4:1x32", "")
    assert found.kernel_layer_error == pytest.approx(found.layer_error, rel=0.01)
    assert found.kernel_kl_nats == pytest.approx(found.kl_nats, rel=1e-3)
    assert not found.refusal
    other = accuracy.accuracy(base, "nvfp4_w4a16", "nvfp4", "")
    assert (other.kernel_layer_error, other.kernel_kl_nats) == (None, None)
    assert other.refusal.startswith("needs scales of float32, ") or "global" in other.refusal


def test_the_first_backend_that_takes_the_formats_gives_the_figures(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In models of bfloat16, as a GPU's kernels are measured."""
    both = replace(accuracy.KERNELS["cuda"], backends=("triton.rows", "cpu"))
    monkeypatch.setitem(accuracy.KERNELS, "cpu", both)
    found = accuracy.accuracy(base, "int4_w4a16", "int4:1x32", "")
    assert found.bits_per_weight == 5
    assert found.kernel_layer_error == pytest.approx(found.layer_error, rel=0.01)
    assert found.kernel_kl_nats == pytest.approx(found.kl_nats, rel=0.2)
    assert not found.refusal
    other = accuracy.accuracy(base, "nvfp4_w4a16", "nvfp4", "")
    assert other.kernel_layer_error is None
    assert other.refusal == "needs a tensor on cuda, got cpu"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("scheme", "formats"),
    [
        ("none", ("", "")),
        ("int4_w4a16", ("int4:1x32", "")),
        ("mxfp4_w_mxfp8_a", ("mxfp4", "mxfp8")),
        ("fp8_w8a8", ("float8_e4m3fn:row",) * 2),
    ],
)
def test_kernels_of_a_gpu_give_the_definition(
    scheme: str, formats: tuple[str, str], base: Base
) -> None:
    found = accuracy.accuracy(base.to("cuda"), scheme, *formats)
    assert not found.refusal and not found.wrong
    assert found.kernel_layer_error == pytest.approx(found.layer_error, rel=0.05)


@pytest.mark.parametrize("rows", ["one", "all"])
def test_a_kernel_that_differs_is_no_figure(
    rows: str, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kernels.experts

    def wrong(x_TD: Tensor, *args: Any) -> Tensor:
        out = right(x_TD, *args)
        out[: 1 if rows == "one" else None] *= 1.2
        return out

    monkeypatch.setattr(kernels, "experts", wrong)
    found = accuracy.accuracy(base, "int4_w4a16", "int4:1x32", "")
    assert found.wrong.startswith("the layer of int4_w4a16 int4:1x32 by cpu: off by")
    assert (found.kernel_layer_error, found.kernel_kl_nats, found.refusal) == (None, None, "")
    assert f"WRONG: {found.wrong}" in accuracy.table([found])


def run_of(chances: list[float], ids: list[int]) -> accuracy.Run:
    """Of a sequence of tokens, each with a chance of the first of two words and an expert."""
    log_probs = torch.tensor([[[a, 1 - a] for a in chances]]).double().log()
    return accuracy.Run(log_probs_BSV=log_probs, ids_LTK=torch.tensor(ids).view(1, -1, 1))


def test_models_are_compared_by_logits_before_experts_change() -> None:
    whole, other = accuracy.SAME_CODES, accuracy.FEW_CODES
    want = run_of([0.6] * 20, [1] * 20)
    off, far = run_of([0.601] * 20, [1] * 20), run_of([0.7] + [0.6] * 19, [1] * 20)
    accuracy.check_model(off, want, other, "this")
    with pytest.raises(AssertionError, match="the model of this: off by"):
        accuracy.check_model(off, want, whole, "this")
    with pytest.raises(AssertionError, match="the model of this: off by"):
        accuracy.check_model(far, want, other, "this")
    flipped = run_of([0.6] * 18 + [0.9] * 2, [1] * 18 + [2, 1])
    accuracy.check_model(flipped, want, other, "this")
    with pytest.raises(AssertionError, match=r"this: 95\.0% of the tokens take .* least 100%"):
        accuracy.check_model(flipped, want, whole, "this")
    with pytest.raises(AssertionError, match=r"this: 85\.0% of the tokens take .* least 90%"):
        accuracy.check_model(run_of([0.6] * 20, [1] * 17 + [2] * 3), want, other, "this")


def test_codes_on_an_edge_may_be_others() -> None:
    """A few values far off are right then, but not half of the format's error."""
    want = torch.randn(64, 256).bfloat16()
    flipped = want.clone()
    flipped[3, 5] += 0.05 * want.abs().max()
    given = (want, "int8:row", accuracy.OTHER_CODES, 0.047, "this")
    accuracy.check_layer(flipped, *given)
    with pytest.raises(AssertionError, match="the layer of this: off by"):
        accuracy.check_layer(flipped, want, "int8:row", accuracy.FEW_CODES, 0.047, "this")
    flipped[3, 5] = want.abs().max() * 3
    with pytest.raises(AssertionError, match=r"the layer of this: (off by|\d)"):
        accuracy.check_layer(flipped, *given)
    noisy = want + 0.5 * 0.047 * torch.randn(64, 256)
    with pytest.raises(AssertionError, match=r"this: 0\.02\d* from the definition, whose own"):
        accuracy.check_layer(noisy.bfloat16(), *given)


def test_the_model_is_left_as_it_is(base: Base) -> None:
    first, again = (accuracy.accuracy(base, "mxfp8", "mxfp8", "mxfp8") for _ in range(2))
    assert first == again


def test_every_scheme_is_there_in_the_pairs_that_fit() -> None:
    found = list(accuracy.pairs())
    assert {scheme for scheme, _, _ in found} == set(SCHEMES)
    assert len(found) == len(set(found))
    fp8 = [(w.partition(":")[2], x.partition(":")[2]) for s, w, x in found if s == "fp8_w8a8"]
    assert ("128x128", "1x128") in fp8
    assert ("128x128", "row") not in fp8
    assert list(accuracy.pairs(["mxfp8", "none"])) == [("none", "", ""), ("mxfp8",) * 3]
    with pytest.raises(ValueError, match="scheme 'int3' is unknown; choose from none, fp8_w8a8"):
        list(accuracy.pairs(["mxfp8", "int3"]))


def test_formats_that_do_not_fit_the_model_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "PROMPTS", (1, 4))
    small = accuracy.make_base(Case(name="small", T=4, E=2, K=1, D=64, I=64), seed=0)
    with pytest.raises(ValueError, match="int8_w8a16 does not fit the model: model"):
        accuracy.accuracy(small, "int8_w8a16", "int8:1x128", "")


def test_table_text() -> None:
    made = [
        ("none", "", "", 16.0, 0.0038, 0.0061, 0.0037, 0.00605, ""),
        ("mxfp8", "mxfp8", "mxfp8", 8.25, 0.0831, 0.3, None, None, "has none"),
    ]
    names = tuple(Accuracy.__dataclass_fields__)
    found = [Accuracy(**dict(zip(names, (*values, ""), strict=True))) for values in made]
    assert_expected_inline(
        accuracy.table(found),
        """\
scheme                    weights               inputs                bits layer error  KL, nats kernel error  KL, nats
none                      16-bit                16-bit               16.00      0.0038    0.0061       0.0037    0.0060
mxfp8                     mxfp8                 mxfp8                 8.25      0.0831    0.3000            -         -""",  # noqa: E501
    )


def test_the_command_prints_the_table_and_writes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(accuracy, "CASE", TINY)
    monkeypatch.setattr(accuracy, "PROMPTS", (1, 8))
    figures, schemes = tmp_path / "figures.json", ["mxfp4_w4a16", "mxfp8"]
    options = ["--schemes", "mxfp4_w4a16,mxfp8", "--seed", "3", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["bench", "accuracy", *options])
    cli.main()
    printed = capsys.readouterr()
    assert printed.out.startswith("16-bit model: mean entropy ")
    assert [line.split()[0] for line in printed.out.splitlines()[2:]] == schemes
    assert printed.err.splitlines()[-1] == "mxfp8 mxfp8 mxfp8"
    written = json.loads(figures.read_text())
    assert written["model"]["seed"] == 3
    assert written["model"]["layer"]["D"] == TINY.D
    assert [row["scheme"] for row in written["accuracy"]] == schemes
    assert [bool(row["refusal"]) for row in written["accuracy"]] == [False, True]
    assert {"command", "date", "commit", "torch", "transformers", "processor"} < set(written)


def test_the_command_refuses_unknown_schemes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["accuracy", "--schemes", "mxfp8,int3"])
    assert "argument --schemes: 'int3' is none of none, fp8_w8a8" in capsys.readouterr().err
