"""When the kernels of the backend "cpu" multiply by panels of a weight: usually where that is
faster; a call that has to be batch invariant does one thing for any number of rows.
"""

from __future__ import annotations

from moe_ops.kernels.cpu import STREAMS, WHERE_FASTER
from moe_ops.registry.invariance import INVARIANT


def least_panel_rows() -> int:
    """From how many rows of an expert on the call in hand uses panels."""
    return STREAMS if INVARIANT.get() else WHERE_FASTER
