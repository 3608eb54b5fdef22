"""A picture of what schemes lose on a task: a line for each, the least on top."""

from __future__ import annotations

from pathlib import Path

from moe_ops.bench.plot import COLOURS, DPI, LETTER, pyplot
from moe_ops.bench.task import TaskResults
from moe_ops.bench.task_scores import TaskCell

INCHES = (9.0, 0.24, 1.2)  # width; height of a line, and of the rest
ERRORS = 2  # standard errors to each side


def draw(results: TaskResults, path: Path) -> None:
    """Write the picture as PNG, of the fewest ranks. Raises RuntimeError without matplotlib."""
    plt, cells = pyplot(), shown(results)
    width, line, rest = INCHES
    with plt.rc_context(
        {"font.size": LETTER, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, axes = plt.subplots(
            figsize=(width, line * len(cells) + rest), dpi=DPI, layout="constrained"
        )
        for bits, colour in zip((4, 6, 8, 16), COLOURS, strict=False):
            some = [(i, c) for i, c in enumerate(cells) if kind(c) == bits]
            if some:
                axes.errorbar(
                    [100 * c.lost for _, c in some], [i for i, _ in some],
                    xerr=[100 * ERRORS * c.lost_error for _, c in some],
                    fmt="o", color=colour, capsize=2, label=f"{bits}-bit weights",
                )  # fmt: skip
        axes.axvline(0, color="0.7", linewidth=1, zorder=0)
        axes.set_yticks(range(len(cells)), [label(c) for c in cells])
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.set(
            xlabel=f"perplexity lost, %, ± {ERRORS} standard errors", title=title(results)
        )  # fmt: skip
        axes.grid(axis="x", alpha=0.3)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(path, format="png")
        plt.close(figure)


def shown(results: TaskResults) -> list[TaskCell]:
    """The cells of the fewest ranks, by what they lose."""
    fewest = min(cell.ranks for cell in results.cells)
    return sorted((c for c in results.cells if c.ranks == fewest), key=lambda c: c.lost_nats)


def kind(cell: TaskCell) -> int:
    """The bits of a weight without its scales."""
    return max(bits for bits in (4, 6, 8, 16) if bits <= cell.bits_per_weight)


def label(cell: TaskCell) -> str:
    if not cell.weight_format:
        return "16-bit"
    return (
        f"{cell.weight_format} + {cell.input_format}" if cell.input_format else cell.weight_format
    )


def title(results: TaskResults) -> str:
    nats = next(c for c in results.cells if c.scheme == "none")
    return f"{results.device}; perplexity of bfloat16 {nats.perplexity:.3f}"
