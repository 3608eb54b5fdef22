"""What transformers' routers compute, as arguments of the `route` op.

A rule is found by the fingerprint of a router's forward, so it can only be applied to the code it
was written for: a router that transformers changes keeps its own forward until a rule for the new
code is added here. The comment on each rule names the model families whose routers it covers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ops.checks.shapes import FLOATS
from moe_ops.hf.source import fingerprint
from moe_ops.ops.route import beyond_groups

Arguments = dict[str, Any]
FLOAT32, AS_LOGITS, AS_INPUT = "float32", "as logits", "as input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one router is expressed: its logits, then `route` with these arguments.

    `arguments` gives a reason instead where `route` cannot express the router as it is configured.
    `rounds_scores` marks routers that compute their scores in the model's dtype: `route`, which
    uses float32, is the same function only for a float32 model.
    """

    logits: Callable[[Any, Tensor], Tensor]
    arguments: Callable[[Any], Arguments | str]
    weights_dtype: str = FLOAT32
    bias_argument: bool = False  # the caller hands in the selection bias
    rounds_scores: bool = False
    returns_probabilities: bool = False  # softmax(logits) in the place of the logits
    logits_last: bool = False  # (ids, weights, logits) in the place of (logits, weights, ids)

    def read(
        self, router: Any, x_TD: Tensor, logits_TE: Tensor, bias_E: Tensor | None
    ) -> Arguments | str:
        """The arguments of `route` for this router, or why its own code must run.

        bias_E is what the caller handed in beside x_TD.
        """
        if self.rounds_scores and logits_TE.dtype != torch.float32:
            return f"it rounds its scores to {logits_TE.dtype}"
        found = self.arguments(router)
        if isinstance(found, str):
            return found
        if self.bias_argument and getattr(router, "use_expert_bias", True):
            found["bias_E"] = bias_E
        dtypes = {FLOAT32: torch.float32, AS_LOGITS: logits_TE.dtype, AS_INPUT: x_TD.dtype}
        out_dtype = dtypes[self.weights_dtype]
        tensors = [t for t in (logits_TE, *found.values()) if isinstance(t, Tensor)]
        for dtype in (out_dtype, *(t.dtype for t in tensors)):
            if dtype not in FLOATS:
                return f"it computes in {dtype}"
        groups = found.get("n_group", 1), found.get("topk_group", 1)
        beyond = beyond_groups(logits_TE.shape[1], found["top_k"], *groups)
        if beyond is not None and found["group_fill"] != "zero_weight":
            return f"{beyond}, and ties decide on the others"
        return found | {"out_dtype": str(out_dtype).removeprefix("torch.")}


def _linear(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.reshape(-1, m.weight.shape[1]), m.weight)


def _linear_float32(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.reshape(-1, m.weight.shape[1]).float(), m.weight.float())


def _linear_bias(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.weight, m.bias)


def _linear_bias_float32(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.float(), m.weight.float(), m.bias.float())


def _linear_of_float32_input(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.float().reshape(-1, m.weight.shape[1]), m.weight)


def _linear_in_weight_dtype(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.reshape(-1, m.weight.shape[1]).to(m.weight.dtype), m.weight)


def _afmoe_logits(m: Any, x: Tensor) -> Tensor:
    return m.gate(x.reshape(-1, x.shape[-1])).float()


def _gemma_logits(m: Any, x: Tensor) -> Tensor:
    return m.proj(m.norm(x) * m.scale * m.scalar_root_size)


def _hunyuan_logits(m: Any, x: Tensor) -> Tensor:
    x = x.reshape(-1, x.shape[-1])
    return m.wg(x.float() if m.wg.weight.dtype == torch.float32 else x)


def _laguna_logits(m: Any, x: Tensor) -> Tensor:
    logits = _linear(m, x).float()
    cap = m.router_logit_softcapping
    return (logits / cap).tanh() * cap if cap > 0.0 else logits


def _muse_logits(m: Any, x: Tensor) -> Tensor:
    return _linear_float32(m, x) * m.output_multiplier


def _granite_logits(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.weight).float()


def _softmax(m: Any) -> Arguments:
    return {"top_k": m.top_k}


def _softmax_renormalize(m: Any) -> Arguments:
    return {"top_k": m.top_k, "renormalize": True}


def _softmax_norm_topk_prob(m: Any) -> Arguments:
    return {"top_k": m.top_k, "renormalize": bool(m.norm_topk_prob)}


def _softmax_selected(m: Any) -> Arguments:
    return {"top_k": m.top_k, "score": "logit", "softmax_selected": True}


def _softmax_selected_over_k(m: Any) -> Arguments:
    return _softmax_selected(m) | {"scale": 1.0 / m.top_k}


def _cohere2(m: Any) -> Arguments | str:
    if m.expert_selection_fn == "softmax":
        return _softmax_selected(m)
    if m.expert_selection_fn != "sigmoid":
        return f"its expert_selection_fn is {m.expert_selection_fn!r}"
    if m.weight.dtype != torch.float32:
        return f"it rounds its scores to {m.weight.dtype}"
    return {
        "top_k": m.top_k,
        "score": "sigmoid",
        "select_on": "logit",
        "renormalize": bool(m.norm_topk_prob),
    }


