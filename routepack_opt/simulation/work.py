"""The kernels a layout runs, and their times added up as the job would wait for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from routepack_opt.simulation.layouts import Layout
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window


@dataclass(frozen=True)
class AttentionKernel:
    """What one DP rank runs beside the routed experts in one layer: block number, and the cell's sorted lengths."""

    block: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the cell."""
        return sum(self.lengths)

    @property
    def squares(self) -> int:
        """Sum of squared lengths."""
        return sum(t * t for t in self.lengths)


@dataclass(frozen=True)
class ExpertKernel:
    """The routed experts of one EP rank in one layer: assignments of each of its slots."""

    counts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Token-expert assignments."""
        return sum(self.counts)

    @property
    def num_active(self) -> int:
        """Slots with at least one assignment."""
        return sum(c > 0 for c in self.counts)


Kernel = AttentionKernel | ExpertKernel
# seconds of every kernel needed
Times = Mapping[Kernel, float]


@dataclass(frozen=True, eq=False)
class LayoutWork:
    """Kernels of one layout.

    Attributes
    ----------
    cells
        [R][D], sorted lengths of each cell.
    expert_kernels
        [R][G][L][P], None for layers that were not expanded.
    num_layers
        L of the window, sampled or not.
    layers
        MoE layers that are expanded, in order.
    """

    name: str
    topology: Topology
    cells: tuple[tuple[tuple[int, ...], ...], ...]
    expert_kernels: tuple[tuple[tuple[tuple[ExpertKernel, ...], ...], ...], ...]
    num_layers: int
    layers: tuple[int, ...]

    def kernels(self, num_blocks: int) -> Iterable[Kernel]:
        """Each distinct kernel once, in a fixed order."""
        seen: dict[Kernel, None] = {}
        for block in range(num_blocks):
            for row in self.cells:
                for lengths in row:
                    seen.setdefault(AttentionKernel(block, lengths))
        for shards in self.expert_kernels:
            for per_layer in shards:
                for ranks in per_layer:
                    seen.update(dict.fromkeys(ranks))
        return list(seen)


def slot_counts(window: Window, layout: Layout) -> NDArray[np.int64]:
    """int64 [R, G, L, E], assignments each slot gets in a row of a shard."""
    num_layers, num_experts = window.num_layers, window.num_experts
    slot_to_logical = np.argsort(layout.logical_to_slot, axis=1, kind="stable")
    topology = layout.topology
    result = np.empty((len(layout.cells), topology.num_shards, num_layers, num_experts), dtype=np.int64)
    for r, row in enumerate(layout.cells):
        for g, ranks in enumerate(topology.shards):
            samples = [i for d in ranks for i in row[d]]
            demand = window.demand[samples].sum(axis=0, dtype=np.int64)
            result[r, g] = np.take_along_axis(demand, slot_to_logical, axis=1)
    return result


def layout_work(window: Window, layout: Layout, layers: Sequence[int] | None = None) -> LayoutWork:
    """Expand a layout into kernels; ``layers`` limits the MoE layers (None: all)."""
    chosen = tuple(range(window.num_layers)) if layers is None else tuple(layers)
    topology = layout.topology
    per_rank = topology.experts_per_rank(window.num_experts)
    counts = slot_counts(window, layout)[:, :, list(chosen)]
    split = counts.reshape(*counts.shape[:3], topology.ep, per_rank).tolist()
    expert_kernels = tuple(
        tuple(tuple(tuple(ExpertKernel(tuple(c)) for c in ranks) for ranks in layer) for layer in shards)
        for shards in split
    )
    lengths = window.lengths
    cells = tuple(tuple(tuple(sorted(lengths[list(cell)].tolist())) for cell in row) for row in layout.cells)
    return LayoutWork(layout.name, topology, cells, expert_kernels, window.num_layers, chosen)


@dataclass(frozen=True, eq=False)
class StepTime:
    """Step time of one layout, by part.

    Attributes
    ----------
    attention_s, experts_s
        float64 [R, G], summed over layers; each layer waits for its slowest DP rank, or EP rank.
    num_layers, num_measured_layers
        MoE layers of the window, and how many of them the expert part was taken from (scaled up to all).
    sync
        "shard": shards meet once a step; "row": every row.
    """

    name: str
    attention_s: NDArray[np.float64]
    experts_s: NDArray[np.float64]
    num_layers: int
    num_measured_layers: int
    sync: Literal["shard", "row"] = "shard"

    @property
    def costs_s(self) -> NDArray[np.float64]:
        """float64 [R, G]."""
        return self.attention_s + self.experts_s

    @property
    def shards_s(self) -> list[float]:
        """Seconds of each shard over all rows."""
        return [math.fsum(column) for column in self.costs_s.T]

    @property
    def step_s(self) -> float:
        """What the job waits for: the slowest shard, or with ``sync="row"`` the slowest shard of every row."""
        return math.fsum(self.costs_s.max(axis=1)) if self.sync == "row" else max(self.shards_s)


def step_time(
    work: LayoutWork, times: Times, block_layers: Sequence[float], sync: Literal["shard", "row"] = "shard"
) -> StepTime:
    """Add kernel times up as the job waits (routepack.md section 5).

    Parameters
    ----------
    times
        Seconds of every kernel of ``work``.
    block_layers
        Layers of each attention block; a block's straggler is the slowest DP rank of the shard, layer by layer.
    """
    num_rows, shards = len(work.cells), work.topology.shards
    attention = np.zeros((num_rows, len(shards)))
    experts = np.zeros((num_rows, len(shards)))
    scale = work.num_layers / len(work.layers)
    for r, row in enumerate(work.cells):
        for g, ranks in enumerate(shards):
            for block, num_layers in enumerate(block_layers):
                slowest = max(times[AttentionKernel(block, row[d])] for d in ranks)
                attention[r, g] += num_layers * slowest
            experts[r, g] = scale * sum(max(times[kernel] for kernel in layer) for layer in work.expert_kernels[r][g])
    return StepTime(work.name, attention, experts, work.num_layers, len(work.layers), sync)
