"""A recorded routing: which experts, and with which weights, by token and layer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.options import check_type, check_writable

FORMAT, VERSION = "moe_ops.routing", "1"
NONE = -1  # an id of a token whose experts nobody recorded
BYTE_NONE = 255  # the same in a file of bytes
MOST_EXPERTS = 2**15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRouting:
    """The experts that each token was sent to in each layer, of one call of a model or several.

    ids_TLK: int16 [T, L, K] on the CPU, the tokens of a call sequence by sequence and one call
    after the other; all -1 in the row of a token and a layer that nobody recorded. calls: the
    sequences and the tokens of each, of every call. layers: the names of the modules of experts, in
    the order of the axis L. num_experts: of each layer. weights_TLK: float32 [T, L, K], the routing
    weights, or None.

    Raises TypeError or ValueError for parts that do not fit together.
    """

    ids_TLK: Tensor
    calls: tuple[tuple[int, int], ...]
    layers: tuple[str, ...]
    num_experts: int
    weights_TLK: Tensor | None = None

    def __post_init__(self) -> None:
        ids, weights = self.ids_TLK, self.weights_TLK
        check_type("ids_TLK", ids, Tensor, "an int16 tensor [tokens, layers, top_k]")
        if ids.dim() != 3 or ids.dtype is not torch.int16 or ids.device.type != "cpu":
            raise ValueError(
                "ids_TLK must be int16 [tokens, layers, top_k] on the CPU, got "
                f"{ids.dtype} {list(ids.shape)} on {ids.device}"
            )
        T, L, _ = ids.shape
        if len(self.layers) != L:
            raise ValueError(f"ids_TLK has {L} layers, but {len(self.layers)} are named")
        told = sum(batch * tokens for batch, tokens in self.calls)
        if told != T:
            raise ValueError(f"ids_TLK has {T} tokens, but the calls have {told}")
        if not 1 <= self.num_experts <= MOST_EXPERTS:
            raise ValueError(
                f"num_experts={self.num_experts} must be from 1 to {MOST_EXPERTS}, which two bytes "
                "tell apart"
            )
        _check_ids(ids, self.num_experts)
        if weights is not None and (
            weights.shape != ids.shape
            or weights.dtype is not torch.float32
            or weights.device.type != "cpu"
        ):
            raise ValueError(
                f"weights_TLK must be float32 {list(ids.shape)} on the CPU, as ids_TLK, got "
                f"{weights.dtype} {list(weights.shape)} on {weights.device}"
            )

    @property
    def tokens(self) -> int:
        return self.ids_TLK.shape[0]

    @property
    def top_k(self) -> int:
        return self.ids_TLK.shape[2]

    def __repr__(self) -> str:
        T, L, K = self.ids_TLK.shape
        more = "" if self.weights_TLK is None else ", with weights"
        return (
            f"RecordedRouting({T} tokens of {len(self.calls)} calls, {L} layers, {K} of "
            f"{self.num_experts} experts{more})"
        )

    def of_calls(self, first: int, last: int | None = None) -> RecordedRouting:
        """These calls alone, counted from 0, without the one at `last`. Raises ValueError if there
        are none."""
        calls = self.calls[first:last]
        if not calls:
            raise ValueError(f"there are {len(self.calls)} calls, and none from {first} to {last}")
        number = range(len(self.calls))[first:last][0]
        start = sum(batch * tokens for batch, tokens in self.calls[:number])
        stop = start + sum(batch * tokens for batch, tokens in calls)
        return self._with(slice(start, stop), calls)

    def joined(self) -> RecordedRouting:
        """All calls as one of the same sequences, with the tokens of each call behind those of the
        one before: what `generate` recorded as one call of its text, which has all tokens but the
        last ones, that no call read. Raises ValueError where calls differ in sequences."""
        batches = {batch for batch, _ in self.calls}
        if len(batches) != 1:
            raise ValueError(
                f"calls of {sorted(batches)} sequences are no longer texts of the same ones; take "
                "those of one generate by of_calls"
            )
        (batch,), order, start = batches, [], 0
        for _, tokens in self.calls:
            order.append(torch.arange(start, start + batch * tokens).view(batch, tokens))
            start += batch * tokens
        rows_BS = torch.cat(order, 1)
        return self._with(rows_BS.flatten(), (tuple(rows_BS.shape),))

    def sequences(self, numbers: Sequence[int]) -> RecordedRouting:
        """These sequences of a record of one call, in this order. Raises ValueError for a record of
        several calls, and for a sequence that there is not."""
        batch, tokens = self._only_call()
        wrong = [n for n in numbers if not 0 <= n < batch]
        if wrong or not len(numbers):
            raise ValueError(f"sequences must be some from 0 to {batch - 1}, got {list(numbers)}")
        rows_BS = torch.tensor(list(numbers))[:, None] * tokens + torch.arange(tokens)
        return self._with(rows_BS.flatten(), ((len(numbers), tokens),))

    def padded(self, tokens: int) -> RecordedRouting:
        """A record of one call with sequences of so many tokens: of those behind the recorded ones
        nobody recorded experts, and a router chooses. Raises ValueError for a record of several
        calls, and for fewer tokens than there are."""
        batch, had = self._only_call()
        if tokens < had:
            raise ValueError(f"sequences have {had} tokens, and cannot have {tokens}; give more")

        def grown(t: Tensor, value: float) -> Tensor:
            new = t.new_full((batch, tokens, *t.shape[1:]), value)
            new[:, :had] = t.view(batch, had, *t.shape[1:])
            return new.flatten(0, 1)

        weights = self.weights_TLK
        return replace(
            self,
            ids_TLK=grown(self.ids_TLK, NONE),
            weights_TLK=None if weights is None else grown(weights, 0.0),
            calls=((batch, tokens),),
        )

    def by_sequence(self) -> Tensor:
        """The ids of a record of one call: int16 [B, S, L, K]. Raises ValueError for several."""
        return self.ids_TLK.view(*self._only_call(), *self.ids_TLK.shape[1:])

    def _only_call(self) -> tuple[int, int]:
        if len(self.calls) != 1:
            raise ValueError(
                f"this is a record of {len(self.calls)} calls; take one by of_calls, or make them "
                "one by joined"
            )
        return self.calls[0]

    def _with(self, rows: Tensor | slice, calls: tuple[Any, ...]) -> RecordedRouting:
        weights = self.weights_TLK
        return replace(
            self,
            ids_TLK=self.ids_TLK[rows],
            weights_TLK=None if weights is None else weights[rows],
            calls=calls,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: ids in a byte each where there are fewer than 256 experts, else
        in two; weights in bfloat16 where that holds them, else in float32.

        Raises OSError for a path that cannot be written.
        """
        from safetensors.torch import save_file

        check_writable("path", path)
        tensors = {"ids": _compact(self.ids_TLK, self.num_experts)}
        if self.weights_TLK is not None:
            half = self.weights_TLK.to(torch.bfloat16)
            exact = torch.equal(half.float(), self.weights_TLK)
            tensors["weights"] = half if exact else self.weights_TLK.contiguous()
        said = {
            "format": FORMAT, "version": VERSION, "num_experts": str(self.num_experts),
            "layers": json.dumps(self.layers), "calls": json.dumps(self.calls),
        }  # fmt: skip
        save_file(tensors, path, metadata=said)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> RecordedRouting:
        """What `save` wrote. Raises OSError for a path that cannot be read, ValueError for another
        kind of file, or of another version."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                said = file.metadata() or {}
                check_format(said, str(path))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
        ids = tensors["ids"]
        if ids.dtype is torch.uint8:
            ids = torch.where(ids == BYTE_NONE, NONE, ids.to(torch.int16)).to(torch.int16)
        weights = tensors.get("weights")
        return RecordedRouting(
            ids_TLK=ids,
            weights_TLK=None if weights is None else weights.float(),
            calls=tuple((batch, tokens) for batch, tokens in json.loads(said["calls"])),
            layers=tuple(json.loads(said["layers"])),
            num_experts=int(said["num_experts"]),
        )


def called(layer: str) -> str:
    """What a message calls a layer, which has no name where it is the model."""
    return layer or "the layer"


def check_format(said: dict[str, Any], where: str) -> None:
    """Raise ValueError unless a file says that it is a record of routings of this version."""
    if said.get("format") != FORMAT:
        raise ValueError(
            f"{where} holds no recorded routing: its format is {said.get('format')!r}, not "
            f"{FORMAT!r}; give what RecordedRouting.save wrote"
        )
    if said.get("version") != VERSION:
        raise ValueError(
            f"{where} is of version {said.get('version')!r} of {FORMAT}, and this release reads "
            f"{VERSION!r}; record again, or read it with the release that wrote it"
        )


def _check_ids(ids_TLK: Tensor, num_experts: int) -> None:
    if ids_TLK.numel() == 0:
        return
    low, high = int(ids_TLK.min()), int(ids_TLK.max())
    if low < NONE or high >= num_experts:
        raise ValueError(
            f"ids_TLK has ids from {low} to {high}, but there are {num_experts} experts; ids are "
            f"from 0 to {num_experts - 1}, or all {NONE} where nobody recorded any"
        )
    if low == NONE and bool(((ids_TLK < 0).any(-1) != (ids_TLK < 0).all(-1)).any()):
        raise ValueError(f"ids_TLK has {NONE} beside ids of the same token and layer; give all")


def _compact(ids_TLK: Tensor, num_experts: int) -> Tensor:
    if num_experts > BYTE_NONE:
        return ids_TLK.contiguous()
    return torch.where(ids_TLK < 0, BYTE_NONE, ids_TLK).to(torch.uint8)
