"""Seeded matrices with what makes trained ones hard to quantise: tails, correlation, outliers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEGREES = 5  # of freedom of Student's t: kurtosis 9, where a normal distribution has 3
RANK = 8  # of the part that correlates the columns
OUTLIERS = 0.01  # of the columns
WEIGHT_OUTLIERS, TOKEN_OUTLIERS = 4.0, 8.0  # how many times larger those columns are


def student_t(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Student's t with DEGREES degrees of freedom and variance 1, float32.

    t = √(ν (u^(-2/ν) - 1)) cos(2πv) with u, v uniform (Bailey, Math. Comp. 62, 1994), over its
    standard deviation √(ν / (ν - 2)).
    """
    u = 1 - torch.rand(shape, generator=generator)  # in (0, 1]
    v = torch.rand(shape, generator=generator)
    # ν cancels against the ν of the standard deviation.
    return ((u ** (-2 / DEGREES) - 1) * (DEGREES - 2)).sqrt() * torch.cos(2 * math.pi * v)


def outlier_columns(columns: int, factor: float, generator: torch.Generator) -> Tensor:
    """A scale for each column: `factor` for the share OUTLIERS (one at least), 1 for the rest."""
    scale = torch.ones(columns)
    few = max(1, round(OUTLIERS * columns))
    scale[torch.randperm(columns, generator=generator)[:few]] = factor
    return scale


def matrices(
    shape: tuple[int, ...],
    generator: torch.Generator,
    *,
    factor: float = WEIGHT_OUTLIERS,
    std: float | None = None,
) -> Tensor:
    """Random [..., rows, columns] in float32: c (Z + U Vᵀ) diag(s).

    Z: Student's t with 5 degrees of freedom and variance 1. U Vᵀ: normal U [..., rows, 8] times
    normal V [columns, 8] over √8, as large as Z, so that two columns correlate by ±0.18 (root mean
    square). s: `factor` for one column in a hundred, else 1. V and s are the same for all leading
    indices, as the experts of a layer see the same input channels. c makes the standard deviation
    `std`, 1/√columns if left out.
    """
    columns = shape[-1]
    s = outlier_columns(columns, factor, generator)
    v = torch.randn(RANK, columns, generator=generator) * RANK**-0.5
    u = torch.randn(*shape[:-1], RANK, generator=generator)
    w = (student_t(shape, generator) + u @ v) * s
    return w * ((columns**-0.5 if std is None else std) / w.std())
