"""Why `generate` does not run by steps: of a model, by its shape, or of one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import utils as generation_utils
from transformers.generation.configuration_utils import GenerationMode

from moe_ops.forward.kept import cache_refusal
from moe_ops.forward.kinds import kinds_of
from moe_ops.forward.layer_cache import CACHE
from moe_ops.forward.masks import REPEATABLE, attention_of
from moe_ops.forward.regions import decoder_layers
from moe_ops.interop.hooks import hooks_of

MODES = {
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
}
# A model that has its own has its reasons.
STOCK = (
    "_update_model_kwargs_for_generation",
    "_prepare_cache_for_generation",
    "_prefill",
    "_sample",
    "_beam_search",
    "_assisted_decoding",
    "_get_candidate_generator",
    "generate",
)
INPUTS = {
    "attention_mask", "position_ids", "use_cache", "logits_to_keep", "inputs_embeds", CACHE,
}  # fmt: skip
# What is of pictures and the like, and matters to prompts alone: so transformers says, and of types
# of tokens, that those of new ones are text.
INPUTS |= set(getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))
INPUTS |= {"mm_token_type_ids", "moe_mm_token_type_ids"}
SERVED = (None, "dynamic", "static")  # names of caches that only differ in what is handed out
LAST_STATES = {"output_hidden_states": -1}  # what a generator of candidates may ask for
EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")


def shape_refusal(model: PreTrainedModel) -> str | None:
    """Why no call of the model's `generate` can run by steps, or None."""
    if not isinstance(model, GenerationMixin) or not model.can_generate():
        return "cannot generate"
    if model.config.is_encoder_decoder:
        return "has an encoder"
    for name in STOCK:
        if getattr(type(model), name) is not getattr(GenerationMixin, name):
            return f"has a {name} of its own"
    own = inputs_refusal(type(model).prepare_inputs_for_generation)
    if own is not None:
        return own
    try:
        layers, kinds = model.get_submodule(decoder_layers(model)), kinds_of(model.config)
    except LookupError as error:
        return str(error)
    if len(layers) != len(kinds):
        return f"has {len(kinds)} caches for {len(layers)} layers"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "is spread over devices"
    return None


def inputs_refusal(prepare: Callable[..., Any]) -> str | None:
    """Why steps do without a model's own way of preparing inputs, or None: one that adds to what
    transformers prepares, and does not depend on how long the text is, matters to prompts alone."""
    stock = GenerationMixin.prepare_inputs_for_generation
    own, name = inspect.unwrap(prepare), stock.__name__
    if own is inspect.unwrap(stock):
        return None
    if name not in own.__code__.co_names:
        return f"has a {name} of its own"
    if "get_seq_length" in own.__code__.co_names:
        return f"has a {name} that looks at the length of the text"
    return None


def call_refusal(model: Any, config: Any, inputs: dict[str, Any], mode: GenerationMode) -> str:
    """Why this call of `generate` cannot run by steps; empty if it can."""
    outputs = [n for n in EXTRA_OUTPUTS if inputs.get(n) or getattr(model.config, n, False)]
    hooked = [path or "the model" for path, _ in hooks_of(model)]
    extra = [n for n, v in inputs.items() if v is not None and n not in INPUTS | {*outputs}]
    reasons = {
        f"the mode {mode.value} needs another cache": mode not in MODES,
        "use_cache is off": config.use_cache is False,
        f"cache_implementation is {config.cache_implementation}": config.cache_implementation
        not in SERVED,
        "disable_compile is set": bool(config.disable_compile),
        "prefill_chunk_size is set for a static cache": config.prefill_chunk_size is not None
        and config.cache_implementation == "static",
        f"{', '.join(outputs)} is asked for": bool(outputs),
        f"it takes {', '.join(extra)} too": bool(extra),
        "the model is in training mode": any(part.training for part in model.children()),
        f"a hook is on {hooked[0] if hooked else None}": bool(hooked),
        "candidates would be behind a prompt of embeddings": mode
        == GenerationMode.ASSISTED_GENERATION
        and inputs.get("inputs_embeds") is not None,
        "it is an assistant of fewer layers": bool(config.is_assistant) and not _has_all(model),
        "autocast is on": torch.is_autocast_enabled(model.device.type),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def _has_all(model: Any) -> bool:
    """Whether a model's configuration names all of its layers; while it drafts for itself it names
    fewer."""
    return len(model.get_submodule(decoder_layers(model))) == len(kinds_of(model.config))


def cache_of_call_refusal(
    model: Any, stock: Any, callers: Any, rows: int, goes_back: bool
) -> str | None:
    """Why steps cannot stand for the cache of a call, `stock` as transformers made it or the
    caller's, or None. `goes_back` if tokens may be forgotten again."""
    if stock is None:
        return "transformers makes no cache for it"
    if goes_back:
        if callers is not None:
            return "candidates would go on behind a cache of the caller"
        if attention_of(model.config) not in REPEATABLE:
            return f"candidates are not checked with the attention {attention_of(model.config)}"
        if not stock.is_croppable:
            return "candidates may be forgotten again, but not what its layers keep of them"
    return None if callers is None else cache_refusal(callers, model.config, rows)


class OtherCandidates(Exception):
    """Candidates that no steps check; the message says why."""


def candidates_refusal(generator: Any, config: Any) -> str | None:
    """Why steps cannot check the candidates of a generator of transformers, or None."""
    wants = generator.model_kwargs_overrides if generator.requires_model_outputs else {}
    if wants not in ({}, LAST_STATES):
        return f"what makes candidates asks for {', '.join(wants)}"
    text = config.get_text_config(decoder=True)
    if wants and getattr(text, "tie_last_hidden_states", None) is False:
        return "what makes candidates asks for states before the last norm"
    return None
