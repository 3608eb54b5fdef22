"""Whole checkpoints into layers: `load_checkpoint`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from moe_ops.layer import MoELayer
from moe_ops.options import check_flag, check_text, check_type
from moe_ops.prepared import as_loaded
from moe_ops.weights.checkpoint import ORDER, Loading
from moe_ops.weights.configuration import coding_in, naming
from moe_ops.weights.experts import write
from moe_ops.weights.files import entries, files_of
from moe_ops.weights.layouts import PLAIN, TRANSPOSED, Coding
from moe_ops.weights.names import Style, style_of
from moe_ops.weights.outside import check_outside
from moe_ops.weights.report import LoadReport
from moe_ops.weights.writer import Writer


def load_checkpoint(
    layers: Mapping[str, MoELayer],
    source: str | Path | Iterable[str | Path],
    *,
    style: str | Style,
    coding: Coding | None = None,
    sharded: bool = False,
    progress: bool = True,
) -> LoadReport:
    """Load this rank's share of every layer from files; says what was found.

    layers: by the prefix of their names, such as "model.layers.3.mlp"; the prefix ends before
    ".experts". source: a directory (its *.safetensors, those of its index, or its *.gguf), a file
    or several. style: the family that wrote the names, a key of `STYLES`, or a `Style`. coding: how
    weights are laid out; None reads it from quantization_config in the config.json beside the
    files; a GGUF file says it itself. sharded: the tensors of experts are this rank's parts
    already, as one that saved its own share has them.

    Loads experts, with their replicas and, where they are fused, shared ones; else shared experts,
    the gate and the correction bias by the names of the layer's own parameters. Prepared layers are
    prepared again at the end.

    Everything is checked before anything is written: a load that fails leaves the layers as they
    were. Files are mapped, not read, and tensors copied one at a time, so no more memory is needed
    than for the layers and, of layouts that are converted, one expert's matrix. With progress, a
    line per file is written to standard error.

    Raises ValueError or TypeError, naming file, entry and shapes, for a tensor that does not fit, a
    file that cannot be read, an unsupported coding, float8 tensors outside the experts and layers
    on the meta device. Raises FileNotFoundError for a source that is not there; ImportError for
    GGUF files without the package gguf.
    """
    check_load(layers, coding, sharded, progress)
    found = style_of(style)
    files = files_of(source)
    coding = coding_in(files[0].parent) if coding is None else coding
    if found.transposed and coding is PLAIN:
        coding = TRANSPOSED
    begin = time.perf_counter()
    with as_loaded(layers.values()):
        loading = Loading(style=found, coding=coding, sharded=sharded, layers=dict(layers))
        for file in files:
            with naming(file):
                check_outside(file, loading.target)
        for file in files:  # before the tensors that they put in order
            with naming(file):
                for stored in entries(file, ORDER):
                    loading.take(stored)
        sizes = []
        for file in files:
            before = loading.bytes_loaded
            with naming(file):
                for stored in entries(file):
                    if not stored.name.endswith(ORDER):
                        loading.take(stored)
            loading.end_file()
            sizes.append(loading.bytes_loaded - before)
        with naming(files[0].parent):
            loading.settle()
        with Writer() as writer:
            for i, (file, size) in enumerate(zip(files, sizes, strict=True)):
                start = time.perf_counter()
                loading.write_file(writer)
                if progress:
                    took = time.perf_counter() - start
                    sys.stderr.write(
                        f"{i + 1} of {len(files)}  {file.name}  {size / 2**20:.0f} MiB in "
                        f"{took:.1f} s\n"
                    )
        write(loading.last)
    return loading.report(time.perf_counter() - begin)  # with what the writer still had to do


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
