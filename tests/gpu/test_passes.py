"""The passes on graphs that Inductor makes for a CUDA GPU."""

from __future__ import annotations

import pytest
import torch

from tests.hf import families
from tests.passes.test_families import SOME, assert_complete, check

pytestmark = pytest.mark.gpu
FORMS = [
    ("grouped_mm", torch.float32, False),
    ("grouped_mm", torch.bfloat16, True),
    ("batched_mm", torch.float32, True),
    ("batched_mm", torch.bfloat16, False),
]


@pytest.mark.parametrize(("form", "dtype", "dynamic"), FORMS, ids=str)
@pytest.mark.parametrize("family", SOME)
def test_every_layer_of_a_stock_model_is_lifted(
    family: str, form: str, dtype: torch.dtype, dynamic: bool
) -> None:
    if family not in families.discover():
        pytest.skip(f"this transformers has no {family}")
    found = check(family, form, dtype, dynamic=dynamic, device="cuda")
    assert_complete(family, found)
