"""Where a model writes its routings while it runs: rings on the device, emptied between calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.interop.told import Looks
from moe_ops.recorded.routing import NONE, RecordedRouting, called


@dataclass(slots=True)
class Written:
    """The rows of a call, counted from the first of all: a batch of so many `rows` of `width`
    tokens, of which the first `batch` and `tokens` are the call's."""

    first: int
    rows: int
    width: int
    batch: int
    tokens: int
    failed: bool = False


@dataclass(slots=True)
class Chunk:
    """Rows that left the rings, by layer [L, n, K], and what says that the copies are done."""

    ids: Tensor
    weights: Tensor | None
    done: torch.cuda.Event | None = None

    def settle(self) -> None:
        """Free pinned memory of copies that are done, which is dear."""
        if self.done is None or not self.done.query():
            return
        self.ids = torch.empty_like(self.ids, pin_memory=False).copy_(self.ids)
        if self.weights is not None:
            self.weights = torch.empty_like(self.weights, pin_memory=False).copy_(self.weights)
        self.done = None


class Rings:
    """Rings of `tokens` rows for each layer, written by routers at the row `at` and behind it.

    The host knows each call: it says where the next one writes, and before rows that were not read
    yet would be written over it has them copied to pinned memory, on the stream of the model, so
    that nothing waits. So the device holds the rings and no more, and no row is lost: a call that
    does not fit into them is refused. `ids` of each layer are int16 [S, K], `weights` float32, or
    None.
    """

    def __init__(
        self, layers: tuple[str, ...], num_experts: int, top_k: int, tokens: int, *, weights: bool,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.layers, self.num_experts, size = layers, num_experts, (tokens, top_k)
        with torch.inference_mode(False):  # normal tensors, whatever the caller's mode
            self.ids = [torch.full(size, NONE, dtype=torch.int16, device=device) for _ in layers]
            self.weights = [torch.zeros(size, device=device) for _ in layers] if weights else None
            self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self._end = self._copied = 0  # rows, counted from the first of all
        self._base = 0  # the first row that is in a chunk
        self.begun = 0
        self.looks: Looks | None = None
        self._calls: list[Written] = []
        self._chunks: list[Chunk] = []

    @property
    def tokens(self) -> int:
        return self.ids[0].shape[0]

    @property
    def nbytes(self) -> int:
        """The memory of the device."""
        return sum(t.nbytes for t in (*self.ids, *(self.weights or ()), self.at))

    def begin(
        self, batch: int, tokens: int, rows: int, width: int, *, may_grow: bool = False
    ) -> None:
        if self.at.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a model whose routings are recorded is captured in a graph of your own, whose "
                "replays nobody counts; stop recording, or have moe_ops.compile or "
                "moe_ops.capture capture it"
            )
        n = rows * width
        room = 2 * n + n // 8 + rows if may_grow else n  # padded, and tried so before
        if room > self.tokens:
            raise ValueError(
                f"a call of {rows} x {width} tokens does not fit into rings of {self.tokens}; "
                f"record with tokens={room} or more"
            )
        if self._end + room - self._copied > self.tokens:
            self._empty()
        self._calls.append(Written(self._end, rows, width, batch, tokens))
        self.at.fill_(self._end)
        self._end += room
        self.begun += 1
        if self.looks is not None:
            self.looks.start()

    def pad(self, rows: int, width: int) -> None:
        call = self._calls[-1]
        assert call.first + rows * width <= self._end, "it was not to grow so much"
        call.rows, call.width = rows, width

    def try_out(self, rows: int, width: int) -> None:
        if self.looks is not None:
            self.looks.tried()
        call = self._calls[-1]
        behind = call.first + call.rows * call.width
        assert behind + rows * width <= self._end, "it was not to grow so much"
        self.at.fill_(behind)

    def end(self, done: bool) -> None:
        if self._calls:
            self._calls[-1].failed = not done

    def forget(self, tokens: int) -> None:
        self._calls = self._good()
        while tokens > 0 and self._calls:
            call = self._calls[-1]
            taken = min(tokens, call.tokens)
            call.tokens -= taken
            tokens -= taken
            if call.tokens > 0:
                return
            self._calls.pop()

    def take(self) -> RecordedRouting:
        """All that was recorded since the last time. The host waits for the device.

        Raises RuntimeError where a layer saw other tokens than the calls had, as those of pictures
        are: which rows are whose nobody knows then. They stay, and are no record the next time.
        """
        self._wait()  # for all streams: calls may have run on others
        strays = self._strays()
        self._empty()
        self._wait()
        good = self._good()
        rows_T, calls = self._rows(good), tuple((c.batch, c.tokens) for c in good)
        ids_LTK = torch.cat([c.ids for c in self._chunks], 1) if self._chunks else None
        weights = None
        if ids_LTK is None:
            K = self.ids[0].shape[1]
            ids = torch.empty((0, len(self.layers), K), dtype=torch.int16)
            weights = torch.empty(ids.shape) if self.weights is not None else None
        else:
            ids = ids_LTK.transpose(0, 1)[rows_T]
            if self.weights is not None:
                found = [c.weights for c in self._chunks if c.weights is not None]
                weights = torch.cat(found, 1).transpose(0, 1)[rows_T]
        strays += [self.layers[i] for i in _torn(ids, calls)]
        if strays:
            raise RuntimeError(
                f"{called(strays[0])} saw other tokens than the calls that were recorded have, so "
                "that nobody knows which are whose; record the part of the model that has one "
                "sequence of tokens"
            )
        made = RecordedRouting(
            ids_TLK=ids,
            weights_TLK=weights,
            calls=calls,
            layers=self.layers,
            num_experts=self.num_experts,
        )
        self._calls, self._chunks, self._base = [], [], self._end  # not before there is a record
        return made

    def _good(self) -> list[Written]:
        """The calls that did not fail."""
        return [call for call in self._calls if not call.failed]

    def _wait(self) -> None:
        if self.at.is_cuda:
            torch.cuda.synchronize(self.at.device)

    def _strays(self) -> list[str]:
        """The layers that wrote behind the last call."""
        if self._end - self._copied == self.tokens:
            return []
        place = self._end % self.tokens
        behind_L = torch.stack([ring[place, 0] for ring in self.ids]).cpu()
        return [name for name, i in zip(self.layers, behind_L.tolist(), strict=True) if i != NONE]

    def _rows(self, calls: list[Written]) -> Tensor:
        """The places of the calls' tokens among the rows of all chunks."""
        found = [
            (torch.arange(c.batch)[:, None] * c.width + torch.arange(c.tokens)).flatten()
            + (c.first - self._base)
            for c in calls
        ]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    @torch.no_grad()
    def _empty(self) -> None:
        """Have all rows copied that were not, and set to none."""
        for chunk in self._chunks:
            chunk.settle()
        if self._end == self._copied:
            return
        with torch.inference_mode(False):
            chunk = Chunk(self._copy(self.ids), None)
            if self.weights is not None:
                chunk.weights = self._copy(self.weights)
        if self.at.is_cuda:
            chunk.done = torch.cuda.Event()
            chunk.done.record(torch.cuda.current_stream(self.at.device))
        self._chunks.append(chunk)
        self._copied = self._end

    def _copy(self, rings: list[Tensor]) -> Tensor:
        """[L, n, K] of the rows that were not copied, once the stream is there."""
        S, n, K = self.tokens, self._end - self._copied, rings[0].shape[1]
        out = torch.empty((len(rings), n, K), dtype=rings[0].dtype, pin_memory=self.at.is_cuda)
        start = self._copied % S
        until_end = min(n, S - start)
        for into, ring in zip(out, rings, strict=True):
            for part, rows in (
                (into[:until_end], ring[start : start + until_end]),
                (into[until_end:], ring[: n - until_end]),
            ):
                if len(rows):
                    part.copy_(rows, non_blocking=True)
                    rows.fill_(NONE)
        return out


def _torn(ids_TLK: Tensor, calls: tuple[tuple[int, int], ...]) -> list[int]:
    """The layers that wrote some rows of a call, and not all of them."""
    sizes = torch.tensor([batch * tokens for batch, tokens in calls], dtype=torch.int64)
    known_TL = (ids_TLK[:, :, 0] != NONE).long()
    of_call = torch.repeat_interleave(torch.arange(len(calls)), sizes)
    written = known_TL.new_zeros(len(calls), ids_TLK.shape[1]).index_add_(0, of_call, known_TL)
    torn = (written > 0) & (written < sizes[:, None])
    return torn.any(0).nonzero().flatten().tolist()
