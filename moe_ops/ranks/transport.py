"""What transports are told, and their names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

GATHER, EXCHANGE, PUSH, AUTO = "gather", "exchange", "push", "auto"
TRANSPORTS = (GATHER, EXCHANGE, PUSH)


@dataclass(frozen=True, slots=True)
class Sent:
    """What belongs to a token: its row, scales of the row, and the weights and ids of its experts.

    Rows and scales may be of any dtype: they travel as bytes.
    """

    x_TD: Tensor
    scale_TS: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


@dataclass(frozen=True, slots=True)
class Tables:
    """Who serves which physical expert, see `tables.py`."""

    rank_of_P: Tensor
    slot_of_P: Tensor

    @property
    def physical(self) -> int:
        return self.rank_of_P.shape[0]
