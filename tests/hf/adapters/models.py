"""Small models with adapters of their experts, by peft and by our own call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops.compiler import followed
from moe_ops.generation.generate import quicken
from moe_ops.generation.steps import Tools
from moe_ops.installed import inside_of_peft
from tests.hf.test_quantize import decoded, experts_of
from tests.hf.twins import uncompiled

peft = pytest.importorskip("peft")

BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
TARGETS = {"first": BOTH[:1], "second": BOTH[1:], "both": BOTH}


def wrapped(model: nn.Module, *names: str, target: tuple[str, ...] = BOTH, **options: Any) -> Any:
    """A PeftModel of a model, with a random adapter for each name, the first one active."""
    made = None
    for seed, name in enumerate(names or ("default",)):
        torch.manual_seed(seed)
        given = {"r": 4, "lora_alpha": 8, "target_modules": [], **options}
        config = peft.LoraConfig(
            target_parameters=list(target), init_lora_weights=False, task_type="CAUSAL_LM", **given
        )
        if made is None:
            made = peft.get_peft_model(model, config, adapter_name=name)
        else:
            made.add_adapter(name, config)
    assert made is not None
    return made.eval().requires_grad_(False)


def choose(model: Any, name: str | None) -> None:
    """Make an adapter of peft the active one; None: none."""
    if name is None:
        model.base_model.disable_adapter_layers()
        return
    model.base_model.enable_adapter_layers()
    model.set_adapter(name, inference_mode=True)


@torch.no_grad()
def randomised(model: nn.Module) -> None:
    """Fill the adapters that we added with numbers that matter."""
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if "expert_adapters" in name:
            p.copy_(torch.randn(p.shape) * 0.3)


@torch.no_grad()
def in_floats(coded: nn.Module, stock: Any) -> Any:
    """A stock model with the values of the codes of one that was quantised."""
    for module, plain in zip(experts_of(coded), experts_of(stock), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            w_EFD = decoded(module, name)
            getattr(plain, name).copy_(w_EFD.mT if plain.is_transposed else w_EFD)
    return stock


def twin_of(model: Any, tools: Tools | None = None) -> Any:
    """What `compile` makes of a model, with nothing compiled, and its `generate`."""
    made, follow = followed(model)
    quicken(inside_of_peft(made.module), tools or uncompiled(), torch.no_grad()(follow))
    return made.module


def ids_of(B: int = 2, S: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, (B, S), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=ids_of() if ids is None else ids, use_cache=False).logits


def tokens(model: Any, ids: Tensor | None = None, **options: Any) -> Tensor:
    given = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    with torch.inference_mode():
        return model.generate(input_ids=ids_of() if ids is None else ids, **given)
