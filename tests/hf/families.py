"""Every mixture-of-experts family of the installed transformers, discovered and built tiny.

A family is a folder of `transformers.models` whose modeling module decorates an experts class with
`@use_experts_implementation`. Nothing is listed by hand: a new family of a new transformers is
built by the rules of `overrides.py`, or its test fails until a rule is added there.
"""

import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from tests.hf.overrides import EXPERTS, EXTRA_INPUTS, HEADS, MODEL_CLASSES, OVERRIDES, SIZES, VOCAB

_DECORATED = re.compile(r"^@use_experts_implementation", re.MULTILINE)
_HEADS_FIRST = ("ForCausalLM", "ForConditionalGeneration", "Model")
# Decay rates of state space layers: their defaults mean something, so they stay.
_KEPT = re.compile(r"(A_log|dt_bias)$")
_ROUTER = re.compile(r"\.(router|gate)\.")
_FIRST_PLAIN_TOKEN = 16  # ids below may mean padding, end of text, or an image
Overrides = Mapping[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A tiny random model of one family in eval mode and float32, with inputs of shape (2, 7)."""

    name: str
    model: PreTrainedModel
    inputs: dict[str, Tensor]
    can_generate: bool


@functools.cache
def discover() -> tuple[str, ...]:
    """The families of the installed transformers, sorted. Reads source text and imports nothing."""
    models = Path(transformers.__file__).parent / "models"
    sources = models.glob("*/modeling_*.py")
    return tuple(sorted({s.parent.name for s in sources if _DECORATED.search(s.read_text())}))


def build(family: str, experts_implementation: str = "grouped_mm", *, seed: int = 0) -> TinyModel:
    """A tiny model of `family`. Its weights depend on `family` and `seed`, on nothing else."""
    cls = model_class(family)
    return build_class(cls, tiny_config(cls.config_class), experts_implementation, seed=seed)


def build_class(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    experts_implementation: str = "grouped_mm",
    *,
    seed: int = 0,
) -> TinyModel:
    """The same of a class of a family, or of one that wraps a family's."""
    transformers.logging.set_verbosity_error()  # tiny sizes earn many warnings, all expected
    family = cls.__module__.split(".")[2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config).to(torch.float32).eval()
    randomise(model, seed)
    # Afterwards, as this skips a vision tower of another family, which would refuse the name.
    if model._can_set_experts_implementation():
        model.set_experts_implementation(experts_implementation)
    can_generate = isinstance(model, GenerationMixin) and model.can_generate()
    tiny = TinyModel(name=family, model=model, inputs={}, can_generate=can_generate)
    return dataclasses.replace(tiny, inputs=inputs_for(tiny, 2, 7, seed))


def inputs_for(tiny: TinyModel, batch: int, length: int, seed: int) -> dict[str, Tensor]:
    """Random inputs of shape (batch, length) for a forward of `tiny`, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length)
    inputs = {"input_ids": torch.randint(_FIRST_PLAIN_TOKEN, VOCAB, shape, generator=generator)}
    for name, bound in EXTRA_INPUTS.get(tiny.name, {}).items():
        inputs[name] = torch.randint(bound, shape, generator=generator)
    return inputs


def run(tiny: TinyModel, inputs: dict[str, Tensor]) -> Tensor:
    """The logits of a forward without cache or gradient; without a head, the last hidden state."""
    with torch.no_grad():
        output = tiny.model(**inputs, use_cache=False)
    return output.logits if "logits" in output else output.last_hidden_state


def experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` which `@use_experts_implementation` decorates, by name."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "has_gate")}


def tiny_config(
    config_class: type[PreTrainedConfig], more: Overrides | None = None
) -> PreTrainedConfig:
    """A config of `config_class` with the sizes of `overrides.py`, down into its sub-configs.
    There may be `more` of them, by the names of configs, or by "*" of any."""
    more = more or {}
    declared = {field.name for field in dataclasses.fields(config_class)}
    sizes = {name: size for name, size in SIZES.items() if name in declared}
    sizes |= {name: size for name, size in more.get("*", {}).items() if name in declared}
    if "kv_lora_rank" in declared:  # latent attention has a key for every query head
        sizes["num_key_value_heads"] = HEADS
    for name, value in vars(config_class()).items():
        if isinstance(value, PreTrainedConfig):
            sizes[name] = tiny_config(type(value), more)
    name = config_class.__name__
    return config_class(**sizes | OVERRIDES.get(name, {}) | more.get(name, {}))


def model_class(family: str) -> type[PreTrainedModel]:
    """The first class of the family's module which generates text, else its first base model."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family in MODEL_CLASSES:
        return getattr(module, MODEL_CLASSES[family])
    for ending in _HEADS_FIRST:
        for model_class in _own_models(module.__name__, vars(module)):
            if model_class.__name__.endswith(ending):
                return model_class
    raise ValueError(
        f"no class in {module.__name__} ends with one of {_HEADS_FIRST}; "
        "name its model class in MODEL_CLASSES of overrides.py"
    )


def _own_models(module: str, names: dict[str, object]) -> Iterator[type[PreTrainedModel]]:
    """The model classes which `module` defines, without the abstract `*PreTrainedModel`."""
    for value in names.values():
        if not (isinstance(value, type) and issubclass(value, PreTrainedModel)):
            continue
        if value.__module__ == module and not value.__name__.endswith("PreTrainedModel"):
            yield value


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Fill parameters and bias-like buffers so that nothing is degenerate (zero bias, unit scale).

    Matrices get std 1/√fan_in, so activations stay O(1); the last matrix of a router four times
    that, so choices are far from ties; vectors and biases their default 0 or 1 plus 0.1·N(0, 1).
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=device)

    for name, parameter in model.named_parameters():
        if _KEPT.search(name):
            continue
        if parameter.ndim < 2 or name.endswith("bias"):
            base = 1.0 if torch.all(parameter == 1) else 0.0
            parameter.copy_(base + 0.1 * noise(parameter))
        else:
            is_router = _ROUTER.search(name) and parameter.shape[0] < 2 * EXPERTS
            gain = 4.0 if is_router else 1.0
            parameter.copy_(gain * parameter.shape[-1] ** -0.5 * noise(parameter))
    for name, buffer in model.named_buffers():
        if "bias" in name and buffer.is_floating_point():
            buffer.copy_(0.1 * noise(buffer))
        elif name.endswith("tid2eid"):  # token id -> its experts, all different
            num_experts = model.get_submodule(name.rpartition(".")[0]).num_experts
            order = torch.rand(
                buffer.shape[0], num_experts, generator=generator, device=device
            ).argsort(-1)
            buffer.copy_(order[:, : buffer.shape[1]])
