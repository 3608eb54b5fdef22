"""A pytest plugin: transformers' tests, with every MoE model that they build on our ops.

`python -m tests.peers` loads it, by its name, into pytest in a checkout of transformers, whose
tests are a package `tests` as ours are. How models are changed is said by `--moe-ops`:

stock      as transformers builds them
optimize   `moe_ops.optimize` at the end of the outermost `__init__`, so that models which are
           loaded, copied or saved are optimised too
compile    each call without gradients, and `generate`, go to `moe_ops.compile` of the model
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel

import moe_ops
from moe_ops.hf.optimize import is_experts
from moe_ops.registry.spec import OPS

MODES = ("stock", "optimize", "compile")
# What is run of the compiled models: forwards and `generate`, but not what compiles by itself.
COMPILED = ("generate", "forward", "batching")
NOT_COMPILED = ("export", "compil", "train", "flash", "_fa2", "_fa3", "_fa4", "pipeline")


class Counts:
    """How often ops of `moe_ops` ran, and how deep we are in constructors of models."""

    calls = 0
    depth = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--moe-ops", choices=MODES, default="stock")
    parser.addoption("--moe-ops-report", type=Path, help="a file for one line of JSON a test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mode = config.getoption("--moe-ops")
    if mode == "stock":
        return
    count_calls()
    for cls in set(model_classes(PreTrainedModel)):
        if "__init__" in vars(cls):
            cls.__init__ = changed_init(cls.__init__, CHANGES[mode])
    if mode == "compile":
        GenerationMixin.generate = compiled_generate(GenerationMixin.generate)
        items[:] = [item for item in items if is_compiled_test(item.name)]


def is_compiled_test(name: str) -> bool:
    chosen = name == "test_model" or any(n in name for n in COMPILED)
    return chosen and not any(n in name for n in NOT_COMPILED)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same random weights and inputs in every mode."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    Counts.calls = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    path = item.config.getoption("--moe-ops-report")
    if path is not None and (report.when == "call" or report.outcome != "passed"):
        line = {
            "test": item.nodeid.split("::", 1)[1],
            "outcome": report.outcome,
            "calls": Counts.calls,
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report


def count_calls() -> None:
    """Count what backends run of the layer: routers, experts, and their stages."""
    for op in OPS.values():
        for backend in list(op.backends.values()):
            alike = backend.alike and counted_alike(backend.alike)
            op._put(replace(backend, run=counted(backend.run), alike=alike))


def counted(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def count(*args: Any, **kwargs: Any) -> Any:
        Counts.calls += 1
        return run(*args, **kwargs)

    return count


def counted_alike(alike: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def bind(call: Any) -> Any:
        direct = alike(call)
        return None if direct is None else counted(direct)

    return bind


def model_classes(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from model_classes(sub)


def changed_init(init: Callable[..., None], change: Callable[[Any], None]) -> Callable[..., None]:
    """A constructor after which the outermost model is changed, if it has experts."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        Counts.depth += 1
        try:
            init(self, *args, **kwargs)
        finally:
            Counts.depth -= 1
        if Counts.depth == 0 and any(map(is_experts, self.modules())):
            change(self)

    return __init__


class CompiledCall:
    """What `model(...)` calls: a compiled twin, made anew when the model has changed."""

    def __init__(self, model: Any) -> None:
        self.model, self.made_of, self.made = model, None, None

    def twin(self) -> Any:
        model = self.model
        parts = [*model.parameters(), *model.buffers(), *model.modules()]
        now = [*map(id, parts), model.training, str(model.config), next(model.parameters()).dtype]
        if self.made_of != now:
            self.made_of, self.made = now, moe_ops.compile(model)
        return self.made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.model._call_impl(*args, **kwargs)
        return self.twin()(*args, **kwargs)


def compile_calls(model: Any) -> None:
    model._compiled_call_impl = CompiledCall(model)


def compiled_generate(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def through_twin(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = self._compiled_call_impl
        if isinstance(call, CompiledCall) and call.model is self:
            return call.twin().generate(*args, **kwargs)
        return generate(self, *args, **kwargs)

    return through_twin


CHANGES: dict[str, Callable[[Any], Any]] = {
    "optimize": moe_ops.optimize,
    "compile": compile_calls,
}
