"""What the class of a model makes of a configuration with another number of experts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from moe_ops.hf.experts import is_experts
from moe_ops.interop.interrupts import let_through

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """An attribute of a configuration, or of one in it, that says how many experts there are."""

    path: tuple[str, ...]  # to the configuration that has it
    name: str

    def owner(self, config: Any) -> Any:
        for part in self.path:
            config = getattr(config, part)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """An attribute of a module that has another value."""

    module: str
    name: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What another number of experts makes of a model.

    tensors: the axis of experts of each parameter and buffer that has other sizes, by name, or why
    there is none.
    """

    tensors: Mapping[str, int | str]
    attributes: tuple[Attribute, ...]


class Twins:
    """Models of the class of one, without memory, by the number of experts that its configuration
    says."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._cls, self._config = type(model), model.config
        self._made: dict[tuple[tuple[Number, ...], int], PreTrainedModel] = {}
        self._differences: dict[tuple[tuple[Number, ...], int], Differences] = {}

    @cached_property
    def as_said(self) -> PreTrainedModel:
        """What is made of the configuration as it is."""
        return self._make(self._config)

    def numbers(self, name: str, wanted: int) -> tuple[Number, ...]:
        """What of the configuration says how many experts a module has, found by saying another
        number; empty if nothing does."""
        told = experts_in(self.as_said).get(name)
        found = []
        for number in _candidates(self._config, told):
            try:
                made = experts_in(self.of((number,), wanted)).get(name)
            except ValueError:
                continue  # another number, which may not be this one
            if made == wanted:
                found.append(number)
        return tuple(found)

    def of(self, numbers: tuple[Number, ...], wanted: int) -> PreTrainedModel:
        """What is made of a configuration with this number of experts. Raises ValueError where
        nothing is."""
        key = numbers, wanted
        if key not in self._made:
            config = copy.deepcopy(self._config)
            for number in numbers:
                setattr(number.owner(config), number.name, wanted)
            try:
                self._made[key] = self._make(config)
            except Exception as error:  # whatever a configuration or a class raises
                let_through(error)
                raise ValueError(
                    f"{self._cls.__name__} makes no model with {wanted} experts: {error}"
                ) from error
        return self._made[key]

    def differences(self, numbers: tuple[Number, ...], wanted: int) -> Differences:
        """What differs with this number of experts from what is made of the configuration as it
        is."""
        key = numbers, wanted
        if key not in self._differences:
            after = self.of(numbers, wanted)
            self._differences[key] = Differences(
                tensors=dict(_tensors_that_differ(self.as_said, after, wanted)),
                attributes=tuple(_attributes_that_differ(self.as_said, after)),
            )
        return self._differences[key]

    def _make(self, config: Any) -> PreTrainedModel:
        """The model that `from_pretrained` would make of the configuration once it is saved."""
        saved = type(config).from_dict(copy.deepcopy(config).to_dict())
        with torch.device("meta"):
            return self._cls(saved)


def experts_in(model: Any) -> dict[str, int]:
    """The number of experts of each module of experts of floats, by name."""
    return {n: m.down_proj.shape[0] for n, m in model.named_modules() if is_experts(m)}


def _candidates(config: Any, told: int | None, path: tuple[str, ...] = ()) -> Iterator[Number]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _candidates(value, told, (*path, name))
        elif type(value) is int and value == told and "expert" in name:
            yield Number(path=path, name=name)


def _tensors_that_differ(
    before: PreTrainedModel, after: PreTrainedModel, number: int
) -> Iterator[tuple[str, int | str]]:
    first, last = _tensors(before), _tensors(after)
    for path in first.keys() | last.keys():
        if path not in first or path not in last:
            yield path, "is there with some numbers of experts alone"
            continue
        a, b = first[path].shape, last[path].shape
        axes = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        if len(a) == len(b) and len(axes) == 1 and b[axes[0]] == number:
            yield path, axes[0]
        elif a != b:
            yield (
                path,
                f"is {list(b)} for {number} experts and {list(a)} for all, which is not an entry "
                "for each",
            )


def _attributes_that_differ(before: PreTrainedModel, after: PreTrainedModel) -> Iterator[Attribute]:
    others = dict(after.named_modules())
    for path, module in before.named_modules():
        own = vars(others[path])
        for name, value in vars(module).items():
            if isinstance(value, PLAIN) and name in own and own[name] != value:
                yield Attribute(module=path, name=name, value=own[name])


def _tensors(model: PreTrainedModel) -> Mapping[str, Tensor]:
    by_name = model.named_parameters(remove_duplicate=False)
    return dict(by_name) | dict(model.named_buffers(remove_duplicate=False))
