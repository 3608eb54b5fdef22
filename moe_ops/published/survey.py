"""What a checkpoint holds, by the names of its entries: experts in codes, other codes, the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from moe_ops.checks.shapes import FLOATS
from moe_ops.published.formats import Parts, format_of, is_ordered, read_part
from moe_ops.published.names import EXPERTS
from moe_ops.weights.configuration import naming
from moe_ops.weights.files import entries
from moe_ops.weights.layouts import Coding
from moe_ops.weights.names import EACH, FUSED, PARTS, RECIPROCALS, W4AFP8, W123, Entry, Style
from moe_ops.weights.numbers import check_input_factors
from moe_ops.weights.record import WEIGHTS
from moe_ops.weights.said import Codings

FAMILIES = (W123, EACH, FUSED)
ORDERED = (
    "was quantised in the order of its activations (desc_act), and experts of transformers take "
    "their input in its own order; load MoELayer(quant=QuantConfig(ordered_input=True)), or "
    "quantise without desc_act, or with static_groups"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An entry of a checkpoint."""

    name: str
    file: Path
    read: Callable[[], Tensor]
    reciprocal: bool = False  # a scale that divides
    like: Callable[[], Tensor] | None = None  # of one that is made when it is read
    coding: Coding | None = None  # where the file says it

    @property
    def meta(self) -> Tensor:
        """Its shape and dtype."""
        return self.read() if self.like is None else self.like()


@dataclass(slots=True, kw_only=True, eq=False)
class Experts:
    """The entries of the experts below one prefix."""

    prefix: str
    style: Style
    # By what of which weight they are, and of which expert, None for all in one tensor.
    parts: dict[tuple[str, str, int | None], Found] = field(default_factory=dict)

    @property
    def first(self) -> Found:
        return next(iter(self.parts.values()))

    @property
    def files(self) -> list[Path]:
        return sorted({found.file for found in self.parts.values()})

    @property
    def input_scales(self) -> int:
        return sum(part == "input" for part, _, _ in self.parts)

    @property
    def in_codes(self) -> bool:
        return any(part in ("scale", "zero") for part, _, _ in self.parts) or any(
            found.meta.dtype not in FLOATS for (part, _, _), found in self.samples()
        )

    def samples(self) -> Iterator[tuple[tuple[str, str, int | None], Found]]:
        """The first weight of each projection."""
        seen: set[str] = set()
        for key, found in self.parts.items():
            if key[0] == "weight" and key[1] not in seen:
                seen.add(key[1])
                yield key, found

    @property
    def has_biases(self) -> bool:
        """Whether each expert has biases of its own."""
        return any(part == "bias" and expert is not None for part, _, expert in self.parts)

    def matrices(self) -> list[str]:
        """Names of the matrices of one expert, by which a configuration may tell them apart."""
        return [self.matrix(key, found) for key, found in self.samples()]

    def matrix(self, key: tuple[str, str, int | None], found: Found) -> str:
        stacked = key[2] is None
        return f"{self.prefix}{EXPERTS}"[:-1] if stacked else found.name.rpartition(".")[0]

    def _rows_of_half(self) -> int | None:
        """How many rows gate has, and up as well; None if there are not both."""
        shards = {key[1]: found for key, found in self.samples()}
        if not ("w13" in shards or {"w1", "w3"} <= shards.keys()):
            return None
        one = shards.get("w13") or shards["w1"]
        shape = one.meta.shape
        rows = shape[-2] if len(shape) > 1 else 0
        return rows // 2 if "w13" in shards else rows

    def format(self, codings: Codings) -> str:
        """The format that all of its weights are in.

        Raises ValueError, naming file and entry, for several, for one that experts of a model
        cannot have, and for experts that stay in floats beside others.
        """
        formats: dict[str, Found] = {}
        of_half = self._rows_of_half()
        for key, found in self.samples():
            _, shard, expert = key
            of_one = {
                part: other
                for (part, *rest), other in self.parts.items()
                if rest == [shard, expert]
            }
            with naming(f"{found.name} of {found.file}"):
                module = self.matrix(key, found)
                if found.coding is not None and found.coding.formats:
                    name: str | None = found.coding.formats[0]
                else:
                    parts = _read(of_one, expert is None)
                    name = format_of(parts, codings.of(module), codings.block(module), of_half)
            formats.setdefault(name or "floats", found)
        if len(formats) != 1:
            said = ", ".join(f"{f.name} is in {name}" for name, f in formats.items())
            raise ValueError(
                f"{said} (in {self.first.file}): the experts of one layer are in one format; "
                "quantise them alike"
            )
        for (part, shard, _), found in self.parts.items():
            if part == "g_idx" and shard != "w2" and is_ordered(found.read()):
                raise ValueError(f"{found.name}: {ORDERED} (in {found.file})")
        return next(iter(formats))


