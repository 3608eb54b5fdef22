"""What a model of transformers becomes when its layers keep some of their experts alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from moe_ops.hf.adapters.held import CHILD
from moe_ops.hf.experts import is_experts
from moe_ops.hf.optimize import rule_of
from moe_ops.hf.over_ranks import ExpertsOverRanks
from moe_ops.hf.stored import PROJECTIONS, stored_format
from moe_ops.restricted.changes import ABSENT, Layer, Setting, Sliced
from moe_ops.restricted.keep import least_of_group, routing_refusal
from moe_ops.restricted.twins import Differences, Number, Twins, experts_in

SAVE = "save_pretrained"
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a model of transformers.

    modules: by their names. numbers: how many experts each has. blocks: their names by those of the
    modules that hold them.
    """

    model: PreTrainedModel
    modules: Mapping[str, nn.Module]
    numbers: Mapping[str, int]
    blocks: Mapping[str, str]
    _held: dict[str, str | None] = field(default_factory=dict, repr=False)
    _names: dict[int, str] = field(default_factory=dict, repr=False)  # by the ids of modules

    @staticmethod
    def of(model: nn.Module) -> Experts | None:
        """None where there are none. Raises ValueError for what only holds such a model, and for
        experts that are not whole or have adapters."""
        modules = {name: m for name, m in model.named_modules() if is_experts(m)}
        if not modules:
            return None
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"model is a {type(model).__name__}, which holds a model of transformers; restrict "
                "that model itself, without what wraps it or its adapters"
            )
        if "_moe_ops_generation" in vars(model):  # of a twin, whose configuration is the model's
            raise ValueError(
                "model is what moe_ops.compile returned; restrict the model that was compiled, "
                "which this follows"
            )
        for name, module in modules.items():
            if isinstance(module, ExpertsOverRanks):
                raise _cannot(name, "its experts are over ranks; restrict first, then share them")
            if CHILD in module._modules or name.endswith(".base_layer"):
                raise _cannot(name, "it has adapters; merge or remove them first")
        parents = [(name.rpartition(".")[0], name) for name in modules]
        return Experts(
            model=model, modules=modules,
            numbers={name: _number_of(module) for name, module in modules.items()},
            blocks={parent: name for parent, name in parents if parent},
            _names={id(m): name for name, m in model.named_modules()},
        )  # fmt: skip

    def plans(self, kept: Mapping[str, tuple[int, ...]]) -> tuple[list[Layer], list[Setting]]:
        """What the layers that keep some experts become, and what else of the model changes.
        Raises ValueError, naming the layer, for what cannot be."""
        twins = Twins(self.model)
        plans, said = [], {}
        for name, ids in kept.items():
            if name not in self.modules:
                continue  # a layer of another kind
            if len(ids) == self.numbers[name]:
                plans.append(Layer(name=name, num_experts=len(ids), kept=ids))
                continue
            self._check_router(name, ids)
            said[name] = twins.numbers(name, len(ids))
            if not said[name]:
                raise _cannot(
                    name,
                    f"nothing in the configuration of {type(self.model).__name__} is its number of "
                    "experts alone",
                )
            plans.append(self._plan(name, ids, twins.differences(said[name], len(ids))))
        return self._with_ties(plans), self._others(kept, said, twins)

    def _with_ties(self, plans: list[Layer]) -> list[Layer]:
        """Plans of which the first alone has a parameter that several layers share. Raises
        ValueError where these keep different experts."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.model.modules():
            for name, t in module._parameters.items():
                places.setdefault(id(t), []).append((module, name))
        cut = {(id(one.module), one.name): plan for plan in plans for one in plan.tensors}
        done: set[int] = set()
        tied = []
        for plan in plans:
            tensors = []
            for one in plan.tensors:
                there = places.get(id(one.tensor), [(one.module, one.name)])
                for module, name in there:
                    other = cut.get((id(module), name))
                    if other is None or other.kept != plan.kept:
                        where = f"{self._names[id(module)]}.{name}"
                        raise _cannot(
                            plan.name, f"{one.path} is also {where}; keep the same experts in both"
                        )
                if id(one.tensor) not in done:
                    others = tuple(p for p in there if p != (one.module, one.name))
                    tensors.append(replace(one, others=others))
                done.add(id(one.tensor))
            tied.append(replace(plan, tensors=tuple(tensors)))
        return tied

    def _holder(self, path: str) -> str | None:
        """The layer in whose block a module or tensor is; the innermost one."""
        if path not in self._held:
            parents = accumulate(path.split("."), "{}.{}".format)
            inside = [self.blocks[parent] for parent in parents if parent in self.blocks]
            self._held[path] = inside[-1] if inside else None
        return self._held[path]

    def _is_first_name(self, path: str) -> bool:
        """Whether the module that has a tensor has no other name before this one."""
        parent = path.rpartition(".")[0]
        return self._names[id(self.model.get_submodule(parent))] == parent

    def _check_router(self, name: str, ids: tuple[int, ...]) -> None:
        block = self.model.get_submodule(name.rpartition(".")[0])
        routers = [(m, rule) for m in block.modules() if (rule := rule_of(m)) is not None]
        if len(routers) != 1:
            raise _cannot(
                name,
                f"{len(routers) or 'no'} routers that moe_ops knows are in its block, and it knows "
                "by one how fewer experts are chosen",
            )
        router, rule = routers[0]
        arguments = rule.arguments(router)
        if isinstance(arguments, str):
            raise _cannot(name, f"moe_ops does not know its router: {arguments}")
        reduce = least_of_group(arguments.get("group_reduce", "top2sum"))
        groups = arguments.get("n_group", 1), arguments.get("topk_group", 1)
        reason = routing_refusal(ids, self.numbers[name], arguments["top_k"], *groups, reduce)
        if reason is not None:
            raise _cannot(name, reason)
        own = self.modules[name]
        for inner, module in block.named_modules():
            for tensor, t in (*module._parameters.items(), *module._buffers.items()):
                if t is not None and t.dtype in INTEGERS and module is not own:
                    where = ".".join(part for part in (inner, tensor) if part)
                    raise _cannot(name, f"its {where} holds integers, as numbers of experts are")

    def _plan(self, name: str, ids: tuple[int, ...], found: Differences) -> Layer:
        E, module = self.numbers[name], self.modules[name]
        tensors = [
            Sliced(path=f"{name}.{own}", module=module, name=own, axis=0)
            for own in _per_expert(module, E)
        ]
        for path, axis in found.tensors.items():
            if not self._is_first_name(path):
                continue
            holder = self._holder(path)
            if holder is None:
                raise _cannot(name, f"{path} changes with it, outside of all layers of experts")
            if holder == name and not path.startswith(f"{name}."):
                tensors.append(self._cut(name, path, axis))
        return Layer(
            name=name, num_experts=E, kept=ids, tensors=tuple(tensors),
            settings=tuple(self._settings(found, name)),
        )  # fmt: skip

    def _settings(self, found: Differences, holder: str | None) -> Iterable[Setting]:
        """The attributes of the modules of a layer, or of those of none."""
        for one in found.attributes:
            if self._holder(one.module) == holder:
                owner = self.model.get_submodule(one.module)
                yield Setting(owner=owner, name=one.name, value=one.value)

    def _cut(self, name: str, path: str, axis: int | str) -> Sliced:
        if isinstance(axis, str):
            raise _cannot(name, f"{path} {axis}")
        parent, _, own = path.rpartition(".")
        module = self.model.get_submodule(parent)
        t = getattr(module, own, None)
        if t is None or t.shape[axis] != self.numbers[name]:
            is_there = "nothing" if t is None else f"of shape {list(t.shape)}"
            raise _cannot(name, f"{path} is {is_there}, not what its class makes")
        return Sliced(path=path, module=module, name=own, axis=axis)

    def _others(
        self,
        kept: Mapping[str, tuple[int, ...]],
        said: Mapping[str, tuple[Number, ...]],
        twins: Twins,
    ) -> list[Setting]:
        """What changes outside of layers: the configuration, and modules that read it, if it can
        say what all layers keep; else that the model cannot be saved."""
        after = {name: len(kept.get(name, range(E))) for name, E in self.numbers.items()}
        whole = experts_in(twins.as_said) if said else {}
        found: list[Setting] = []
        for numbers, value in {said[name]: after[name] for name in said}.items():
            made = experts_in(twins.of(numbers, value))
            wanted = {after[name] for name in whole if made[name] != whole[name]}
            if len(wanted) > 1:
                why = f"layers keep from {min(wanted)} to {max(wanted)} experts"
                return list(self._unsavable(why))
            for number in numbers:
                found += self._in_configs(number, value)
            found += self._settings(twins.differences(numbers, value), None)
        return [*found, *self._savable()] if said else []

    def _in_configs(self, number: Number, value: int) -> Iterable[Setting]:
        """The number in all configurations of the model that say it."""
        owner = number.owner(self.model.config)
        configs = {id(owner): owner}
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if type(config) is type(owner):
                configs[id(config)] = config
        before = getattr(owner, number.name)
        for config in configs.values():
            if getattr(config, number.name) == before:
                yield Setting(owner=config, name=number.name, value=value)

    def _models(self) -> Iterable[PreTrainedModel]:
        return (m for m in self.model.modules() if isinstance(m, PreTrainedModel))

    def _unsavable(self, why: str) -> Iterable[Setting]:
        for module in self._models():
            if SAVE not in vars(module) or _is_ours(module):
                refuse = partial(_refuse_to_save, type(module).__name__, why)
                yield Setting(owner=module, name=SAVE, value=refuse)

    def _savable(self) -> Iterable[Setting]:
        return (Setting(owner=m, name=SAVE, value=ABSENT) for m in self._models() if _is_ours(m))


def _is_ours(module: nn.Module) -> bool:
    """Whether a model refuses to be saved because layers keep different numbers of experts."""
    return getattr(vars(module).get(SAVE), "func", None) is _refuse_to_save


def _refuse_to_save(name: str, why: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"this {name} cannot be saved as an ordinary checkpoint, whose configuration has one "
        f"number of experts for all layers: {why}; restrict all layers to as many, or "
        "torch.save(model.state_dict()), and load it into a model that is restricted alike"
    )


def _number_of(module: nn.Module) -> int:
    stored = stored_format(module)
    name = "down_proj" if stored is None else "down_proj" + stored.codes_suffix
    number: int = getattr(module, name).shape[0]
    return number


def _per_expert(module: nn.Module, num_experts: int) -> list[str]:
    """The names of a module's own tensors with an entry for each expert."""
    texts = () if stored_format(module) is None else PROJECTIONS  # of formats
    own = (*module._parameters.items(), *module._buffers.items())
    return [
        name
        for name, t in own
        if t is not None and name not in texts and t.dim() and t.shape[0] == num_experts
    ]


def _cannot(name: str, why: str) -> ValueError:
    return ValueError(f"{name} cannot be restricted: {why}")
