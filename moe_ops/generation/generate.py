"""`generate` of a compiled model: transformers' own interface, our cache, our steps."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode

from moe_ops.forward.layer_cache import CACHE, Unviewable
from moe_ops.forward.regions import plain_tensors
from moe_ops.generation.decoder import Decoder
from moe_ops.generation.fallback import (
    Fallback,
    MayFallBack,
    call_of_generate,
    fall_back,
    falls_back,
    with_own_generate,
)
from moe_ops.generation.lease import Lease
from moe_ops.generation.refusals import (
    OtherCandidates,
    cache_of_call_refusal,
    call_refusal,
    candidates_refusal,
    shape_refusal,
)
from moe_ops.generation.sample import sample
from moe_ops.generation.steps import Tools
from moe_ops.generation.wide import WIDTHS, width_for
from moe_ops.graphs.report import StepsReport
from moe_ops.interop.subclass import subclass
from moe_ops.registry.invariance import invariant, require_asked

log = logging.getLogger("moe_ops")
Model = TypeVar("Model", bound=PreTrainedModel)


def quicken(twin: PreTrainedModel, tools: Tools, follow: Callable[[], None]) -> None:
    """Give `twin` a `generate` that runs it by steps; with a logged reason if it cannot. What then
    stays transformers' own compiles nothing that it would not of a model that is not compiled.

    The class of the twin becomes a subclass, of the same name, of what it was. `follow` is what
    each call of `generate` begins with.
    """
    reason = shape_refusal(twin)
    if reason is not None:
        log.info("generate of %s stays transformers' own: it %s", type(twin).__name__, reason)
    if not hasattr(twin, "generate"):
        return
    fallback = Fallback(tools.compile_model, follow, tools.batch_invariant)
    twin._moe_ops_fallback = fallback
    if reason is not None:
        fallback.of_model = f"the model {reason}"
        twin.__class__ = with_own_generate(type(twin))  # type: ignore[arg-type]
        return
    twin.__class__ = by_steps(type(twin))  # type: ignore[arg-type]
    twin._moe_ops_generation = Generation(Decoder(twin, tools), follow, fallback)


class Generation:
    """The decoder of a twin, with what one call of `generate` has leased from it."""

    def __init__(self, decoder: Decoder, follow: Callable[[], None], fallback: Fallback) -> None:
        self.decoder = decoder
        self.follow, self.fallback = follow, fallback
        self.lock = threading.RLock()
        self.inside = 0
        self.leased: list[Lease] = []
        self.told: set[str] = set()
        self.refused: Counter[str] = Counter()  # calls by the reason why they are not by steps
        self.refusal: str | None = None  # of every call, seen when one ran
        self.done: torch.cuda.Event | None = None

    @contextmanager
    def call(self) -> Iterator[Callable[[], list[Lease]]]:
        """A call of `generate`, and what tells its leases: one at a time, on whichever stream; a
        call may contain another."""
        tools = self.decoder.tools
        require_asked(tools.batch_invariant)
        with self.lock, invariant(tools.batch_invariant):
            device = self.decoder.model.device
            if self.done is not None and device.type == "cuda":
                torch.cuda.current_stream(device).wait_event(self.done)
            self.follow()  # which may write to what the last call reads
            self.inside += 1
            before = len(self.leased)
            try:
                yield lambda: self.leased[before:]
            except torch.OutOfMemoryError:
                del self.leased[before:]  # of which some buffers may be missing
                raise
            finally:
                self.inside -= 1
                for lease in self.leased[before:]:
                    self.decoder.give_back(lease.steps)
                del self.leased[before:]
                if device.type == "cuda":
                    self.done = torch.cuda.Event()
                    self.done.record(torch.cuda.current_stream(device))

    def lease(self, batch: int, length: int, stock: Cache, outlives: bool) -> Lease:
        """A lease until the call ends, or for as long as somebody has it."""
        lease = self.decoder.lease(batch, length)
        lease.stock = stock
        if outlives:
            lease.outlive()
        else:
            self.leased.append(lease)
        return lease

    def tell(self, reason: str) -> None:
        """Say why a call is transformers' own. Raises NotImplementedError where it may not be."""
        self.fallback.require(reason)
        self.refused[reason] += 1
        if reason not in self.told:
            self.told.add(reason)
            log.info("generate falls back to transformers' own: %s", reason)


