"""The Python blocks of pages, and what they need: tiny models in folders named as on the hub.

A page's blocks follow each other, so later ones know the names of earlier ones. A comment ahead of
a block says what else it needs: `<!-- ranks 2 -->` is one that torchrun runs on two ranks, from
whose blocks it has no names; `<!-- file name.py -->` is a module that others import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.sources import ROOT

PAGES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/**/*.md")
BLOCK = re.compile(r"(?:<!-- (?:ranks (\d+)|file (\S+)) -->\n\n)?```python\n(.*?)```\n", re.S)
TEXT = "A mixture of experts is"
SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
QWEN, GPTQ = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-GPTQ-Int4"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"


@dataclass(frozen=True)
class Block:
    """A block of Python, and how many ranks run it; 0: one process without a group. One with the
    name of a file is what is in that file."""

    page: str
    line: int
    ranks: int
    text: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        """As pasted, with these names; errors show the page's own lines. A file is written to the
        current directory."""
        if self.file:
            Path(self.file).write_text(self.text)
            return
        exec(compile("\n" * (self.line - 1) + self.text, str(ROOT / self.page), "exec"), names)


def pages() -> dict[str, list[Block]]:
    """The blocks of every page that has some."""
    files = sorted(file for pattern in PAGES for file in ROOT.glob(pattern))
    found = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    return {name: list(blocks(name, text)) for name, text in found.items() if "```python" in text}


def blocks(page: str, text: str) -> Iterator[Block]:
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        yield Block(page, line, int(match[1] or 0), match[3], match[2] or "")


def make_hub(folder: Path) -> None:
    """Write what the pages load, each under its name on the hub: transformers takes a folder of
    that name in the current directory first."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.hf.published import write
    from tests.weights.checkpoints import LAYOUTS

    torch.manual_seed(0)
    qwen = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=128)
    Qwen3MoeForCausalLM(qwen).save_pretrained(folder / QWEN)
    write_tokenizer(folder / QWEN)
    write(folder / GPTQ, LAYOUTS["gptq_int4"])
    mixtral = MixtralConfig(**SIZES, num_local_experts=4)
    MixtralForCausalLM(mixtral).save_pretrained(folder / MIXTRAL)


def write_tokenizer(folder: Path) -> None:
    """One whose tokens are words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[UNK]", *TEXT.split()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def on_disk(name: str) -> str:
    """What `huggingface_hub.snapshot_download` returns of a model that is on disk."""
    if not (Path(name) / "config.json").is_file():
        raise FileNotFoundError(f"no tiny model stands for {name}; write it in make_hub")
    return os.path.abspath(name)
