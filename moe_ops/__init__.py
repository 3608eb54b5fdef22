"""Mixture-of-Experts layers as composable torch.library ops."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

import moe_ops.backends  # noqa: F401  (registers the backends)
from moe_ops import decode_ops, fake_impls, ops, quant, ranks
from moe_ops.checks.signature import did_you_mean
from moe_ops.installed import __version__, clash, lacks_transformers, refuse_experts
from moe_ops.interop import aot_cache
from moe_ops.interop.import_hook import when_imported
from moe_ops.ops import (
    activate,
    activate_backward,
    combine,
    combine_tokens,
    dispatch,
    dispatch_tokens,
    expert_gemm,
    expert_loads,
    expert_wgrad,
    expert_wgrad_onto,
    experts,
    experts_accumulating,
    experts_adapted,
    experts_adapted_backward,
    experts_adapted_saving,
    experts_backward,
    experts_batched,
    experts_over_ranks,
    experts_saving,
    moe,
    quantize,
    route,
    route_recording,
    route_replaying,
    sum_ranks,
)
from moe_ops.registry import formulas, gradients, registration, rules, spec
from moe_ops.registry.layouts import Layout
from moe_ops.registry.spec import OPS, Op
from moe_ops.registry.using import using

# The same for type checkers and editors, which read this file and import nothing.
if TYPE_CHECKING:
    from moe_ops.backends.flashinfer.options import flashinfer_options
    from moe_ops.compiler import backend, compile, compile_config, explain, graph_report
    from moe_ops.exporting.tables import decompositions
    from moe_ops.generation import generation_report
    from moe_ops.graphs.capture import buckets_of, capture
    from moe_ops.halves import plan_halves, two_halves
    from moe_ops.hf.adapters.added import (
        add_adapter,
        merge_adapter,
        remove_adapter,
        set_adapter,
    )
    from moe_ops.hf.adapters.files import load_adapter, save_adapter
    from moe_ops.hf.adapters.rows import adapters
    from moe_ops.hf.optimize import optimize, restore
    from moe_ops.hf.over_ranks import share_experts
    from moe_ops.hf.quantize import quantize_model
    from moe_ops.layer import MoELayer, Routing
    from moe_ops.main_grad import accumulate_into_main_grad
    from moe_ops.passes.inductor.compiled import inductor_options
    from moe_ops.planning.tune import tune
    from moe_ops.prepared import prepare
    from moe_ops.published import from_checkpoint
    from moe_ops.quant.config import QuantConfig
    from moe_ops.quant.straight_through import fake_quantize
    from moe_ops.recorded.models import record_routing, replay_routing
    from moe_ops.recorded.routing import RecordedRouting
    from moe_ops.restricted import restrict_experts

# Names that need transformers, or Inductor, or that few need, are imported when first asked for.
_OF_TRANSFORMERS = {
    **dict.fromkeys(("optimize", "restore", "quantize_model", "share_experts"), "moe_ops.hf"),
    **dict.fromkeys(
        ("add_adapter", "merge_adapter", "remove_adapter", "set_adapter"),
        "moe_ops.hf.adapters.added",
    ),
    **dict.fromkeys(("load_adapter", "save_adapter"), "moe_ops.hf.adapters.files"),
    "adapters": "moe_ops.hf.adapters.rows",
    "from_checkpoint": "moe_ops.published",
    "generation_report": "moe_ops.generation",
}
_LAZY = {
    **_OF_TRANSFORMERS,
    **dict.fromkeys(("compile", "compile_config", "explain", "graph_report"), "moe_ops.compiler"),
    "inductor_options": "moe_ops.passes.inductor.compiled",
    **dict.fromkeys(("buckets_of", "capture"), "moe_ops.graphs.capture"),
    "decompositions": "moe_ops.exporting.tables",
    "flashinfer_options": "moe_ops.backends.flashinfer.options",
    "fake_quantize": "moe_ops.quant.straight_through",
    "tune": "moe_ops.planning.tune",
    "accumulate_into_main_grad": "moe_ops.main_grad",
    "prepare": "moe_ops.prepared",
    **dict.fromkeys(("MoELayer", "Routing"), "moe_ops.layer"),
    **dict.fromkeys(("plan_halves", "two_halves"), "moe_ops.halves"),
    **dict.fromkeys(("record_routing", "replay_routing"), "moe_ops.recorded.models"),
    "RecordedRouting": "moe_ops.recorded.routing",
    "QuantConfig": "moe_ops.quant.config",
    "restrict_experts": "moe_ops.restricted",
}

__all__ = [
    "OPS",
    "Layout",
    "MoELayer",
    "Op",
    "QuantConfig",
    "RecordedRouting",
    "Routing",
    "__version__",
    "accumulate_into_main_grad",
    "activate",
    "activate_backward",
    "adapters",
    "add_adapter",
    "backend",
    "buckets_of",
    "capture",
    "combine",
    "combine_tokens",
    "compile",
    "compile_config",
    "decompositions",
    "dispatch",
    "dispatch_tokens",
    "expert_gemm",
    "expert_loads",
    "expert_wgrad",
    "expert_wgrad_onto",
    "experts",
    "experts_accumulating",
    "experts_adapted",
    "experts_adapted_backward",
    "experts_adapted_saving",
    "experts_backward",
    "experts_batched",
    "experts_over_ranks",
    "experts_saving",
    "explain",
    "fake_quantize",
    "flashinfer_options",
    "from_checkpoint",
    "generation_report",
    "graph_report",
    "inductor_options",
    "load_adapter",
    "merge_adapter",
    "moe",
    "optimize",
    "plan_halves",
    "prepare",
    "quantize",
    "quantize_model",
    "record_routing",
    "remove_adapter",
    "replay_routing",
    "restore",
    "restrict_experts",
    "route",
    "route_recording",
    "route_replaying",
    "save_adapter",
    "set_adapter",
    "share_experts",
    "sum_ranks",
    "tune",
    "two_halves",
    "using",
]


class _Backend(ModuleType):
    """The module `backend`, which other code imports from here, and which is called as the
    function `moe_ops.compiler.backend`."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(importlib.import_module("moe_ops.compiler").backend)

    def __call__(self, **options: Any) -> Any:
        return importlib.import_module("moe_ops.compiler").backend(**options)


