"""Which of the routing methods that kernels with a router of their own know a `route` is."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ops.ops.route import RouteCall

SOFTMAX, SUM = "softmax", "sum"
LEAST_SUM = 1e-20  # by which those methods keep a sum of weights from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method, named as in `RoutingMethodType` of FlashInfer and TensorRT-LLM, by the options of
    `route` that it is; what is None may be anything. `after`: what becomes of the weights that were
    chosen, their softmax, or each over their sum. `top_k`: the only one, or 0 for any."""

    name: str
    score: str
    select_on: str | None = None
    after: str = ""
    biased: bool | None = False
    grouped: bool = False
    scaled: bool = False
    top_k: int = 0

    def is_of(self, call: RouteCall) -> bool:
        """Whether a call chooses and weighs experts as this method does."""
        c = call
        return (
            c.score == self.score
            and self.select_on in (None, c.select_on)
            and c.softmax_selected == (self.after == SOFTMAX)
            and c.renormalize == (self.after == SUM)
            and self.biased in (None, c.bias_E is not None)
            and (c.n_group > 1) == self.grouped
            and (self.scaled or c.scale == 1.0)
            and self.top_k in (0, c.top_k)
            and c.per_expert_scale_E is None
            and (not c.renormalize or max(c.eps, c.min_sum) <= LEAST_SUM)
            and (not self.grouped or (c.group_reduce == "top2sum" and c.group_fill == "-inf"))
        )


# In the order in which they are asked: of one expert a token, before of any number.
METHODS = (
    Method(name="Llama4", score="sigmoid", top_k=1),
    Method(name="Default", score="softmax"),
    Method(name="Renormalize", score="logit", after=SOFTMAX),
    Method(name="RenormalizeNaive", score="softmax", after=SUM),
    Method(name="TopK", score="logit"),
    Method(name="Sigmoid", score="sigmoid", select_on="score"),
    Method(name="TopKSigmoid", score="sigmoid", select_on="logit"),
    Method(name="SigmoidRenorm", score="sigmoid", after=SUM),
    Method(
        name="MiniMax2", score="sigmoid", select_on="score", after=SUM, biased=True
    ),
    Method(
        name="DeepSeekV3", score="sigmoid", select_on="score", after=SUM, biased=True,
        scaled=True,
    ),
    Method(
        name="DeepSeekV3", score="sigmoid", select_on="score", after=SUM, biased=None,
        grouped=True, scaled=True,
    ),
)  # fmt: skip


def routing_method(call: RouteCall) -> str:
    """The routing method that a call of `route` is, "" for none.

    Named as the members of `RoutingMethodType` of FlashInfer and TensorRT-LLM: "Default" (softmax,
    then the top k), "Renormalize" (the top k, then softmax), "RenormalizeNaive" (softmax, the top
    k, over their sum), "TopK" (logits as weights), "Sigmoid", "SigmoidRenorm", "TopKSigmoid"
    (chosen by logits), "Llama4" (the top 1, its sigmoid), "MiniMax2" (sigmoid, chosen with a bias,
    over the sum) and "DeepSeekV3" (that, scaled, or in groups). The dtype of the weights does not
    count. Groups whose others are filled with 0 are none of them: there a choice below 0 loses.
    """
    return next((method.name for method in METHODS if method.is_of(call)), "")
