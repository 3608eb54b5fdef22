"""Files that are wrong somewhere: bits, ends, entries and values of JSON change by chance."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

# What may stand for a value in a JSON file. Some are right in their place.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 4, 8, 64, 2**31, 2**63, 2**70, 1e400, -0.5, float("nan"), "",
    "4", "F32", "I32", "BF16", "U8", "F8_E4M3", "BOOL", "F4", "gptq", "awq", "fp8", "../x",
    "/etc/x", "x" * 300, "\0", [], [0], [-1], [2**40, 2**40], [64, 64], {}, {"a": 1}, [[]],
)  # fmt: skip
ALIKE = (
    ("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), ("F16", "BF16", "I16", "U16"),
    ("F32", "I32", "U32"), ("F64", "I64", "U64", "C64"),
)  # fmt: skip
Mutation = Callable[[random.Random, bytes], bytes]


def flipped(rng: random.Random, raw: bytes) -> bytes:
    """One bit to eight, half of the time near the beginning, where headers are."""
    out = bytearray(raw)
    end = len(raw) if rng.random() < 0.5 else min(len(raw), 400)
    for _ in range(rng.choice((1, 1, 2, 8)) if end else 0):
        out[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(out)


def truncated(rng: random.Random, raw: bytes) -> bytes:
    """Cut off at the end, in the middle of it, or followed by other bytes."""
    if rng.random() < 0.2:
        return raw + rng.randbytes(rng.choice((1, 8, 100)))
    return raw[: rng.randrange(len(raw))]


def changed(rng: random.Random, raw: bytes) -> bytes:
    """A value of a JSON file is another one, or is gone, or has another name."""
    found = json.loads(raw)
    places = list(_places(found))
    for _ in range(rng.choice((1, 1, 2))):
        holder, key = rng.choice(places)
        what = rng.random()
        if isinstance(holder, dict) and what < 0.15:
            holder.pop(key, None)
        elif isinstance(holder, dict) and what < 0.3:
            holder[f"{key}x" if rng.random() < 0.5 else str(key)[:-1]] = holder.get(key)
        else:
            holder[key] = rng.choice(VALUES)
    return json.dumps(found).encode()


def swapped(rng: random.Random, raw: bytes) -> bytes:
    """Two values of one JSON object have each other's place."""
    found = json.loads(raw)
    holders = [h for h, _ in _places(found) if isinstance(h, dict) and len(h) > 1]
    if holders:
        whole = isinstance(found, dict) and len(found) > 1 and rng.random() < 0.5
        holder = found if whole else rng.choice(holders)
        a, b = rng.sample(list(holder), 2)
        holder[a], holder[b] = holder[b], holder[a]
    return json.dumps(found).encode()


def recast(rng: random.Random, raw: bytes) -> bytes:
    """Tensors of a safetensors header have another dtype of the same size, shape or name: it stays
    a header, and what is in the file does not change.
    """
    found = json.loads(raw)
    names = [name for name in found if name != "__metadata__"]
    for name in rng.sample(names, rng.choice((1, 1, 2))):
        entry, what = found[name], rng.random()
        if what < 0.5:
            like = next((kinds for kinds in ALIKE if entry["dtype"] in kinds), (entry["dtype"],))
            entry["dtype"] = rng.choice(like)
        elif what < 0.9:
            shape = entry["shape"]
            entry["shape"] = rng.choice((shape[::-1], [1, *shape], [*shape, 1], [math.prod(shape)]))
        else:
            found[rng.choice(names).replace("0", "1")] = found.pop(name)
            break
    return json.dumps(found).encode()


def _places(value: Any) -> Any:
    """Each value inside a value, as what holds it and its key."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def of_header(mutate: Mutation) -> Mutation:
    """The same with the JSON header of a safetensors file, whose length then says where it ends."""

    def mutated(rng: random.Random, raw: bytes) -> bytes:
        size = int.from_bytes(raw[:8], "little")
        header = mutate(rng, raw[8 : 8 + size])
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + raw[8 + size :]

    return mutated


BYTES: tuple[Mutation, ...] = (flipped, truncated)
JSON = (*BYTES, changed, swapped)
SAFETENSORS = (*BYTES, of_header(changed), of_header(swapped), of_header(recast))
