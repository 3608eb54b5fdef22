"""Whole checkpoints into layers: `load_checkpoint`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_ops.checks.options import check_flag, check_text, check_type
from moe_ops.layer import MoELayer
from moe_ops.prepared import as_loaded
from moe_ops.weights.checkpoint import ORDER, Loading
from moe_ops.weights.codings import blocks_in, codings_in
from moe_ops.weights.configuration import naming
from moe_ops.weights.files import entries, files_of
from moe_ops.weights.layouts import PLAIN, TRANSPOSED, Coding, Stored
from moe_ops.weights.names import Style, style_of
from moe_ops.weights.outside import Outside
from moe_ops.weights.report import LoadReport
from moe_ops.weights.said import Codings
from moe_ops.weights.tensors import (
    GIVEN,
    STREAM,
    Pairs,
    checked,
    entries_of,
    entry_of,
    kept_tensors,
    streamed,
)
from moe_ops.weights.writer import Writer


def load_checkpoint(
    layers: Mapping[str, MoELayer],
    source: str | Path | Iterable[str | Path] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    style: str | Style,
    coding: Coding | None = None,
    sharded: bool = False,
    progress: bool = True,
) -> LoadReport:
    """Load this rank's share of every layer, from files or from tensors; says what was found.

    layers: by the prefix of their names, such as "model.layers.3.mlp"; the prefix ends before
    ".experts". source: a directory (its *.safetensors, those of its index, or its *.gguf), a file
    or several; or tensors by name: a mapping, or (name, tensor) pairs, such as a generator streams
    them. style: the family that wrote the names, a key of `STYLES`, or a `Style`. coding: how
    weights are laid out; None reads it from quantization_config in the config.json beside the
    files; a GGUF file says it itself, and tensors are plain. sharded: the tensors of experts are
    this rank's parts already, as one that saved its own share has them.

    Loads experts, with their replicas and, where they are fused, shared ones; else shared experts,
    the gate and the correction bias by the names of the layer's own parameters: of these, float8
    with scales beside it is decoded to a wider parameter. All keep their addresses, so weights of a
    running model can be updated, some or all. Prepared layers are prepared again at the end.

    Everything is checked before anything is written: a load that fails leaves the layers as they
    were. Files are mapped, not read, and tensors copied one at a time, so no more memory is needed
    than for the layers and, of layouts that are converted, one expert's matrix. With progress, a
    line per file is written to standard error. Of an iterator each tensor is written before the
    next one is asked for, which may then use its memory; a load that fails has written those before
    the one that is named, and a g_idx has to come before the other tensors of its expert.

    Raises ValueError or TypeError, naming file, entry and shapes, for a tensor that does not fit, a
    file that cannot be read, an unsupported coding, codes without their scales, scales of weights
    that are no positive finite numbers, and layers on the meta device. Raises FileNotFoundError for
    a source that is not there; ImportError for GGUF files without the package gguf.
    """
    check_load(layers, coding, sharded, progress)
    found = style_of(style)
    sources, pairs = _sources_of(source)
    folder = sources[0].folder if sources else None
    said = blocks_in if coding is not None else codings_in
    codings = Codings() if folder is None else said(folder)
    if coding is None:
        coding = codings.one(_matrices(layers, found, codings))
    if found.transposed and coding.name == PLAIN.name:
        coding = TRANSPOSED
    begin = time.perf_counter()
    with as_loaded(layers.values()):
        loading = Loading(
            style=found, coding=coding, sharded=sharded, layers=dict(layers),
            at_once=pairs is not None,
        )  # fmt: skip
        if pairs is None:
            _check(loading, sources, codings)
            _write(loading, sources, progress)
        else:
            _stream(loading, pairs)
    return loading.report(time.perf_counter() - begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A file, or tensors that are there: what errors and lines call it, and its entries, all or
    those whose names have an ending."""

    name: str
    entries: Callable[..., Iterator[Stored]]
    folder: Path | None = None
    float8: bool = True  # whether there may be any


def _sources_of(source: Any) -> tuple[list[_Source], Pairs | None]:
    """What is to be checked as a whole, or pairs of an iterator."""
    tensors = kept_tensors(source)
    if tensors is not None:
        return [_Source(name=GIVEN, entries=partial(entries_of, tensors))], None
    paths, pairs = streamed(source)
    if pairs is not None:
        return [], pairs
    return [
        _Source(
            name=str(file), entries=partial(entries, file), folder=file.parent,
            float8=file.suffix != ".gguf",
        )
        for file in files_of(paths)
    ], None  # fmt: skip


def _matrices(layers: Mapping[str, MoELayer], style: Style, codings: Codings) -> Iterator[str]:
    """Names of matrices of the experts of layers, by which a configuration may tell them apart; of
    layers without a format, those that it says anything of.
    """
    for prefix, layer in layers.items():
        for projection, shard in style.projections.items():
            if shard == "w1" and not layer.activation.gated:
                continue
            of = [prefix, style.experts, "" if style.stacked else "0", projection]
            name = ".".join(part for part in of if part)
            if layer.quant is not None or codings.says(name):
                yield name


def _check(loading: Loading, sources: list[_Source], codings: Codings) -> None:
    """Check every entry of all sources; nothing is written."""
    folder = sources[0].folder
    found = [(source.name, source.entries) for source in sources if source.float8]
    outside = Outside.of(found, loading.target, codings)
    for source in sources:  # before the tensors that they put in order
        with naming(source.name):
            for stored in source.entries(ORDER):
                loading.take(stored)
    for source in sources:
        with naming(source.name):
            for stored in outside.decoded(source.entries()):
                if not stored.name.endswith(ORDER):
                    loading.take(stored)
        loading.end_source()
    loading.loaded += sorted(outside.taken)
    with naming(folder or GIVEN):
        loading.settle()


def _write(loading: Loading, sources: list[_Source], progress: bool) -> None:
    """Write what was checked, with a line for each file."""
    with Writer() as writer:
        for i, source in enumerate(sources):
            start = time.perf_counter()
            size = loading.write_source(writer)
            if progress and source.folder is not None:
                took, file = time.perf_counter() - start, Path(source.name).name
                sys.stderr.write(
                    f"{i + 1} of {len(sources)}  {file}  {size / 2**20:.0f} MiB in {took:.1f} s\n"
                )
    loading.write_last()


def _stream(loading: Loading, pairs: Pairs) -> None:
    """Check and write each tensor before the next one is asked for."""
    for pair in pairs:
        with naming(STREAM):
            stored = entry_of(*checked(pair))
            Outside.of([(STREAM, partial(iter, (stored,)))], loading.target, Codings())
            loading.take(stored)
        loading.write_last()
    loading.settle()
    loading.write_last()


def check_load(
    layers: Mapping[str, MoELayer], coding: Coding | None, sharded: bool, progress: bool
) -> None:
    """Raise TypeError or ValueError unless these can be arguments of `load_checkpoint`: layers by
    names, none of which is on the meta device, and so on.
    """
    check_flag("sharded", sharded)
    check_flag("progress", progress)
    if coding is not None:
        check_type("coding", coding, Coding, "a Coding or None")
    check_type("layers", layers, Mapping, "layers by the prefixes of their names")
    for prefix, layer in layers.items():
        check_text("each prefix of layers", prefix)
        check_type(f"layers[{prefix!r}]", layer, MoELayer, "a MoELayer")
        if any(p.is_meta for p in layer.parameters()):
            raise ValueError(
                f"the layer {prefix!r} is on the meta device; give it memory first: "
                "layer.to_empty(device=...), then layer.reset_parameters()"
            )
