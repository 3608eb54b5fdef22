"""Every family of transformers from single experts, in codes and in floats.

The names are those of the model's own modules, whatever checkpoints of the family look like.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import moe_ops
from moe_ops.hf.experts import describe
from moe_ops.hf.stored import stored_format
from moe_ops.testing import Tol, assert_close
from tests.chosen import those_of
from tests.hf.families import TinyModel, build, discover, run
from tests.hf.overrides import UNBUILDABLE
from tests.hf.published import LAYOUTS
from tests.hf.test_published_names import write_each
from tests.hf.test_quantize import experts_of

TOL = Tol(1e-4, "float32 sums in another order through a whole model")
CHOSEN = ("granitemoe", "muse_spark", "nemotron_h")  # others are written by hand elsewhere
# transformers makes biases of its router anew, whatever a checkpoint has.
FAMILIES = [f for f in discover() if f not in UNBUILDABLE and f != "zaya"]


def check_alike(tiny: TinyModel, loaded: PreTrainedModel) -> None:
    assert_close(run(replace(tiny, model=loaded.eval()), tiny.inputs), run(tiny, tiny.inputs), TOL)


@pytest.mark.parametrize("family", those_of(CHOSEN, FAMILIES))
def test_codes_of_single_experts(family: str, tmp_path: Path) -> None:
    tiny = build(family)
    write_each(tmp_path, tiny.model, LAYOUTS["int_channel"])
    reasons = {found for m in experts_of(tiny.model) if isinstance(found := describe(m), str)}
    if reasons:
        with pytest.raises(
            ValueError, match=r"cannot have int8:row: .*; dequantise the checkpoint"
        ):
            moe_ops.from_checkpoint(tmp_path, progress=False)
        return
    loaded = moe_ops.from_checkpoint(tmp_path, progress=False, dtype=torch.float32)
    assert all(stored_format(m) is not None for m in experts_of(loaded))
    check_alike(tiny, loaded)


@pytest.mark.parametrize("family", those_of(CHOSEN, FAMILIES))
def test_floats_of_single_experts(family: str, tmp_path: Path) -> None:
    tiny = build(family)
    write_each(tmp_path, tiny.model, None)
    check_alike(tiny, moe_ops.from_checkpoint(tmp_path, progress=False, dtype=torch.float32))
