"""What decoder layers keep, by the classes of their parts of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

ENDLESS = 1 << 62


class Keeps(Enum):
    """What a layer keeps: nothing, keys and values, or anything that `Arriving` takes."""

    NOTHING = 0
    ATTENTION = 1
    STATES = 2


@dataclass(frozen=True, slots=True)
class Kind:
    """What a layer keeps, and how many tokens it attends to at most: of keys and values alone."""

    keeps: Keeps = Keeps.ATTENTION
    window: int | None = None


def _known(plain: tuple[Any, ...], indexed: str) -> dict[str, set[Any]]:
    """The methods by which layers add to their part of a cache, and which functions these may be;
    none says that any may. Not all are in every transformers."""
    linear = getattr(cache_utils, "LinearAttentionLayer", None)
    return {
        "update": {cls.update for cls in plain},
        "update_conv_state": {getattr(linear, "update_conv_state", None)},
        "update_recurrent_state": {getattr(linear, "update_recurrent_state", None)},
        "update_indexer": {getattr(getattr(cache_utils, indexed, None), "update_indexer", None)},
        "update_index": set(),
    }


STATIC = _known((StaticLayer, StaticSlidingWindowLayer), "StaticIndexedLayer")
DYNAMIC = _known((DynamicLayer, DynamicSlidingWindowLayer), "DynamicIndexedLayer")


def updates_of(cls: type) -> set[str]:
    """The methods by which a layer adds to its part of a cache, of this class."""
    return {name for name in dir(cls) if name.startswith("update")}


def refusal_of(cls: type, known: dict[str, set[Any]]) -> str | None:
    """Why it is not known what a layer keeps in a part of a cache of this class, or None."""
    if _keeps_nothing(cls):
        return None
    for name in sorted(updates_of(cls)):
        if name not in known:
            return f"keeps what {cls.__name__}.{name} takes"
        if known[name] and getattr(cls, name) not in known[name]:
            return f"has caches of {cls.__name__}, whose {name} is its own"
    return None


def _keeps_nothing(cls: type) -> bool:
    return cls is getattr(cache_utils, "DummyLayer", None)


def kind_of(layer: Any) -> Kind | str:
    """What a layer that has this one of a static cache keeps; a string says why that is not known.

    A window, too, is held as all slots and a mask: layers of windows count with Python numbers.
    """
    cls = type(layer)
    reason = refusal_of(cls, STATIC)
    if reason is not None:
        return reason
    if _keeps_nothing(cls):
        return Kind(Keeps.NOTHING)
    if updates_of(cls) != {"update"}:
        return Kind(Keeps.STATES)
    return Kind(window=layer.max_cache_len if cls is StaticSlidingWindowLayer else None)


def kinds_of(config: Any) -> list[Kind]:
    """What each decoder layer of a model of this configuration keeps. Raises LookupError, which
    says of which layer that is not known."""
    try:
        layers = StaticCache(config=config, max_cache_len=ENDLESS).layers  # allocates nothing
    except KeyError as error:
        raise LookupError(
            f"has layers of {error.args[0]}, for which there is no static cache"
        ) from error
    kinds = [kind_of(layer) for layer in layers]
    unknown = [kind for kind in kinds if isinstance(kind, str)]
    if unknown:
        raise LookupError(unknown[0])
    return [kind for kind in kinds if isinstance(kind, Kind)]
