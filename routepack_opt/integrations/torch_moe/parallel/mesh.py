"""The process groups of a trainer: data parallel, expert parallel, expert data parallel.

One process is one DP rank, and DP rank d is rank d of torch.distributed. Shard k's members stand in
``topology.shards[k]``; EP rank p is a position in that list; EDP group p holds the p-th member of every shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from routepack_opt.errors import TopologyError
from routepack_opt.topology import Topology


@dataclass(frozen=True, eq=False)
class ParallelMesh:
    """One process's place, and the groups it communicates in.

    Attributes
    ----------
    topology
        D = P * G DP ranks; every shard has P members.
    rank, shard, ep_rank
        This process: DP rank, EDP shard (also its rank among the EDP group), EP rank.
    dp_group, ep_group, edp_group
        Process groups; None in a job of one process that never called ``init_process_group``.
    device
        Where tensors that travel live.
    """

    topology: Topology
    rank: int
    shard: int
    ep_rank: int
    device: torch.device
    dp_group: Any = None
    ep_group: Any = None
    edp_group: Any = None

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelMesh:
        """One process that holds everything; all collectives are no-ops."""
        return cls(Topology(dp=1, ep=1, shards=1), 0, 0, 0, torch.device(device))

    @classmethod
    def create(cls, topology: Topology, device: torch.device | str = "cpu") -> ParallelMesh:
        """The groups of a job; every process calls it, after ``init_process_group``.

        Raises
        ------
        TopologyError
            The topology is no trainer's (see :func:`check_trainer_topology`), or the job has another number of ranks.
        """
        check_trainer_topology(topology)
        world, rank = dist.get_world_size(), dist.get_rank()
        if world != topology.dp:
            raise TopologyError(f"dp: the topology has {topology.dp} DP ranks, the job {world} processes")
        shard = int(topology.shard_of_rank[rank])
        ep_rank = topology.shards[shard].index(rank)
        # new_group is collective: every process makes every group, in this order
        ep_groups = [dist.new_group(list(members)) for members in topology.shards]
        edp_groups = [dist.new_group([s[p] for s in topology.shards]) for p in range(topology.ep)]
        return cls(
            topology,
            rank,
            shard,
            ep_rank,
            torch.device(device),
            dist.group.WORLD,
            ep_groups[shard],
            edp_groups[ep_rank],
        )

    @property
    def num_ranks(self) -> int:
        """D."""
        return self.topology.dp

    @property
    def num_ep(self) -> int:
        """P."""
        return self.topology.ep

    @property
    def num_edp(self) -> int:
        """G, the number of EDP shards, hence of copies of every expert."""
        return self.topology.num_shards

    @property
    def ep_members(self) -> tuple[int, ...]:
        """The DP rank of each EP rank of this shard."""
        return self.topology.shards[self.shard]

    @property
    def edp_members(self) -> tuple[int, ...]:
        """The DP ranks that hold this rank's experts, by shard."""
        return tuple(members[self.ep_rank] for members in self.topology.shards)

    @property
    def ep_wire_order(self) -> list[int]:
        """The position inside ``ep_group`` of each EP rank: torch sorts a group's members, a shard's list is free."""
        return _positions(self.ep_members)

    @property
    def edp_wire_order(self) -> list[int]:
        """The position inside ``edp_group`` of each shard."""
        return _positions(self.edp_members)


def check_trainer_topology(topology: Topology) -> None:
    """One process per DP rank, TP = CP = ETP = 1: every shard must have exactly P members.

    Raises
    ------
    TopologyError
        Names the sizes that do not fit.
    """
    for shard, members in enumerate(topology.shards):
        if len(members) != topology.ep:
            raise TopologyError(
                f"shards[{shard}]: {len(members)} DP ranks, but the trainer runs one process per EP rank and"
                f" ep is {topology.ep}; expected dp = ep * shards ({topology.ep} * {topology.num_shards}"
                f" = {topology.ep * topology.num_shards}), found dp {topology.dp}"
            )


def _positions(members: tuple[int, ...]) -> list[int]:
    ordered = sorted(members)
    return [ordered.index(member) for member in members]


def all_reduce_(tensor: torch.Tensor, group: Any, op: Any = None) -> torch.Tensor:
    """Reduce ``tensor`` in place (default SUM) over ``group``; a no-op for None."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if op is None else op, group=group)
    return tensor


def broadcast_(tensor: torch.Tensor, source: int, group: Any) -> torch.Tensor:
    """Fill ``tensor`` with that of DP rank ``source``; a no-op for None."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.broadcast(tensor, src=source, group=group)
    return tensor


def all_gather_equal(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Tensors of one shape from every member, by position in the group; ``[tensor]`` for None."""
    if group is None or dist.get_world_size(group) == 1:
        return [tensor]
    tensor = tensor.contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def barrier(group: Any) -> None:
    """Wait for every member; a no-op for None."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.barrier(group=group)
