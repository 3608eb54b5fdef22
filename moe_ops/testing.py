"""Cases, tolerances and comparisons that tests and benchmarks share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The sizes of one Mixture-of-Experts layer and the number of tokens it sees."""

    name: str
    T: int
    E: int
    K: int
    D: int
    I: int  # noqa: E741  (the legend's letter for the expert width)


# Small enough for the CPU; odd sizes and degenerate ones included.
CASES = (
    Case(name="plain", T=16, E=8, K=2, D=64, I=32),
    Case(name="one_token", T=1, E=8, K=2, D=64, I=32),
    Case(name="odd", T=13, E=5, K=3, D=72, I=40),
    Case(name="odd_unaligned", T=7, E=6, K=2, D=33, I=17),
    Case(name="no_tokens", T=0, E=4, K=2, D=32, I=16),
    Case(name="one_expert", T=9, E=1, K=1, D=32, I=16),
    Case(name="every_expert", T=6, E=4, K=4, D=32, I=16),
    Case(name="many_experts", T=3, E=64, K=8, D=32, I=16),
    Case(name="many_rows", T=70, E=4, K=2, D=48, I=24),
)

# Where kernels are tested: without a GPU, Triton's run in its interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Arguments of `activate`: every kind, both layouts, with and without a gate and a clamp.
GPT_OSS: dict[str, Any] = {"interleaved": True, "alpha": 1.702, "limit": 1.5, "up_shift": 1.0}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu": {"kind": "gelu"},
    "gelu_tanh": {"kind": "gelu_tanh"},
    "relu2": {"kind": "relu2"},
    "interleaved": {"interleaved": True},
    "limit": {"limit": 0.5},
    "gpt_oss": GPT_OSS,
    "ungated_silu": {"gated": False},
    "ungated_relu2": {"kind": "relu2", "gated": False},
    "ungated_limit": {"gated": False, "limit": 0.5, "alpha": 1.702},
}

# Layers of published models, for benchmarks.
LAYERS = {
    "qwen3_30b": Case(name="qwen3_30b", T=1, E=128, K=8, D=2048, I=768),
    "mixtral_8x7b": Case(name="mixtral_8x7b", T=1, E=8, K=2, D=4096, I=14336),
    "olmoe": Case(name="olmoe", T=1, E=64, K=8, D=2048, I=1024),
    "qwen3_next": Case(name="qwen3_next", T=1, E=512, K=10, D=2048, I=512),
    "gpt_oss_20b": Case(name="gpt_oss_20b", T=1, E=32, K=4, D=2880, I=2880),
    # One of eight expert-parallel ranks with eight local choices a token: a dense worst case.
    "dsv3_ep8": Case(name="dsv3_ep8", T=1, E=32, K=8, D=7168, I=2048),
}


@dataclass(frozen=True, slots=True)
class Tol:
    """How far a result may lie from the float32 reference: relative to the largest magnitude."""

    rel: float
    why: str


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

