"""Parts of a model, and its `generate`, run on a prompt alone and beside others, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from moe_ops.compiler import compile
from moe_ops.forward.regions import decoder_layers
from moe_ops.interop.interrupts import let_through

OTHERS = "torch or Inductor computes it, whose sums may depend on the number of rows"
ATTENTION = "the attention of a prompt is torch's, or the model's own"


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def alone(self, batch: int) -> Call:
        """The call of the first of so many sequences."""

        def first(x: Any) -> Any:
            return x[:1].clone() if isinstance(x, Tensor) and x.shape[:1] == (batch,) else x

        return Call(*tree_map(first, (self.args, self.kwargs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a model: the name of a module, its class, and why its bits differ; "" if not."""

    name: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """How many of so many new tokens, and of the steps' logits, are the same. Why `generate`
    refuses, "" if it does not."""

    steps: int
    tokens: int = 0
    logits: int = 0
    why: str = ""


class Alone(nn.Module):
    """A module that is compiled by itself; torch compiles no forward of its own modules."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module inside gives."""
        return self.inside(*args, **kwargs)


def parts(model: Any, ids: Tensor) -> Iterator[Part]:
    """The children of each decoder layer, and what has no children outside the layers, each given
    the same inputs alone as in company: what differs there differs by itself."""
    modules = modules_of(model)
    for name, call in calls_of(model, modules, ids).items():
        module = modules[name]
        why = difference(module, call, len(ids))
        yield Part(name=name, kind=type(module).__name__, why=why)


def modules_of(model: Any) -> dict[str, nn.Module]:
    """The modules that are compared, by name."""
    layers = decoder_layers(model)
    found = {}
    for name, module in model.named_modules():
        inside = name.startswith(f"{layers}.")
        is_leaf = next(module.children(), None) is None
        is_child = inside and name.removeprefix(f"{layers}.").count(".") == 1
        if is_child or (is_leaf and not inside and name != layers):
            found[name] = module
    return found


def calls_of(model: Any, modules: dict[str, nn.Module], ids: Tensor) -> dict[str, Call]:
    """The first call of each module in a forward of the model, in the order of calls."""
    calls: dict[str, Call] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, Call(args, kwargs))

        return hook

    hooks = [
        m.register_forward_pre_hook(note(name), with_kwargs=True) for name, m in modules.items()
    ]
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def difference(module: nn.Module, call: Call, batch: int) -> str:
    """Why a compiled module gives the first sequence other bits in company than alone, or ""."""
    run = compile(Alone(module), batch_invariant=True, strict=True)
    own = call.alone(batch)
    try:
        with torch.inference_mode():
            beside, alone = run(*call.args, **call.kwargs), run(*own.args, **own.kwargs)
    except Exception as error:  # whatever refuses, be it in torch's compiler
        let_through(error)
        return reason_of(error)
    pairs = zip(tensors(beside), tensors(alone), strict=True)
    if all(same_bits(a[: len(b)], b) for a, b in pairs):
        return ""
    if "Attention" in type(module).__name__:
        return ATTENTION
    return OTHERS


def reason_of(error: BaseException) -> str:
    """What the innermost cause of an error says, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return "; ".join(line for line in lines[:6] if line) or type(error).__name__


def tensors(out: Any) -> list[Tensor]:
    """The tensors in what a module gives."""
    return [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.dim() > 0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def generated(model: Any, ids: Tensor, steps: int) -> Generated:
    """`generate` of the compiled model, for the first sequence alone and beside the others."""
    twin = compile(model, batch_invariant=True)
    options = {
        "max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "pad_token_id": 0,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    try:
        alone, beside = (twin.generate(given, **options) for given in (ids[:1], ids))
    except NotImplementedError as error:
        return Generated(steps=steps, why=reason_of(error))
    tokens = alone.sequences[0, -steps:] == beside.sequences[0, -steps:]
    logits = [same_bits(a[0], b[0]) for a, b in zip(alone.logits, beside.logits, strict=True)]
    return Generated(steps=steps, tokens=int(tokens.sum()), logits=sum(logits))
