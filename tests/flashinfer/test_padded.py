"""A layer that is made for a backend, of widths that it does not take, runs on it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import moe_ops
from moe_ops import MoELayer, experts, using
from moe_ops.layer.tensors import own_part
from tests.flashinfer.layers import check
from tests.flashinfer.test_contract import WAYS

On = Callable[[int, int], None]
SIZES = {"num_experts": 4, "top_k": 2, "hidden_size": 72, "intermediate_size": 20}
FLOATS = {key: way for key, way in WAYS.items() if way[2] == "bfloat16"}


@pytest.mark.parametrize(("name", "layout", "formats", "gpu"), FLOATS.values(), ids=FLOATS)
def test_it_runs(
    fake: ModuleType, on: On, name: str, layout: str, formats: str, gpu: tuple[int, int]
) -> None:
    on(*gpu)
    plain = MoELayer(**SIZES, dtype=torch.bfloat16)
    layer = MoELayer(**SIZES, dtype=torch.bfloat16, padding=name)
    x, logits = torch.randn(6, 72).bfloat16(), torch.randn(6, 4)
    with torch.no_grad():
        for weight in ("w13_weight", "w2_weight"):
            of, to = (
                own_part(weight, getattr(m, weight), m.sizes, m.activation) for m in (plain, layer)
            )
            to.copy_(of)
        moe_ops.prepare(layer, layout)
        with using(name, experts):
            got = layer(x, logits)
        check(name, formats, got, plain(x, logits))
