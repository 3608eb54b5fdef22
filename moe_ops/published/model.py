"""`from_checkpoint`: a transformers model from a quantised checkpoint, its experts in codes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from moe_ops.checks.options import check_flag, check_type
from moe_ops.hf.fits import sizes_of, stored_as
from moe_ops.hf.optimize import optimize
from moe_ops.hf.saved import fields_of
from moe_ops.hf.stored import INPUT_SCALE, StoredFormat, format_text
from moe_ops.layer import MoELayer
from moe_ops.layer.tensors import INPUT_SCALES
from moe_ops.published.formats import decode
from moe_ops.published.loader import METHOD
from moe_ops.published.names import Names, experts_of
from moe_ops.published.quant import quant_of
from moe_ops.published.stacked import stacked
from moe_ops.published.survey import Experts, Survey, parts_of, survey
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import load_checkpoint
from moe_ops.weights.advice import readvised
from moe_ops.weights.codings import codings_in
from moe_ops.weights.configuration import naming
from moe_ops.weights.files import files_of
from moe_ops.weights.names import EACH, FUSED, GPT_OSS, Style
from moe_ops.weights.said import Codings

# What a user of `from_checkpoint` can do where `load_checkpoint` gives advice on layers.
REMEDY = (
    "the experts are not all coded in one way, or not as config.json says: complete the download, "
    "or quantise them again"
)
log = logging.getLogger("moe_ops")
# What a layer calls the tensors of both weights, and a module behind the names of projections.
TENSORS = {
    "weight": "_codes", "scale": "_scale", "zero": "_zero", "global_scale": "_global_scale",
    "bias": "_bias",
}  # fmt: skip
ALTERNATING = replace(EACH, name="alternating", interleaved=True)
SEVERAL = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps of many devices


@torch.no_grad()
def from_checkpoint(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device_map: Any = None,
    inputs: str | None = None,
    progress: bool = True,
) -> PreTrainedModel:
    """A transformers model of a quantised checkpoint, whose experts stay in the checkpoint's codes.

    folder: config.json, which names a class of transformers and says in `quantization_config` (or
    a file beside it does, as docs/FORMATS.md lists) how weights are quantised, and safetensors
    files: compressed-tensors (int4, int8, FP8, NVFP4, MXFP4), GPTQ, AWQ, auto-round of integers,
    ModelOpt (FP8, NVFP4), FP8 in blocks or with a scale a matrix or a row, MXFP4, W4AFP8. Experts
    are one tensor each, or all in one. Entries that the model's class ignores are not read.

    Codes and scales go into the experts as `load_checkpoint` reads them, and no experts in 16 bits
    are made. Experts that the checkpoint leaves in floats stay so. Other quantised matrices, of
    attention or shared experts, are decoded to `dtype`, with one line in the log; all else is what
    `from_pretrained` makes of it. The model is then `optimize`d, and `save_pretrained` saves it
    as it does after `quantize_model`.

    dtype: of all but codes and scales; None is that of config.json, or float32. device_map: as for
    `from_pretrained`, without "disk"; with several devices codes are read into the host's memory
    first. inputs: None quantises inputs of experts by the static scales that a checkpoint has for
    FP8, int8 with a scale a row, NVFP4, and int4 of which it says that inputs are float8: each
    expert's own, and for four bits the largest of all experts; of gate and up the larger one. Where
    it has none, inputs stay in dtype. A format has them quantised at run time, and "" leaves them
    in dtype, which is closer to the weights that were quantised; static scales are left out then,
    with a line in the log, as are those of other matrices. With progress, a line per file is
    written to standard error.

    Raises ValueError or TypeError, naming file and entry, before a model is built: for codes that
    do not fit, codes or scales that are missing or wrong, experts in several formats, and the order
    of activations (desc_act). Raises FileNotFoundError for a folder without files.
    """
    check_type("folder", folder, (str, Path), "the folder of a checkpoint")
    check_type("dtype", dtype, (torch.dtype, type(None)), "a dtype or None")
    check_type("inputs", inputs, (str, type(None)), 'the name of a format, "" or None')
    check_flag("progress", progress)
    folder = Path(folder)
    plan = _Plan.of(folder, dtype, inputs)
    tensors = plan.load_experts(_device_of(device_map), progress)
    rest = {name: found.read() for name, found in plan.found.rest.items()}  # mapped, as it has them
    model, info = plan.cls.from_pretrained(
        None,
        config=plan.prepared_config(),
        state_dict={**rest, **plan.decode_matrices(), **plan.stack_floats(), **tensors},
        dtype=plan.dtype,
        device_map=device_map,
        output_loading_info=True,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing[:3])}{' and others' * (len(missing) > 3)}; "
            "complete the download"
        )
    optimize(model)
    model.config._name_or_path = model.name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Experts of a checkpoint, and the module of the model that they are."""

    name: str
    module: nn.Module
    stored: StoredFormat
    experts: Experts
    style: Style


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """What a checkpoint becomes, known before any weight is read."""

    cls: type[PreTrainedModel]
    config: Any
    dtype: torch.dtype
    codings: Codings
    quant: QuantConfig | None  # of experts in codes; None if there are none
    parts: tuple[_Part, ...]
    kept: tuple[str, ...]  # experts modules in floats
    found: Survey
    names: Names
    # Experts in floats, one tensor each, that transformers puts together for no such family.
    stacked: tuple[tuple[str, nn.Module, Experts], ...]
    tied: Mapping[str, str]  # experts modules without weights of their own, and whose they have

    @staticmethod
    def of(folder: Path, dtype: torch.dtype | None, inputs: str | None) -> _Plan:
        cls, config = _class_of(folder)
        codings, files = codings_in(folder), files_of(folder)
        dtype = dtype or getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            skeleton = cls(config).to(dtype)
        names = Names(skeleton)
        found = survey(files, names.leaves_out)
        quant = quant_of(found, codings, inputs)
        floats = tuple(_floats(skeleton, names, found))
        _check_shapes(names, found)
        parts = () if quant is None else tuple(_parts(skeleton, names, found, quant))
        tied = _tied(skeleton, {part.name for part in parts})
        kept = set(experts_of(skeleton)) - tied.keys()
        return _Plan(
            cls=cls, config=config, dtype=dtype, codings=codings, quant=quant, parts=parts,
            kept=tuple(sorted(kept - {part.name for part in parts})), found=found, names=names,
            stacked=floats, tied=tied,
        )  # fmt: skip

    def prepared_config(self) -> Any:
        """The config, with the formats of experts where there are some in codes."""
        if self.quant is not None:
            said = fields_of(self.quant, self.kept)
            self.config.quantization_config = {**said, "quant_method": METHOD}
        return self.config

    def load_experts(self, device: torch.device, progress: bool) -> dict[str, Tensor]:
        """Codes and scales of all experts by their names in the model."""
        layers = {part.name: self._layer(part, device) for part in self.parts}
        coding = self.codings.one(n for part in self.parts for n in part.experts.matrices())
        for style in {part.style.name: part.style for part in self.parts}.values():
            parts = [part for part in self.parts if part.style is style]
            try:
                report = load_checkpoint(
                    {part.experts.prefix: layers[part.name] for part in parts},
                    sorted({file for part in parts for file in part.experts.files}),
                    style=style, coding=coding, progress=progress,
                )  # fmt: skip
            except (ValueError, TypeError) as error:
                raise readvised(error, REMEDY) from error
            known = {f.name: k[0] for p in parts for k, f in p.experts.parts.items()}
            odd = [n for n in report.unexpected if known.get(n, "input") != "input"]
            for what, names in (("is missing", report.missing), ("is in no format of ours", odd),
                                ("comes twice", report.twice)):  # fmt: skip
                if names:
                    of_input = any(f".{scale}[" in names[0] for scale in INPUT_SCALES)
                    more = ', or give inputs=""' if of_input else ""
                    raise ValueError(
                        f"{names[0]} {what} among the experts of {parts[0].experts.first.file}; "
                        f"complete the download{more}"
                    )
        tensors: dict[str, Tensor] = {}
        for part in self.parts:
            for projection, weight in zip(part.stored.projections, ("w13", "w2"), strict=True):
                name = f"{part.name}.{projection}"
                tensors[name] = format_text(part.stored.w_format)
                for what, suffix in TENSORS.items():
                    t = getattr(layers[part.name], f"{weight}_{what}")
                    if t is not None:
                        tensors[name + suffix] = t.detach()
            for projection, scale in zip(part.stored.projections, INPUT_SCALES, strict=True):
                t = getattr(layers[part.name], scale)
                if t is not None:
                    tensors[f"{part.name}.{projection}{INPUT_SCALE}"] = t.detach()
        for name, other in self.tied.items():
            own = {n: t for n, t in tensors.items() if n.startswith(f"{other}.")}
            tensors.update({name + n.removeprefix(other): t.clone() for n, t in own.items()})
        self._say()
        return tensors

    def _layer(self, part: _Part, device: torch.device) -> MoELayer:
        E, hidden, intermediate = sizes_of(part.module, part.stored)
        assert self.quant is not None
        return MoELayer(
            E, 1, hidden, intermediate, activation=part.stored.activation,
            quant=self.quant, dtype=self.dtype, device=device, bias=part.experts.has_biases,
        )  # fmt: skip

    def stack_floats(self) -> dict[str, Tensor]:
        """Experts in floats, of single tensors, by the names of the model."""
        return {
            f"{name}.{attribute}": t
            for name, module, experts in self.stacked
            for attribute, t in stacked(experts, module).items()
        }

    def decode_matrices(self) -> dict[str, Tensor]:
        """Matrices in codes outside of experts that the model has, in floats."""
        found: dict[str, Tensor] = {}
        for base, matrix in self.found.matrices.items():
            one = matrix.get("weight") or next(iter(matrix.values()))
            if self.names.of(f"{base}.weight")[0] not in self.names.tensors:
                log.warning(
                    "moe_ops.from_checkpoint: %s of %s is left out, as %s has nothing of this name",
                    one.name, one.file, self.cls.__name__,
                )  # fmt: skip
                continue
            with naming(f"{one.name} of {one.file}"):
                said = self.codings.of(base), self.codings.block(base)
                found[f"{base}.weight"] = decode(parts_of(matrix), *said, self.dtype)
        return found

    def _say(self) -> None:
        if self.found.left_out:
            log.info(
                "moe_ops.from_checkpoint: %d entries are left out, as %s ignores them",
                self.found.left_out, self.cls.__name__,
            )  # fmt: skip
        if self.quant is not None:
            log.info(
                "moe_ops.from_checkpoint: %d experts modules in %s, %d in floats",
                len(self.parts), self.quant, len(self.kept),
            )  # fmt: skip
        if self.found.matrices:
            log.info(
                "moe_ops.from_checkpoint: %d quantised matrices outside of experts are decoded to "
                "%s, as the ops multiply codes of experts alone", len(self.found.matrices),
                self.dtype,
            )  # fmt: skip
        static = self.quant is not None and self.quant.static_inputs
        if static and self.quant is not None and not self.quant.per_expert_inputs:
            log.info(
                "moe_ops.from_checkpoint: each layer's experts share the largest of their static "
                "scales of inputs, as %s takes one", self.quant,
            )  # fmt: skip
        of_experts = 0 if static else sum(e.input_scales for e in self.found.experts.values())
        for left, what, inputs in (
            (of_experts, "experts", (self.quant and self.quant.inputs) or self.dtype),
            (self.found.input_scales, "other matrices", self.dtype),
        ):
            if left:
                log.info(
                    "moe_ops.from_checkpoint: %d static scales of inputs of %s are left out: these "
                    "inputs are %s", left, what, inputs,
                )  # fmt: skip


