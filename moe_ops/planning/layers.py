"""Layers to measure: those that a model runs, or made up from sizes; and tokens routed in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops.checks.options import MOST_SIZE, check_fields, check_int
from moe_ops.checks.shapes import DTYPES, check_choice, check_device
from moe_ops.ops.experts import ExpertsCall, experts, weights_of
from moe_ops.quant import packing
from moe_ops.quant.arguments import named_format
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format

ROUTINGS = ("uniform", "zipf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A gated layer by the letters of `moe_ops/checks/shapes.py`, to tune without a model.

    quant: as `MoELayer` takes it, in place of w_format and x_format, which it sets. layout: what
    `prepare` stores the weights in.

    Raises TypeError or ValueError for what no layer has.
    """

    E: int
    K: int
    D: int
    I: int  # noqa: E741
    dtype: str = "bfloat16"
    w_format: str = ""
    x_format: str = ""
    device: str = "cpu"
    layout: str = ""
    quant: str | QuantConfig | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        config = QuantConfig.of(self.quant)
        if config is not None:
            formats = (config.weights, config.inputs)
            if (self.w_format, self.x_format) not in (("", ""), formats):
                raise ValueError(
                    f"quant={config} differs from w_format={self.w_format!r} and "
                    f"x_format={self.x_format!r}; give one or the others"
                )
            for name, format in zip(("w_format", "x_format"), formats, strict=True):
                object.__setattr__(self, name, format)
        for name in "EKDI":
            check_int(name, getattr(self, name), least=1, most=MOST_SIZE)
        if self.K > self.E:
            raise ValueError(f"K={self.K} must be from 1 to E={self.E}, the experts of the layer")
        check_choice("dtype", self.dtype, tuple(DTYPES))
        check_device("device", self.device)
        for name in ("w_format", "x_format"):
            if getattr(self, name):
                named_format(name, getattr(self, name))
        if self.layout:
            check_choice("layout", self.layout, tuple(experts.layouts))


def arguments_of(shape: Shape) -> ExpertsCall:
    """A call of `experts` with one token and random weights."""
    dtype, device = DTYPES[shape.dtype], torch.device(shape.device)

    def weight(rows: int, cols: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        w = torch.randn(shape.E, rows, cols, device=device, dtype=dtype) * cols**-0.5
        if not shape.w_format:
            return w, None, None
        done = packing.quantize(w, Format.of(shape.w_format))
        return done.values, done.scale, done.zero

    w13, w13_scale, w13_zero = weight(2 * shape.I, shape.D)
    w2, w2_scale, w2_zero = weight(shape.D, shape.I)
    call = ExpertsCall(
        x_TD=torch.zeros(1, shape.D, dtype=dtype, device=device),
        weights_TK=torch.zeros(1, shape.K, device=device),
        ids_TK=torch.zeros(1, shape.K, dtype=torch.int32, device=device),
        w13_EFD=w13,
        w2_EDI=w2,
        w13_scale_EFG=w13_scale,
        w2_scale_EDG=w2_scale,
        w13_zero_EFG=w13_zero,
        w2_zero_EDG=w2_zero,
        w_format=shape.w_format,
        x_format=shape.x_format,
        layout=shape.layout,
    )
    if shape.layout and not isinstance(w13, FakeTensor):  # which has nothing to put in order
        experts.layouts[shape.layout].prepare_(weights_of(call))
    return call


def fake_arguments_of(shape: Shape) -> ExpertsCall:
    """The arguments of a layer as fake tensors, without memory, to ask backends with."""
    with FakeTensorMode():
        return arguments_of(shape)


def calls_of(
    model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any] | None
) -> list[ExpertsCall]:
    """The record of every call of `experts` in one call of a model.

    inputs: None takes transformers' dummy inputs. Raises ValueError if there is no call, or no
    input.
    """
    if inputs is None:
        inputs = getattr(model, "dummy_inputs", None)
        if inputs is None:
            raise ValueError(f"{type(model).__name__} has no dummy_inputs; give inputs=(...)")
        device = next(model.parameters()).device
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    with _Recorder() as recorder:
        model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    if not recorder.calls:
        raise ValueError(
            f"{type(model).__name__} does not call moe_ops.experts: give a model that "
            "moe_ops.optimize has changed, before it is compiled"
        )
    return recorder.calls


class _Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of `experts`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ExpertsCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is experts.overload:
            self.calls.append(ExpertsCall(*args, **kwargs))
        return func(*args, **kwargs)


def routed(
    call: ExpertsCall, tokens: int, routing: str, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens for a call, their weights and their experts, chosen by one of ROUTINGS.

    "uniform": every expert as often as any other. "zipf": the n-th most popular one n times less
    often than the first, as far as the choices of one token, which are different, allow.
    """
    check_choice("routing", routing, ROUTINGS)
    x, ids, mapped = call.x_TD, call.ids_TK, call.expert_map
    E = call.w13_EFD.shape[0] if mapped is None else mapped.shape[0]
    g = torch.Generator().manual_seed(seed)
    # The largest K of log p + Gumbel noise are K draws without replacement.
    noise_TE = -torch.rand(tokens, E, generator=g).clamp(min=1e-20).log().neg().log()
    if routing == "zipf":
        popularity = torch.randperm(E, generator=torch.Generator().manual_seed(0)) + 1
        noise_TE -= popularity.log()
    ids_TK = noise_TE.topk(ids.shape[1], dim=-1).indices.to(ids.device, ids.dtype)
    weights = torch.rand(tokens, ids.shape[1], generator=g).softmax(-1)
    x_TD = torch.randn(tokens, x.shape[1], generator=g).to(x.device, x.dtype)
    return x_TD, weights.to(ids.device, call.weights_TK.dtype), ids_TK
