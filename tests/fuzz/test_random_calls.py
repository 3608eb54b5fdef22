"""Random calls of each op: each is right, or refused with words that name an argument."""

from collections import Counter

import pytest
import torch

from moe_ops import OPS
from tests.chosen import those_of
from tests.fuzz.calls import call_of, outcome


@pytest.mark.parametrize("calls", those_of([150], [150, 300]))
@pytest.mark.parametrize("name", OPS)
def test_a_call_is_right_or_refused_by_name(name: str, calls: int) -> None:
    with torch.no_grad():
        found = Counter(outcome(call_of(name, number)) for number in range(calls))
    assert min(found["right"], found["refused"]) > calls // 10, found


def test_a_number_names_one_call() -> None:
    assert str(call_of("experts", 7)) == str(call_of("experts", 7)) != str(call_of("experts", 8))
