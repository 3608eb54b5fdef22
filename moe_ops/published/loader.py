"""How transformers loads a model whose experts `from_checkpoint` has read already."""

from __future__ import annotations

from typing import Any

from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer

from moe_ops.hf.pretrained import MoeOpsConfig, MoeOpsQuantizer

METHOD = "moe_ops_checkpoint"  # of a load, and of no file


def _sparing(cls: type[WeightConverter], spared: frozenset[str]) -> Any:
    """A class of conversions that take nothing of these names, as the model has them."""

    class Sparing(cls):
        __slots__ = ()

        def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
            found: tuple[str, str | None] = super().rename_source_key(source_key)
            return (source_key, None) if source_key in spared else found

    return Sparing


@register_quantization_config(METHOD)
class LoadingConfig(MoeOpsConfig):
    """The `MoeOpsConfig` of a checkpoint of others, while that is loaded."""

    def __init__(self, quant_method: str = METHOD, **fields: Any) -> None:
        super().__init__(**fields)
        self.quant_method = quant_method


@register_quantizer(METHOD)
class Quantizer(MoeOpsQuantizer):
    """Loads as `MoeOpsQuantizer` does, but for names: those of what is not experts are the family's
    own, so its conversions apply, to all but codes and scales.
    """

    checks_given = False  # `from_checkpoint` does, and knows the folder

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> Any:
        for one in weight_conversions:
            if isinstance(one, WeightConverter):
                one.__class__ = _sparing(type(one), frozenset(self._wanted))
        return weight_conversions

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model.config.quantization_config = None  # what is saved is written into it now
        return super()._process_model_after_weight_loading(model, **kwargs)
