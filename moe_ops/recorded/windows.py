"""Where a model reads recorded routings while it runs: windows that are filled ahead of each
call."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ops.interop.told import Looks
from moe_ops.recorded.routing import NONE, RecordedRouting

LEAST_ROWS = 4096  # those of any call that is captured


@dataclass(slots=True, eq=False)
class Windows:
    """For each layer the ids, and weights if these are replayed, of the tokens of the call that
    comes, at the addresses where the layers read them. A row of a sequence that pads a batch is
    that of the first one; what pads a sequence is chosen by its router.
    """

    ids_LSK: Tensor
    weights_LSK: Tensor | None
    recorded: RecordedRouting
    _ids_LTK: Tensor  # all of the record, on the device
    _weights_LTK: Tensor | None
    begun: int = field(default=0, init=False)
    looks: Looks | None = field(default=None, init=False)
    _next: int = field(default=0, init=False)
    _start: int = field(default=0, init=False)  # of the call that runs
    _now: tuple[int, int] = field(default=(0, 0), init=False)
    _failed: bool = field(default=False, init=False)  # it, which then comes again

    @staticmethod
    def of(recorded: RecordedRouting, *, weights: bool, device: torch.device) -> Windows:
        """Windows for calls as large as the record's largest, padded."""
        largest = max((batch * tokens for batch, tokens in recorded.calls), default=0)
        rows, (_, L, K) = max(LEAST_ROWS, 2 * largest), recorded.ids_TLK.shape
        with torch.inference_mode(False):
            ids = torch.full((L, rows, K), NONE, dtype=torch.int16, device=device)
            kept = torch.zeros(ids.shape, device=device) if weights else None
        made = Windows(ids, kept, recorded, ids, None)
        made.load(recorded)
        return made

    def load(self, recorded: RecordedRouting) -> None:
        """Go on with another record, whose calls must fit. It is copied to the device."""
        with torch.inference_mode(False), torch.no_grad():
            self._ids_LTK = _by_layer(recorded.ids_TLK, self.ids_LSK.device)
            if self.weights_LSK is not None:
                assert recorded.weights_TLK is not None
                self._weights_LTK = _by_layer(recorded.weights_TLK, self.ids_LSK.device)
        self.recorded = recorded
        self.rewind()

    def rewind(self) -> None:
        """Begin with the first call again."""
        self._next, self._start, self._now, self._failed = 0, 0, (0, 0), False

    @property
    def next_call(self) -> int:
        """The number of the call of the record that comes."""
        return self._next - self._failed

    def begin(
        self, batch: int, tokens: int, rows: int, width: int, *, may_grow: bool = False
    ) -> None:
        calls, number = self.recorded.calls, self.next_call
        if number >= len(calls):
            raise ValueError(
                f"the record has {len(calls)} calls, and this one is one more; rewind() begins "
                "again, load(...) takes another record"
            )
        if calls[number] != (batch, tokens):
            had = " x ".join(map(str, calls[number]))
            raise ValueError(
                f"call {number} of the record has {had} tokens, and this one {batch} x {tokens}; "
                "replay the same calls, or make the record fit by its joined, of_calls, sequences "
                "and padded"
            )
        if rows * width > self.ids_LSK.shape[1]:
            raise ValueError(
                f"a call of {rows} x {width} tokens does not fit into windows of "
                f"{self.ids_LSK.shape[1]}; replay a record with its largest call first"
            )
        if not self._failed:
            self._start += self._now[0] * self._now[1]
        self._now, self._next, self._failed = (batch, tokens), number + 1, False
        self.begun += 1
        if self.looks is not None:
            self.looks.start()
        self.pad(rows, width)

    @torch.no_grad()
    def pad(self, rows: int, width: int) -> None:
        self._lay(self.ids_LSK, self._ids_LTK, rows, width, NONE)
        if self.weights_LSK is not None:
            assert self._weights_LTK is not None
            self._lay(self.weights_LSK, self._weights_LTK, rows, width, 0.0)

    def try_out(self, rows: int, width: int) -> None:
        if self.looks is not None:
            self.looks.tried()
        self.pad(rows, width)

    def end(self, done: bool) -> None:
        self._failed = self._next > 0 and not done

    def forget(self, tokens: int) -> None:
        raise ValueError(
            "tokens of a call were taken back, which a replay cannot: candidates of assisted "
            "decoding are no text; replay by a forward, or by generate without an assistant"
        )

    def _lay(self, window: Tensor, every: Tensor, rows: int, width: int, fill: float) -> None:
        (batch, tokens), (L, _, K) = self._now, window.shape
        whole = every[:, self._start : self._start + batch * tokens]
        if (rows, width) == (batch, tokens):
            window[:, : rows * width].copy_(whole)
            return
        laid = window[:, : rows * width].view(L, rows, width, K)
        laid[:, :batch, :tokens].copy_(whole.view(L, batch, tokens, K))
        laid[:, :batch, tokens:].fill_(fill)
        laid[:, batch:].copy_(laid[:, :1].expand(-1, rows - batch, -1, -1))


def _by_layer(t_TLK: Tensor, device: torch.device) -> Tensor:
    return t_TLK.transpose(0, 1).contiguous().to(device)
