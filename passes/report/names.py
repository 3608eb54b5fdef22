"""Names of modules in short."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def names(layers: Sequence[str]) -> str:
    """Layers in short: model.layers.{0-3,5}.mlp.experts where a number alone differs."""
    layers = list(dict.fromkeys(layers))
    if len(layers) == 1:
        return layers[0]
    splits = [re.split(r"(?<=\.)(\d+)(?=\.|$)", layer) for layer in layers]
    if len({len(parts) for parts in splits}) == 1:
        varying = [i for i, parts in enumerate(zip(*splits, strict=True)) if len(set(parts)) > 1]
        if len(varying) == 1 and varying[0] % 2:
            numbers = sorted(int(parts[varying[0]]) for parts in splits)
            parts = splits[0]
            parts[varying[0]] = f"{{{_numbers(numbers)}}}"
            return "".join(parts)
    return ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


def _numbers(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][-1] == n - 1:
            spans[-1][1:] = [n]
        else:
            spans.append([n])
    return ",".join("-".join(map(str, s)) for s in spans)