TOL: dict[tuple[str, torch.dtype], Tol] = {
    ("route", F32): Tol(1e-6, "one softmax in another order of summation"),
    ("route", BF16): Tol(4e-3, "weights rounded once to 8 bits of mantissa"),
    ("route", F16): Tol(1e-3, "weights rounded once to 11 bits of mantissa"),
    ("route_recording", F32): Tol(1e-6, "as `route`"),
    ("route_recording", BF16): Tol(4e-3, "as `route`"),
    ("route_recording", F16): Tol(1e-3, "as `route`"),
    ("route_replaying", F32): Tol(1e-6, "as `route`"),
    ("route_replaying", BF16): Tol(4e-3, "as `route`"),
    ("route_replaying", F16): Tol(1e-3, "as `route`"),
    ("quantize", F32): Tol(0.0, "the definition is exact"),
    ("quantize", BF16): Tol(0.0, "the definition is exact"),
    ("quantize", F16): Tol(0.0, "the definition is exact"),
    ("dispatch", F32): Tol(0.0, "rows are copied"),
    ("dispatch", BF16): Tol(0.0, "rows are copied"),
    ("dispatch", F16): Tol(0.0, "rows are copied"),
    ("expert_loads", F32): Tol(0.0, "integers"),
    ("expert_loads", BF16): Tol(0.0, "integers"),
    ("expert_loads", F16): Tol(0.0, "integers"),
    ("expert_gemm", F32): Tol(2e-6, "float32 sums of up to a few thousand terms in another order"),
    ("expert_gemm", BF16): Tol(8e-3, "one rounding after a float32 sum, either way at a tie"),
    ("expert_gemm", F16): Tol(1e-3, "one rounding after a float32 sum, either way at a tie"),
    ("activate", F32): Tol(1e-6, "exp and tanh differ in the last bits between libraries"),
    ("activate", BF16): Tol(8e-3, "one rounding, either way at a tie"),
    ("activate", F16): Tol(1e-3, "one rounding, either way at a tie"),
    ("combine", F32): Tol(1e-6, "K products in another order of summation"),
    ("combine", BF16): Tol(8e-3, "one rounding, either way at a tie"),
    ("combine", F16): Tol(1e-3, "one rounding, either way at a tie"),
    ("experts", F32): Tol(4e-6, "two float32 products in another order of summation"),
    ("experts", BF16): Tol(1.6e-2, "three roundings: activation, second product, sum"),
    ("experts", F16): Tol(2e-3, "three roundings: activation, second product, sum"),
    ("experts", torch.float8_e4m3fn): Tol(
        4e-2, "rounding before a step of float8 is another: a few codes differ by one"
    ),
    ("experts", torch.int8): Tol(
        2e-2, "rounding before a step of int8 is another: a few codes differ by one"
    ),
    ("experts", torch.uint8): Tol(
        8e-2, "as float8, of codes of four or six bits, whose steps are up to a third of a value"
    ),
    ("experts_batched", F32): Tol(4e-6, "as `experts`"),
    ("experts_batched", BF16): Tol(1.6e-2, "as `experts`"),
    ("experts_batched", F16): Tol(2e-3, "as `experts`"),
    ("moe", F32): Tol(4e-6, "as `experts`"),
    ("moe", BF16): Tol(1.6e-2, "as `experts`"),
    ("moe", F16): Tol(2e-3, "as `experts`"),
    ("expert_wgrad", F32): Tol(4e-6, "float32 sums of up to a few thousand rows in another order"),
    ("expert_wgrad", BF16): Tol(8e-3, "one rounding after a float32 sum, either way at a tie"),
    ("expert_wgrad", F16): Tol(1e-3, "one rounding after a float32 sum, either way at a tie"),
    ("expert_wgrad_onto", F32): Tol(4e-6, "as `expert_wgrad` in float32, and one sum more"),
    ("expert_wgrad_onto", BF16): Tol(4e-6, "the same: what it adds to is float32"),
    ("expert_wgrad_onto", F16): Tol(4e-6, "the same: what it adds to is float32"),
    ("activate_backward", F32): Tol(4e-6, "exp, erf and tanh differ in their last bits, then sums"),
    ("activate_backward", BF16): Tol(8e-3, "one rounding, either way at a tie"),
    ("activate_backward", F16): Tol(1e-3, "one rounding, either way at a tie"),
    ("experts_saving", F32): Tol(4e-6, "as `experts`"),
    ("experts_saving", BF16): Tol(1.6e-2, "as `experts`"),
    ("experts_saving", F16): Tol(2e-3, "as `experts`"),
    ("experts_accumulating", F32): Tol(4e-6, "as `experts`"),
    ("experts_accumulating", BF16): Tol(1.6e-2, "as `experts`"),
    ("experts_accumulating", F16): Tol(2e-3, "as `experts`"),
    ("experts_backward", F32): Tol(8e-6, "two products and their sums in another order"),
    ("experts_backward", BF16): Tol(1.6e-2, "three roundings, as in `experts`"),
    ("experts_backward", F16): Tol(2e-3, "three roundings, as in `experts`"),
    ("experts_adapted", F32): Tol(8e-6, "four products in another order of summation"),
    ("experts_adapted", BF16): Tol(3.2e-2, "as `experts`, and as many roundings of A x and B u"),
    ("experts_adapted", F16): Tol(4e-3, "as `experts`, and as many roundings of A x and B u"),
    ("experts_adapted_saving", F32): Tol(8e-6, "as `experts_adapted`"),
    ("experts_adapted_saving", BF16): Tol(3.2e-2, "as `experts_adapted`"),
    ("experts_adapted_saving", F16): Tol(4e-3, "as `experts_adapted`"),
    ("experts_adapted_backward", F32): Tol(1.6e-5, "four products and their sums in another order"),
    ("experts_adapted_backward", BF16): Tol(3.2e-2, "as `experts_adapted`"),
    ("experts_adapted_backward", F16): Tol(4e-3, "as `experts_adapted`"),
    ("dispatch_tokens", F32): Tol(0.0, "rows are copied"),
    ("dispatch_tokens", BF16): Tol(0.0, "rows are copied"),
    ("dispatch_tokens", F16): Tol(0.0, "rows are copied"),
    ("combine_tokens", F32): Tol(1e-6, "the sum of a few ranks, in their order"),
    ("combine_tokens", BF16): Tol(8e-3, "one rounding, either way at a tie"),
    ("combine_tokens", F16): Tol(1e-3, "one rounding, either way at a tie"),
    ("experts_over_ranks", F32): Tol(4e-6, "as `experts`; a token's sum is in parts, by rank"),
    ("experts_over_ranks", BF16): Tol(1.6e-2, "as `experts`, and each rank's part is rounded"),
    ("experts_over_ranks", F16): Tol(2e-3, "as `experts`, and each rank's part is rounded"),
    ("sum_ranks", F32): Tol(1e-6, "the sum of a few ranks, in their order"),
    ("sum_ranks", BF16): Tol(8e-3, "one rounding, either way at a tie"),
    ("sum_ranks", F16): Tol(1e-3, "one rounding, either way at a tie"),
    ("model", F32): Tol(1e-4, "sums in another order through a whole model"),
    ("model", BF16): Tol(2e-2, "roundings at other places, through a few layers; same experts"),
}


