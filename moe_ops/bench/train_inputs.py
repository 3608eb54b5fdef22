"""Layers that `bench train` measures, their tensors, and their gradients in float32."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ops.bench.inputs import make_routed, make_weights
from moe_ops.bench.numerics import exact_float32
from moe_ops.ops import activate
from moe_ops.ops.activate import Activation
from moe_ops.testing import LAYERS, Case

SEED = 0
UNIFORM = "uniform"
OUT = "out_TD"  # among gradients, the result itself


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLayer:
    """The sizes of a layer's experts, and what they compute; weights [E, D, F] and [E, I, D] if
    transposed. Biases may be as they are, while weights are trained."""

    case: Case
    activation: Activation = field(default_factory=lambda: Activation(kind="silu"))
    bias: bool = False
    fixed_bias: bool = False
    transposed: bool = False

    @property
    def name(self) -> str:
        return self.case.name

    def flops(self, tokens: int, products: int) -> float:
        """Operations of so many products, by w13 and by w2 in turn."""
        case = self.case
        return products / 2 * 2.0 * tokens * case.K * 3 * case.D * case.I


def gpt_oss(case: Case, fixed_bias: bool = False) -> TrainLayer:
    """A layer as GPT-OSS has it."""
    act = Activation(kind="silu", interleaved=True, alpha=1.702, limit=7.0, up_shift=1.0)
    return TrainLayer(case=case, activation=act, bias=True, fixed_bias=fixed_bias, transposed=True)


TRAINED = {
    "qwen3_30b": TrainLayer(case=LAYERS["qwen3_30b"]),
    "gpt_oss_20b": gpt_oss(LAYERS["gpt_oss_20b"]),
    # transformers sums gradients of biases in their dtype, too coarsely for what 16 bits allow.
    "gpt_oss_20b_fixed_bias": gpt_oss(
        replace(LAYERS["gpt_oss_20b"], name="gpt_oss_20b_fixed_bias"), fixed_bias=True
    ),
    "mixtral_8x7b": TrainLayer(case=LAYERS["mixtral_8x7b"]),
    "qwen3_next": TrainLayer(case=LAYERS["qwen3_next"]),
    # For a CPU.
    "tiny": TrainLayer(case=Case(name="tiny", T=1, E=8, K=2, D=64, I=32)),
    "tiny_gpt_oss": gpt_oss(Case(name="tiny_gpt_oss", T=1, E=8, K=2, D=64, I=64)),
}
TINY = ["tiny", "tiny_gpt_oss"]
PUBLISHED = [name for name in TRAINED if name not in TINY]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensors:
    """What one step of a layer is given: tokens with a routing, weights, and the gradient of the
    result."""

    x_TD: Tensor
    weights_TK: Tensor  # of x's dtype, as routers of transformers give them
    ids_TK: Tensor  # int32
    w13_EFD: nn.Parameter
    w2_EDI: nn.Parameter
    b13_EF: nn.Parameter | None
    b2_ED: nn.Parameter | None
    grad_TD: Tensor

    def wanted(self) -> dict[str, Tensor]:
        """By name, the tensors of which gradients are wanted."""
        found = {
            "x_TD": self.x_TD, "weights_TK": self.weights_TK, "w13_EFD": self.w13_EFD,
            "w2_EDI": self.w2_EDI, "b13_EF": self.b13_EF, "b2_ED": self.b2_ED,
        }  # fmt: skip
        return {n: t for n, t in found.items() if t is not None and t.requires_grad}

    def all(self) -> list[Tensor]:
        """All tensors that are there before a step."""
        found = (getattr(self, name) for name in self.__slots__)
        return [t for t in found if t is not None]


def make_parameters(
    layer: TrainLayer, dtype: torch.dtype, device: torch.device, frozen: bool
) -> dict[str, nn.Parameter | None]:
    """The weights of a layer by their names in `Tensors`."""
    g = torch.Generator(device=device).manual_seed(SEED)
    case, made = layer.case, make_weights(layer.case, dtype, g)
    w13, w2 = made.w13_EFD, made.w2_EDI
    if layer.transposed:
        w13, w2 = (w.transpose(1, 2).contiguous() for w in (w13, w2))

    def bias(width: int) -> nn.Parameter | None:
        if not layer.bias:
            return None
        b = torch.empty(case.E, width, dtype=dtype, device=device).normal_(std=0.1, generator=g)
        return nn.Parameter(b, requires_grad=not (frozen or layer.fixed_bias))

    return {
        "w13_EFD": nn.Parameter(w13, requires_grad=not frozen),
        "w2_EDI": nn.Parameter(w2, requires_grad=not frozen),
        "b13_EF": bias(2 * case.I),
        "b2_ED": bias(case.D),
    }


def make_tensors(
    layer: TrainLayer, tokens: int, dtype: torch.dtype, parameters: dict[str, nn.Parameter | None]
) -> Tensors:
    """Tokens of uniform routing, the same ones in every run, beside the weights of the layer."""
    w13_EFD, w2_EDI = parameters["w13_EFD"], parameters["w2_EDI"]
    assert w13_EFD is not None and w2_EDI is not None, "every layer has both weights"
    g = torch.Generator(device=w13_EFD.device).manual_seed(SEED + tokens)
    routed = make_routed(layer.case, tokens, UNIFORM, dtype, g)
    return Tensors(
        x_TD=routed.x_TD.requires_grad_(),
        weights_TK=routed.rounded_TK.detach().clone().requires_grad_(),
        ids_TK=routed.ids_TK,
        w13_EFD=w13_EFD,
        w2_EDI=w2_EDI,
        b13_EF=parameters["b13_EF"],
        b2_ED=parameters["b2_ED"],
        grad_TD=torch.empty_like(routed.x_TD).normal_(generator=g),
    )


def want(layer: TrainLayer, tensors: Tensors) -> dict[str, Tensor]:
    """The result and the wanted gradients in float32, by name, an expert at a time, so that one
    expert's weights are converted.
    """
    given, wanted = tensors, tensors.wanted()
    made = {n: torch.zeros(t.shape, device=t.device) for n, t in wanted.items()}
    made[OUT] = torch.zeros(given.x_TD.shape, device=given.x_TD.device)
    with exact_float32(), torch.enable_grad():
        for e in given.ids_TK.unique().tolist():
            rows, choices = (given.ids_TK == e).nonzero(as_tuple=True)
            places = {"x_TD": rows, "weights_TK": (rows, choices)}
            own = {
                name: t.detach()[places.get(name, e)].float().requires_grad_(name in wanted)
                for name in ("x_TD", "weights_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED")
                if (t := getattr(given, name)) is not None
            }
            y_RD = _one_expert(layer, own)
            grads = torch.autograd.grad(y_RD, [own[n] for n in wanted], given.grad_TD[rows].float())
            # A token chooses an expert once, so no row is met twice.
            made[OUT][rows] += y_RD.detach()
            for name, grad in zip(wanted, grads, strict=True):
                made[name][places.get(name, e)] += grad
    return made


def _one_expert(layer: TrainLayer, own: dict[str, Tensor]) -> Tensor:
    """The rows that an expert adds to the result."""
    w13_FD, w2_DI = own["w13_EFD"], own["w2_EDI"]
    if layer.transposed:
        w13_FD, w2_DI = w13_FD.t(), w2_DI.t()
    y_RF = F.linear(own["x_TD"], w13_FD, own.get("b13_EF"))
    h_RI = activate.reference(y_RF, *layer.activation.args)
    out_RD: Tensor = F.linear(h_RI, w2_DI, own.get("b2_ED"))
    return out_RD * own["weights_TK"][:, None]
