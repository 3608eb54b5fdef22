"""`ParallelConfig`: the flattened group, what it refuses, and what a DeviceMesh says."""

import itertools
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_ops.parallel.config import COLLECTIVES, ParallelConfig

SIZES = list(itertools.product((1, 2, 3), (1, 2), (1, 4)))


def ranks_of(dp: int, pcp: int, tp: int, **asked: Any) -> list[ParallelConfig]:
    """Every rank of a group, in the order of its flattened ranks."""
    return [
        ParallelConfig.of(
            dp=dp, pcp=pcp, tp=tp, dp_rank=d, pcp_rank=p, tp_rank=t, **asked
        )
        for d in range(dp) for p in range(pcp) for t in range(tp)
    ]  # fmt: skip


@pytest.mark.parametrize(("dp", "pcp", "tp"), SIZES)
def test_tensor_parallelism_is_flattened_over_data_and_context(dp: int, pcp: int, tp: int) -> None:
    for rank, config in enumerate(ranks_of(dp, pcp, tp)):
        assert (config.tp_size, config.tp_rank) == (dp * pcp * tp, rank)
        assert (config.ep_size, config.ep_rank, config.uses_ep) == (1, 0, False)
        assert (config.dp_rank * pcp + config.pcp_rank, config.sp_size) == (rank // tp, 1)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("dp", "pcp", "tp"), SIZES)
def test_expert_parallelism_takes_the_flattened_group(
    dp: int, pcp: int, tp: int, collective: str
) -> None:
    size = dp * pcp * tp
    asked = {"expert_parallel": True, "collective": collective}
    for rank, config in enumerate(ranks_of(dp, pcp, tp, **asked)):
        assert (config.tp_size, config.tp_rank) == (1, 0)
        assert (config.ep_size, config.ep_rank) == (size, rank)
        assert config.uses_ep == (size > 1)
        assert (config.size, config.rank) == (size, rank)


def test_alone_there_is_nothing_to_share() -> None:
    assert ParallelConfig.of(expert_parallel=True) == ParallelConfig()
    assert ParallelConfig().describe() == "one rank"


def test_sequence_parallel_ranks_are_those_of_attention() -> None:
    for rank, config in enumerate(ranks_of(2, 1, 4, sequence_parallel=True, expert_parallel=True)):
        assert (config.sp_size, config.sp_rank) == (4, rank % 4)


def test_configurations_are_frozen_and_compare_by_value() -> None:
    config = ParallelConfig.of(tp=2, tp_rank=1)
    assert config == ParallelConfig(tp_size=2, tp_rank=1)
    assert len({config, ParallelConfig(tp_size=2, tp_rank=1)}) == 1
    with pytest.raises(FrozenInstanceError):
        config.tp_rank = 0  # type: ignore[misc]


BAD = {
    "no_ranks": ({"tp_size": 0}, "tp_size=0 must be at least 1"),
    "rank_too_high": ({"dp_size": 2, "dp_rank": 2}, "dp_rank=2 must be from 0 to 1, as dp_size=2"),
    "rank_below_0": ({"ep_size": 2, "ep_rank": -1}, "ep_rank=-1 must be from 0 to 1"),
    "both": ({"tp_size": 2, "ep_size": 2}, "either shards every expert or owns whole ones"),
    "unknown": ({"collective": "nccl"}, "collective='nccl' is unknown; choose one of allgather_"),
    "shards": (
        {"tp_size": 2, "collective": "alltoall_low_latency"},
        "ask for expert parallelism or for 'allgather_reducescatter'",
    ),
    "not_flattened": ({"tp_size": 3, "dp_size": 2}, "use ParallelConfig.of to flatten"),
    "another_rank": ({"ep_size": 4, "ep_rank": 1, "dp_size": 2, "dp_rank": 1}, "rank 1 of 4 is"),
    "half_a_sequence": ({"tp_size": 4, "sp_size": 2}, "here 0 of 4"),
}


@pytest.mark.parametrize(("fields", "message"), BAD.values(), ids=BAD)
def test_what_no_group_has_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**fields)


def test_plain_numbers_are_refused_under_their_own_names() -> None:
    with pytest.raises(ValueError, match="tp_rank=4 must be from 0 to 3, as tp=4"):
        ParallelConfig.of(tp=4, tp_rank=4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp": 2.5}, "tp must be an int, got a float: 2.5"),
        ({"tp": 2.0}, "tp must be an int, got a float: 2.0"),
        ({"tp": True}, "tp must be an int, got a bool: True"),
        ({"tp": 4, "tp_rank": None}, "tp_rank must be an int, got None"),
        ({"dp": "2"}, "dp must be an int, got a str: '2'"),
        ({"expert_parallel": 1}, "expert_parallel must be True or False, got an int: 1"),
        ({"sequence_parallel": "no"}, "sequence_parallel must be True or False, got a str: 'no'"),
        ({"collective": None}, "collective must be a str, got None"),
    ],
)
def test_what_is_no_number_or_flag_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ParallelConfig.of(**options)


def test_fields_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"ep_size must be an int, got a float: 4\.0"):
        ParallelConfig(ep_size=4.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got None"):
        ParallelConfig.from_mesh(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ParallelConfig.of(tp=4, tp_rank=1), "tp 1/4 = tp 1/4, allgather_reducescatter"),
        (
            ParallelConfig.of(dp=2, tp=4, dp_rank=1, tp_rank=1, expert_parallel=True,
                              sequence_parallel=True, collective="alltoall_low_latency"),
            "ep 5/8 = dp 1/2 x sp 1/4, alltoall_low_latency",
        ),
    ],
    ids=["tp", "ep"],
)  # fmt: skip
def test_a_log_says_which_ranks_were_flattened(config: ParallelConfig, text: str) -> None:
    assert config.describe() == text


@pytest.fixture
def rank_5_of_8():
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_5_of_8")
def test_a_mesh_says_what_plain_numbers_say() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replica", "shard"))
    asked = {"expert_parallel": True}
    want = ParallelConfig.of(dp=2, tp=4, dp_rank=1, tp_rank=1, **asked)
    assert ParallelConfig.from_mesh(mesh, dp="replica", tp="shard", **asked) == want
    assert ParallelConfig.from_mesh(mesh, tp="shard") == ParallelConfig.of(tp=4, tp_rank=1)
    assert ParallelConfig.from_mesh(mesh["replica"], pcp="replica").pcp_rank == 1
    with pytest.raises(ValueError, match="no dimension 'tp'; it has replica, shard"):
        ParallelConfig.from_mesh(mesh, tp="tp")
    with pytest.raises(ValueError, match="named twice"):
        ParallelConfig.from_mesh(mesh, tp="shard", dp="shard")
