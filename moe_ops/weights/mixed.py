"""Configurations of ModelOpt's kind: which algorithm quantised which modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ops.weights.configuration import naming, object_of, read_json, text_of

SEVERAL = "MIXED_PRECISION"  # the algorithm of a checkpoint with several
LAYERS = "quantized_layers"  # which modules each of them quantised
LAYERS_FILE = "quant_cfg.json"  # of TensorRT-LLM, which says it beside hf_quant_config.json
PAIRS, BLOCKS = "W4A8_AWQ", "FP8_BLOCK_SCALES"


def whole(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The configuration of ModelOpt's file, of which most is in `quantization`, with the algorithms
    of modules that another file in the folder has. Raises ValueError or TypeError."""
    inner = object_of(config.get("quantization") or {}, "quantization")
    said = {**config, **inner}
    path = folder / LAYERS_FILE
    if said.get("quant_algo") == SEVERAL and not said.get(LAYERS) and path.is_file():
        with naming(path):
            found = object_of(read_json(path), "the file")
            said[LAYERS] = object_of(found.get(LAYERS) or {}, LAYERS)
    return said


def algorithms(config: Mapping[str, Any]) -> dict[str, str]:
    """The algorithms of modules by their names, where there are several.

    Raises ValueError for one whose layout is unknown, TypeError for values that are not of their
    kind.
    """
    algorithm = text_of(config, "quant_algo", "")
    if algorithm != SEVERAL:
        if algorithm == PAIRS:  # which is another layout than in TensorRT-LLM's mixed checkpoints
            raise ValueError(
                f"quant_algo {PAIRS} of a whole model packs rows in pairs and scales columns of "
                "inputs, which no op reads; quantise without AWQ, or dequantise the checkpoint"
            )
        return {}
    layers = object_of(config.get(LAYERS) or {}, LAYERS)
    return {
        name: text_of(object_of(said, f"{LAYERS}[{name!r}]"), "quant_algo", "")
        for name, said in layers.items()
    }
