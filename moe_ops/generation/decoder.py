"""A model for `generate`: leases of buffers to calls, and the code that runs the model in them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from moe_ops.forward.kinds import kinds_of
from moe_ops.forward.loops import around_loops
from moe_ops.forward.masks import attention_of
from moe_ops.forward.regions import Way, addresses, divided, plain_tensors
from moe_ops.generation.by_rows import store_by_rows
from moe_ops.generation.lease import Lease
from moe_ops.generation.own_attention import layers_of_steps
from moe_ops.generation.prompts import Captures
from moe_ops.generation.steps import Code, Steps, Tools, shown
from moe_ops.generation.wide import with_last_states
from moe_ops.graphs.report import StepsReport
from moe_ops.graphs.room import with_room
from moe_ops.interop.switches import boards_of

log = logging.getLogger("moe_ops")
T = TypeVar("T")

LEAST_SLOTS = 256
COARSE_SLOTS = 4096
MOST_STEPS = 8  # sizes whose buffers and graph are kept


def rows_for(batch: int) -> int:
    """The rows that serve a batch: the next power of two."""
    return 1 << (batch - 1).bit_length()


def slots_for(length: int) -> int:
    """The slots that serve a length, so that lengths share a graph: the next power of two, and from
    `COARSE_SLOTS` on, where doubling takes too much memory, the next multiple of that."""
    if length > COARSE_SLOTS:
        return -(-length // COARSE_SLOTS) * COARSE_SLOTS
    return max(LEAST_SLOTS, 1 << (length - 1).bit_length())


class Decoder:
    """A model for `generate`: its compiled regions, and the steps of the sizes used last."""

    def __init__(self, model: PreTrainedModel, tools: Tools, *, most: int = MOST_STEPS) -> None:
        self.model = model
        self.tools = tools
        self.most = most
        self._idle: OrderedDict[tuple[int, int], Steps] = OrderedDict()
        self._addresses: tuple[object, ...] = ()
        self._compiled = False  # the layers, for prompts
        self._renew()

    def _renew(self) -> None:
        """Forget what holds modules or weights: whole modules may be others by now."""
        self._captures = Captures(self.tools.pool)
        self._prompts: tuple[nn.Module, nn.Module] | None = None
        self._stand_ins: dict[str | None, Mapping[nn.Module, nn.Module]] = {}
        self._codes: WeakKeyDictionary[Steps, dict[str | None, Code]] = WeakKeyDictionary()

    def lease(self, batch: int, length: int) -> Lease:
        """Steps that nobody else has, for `batch` sequences of `length` tokens.

        Graphs of weights that are no longer where they were are forgotten first.
        """
        now = addresses(self.model)
        if now != self._addresses:
            if self._addresses:
                log.info(
                    "generate: weights, adapters or recordings are others, so graphs are captured "
                    "again"
                )
            if self.model.device.type == "cuda":
                with plain_tensors():
                    store_by_rows(self.model)
                now = addresses(self.model)
            self._renew()
            for idle in self._idle.values():
                idle.forget_graphs()
            kind = self.model.device, self.model.dtype
            if any((s.like.device, s.like.dtype) != kind for s in self._idle.values()):
                self._idle.clear()
            self._addresses = now
        key = rows_for(batch), slots_for(length)
        steps = self._idle.pop(key, None)
        if steps is None:
            steps = Steps(self.model, kinds_of(self.model.config), *key, self.tools)
        steps.boards = boards_of(self.model.modules())
        return Lease(self, steps, self._code(steps))

    def give_back(self, steps: Steps) -> None:
        for board in steps.boards:
            board.reset()
        self._idle[steps.rows, steps.slots] = steps
        while len(self._idle) > self.most:
            (rows, slots), _ = self._idle.popitem(last=False)
            log.info("generate: dropped the buffers of %d x %d, used longest ago", rows, slots)

    def with_room(self, run: Callable[[], T]) -> T:
        """What `run` returns; if memory does not suffice it runs again without the idle buffers."""
        return with_room(run, self._drop)

    def _drop(self) -> str:
        sizes = len(self._idle)
        self._idle.clear()
        return f"{sizes} sizes lose their buffers in generate" if sizes else ""

    def report(self) -> list[StepsReport]:
        """The sizes that are kept, the one used last at the end."""
        return [steps.report() for steps in self._idle.values()]

    @contextmanager
    def compiling_prompts(self) -> Iterator[None]:
        """A context around a prompt. For the first prompt it says that the layers are compiled."""
        with nullcontext() if self._compiled else shown("compiling the layers for prompts"):
            yield
        if not self._compiled:
            self.tools.tell()
        self._compiled = True

    def _code(self, steps: Steps) -> Code:
        """What runs the model in these steps, with the attention that it has now."""
        attention = attention_of(self.model.config)
        codes = self._codes.setdefault(steps, {})
        if attention not in codes:
            if self._prompts is None:
                region = around_loops(self.model, self.tools.layers)
                prompt, unmasked = (
                    divided(self.model, Way(region, unmasked=unmasked, around=with_last_states))
                    for unmasked in (False, True)
                )
                self._prompts = prompt, unmasked
            prompt, unmasked = self._prompts
            codes[attention] = Code(
                model=self.model,
                prompt=prompt,
                unmasked=unmasked,
                step=divided(
                    self.model,
                    Way(steps.region, self._layers_of_steps(attention), one_size=True),
                ),
                captures=self._captures,
                stand_ins=self._layers_of_steps(attention),
            )
        return codes[attention]

    def _layers_of_steps(self, attention: str | None) -> Mapping[nn.Module, nn.Module]:
        """The layers with the attention of one query, where that computes the same."""
        if attention not in self._stand_ins:
            self._stand_ins[attention] = layers_of_steps(self.model, attention)
        return self._stand_ins[attention]
