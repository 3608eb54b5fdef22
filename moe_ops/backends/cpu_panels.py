"""When the kernels of the backend "cpu" multiply by panels of a weight: usually where that is
faster; in a call that has to be batch invariant always or never, by what the weights are.
"""

from __future__ import annotations

from moe_ops.kernels.cpu import PANELS, STREAMS, WHERE_FASTER
from moe_ops.registry.invariance import INVARIANT


def least_panel_rows(*, codes: bool) -> int:
    """From how many rows of an expert on the call in hand uses panels. A batch invariant call does
    what costs less over 1 to 512 tokens: panels of codes are decoded ahead, too much for one row;
    streams of floats take up to 1.7 times as long with many.
    """
    if not INVARIANT.get():
        return WHERE_FASTER
    return STREAMS if codes else PANELS
