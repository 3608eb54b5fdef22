"""How the matrices of a checkpoint are coded: what its configuration says of each, by its name.

A configuration may say one thing of all matrices, or several of different ones: compressed-tensors
by the targets of its groups, GPTQ by `dynamic`, auto-round by `extra_config`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_ops.weights.configuration import (
    bits_of,
    flag_of,
    naming,
    object_of,
    read_json,
    text_of,
)
from moe_ops.weights.layouts import (
    PLAIN,
    Block,
    Coding,
    awq,
    compressed,
    gptq,
    mxfp4_blocks,
    w4afp8,
)

NO_OP_READS = {
    "bitsandbytes": "of its weights those of 4 bits alone are read (NF4, FP4)",
}
QUANTIZED = "quantization_config"
# Files that say it, and the method of those that need not name one. The last two are of AutoGPTQ
# and AutoAWQ before transformers had a place for it.
FILES = {
    "hf_quant_config.json": "modelopt", "quantization_config.json": "",
    "quantize_config.json": "gptq", "quant_config.json": "awq",
}  # fmt: skip
NESTED = ("text_config", "llm_config")  # of models that read more than text
OLD_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # of AutoAWQ
# Packings of auto-round: those of GPTQ with zero points less one or as they are, and of AWQ.
AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2",
    "auto_round:auto_awq": "awq",
}  # fmt: skip
FP8_BLOCK = 128, 128  # of W4AFP8
PACKED = "pack-quantized"  # of compressed-tensors


@dataclass(frozen=True, slots=True)
class Said:
    """What a configuration says of a matrix: how it is laid out, and the rows and columns that
    share a scale if it is float8."""

    layout: str = ""  # "gptq", "gptq_v2", "awq", "compressed", "mxfp4", "w4afp8"; "" for plain
    bits: int = 4
    symmetric: bool = False
    block: Block = None

    @property
    def coding(self) -> Coding:
        """The coding of the matrix. Raises ValueError for a width that no op reads."""
        found = _coding(self.layout, self.bits, self.symmetric)
        return found if self.block is None else replace(found, block=self.block)


@dataclass(frozen=True, slots=True)
class Rule:
    """What is said of the matrices that a rule matches by name."""

    matches: Callable[[str], Any]
    said: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Codings:
    """What is said of each matrix: by the first rule that matches its name, else by `rest`, which
    is None where every matrix in codes has a rule. `inputs`: of experts, what has one static scale
    for all of them, if it is said. `file` says it, for errors."""

    rules: tuple[Rule, ...] = ()
    rest: Said | None = Said()
    inputs: str = ""
    file: Path | None = None

    def says(self, module: str) -> Said | None:
        """What is said of a matrix, by the name of its module, or None."""
        return next((rule.said for rule in self.rules if rule.matches(module)), self.rest)

    def said(self, module: str) -> Said:
        """What is said of a matrix, by the name of its module. Raises ValueError if nothing is."""
        found = self.says(module)
        if found is None:
            raise ValueError(
                f"{module} is of no group of {self.file or QUANTIZED}: none has a target that is "
                "its name; correct the targets of config_groups"
            )
        return found

    def of(self, module: str) -> Coding:
        """The coding of a matrix. Raises ValueError, naming the file, if there is none."""
        with naming(self.file or QUANTIZED):
            return self.said(module).coding

    def block(self, module: str) -> Block:
        return self.said(module).block

    def one(self, modules: Iterable[str]) -> Coding:
        """The one coding of several matrices. Raises ValueError for two."""
        found: dict[Said, str] = {}
        for module in modules:
            found.setdefault(self.said(module), module)
        if len(found) > 1:
            a, b = list(found.items())[:2]
            raise ValueError(
                f"{a[1]} is {_words(a[0])} and {b[1]} is {_words(b[0])}, by {self.file}; load "
                "layers whose experts are coded alike in one call, and others in another"
            )
        with naming(self.file or QUANTIZED):
            return next(iter(found), Said()).coding


def codings_in(folder: Path) -> Codings:
    """How the checkpoint in a folder is coded, as its configuration says; plain without one.

    Raises ValueError or TypeError, naming the file.
    """
    config, path = _config_in(folder)
    if config is None:
        return Codings()
    with naming(path):
        found = codings_of(config, path)
        if not found.rules and found.rest is not None:
            _ = found.rest.coding  # before anything is read, where it is that of every matrix
        return found


def blocks_in(folder: Path) -> Codings:
    """The blocks of float8 that the configuration of a checkpoint names, whatever its method. The
    coding is left out: a caller says it."""
    config, path = _config_in(folder)
    with naming(path):
        return Codings(rest=Said(block=None if config is None else _block(config)))


def _config_in(folder: Path) -> tuple[Mapping[str, Any] | None, Path]:
    """What the configuration beside a checkpoint says of its quantisation, and the file."""
    path = folder / "config.json"
    if path.is_file():
        with naming(path):
            found = object_of(read_json(path), "the file")
            for of in (found, *(found.get(key) for key in NESTED)):
                if isinstance(of, Mapping) and of.get(QUANTIZED) not in (None, {}):
                    return object_of(of[QUANTIZED], QUANTIZED), path
    for name, method in FILES.items():
        other = folder / name
        if other.is_file():
            with naming(other):
                found = object_of(read_json(other), "the file")
            said = {OLD_NAMES.get(k, k): value for k, value in found.items() if value is not None}
            return {"quant_method": method, **said}, other
    return None, path


def coding_of(config: Mapping[str, Any] | None) -> Coding:
    """The coding of all matrices of a checkpoint with this `quantization_config` (of config.json);
    None: plain. Raises as `codings_of` does, and ValueError for several."""
    found = Codings() if config is None else codings_of(config)
    every = {rule.said for rule in found.rules} | ({found.rest} if found.rest else set())
    if len(every) > 1:
        raise ValueError(
            f"{QUANTIZED} says of some matrices {' and of others '.join(map(_words, every))}; give "
            "the coding of the experts: compressed(bits), gptq(bits), w4afp8()"
        )
    return next(iter(every)).coding


def codings_of(config: Mapping[str, Any], file: Path | None = None) -> Codings:
    """How a checkpoint with this `quantization_config` is coded.

    Knows gptq, awq, compressed-tensors, modelopt, fp8, mxfp4, w4afp8, auto-round and bitsandbytes
    of four bits. Raises ValueError, with the reason, for others and for variants whose weights no
    op reads; TypeError for values that are not of their kind.
    """
    config = object_of(config, QUANTIZED)
    method = text_of(config, "quant_method", "").lower()
    rules: tuple[Rule, ...] = ()
    if method in ("auto-round", "autoround", "auto_round", "intel/auto-round"):
        rest, rules = _auto_round(config)
    elif method == "gptq":
        rest = _gptq(config)
        rules = _dynamic(config, rest)
    elif method == "awq":
        rest = _awq(config)
    elif method == "compressed-tensors":
        return replace(_compressed(config), file=file)
    elif method in ("modelopt", "fp8") or (method == "bitsandbytes" and config.get("load_in_4bit")):
        rest = Said(block=_block(config))  # bitsandbytes is decoded when it is read
    elif method == "mxfp4":
        rest = Said("mxfp4")
    elif method == "w4afp8":  # of experts; linear layers are float8 in blocks
        rules = (Rule(_compiled(r"(.*\.)?experts\.").match, Said("w4afp8")),)
        found = Codings(rules=rules, rest=Said(block=_block(config) or FP8_BLOCK), file=file)
        return replace(found, inputs="float8_e4m3fn:tensor")
    elif method == "moe_ops":
        raise ValueError(
            "quant_method 'moe_ops' is of a model that quantize_model quantised, and comes back by "
            "from_pretrained of its class, where moe_ops is imported; give that the folder"
        )
    else:
        reason = NO_OP_READS.get(method, "its layout is unknown")
        raise ValueError(
            f"quant_method {method!r} cannot be loaded: {reason}; dequantise the checkpoint, or "
            "take one of gptq, awq, compressed-tensors, modelopt, fp8, mxfp4, w4afp8, auto-round, "
            "bitsandbytes of 4 bits"
        )
    return Codings(rules=rules, rest=rest, file=file)


@functools.cache
def _coding(layout: str, bits: int, symmetric: bool) -> Coding:
    if layout in ("gptq", "gptq_v2"):
        return replace(gptq(bits, plus_one=layout == "gptq"), symmetric=symmetric)
    if layout == "compressed":
        return replace(compressed(bits), symmetric=symmetric)
    return {"": lambda: PLAIN, "awq": awq, "mxfp4": mxfp4_blocks, "w4afp8": w4afp8}[layout]()


def _words(said: Said) -> str:
    return f"{said.layout or 'plain'} of {said.bits} bits" if said.layout else "in no words"


def _gptq(config: Mapping[str, Any]) -> Said:
    second = text_of(config, "checkpoint_format", "gptq") == "gptq_v2"
    layout = "gptq_v2" if second else "gptq"
    return Said(layout, bits_of(config, "bits"), flag_of(config, "sym", False))


def _awq(config: Mapping[str, Any]) -> Said:
    bits, version = bits_of(config, "bits"), text_of(config, "version", "gemm")
    if bits != 4 or version.lower() != "gemm":
        raise ValueError(
            f"AWQ is read with 4 bits in the version gemm, got bits={bits}, "
            f"version={version!r}; convert the checkpoint"
        )
    return Said("awq")


def _dynamic(config: Mapping[str, Any], rest: Said) -> tuple[Rule, ...]:
    """What GPTQModel says of some modules: by patterns of names, which are left as they are where
    "-:" is before one, and quantised otherwise than the rest where "+:" or nothing is."""
    found = object_of(config.get("dynamic") or {}, "dynamic")
    rules = []
    for pattern, value in found.items():
        left = pattern.startswith("-:")
        text = re.sub(r"^[-+]:", "", pattern)
        said = Said() if left else _overridden(rest, object_of(value, f"dynamic[{pattern!r}]"))
        rules.append(Rule(_compiled(text).match, said))
    return tuple(rules)


def _auto_round(config: Mapping[str, Any]) -> tuple[Said, tuple[Rule, ...]]:
    packing = text_of(config, "packing_format", "auto_round")
    layout = AUTO_ROUND.get(packing)
    kind = text_of(config, "data_type", "int")
    if layout is None or kind != "int":
        raise ValueError(
            f"auto-round with the packing {packing!r} of {kind} cannot be loaded: its layout is "
            f"unknown; dequantise the checkpoint, or take one of {', '.join(AUTO_ROUND)} of int"
        )
    rest = _awq(config) if layout == "awq" else Said(layout)
    rest = _overridden(rest, config)
    rules = []
    for name, value in object_of(config.get("extra_config") or {}, "extra_config").items():
        given = object_of(value, f"extra_config[{name!r}]")
        said = Said() if bits_of(given, "bits", rest.bits) >= 16 else _overridden(rest, given)
        # Names are whole ones, or patterns where they have what names have not.
        plain = re.fullmatch(r"[\w.]+", name) is not None
        matches = functools.partial(_is, name) if plain else _compiled(name).search
        rules.append(Rule(matches, said))
    return rest, tuple(rules)


def _overridden(rest: Said, given: Mapping[str, Any]) -> Said:
    """What is said of the rest, with other widths and symmetry where they are given."""
    bits, symmetric = bits_of(given, "bits", rest.bits), flag_of(given, "sym", rest.symmetric)
    if rest.layout == "awq":  # which has zero points in any case
        return _awq({"bits": bits})
    return replace(rest, bits=bits, symmetric=symmetric)


def _compressed(config: Mapping[str, Any]) -> Codings:
    """compressed-tensors: in words, or as the ops read it, by groups.

    Of the targets of groups whole names come first, then patterns, then classes, and a matrix in
    codes was one of nn.Linear.
    """
    found = object_of(config.get("config_groups") or {}, "config_groups")
    groups = [object_of(group, f"config_groups.{name}") for name, group in found.items()]
    whole = text_of(config, "format", "")
    ranked: list[tuple[int, Rule]] = []
    every: set[Said] = set()
    for group in groups:
        format = text_of(group, "format", whole)
        weights = group.get("weights")
        if weights is None and format != PACKED:
            continue  # of inputs alone
        said = _said_of_group(format, object_of(weights, "weights"))
        every.add(said)
        targets = group.get("targets")
        for target in targets if isinstance(targets, list) else []:
            rank, matches = _target(target)
            ranked.append((rank, Rule(matches, said)))
    if not groups and whole == PACKED:
        raise ValueError("config_groups must say of how many bits its codes are, got none")
    if len(every) < 2:
        return Codings(rest=next(iter(every), Said()))
    if not ranked:
        raise ValueError(
            f"config_groups says {' and '.join(sorted(map(_words, every)))}, and of no matrix "
            "which; give groups targets in config.json, or, to load_checkpoint, give the coding of "
            "the experts: compressed(bits)"
        )
    ordered = sorted(ranked, key=lambda one: one[0])  # stable
    return Codings(rules=tuple(rule for _, rule in ordered), rest=None)


def _said_of_group(format: str, weights: Mapping[str, Any]) -> Said:
    if format != PACKED:
        return Said(block=_block(weights, "block_structure"))
    return Said("compressed", bits_of(weights, "num_bits"), flag_of(weights, "symmetric", True))


def _target(target: Any) -> tuple[int, Callable[[str], Any]]:
    """What a target of a group matches, and after how many kinds of targets it is asked."""
    if not isinstance(target, str):
        raise TypeError(f"each of targets must be a name, got {target!r:.80}")
    if target.startswith("re:"):
        return 1, _compiled(target[3:]).match
    if re.fullmatch(r"[A-Z]\w*", target):
        return (2 if target == "Linear" else 3), _anything
    return 0, functools.partial(_is, target)


def _is(wanted: str, name: str) -> bool:
    return name == wanted


def _anything(name: str) -> bool:
    return True


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression ({error})") from error


def _block(config: Mapping[str, Any], key: str = "weight_block_size") -> Block:
    """Rows and columns that share a scale in float8 matrices, None if nothing says them."""
    size = config.get(key)
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int for n in size):
        raise TypeError(f"{key} must be two numbers, got {size!r:.80}")
    if min(size) < 1:
        raise ValueError(f"{key} must be above 0, got {size}")
    return size[0], size[1]
