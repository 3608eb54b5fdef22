"""Kinds of functions that linear layers of transformers call, and whether a function is of one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from moe_ops.generation import linear_functions
from moe_ops.interop.interrupts import let_through

Function = Callable[..., Any]
Sample = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call


@dataclass(frozen=True, slots=True)
class Kind:
    """What computes functions of a kind, and calls of which one shows that a function is of it;
    whether they write to a state that they are given."""

    ours: Function
    samples: tuple[Callable[[], Sample], ...]
    writes: bool = False


def parameters_of(function: Function) -> tuple[str, ...]:
    """The names of a function's parameters, but for those that take what has none."""
    packs = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(function).parameters.values()
    return tuple(p.name for p in found if p.kind not in packs)


def agree(function: Function, kind: Kind) -> bool:
    """Whether a function computes what ours does, on a few numbers."""
    return any(_same(function, kind, sample) for sample in kind.samples)


def _same(function: Function, kind: Kind, sample: Callable[[], Sample]) -> bool:
    """Whether a function gives what ours does for a call, and leaves the same in its tensors."""
    left = []
    with torch.no_grad(), unset_fake_temporarily():
        for run in (kind.ours, function):
            args, kwargs = sample()
            try:
                out = run(*args, **kwargs)
            except Exception as error:  # whatever somebody's function raises for what it lacks
                if run is kind.ours:
                    raise
                let_through(error)
                return False
            left.append([out, *(args if kind.writes else ())])
    want, got = ([x for x in tree_leaves(found) if isinstance(x, Tensor)] for found in left)
    return len(want) == len(got) and all(
        a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-4)
        for a, b in zip(want, got, strict=True)
    )


class Noise:
    """Numbers that are the same for each sample."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")


B, N, H, D, V = 2, 2, 4, 8, 6  # sizes of the samples, as the ops name them


def rule(T: int, keys: int, channels: bool = False) -> Sample:
    """The gated delta rule over so many tokens with so many heads of the keys, with a gate for each
    channel or for each head."""
    noise = Noise()
    given = noise(B, T, keys, D), noise(B, T, keys, D), noise(B, T, H, V)
    gates = noise(B, T, H, D).abs() if channels else noise(B, T, H).abs()
    return given, {
        "g": -gates,
        "beta": noise(B, T, H).sigmoid(),
        "initial_state": noise(B, H, D, V),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def rules(T: int) -> tuple[Callable[[], Sample], ...]:
    """Each kind of rule: of transformers' functions none takes all; some want a key for each
    head."""
    return (
        functools.partial(rule, T, N),
        functools.partial(rule, T, H),
        functools.partial(rule, T, H, True),
    )


def scan() -> Sample:
    """A state space over the tokens of a prompt."""
    noise, T = Noise(), 40
    dt, a = noise(B, T, H), -noise(H).exp()
    return (noise(B, T, H, V), dt, a, noise(B, T, N, D), noise(B, T, N, D)), {
        "chunk_size": 16,
        "D": noise(H),
        "dt_bias": noise(H),
        "initial_states": noise(B, H, V, D),
        "dt_softplus": True,
        "dt_limit": (0.2, 2.0),
        "return_final_states": True,
    }


def state_update() -> Sample:
    """A state space's next token, with what is one number for a head repeated."""
    noise = Noise()
    dt, a = noise(B, H, 1).expand(-1, -1, V), (-noise(H, 1, 1).exp()).expand(-1, V, D)
    skip, bias = noise(H, 1).expand(-1, V), noise(H, 1).expand(-1, V)
    given = noise(B, H, V, D), noise(B, H, V), dt, a, noise(B, N, D), noise(B, N, D), skip
    return given, {"dt_bias": bias, "dt_softplus": True}


def convolution() -> Sample:
    noise = Noise()
    return (noise(B, H, 9), noise(H, 4), noise(H)), {"activation": "silu"}


def convolution_step() -> Sample:
    noise = Noise()
    return (noise(B, H, 1), noise(B, H, 4), noise(H, 4), noise(H)), {"activation": "silu"}


def _by_parameters(*kinds: Kind) -> dict[tuple[str, ...], Kind]:
    return {parameters_of(kind.ours): kind for kind in kinds}


KINDS = _by_parameters(
    Kind(linear_functions.chunked_delta_rule, rules(70)),
    Kind(linear_functions.stepped_delta_rule, rules(1)),
    Kind(linear_functions.scanned, (scan,)),
    Kind(linear_functions.updated_state, (state_update,), writes=True),
    Kind(linear_functions.convolved, (convolution,)),
    Kind(linear_functions.convolved_step, (convolution_step,), writes=True),
)
