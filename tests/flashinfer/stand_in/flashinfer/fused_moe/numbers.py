"""What bits and bytes stand for, and a layer of experts in float32."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

calls: list[tuple[str, dict[str, Any]]] = []

ALIGNMENT = 16  # bytes that kernels read at once


def require_dense(*tensors: Tensor | None) -> None:
    """Kernels read on from where a tensor begins, with no look at strides, in whole words."""
    for t in tensors:
        if t is not None:
            assert t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0


class Held:
    """A buffer that the installed package makes in a first run, or in one of more tokens than ever,
    and writes to in each: which fails outside of inference mode if it was made inside."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def write(self, x: Tensor) -> Tensor:
        """x, for its user to go on with: threads may write at the same time."""
        rows, of = x.shape[0], (x.dtype, *x.shape[1:])
        held = self.buffer
        if held is None or held.shape[0] < rows or (held.dtype, *held.shape[1:]) != of:
            held = self.buffer = torch.empty_like(x)
        held[:rows].copy_(x)
        return x


def looks() -> bool:
    """Whether values may be looked at: not while a graph is captured."""
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@functools.cache
def fp4(device: torch.device) -> Tensor:
    """What codes of four bits stand for, where they are; made ahead of a capture."""
    return FP4.to(device)


def nvfp4_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes and linear float8 scales of rows, in groups of 16."""
    groups = x.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    steps = groups / scale.float().clamp(min=2**-10)[..., None]
    magnitude = (steps.abs()[..., None] - fp4(x.device)[:8]).abs().argmin(-1)
    code = (magnitude + 8 * (steps < 0)).flatten(-2).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, scale


def fp4_values(packed: Tensor) -> Tensor:
    """[..., bytes] to [..., values], the low half of a byte first."""
    values = fp4(packed.device)
    return torch.stack((values[(packed & 15).long()], values[(packed >> 4).long()]), -1).flatten(-2)


def e8m0(scale: Tensor) -> Tensor:
    return torch.exp2(scale.float() - 127)


def linear_scales(swizzled: Tensor, rows: int, groups: int) -> Tensor:
    """One expert's scales from the tiles of 128 rows and 4 columns, element by element:
    (row, group) lies at tile (row // 128, group // 4), then row % 32, row % 128 // 32, group % 4.
    """
    flat = swizzled.reshape(-1).view(torch.uint8)
    row, group = _grid(rows, groups, flat.device)
    tile = (row // 128) * (groups // 4) + group // 4
    found = flat[tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + group % 4]
    return found.view(swizzled.dtype)


def _grid(rows: int, groups: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(rows, device=device)[:, None], torch.arange(groups, device=device)[None]


def scales_of_mma(view: Tensor, rows: int, groups: int) -> Tensor:
    """[E, rows, groups] from the view (32, 4, row tiles, 4, group tiles, E)."""
    assert view.shape[:2] == (32, 4) and view.shape[3] == 4
    row, group = _grid(rows, groups, view.device)
    codes = view.view(torch.uint8)[row % 32, row % 128 // 32, row // 128, group % 4, group // 4]
    return codes.permute(2, 0, 1).contiguous().view(view.dtype)


def folded_scales(folded: Tensor, rows: int, groups: int) -> Tensor:
    """[rows, groups] of one expert's folded scales [rows / 64, groups / 4, 16, 16 bytes]."""
    row, group = torch.arange(rows)[:, None], torch.arange(groups)[None]
    return folded[row // 64, group // 4, row % 16, row % 64 // 16 * 4 + group % 4]


# Of a word of the mixed product: what each run of bits is, as (shift, mask of the plain word).
RUNS = (
    (0x80, 24), (0x70, 18), (0x8, 12), (0x7, 6), (0x8000, 13), (0x7000, 7), (0x800, 1),
    (0x700, -5), (0x800000, 2), (0x700000, -4), (0x80000, -10), (0x70000, -16),
    (0x80000000, -1), (0x10000000, 1), (0x60000000, -3), (0x8000000, -13), (0x1000000, -11),
    (0x6000000, -15),
)  # fmt: skip


def unmixed(mixed: Tensor) -> Tensor:
    """Packed codes [rows, bytes] of one expert, from what the mixed product reads: lane by lane."""
    plain, rows, width = torch.empty_like(mixed), mixed.shape[0], mixed.shape[1]
    blocks = torch.arange(rows // 2)[:, None, None]
    parts = torch.arange(width // 32)[None, :, None]
    lane = torch.arange(16)[None, None]
    row, mma = blocks // 8 * 16 + blocks % 8, lane // 4
    to = parts * 32 + lane // 8 * 16 + lane % 4 * 4
    word = sum(mixed[row + mma % 2 * 8, to + i].long() << 8 * i for i in range(4))
    back = torch.zeros_like(word)
    for mask, shift in RUNS:
        there = mask << shift if shift > 0 else mask >> -shift
        back |= (word & there) >> shift if shift > 0 else (word & there) << -shift
    column = parts * 32 + mma * 8 + lane % 4
    for i, (down, right) in enumerate(((0, 0), (8, 0), (0, 4), (8, 4))):
        plain[row + down, column + right] = (back >> 8 * i & 255).to(torch.uint8)
    return plain


def unchanged(x: Tensor, e: int) -> Tensor:
    return x


@dataclass(frozen=True)
class Layer:
    """Decoded weights, w1 with rows [up; gate] where there is a gate."""

    w1: Tensor  # [E, F, D]
    w2: Tensor  # [E, D, I]
    activation: str = "Swiglu"
    b1: Tensor | None = None
    b2: Tensor | None = None
    first: Any = unchanged  # what becomes of the inputs of either product
    second: Any = unchanged

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, offset: int = 0) -> Tensor:
        """The sum over experts, by global ids of which those from `offset` on are here."""
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert ids.is_contiguous() and weights.is_contiguous()  # read one by one
        out = torch.zeros(x.shape[0], self.w2.shape[1], device=x.device)
        for e in range(self.w1.shape[0]):  # of every token, so that no count is waited for
            y = self.first(x.float(), e) @ self.w1[e].T
            y = y if self.b1 is None else y + self.b1[e].float()
            h = self.second(self._act(y), e) @ self.w2[e].T
            h = h if self.b2 is None else h + self.b2[e].float()
            mine = ids == e + offset
            share = torch.where(mine, weights, 0).sum(1, keepdim=True)
            out += torch.where(mine.any(1, keepdim=True), h * share, 0)
        return out

    def _act(self, y: Tensor) -> Tensor:
        if self.activation == "Relu2":
            return F.relu(y).square()
        up, gate = y.chunk(2, -1)
        gate = F.silu(gate) if self.activation == "Swiglu" else F.gelu(gate, approximate="tanh")
        return gate * up


def through_nvfp4(reciprocal: Tensor) -> Any:
    """Inputs as their codes: x is about codes * scales / reciprocal, the scale left to a factor."""

    def rounded(x: Tensor, e: int) -> Tensor:
        codes, scale = nvfp4_codes(x * reciprocal.reshape(-1))
        return fp4_values(codes) * scale.float().repeat_interleave(16, -1)

    return rounded


def unchunked(w: Tensor, size: int) -> Tensor:
    """[up; gate] from `size` rows of up and of the gate in turn, on axis 1."""
    rows = torch.arange(w.shape[1])
    up, gate = rows[rows // size % 2 == 0], rows[rows // size % 2 == 1]
    return w[:, torch.cat((up, gate))]
