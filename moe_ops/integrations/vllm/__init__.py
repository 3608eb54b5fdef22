"""The experts of vLLM by `moe_ops.experts`: a plugin of the entry point group
`vllm.general_plugins`.

vLLM calls `plugin` in each of its processes. Named in VLLM_PLUGINS, it puts our class in place of
vLLM's for experts without quantisation, of its own models and of `--model-impl transformers`.
"""

from __future__ import annotations

import logging

from moe_ops.integrations.vllm.contract import REPLACED, WRITTEN_FOR, missing

PLUGIN = "moe_ops"
log = logging.getLogger("moe_ops")


def plugin() -> None:
    """Run the experts of vLLM by `moe_ops.experts` if VLLM_PLUGINS names this plugin.

    Where VLLM_PLUGINS is not set, vLLM loads every plugin that is installed. That somebody
    installed moe_ops does not mean that they want other kernels, so this one asks to be named, as
    vLLM asks of plugins for its endpoints. Raises RuntimeError as `register` does.
    """
    from vllm import envs

    if PLUGIN in (envs.VLLM_PLUGINS or ()):
        register()
    else:
        log.info("moe_ops runs no experts of vLLM; VLLM_PLUGINS=%s switches it on", PLUGIN)


def register() -> None:
    """Put our class in place of vLLM's for experts without quantisation, in this process.

    A second call does nothing. Raises RuntimeError if another plugin has put a class there, or if
    the installed vLLM lacks something that ours is written for.
    """
    import vllm

    lacking = missing()
    if lacking:
        raise RuntimeError(
            f"moe_ops does not fit vLLM {vllm.__version__}: {'; '.join(lacking)}. Install vLLM "
            f"{WRITTEN_FOR}, for which it is written, or leave {PLUGIN} out of VLLM_PLUGINS"
        )
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    from moe_ops.integrations.vllm.method import ExpertsMethod

    there = op_registry_oot.get(REPLACED)
    if there is ExpertsMethod:
        return
    if there is not None:
        raise RuntimeError(
            f"{there.__module__}.{there.__qualname__} is already in place of vLLM's {REPLACED}; "
            f"leave its plugin or {PLUGIN} out of VLLM_PLUGINS"
        )
    CustomOp.register_oot(name=REPLACED)(ExpertsMethod)
