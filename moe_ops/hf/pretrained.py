"""transformers' `from_pretrained` and `save_pretrained` of models whose experts, or linear layers,
we quantised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn

from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_ops.checks.options import check_text, check_type
from moe_ops.checks.signature import described
from moe_ops.hf import saved
from moe_ops.hf.linears import check_linear_format, check_no_stages
from moe_ops.hf.quantized_linear import QuantizedLinear
from moe_ops.hf.saved import METHOD
from moe_ops.quant.config import QuantConfig

# What a distributed_config cuts weights by; some releases lack some.
CUTS = ("tp_size", "fsdp_size", "dp_replicate_size")


@register_quantization_config(METHOD)
class MoeOpsConfig(QuantizationConfigMixin):
    """What config.json says of quantised experts: the formats of `QuantConfig`, and which stayed.

    weights: empty where all experts hold floats. kept: the names of the experts modules that hold
    floats, as the model that was saved has them. linears: the names of linear layers in codes, by
    their formats.
    static_inputs: whether experts hold the scales of their inputs. two_global_scales: whether gate
    and up have a global scale each.

    Raises ValueError for formats that no scheme joins and for fields of another release, TypeError
    for values of other types.
    """

    # Of an object, and so in config.json, only where they are true.
    static_inputs: bool = False
    two_global_scales: bool = False
    linears: Mapping[str, Sequence[str]] = MappingProxyType({})

    def __init__(
        self,
        weights: str,
        inputs: str = "",
        kept: list[str] | None = None,
        static_inputs: bool = False,
        two_global_scales: bool = False,
        linears: dict[str, list[str]] | None = None,
        quant_method: str = METHOD,
        **more: Any,
    ) -> None:
        where = f"quantization_config of {METHOD}"
        if quant_method != METHOD or more:
            found = ", ".join([quant_method] * (quant_method != METHOD) + sorted(more))
            raise ValueError(
                f"{where} has {found}, which this release does not know; install a newer moe_ops, "
                "or quantise the model again"
            )
        check_type(f"{where}: kept", kept, (list, type(None)), "a list of names")
        for name in kept or ():
            check_text(f"{where}: each of kept", name)
        check_type(f"{where}: static_inputs", static_inputs, bool, "true or false")
        check_type(f"{where}: two_global_scales", two_global_scales, bool, "true or false")
        check_type(f"{where}: linears", linears, (dict, type(None)), "lists of names by formats")
        for format, names in (linears or {}).items():
            check_type(f"{where}: each of linears", names, list, "a list of names")
            for name in names:
                check_text(f"{where}: each name of linears", name)
            check_linear_format(f"{where}: linears", format)
        times = Counter(name for names in (linears or {}).values() for name in names)
        if (twice := next((name for name, n in times.items() if n > 1), None)) is not None:
            raise ValueError(
                f"{where}: linears has {twice} twice, but a layer has one format; leave the one "
                "that its codes are of"
            )
        try:
            if weights or not linears:
                self._join(weights, inputs, static_inputs, two_global_scales)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{where}: {error}") from error
        self.quant_method = METHOD
        self.weights = weights
        self.inputs = inputs
        self.kept = list(kept or ())
        if static_inputs:
            self.static_inputs = True
        if two_global_scales:
            self.two_global_scales = True
        if linears:
            self.linears = {format: list(names) for format, names in linears.items()}

    @property
    def formats(self) -> QuantConfig | None:
        """The formats of experts; None if all hold floats."""
        if not self.weights:
            return None
        flags = self.static_inputs, self.two_global_scales
        return self._join(self.weights, self.inputs, *flags)

    @staticmethod
    def _join(weights: str, inputs: str, static: bool, two: bool) -> QuantConfig:
        make = QuantConfig.with_static_inputs if static else QuantConfig
        return replace(make(weights=weights, inputs=inputs), two_global_scales=two)


def _check_whole(model: PreTrainedModel) -> None:
    """Raise ValueError if transformers would cut codes among ranks, or send activations in their
    dtype."""
    asked = getattr(model.config, "distributed_config", None)
    sizes = {name: getattr(asked, name, None) or 1 for name in CUTS}
    cut = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if cut:
        raise ValueError(
            f"distributed_config has {', '.join(cut)}, by which transformers cuts weights among "
            "ranks, but codes of moe_ops are whole; load the model whole on every rank, or one of "
            "floats"
        )
    head = model.get_output_embeddings()
    if any(isinstance(m, QuantizedLinear) and m is not head for m in model.modules()):
        check_no_stages(model)


@register_quantizer(METHOD)
class MoeOpsQuantizer(HfQuantizer):
    """Loads quantised weights as they were saved: codes and scales, and no weights of 16 bits.

    Experts and linear layers get their empty codes on the meta device before anything is read.
    Names in the files are the model's own, so neither conversions of a family nor a `key_mapping`
    apply. The model is optimized at the end.

    Raises ValueError, naming file and tensor, before a weight is read for codes or scales that are
    missing or of another shape or dtype, and for codes of layers that config.json does not name;
    and after it for scales that are no positive numbers. Raises it for a model that transformers is
    to cut among ranks, too.
    """

    quantization_config: MoeOpsConfig
    checks_given = True  # that a state dict which is given lacks no weight

    def __init__(self, quantization_config: MoeOpsConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._files: dict[str, str] = {}
        self._wanted: dict[str, Any] = {}
        self._given = False  # whether a state dict is, and no files are

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise ValueError(
                "from_pretrained quantises no experts with moe_ops; leave quantization_config out, "
                "and call moe_ops.quantize_model(model, scheme) on what is loaded"
            )
        device_map = kwargs.get("device_map")
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        if "disk" in places:
            raise ValueError(
                f"device_map has 'disk', got {described(device_map)}: experts of moe_ops are read "
                "whole; give the model devices with room for it"
            )

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> Any:
        return []

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config
        self._wanted = saved.make_empty(model, config.formats, config.kept, config.linears)
        _check_whole(model)
        files = kwargs.get("checkpoint_files")
        self._given = files is None
        self._files = saved.check_files(model, files)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        saved.check_loaded(model, self._files, self._wanted)
        if self._given and self.checks_given:
            saved.check_given(model)
        saved.finish(model, self.quantization_config.formats, self.quantization_config.kept)
        return model

    def _dequantize(self, model: Any, dtype: Any = None) -> NoReturn:
        raise ValueError(
            f"{type(model).__name__} holds codes of moe_ops, of which dequantize makes no model in "
            "floats; load the model that was quantised"
        )

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True
