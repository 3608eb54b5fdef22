"""`python -m moe_ops invariant`: which parts of a model are batch invariant here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from moe_ops.invariant.compare import Generated, Part

NAME = "invariant"
ABOUT = """\
Compiles a Hugging Face model with batch_invariant=True and runs a prompt alone and beside others of
its length: each module of its layers by itself, given the same inputs both times, and generate.
Prints which of them give the prompt other bits in company, and why. Prompts are random tokens.

Exits with 0 if nothing differs, with 1 if something does, and with 2 for bad usage.
"""
EXAMPLES = """\
examples:
  python -m moe_ops invariant qwen3_moe --tiny
  python -m moe_ops invariant Qwen/Qwen3-30B-A3B --layers 2 --quant float8_e4m3fn --batch 16
"""


def add(
    commands: Any,
    positive: Callable[[str], int],
    add_made: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add the options of `invariant`. `positive` reads a number above 0, and `add_made` adds those
    of which a model is made."""
    options = commands.add_parser(
        NAME,
        help="which parts of a model give a prompt the same bits in any batch",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_made(options)
    put = options.add_argument
    put("--batch", type=positive, default=4, help="prompts of a batch, 2 or more, 4 by default")
    put("--tokens", type=positive, default=16, help="tokens of each prompt, 16 by default")
    put("--generate", type=positive, default=8, metavar="N", help="new tokens, 8 by default")


def run(top: argparse.ArgumentParser, args: argparse.Namespace, load: Callable[[Any], Any]) -> int:
    """Run the command on the model that `load` makes of the options. Returns 0 if nothing differs,
    else 1; a batch without company, and a model that cannot be made, exit with 2 and a line."""
    if args.batch < 2:
        top.error(f"--batch={args.batch} leaves the prompt alone both times; give 2 or more")
    try:
        torch.manual_seed(0)
        model = load(args)
    except Exception as error:  # whatever transformers, its hub or a config's own checks raise
        top.error(f"{args.model}: {str(error).strip().partition(chr(10))[0]}")
    # It loads Inductor, which --help need not wait for.
    from moe_ops.invariant.compare import generated, parts

    words = model.config.get_text_config().vocab_size
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(words, (args.batch, args.tokens), generator=made).to(model.device)
    found = list(parts(model, ids))
    made_of = generated(model, ids, args.generate)
    print(text(args, found, made_of))
    differs = any(part.why for part in found) or made_of.logits < made_of.steps
    return int(differs)


def text(args: argparse.Namespace, found: list[Part], made: Generated) -> str:
    """The report: parts of the same place in each layer in one line."""
    places: dict[tuple[str, str], list[str]] = {}
    for part in found:
        places.setdefault((place_of(part.name), part.kind), []).append(part.why)
    lines = [("part", "class", "same bits", "")]
    for (place, kind), whys in places.items():
        differ = [why for why in whys if why]
        count = f"{len(whys) - len(differ)} of {len(whys)}"
        lines.append((place, kind, count, differ[0] if differ else ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    head = f"{args.model}: a prompt of {args.tokens} tokens alone and beside {args.batch - 1} more"
    tail = made.why or (
        f"{made.tokens} of {made.steps} tokens are the same, and the logits of "
        f"{made.logits} steps have the same bits"
    )
    return "\n".join((head, "", *table, "", f"generate: {tail}"))


def place_of(name: str) -> str:
    """The name of a module with a star for the number of its layer."""
    return ".".join("*" if word.isdecimal() else word for word in name.split("."))