def _groups(m: Any) -> Arguments:
    return {"n_group": m.num_group, "topk_group": m.topk_group, "group_fill": "-inf"}


def _sigmoid(m: Any, bias: Tensor | None, scale: float = 1.0, eps: float = 1e-20) -> Arguments:
    return {
        "top_k": m.top_k,
        "bias_E": bias,
        "score": "sigmoid",
        "renormalize": True,
        "eps": eps,
        "scale": float(scale),
    }


def _deepseek_v3(m: Any) -> Arguments:
    sigmoid = _sigmoid(m, m.e_score_correction_bias, m.routed_scaling_factor)
    return sigmoid | _groups(m) | {"renormalize": bool(m.norm_topk_prob)}


def _beam(m: Any) -> Arguments:
    sigmoid = _sigmoid(m, m.e_score_correction_bias)
    return sigmoid | _groups(m) | {"renormalize": bool(m.norm_topk_prob)}


def _axk2(m: Any) -> Arguments:
    arguments = _deepseek_v3(m) | {"group_fill": "zero"}
    return arguments | ({"n_group": 1, "topk_group": 1} if m.num_group is None else {})


def _deepseek_v2(m: Any) -> Arguments | str:
    arguments = {"top_k": m.top_k, "scale": float(m.routed_scaling_factor)}
    if m.topk_method == "greedy":
        return arguments
    if m.topk_method != "group_limited_greedy":
        return f"its topk_method is {m.topk_method!r}"
    # Its weights are the masked scores: a masked expert that is chosen after all weighs nothing.
    return arguments | _groups(m) | {"group_reduce": "max", "group_fill": "zero_weight"}


def _mistral_large4(m: Any) -> Arguments:
    return {
        "top_k": m.top_k,
        **_groups(m),
        "group_fill": "zero",
        "renormalize": True,
        "eps": 1e-20,
        "scale": float(m.routed_scaling_factor),
    }


def _mistral4(m: Any) -> Arguments:
    return _mistral_large4(m) | {"renormalize": bool(m.norm_topk_prob)}


def _lfm2(m: Any) -> Arguments:
    sigmoid = _sigmoid(m, None, m.routed_scaling_factor, eps=1e-6)
    return sigmoid | {"renormalize": bool(m.norm_topk_prob)}


def _deepseek_v4(m: Any) -> Arguments | str:
    names = {
        "Sigmoid": "sigmoid",
        "SqrtSoftplusActivation": "sqrtsoftplus",
        "SqrtSoftplus": "sqrtsoftplus",
    }
    name = type(m.score_fn).__name__
    if name not in names:
        return f"its score function is {name}"
    sigmoid = _sigmoid(m, m.e_score_correction_bias, m.routed_scaling_factor)
    return sigmoid | {"score": names[name]}


def _muse(m: Any) -> Arguments:
    eps = m.norm_topk_prob_eps
    return _sigmoid(m, m.e_score_correction_bias, m.routed_scaling_factor, eps=eps)


def _kolibri(m: Any) -> Arguments:
    sigmoid = _sigmoid(m, m.e_score_correction_bias, eps=0.0)
    return sigmoid | {"select_on": "logit", "renormalize": bool(m.norm_topk_prob)}


def _flint(m: Any) -> Arguments:
    return _sigmoid(m, None, eps=0.0) | {"renormalize": bool(m.norm_topk_prob)}


def _ernie(m: Any) -> Arguments:
    bias = m.moe_statics.e_score_correction_bias.squeeze()
    return {"top_k": m.top_k, "bias_E": bias, "renormalize": True, "min_sum": float(m.norm_min)}


def _gemma(m: Any) -> Arguments:
    return {
        "top_k": m.config.top_k_experts,
        "per_expert_scale_E": m.per_expert_scale,
        "renormalize": True,
    }


_ERNIE = Rule(logits=_linear_float32, arguments=_ernie, weights_dtype=AS_INPUT)
_GRANITE = Rule(logits=_granite_logits, arguments=_softmax_selected, weights_dtype=AS_INPUT)

