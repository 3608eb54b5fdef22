"""The steps of `generate`: one token per step from buffers that stay where they are. Where there
are CUDA graphs a step is captured whole, and so are prompts of sizes that come again."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticSlidingWindowLayer

from moe_ops.forward.kept import kept_of
from moe_ops.forward.kinds import Kind
from moe_ops.forward.layer_cache import CACHE
from moe_ops.forward.masks import Sizes, maker_of, masks
from moe_ops.forward.regions import ByKind, Region, Way, divided, plain_tensors
from moe_ops.generation.fallback import CompileModel
from moe_ops.generation.prompts import Captures, Filling, Prompt, Prompts
from moe_ops.generation.slots import Begun, Empty, Slots
from moe_ops.generation.wide import Wide, width_for, with_last_states
from moe_ops.graphs.cuda_graph import NO_GPU, GraphPool
from moe_ops.graphs.report import StepsReport
from moe_ops.graphs.runner import Size, put
from moe_ops.interop.code_objects import with_own_code_object
from moe_ops.interop.switches import Board
from moe_ops.interop.told import told_of
from moe_ops.terminal import waiting_for

log = logging.getLogger("moe_ops")
T = TypeVar("T")
WithRoom = Callable[[Callable[[], T]], T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What compiles and captures.

    `layers` runs layers for any number of sequences and tokens, `compile_step` compiles for
    the sizes of its first call, `compile_model` a whole model for what transformers calls so.
    `pool` captures prompts and steps, in memory that they share. `tell` is called where more may
    have been compiled, and says what came of it. With `batch_invariant` ops are run so.
    """

    layers: Region
    compile_step: Callable[[Callable[..., Any]], Callable[..., Any]]
    compile_model: CompileModel
    pool: GraphPool
    tell: Callable[[], None] = lambda: None
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Code:
    """What runs a model in the steps of one size: twins of it, and what captures their calls.

    It goes along with every call, and is made anew where weights are replaced.
    """

    model: PreTrainedModel
    prompt: nn.Module  # its layers compiled for prompts
    unmasked: nn.Module  # the same, whose layers get no mask
    step: nn.Module  # its layers compiled for the steps of this size
    captures: Captures
    stand_ins: Mapping[nn.Module, nn.Module]  # for layers, in steps
    _wide: dict[int, nn.Module] = field(default_factory=dict)

    def wide(self, width: int, region: ByKind) -> nn.Module:
        """What runs steps of so many tokens, through their region."""
        if width not in self._wide:
            way = Way(region, self.stand_ins, one_size=True, around=with_last_states)
            self._wide[width] = divided(self.model, way)
        return self._wide[width]


@contextmanager
def shown(text: str) -> Iterator[None]:
    """A context around something slow: it is logged and, while it goes on, shown on a terminal."""
    log.info("generate: %s", text)
    with waiting_for(text):
        yield


def parts(layer: Any, prompt: int, tokens: int) -> list[slice]:
    """The tokens, in the parts in which a layer of transformers takes them to be as if all after
    the prompt came one by one. One is all, but for a window of fixed size, which counts what it
    gets until it is full, and no more."""
    ends = [0, tokens]
    if isinstance(layer, StaticSlidingWindowLayer):
        ends += [prompt, min(max(prompt, layer.max_cache_len), tokens)]
    ends = sorted(set(ends))
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


