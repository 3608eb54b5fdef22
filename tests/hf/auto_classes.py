"""The classes that transformers' auto classes give for published configurations of the families.

A published configuration is the outermost: of a model with pictures not that of the text inside.
Others that wrap the text of a family, as that of Kimi-K2.5 does, count too. Nothing is listed by
hand.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name

from tests.hf.families import TinyModel, build_class, discover, model_class, tiny_config

# What published configurations have, and tiny ones do not by themselves. With few heads the scores
# of an indexer are 0 in many places, and which of them it takes is chance.
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "*": {"index_n_heads": 64, "indexer_n_heads": 64},
    "MiniMaxM3VLTextConfig": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,  # as many as there are heads of keys
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
    },
}
AUTO = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")


@functools.cache
def published() -> dict[str, type[PreTrainedModel]]:
    """The classes by name, sorted."""
    tables = [getattr(transformers, n)._model_mapping for n in AUTO if hasattr(transformers, n)]
    types = {kind for table in tables for kind in table._model_mapping}
    configs = {CONFIG_MAPPING[kind] for kind in types if _may_hold_a_family(kind)}
    texts = {config: _text_of(config) for config in configs}
    pairs = [pair for pair in texts.items() if _folder(pair[0]) == _folder(pair[1])]
    inside = {text for config, text in pairs if text is not config}
    outermost = [c for c in configs - inside if _folder(texts[c]) in discover()]
    classes = {table[config] for table in tables for config in outermost if config in table}
    return {cls.__name__: cls for cls in sorted(classes, key=lambda cls: cls.__name__)}


def build_published(name: str) -> TinyModel:
    """A tiny model of a class, with layers of the kinds that published models have."""
    return _built(published()[name])


def build_text(family: str) -> TinyModel:
    """The tiny model of a family that `families.build` makes, with layers of these kinds."""
    return _built(model_class(family))


def _built(cls: type[PreTrainedModel]) -> TinyModel:
    return build_class(cls, tiny_config(cls.config_class, AS_PUBLISHED))


def _may_hold_a_family(kind: str) -> bool:
    """Whether a model type is a family's, or its configuration's source names one."""
    folder = model_type_to_module_name(kind)
    if folder in discover():
        return True
    source = Path(transformers.__file__).parent / f"models/{folder}/configuration_{folder}.py"
    text = source.read_text() if source.exists() else ""
    return any(f'"{family}"' in text for family in discover())


def _text_of(config: Any) -> Any:
    return type(config().get_text_config(decoder=True))


def _folder(config: type) -> str:
    return config.__module__.split(".")[2]