# Other code imports these modules from here, where `using` is the function, too.
for _name in ("backend", "spec", "using"):
    sys.modules[f"moe_ops.{_name}"] = sys.modules[f"moe_ops.registry.{_name}"]
del _name
globals()["backend"] = sys.modules["moe_ops.backend"]
sys.modules["moe_ops.backend"].__class__ = _Backend

# What a graph that is traced with our ops may hold.
_TRACED = (
    registration, spec, formulas, gradients, rules, ops, decode_ops, ranks, fake_impls, quant,
)  # fmt: skip
aot_cache.tag(*_TRACED)


def _join() -> None:
    """Import what tells transformers of us, in the middle of an import of transformers: one that is
    too old for us has to remain of use."""
    fault = lacks_transformers()
    if fault is None:
        importlib.import_module("moe_ops.hf")
    else:
        logging.getLogger("moe_ops").warning("transformers is not told of moe_ops, which %s", fault)
        refuse_experts("moe_ops", fault)


# So that `from_pretrained` finds models whose experts we quantised, and knows the experts
# implementation "moe_ops", without an import of its own.
when_imported("transformers.modeling_utils", _join)
if fault := clash():
    warnings.warn(fault, stacklevel=2)


def __dir__() -> list[str]:
    """Every name, imported or not; without a transformers that will do, those that can be had."""
    missing = _OF_TRANSFORMERS if lacks_transformers() else ()
    return sorted({*globals(), *__all__}.difference(missing))


if not TYPE_CHECKING:  # to whom every name would be right, as this has any

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        found = importlib.import_module("moe_ops.checks.renamed").what_was("moe_ops", name)
        if found is not None:
            return found
        hint = did_you_mean(name, __all__)
        raise AttributeError(f"module 'moe_ops' has no attribute {name!r}{hint}")
