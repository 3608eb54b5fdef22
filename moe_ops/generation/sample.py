"""Greedy decoding and sampling, without waiting for the device at every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.forward.layer_cache import CACHE


def generator_of(device: torch.device) -> torch.Generator:
    """Where random numbers on a device come from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


class StopCheck:
    """Whether all sequences are finished; on a GPU known one token late, so that the host can queue
    the next step while this one runs. `late` is the number of extra tokens, which are dropped."""

    def __init__(self, device: torch.device, *, deferred: bool | None = None) -> None:
        cuda = device.type == "cuda"
        self.deferred = cuda if deferred is None else deferred
        self.flags = [torch.zeros((), dtype=torch.bool, pin_memory=cuda) for _ in range(2)]
        self.events = [torch.cuda.Event() if cuda else None for _ in range(2)]
        self.count = 0
        self.late = 0

    def __call__(self, unfinished: Tensor) -> bool:
        done = unfinished.max() == 0
        if not self.deferred:
            return bool(done)
        now = self.count % 2
        self.flags[now].copy_(done, non_blocking=True)
        event = self.events[now]
        if event is not None:
            event.record()
        self.count += 1
        return self.count > 1 and self._was_done(1 - now)

    def finish(self) -> None:
        """Check what was deferred. Call it after the last token."""
        if self.deferred and self.count > 0:
            self._was_done((self.count - 1) % 2)

    def _was_done(self, which: int) -> bool:
        event = self.events[which]
        if event is not None:
            event.synchronize()
        self.late = int(self.flags[which])
        return bool(self.late)


def sample(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Tensor:
    """transformers' `_sample` for a model that keeps its own cache: the same tokens."""
    cache = model_kwargs[CACHE]
    config = generation_config
    n, most = input_ids.shape[1], stopping_criteria.max_length
    tokens = input_ids.new_zeros((input_ids.shape[0], max(n + 1, most)))
    tokens[:, :n] = input_ids
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.int64, device=input_ids.device)
    pad = config._pad_token_tensor
    ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    check = StopCheck(input_ids.device)
    generator, before = generator_of(input_ids.device), None
    logits = model._prefill(input_ids, config, model_kwargs).logits
    while True:
        scores = logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = logits_processor(tokens[:, :n], scores)
        if config.do_sample:
            before = generator.get_state() if check.deferred else None
            chosen = torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        else:
            chosen = scores.argmax(-1)
        if ends:
            chosen = chosen * unfinished + pad * (1 - unfinished)
        tokens[:, n] = chosen
        n += 1
        if n >= most:
            check.finish()
            break
        unfinished = unfinished & ~stopping_criteria(tokens[:, :n], None)
        if check(unfinished):
            break
        logits = cache.step(tokens[:, n - 1 : n])
    if check.late and before is not None:
        generator.set_state(before)  # the extra token is dropped, and the RNG state restored
    return tokens[:, : n - check.late].contiguous()
