"""What layers get while a graph is captured, though transformers makes other masks then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from moe_ops.forward import calls
from moe_ops.forward.inputs import watched
from moe_ops.graphs.runner import TIMES
from moe_ops.testing import assert_close
from tests.chosen import in_turn
from tests.forward.layered import MODEL, Layered, left_padded, tokens
from tests.graphs.recorder import Recorder
from tests.hf import families


class Recording(Recorder):
    """A stand-in during whose captures transformers, too, takes it that a graph is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.patch = monkeypatch

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        def captured_function() -> None:
            with self.patch.context() as patch:
                patch.setattr(masking_utils, "is_tracing", lambda *_: True)
                with watched() as inputs:
                    function()
            self.inputs = inputs

        return super().__call__(captured_function, *args, **kwargs)


@in_turn(
    pytest.mark.parametrize("use_cache", [False, True]),
    pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"]),
)
def test_layers_get_while_captured_what_they_get_uncaptured(
    family: str, use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Masks of another kind would be other code, which cannot be compiled during a capture.
    graphs = Recording(monkeypatch)
    run = Layered(families.build(family).model, graphs)
    for padded in (0, 3):
        mask = left_padded(2, 8, padded) if padded else None
        with watched() as inputs:
            run(input_ids=tokens(2, 8), attention_mask=mask, use_cache=use_cache)
        for seed in range(TIMES):
            run(input_ids=tokens(2, 8, seed), attention_mask=mask, use_cache=use_cache)
        kinds = [[{n: type(x) for n, x in of.items()} for of in i] for i in (graphs.inputs, inputs)]
        assert kinds[0] == kinds[1]
    assert graphs.replayed == 2


@pytest.mark.parametrize("padded", [0, 3])
def test_a_capture_of_the_caller_has_the_masks_of_other_calls(
    padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.build("qwen3_moe").model
    mask = left_padded(2, 8, padded) if padded else None
    masked, unmasked = (Layered(model).twin.model for _ in range(2))
    given = {"input_ids": tokens(2, 8), "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        want = model.model(**given).last_hidden_state
        monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
        ran: list[str] = []

        def noted(name: str, decoder: Any) -> Any:
            class Bound:
                __self__ = decoder

                def __call__(self, **kwargs: Any) -> Any:
                    ran.append(name)
                    if name == "unmasked":
                        kwargs["attention_mask"] = None
                    return model.model(**kwargs)

            return Bound()

        calls_of = noted("masked", masked), noted("unmasked", unmasked)
        got = calls.recorded(*calls_of, model.config, given).last_hidden_state
    assert ran == ["masked" if padded else "unmasked"]
    rows = slice(padded, None)
    assert_close(got[:, rows], want[:, rows], MODEL)
