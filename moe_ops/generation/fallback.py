"""transformers' own `generate` of a compiled model: it starts as soon as that of the model itself,
and is as quick, as it compiles nothing that that would not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig

from moe_ops.interop.hooks import Hooks, hooks_of
from moe_ops.interop.subclass import former_class, new_object, subclass
from moe_ops.interop.switches import check_sequences_of
from moe_ops.interop.told import begin, told_of

CompileModel = Callable[[nn.Module], Callable[..., Any]]

# The model whose `generate` is transformers' own in this context. None in one that is by steps.
_own: ContextVar[Any] = ContextVar("own", default=None)


@contextmanager
def call_of_generate(own: Any = None) -> Iterator[None]:
    """A context around a call of `generate`: transformers' own of the model `own`, or, if there is
    none, by steps until it has to `fall_back`."""
    token = _own.set(own)
    try:
        yield
    finally:
        _own.reset(token)


def fall_back(model: Any) -> None:
    """Have the rest of this call of `generate` be transformers' own."""
    _own.set(model)


def falls_back(model: Any) -> bool:
    """Whether this is inside a call of the model's `generate` that is transformers' own."""
    return _own.get() is model


class Fallback:
    """What transformers' own `generate` of a twin begins with, `follow`, and what it compiles. One
    that is batch_invariant has none, as the model's own code is not."""

    def __init__(
        self, compile_model: CompileModel, follow: Callable[[], None], batch_invariant: bool
    ) -> None:
        self.follow, self.batch_invariant = follow, batch_invariant
        self.of_model = ""  # why no call runs by steps, if none does
        self._compile = compile_model
        self._last: tuple[Hooks, Callable[..., Any]] | None = None

    def require(self, reason: str) -> None:
        """Raise NotImplementedError, with the reason, where nothing may fall back."""
        if self.batch_invariant:
            raise NotImplementedError(
                "batch_invariant: this call of generate cannot run by steps, and transformers' own "
                f"is not batch invariant: {reason}"
            )

    def step_of(self, model: nn.Module) -> Callable[..., Any]:
        """The model, compiled for the hooks that it has now, which Dynamo does not look at."""
        hooks = hooks_of(model)
        if self._last is None or self._last[0] != hooks:
            self._last = hooks, self._compile(model)
        return self._last[1]


class MayFallBack:
    """What stands before the class of a compiled model: where `generate` is transformers' own, the
    model's own code runs, uncompiled. What transformers compiles, steps with a static cache on a
    GPU, has our passes. Copies, and what is pickled, are of the model's class and uncompiled."""

    _moe_ops_fallback: Fallback

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        ours = {"_moe_ops_fallback", "_moe_ops_generation"}
        state = {name: value for name, value in reduced[2].items() if name not in ours}
        # Not what object gives: pickle takes that for objects of the same class alone.
        return new_object, (former_class(self),), state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            check_sequences_of(self, args, kwargs)  # type: ignore[arg-type]
            if falls_back(self):
                begin(self, args, kwargs)  # type: ignore[arg-type]
                return self._call_impl(*args, **kwargs)  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def get_compiled_call(self, compile_config: CompileConfig | None) -> Any:
        is_never_compiled = "llama4" in self.config.model_type  # type: ignore[attr-defined]
        if compile_config is not None or is_never_compiled:
            return super().get_compiled_call(compile_config)  # type: ignore[misc]
        step = self._moe_ops_fallback.step_of(self)  # type: ignore[arg-type]
        if told_of(self) is None:  # type: ignore[arg-type]
            return step

        def told_step(*args: Any, **kwargs: Any) -> Any:
            begin(self, args, kwargs)  # type: ignore[arg-type]
            return step(*args, **kwargs)

        return told_step


@functools.cache
def with_own_generate(cls: Any) -> Any:
    """The class of a compiled model none of whose calls of `generate` can run by steps."""

    @functools.wraps(cls.generate)  # a model may have one with another signature
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._moe_ops_fallback.require(self._moe_ops_fallback.of_model)
        self._moe_ops_fallback.follow()
        with call_of_generate(own=self):
            return cls.generate(self, *args, **kwargs)

    made = subclass(MayFallBack, cls)
    made.generate = generate
    return made