class Steps:
    """Buffers for up to `rows` sequences of up to `slots` tokens, and the graphs of this size.

    A batch smaller than `rows` is padded with copies of its first sequence, which choose the same
    experts and so read no further weights.
    """

    def __init__(
        self, model: PreTrainedModel, kinds: Sequence[Kind], rows: int, slots: int, tools: Tools
    ) -> None:
        self.rows = rows
        self.slots = slots
        self.count = 0
        self.graph = Size()
        device = model.device
        with plain_tensors():
            self.ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
            self.positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
            self.filled = torch.zeros((), dtype=torch.int64, device=device)
            self.valid = torch.zeros(rows, slots, dtype=torch.bool, device=device)
            self.like = torch.empty(rows, 1, 0, dtype=model.dtype, device=device)
        self.logits: Tensor | None = None
        self.cache = Slots(kinds, rows, slots, self.filled)
        self.prompts = Prompts()
        self.boards: list[Board] = []  # which adapters sequences have
        self.sizes = Sizes(slots, self.filled)
        self.wide: dict[int, Wide] = {}  # steps of several tokens, by how many at most
        self.compile_step = tools.compile_step
        self.region = ByKind(f"step_{rows}x{slots}", tools.compile_step)
        self.masks = tools.compile_step(with_own_code_object(masks, f"masks_{rows}x{slots}"))

    def read(self, code: Code, prompt: Prompt, kwargs: dict[str, Any], states: bool = False) -> Any:
        """The model's output for the prompts, of which the cache then holds what is kept. Its last
        states are there for sure if `states`."""
        filling = Filling(
            fill=functools.partial(self.fill, code),
            slots=self.cache,
            state=(self.valid, self.positions, self.filled),
            like=self.like,
            model=code.model,
            captures=code.captures,
        )
        self._use_boards(prompt.size[0], prompt.size[0])
        told = told_of(code.model)
        if told is not None:
            told.begin(*prompt.size, *prompt.size)
        with plain_tensors():
            self._lay_out(prompt.positions)
            if states:
                return self.fill(code, prompt, prompt.mask, False, kwargs)
            return self.prompts.read(filling, prompt, kwargs)

    def _use_boards(self, batch: int, rows: int) -> None:
        for board in self.boards:
            board.use(batch, rows)

    def _lay_out(self, positions: Tensor) -> None:
        """Have a buffer for positions with as many dims as a prompt's; some models count them along
        several axes, [axes, B, S]."""
        axes = positions.shape[:-2]
        if self.positions.shape[:-2] != axes:
            self.forget_graphs()
            self.positions = self.positions.new_zeros(*axes, self.rows, 1)

    def fill(
        self, code: Code, prompt: Prompt, mask: Any, unmasked: bool, kwargs: dict[str, Any]
    ) -> Any:
        """What of `read` runs on the device, and nothing else: the model, what its layers
        keep, and the buffers of the steps to come. `mask` is what the model gets for the
        prompt's; its layers get none if `unmasked`."""
        (B, S), begun = prompt.size, prompt.begun
        cache = Begun(self.cache, B, begun, S) if begun > 0 else Empty(self.cache, S)
        out = (code.unmasked if unmasked else code.prompt)(
            attention_mask=mask,
            position_ids=prompt.positions,
            **prompt.inputs,
            **{CACHE: cache},
            **kwargs,
        )
        self.valid.zero_()
        self.valid[:B, : begun + S] = True if prompt.mask is None else prompt.mask.bool()
        self.positions[..., :B, :].copy_(prompt.positions[..., -1:] + 1)
        for buffer in (self.valid, self.positions):
            buffer[..., B:, :].copy_(buffer[..., :1, :])
        self.filled.fill_(begun + S)
        return out

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What a step takes from the last one and changes. Keys and values are not among it: those
        of a step that is repeated are written over."""
        return self.valid, self.positions, self.filled, *self.cache.states

    def step(self, code: Code, ids: Tensor, with_room: WithRoom[Any]) -> Tensor:
        """The logits [B, 1, V] after one more token per sequence, valid until the next step."""
        batch = len(ids)
        self._use_boards(batch, self.rows)
        told = told_of(code.model)
        if told is not None:
            told.begin(batch, 1, self.rows, 1)
        put(ids, self.ids[:batch])
        if batch < self.rows:
            self.ids[batch:].copy_(ids[:1].expand(self.rows - batch, -1))
        self._repeat(self.graph, functools.partial(self.run, code), code, with_room)
        self.count += 1
        assert self.logits is not None
        return self.logits[:batch]

    def wide_step(
        self, code: Code, ids: Tensor, with_room: WithRoom[Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The logits [B, n, V] after each of n more tokens per sequence, and the last states of
        these, valid until the next step. There must be slots for as many as `width_for` says."""
        batch, n = ids.shape
        self._use_boards(batch, self.rows)
        wide = self._wide_for(n)
        told = told_of(code.model)
        if told is not None:
            told.begin(batch, n, self.rows, wide.width)
        wide.put(ids)
        run = functools.partial(self.run_wide, code, wide)
        self._repeat(wide.graph, run, code, with_room, f" of {wide.width} tokens")
        wide.count += 1
        assert wide.logits is not None
        states = None if wide.states is None else wide.states[:batch, :n]
        return wide.logits[:batch, :n], states

    def _wide_for(self, tokens: int) -> Wide:
        width = width_for(tokens)
        if width not in self.wide:
            self.wide[width] = Wide(self.rows, self.slots, width, self.like, self.compile_step)
        return self.wide[width]

    def go_back(self, tokens: int) -> None:
        """Forget so many tokens, the last ones. What is kept of them is hidden, as it is of tokens
        to come, and written over."""
        with plain_tensors():
            self.filled.sub_(tokens)
            self.positions.sub_(tokens)

    def move(self, other: Steps, tokens: int) -> None:
        """Take over what others of as many rows hold, of so many tokens."""
        with plain_tensors():
            self._lay_out(other.positions)
            self.valid.zero_()
            self.valid[:, :tokens].copy_(other.valid[:, :tokens])
            self.positions.copy_(other.positions)
            self.filled.fill_(tokens)
            for ours, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
                ours.fill(theirs.past(other.rows, tokens), tokens)

    def _repeat(
        self,
        graph: Size,
        run: Callable[[], None],
        code: Code,
        with_room: WithRoom[Any],
        tokens: str = "",
    ) -> None:
        """Run a step by its graph, which the first one makes; or as it is, where there is none."""
        if graph.seen == 0:
            with_room(functools.partial(self._capture, graph, run, code.captures.pool, tokens))
        graph.seen += 1
        if graph.is_ready:
            graph.replay()
        else:
            run()

    def run(self, code: Code) -> None:
        """One step, of which everything but the ids is in buffers that it advances itself."""
        with plain_tensors():
            self.valid.index_fill_(1, self.filled.view(1), True)
            model = code.model
            mask = self.masks(
                model.config, self.like, self.valid, self.sizes, self.positions, maker_of(model)
            )
            out = code.step(
                input_ids=self.ids,
                attention_mask=mask,
                position_ids=self.positions,
                use_cache=True,
                **{CACHE: self.cache},
            )
            self.logits = out.logits
            self.positions.add_(1)
            self.filled.add_(1)

    def run_wide(self, code: Code, wide: Wide) -> None:
        """One step of several tokens, of which all but the ids and their number is as in `run`."""
        with plain_tensors():
            at, model = wide.at, code.model
            positions = self.positions + at
            self.valid.index_fill_(1, self.filled + wide.numbers, True)
            mask = wide.masks(
                model.config, wide.like, self.valid, self.sizes, positions, maker_of(model), at
            )
            out = code.wide(wide.width, wide.region)(
                input_ids=wide.ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{CACHE: self.cache},
            )
            wide.logits, wide.states = out.logits, out.hidden_states[-1]
            self.positions.add_(wide.given)
            self.filled.add_(wide.given)

    def _capture(self, graph: Size, run: Callable[[], None], pool: GraphPool, tokens: str) -> None:
        what = f"{self.rows} rows, {self.slots} slots"
        if not pool.captures_on(self.ids.device):
            graph.refuse(NO_GPU)
        else:
            called = f"steps of generate ({what}{tokens and ','}{tokens})"
            with shown(f"making a step{tokens} of {what}"):
                graph.capture(pool, run, self.state, device=self.ids.device, what=called)

    def forget_graphs(self) -> None:
        # The logits are in the memory of the graphs, which goes when nothing is in it.
        self.graph, self.logits = Size(), None
        for wide in self.wide.values():
            wide.forget_graph()
        self.prompts.forget()

    def copy_into(self, cache: Cache, batch: int, prompt: int) -> None:
        """Copy what is kept of so many sequences into an empty cache, which then is as if it had
        got the prompt first and then one token after the other."""
        with plain_tensors():
            for ours, layer in zip(self.cache.layers, cache.layers, strict=True):
                ours.add_to(layer, batch, parts(layer, prompt, int(self.filled)))

    def take(self, cache: Cache, tokens: int) -> None:
        """Copy what a dynamic cache of so many tokens holds."""
        with plain_tensors():
            for ours, layer in zip(
                self.cache.layers, cache.layers if tokens > 0 else (), strict=False
            ):
                ours.fill(kept_of(layer), tokens)

    def add_to(self, cache: Cache, batch: int, start: int) -> None:
        """Add the tokens of so many sequences from this one on to a dynamic cache."""
        with plain_tensors():
            while len(cache.layers) < len(self.cache.layers):
                cache.layers.append(cache.layer_class_to_replicate())
            for ours, layer in zip(self.cache.layers, cache.layers, strict=True):
                ours.add_to(layer, batch, [slice(start, int(self.filled))])

    def report(self) -> StepsReport:
        return StepsReport(
            rows=self.rows,
            slots=self.slots,
            steps=self.count,
            captured=self.graph.is_ready,
            cache_bytes=self.cache.nbytes,
            prompt_graphs=self.prompts.graphs,
            prompts_replayed=self.prompts.replayed,
            bytes=self.graph.bytes,
            refusal=self.graph.refusal,
            prompts=self.prompts.report(),
            wide=tuple(self.wide[width].report() for width in sorted(self.wide)),
        )