@dataclass(slots=True, kw_only=True, eq=False)
class Survey:
    """The entries of a checkpoint, sorted."""

    experts: dict[str, Experts] = field(default_factory=dict)  # by prefix
    matrices: dict[str, dict[str, Found]] = field(default_factory=dict)  # codes outside, by part
    floats: list[Experts] = field(default_factory=list)  # experts in floats, one tensor each
    rest: dict[str, Found] = field(default_factory=dict)  # in floats
    left_out: int = 0  # entries that the model's class ignores
    input_scales: int = 0  # of matrices outside

    def take_floats(self, experts: Experts) -> None:
        """Leave experts in floats to transformers, as the rest."""
        self.rest.update({one.name: one for one in experts.parts.values()})


def survey(files: Iterable[Path], leaves_out: Callable[[str], bool]) -> Survey:
    """Sort the entries of files, but for those whose names are left out; nothing is read but names,
    and dtypes of a few.

    Raises ValueError, naming the entry, for one that comes twice.
    """
    found = Survey()
    others: dict[str, dict[str, Found]] = {}
    names: dict[str, Path] = {}
    for file in files:
        with naming(file):
            for stored in entries(file):
                if leaves_out(stored.name):
                    found.left_out += 1
                    continue
                if file.suffix == ".gguf":
                    raise ValueError(
                        f"{stored.name} is of GGUF, which is read into layers alone; load MoELayer "
                        "with load_checkpoint, or give the checkpoint in another format"
                    )
                if stored.name in names:
                    raise ValueError(
                        f"{stored.name} is in {names[stored.name].name} too; remove one of them"
                    )
                names[stored.name] = file
                check_input_factors(stored.name, stored.read)
                one = Found(
                    name=stored.name, file=file, read=stored.read, like=stored.like,
                    coding=stored.coding,
                )  # fmt: skip
                if not _take_experts(found.experts, one):
                    base, _, suffix = stored.name.rpartition(".")
                    others.setdefault(base, {})[suffix] = one
    for prefix in [p for p, experts in found.experts.items() if not experts.in_codes]:
        experts = found.experts.pop(prefix)
        if experts.style.stacked:
            found.take_floats(experts)
        else:
            found.floats.append(experts)
    for experts in found.experts.values():
        for key in [k for k in experts.parts if k[0] == "bias" and k[2] is None]:
            one = experts.parts.pop(key)
            found.rest[one.name] = one
    for base, suffixes in others.items():
        _sort_others(found, base, suffixes)
    return found


def parts_of(matrix: dict[str, Found]) -> Parts:
    """The tensors of one matrix."""
    return _read(matrix, False)


def _take_experts(experts: dict[str, Experts], one: Found) -> bool:
    prefix, inside, rest = one.name.partition(EXPERTS)
    if not inside:
        return False
    for style in FAMILIES:
        entry = style.entry(f"{EXPERTS[1:]}{rest}")
        if isinstance(entry, Entry):
            of = experts.setdefault(prefix, Experts(prefix=prefix, style=style))
            part, _ = WEIGHTS[entry.parameter]
            of.style = _style_of_both(of, style, part, one.name)
            of.parts[part, entry.shard, entry.expert] = replace(one, reciprocal=entry.reciprocal)
            return True
    return False


def _style_of_both(of: Experts, style: Style, part: str, name: str) -> Style:
    """The style of experts with one more entry, which is of this style.

    Raises ValueError, naming entries, for two that do not go together: all but scales of inputs
    that W4AFP8 calls after the numbers of weights, whose others are called after projections.
    """
    if style is of.style or (of.style is W4AFP8 and (style is EACH or part == "input")):
        return of.style
    inputs_alone = all(known == "input" for known, _, _ in of.parts)
    if (of.style, style, inputs_alone) == (W123, EACH, True) or (
        (of.style, style, part) == (EACH, W123, "input")
    ):
        return W4AFP8
    raise ValueError(
        f"{name} and {of.first.name} name experts in two ways; give the checkpoint of one model"
    )


def _sort_others(found: Survey, base: str, suffixes: dict[str, Found]) -> None:
    """Entries that have a name but for its end in common: a matrix in codes, or the rest."""
    known = {s: one for s, one in suffixes.items() if s in PARTS and PARTS[s] != "bias"}
    weights = [s for s in known if PARTS[s] == "weight"]
    # A router may have a scale beside its weight, which is no scale of codes.
    coded = any(suffixes[s].meta.dtype not in FLOATS for s in weights)
    for suffix, one in suffixes.items():
        if not (coded and suffix in known):
            found.rest[one.name] = one
            continue
        part = PARTS[suffix]
        if part == "input":
            found.input_scales += 1
        elif part != "shape":
            found.matrices.setdefault(base, {})[part] = Found(
                name=one.name, file=one.file, read=one.read, reciprocal=suffix in RECIPROCALS
            )


def _read(matrix: dict[str, Found], stacked: bool) -> Parts:
    """The tensors of a matrix, or of the first one of several in one tensor."""
    tensors = {part: read_part(one.read, one.reciprocal) for part, one in matrix.items()}
    if not stacked:
        return tensors
    return {part: t[0] if t.dim() and t.numel() > 1 else t for part, t in tensors.items()}
