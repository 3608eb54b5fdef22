"""Published quantised checkpoints into transformers' models, whose experts stay in codes.

`from_checkpoint` (`model.py`) makes a model. `survey.py` sorts the entries of a checkpoint: experts
in codes, matrices in codes outside of experts, the rest. `names.py` says where an entry goes, and
which the model's class ignores. `formats.py` says in which format of ours a matrix is, and decodes
one; `stacked.py` puts single experts in floats together; `loader.py` is how transformers loads what
is not experts.
"""

from moe_ops.installed import require_transformers

require_transformers("moe_ops.from_checkpoint")

from moe_ops.published.model import from_checkpoint  # noqa: E402

__all__ = ["from_checkpoint"]