RULES: dict[str, Rule] = {
    # flex_olmo, mellum, olmoe, qwen2_moe, qwen3_moe, qwen3_next, qwen3_omni_moe, qwen4_exp
    "849827e64e0a": Rule(
        logits=_linear, arguments=_softmax_norm_topk_prob, weights_dtype=AS_LOGITS
    ),
    # lara_mini
    "d03475031f73": Rule(
        logits=_linear_float32, arguments=_softmax_norm_topk_prob, weights_dtype=AS_INPUT
    ),
    # qwen3_5_moe, qwen3_vl_moe
    "ebc513972d3d": Rule(logits=_linear, arguments=_softmax_renormalize, weights_dtype=AS_LOGITS),
    # minimax, mixtral
    "3b47be678984": Rule(logits=_linear, arguments=_softmax_renormalize),
    # jamba
    "a7a06e3488c5": Rule(logits=_linear, arguments=_softmax, weights_dtype=AS_INPUT),
    # axk1, bailing_hybrid, deepseek_v3, deepseek_v32, dots1, dots3_note, exaone_moe, glm4_moe,
    # glm4_moe_lite, glm4v_moe, glm5_next, glm_moe_dsa, hy_v4, hy_v4_vl, kimi_linear,
    # mimo_v2_flash, nemotron_h, solar_open
    "e77292a9baca": Rule(logits=_linear_float32, arguments=_deepseek_v3),
    # beam
    "1f58c6d64d70": Rule(logits=_linear_float32, arguments=_beam),
    # axk2
    "0084ce9ed355": Rule(logits=_linear_float32, arguments=_axk2),
    # deepseek_v2, deepseek_ocr2, unlimited_ocr
    "02159fcb353d": Rule(logits=_linear_float32, arguments=_deepseek_v2),
    # mistral4
    "3106cb91bd84": Rule(logits=_linear, arguments=_mistral4, rounds_scores=True),
    # mistral_large4
    "9c9d311e8b6d": Rule(logits=_linear_float32, arguments=_mistral_large4),
    # hy_v3, and dots3_note's vision tower
    "3e2792e28f15": Rule(
        logits=_linear_float32,
        arguments=lambda m: _sigmoid(m, None, m.router_scaling_factor),
        bias_argument=True,
    ),
    # minimax_m2
    "ec71fbc8d234": Rule(
        logits=_linear_in_weight_dtype,
        arguments=lambda m: _sigmoid(m, None, eps=0.0),
        bias_argument=True,
    ),
    # afmoe
    "22692bc1ddc6": Rule(
        logits=_afmoe_logits,
        arguments=lambda m: _sigmoid(m, None, m.route_scale),
        bias_argument=True,
    ),
    # lfm2_moe
    "77f9b6116959": Rule(
        logits=_linear,
        arguments=_lfm2,
        weights_dtype=AS_LOGITS,
        bias_argument=True,
        rounds_scores=True,
    ),
    # minimax_m3_vl, step3p7
    "a0817fc78544": Rule(
        logits=_linear_in_weight_dtype,
        arguments=lambda m: _sigmoid(m, m.e_score_correction_bias, eps=0.0),
    ),
    # laguna
    "7e1b441e4c02": Rule(
        logits=_laguna_logits,
        arguments=lambda m: _sigmoid(m, m.e_score_correction_bias, eps=0.0),
        weights_dtype=AS_INPUT,
    ),
    # inkling2, inkling2_loop, deepseek_v4
    "fdfe5a83238f": Rule(logits=_linear_of_float32_input, arguments=_deepseek_v4),
    "1505ca0deb1c": Rule(logits=_linear, arguments=_deepseek_v4, rounds_scores=True),
    # muse_spark
    "b136251f4e81": Rule(logits=_muse_logits, arguments=_muse),
    # kolibri1
    "a3632adb0263": Rule(logits=_linear_float32, arguments=_kolibri),
    # flint
    "164a068d07d0": Rule(logits=_linear_float32, arguments=_flint),
    # ernie4_5_moe, ernie4_5_vl_moe; the second before transformers 5.23
    "4516d8c4ead6": _ERNIE,
    "71dd62ee5a7a": _ERNIE,
    # granitemoe, granitemoe_swa, granitemoehybrid, granitemoeshared; the second before 5.23
    "f94b2215875a": _GRANITE,
    "f082c497de82": Rule(
        logits=_granite_logits,
        arguments=_softmax_selected,
        weights_dtype=AS_INPUT,
        logits_last=True,
    ),
    # aria
    "bd1062a01fba": Rule(logits=_linear, arguments=_softmax_selected, weights_dtype=AS_LOGITS),
    # gpt_oss
    "6106b5d77c20": Rule(logits=_linear_bias, arguments=_softmax_selected, weights_dtype=AS_LOGITS),
    # openai_privacy_filter
    "b08d3c58ac68": Rule(logits=_linear_bias_float32, arguments=_softmax_selected_over_k),
    # cohere2_moe
    "9dbbb6a72515": Rule(logits=_linear, arguments=_cohere2, weights_dtype=AS_INPUT),
    # gemma4, diffusion_gemma
    "49eb308b5043": Rule(logits=_gemma_logits, arguments=_gemma, returns_probabilities=True),
    # hunyuan_v1_moe
    "0a563824a7eb": Rule(
        logits=_hunyuan_logits, arguments=_softmax_renormalize, weights_dtype=AS_LOGITS
    ),
}


def router_fingerprint(router: nn.Module) -> str:
    """Fingerprint of a router: its forward and the methods and submodules that this uses."""
    cls = type(router)
    used = inspect.getclosurevars(cls.forward).unbound - {"forward"}
    methods = [vars(cls)[n] for n in sorted(used) if inspect.isfunction(vars(cls).get(n))]
    children = [type(c) for n, c in sorted(router.named_children()) if n in used]
    theirs = [c.forward for c in children if c.__module__.startswith("transformers.")]
    return fingerprint(cls.forward, *methods, *theirs)
