"""Tiny models of transformers that the installed vLLM loads on a CPU, with the plugin:
`published_vllm_models.py FOLDER PORT FAMILY...`. Raises if a block with experts is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model

from moe_ops.integrations.vllm import register
from moe_ops.integrations.vllm.method import ExpertsMethod
from moe_ops.testing import TOL, assert_close
from tests.hf import families
from tests.integrations import vllm_on_cpu  # noqa: F401  ahead of the rest of vLLM


def loaded(folder: Path) -> tuple[VllmConfig, nn.Module]:
    """What `--model-impl transformers` makes of a folder."""
    model = ModelConfig(
        model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True,
        model_impl="transformers", dtype="float32", max_model_len=64,
    )  # fmt: skip
    config = VllmConfig(model_config=model, device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            port = sys.argv[2]
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            initialize_model_parallel(1, 1)
        return config, get_model(vllm_config=config)


def check(family: str, folder: Path) -> None:
    tiny = families.build(family)
    tiny.model.save_pretrained(folder)
    config, model = loaded(folder)
    of_vllm = dict(model.named_modules())
    decorated = families.experts(tiny.model)
    assert decorated
    for name in decorated:
        assert type(of_vllm[name].routed_experts.quant_method) is ExpertsMethod, name
        block = name.removesuffix(".experts")
        x_BSD = torch.randn(1, 5, tiny.model.config.hidden_size)
        with torch.no_grad(), set_forward_context(None, config):
            want, got = (first(m(x_BSD)) for m in (tiny.model.get_submodule(block), of_vllm[block]))
        assert_close(got.reshape(want.shape), want, TOL["model", torch.float32], name)


def first(output: Any) -> Tensor:
    """A block's result, which some give with the router's."""
    return output[0] if isinstance(output, tuple) else output


if __name__ == "__main__":
    register()
    torch.manual_seed(0)
    names = sys.argv[3:]
    for name in names:
        check(name, Path(sys.argv[1]) / name)
    print("right:", *names)
