"""300 random calls of each op: each is right, or refused with words that name an argument."""

from collections import Counter

import pytest
import torch

from moe_ops import OPS
from tests.fuzz.calls import call_of, outcome

CALLS = 300


@pytest.mark.parametrize("name", OPS)
def test_a_call_is_right_or_refused_by_name(name: str) -> None:
    with torch.no_grad():
        found = Counter(outcome(call_of(name, number)) for number in range(CALLS))
    assert min(found["right"], found["refused"]) > CALLS // 10, found


def test_a_number_names_one_call() -> None:
    assert str(call_of("experts", 7)) == str(call_of("experts", 7)) != str(call_of("experts", 8))
