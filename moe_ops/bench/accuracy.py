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
16-bit arithmetic itself costs, the floor under which differences do not matter.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.bench.numerics import relative_error
from moe_ops.bench.weights import TOKEN_OUTLIERS, matrices, outlier_columns
from moe_ops.ops import experts
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import Case

CASE = Case(name="accuracy", T=512, E=16, K=4, D=512, I=256)
LAYERS, VOCABULARY = 4, 512
PROMPTS = (16, 64)  # how many, and their length
LOGITS_STD = 3.0  # makes the entropy about half of log(VOCABULARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """A scheme in one pair of formats. Bits include the scales; "" is 16 bits."""

    scheme: str
    weight_format: str
    input_format: str
    bits_per_weight: float
    layer_error: float
    kl_nats: float


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
        log_probs=log_probs(optimize(copy.deepcopy(model)), prompts),
        x_TD=x,
        ids_TK=ids,
        weights_TK=weights,
        want_TD=want,
    )


def log_probs(model: Any, prompts: Tensor) -> Tensor:
    """The model's next-token log-probabilities in float64."""
    with torch.inference_mode():
        return model(input_ids=prompts, use_cache=False).logits.double().log_softmax(-1)


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
    """Both figures of one pair of formats."""
    from moe_ops.hf import optimize, quantize_model

    model = copy.deepcopy(base.model)
    bits = 16.0
    if scheme == "none":
        optimize(model.bfloat16())
    else:
        formats = {"weight_format": weight_format, "input_format": input_format}
        report = quantize_model(model, scheme, **formats, progress=False)
        if report.kept:
            raise ValueError(f"{scheme} does not fit the model: {report.kept[0]}")
        bits = 32 * report.bytes_after / report.bytes_before  # the model is in float32
    with torch.inference_mode():
        first = model.model.layers[0].mlp.experts
        got = first(base.x_TD, base.ids_TK, base.weights_TK)
    return Accuracy(
        scheme=scheme,
        weight_format=weight_format,
        input_format=input_format,
        bits_per_weight=bits,
        layer_error=relative_error(got, base.want_TD),
        kl_nats=kl(base.log_probs, log_probs(model, base.prompts)),
    )


def measure(base: Base, schemes: Sequence[str] = ()) -> list[Accuracy]:
    """Both figures of every pair of formats of the schemes (all, if none is named)."""
    found = []
    for names in pairs(schemes):
        sys.stderr.write(" ".join(name or "16-bit" for name in names) + "\n")
        found.append(accuracy(base, *names))
    return found


def table(found: Sequence[Accuracy]) -> str:
    """A line for each pair of formats, in the order in which they were measured."""
    names = f"{'scheme':<26}{'weights':<22}{'inputs':<21}"
    lines = [f"{names}{'bits':>5}{'layer error':>12}{'KL, nats':>10}"]
    for a in found:
        formats = f"{a.weight_format or '16-bit':<22}{a.input_format or '16-bit':<21}"
        figures = f"{a.bits_per_weight:>5.2f}{a.layer_error:>12.4f}{a.kl_nats:>10.4f}"
        lines.append(f"{a.scheme:<26}{formats}{figures}")
    return "\n".join(lines)
