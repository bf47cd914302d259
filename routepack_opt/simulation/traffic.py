"""Who sends how many bytes to whom: token all-to-all and moved experts, and how long the links need.

A shard's GPUs are those of its DP ranks in the order of its list; EP rank p of P owns the p-th equal part of them, as
in an EP communicator. Where a DP rank spans several GPUs (or several EP ranks), its traffic is shared evenly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.simulation.cluster import Cluster
    from routepack_opt.simulation.layouts import Layout
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window


@dataclass(frozen=True, eq=False)
class ShardGpus:
    """GPUs of one shard.

    Attributes
    ----------
    node_of
        int64 [U], node of each.
    from_dp
        float64 [m, U], share of a DP rank's tokens on each GPU; rows sum to 1.
    to_ep
        float64 [P, U], share of an EP rank on each GPU; rows sum to 1.
    """

    node_of: NDArray[np.int64]
    from_dp: NDArray[np.float64]
    to_ep: NDArray[np.float64]

    @property
    def same_node(self) -> NDArray[np.bool_]:
        """bool [U, U]."""
        return np.asarray(self.node_of[:, None] == self.node_of[None, :])


def shard_gpus(topology: Topology, gpus_per_node: int) -> list[ShardGpus]:
    """One entry a shard; DP rank d owns consecutive GPUs of the job, nodes are filled in order."""
    result = []
    for ranks in topology.shards:
        num_gpus = math.lcm(len(ranks), topology.ep)
        width = num_gpus // len(ranks)
        gpus = np.concatenate([np.arange(d * width, (d + 1) * width) for d in ranks])
        result.append(
            ShardGpus(
                gpus // gpus_per_node,
                np.kron(np.eye(len(ranks)), np.full((1, width), 1.0 / width)),
                np.kron(np.eye(topology.ep), np.full((1, num_gpus // topology.ep), topology.ep / num_gpus)),
            )
        )
    return result


def dispatch_counts(window: Window, layout: Layout) -> list[NDArray[np.int64]]:
    """Per shard int64 [R, L, m, P]: assignments DP rank j of the shard sends to EP rank p."""
    topology = layout.topology
    per_rank = topology.experts_per_rank(window.num_experts)
    slot_to_logical = np.argsort(layout.logical_to_slot, axis=1, kind="stable")
    result = []
    for ranks in topology.shards:
        counts = np.empty((len(layout.cells), window.num_layers, len(ranks), topology.ep), dtype=np.int64)
        for r, row in enumerate(layout.cells):
            for j, d in enumerate(ranks):
                demand = window.demand[list(row[d])].sum(axis=0, dtype=np.int64)
                by_slot = np.take_along_axis(demand, slot_to_logical, axis=1)
                counts[r, :, j] = by_slot.reshape(window.num_layers, topology.ep, per_rank).sum(axis=2)
        result.append(counts)
    return result


def gpu_bytes(counts: NDArray[np.int64], gpus: ShardGpus, bytes_each: float) -> NDArray[np.float64]:
    """float64 [..., U, U], bytes from GPU to GPU of assignments [..., m, P]; the diagonal stays on the GPU."""
    return np.asarray(np.einsum("...jp,ju,pv->...uv", counts * bytes_each, gpus.from_dp, gpus.to_ep, optimize=True))


def exchange_seconds(traffic: NDArray[np.float64], gpus: ShardGpus, cluster: Cluster) -> NDArray[np.float64]:
    """float64 [...], time of an all-to-all with ``traffic`` [..., U, U] bytes.

    The busiest direction of the busiest GPU, links inside and out of the node used at the same time; one latency where
    anything is sent at all. What a GPU keeps costs nothing.
    """
    away = ~np.eye(traffic.shape[-1], dtype=bool)
    busiest = np.zeros(traffic.shape[:-2])
    for mask, rate in (
        (gpus.same_node & away, cluster.intra_bytes_per_s),
        (~gpus.same_node, cluster.inter_bytes_per_s),
    ):
        part = np.where(mask, traffic, 0.0)
        most = np.maximum(part.sum(axis=-1).max(axis=-1), part.sum(axis=-2).max(axis=-1))
        busiest = np.maximum(busiest, most / rate)
    return np.asarray(np.where(busiest > 0, busiest + cluster.latency_s, 0.0))


def moved_traffic(
    rank_of: NDArray[np.int64], standing: NDArray[np.int64], gpus: ShardGpus, expert_bytes: float
) -> NDArray[np.float64]:
    """float64 [U, U], bytes between GPUs when experts move from EP ranks ``standing`` to ``rank_of``, both [L, E]."""
    num_ranks = gpus.to_ep.shape[0]
    counts = np.zeros((num_ranks, num_ranks))
    moved = rank_of != standing
    np.add.at(counts, (standing[moved], rank_of[moved]), 1.0)
    width = gpus.to_ep.shape[1] // num_ranks  # GPU k of the source sends its part to GPU k of the target
    return np.asarray(np.kron(counts, np.eye(width)) * (expert_bytes / width))
