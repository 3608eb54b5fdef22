"""Floors, inputs and rotations: what a time is compared with, and what it is a time of."""

from __future__ import annotations

import pytest
import torch

from moe_ops import route
from moe_ops.bench import formats, inputs, rates
from moe_ops.bench.rates import Rates, Work
from moe_ops.planning.layers import ROUTINGS
from moe_ops.testing import BF16, LAYERS, Case

H200 = Rates(copy_tbs=4.2566, matmul_tflops=778.67)
SMALL = Case(name="small", T=1, E=64, K=8, D=32, I=16)


def every_expert(case: Case, T: int) -> torch.Tensor:
    """A routing that touches every expert."""
    return (torch.arange(T)[:, None] * case.K + torch.arange(case.K)) % case.E


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Floors that were published for this device, by rates of which three digits are known.
@pytest.mark.parametrize(
    ("name", "tokens", "floor_us"),
    [
        ("qwen3_30b", 16384, 1588.5),  # by its operations
        ("mixtral_8x7b", 16384, 14826.3),
        ("gpt_oss_20b", 256, 374.8),  # by its bytes
        ("qwen3_30b", 1024, 285.8),
    ],
)
def test_a_floor_is_that_of_the_baseline(name: str, tokens: int, floor_us: float) -> None:
    case = LAYERS[name]
    work = rates.work_of(case, every_expert(case, tokens), itemsize=2)
    assert H200.floor_us(work) == pytest.approx(floor_us, rel=3e-4)
    rounded = Rates.parse("4.26,779")
    assert rounded.floor_us(work) == pytest.approx(floor_us, rel=1e-3)


def test_only_experts_that_are_touched_are_read() -> None:
    case = Case(name="case", T=1, E=8, K=2, D=10, I=3)
    work = rates.work_of(case, torch.tensor([[0, 5], [5, 0], [5, 7]]), itemsize=2)
    assert work.bytes == (3 * (2 * 3 * 10 + 10 * 3) + 3 * 10 + 3 * 10) * 2
    assert work.flops == 3 * 2 * 2 * (2 * 3 * 10 + 10 * 3)


def test_the_mean_of_works() -> None:
    works = [Work(bytes=1, flops=10, eight_bit=True), Work(bytes=2, flops=30, eight_bit=True)]
    assert Work.mean(works) == Work(bytes=1.5, flops=20, eight_bit=True)


def test_bytes_of_a_format_are_those_of_codes_scales_and_zeros() -> None:
    """By hand: three experts with weights of 128 x 64 and 64 x 64."""
    case = Case(name="case", T=1, E=8, K=2, D=64, I=64)
    ids = torch.tensor([[0, 5], [5, 0], [5, 7]])
    values = 128 * 64 + 64 * 64
    each = {
        "int4:1x32:bfloat16": values // 2 + values // 32 * 2,
        "uint4:1x32:bfloat16": values // 2 + values // 32 * (2 + 1),
        "uint4:1x64": values // 2 + values // 64 * (4 + 1),
        "mxfp4": values // 2 + values // 32,
        "float8_e4m3fn:128x128": values + 2 * 4,  # one cut block each
        "float8_e4m3fn:row": values + (128 + 64) * 4,
        "nvfp4": values // 2 + values // 16 + 2 * 4,
        "mxfp6_e3m2": values * 3 // 4 + values // 32,
    }
    for name, nbytes in each.items():
        work = rates.work_of(case, ids, itemsize=2, quant=formats.parse(name))
        assert work.bytes == 3 * nbytes + 2 * 3 * 64 * 2, name
        assert work.flops == 3 * 2 * 2 * values
        made = inputs.make_weights(case, BF16, generator(), formats.parse(name))
        assert made.nbytes == 8 * nbytes, name


def test_inputs_in_8_bits_have_a_rate_of_their_own() -> None:
    quant = formats.parse("float8_e4m3fn:128x128+float8_e4m3fn:1x128")
    case = LAYERS["dsv3_ep8"]
    work = rates.work_of(case, every_expert(case, 16384), itemsize=2, quant=quant)
    with pytest.raises(ValueError, match="not known; give it as the third of --rates"):
        H200.floor_us(work)
    given = Rates.parse("4.26,780,1430")
    assert given.floor_us(work) == pytest.approx(8073.3, rel=1e-4)
    assert str(given) == "copy 4.26 TB/s, matrix product 780 TFLOP/s, in 8 bits 1430"
    weights = rates.work_of(
        case, every_expert(case, 16384), 2, formats.parse("float8_e4m3fn:128x128")
    )
    assert given.floor_us(weights) == pytest.approx(8073.3 * 1430 / 780, rel=1e-4)


