"""What an experts module holds when its weights are quantised: formats, and names of tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.interop.subclass import former_class, new_object, subclass
from moe_ops.ops.activate import Activation
from moe_ops.prepared import HoldsExperts, Stored, as_given
from moe_ops.quant.module import HoldsCodes
from moe_ops.quant.scales import product

_STORED = "_moe_ops_stored"
CODES = "_codes"
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
INPUT_SCALE = "_input_scale"
PARTS = (CODES, "_scale", "_zero", "_global_scale", INPUT_SCALE)
ADAPT_FIRST = (
    "add an adapter of the experts by moe_ops.add_adapter or load_adapter; to merge one, load the "
    "model again, adapt it, merge_and_unload and quantise then"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How a module's weights are quantised, and under which suffixes its tensors stand.

    Both weights have their rows as outputs, whatever the module's class says.
    """

    activation: Activation
    w_format: str
    x_format: str
    codes_suffix: str = CODES
    scale_suffix: str = "_scale"
    repeat_rows: bool = False  # one scale for all rows of a half, repeated for each row
    static_inputs: bool = False  # the module holds the scales of the inputs of both weights

    @property
    def projections(self) -> tuple[str, str]:
        """The names of both weights."""
        return "gate_up_proj" if self.activation.gated else "up_proj", "down_proj"

    def arguments(self, module: nn.Module) -> dict[str, Any]:
        """The arguments of the `experts` op that belong to the format."""
        first, second = self.projections
        x_scale, h_scale = (getattr(module, p + INPUT_SCALE, None) for p in (first, second))
        return {
            "w13_scale_EFG": self._scale(module, first),
            "w2_scale_EDG": self._scale(module, second),
            "w13_zero_EFG": getattr(module, f"{first}_zero", None),
            "w2_zero_EDG": getattr(module, f"{second}_zero", None),
            "global_scale13_E": product(getattr(module, f"{first}_global_scale", None), x_scale),
            "global_scale2_E": product(getattr(module, f"{second}_global_scale", None), h_scale),
            "x_scale": x_scale,
            "h_scale": h_scale,
            "w_format": self.w_format,
            "x_format": self.x_format,
            "layout": module.layout if isinstance(module, HoldsExperts) else "",
        }

    def _scale(self, module: nn.Module, projection: str) -> Tensor:
        scale: Tensor = getattr(module, projection + self.scale_suffix)
        scale = as_given(scale)
        if self.repeat_rows:
            rows = getattr(module, projection + self.codes_suffix).shape[1]
            scale = scale.repeat_interleave(rows // scale.shape[1], dim=1)
        return scale.detach()


class QuantizedExperts(HoldsExperts, HoldsCodes):
    """What `store` puts before the class of an experts module.

    The weight of a projection is in <projection>_codes; under the projection's own name is the
    format, as text in bytes: a module of floats cannot take the state dict for its own, as the
    shapes differ, and one that is quantised otherwise reads what it was given.
    """

    _moe_ops_stored: StoredFormat

    def coded(self) -> Iterator[str]:
        return (f"{p}{part}" for p in PROJECTIONS for part in ("", *PARTS))

    @property
    def expert_names(self) -> dict[str, str]:  # type: ignore[override]
        stored = self._moe_ops_stored
        if stored.repeat_rows:
            raise ValueError(
                f"{type(self).__name__} holds one scale for all rows of a weight, which no layout "
                "can reorder; leave it as it was loaded"
            )
        gated = stored.activation.gated
        first, second = "gate_up_proj" if gated else "up_proj", "down_proj"
        names = {
            "w13_EFD": first + stored.codes_suffix,
            "w2_EDI": second + stored.codes_suffix,
            "w13_scale_EFG": first + stored.scale_suffix,
            "w2_scale_EDG": second + stored.scale_suffix,
            "w13_zero_EFG": f"{first}_zero",
            "w2_zero_EDG": f"{second}_zero",
            "b13_EF": f"{first}_bias",
            "b2_ED": f"{second}_bias",
        }
        return {given: name for given, name in names.items() if hasattr(self, name)}

    @property
    def is_transposed(self) -> NoReturn:
        # What adapts or multiplies the weights of experts asks for it first, as peft does.
        raise ValueError(
            f"{type(self).__name__} holds codes of {self._moe_ops_stored.w_format}, so there are "
            f"no weights to lay out, to adapt or to multiply by; {ADAPT_FIRST}"
        )

    def __delattr__(self, name: str) -> None:
        # torch's parametrizations take the parameter away that they compute from then on.
        if name in self.coded():
            raise ValueError(
                f"{type(self).__name__} holds codes of {self._moe_ops_stored.w_format}, of which "
                f"{name} is a part: nothing can be put in its place; {ADAPT_FIRST}"
            )
        super().__delattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # Not what object gives: pickle finds classes by name, and this one has the name of another.
        return _new_quantized, (former_class(self),), reduced[2]

    def _refusals(self, state_dict: dict[str, Any], prefix: str) -> Iterable[str]:
        stored = self._moe_ops_stored
        for name in PROJECTIONS:
            given = state_dict.get(prefix + name)
            if given is None and f"{prefix}{name}{CODES}" not in state_dict:
                continue
            if not isinstance(given, Tensor) or given.dtype != torch.uint8 or given.dim() != 2:
                yield (
                    f"{prefix}{name} is no quantised weight in the state dict, but this "
                    f"{type(self).__name__} holds codes of {stored.w_format}; load the weights "
                    "before quantize_model"
                )
            elif not given.is_meta and format_of(given) != stored.w_format:
                yield (
                    f"{prefix}{name} is {format_of(given)} in the state dict, but this "
                    f"{type(self).__name__} holds codes of {stored.w_format}; quantise the model "
                    "to the same format"
                )
        yield from super()._refusals(state_dict, prefix)


def format_text(format: str) -> Tensor:
    """A format as a tensor [1, bytes]."""
    return torch.tensor([list(format.encode())], dtype=torch.uint8)


def format_of(text: Tensor) -> str:
    """The format that `format_text` wrote."""
    return bytes(text.flatten().tolist()).decode(errors="replace")


def stored_format(module: nn.Module) -> StoredFormat | None:
    """The format of a module that `store` changed, or None."""
    return getattr(module, _STORED, None)


def store(module: nn.Module, found: StoredFormat, tensors: dict[str, Tensor]) -> None:
    """Put quantised tensors into a module in place of its weights, and remember their format.

    `tensors`: by the names of projections, of which each weight gives way to its codes, and of what
    belongs to them. All of them move with the model and are in its state dict, in their own dtype
    whatever the model is cast to.
    """
    for name, t in tensors.items():
        if name in PROJECTIONS:
            text = format_text(found.w_format).to(t.device)
            module._parameters[name] = nn.Parameter(text, requires_grad=False)
            module.register_parameter(name + CODES, nn.Parameter(t, requires_grad=False))
        else:
            module.register_buffer(name, t)
    setattr(module, _STORED, found)
    if not isinstance(module, QuantizedExperts):
        module._stored = Stored()  # type: ignore[assignment]
        module.__class__ = subclass(QuantizedExperts, type(module))  # type: ignore[arg-type]


def refuse_to_save(model: PreTrainedModel, why: str) -> None:
    """Make `save_pretrained` of a model with quantised experts, and of the models in it, raise."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # A partial, because a local function could not be pickled.
            module.save_pretrained = functools.partial(_refuse, type(module).__name__, why)


def _refuse(name: str, why: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"the experts of this {name} hold quantised weights {why}: save the model before its "
        "experts are quantised, or torch.save(model.state_dict()) and load_state_dict it into a "
        "model that is quantised alike"
    )


def _new_quantized(cls: type[nn.Module]) -> Any:
    return new_object(subclass(QuantizedExperts, cls))  # type: ignore[arg-type]


globals()["_new_quantised"] = _new_quantized  # the name that pickles of earlier versions hold
