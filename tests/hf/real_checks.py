"""What must hold of a family's model at real widths, on whatever device it is.

float32: compiled equals stock from end to end, and generates the same tokens. bfloat16: each layer,
fed stock's input, is as near to float32 of the same weights as stock is, on tokens whose routing
agrees; so is the whole model, of the tenth of tokens that are nearest: of others near-ties flip
experts in one layer or another.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.variables.torch import tracing_state_functions
from torch._inductor import config
from torch.utils._pytree import tree_map_only
from transformers import GenerationMixin, PreTrainedModel

import moe_ops
from moe_ops.passes.inductor.compiled import pipeline_of
from moe_ops.passes.report.summary import summarize
from moe_ops.testing import Tol, assert_close
from tests.hf import families, real
from tests.hf.overrides import EXTRA_INPUTS

FLOAT32 = Tol(1e-4, "float32 sums in another order, over six layers of real widths")
# From float32 than stock in bfloat16: of equals one is a bit ahead, in the worst token by more.
FURTHER, FURTHEST = 1.25, 3.0
NEAREST = 0.1  # of tokens; in six layers of DeepSeek-V3's router half of them had other experts
NOISE = 2.0**-5  # of a layer's input; several times what bfloat16 adds until the choice
DRAWS = 8
SIZES = [(1, 128), (3, 48)]  # batch, length: one sequence, on which transformers branches, and more
NEW_TOKENS = 8
# Dynamo of torch 2.11 says of all that it traces that it is exported; for exports transformers
# unrolls a solver of linear attention into 63 steps. A forward of one such layer then compiles in
# 44 s instead of 9, of which our passes take 0.1 s. Here it says what that of torch 2.13 says.
NOT_EXPORTED = patch.dict(tracing_state_functions(), {torch.compiler.is_exporting: False})
_DECODER_LAYER = re.compile(r"^(.+?\.\d+)\.")

Inputs = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What compiling made of a model: its layers of experts, and those that became ours."""

    layers: int
    ours: int


@dataclasses.dataclass(slots=True)
class LayerCall:
    """A decoder layer, what stock gave it, what it returned, and its experts of each token."""

    layer: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    out_TD: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    ids: list[Tensor] = dataclasses.field(default_factory=list)


@NOT_EXPORTED
@config.patch(fx_graph_cache=False)  # a graph from a cache does not say what passes found
def check_float32(family: str, device: str, sizes: list[tuple[int, int]]) -> Found | None:
    """Compiled in float32 the model gives stock's logits and tokens."""
    model, found = real.build(family, device=device, dtype=torch.float32), None
    twin = moe_ops.compile(model, strict=True)
    for batch, length in sizes:
        inputs = inputs_of(family, batch, length, device)
        assert_close(logits(twin, inputs), logits(model, inputs), FLOAT32, f"{batch} x {length}")
        found = found_in(model, twin) if (batch, length) == sizes[0] else found
    if can_generate(model):
        for batch, length in sizes:
            inputs = inputs_of(family, batch, length, device)
            tokens, want = generated(twin, inputs), generated(model, inputs)
            assert torch.equal(tokens, want), f"other tokens than stock at {batch} x {length}"
    return found


@NOT_EXPORTED
def check_layers(family: str, device: str, sizes: list[tuple[int, int]]) -> None:
    """In bfloat16 each layer that has experts, fed stock's input, equals stock's."""
    model = real.build(family, device=device, dtype=torch.bfloat16)
    for batch, length in sizes:
        check_each_layer(model, inputs_of(family, batch, length, device))


@NOT_EXPORTED
@config.patch(fx_graph_cache=False)
def check_forward(family: str, device: str, sizes: list[tuple[int, int]]) -> Found | None:
    """In bfloat16 the model's logits are as near to float32 as stock's."""
    model = real.build(family, device=device, dtype=torch.bfloat16)
    twin = moe_ops.compile(model, strict=True)
    pairs, found = [], None
    for batch, length in sizes:
        inputs = inputs_of(family, batch, length, device)
        pairs.append((inputs, logits(twin, inputs), logits(model, inputs)))
        found = found_in(model, twin) if (batch, length) == sizes[0] else found
    del twin
    model.float()  # last, and in place: both do not fit beside each other everywhere
    for inputs, ours, stock in pairs:
        exact = logits(model, inputs)
        assert torch.isfinite(ours).all()
        away, stock_away = (float(distance(x, exact).quantile(NEAREST)) for x in (ours, stock))
        assert away <= FURTHER * stock_away, f"ours is {away:.1%} away, stock {stock_away:.1%}"
    return found


@NOT_EXPORTED
def check_generate(family: str, device: str, sizes: list[tuple[int, int]]) -> None:
    """In bfloat16 the model generates as many tokens as it was asked for."""
    model = real.build(family, device=device, dtype=torch.bfloat16)
    if not can_generate(model):
        return
    twin = moe_ops.compile(model, strict=True)
    for batch, length in sizes:
        tokens = generated(twin, inputs_of(family, batch, length, device))
        assert tokens.shape == (batch, length + NEW_TOKENS)