def _class_of(folder: Path) -> tuple[type[PreTrainedModel], Any]:
    """The class that config.json names, and the config without what it says of quantisation."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {folder}; give the folder of a checkpoint")
    config = AutoConfig.from_pretrained(folder)
    for one in (config, config.get_text_config()):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    name = next(iter(getattr(config, "architectures", None) or []), None)
    cls = getattr(transformers, name, None) if name else None
    if cls is None or not issubclass(cls, PreTrainedModel):
        raise ValueError(
            f"architectures of {path} names {name!r}, which is no model of transformers "
            f"{transformers.__version__}; install a release that has it"
        )
    return cls, config


def _tied(skeleton: PreTrainedModel, in_codes: set[str]) -> dict[str, str]:
    """Experts modules that share the weights of others: the module's name, and that of the one that
    gets codes."""
    pairs = (
        (name.rpartition(".")[0], other.rpartition(".")[0])
        for name, other in skeleton.all_tied_weights_keys.items()
    )
    experts = set(experts_of(skeleton))
    return {a: b for a, b in pairs if b in in_codes and a in experts - in_codes}


def _floats(
    skeleton: PreTrainedModel, names: Names, found: Survey
) -> Iterator[tuple[str, nn.Module, Experts]]:
    """Experts in floats that are to be put together here; others are left to transformers."""
    for experts in found.floats:
        name = names.experts(experts.prefix, next(iter(experts.style.projections)))
        known = all(names.of(found.name)[0] in names.tensors for _, found in experts.samples())
        if name is None or known:
            found.take_floats(experts)
        else:
            yield name, skeleton.get_submodule(name), experts


def _check_shapes(names: Names, found: Survey) -> None:
    """Raise ValueError, naming file and entry, for a tensor in floats of another shape."""
    for name, one in found.rest.items():
        target, as_it_is = names.of(name)
        if as_it_is and target in names.tensors:
            wanted, there = list(names.tensors[target].shape), list(one.meta.shape)
            if wanted != there:
                raise ValueError(
                    f"{name}: expected the shape {wanted}, found {there} (in {one.file}); "
                    "complete the download"
                )


def _parts(
    skeleton: PreTrainedModel, names: Names, found: Survey, quant: QuantConfig
) -> list[_Part]:
    """The module of each of the checkpoint's experts."""
    parts: dict[str, _Part] = {}
    for experts in found.experts.values():
        first = experts.first
        name = names.experts(experts.prefix, next(iter(experts.style.projections)))
        if name is None or name in parts:
            raise ValueError(
                f"{first.name}: {type(skeleton).__name__} has no experts of this name (in "
                f"{first.file}); its experts are {', '.join(experts_of(skeleton)[:2]) or 'none'}"
            )
        module = skeleton.get_submodule(name)
        stored = stored_as(module, quant)
        if isinstance(stored, str):
            raise ValueError(
                f"{first.name}: {type(module).__name__} cannot have {quant.weights}: {stored}; "
                f"dequantise the checkpoint (in {first.file})"
            )
        if experts.has_biases and not module.has_bias:
            raise ValueError(
                f"{first.name}: {type(module).__name__} has no biases, but experts of this "
                f"checkpoint have (in {first.file}); give the checkpoint of this model"
            )
        style = experts.style
        if stored.activation.interleaved:  # rows of gate and up in one tensor alternate, too
            style = {FUSED.name: GPT_OSS, EACH.name: ALTERNATING}.get(style.name, style)
        parts[name] = _Part(name=name, module=module, stored=stored, experts=experts, style=style)
    return list(parts.values())


def _device_of(device_map: Any) -> torch.device:
    """Where codes are read: the device of all of a model, or the host if there are several."""
    if isinstance(device_map, dict):
        places = set(device_map.values())
        device_map = places.pop() if len(places) == 1 else None
    if device_map is None or device_map in (*SEVERAL, "disk"):
        return torch.device("cpu")
    return torch.device(device_map)
