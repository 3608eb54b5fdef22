"""Where entries of a checkpoint go in a model of transformers, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from moe_ops.weights.names import PARTS

EXPERTS = ".experts."
NUMBER = re.compile(r"\.experts\.\d+\.")
# What a model's class ignores where it has such buffers itself: checkpoints of older releases have
# one for each layer, or keep what is computed now.
COMPUTED = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}


class Names:
    """What transformers makes of the names of a checkpoint, for one model."""

    def __init__(self, skeleton: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(skeleton)
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self._prefix = skeleton.base_model_prefix
        self._skeleton = skeleton
        self.tensors = skeleton.state_dict()
        patterns = "|".join(f"({pattern})" for pattern in _ignored(skeleton))
        self._ignored = re.compile(patterns) if patterns else None
        self._left: dict[str, bool] = {}  # by names without the number of an expert

    def of(self, name: str) -> tuple[str, bool]:
        """The name in the model, and whether the tensor goes there as it is."""
        found = self._renamed(name, self._renamings, self._converters)
        if found[0] not in self.tensors and name in self.tensors:
            return self._renamed(name, [], [])
        return found

    def _renamed(
        self, name: str, renamings: list[WeightRenaming], converters: list[WeightConverter]
    ) -> tuple[str, bool]:
        target, pattern = rename_source_key(name, renamings, converters, self._prefix, self.tensors)
        return target, pattern is None

    def experts(self, prefix: str, projection: str) -> str | None:
        """The experts module that entries below a prefix belong to, whether the family's
        checkpoints have one tensor for each expert or one for all; None if there is none."""
        for end in (f"0.{projection}.weight", "down_proj", "gate_up_proj", "up_proj"):
            target, _ = self.of(f"{prefix}{EXPERTS}{end}")
            name = target.rpartition(".")[0]
            if target in self.tensors and hasattr(self._skeleton.get_submodule(name), "has_gate"):
                return name
        return None

    def has(self, name: str) -> bool:
        """Whether an entry, maybe a part of a matrix in codes, is of something in the model."""
        if self.of(name)[0] in self.tensors:
            return True
        prefix, inside, rest = name.partition(EXPERTS)
        if inside and self.experts(prefix, rest.split(".")[-2 if "." in rest else 0]) is not None:
            return True
        base, _, suffix = name.rpartition(".")
        return suffix in PARTS and self.of(f"{base}.weight")[0] in self.tensors

    def leaves_out(self, name: str) -> bool:
        """Whether the model's class ignores an entry, as those of layers that predict further
        tokens: its patterns match it, and the model has nothing of this name.
        """
        if self._ignored is None:
            return False
        name = NUMBER.sub(f"{EXPERTS}0.", name)  # of hundreds of experts one is looked at
        if name not in self._left:
            names = (name, f"{self._prefix}.{name}", self.of(name)[0])
            matches = any(self._ignored.search(one) for one in names)
            self._left[name] = matches and not self.has(name)
        return self._left[name]


def experts_of(model: nn.Module) -> list[str]:
    """The names of the experts modules of a model."""
    return [name for name, module in model.named_modules() if hasattr(module, "has_gate")]


def _ignored(skeleton: PreTrainedModel) -> Iterator[str]:
    """Patterns of names that a model does not want."""
    yield from sorted(skeleton._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in skeleton.named_buffers()]
    yield from (p for end, p in COMPUTED.items() if any(name.endswith(end) for name in buffers))
    config = skeleton.config.get_text_config()
    layers, more = (
        getattr(config, name, None) for name in ("num_hidden_layers", "num_nextn_predict_layers")
    )
    if isinstance(layers, int) and isinstance(more, int):
        yield from (rf"(^|\.)layers\.{layers + i}\." for i in range(more))