def check_each_layer(model: PreTrainedModel, inputs: Inputs) -> None:
    """Each decoder layer with experts, compiled and fed stock's input, gives stock's output."""
    run = torch.compile(_call, options=moe_ops.inductor_options(strict=True))
    for name, call in recorded(model, inputs).items():
        with torch.inference_mode():
            got_TD = by_token(run(call.layer, call.args, call.kwargs))
        exact_TD, clear_T = in_float32(call)
        assert clear_T.float().mean() > 0.5, f"{name}: most tokens are near-ties, use others"
        ours_T, stock_T = (distance(x.float(), exact_TD)[clear_T] for x in (got_TD, call.out_TD))
        for times, what in ((FURTHER, torch.median), (FURTHEST, torch.max)):
            ours, stock = float(what(ours_T)), float(what(stock_T))
            told = f"{name}: ours is {ours:.2%} away, stock {stock:.2%} ({what.__name__} of tokens)"
            assert ours <= times * stock, told


def recorded(model: PreTrainedModel, inputs: Inputs) -> dict[str, LayerCall]:
    """The calls of decoder layers with experts in one forward of stock, by the layer's name."""
    calls = {}
    for name in families.experts(model):
        match = _DECODER_LAYER.match(name)
        assert match is not None, f"{name} is in no numbered layer"
        calls[match[1]] = LayerCall(model.get_submodule(match[1]))
    hooks = [hook for call in calls.values() for hook in _watch(call)]
    logits(model, inputs)
    for hook in hooks:
        hook.remove()
    return {name: call for name, call in calls.items() if call.ids}


def _watch(call: LayerCall) -> Iterator[Any]:
    def keep(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call.args, call.kwargs, call.out_TD = args, kwargs, by_token(out)

    yield call.layer.register_forward_hook(keep, with_kwargs=True)
    yield from _watch_ids(call.layer, call.ids)


def _watch_ids(layer: nn.Module, ids: list[Tensor]) -> Iterator[Any]:
    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        (ids_TK,) = [
            t for t in (*args, *kwargs.values())
            if isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point()
        ]  # fmt: skip
        ids.append(ids_TK.sort(-1).values)

    for module in families.experts(layer).values():
        yield module.register_forward_pre_hook(keep, with_kwargs=True)


def in_float32(call: LayerCall) -> tuple[Tensor, Tensor]:
    """What the layer gives in float32 [T, D], and which tokens [T] choose stock's experts there,
    also after noise as bfloat16 adds."""
    exact, seen, outs = copy.deepcopy(call.layer).float(), [], []
    hooks = list(_watch_ids(exact, seen))
    args, kwargs = tree_map_only(Tensor, _float32, (call.args, call.kwargs))
    (x,) = [*args, *(v for k, v in kwargs.items() if k == "hidden_states")][:1]
    for draw in range(1 + DRAWS):
        noisy = x * (1 + min(draw, 1) * NOISE * torch.randn_like(x))
        replaced = {k: noisy if v is x else v for k, v in kwargs.items()}
        with torch.inference_mode():
            outs.append(exact(*(noisy if v is x else v for v in args), **replaced))
    for hook in hooks:
        hook.remove()
    count = len(call.ids)
    same = [
        (call.ids[i % count] == ids_TK).all(-1)
        for i, ids_TK in enumerate(seen)
        if len(ids_TK) == len(call.out_TD)
    ]
    assert same, "no experts saw all tokens"
    return by_token(outs[0]), torch.stack(same).all(0)


def inputs_of(family: str, batch: int, length: int, device: str) -> Inputs:
    """Random token ids [B, S], and what else a forward of the family wants."""
    generator, shape = torch.Generator().manual_seed(batch * length), (batch, length)
    ids = torch.randint(real.FIRST_PLAIN_TOKEN, real.VOCAB, shape, generator=generator)
    inputs = {"input_ids": ids}
    for name, bound in EXTRA_INPUTS.get(family, {}).items():
        inputs[name] = torch.randint(bound, shape, generator=generator)
    return {name: value.to(device) for name, value in inputs.items()}


def logits(model: Any, inputs: Inputs) -> Tensor:
    """The logits in float32; of a model without a head, the last hidden state."""
    with torch.inference_mode():
        output = model(**inputs, use_cache=False)
    return (output.logits if "logits" in output else output.last_hidden_state).float()


def can_generate(model: PreTrainedModel) -> bool:
    return isinstance(model, GenerationMixin) and model.can_generate()


def generated(model: Any, inputs: Inputs) -> Tensor:
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)


def found_in(model: PreTrainedModel, twin: PreTrainedModel) -> Found | None:
    """How many layers of experts run on our ops after the twin's first forward.

    None if some are in no graph that is known: where Dynamo broke one, layers of one code share
    what it made. That of torch 2.11 does so in Qwen3-Next's linear attention in float32, and in
    bfloat16 does not.
    """
    pipeline = pipeline_of(twin)
    skipped = [run.skipped for run in pipeline.runs if run.skipped]
    assert not skipped, skipped
    summary = summarize(type(twin).__name__, twin, pipeline.found)
    if summary.unseen:
        return None
    return Found(layers=len(families.experts(model)), ours=summary.on_ours)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """How far apart tokens are, of their norm."""
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def by_token(out: Any) -> Tensor:
    """The hidden states [T, D] which a decoder layer returned."""
    hidden = out if isinstance(out, Tensor) else out[0]
    return hidden.flatten(0, -2)


def _call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return layer(*args, **kwargs)


def _float32(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() else t


CHECKS = {
    "float32": check_float32,
    "layers": check_layers,
    "forward": check_forward,
    "generate": check_generate,
}