def length_of(config: Any, inputs: dict[str, Any], most: int) -> int:
    """The tokens that a cache of the caller may come to hold: those that the mask tells of, whether
    or not the caller gives them again, and new ones; `most`, if that is not told."""
    mask, new = inputs.get("attention_mask"), config.max_new_tokens
    # A mask that hides nothing is dropped, but for its length.
    seen = getattr(config, "_mask_length", None) if mask is None else mask.shape[-1]
    return most if new is None or seen is None else min(most, seen + new)


def as_stock(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with the signature of transformers' own, where transformers looks up what a model
    takes, such as inputs_embeds."""
    return functools.wraps(getattr(GenerationMixin, method.__name__))(method)


class QuickGenerate(MayFallBack):
    """What `quicken` puts before a model's class. Where a call cannot run by steps, everything here
    passes on to the model's class."""

    _moe_ops_generation: Generation

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A move or a cast, which the model makes too, as its weights do."""
        out = super()._apply(fn, recurse)  # type: ignore[misc]
        self._moe_ops_generation.follow()
        return out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        if not isinstance(cache, Lease):
            return super().__call__(*args, **kwargs)
        del kwargs[CACHE]
        if cache.reading:
            return cache.read(*args, **kwargs)
        return cache.steps_of(kwargs["input_ids"], bool(kwargs.get("output_hidden_states")))

    @as_stock
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is not None:  # may ask a step for whatever a model can do
            self._moe_ops_generation.follow()
            self._moe_ops_generation.tell("it is custom_generate")
            with call_of_generate(own=self):
                return super().generate(*args, **kwargs)  # type: ignore[misc]
        with self._moe_ops_generation.call() as leases, call_of_generate():
            out = super().generate(*args, **kwargs)  # type: ignore[misc]
            for lease in leases():
                lease.give()
            cache = getattr(out, CACHE, None)
            if isinstance(cache, Lease) and not cache.outlives:
                out[CACHE] = cache.handed_out()
        self._moe_ops_generation.decoder.tools.tell()
        return out

    @as_stock
    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._moe_ops_generation.tell("it is generate_batch, which has a cache of its own")
        return super().generate_batch(*args, **kwargs)  # type: ignore[misc]

    @as_stock
    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        state = self._moe_ops_generation
        given = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        if falls_back(self):  # as custom_generate, which said so
            return super()._prepare_cache_for_generation(*given)  # type: ignore[misc]
        reason = state.refusal or call_refusal(
            self, generation_config, model_kwargs, generation_mode
        )
        if state.inside == 0:
            reason = "it was not called through generate"
        elif reason:
            fall_back(self)
        if reason:
            state.tell(reason)
            return super()._prepare_cache_for_generation(*given)  # type: ignore[misc]
        callers = model_kwargs.get(CACHE)
        if isinstance(callers, Lease):  # of an assistant, which goes on
            callers.go_on(max_cache_length)
            return None
        with plain_tensors():
            super()._prepare_cache_for_generation(*given)  # type: ignore[misc]
        # Of transformers' own it is empty, and allocates nothing until it is filled.
        stock = model_kwargs.get(CACHE)
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        checks = generation_mode == GenerationMode.ASSISTED_GENERATION
        goes_back = checks or generation_config.is_assistant
        reason = cache_of_call_refusal(self, stock, callers, rows, goes_back) or ""
        if reason:
            state.tell(reason)
            fall_back(self)
            return None
        length = max_cache_length
        if callers is not None:
            length = length_of(generation_config, model_kwargs, length + callers.get_seq_length())
        if goes_back:  # candidates may go on behind the last token
            number = 1 + (generation_config.prompt_lookup_num_tokens or 1)
            length += width_for(min(number, WIDTHS[-1]))
        lease = state.lease(rows, length, stock, bool(generation_config.is_assistant))
        lease.candidates = checks
        model_kwargs[CACHE] = lease
        if callers is not None:
            lease.take(callers, rows)
        return None

    @as_stock
    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        if isinstance(cache, Lease) and not cache.reading:
            new = kwargs.get("next_sequence_length") or 1
            return {"input_ids": input_ids[:, -new:], CACHE: cache}
        return super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, *args, **kwargs
        )

    @as_stock
    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        lease = model_kwargs.get(CACHE)
        if isinstance(lease, Lease) and not lease.candidates:
            return model_kwargs  # a step needs nothing but its tokens, what makes candidates may
        return super()._update_model_kwargs_for_generation(  # type: ignore[misc]
            outputs, model_kwargs, *args, **kwargs
        )

    @as_stock
    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        # A step of ours is compiled already.
        return falls_back(self) and super()._valid_auto_compile_criteria(  # type: ignore[misc]
            *args, **kwargs
        )

    @as_stock
    @contextmanager
    def _optimize_model_for_decode(self) -> Iterator[None]:
        # Our passes choose by the number of tokens; with another implementation of experts, which
        # is quicker uncompiled, steps would be compiled again.
        own = super()._optimize_model_for_decode  # type: ignore[misc]
        with own() if falls_back(self) else nullcontext():
            yield

    def _unless_refused(self, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `decode` gives for a call. If its prompt turns out to ask more of a cache than ours
        has, it gets transformers' own, and so do all calls from then on."""
        lease = kwargs.get(CACHE)
        try:
            return decode(*args, **kwargs)
        except Unviewable as error:
            if not isinstance(lease, Lease) or not lease.reading:
                raise
            reason = str(error)
        self._moe_ops_generation.refusal = reason
        self._moe_ops_generation.tell(reason)
        fall_back(self)
        return decode(*args, **{**kwargs, CACHE: lease.stock})

    @as_stock
    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        lease = model_kwargs.get(CACHE)
        out = super()._prefill(  # type: ignore[misc]
            input_ids, generation_config, model_kwargs, **kwargs
        )
        if isinstance(lease, Lease):
            lease.reading = False
        return out

    @as_stock
    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        return self._unless_refused(super()._beam_search, *args, **kwargs)  # type: ignore[misc]

    @as_stock
    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        own = super()._assisted_decoding  # type: ignore[misc]
        try:
            return self._unless_refused(own, *args, **kwargs)
        except OtherCandidates as error:
            self._moe_ops_generation.tell(str(error))
            fall_back(self)
            return own(*args, **{**kwargs, CACHE: kwargs[CACHE].stock})

    @as_stock
    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]
        if isinstance(kwargs["model_kwargs"].get(CACHE), Lease):
            reason = candidates_refusal(made, self.config)  # type: ignore[attr-defined]
            if reason:
                raise OtherCandidates(reason)
        return made

    @as_stock
    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return self._unless_refused(self._sampled, *args, **kwargs)

    def _sampled(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        criteria, config = kwargs["stopping_criteria"], kwargs["generation_config"]
        stock = (
            not isinstance(kwargs.get(CACHE), Lease)
            or args
            or kwargs.get("synced_gpus")
            or kwargs.get("streamer") is not None
            or kwargs[CACHE].taken is not None
            or config.return_dict_in_generate
            or criteria.max_length is None
        )
        if stock:
            return super()._sample(input_ids, *args, **kwargs)  # type: ignore[misc]
        kwargs.pop("synced_gpus", None)
        kwargs.pop("streamer", None)
        return sample(self, input_ids, **kwargs)


@functools.cache
def by_steps(cls: Any) -> Any:
    """The class of a compiled model whose `generate` runs by steps."""
    name = GenerationMixin.prepare_inputs_for_generation.__name__

    @functools.wraps(getattr(cls, name))  # a model with its own may not take embeddings
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(QuickGenerate, name)(self, *args, **kwargs)

    made = subclass(QuickGenerate, cls)
    setattr(made, name, prepare)
    return made


def config_with(options: dict[str, Any]) -> CompileConfig:
    """transformers' settings for compiling with these options of Inductor."""
    return CompileConfig(fullgraph=False, mode=None, options=options)


def generation_report(model: Any) -> list[StepsReport]:
    """The sizes for which a compiled model keeps buffers and graphs, the one used last at the end.

    Raises ValueError for a model whose `generate` is not by `moe_ops.compile`.
    """
    state = getattr(model, "_moe_ops_generation", None)
    if state is None:
        raise ValueError(
            f"generate of this {type(model).__name__} is not ours; give its model to "
            "moe_ops.compile, which logs a reason if it cannot make it so"
        )
    return state.decoder.report()
