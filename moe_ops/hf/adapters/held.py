"""Adapters of an experts module: as it holds them, and as the op takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.interop.switches import BY_SEQUENCE, Switched, Switches
from moe_ops.registry.gradients import needs_grad

MOST_RANK = 128
CHILD = "expert_adapters"  # the name of the submodule that holds adapters which we added
PAIRS = (("a13_GrD", "b13_GFr"), ("a2_GrI", "b2_GDr"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """One adapter: its factor, and for each weight, of which one may have none, A [E, r, inputs]
    and B [E, outputs, r]."""

    scale: float
    first: tuple[Tensor, Tensor] | None
    second: tuple[Tensor, Tensor] | None

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor] | None, ...]:
        return self.first, self.second


class Bank:
    """The adapters of one module side by side, as captured calls read them: where they are is
    where the next ones will be, if they are as large.

    Somebody who `follows` calls `follow` before each call of the module that compiled code makes.
    """

    def __init__(self, *, follows: bool = False) -> None:
        self.follows = follows
        self.stack: dict[str, Tensor] = {}
        self.refusal: str | None = None
        self.place: Switches = ()  # where the stack is
        self._seen: Switches | None = None
        self._scales: tuple[float, ...] = ()
        self._alive: list[Tensor] = []

    def __reduce__(self) -> Any:
        return Bank, ()  # a copy of the module is one that nobody follows

    def follow(
        self, holder: HoldsAdapters, tokens: torch.dtype, *, is_before: bool = False
    ) -> None:
        """Make the bank what the module holds now, for tokens of this dtype, unless what it holds
        is being trained. `is_before` a call, and not in it: parts of one may be captured."""
        seen = (tokens, torch.is_grad_enabled(), *holder.pulse())
        # Fused optimizers write to parameters without a new version.
        is_unsaid = is_before and any(t.requires_grad for t in self._alive)
        if seen == self._seen and not is_unsaid:
            return
        self._seen = seen
        # What is seen are addresses: while these hold on to them nothing else gets one.
        sources = [t for name in holder.names() for t in holder.sources(name)]
        self._alive = [*sources, *(t.detach() for t in sources)]
        dtype = holder.dtype_for(tokens)
        self.refusal = holder.refusal()
        check_sequences(holder, self.refusal)
        names = () if self.refusal else holder.wanted()
        if needs_grad(*(t for name in names for t in holder.sources(name))):
            return
        with torch.inference_mode(False), torch.no_grad():
            found = [holder.factors(name) for name in names]
            made = {
                name: self._copied(name, t, dtype)
                for name, t in side_by_side(found, holder.most_ranks()).items()
            }
            scales = tuple(f.scale for f in found)
            if made:
                like, held = next(iter(made.values())), self.stack.get("scale_N")
                kept = held is not None and _kind(held) == (
                    (len(found),),
                    _wide(dtype),
                    like.device,
                )
                if held is None or not kept or scales != self._scales:
                    held = self._copied("scale_N", scale_of(found, like), _wide(dtype))
                made["scale_N"] = held
        self.stack, self._scales = made, scales
        self.place = tuple((name, t.data_ptr(), _kind(t)) for name, t in made.items())

    def _copied(self, name: str, t: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor in this dtype where the stack has that of its name, if it is as large."""
        held = self.stack.get(name)
        if held is None or _kind(held) != (t.shape, dtype, t.device):
            held = torch.empty(t.shape, dtype=dtype, device=t.device)
        return held.copy_(t)


class HoldsAdapters(Switched):
    """A module that holds adapters of experts. `bank` is its own, `board` that of its model."""

    bank: Bank

    def names(self) -> tuple[str, ...]:
        """All adapters, in the order of their numbers on the board."""
        raise NotImplementedError

    def active(self) -> tuple[str, ...]:
        """The adapter that every sequence has while the board is off; none, or one."""
        raise NotImplementedError

    def factors(self, name: str) -> Factors:
        """An adapter as views of its parameters."""
        raise NotImplementedError

    def sources(self, name: str) -> list[Tensor]:
        """The parameters of an adapter."""
        raise NotImplementedError

    def scales(self, names: Sequence[str]) -> tuple[object, ...]:
        """The factors of adapters."""
        raise NotImplementedError

    def pulse(self) -> Switches:
        """All that what calls read is made of: another one where something is set or written to.
        Each call of compiled code asks, of every layer."""
        raise NotImplementedError

    def most_ranks(self) -> tuple[int, int]:
        """The largest ranks of all adapters, of both weights; 0 where none has one."""
        found = [self.factors(name).pairs for name in self.names()]
        first, second = (
            max((pair[0].shape[1] for pair in pairs if pair is not None), default=0)
            for pairs in (zip(*found, strict=True) if found else ((), ()))
        )
        return first, second

    def dtype_for(self, tokens: torch.dtype) -> torch.dtype:
        """The dtype in which the experts multiply tokens of this one."""
        raise NotImplementedError

    def wanted(self) -> tuple[str, ...]:
        """The adapters that calls read: all while the board is on."""
        if not self.board.is_on:
            return self.active()
        known, names = self.board.names, self.names()
        if names[: len(known)] != known:
            raise ValueError(
                f"sequences have the adapters {', '.join(known)}, of which some were removed; "
                "remove adapters outside of `adapters`"
            )
        return names

    @property
    def switched(self) -> Switches:
        first = BY_SEQUENCE if self.board.is_on else None
        if self.bank.follows:
            return first, self.bank.place
        names = self.wanted()
        return (first, *names, *self.scales(names))


