"""The generated matrices have the tails, the correlation and the outliers that they promise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_ops.bench.weights import matrices, outlier_columns, student_t


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def share_within(c: float) -> float:
    """P(|t| < c) of Student's t with 5 degrees of freedom (Abramowitz and Stegun, 26.7.3)."""
    a = math.atan(c / 5**0.5)
    return 2 / math.pi * (a + math.sin(a) * (math.cos(a) + 2 / 3 * math.cos(a) ** 3))


@pytest.mark.parametrize("sigmas", [0.5, 1, 2, 4, 8])
def test_student_t_has_the_distribution_of_its_name(sigmas: float) -> None:
    t = student_t((1000, 1000), seeded())
    beyond = float((t.abs() > sigmas).float().mean())
    # Half a million values beyond 0.5, and 150 beyond 8 where a normal distribution has none.
    assert beyond == pytest.approx(1 - share_within(sigmas * (5 / 3) ** 0.5), rel=0.2)
    assert float(t.var()) == pytest.approx(1, rel=0.05)
    assert abs(float(t.mean())) < 0.01


def correlations(w: Tensor) -> Tensor:
    """Of all pairs of different columns."""
    columns = w.shape[1]
    return torch.corrcoef(w.T)[~torch.eye(columns, dtype=torch.bool)]


def test_columns_are_correlated_and_tails_are_heavy() -> None:
    w = matrices((4096, 200), seeded())
    assert float(correlations(w).square().mean().sqrt()) == pytest.approx(0.5 / 8**0.5, rel=0.15)
    assert float(correlations(torch.randn(4096, 200)).square().mean().sqrt()) < 0.02
    z = w / w.square().mean(0).sqrt()  # without the outliers
    assert float(z.pow(4).mean()) > 4
    assert float((w / w.std()).pow(4).mean()) > 6


def test_one_column_in_a_hundred_is_an_outlier_in_every_matrix_of_a_stack() -> None:
    w = matrices((3, 2048, 200), seeded(), factor=16.0)
    norms = w.norm(dim=1)
    few = norms > 5 * norms.median()
    assert few.sum(1).tolist() == [2, 2, 2]
    assert bool((few == few[0]).all())
    assert int((outlier_columns(30, 4.0, seeded()) == 4).sum()) == 1  # one at least


@pytest.mark.parametrize(("std", "want"), [(None, 1 / 16), (3.0, 3.0)])
def test_the_scale_is_what_was_asked_for(std: float | None, want: float) -> None:
    assert float(matrices((2, 64, 256), seeded(), std=std).std()) == pytest.approx(want, rel=1e-5)


def test_a_seed_gives_the_same_matrices_again_and_another_seed_others() -> None:
    first, again, other = (matrices((2, 8, 64), seeded(s)) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.isclose(first, other).any()
