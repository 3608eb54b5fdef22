"""What every quantisation scheme costs: the error of one layer, the KL divergence of a model.

Weights and tokens are those of `bench/weights.py`: heavy tails, correlated columns, outliers. The
weights are rounded to bfloat16 once, which is the 16-bit model that a user quantises.

The base of both figures is these weights in float32 arithmetic.

    layer error  |got - want| / |want| (Frobenius) of the first layer's experts, tokens and result
                 in bfloat16, as a user runs them
    KL           KL(base || quantised) of the next-token distributions, in nats, the mean over all
                 tokens; attention, norms and routers in float32 and not quantised

The model runs in float32, because in bfloat16 the rounding of the residual stream flips experts
that are nearly tied: that costs more than 8-bit weights do, and would hide them. So routing here
differs from the base for quantisation alone. The scheme "none" is the same model in bfloat16: what
16-bit arithmetic itself costs, the floor under which differences do not matter. The kernels of a
GPU take quantised weights with tokens in 16 bits alone, so there every model runs in bfloat16.

Every figure is that of the definition. Beside it is that of the kernels of a device, of the first
one that runs the formats. All that do must be equal to it (`check_layer`, `check_model`): one that
differs is wrong, and the pair of formats has no figure of kernels.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ops.bench.numerics import relative_error
from moe_ops.bench.weights import TOKEN_OUTLIERS, matrices, outlier_columns
from moe_ops.ops import experts
from moe_ops.quant.formats import Format
from moe_ops.quant.schemes import SCHEMES
from moe_ops.registry.using import using
from moe_ops.testing import TOL, Case, Tol, assert_close

CASE = Case(name="accuracy", T=512, E=16, K=4, D=512, I=256)
LAYERS, VOCABULARY = 4, 512
PROMPTS = (16, 64)  # how many, and their length
LOGITS_STD = 3.0  # makes the entropy about half of log(VOCABULARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far kernels may be from the definition.

    of_error: of the layer, |got - want| / |want| as a share of the definition's own error, and then
    single values may be three times as far as TOL says; None: TOL alone. least_same: the share of
    tokens that take the same experts in the model. model: its logits, of tokens before the first
    that does not.
    """

    of_error: float | None = None
    least_same: float
    model: Tol


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Backends of `experts` on a type of device, the dtype of the models that they run, and how far
    they may be from the definition with inputs in 16 bits and quantised."""

    backends: tuple[str, ...]
    dtype: torch.dtype
    floats: Limits
    codes: Limits

    def limits(self, scheme: str, input_format: str) -> Limits:
        if scheme == "none":  # in bfloat16 everywhere
            return ROUNDED
        return self.codes if input_format else self.floats


# Sums in another order round some values to another step, and experts that are nearly tied change
# places: in that token, and by attention perhaps in those behind it.
SAME_CODES = Limits(least_same=1.0, model=TOL["model", torch.float32])
# Of "none" 93 % take the same, by kernels of a CPU and of a GPU.
ROUNDED = Limits(least_same=0.9, model=TOL["model", torch.bfloat16])
# The CPU's kernels round where the definition does: 99.3 % take the same, logits were 2.9 % apart.
FEW_CODES = Limits(least_same=0.9, model=Tol(4e-2, "some values of h take another code"))
# A GPU's do not round the first product, as the definition does in 16 bits, so that activations on
# the edge between two codes take the other one. The definition without that rounding is 0.06 to
# 0.33 of its own error away from itself over all pairs of formats and two seeds, and single values
# up to 1.9 times TOL; 75 to 92 % of the tokens take the same, logits are up to 9 % apart.
OTHER_CODES = Limits(
    of_error=0.45, least_same=0.65, model=Tol(0.13, "values of h on an edge take another code")
)
KERNELS = {
    "cpu": Kernels(backends=("cpu",), dtype=torch.float32, floats=SAME_CODES, codes=FEW_CODES),
    "cuda": Kernels(
        backends=("triton.grouped", "triton.rows"), dtype=torch.bfloat16,
        floats=ROUNDED, codes=OTHER_CODES,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """A scheme in one pair of formats. Bits include the scales; "" is 16 bits.

    The figures of the definition, and of the kernels of the device: None where they do not run it,
    and then `refusal` says why, or where one of them differs, and then `wrong` says how.
    """

    scheme: str
    weight_format: str
    input_format: str
    bits_per_weight: float
    layer_error: float
    kl_nats: float
    kernel_layer_error: float | None
    kernel_kl_nats: float | None
    refusal: str
    wrong: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Base:
    """The 16-bit model, inputs for it and its first layer, and what float32 gives for them."""

    model: Any
    prompts: Tensor
    log_probs: Tensor  # float64 [prompts, length, vocabulary]
    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    want_TD: Tensor

    def to(self, device: str) -> Base:
        """A copy of the base on a device. The wanted results are moved there, not computed anew."""
        names = ("prompts", "log_probs", "x_TD", "ids_TK", "weights_TK", "want_TD")
        moved = {name: getattr(self, name).to(device) for name in names}
        return replace(self, model=copy.deepcopy(self.model).to(device), **moved)

    @property
    def entropy(self) -> float:
        """Nats, the mean over all tokens."""
        return float(-(self.log_probs.exp() * self.log_probs).sum(-1).mean())


def make_model(case: Case, generator: torch.Generator) -> Any:
    """A Qwen3-MoE model in float32 with generated weights, all rounded to bfloat16.

    Matrices have std 1/√fan_in, embeddings 1, the output matrix LOGITS_STD/√fan_in. The norms
    before attention and experts make some channels outliers, as hidden states have them.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=case.D,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=max(8, case.D // 8),
        vocab_size=VOCABULARY,
        num_experts=case.E,
        num_experts_per_tok=case.K,
        moe_intermediate_size=case.I,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": LOGITS_STD * case.D**-0.5}
    for name, p in model.named_parameters():
        if p.ndim > 1:
            p.copy_(matrices(tuple(p.shape), generator, std=std.get(name)).bfloat16())
        elif name.endswith("layernorm.weight"):
            scale = outlier_columns(case.D, TOKEN_OUTLIERS, generator)
            p.copy_((scale / scale.square().mean().sqrt()).bfloat16())
    return model


def make_base(case: Case, seed: int) -> Base:
    """The model, its inputs and its results, all from one seed."""
    from moe_ops.hf import optimize

    generator = torch.Generator().manual_seed(seed)
    model = make_model(case, generator)
    x = matrices((case.T, case.D), generator, factor=TOKEN_OUTLIERS, std=1.0).bfloat16()
    scores = torch.randn(case.T, case.E, generator=generator).softmax(-1)
    weights, ids = scores.topk(case.K)
    weights /= weights.sum(-1, keepdim=True)
    prompts = torch.randint(VOCABULARY, PROMPTS, generator=generator)
    first = model.model.layers[0].mlp.experts
    with torch.inference_mode():
        want = experts(x.float(), weights, ids, first.gate_up_proj, first.down_proj)
    return Base(
        model=model,
        prompts=prompts,
        log_probs=run_model(optimize(copy.deepcopy(model)), prompts).log_probs_BSV,
        x_TD=x,
        ids_TK=ids,
        weights_TK=weights,
        want_TD=want,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a model makes of prompts [B, S]: next-token log-probabilities in float64, and the
    experts that the tokens took in each layer, in order of their numbers."""

    log_probs_BSV: Tensor
    ids_LTK: Tensor

    def same(self, other: Run) -> Tensor:
        """[B, S]: where tokens took the same experts."""
        B, S, _ = self.log_probs_BSV.shape
        return (self.ids_LTK == other.ids_LTK).all(2).all(0).view(B, S)


def run_model(model: Any, prompts: Tensor) -> Run:
    taken: list[Tensor] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        taken.append(args[1].sort(-1).values)

    hooks = [layer.mlp.experts.register_forward_pre_hook(note) for layer in model.model.layers]
    try:
        with torch.inference_mode():
            logits = model(input_ids=prompts, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return Run(log_probs_BSV=logits.double().log_softmax(-1), ids_LTK=torch.stack(taken))


def kl(p: Tensor, q: Tensor) -> float:
    """KL(p || q) of log-probabilities [..., vocabulary] in nats, the mean over all tokens."""
    return float((p.exp() * (p - q)).sum(-1).mean())


def pairs(schemes: Sequence[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Scheme, weight format and input format of all that can be built, in the order of SCHEMES.

    Raises ValueError for a name that is no scheme.
    """
    unknown = [name for name in schemes if name not in SCHEMES]
    if unknown:
        raise ValueError(f"scheme {unknown[0]!r} is unknown; choose from {', '.join(SCHEMES)}")
    for info in SCHEMES.values():
        if not schemes or info.name in schemes:
            yield from ((info.name, *pair) for pair in info.pairs())


def accuracy(base: Base, scheme: str, weight_format: str, input_format: str) -> Accuracy:
    """The figures of one pair of formats."""
    kernels = KERNELS[base.x_TD.device.type]
    dtype = torch.bfloat16 if scheme == "none" else kernels.dtype
    model, bits = _quantized(base, dtype, scheme, weight_format, input_format)
    first = model.model.layers[0].mlp.experts
    what = " ".join(name for name in (scheme, weight_format, input_format) if name)
    limits = kernels.limits(scheme, input_format)

    def layer() -> Tensor:
        with torch.inference_mode():
            got: Tensor = first(base.x_TD, base.ids_TK, base.weights_TK)
            return got

    def whole() -> Run:
        return run_model(model, base.prompts)

    with using("reference", "experts"):
        want, wanted = layer(), whole()
    own_error = relative_error(want, base.want_TD)
    figures: list[tuple[float, float]] = []
    refusals, wrong = [], []
    for backend in kernels.backends:
        try:
            with using(backend, "experts"):
                got, found = layer(), whole()
        except NotImplementedError as error:
            refusals.append(_refusal(error, backend))
            continue
        try:
            check_layer(got, want, input_format, limits, own_error, f"{what} by {backend}")
            check_model(found, wanted, limits, f"{what} by {backend}")
        except AssertionError as error:
            wrong.append(str(error))
        figures.append((relative_error(got, base.want_TD), kl(base.log_probs, found.log_probs_BSV)))
    layer_error, kl_nats = figures[0] if figures and not wrong else (None, None)
    return Accuracy(
        scheme=scheme,
        weight_format=weight_format,
        input_format=input_format,
        bits_per_weight=bits,
        layer_error=own_error,
        kl_nats=kl(base.log_probs, wanted.log_probs_BSV),
        kernel_layer_error=layer_error,
        kernel_kl_nats=kl_nats,
        refusal="" if figures else refusals[0],
        wrong="; ".join(wrong),
    )


def _quantized(
    base: Base, dtype: torch.dtype, scheme: str, weight_format: str, input_format: str
) -> tuple[Any, float]:
    """A copy of the model in the formats, the rest of it in `dtype`, and the bits of a weight."""
    from moe_ops.hf import optimize, quantize_model

    model = copy.deepcopy(base.model).to(dtype)  # the weights are rounded to bfloat16
    if scheme == "none":
        return optimize(model), 16.0
    formats = {"weight_format": weight_format, "input_format": input_format}
    report = quantize_model(model, scheme, **formats, progress=False)
    if report.kept:
        raise ValueError(f"{scheme} does not fit the model: {report.kept[0]}")
    return model, 8 * dtype.itemsize * report.bytes_after / report.bytes_before


def _refusal(error: NotImplementedError, backend: str) -> str:
    """What a backend said that was forced and refuses a call; what is raised otherwise goes on."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line.startswith(f"{backend}: ")]
    if not reasons:
        raise error
    return reasons[0].removeprefix(f"{backend}: ")


def check_layer(
    got: Tensor, want: Tensor, input_format: str, limits: Limits, own_error: float, what: str
) -> None:
    """Raise AssertionError unless a layer's result is that of the definition, whose error is
    own_error."""
    kind = Format.of(input_format).parsed.storage.dtype if input_format else got.dtype
    tol, what = (
        TOL.get(("experts", kind), TOL["experts", torch.float8_e4m3fn]),
        f"the layer of {what}",
    )
    if limits.of_error is not None:
        tol = replace(tol, rel=3 * tol.rel)
        away = relative_error(got, want)
        if not away <= limits.of_error * own_error:
            raise AssertionError(
                f"{what}: {away:.4f} from the definition, whose own error is {own_error:.4f}; at "
                f"most {limits.of_error:g} of that is right"
            )
    assert_close(got, want, tol, what)


def check_model(got: Run, want: Run, limits: Limits, what: str) -> None:
    """Raise AssertionError unless a model takes the experts of the definition for as many tokens as
    the limits ask, and its log-probabilities of tokens that do, with all tokens before them, are
    the definition's.
    """
    what, same_BS = f"the model of {what}", got.same(want)
    share = float(same_BS.double().mean())
    if share < limits.least_same:
        raise AssertionError(
            f"{what}: {share:.1%} of the tokens take the experts of the definition; at least "
            f"{limits.least_same:.0%} is right"
        )
    alike_BS = same_BS.long().cummin(1).values.bool()
    assert_close(got.log_probs_BSV[alike_BS], want.log_probs_BSV[alike_BS], limits.model, what)


def measure(base: Base, schemes: Sequence[str] = ()) -> list[Accuracy]:
    """The error of a layer and the KL divergence of a model, for every pair of formats of the
    schemes (all schemes, if none is named)."""
    found = []
    for names in pairs(schemes):
        sys.stderr.write(" ".join(name or "16-bit" for name in names) + "\n")
        found.append(accuracy(base, *names))
    return found


def table(found: Sequence[Accuracy]) -> str:
    """A line for each pair of formats, in the order in which they were measured; the last two
    columns are of the kernels.
    """
    names = f"{'scheme':<26}{'weights':<22}{'inputs':<21}"
    heads = f"{'bits':>5}{'layer error':>12}{'KL, nats':>10}{'kernel error':>13}{'KL, nats':>10}"
    lines = [names + heads]
    for a in found:
        formats = f"{a.weight_format or '16-bit':<22}{a.input_format or '16-bit':<21}"
        figures = f"{a.bits_per_weight:>5.2f}{a.layer_error:>12.4f}{a.kl_nats:>10.4f}"
        kernel = (a.kernel_layer_error, a.kernel_kl_nats)
        error, divergence = ("-" if value is None else f"{value:.4f}" for value in kernel)
        lines.append(f"{a.scheme:<26}{formats}{figures}{error:>13}{divergence:>10}")
    return "\n".join([*lines, *(f"WRONG: {a.wrong}" for a in found if a.wrong)])
