"""Of a model without a MoE region `explain` says what it looked for, and what it saw instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, silu

import moe_ops
from moe_ops.passes.explain.explanation import ADVICE, NOTHING_SEEN, Explanation
from tests.chosen import one_in
from tests.hf import families

pytestmark = pytest.mark.slow  # compiles many graphs

D, E, I, K = 32, 8, 64, 2  # noqa: E741


class Choosing(nn.Module):
    """A router; what becomes of its choice differs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.w1 = nn.Parameter(torch.randn(E, D, I))
        self.w2 = nn.Parameter(torch.randn(E, I, D))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x).softmax(-1).topk(K, -1)


class OneHot(Choosing):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        mask = (one_hot(ids, E).to(x) * weights[..., None]).sum(-2)
        h = silu(torch.einsum("td,edf->tef", x, self.w1))
        return (torch.einsum("tef,efd->ted", h, self.w2) * mask[..., None]).sum(1)


class AllTokens(Choosing):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        full = x.new_zeros(x.shape[0], E).scatter(1, ids, weights)
        return sum(expert(x) * full[:, e : e + 1] for e, expert in enumerate(self.experts))


class ChosenTokens(Choosing):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, k = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, k, None])
        return out


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer, nn.Linear(D, D), type(layer)()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


SEEN = {
    OneHot: "topk of 2 of 8, then a one-hot mask over 8 experts, all of which run all tokens",
    AllTokens: "topk of 2 of 8, then a loop over 8 experts, each of which runs all tokens",
}


@one_in(
    2,
    pytest.mark.parametrize(
        ("kind", "what"), SEEN.items(), ids=lambda x: getattr(x, "__name__", "")
    ),
)
def test_another_form_is_named_with_its_layers(kind: type[Choosing], what: str) -> None:
    found = moe_ops.explain(Model(kind()), torch.randn(16, D))
    assert not found.regions
    (seen,) = found.instead
    assert (seen.what, seen.where) == (what, ("layers.0", "layers.2"))
    text = " ".join(str(found).split())
    assert f"Seen instead: {what} (layers.{{0,2}})." in text
    assert ADVICE in text
    assert Explanation.from_json(found.to_json()) == found


def test_a_loop_over_what_was_chosen_is_named_with_its_line() -> None:
    found = moe_ops.explain(Model(ChosenTokens()), torch.randn(16, D))
    (line,) = (seen.where for seen in found.instead if "depend on values" in seen.what)
    (place,) = line
    number = int(place.removeprefix(f"{__file__}:"))
    assert "torch.where(ids == e)" in Path(__file__).read_text().splitlines()[number - 1]


@pytest.mark.every
@pytest.mark.slow
def test_a_transformers_model_with_eager_experts_is_told_what_to_set() -> None:
    tiny = families.build("qwen3_moe", "eager")
    del tiny.model.model.layers[1:]  # which are as the first
    text = str(moe_ops.explain(tiny.model, tiny.inputs))
    assert "depend on values" in text and 'set_experts_implementation("grouped_mm")' in text


def test_a_dense_model_has_nothing_that_chooses() -> None:
    found = moe_ops.explain(nn.Sequential(nn.Linear(D, D)), torch.randn(16, D))
    assert not found.instead and NOTHING_SEEN in str(found)


def test_a_model_with_a_region_is_not_told_of_others() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = families.build("qwen3_moe").model.model.layers[0].mlp
            self.other = OneHot()

        def forward(self, x: Tensor) -> Tensor:
            return self.known(x) + self.other(x[0])

    found = moe_ops.explain(Both().eval(), torch.randn(1, 16, D))
    assert found.regions and not found.instead