def test_a_cpu_has_no_rate_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rates.SIZES, "cpu", (2**16, 32))
    cpu = torch.device("cpu")
    assert not rates.has_8bit_product(cpu)
    assert rates.measure_rates(cpu, torch.float32, eight_bit=True).matmul8_tflops is None


@pytest.mark.parametrize("text", ["", "4.26", "4.26,0", "a,b", "1,2,3,4", "1,2,0", "1,inf", "-1,2"])
def test_rates_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"COPY_TBS,MATMUL_TFLOPS\[,MATMUL8_TFLOPS\]"):
        Rates.parse(text)


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rates.SIZES, "cpu", (2**16, 32))
    found = rates.measure_rates(torch.device("cpu"), torch.float32)
    assert 0 < found.copy_tbs < 100
    assert 0 < found.matmul_tflops < 1000


@pytest.mark.parametrize("routing", ROUTINGS)
def test_logits_give_the_routing_on_any_backend(routing: str) -> None:
    routed = inputs.make_routed(SMALL, 200, routing, BF16, generator())
    assert routed.logits_TE.dtype is BF16
    for backend in route.candidates("cpu"):
        weights, experts = backend.run(route.call(routed.logits_TE, SMALL.K, renormalize=True))
        assert torch.equal(experts.sort().values, routed.ids_TK.sort().values)
        assert torch.allclose(weights.sum(-1), torch.ones(200))
    kth, next_ = routed.logits_TE.float().sort(descending=True).values[:, SMALL.K - 1 :].T[:2]
    assert bool((kth - next_ > 2**-8 * kth.abs().clamp(min=2**-6)).all())


def test_popularity_follows_the_routing() -> None:
    shares = {}
    for routing in ROUTINGS:
        ids = inputs.make_routed(SMALL, 4000, routing, BF16, generator()).ids_TK
        assert all(len(set(row)) == SMALL.K for row in ids[:50].tolist())
        counts = ids.flatten().long().bincount(minlength=SMALL.E).sort(descending=True).values
        shares[routing] = (counts / 4000).tolist()
    mean = SMALL.K / SMALL.E
    assert max(shares["uniform"]) < 1.25 * mean
    # The first of 64 by Zipf's law has 1 / sum(1 / n) = 21 % of single draws.
    assert shares["zipf"][0] > 0.7
    assert shares["zipf"][SMALL.E // 2] < mean


def test_popular_experts_are_the_same_in_every_set() -> None:
    first = [
        inputs.make_routed(SMALL, 2000, "zipf", BF16, generator(seed)).ids_TK.flatten().mode()
        for seed in (1, 2)
    ]
    assert first[0].values == first[1].values


def test_equal_logits_do_not_decide_a_routing() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.5], [0.0, 0.0, -1e-6, -3.0]])
    chosen = torch.tensor([[0, 1], [1, 3]])
    found = inputs.without_tie(logits, chosen)
    assert torch.equal(found.topk(2).indices.sort().values, chosen)
    assert torch.equal(found.gather(1, chosen), logits.gather(1, chosen))


def works(nbytes: float, count: int = 8) -> list[Work]:
    return [Work(bytes=nbytes, flops=1.0)] * count


@pytest.mark.parametrize(
    ("call", "copies", "sets", "cold"),
    [
        (200, 1, 8, True),  # one call moves what three caches hold, and more
        (100, 2, 8, True),
        (63, 3, 6, True),  # six sets, so that the last copy is followed by the first
        (10, 8, 8, False),  # too small for eight copies
    ],
)
def test_weights_turn_until_the_cache_has_lost_them(
    call: int, copies: int, sets: int, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "cache_bytes", lambda device: 60)
    monkeypatch.setattr(inputs, "free_bytes", lambda device: 10**9)
    found = inputs.rotate(works(call), 1000, torch.device("cpu"))
    assert found == inputs.Rotation(copies=copies, sets=sets, cold=cold)


def test_memory_bounds_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "cache_bytes", lambda device: 60)
    monkeypatch.setattr(inputs, "free_bytes", lambda device: 5000)
    found = inputs.rotate(works(63), 1000, torch.device("cpu"))
    assert found == inputs.Rotation(copies=2, sets=8, cold=False)
    two = inputs.rotate(works(63, count=2), 1000, torch.device("cpu"), kept=4)
    assert two == inputs.Rotation(copies=2, sets=2, cold=False)
