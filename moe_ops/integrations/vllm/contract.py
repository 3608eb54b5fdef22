"""What the plugin relies on in vLLM: names, and what they take. `register` asks the installed vLLM
for it, and a test the published wheel."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WRITTEN_FOR = "0.33.0"
REPLACED = "UnquantizedFusedMoEMethod"
LAYERS = "vllm.model_executor.layers.fused_moe"


@dataclass(frozen=True, slots=True)
class Function:
    """A function of vLLM that is called or overridden, with its parameters in order."""

    module: str
    name: str  # of a method: Class.method
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Names:
    """Names that a class of vLLM defines: fields, properties, members, or attributes of self."""

    module: str
    owner: str
    names: tuple[str, ...]


FUNCTIONS = (
    Function("vllm.model_executor.custom_op", "CustomOp.register_oot",
             ("_decorated_op_cls", "name")),
    Function("vllm.logger", "init_logger", ("name",)),
    Function(f"{LAYERS}.fused_moe_method_base", "FusedMoEMethodBase.__init__", ("moe",)),
    Function(f"{LAYERS}.unquantized_fused_moe_method", f"{REPLACED}.create_weights",
             ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition",
              "params_dtype")),
    Function(f"{LAYERS}.unquantized_fused_moe_method",
             f"{REPLACED}.process_weights_after_loading", ("layer",)),
    Function(f"{LAYERS}.unquantized_fused_moe_method", f"{REPLACED}.apply",
             ("layer", "x", "topk_weights", "topk_ids", "shared_experts",
              "shared_experts_input")),
    Function(f"{LAYERS}.routed_experts", "RoutedExperts.forward_modular",
             ("x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")),
)  # fmt: skip
NAMES = (
    Names("vllm.model_executor.custom_op", "", ("op_registry_oot",)),
    Names(f"{LAYERS}.oracle.unquantized", "UnquantizedMoeBackend", ("OOT",)),
    Names(f"{LAYERS}.fused_moe_method_base", "FusedMoEMethodBase",
          ("is_monolithic", "supports_eplb", "moe_kernel")),
    Names(f"{LAYERS}.routed_experts", "RoutedExperts",
          ("layer_name", "moe_config", "activation", "expert_map", "swiglu_limit", "swiglu_alpha",
           "swiglu_beta", "apply_router_weight_on_input")),
    Names(f"{LAYERS}.config", "FusedMoEConfig",
          ("experts_per_token", "in_dtype", "is_lora_enabled", "moe_parallel_config")),
    Names(f"{LAYERS}.config", "FusedMoEParallelConfig",
          ("tp_size", "tp_rank", "dp_size", "pcp_size", "sp_size")),
)  # fmt: skip


def missing() -> list[str]:
    """What the installed vLLM lacks, a sentence each; none: the plugin fits."""
    found = [said for wanted in FUNCTIONS if (said := _without_function(wanted))]
    return found + [said for wanted in NAMES if (said := _without_names(wanted))]


def _without_function(wanted: Function) -> str | None:
    try:
        got: Any = importlib.import_module(wanted.module)
        for name in wanted.name.split("."):
            got = getattr(got, name)
    except (ImportError, AttributeError):
        return f"there is no {wanted.name} in {wanted.module}"
    given = inspect.signature(got).parameters.values()
    return difference(wanted, tuple(p.name for p in given if p.kind is not p.VAR_KEYWORD))


def difference(wanted: Function, given: tuple[str, ...]) -> str | None:
    """How the parameters of a function differ from those that are wanted, or None. It may take
    further keywords that have no names."""
    names = tuple(name for name in given if name not in ("self", "cls"))
    if names == wanted.parameters:
        return None
    return f"{wanted.name} takes {', '.join(names)}, not {', '.join(wanted.parameters)}"


def _without_names(wanted: Names) -> str | None:
    try:
        owner = importlib.import_module(wanted.module)
        if wanted.owner:
            owner = getattr(owner, wanted.owner)
    except (ImportError, AttributeError):
        return f"there is no {wanted.owner or 'module'} in {wanted.module}"
    # Fields without defaults are in annotations alone, and attributes of self in the source.
    fields, source = getattr(owner, "__annotations__", {}), inspect.getsource(owner)
    return lacking(wanted, lambda n: hasattr(owner, n) or n in fields or f"self.{n}" in source)


def lacking(wanted: Names, has: Callable[[str], bool]) -> str | None:
    """Which of the names a class or a module has not, or None."""
    gone = ", ".join(name for name in wanted.names if not has(name))
    return f"{wanted.owner or wanted.module} has no {gone}" if gone else None
