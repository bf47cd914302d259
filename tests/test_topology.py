"""Topology: defaults, shards, parallel sizes, refusals that name the sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack_opt import Topology
from routepack_opt.errors import InvalidInput, TopologyError


@pytest.mark.parametrize(
    ("arguments", "dp", "shards"),
    [
        ({"ep": 8}, 8, 1),
        ({"ep": 8, "shards": 2}, 16, 2),
        ({"dp": 16, "ep": 8}, 16, 2),
        ({"dp": 4, "ep": 8}, 4, 1),
        ({"dp": 16, "ep": 8, "shards": 4}, 16, 4),
        ({"dp": 1}, 1, 1),
        ({}, 1, 1),
        ({"dp": np.int64(6), "ep": np.int32(3), "shards": np.int16(2)}, 6, 2),
    ],
)
def test_defaults(arguments: dict[str, Any], dp: int, shards: int) -> None:
    topology = Topology(**arguments)
    assert (topology.dp, topology.num_shards) == (dp, shards)
    size = dp // shards
    assert topology.shards == tuple(tuple(range(k * size, (k + 1) * size)) for k in range(shards))
    assert topology.shard_of_rank.tolist() == [d // size for d in range(dp)]


def test_shards_may_be_lists_of_any_size_and_order() -> None:
    topology = Topology(ep=2, shards=[[3, 0], [1], [2, 4]])
    assert topology.dp == 5
    assert topology.shard_of_rank.tolist() == [0, 1, 2, 0, 2]
    assert topology == Topology(dp=5, ep=2, shards=((3, 0), (1,), (2, 4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 0}, "dp: 0 is not a positive integer"),
        ({"dp": 4, "ep": 0}, "ep: 0"),
        ({"dp": 4, "ep": True}, "ep: True"),
        ({"dp": 2.0}, "dp: 2.0"),
        ({"dp": 10, "shards": 4}, "dp 10 over 4 shards is 2.5 DP ranks a shard"),
        ({"dp": 4, "shards": 0}, "shards: 0"),
        ({"dp": 10, "ep": 4}, None),
        ({"shards": []}, "shards: holds no shard"),
        ({"shards": [[0], []]}, r"shards\[1\]: holds no DP rank"),
        ({"shards": [[0, 1], [1]]}, "exactly once"),
        ({"shards": [[0, 2]]}, "exactly once"),
        ({"dp": 3, "shards": [[0, 1]]}, "exactly once"),
        ({"dp": 10**12, "shards": [[0]]}, "above 1048576"),
        ({"shards": [[-1, 0]]}, r"shards\[0\]"),
        ({"shards": [["a"]]}, r"shards\[0\]"),
        ({"shards": "ab"}, "shards"),
        ({"shards": [1, 2]}, r"shards\[0\]"),
    ],
)
def test_sizes_that_do_not_fit_are_named(arguments: dict[str, Any], message: str | None) -> None:
    if message is None:  # dp // ep shards that divide dp are fine even where ep does not
        assert Topology(**arguments).num_shards == 2
        return
    with pytest.raises(TopologyError, match=message) as caught:
        Topology(**arguments)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, InvalidInput)


@pytest.mark.parametrize(
    ("sizes", "dp", "shards"),
    [
        ({"world": 64, "tp": 4, "pp": 2, "ep": 8}, 8, 4),  # m = 8 / 4 = 2
        ({"world": 16, "ep": 8}, 16, 2),
        ({"world": 16, "tp": 2, "cp": 2, "ep": 2, "etp": 2}, 4, 4),
        ({"world": 8, "tp": 2, "ep": 8}, 4, 1),
    ],
)
def test_parallel_sizes(sizes: dict[str, int], dp: int, shards: int) -> None:
    topology = Topology.from_sizes(**sizes)
    assert (topology.dp, topology.num_shards, topology.ep) == (dp, shards, sizes["ep"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 10, "tp": 4}, r"world: 10 is not a multiple of tp\*cp\*pp = 4\*1\*1 = 4"),
        ({"world": 12, "ep": 8}, r"world: 12 is not a multiple of etp\*ep\*pp = 1\*8\*1 = 8"),
        ({"world": 64, "tp": 8, "ep": 4}, r"4\*1 / \(8\*1\) = 0.5 DP ranks a shard is not an integer"),
        ({"world": 0}, "world: 0"),
        ({"world": 8, "etp": -1}, "etp: -1"),
    ],
)
def test_parallel_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology.from_sizes(**sizes)


@given(st.integers(1, 64), st.integers(1, 80))
def test_experts_per_rank_or_the_next_number_of_ranks_that_fits(num_experts: int, ep: int) -> None:
    topology = Topology(ep=ep)
    if num_experts % ep == 0:
        assert topology.experts_per_rank(num_experts) * ep == num_experts
        return
    with pytest.raises(TopologyError, match=f"E = {num_experts} .* P = {ep} ") as caught:
        topology.experts_per_rank(num_experts)
    hinted = int(str(caught.value).rsplit(" ", 1)[1])
    assert num_experts % hinted == 0


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_shards_partition_the_ranks(tp: int, cp: int, pp: int, ep: int, etp: int, times: int) -> None:
    world = tp * cp * pp * ep * etp * times
    try:
        topology = Topology.from_sizes(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    except TopologyError:
        assert (ep * etp) % (tp * cp) or world % (etp * ep * pp) or world % (tp * cp * pp)
        return
    assert sorted(rank for ranks in topology.shards for rank in ranks) == list(range(topology.dp))
    assert {len(ranks) for ranks in topology.shards} == {ep * etp // (tp * cp)}
