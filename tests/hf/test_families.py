"""Discovery and tiny builds: every family is there, and stock transformers runs it."""

import pytest
import torch

from tests.chosen import CHOSEN, those_of
from tests.hf import families
from tests.hf.overrides import UNBUILDABLE

BUILDABLE = tuple(name for name in families.discover() if name not in UNBUILDABLE)


def test_discovery_finds_families() -> None:
    assert {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"} <= set(families.discover())


@pytest.mark.parametrize("family", sorted(UNBUILDABLE))
def test_unbuildable_has_a_reason_and_does_not_build(family: str) -> None:
    assert UNBUILDABLE[family]
    if family in families.discover():
        with pytest.raises(Exception):  # noqa: B017 any failure keeps the entry true
            tiny = families.build(family)
            families.run(tiny, tiny.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILDABLE)
def test_builds_and_reaches_all_experts(family: str) -> None:
    tiny = families.build(family)
    experts = families.experts(tiny.model)
    assert experts
    called: set[str] = set()
    for name, module in experts.items():
        module.register_forward_hook(lambda *_, name=name: called.add(name))

    out = families.run(tiny, tiny.inputs)
    assert torch.isfinite(out).all()
    assert called == set(experts), "the inputs leave some experts out"


@pytest.mark.slow
@pytest.mark.parametrize("family", those_of(CHOSEN, BUILDABLE))
def test_runs_in_each_form_and_generates(family: str) -> None:
    tiny = families.build(family)
    out = families.run(tiny, tiny.inputs)
    other = families.run(tiny, families.inputs_for(tiny, 2, 7, seed=1))
    assert (out - other).abs().max() > 0.01

    eager = families.build(family, "eager")
    torch.testing.assert_close(families.run(eager, tiny.inputs), out, rtol=1e-4, atol=1e-4)

    if tiny.can_generate:
        tokens = tiny.model.generate(
            **tiny.inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
        assert tokens.shape == (2, 7 + 8)