def check_sequences(holder: HoldsAdapters, refusal: str | None) -> None:
    """Raise ValueError if sequences have adapters of their own, which no op adds."""
    if refusal is not None and holder.board.is_on:
        raise ValueError(f"sequences cannot have adapters of their own: {refusal}")


def reads_bank(holder: HoldsAdapters, *tensors: Tensor | None) -> bool:
    """Whether a call with these tensors reads the bank: where somebody follows, unless a gradient
    may be wanted."""
    if not holder.bank.follows:
        return False
    # Without gradients compiled code is not to depend on which adapters there are.
    return not torch.is_grad_enabled() or not needs_grad(*tensors, *_parameters(holder))


def adapters_of(holder: HoldsAdapters, x_TD: Tensor, *others: Tensor | None) -> dict[str, Any]:
    """The arguments of the op that are adapters, for these tokens; empty if there is none."""
    found: dict[str, Any]
    dtype = holder.dtype_for(x_TD.dtype)
    if reads_bank(holder, x_TD, *others):
        if not torch.compiler.is_compiling():
            holder.bank.follow(holder, x_TD.dtype)
        found = {
            name: t.to(_wide(dtype) if name == "scale_N" else dtype)
            for name, t in holder.bank.stack.items()
        }
    else:
        found = stacked([holder.factors(name) for name in holder.wanted()], dtype)
    index = holder.board.index
    if found and index is not None:
        T, B = x_TD.shape[0], index.shape[0]
        if T % B:
            raise ValueError(
                f"adapters were given for {B} sequences, and {T} tokens are not as many of each; "
                "give one for each sequence of the call"
            )
        found["adapter_T"] = index[:, None].expand(B, T // B).reshape(T)
    return found


def stacked(found: Sequence[Factors], dtype: torch.dtype) -> dict[str, Tensor]:
    """Adapters as the op takes them beside tokens of a dtype."""
    # As peft holds them, the B of an expert are not side by side.
    made = {name: t.to(dtype).contiguous() for name, t in side_by_side(found).items()}
    if made:
        made["scale_N"] = scale_of(found, next(iter(made.values())))
    return made


def side_by_side(found: Sequence[Factors], least: tuple[int, int] = (0, 0)) -> dict[str, Tensor]:
    """A and B of adapters one behind the other, in the dtype that they are held in; those of a
    smaller rank than the others of a weight, or than the least, filled up with zeros."""
    made: dict[str, Tensor] = {}
    of_weights = zip(*(f.pairs for f in found), strict=True)
    for names, pairs, rank in zip(PAIRS, of_weights, least, strict=False):
        there = [pair for pair in pairs if pair is not None]
        if not there:
            continue
        rank = max(rank, *(a.shape[1] for a, _ in there))
        padded = [_padded(pair or _zeros(there[0]), rank) for pair in pairs]
        for name, parts in zip(names, zip(*padded, strict=True), strict=True):
            made[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return made


def scale_of(found: Sequence[Factors], like: Tensor) -> Tensor:
    """The factors of adapters, beside a tensor of one dtype."""
    return torch.cat([like.new_full((1,), f.scale, dtype=_wide(like.dtype)) for f in found])


def _zeros(like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """An adapter of a weight that adds nothing, as large as another one."""
    return like[0].new_zeros(like[0].shape), like[1].new_zeros(like[1].shape)


def _padded(pair: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    a_ErD, b_EFr = pair
    more = rank - a_ErD.shape[1]
    if not more:
        return pair
    pad = nn.functional.pad
    return pad(a_ErD, (0, 0, 0, more)), pad(b_EFr, (0, more))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the op takes factors beside tokens of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _parameters(holder: HoldsAdapters) -> list[Tensor]:
    return [t for name in holder.wanted() for t in holder.sources(name)]


def identity(t: Tensor) -> object:
    """Another one when a tensor was replaced or written to, which one of inference mode does not
    say, or is trained from now on."""
    return object() if t.is_inference() else (id(t), t.data_ptr(), t._version, t.requires_grad)


def _kind(t: Tensor) -> object:
    return t.shape, t.dtype, t.device
