"""Process groups from a topology, shards in any order."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from harness import run_ranks

from routepack_opt import Topology
from routepack_opt.errors import TopologyError
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_reduce_, check_trainer_topology


@pytest.mark.distributed
def test_groups_are_those_of_the_topology() -> None:
    meshes: list[Any] = [(2, 2), (4, 1), (1, 4), (2, [[3, 0], [1, 2]])]
    for rank, places in enumerate(run_ranks("dispatch_workers:mesh_places_of", 4, {"meshes": meshes})):
        for (ep, shards), found in zip(meshes, places, strict=True):
            lists = shards if isinstance(shards, list) else [list(range(k * ep, (k + 1) * ep)) for k in range(shards)]
            shard = next(k for k, members in enumerate(lists) if rank in members)
            ep_rank = lists[shard].index(rank)
            assert (found["shard"], found["ep_rank"]) == (shard, ep_rank)
            assert found["ep_members"] == lists[shard]
            assert found["edp_members"] == [members[ep_rank] for members in lists]
            assert found["dp_group"] == 6 and found["ep_group"] == sum(lists[shard])
            assert found["edp_group"] == sum(found["edp_members"])


def test_a_single_process_needs_no_group() -> None:
    import torch

    mesh = ParallelMesh.single()
    assert (mesh.num_ep, mesh.num_edp, mesh.num_ranks, mesh.rank) == (1, 1, 1, 0)
    assert float(all_reduce_(torch.tensor(3.0), mesh.dp_group)) == 3


def test_a_topology_of_more_than_one_rank_per_expert_rank_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"shards\[0\]: 4 DP ranks.*ep is 2.*found dp 8"):
        check_trainer_topology(Topology(dp=8, ep=2, shards=2))
    check_trainer_topology(Topology(dp=8, ep=4))
