"""Twelve families at the widths that users have, six layers deep, with one sequence and three.

`make gpu-families` runs the others.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.hf import families, real, real_checks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("check", sorted(real_checks.CHECKS))
@pytest.mark.parametrize("family", sorted(real.WIDTHS))
def test_a_family_at_real_widths(family: str, check: str) -> None:
    if family not in families.discover():
        pytest.skip(f"this transformers has no {family}")
    found = real_checks.CHECKS[check](family, "cuda", real_checks.SIZES)
    assert found is not None or check != "forward", "its graph was broken"
    assert found is None or found.ours == found.layers