# Ops that round rows to the dtype they are given before they sum them in float32.
SUMS_ROUNDED = ("experts_backward", "experts_adapted_backward")


def tolerance(name: str, result: torch.dtype, given: torch.dtype) -> Tol:
    """How close a result of an op must be, for what dtype the op was given."""
    if name in SUMS_ROUNDED and given.itemsize < result.itemsize:
        result = given
    return TOL[name, result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The tensors of one layer: tokens, logits, routing and weights."""

    x_TD: Tensor
    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    w13_EFD: Tensor
    w2_EDI: Tensor
    b13_EF: Tensor
    b2_ED: Tensor


def make_layer(
    case: Case,
    dtype: torch.dtype = F32,
    device: str = "cpu",
    seed: int = 0,
    *,
    gated: bool = True,
    transposed: bool = False,
) -> Layer:
    """Random tensors of a case: outputs of order one, distinct experts for each token."""
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, device=device) * std).to(dtype)

    T, E, K, D, I = case.T, case.E, case.K, case.D, case.I  # noqa: E741
    width = 2 * I if gated else I
    w13, w2 = normal(E, width, D, std=D**-0.5), normal(E, D, I, std=I**-0.5)
    if transposed:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    logits = torch.randn(T, E, generator=g, device=device)
    weights, experts = logits.softmax(-1).topk(K, dim=-1)
    return Layer(
        x_TD=normal(T, D),
        logits_TE=logits.to(dtype),
        weights_TK=weights,
        ids_TK=experts.to(torch.int32),
        w13_EFD=w13,
        w2_EDI=w2,
        b13_EF=normal(E, width, std=0.1),
        b2_ED=normal(E, D, std=0.1),
    )


def assert_close(
    got: Tensor, want: Tensor, tol: Tol, what: str = "result", repro: str | None = None
) -> None:
    """Raise AssertionError unless |got - want| <= tol.rel * max|want| everywhere and nothing is
    NaN.

    The message names the tolerance with its reason, the worst place and how to run the case again.
    """
    hint = f"\n  again with: {repro}" if repro else ""
    if got.shape != want.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}{hint}")
    if want.numel() == 0:
        return
    got64, want64 = got.double(), want.double()
    if bool(got64.isnan().any()):
        at = tuple(int(i) for i in got64.isnan().nonzero()[0])
        count = int(got64.isnan().sum())
        raise AssertionError(f"{what}: {count} of {got.numel()} are NaN, first at {at}{hint}")
    error = (got64 - want64).abs()
    bound = tol.rel * float(want64.abs().max())
    if float(error.max()) <= bound:
        return
    flat = int(error.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
    raise AssertionError(
        f"{what}: off by {float(error.max()):.3g} at {at} "
        f"(got {float(got64[at]):.6g}, wanted {float(want64[at]):.6g}); "
        f"{int((error > bound).sum())} of {error.numel()} exceed {bound:.3g}, "
        f"which is {tol.rel:g} of the largest ({tol.why}){hint}"
    )


def float32(value: Any) -> Any:
    """`value` with every 16-bit float tensor in it as float32: arguments for a reference."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (BF16, F16) else value
    if isinstance(value, (tuple, list)):
        return type(value)(float32(v) for v in value)
    return value


def reference_of(run: Callable[..., Any], *args: Any) -> Any:
    """What `run` gives on float32 copies of the arguments."""
    return run(*(float32(a) for a in args))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` gives with NaN, so that a result nobody wrote shows."""
    on = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic  # a module that stands for a class
    fill = deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        # That some operations are not deterministic is no concern here.
        warnings.simplefilter("ignore", UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(on, warn_only=warn_only)
            deterministic.fill_uninitialized_memory = fill
