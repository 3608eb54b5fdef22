"""`expert_loads`: a count that skips what goes nowhere, and goes on inside a compiled graph."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import expert_loads
from moe_ops.conformance.tensors import half_map, with_holes
from moe_ops.testing import CASES, Case, make_layer
from tests.ops.refused import Bad, assert_refused, wrong_dtype, wrong_rank

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_every_pair_that_goes_somewhere_is_counted(case: Case) -> None:
    ids = make_layer(case).ids_TK
    for routed in (ids, with_holes(ids, case.E).long(), torch.full_like(ids, -1)):
        loads = expert_loads(routed, case.E)
        by_hand = Counter(routed.flatten().tolist())
        assert loads.tolist() == [by_hand[e] for e in range(case.E)]
        assert loads.dtype == torch.int64


def test_a_map_is_applied_first() -> None:
    ids = torch.tensor([[0, 1], [2, 3], [2, 7], [-1, 4]], dtype=torch.int32)
    assert expert_loads(ids, 5, half_map(5)).tolist() == [1, 2, 1, 0, 0]
    assert expert_loads(ids, 2, half_map(5)).tolist() == [1, 2], "local experts only"


CALL: dict[str, Any] = {"ids_TK": torch.zeros(3, 2, dtype=torch.int32), "num_experts": 4}
BAD = [
    wrong_rank("ids_TK", (3,), 2),
    wrong_dtype("ids_TK", (3, 2), "float32", "int32, int64"),
    Bad({"num_experts": 0}, "num_experts=0 must be at least 1"),
    Bad({"num_experts": 2**31}, "num_experts=2147483648 must be at most 2147483647"),
    Bad({"expert_map": torch.zeros(0, dtype=torch.int32)}, "expert_map is empty"),
    Bad({"expert_map": torch.zeros(4, dtype=torch.int32, device="meta")}, "is on meta"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.message)
def test_bad_arguments_are_refused(bad: Bad) -> None:
    assert_refused(expert_loads, CALL, bad)


@pytest.mark.slow
def test_a_compiled_layer_adds_to_its_buffer_for_any_number_of_tokens() -> None:
    total = torch.zeros(8, dtype=torch.int64)

    @torch.compile(fullgraph=True, dynamic=True)
    def layer(ids: Tensor) -> Tensor:
        total.add_(expert_loads(ids, 8))
        return ids + 1

    address, want = total.data_ptr(), torch.zeros(8, dtype=torch.int64)
    for T in (5, 17, 64):
        ids = torch.randint(0, 8, (T, 3), generator=torch.Generator().manual_seed(T))
        layer(ids)
        want += expert_loads(ids, 8)
    assert torch.equal(total, want)
    assert total.data_ptr() == address
