"""Hooks with which transformers records hidden states, attentions and router logits.

It puts them on a model at the first call that asks for these, and leaves them there. For other
calls they do nothing, but compiled code cannot hold them.
"""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.utils import output_capturing

from moe_ops.twin import Twin

INSTALLED = "_output_capturing_hooks_installed"
HOOK = f"{output_capturing.install_output_capuring_hook.__name__}.<locals>."


def unrecorded(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself if transformers never recorded what its modules give, else a copy on the
    same weights that is not recorded."""
    if not any(getattr(part, INSTALLED, False) for part in model.modules()):
        return model
    copied = Twin(model).module
    for part in copied.modules():
        vars(part).pop(INSTALLED, None)
        for key, hook in list(part._forward_hooks.items()):
            if _records(hook):
                del part._forward_hooks[key]
    return copied


def _records(hook: object) -> bool:
    return getattr(hook, "__module__", None) == output_capturing.__name__ and getattr(
        hook, "__qualname__", ""
    ).startswith(HOOK)
