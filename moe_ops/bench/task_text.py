"""Text that Python ships, as bytes: a part to train on, and a part that is held out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

RUN = 16  # paragraphs that follow each other and stay together
HELD_OUT = 10  # of so many runs one is held out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """The bytes of both parts, uint8, and a digest of both: other releases of Python have another
    text."""

    train: Tensor
    held_out: Tensor
    digest: str


def python_help() -> Text:
    """What `help()` of this Python says of its language, by topics."""
    from pydoc_data.topics import topics

    return split(topics[name] for name in sorted(topics))


def split(documents: Iterable[str]) -> Text:
    """Every tenth run of paragraphs is held out, but for what has been trained on: topics contain
    each other, at other indentations too.
    """
    paragraphs = [p for text in documents for p in re.split(r"\n\s*\n", text) if p.strip()]
    once = list(dict.fromkeys(paragraphs))
    runs = [once[i : i + RUN] for i in range(0, len(once), RUN)]
    train = [p for i, run in enumerate(runs) if (i + 1) % HELD_OUT for p in run]
    known = {words(p) for p in train}
    held_out = [p for run in runs[HELD_OUT - 1 :: HELD_OUT] for p in run if words(p) not in known]
    parts = ["\n\n".join(part).encode() for part in (train, held_out)]
    first, second = (torch.tensor(list(part), dtype=torch.uint8) for part in parts)
    return Text(train=first, held_out=second, digest=hashlib.sha256(b"".join(parts)).hexdigest())


def words(paragraph: str) -> str:
    return " ".join(paragraph.split())
