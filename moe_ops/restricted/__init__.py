"""Models with fewer experts: `restrict_experts` (`restrict.py`).

`keep.py` reads which experts a call keeps. `changes.py` is what a layer becomes, done and undone.
`layers.py` finds it for a `MoELayer`, `models.py` for a model of transformers: from what its class
makes of a configuration with fewer experts (`twins.py`).
"""

from moe_ops.restricted.changes import Restriction
from moe_ops.restricted.restrict import restrict_experts

__all__ = ["Restriction", "restrict_experts"]
