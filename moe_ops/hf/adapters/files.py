"""Adapters of experts as peft's files: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_ops.checks.options import check_flag, check_type
from moe_ops.hf.adapters.added import (
    TARGETS,
    AddedAdapters,
    Sizes,
    adaptable,
    added_to,
    check_known,
    check_name,
    first_of,
    put,
    where,
)
from moe_ops.hf.adapters.held import CHILD, MOST_RANK

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # what peft puts before the names of a model's modules
# What of peft's configuration has to be so, as nothing else is an adapter of ours.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "modules_to_save"), (None, {}, [])),
}
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where peft has the adapters of a module of experts: it wraps the weights one after the other,
    in the order in which the module has them, and names the outermost wrapper as the module."""

    path: str
    projections: tuple[str, str]  # of w13 and of w2
    order: tuple[str, ...]  # targets from the innermost to the outermost

    @classmethod
    def of(cls, path: str, module: nn.Module) -> Places:
        projections = first_of(module), "down_proj"
        known = list(module._parameters)
        order = sorted(zip(projections, TARGETS, strict=True), key=lambda x: known.index(x[0]))
        return cls(path=path, projections=projections, order=tuple(t for _, t in order))

    def keys(self, targets: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """The adapted targets with the beginnings of their keys."""
        outermost_first = [t for t in reversed(self.order) if t in targets]
        for depth, target in enumerate(outermost_first):
            yield target, f"{PREFIX}{self.path}{'.base_layer' * depth}"

    def parameter(self, target: str) -> str:
        """The name of the weight, as a configuration has it."""
        return f"{self.path}.{self.projections[TARGETS.index(target)]}"


def save_adapter(model: PreTrainedModel, folder: str | Path, name: str = "default") -> None:
    """Save an adapter of the experts as peft saves one that its `target_parameters` made.

    peft's `PeftModel.from_pretrained` loads the folder onto the model in floats, `load_adapter`
    onto a model in floats or codes. Raises ValueError for a name that the model lacks.
    """
    check_type("model", model, PreTrainedModel, "a transformers PreTrainedModel")
    check_type("folder", folder, (str, Path), "a folder")
    check_known(added_to(model), name)
    folder = Path(folder)
    tensors: dict[str, Tensor] = {}
    targets: list[str] = []
    found: tuple[float, int] | None = None
    for path, module in model.named_modules():
        child = module._modules.get(CHILD)
        if not isinstance(child, AddedAdapters) or name not in child.by_name:
            continue
        adapter, places = child.factors(name), Places.of(path, module)
        pairs = {t: p for t, p in zip(TARGETS, adapter.pairs, strict=True) if p is not None}
        for target, key in places.keys(tuple(pairs)):
            a, b = pairs[target]
            found = found or (adapter.scale, a.shape[1])
            if found != (adapter.scale, a.shape[1]):
                raise ValueError(
                    f"{path} has rank {a.shape[1]} and scale {adapter.scale}, others {found[1]} "
                    f"and {found[0]}, which one {CONFIG} does not say; save adapters of one rank"
                )
            tensors[f"{key}.lora_A.weight"] = a.detach().flatten(0, 1).contiguous().cpu()
            tensors[f"{key}.lora_B.weight"] = b.detach().permute(1, 2, 0).flatten(1).cpu()
            targets.append(places.parameter(target))
    assert found is not None
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(_config(model, targets, *found), indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n")


def load_adapter(
    model: PreTrainedModel,
    folder: str | Path,
    name: str = "default",
    *,
    experts_only: bool = False,
    trainable: bool = False,
) -> int:
    """Load an adapter that `save_adapter` wrote, or peft of its `target_parameters`, and make it
    the active one; returns how many modules of experts got it.

    The experts may be in floats or in codes. What the folder has for other layers raises, and is
    left out with `experts_only`: give that to peft before. With `trainable` it is trained further,
    else no parameter that requires gradients is added.

    Raises FileNotFoundError for a folder without the files of peft, and ValueError, naming the file
    and what it says, for an adapter that is none of `target_parameters` on these experts, for
    tensors of other shapes or without their pair, and as `add_adapter` does; then nothing was
    changed.
    """
    check_type("model", model, PreTrainedModel, "a transformers PreTrainedModel")
    check_type("folder", folder, (str, Path), "a folder")
    check_flag("experts_only", experts_only)
    check_flag("trainable", trainable)
    check_name(name)
    folder = Path(folder)
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise FileNotFoundError(
                f"{folder} has no {file}; give the folder that save_adapter or peft's "
                "save_pretrained wrote, with safetensors"
            )
    config = json.loads((folder / CONFIG).read_text())
    _check_config(config, folder / CONFIG)
    modules = adaptable(model, name)
    with safe_open(folder / WEIGHTS, framework="pt") as opened:
        left = set(opened.keys())
        made = {}
        for path, module in modules.items():
            pairs = dict(_pairs(opened, left, config, path, module))
            if pairs:
                made[path] = _scale(config, pairs), pairs
    if not made:
        raise ValueError(
            f"{folder / WEIGHTS} has nothing for the experts of {type(model).__name__}, such as "
            f"{next(iter(modules))}; it has {', '.join(sorted(left)[:2])}"
        )
    if left and not experts_only:
        raise ValueError(
            f"{folder / WEIGHTS} has {sorted(left)[0]}, too, which is of no experts; load that by "
            "peft and then this with experts_only=True"
        )
    put(model, name, made, trainable=trainable)
    return len(made)


def _pairs(
    opened: Any, left: set[str], config: Mapping[str, Any], path: str, module: nn.Module
) -> Iterator[tuple[str, Pair]]:
    """The tensors of a module of experts by target, as a file has them; takes their keys out of
    those that are left."""
    places, sizes = Places.of(path, module), Sizes.of(module)
    said = config.get("target_parameters") or ()
    targets = tuple(
        t for t in TARGETS if any(f".{places.parameter(t)}".endswith(f".{s}") for s in said)
    )
    of_target = {
        target: [f"{key}.lora_{letter}.weight" for letter in "AB"]
        for target, key in places.keys(targets)
    }
    every = {key for keys in of_target.values() for key in keys}
    if left.isdisjoint(every):
        return
    if not left.issuperset(every):
        raise ValueError(
            f"{min(every & left)} is there, but not {min(every - left)}, of the same experts; save "
            "the adapter again, with A and B of all of its target_parameters"
        )
    left.difference_update(every)
    options = where(module)
    for target, keys in of_target.items():
        a, b = (opened.get_tensor(k) for k in keys)
        rank = a.shape[0] // sizes.E
        wanted = sizes.shapes(target, rank)
        (E, r, inputs), (_, outputs, _) = wanted
        for k, t, shape in zip(keys, (a, b), ((E * r, inputs), (outputs, r * E)), strict=True):
            if not 0 < r <= MOST_RANK or tuple(t.shape) != shape:
                raise ValueError(
                    f"{k} is {list(t.shape)}, but {path} has {E} experts, of which the weight "
                    f"takes {inputs} and gives {outputs} values; load it onto the model that it "
                    f"was made for, with a rank up to {MOST_RANK}"
                )
        yield (
            target,
            (
                a.view(E, r, inputs).to(**options),
                b.view(outputs, r, E).permute(2, 0, 1).contiguous().to(**options),
            ),
        )


def _scale(config: Mapping[str, Any], pairs: Mapping[str, Pair]) -> float:
    """The factor of an adapter, of the rank that it has."""
    rank = next(iter(pairs.values()))[0].shape[1]
    return float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError unless a configuration is of what we add."""
    for name, values in PLAIN.items():
        if config.get(name) not in values:
            raise ValueError(
                f"{file} has {name}={config[name]!r}, which adapters of experts have not; load it "
                "by peft, onto the model in floats"
            )
    for name, kind in (("lora_alpha", (int, float)), ("target_parameters", list)):
        if not isinstance(config.get(name), kind):
            raise ValueError(
                f"{file} has {name}={config.get(name)!r}; give an adapter that was made with "
                "peft's target_parameters, or by save_adapter"
            )


def _config(model: PreTrainedModel, targets: list[str], scale: float, rank: int) -> dict[str, Any]:
    """What peft reads of an adapter."""
    alpha = scale * rank
    return {
        "base_model_name_or_path": getattr(model, "name_or_path", "") or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": [],
        "target_parameters": sorted(targets),
        "task_type": "CAUSAL_LM" if model.can_generate() else None,
        "use_rslora": False,
    }
