"""What a step advances is what the warm-up of its capture leaves as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.forward.kept import SLOTS
from moe_ops.generation.steps import Steps
from tests.chosen import those_of
from tests.graphs.recorder import Recorder
from tests.hf.auto_classes import build_published
from tests.hf.twins import PLAIN, twin_of, uncompiled

# A window, an indexer, states of a delta rule, of Mamba2, of a convolution, states beside keys.
NAMES = (
    "GptOssForCausalLM", "DeepseekV32ForCausalLM", "Qwen3NextForCausalLM", "NemotronHForCausalLM",
    "Lfm2MoeForCausalLM", "ZayaForCausalLM",
)  # fmt: skip


def held(steps: Steps) -> dict[str, Tensor]:
    """All tensors of a size's steps but what goes in and out, by name."""
    found = {n: x for n, x in vars(steps).items() if isinstance(x, Tensor)}
    for number, layer in enumerate(steps.cache.layers):
        found |= {f"{name} of layer {number}": x for name, x in layer.kept.items()}
    return {name: x for name, x in found.items() if name not in ("ids", "logits")}


def slots_of(name: str, x: Tensor) -> int | None:
    """The dim of a buffer in which it has slots."""
    return SLOTS.get(name.partition(" ")[0])


@pytest.mark.parametrize("name", those_of(NAMES[2:4], NAMES))
def test_all_that_a_step_changes_is_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the one slot of its token, which the step that is repeated writes over."""
    run, changed = Steps.run, set[str]()

    def watched(self: Steps, code: Any) -> None:
        before = {key: x.clone() for key, x in held(self).items()}
        slot, ours = int(self.filled), {id(x) for x in self.state}
        run(self, code)
        for key, x in held(self).items():
            if torch.equal(x, before[key]):
                continue
            dim = slots_of(key, x)
            if dim is None:
                assert id(x) in ours, f"{key} is not among what a warm-up restores"
                changed.add(key.partition(" ")[0])
            else:
                rest = torch.arange(x.shape[dim]) != slot
                same = x.transpose(0, dim)[rest], before[key].transpose(0, dim)[rest]
                assert torch.equal(*same), key

    monkeypatch.setattr(Steps, "run", watched)
    twin = twin_of(build_published(name).model, uncompiled())
    twin.generate(torch.randint(16, 90, (3, 9)), **PLAIN)
    assert {"valid", "positions", "filled"} <= changed
    assert (name in NAMES[2:]) == bool(changed - {"valid", "positions", "filled"})


@pytest.mark.parametrize("left_out", ["filled and valid", "positions", "states"])
def test_tokens_tell_what_a_warm_up_left_advanced(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a capture that runs the step once to warm up."""
    model = build_published("Qwen3NextForCausalLM").model
    ids = torch.randint(16, 90, (3, 9))
    call = {**PLAIN, "return_dict_in_generate": True, "output_logits": True}
    want = torch.stack(model.generate(ids, **call).logits)
    own = Steps.state.fget
    assert own is not None

    def left(self: Steps) -> tuple[Tensor, ...]:
        names = left_out.split(" and ")
        kept = self.cache.states if left_out == "states" else [getattr(self, n) for n in names]
        out = {id(x) for x in kept}
        return tuple(x for x in own(self) if id(x) not in out)

    for is_left_out in (False, True):
        if is_left_out:
            monkeypatch.setattr(Steps, "state", property(left))
        twin = twin_of(model, uncompiled(Recorder()))
        got = torch.stack(twin.generate(ids, **call).logits)
        assert torch.allclose(got, want, 1e-3, 1e-3) != is_left_out
