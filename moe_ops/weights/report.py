"""What loading a checkpoint did."""

from __future__ import annotations

from dataclasses import dataclass

SHOWN = 5  # entries of each kind in a report's text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What `load_checkpoint` did, by the names of the files' entries.

    `missing` names what a layer holds and no entry filled, as <prefix>.<parameter>, and for experts
    as <prefix>.<parameter>[<expert>].<shard>. `twice` are entries whose place an earlier one had
    filled, which stays. Entries below no prefix are not mentioned.
    """

    loaded: tuple[str, ...]
    elsewhere: tuple[str, ...]  # of experts, or shares, that other ranks hold
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]  # below a prefix, but nothing that the layer holds
    twice: tuple[str, ...]
    bytes_loaded: int  # of the tensors that were read, whole
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether every tensor was filled once, and nothing was left over."""
        return not (self.missing or self.unexpected or self.twice)

    def __str__(self) -> str:
        gib = self.bytes_loaded / 2**30
        lines = [
            f"{len(self.loaded)} entries loaded, {gib:.2f} GiB in {self.seconds:.1f} s; "
            f"{len(self.elsewhere)} of other ranks"
        ]
        for what in ("missing", "unexpected", "twice"):
            names = getattr(self, what)
            if names:
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                lines.append(f"{what}: {', '.join(names[:SHOWN])}{more}")
        return "\n".join(lines)
