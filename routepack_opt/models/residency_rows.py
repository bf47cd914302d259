"""The stage-level model of one layer as linear rows: stage seconds >= what its groups and replicas load.

Variables of a layer: ``serve`` [A], group n is served on chiplet c; ``read`` [P], the replica (expert, tier, chiplet)
is read; ``bank`` [G], the region serves at all; and the seconds of four stages. A row says that a stage lasts at least
the sum of its terms. Dropping the whole-number conditions gives the linear relaxation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene

DISPATCH, QUEUE, WORK, GATHER = range(4)  # WORK: the larger of memory and compute
NUM_STAGES = 4


@dataclass
class Row:
    """``stage`` seconds >= sum of seconds * serve + seconds * read + seconds * bank."""

    stage: int
    serve: dict[int, float] = field(default_factory=dict)
    read: dict[int, float] = field(default_factory=dict)
    bank: dict[int, float] = field(default_factory=dict)

    @property
    def num_terms(self) -> int:
        """Variables in the row."""
        return len(self.serve) + len(self.read) + len(self.bank)


@dataclass
class LayerRows:
    """Rows of one layer.

    Attributes
    ----------
    places
        [P] (expert, tier, chiplet) of every replica that may be read; ``region`` [P] the region that holds it.
    groups
        [N] (expert, source, tokens) with tokens > 0.
    serves
        [A] (group, chiplet).
    rows
        Of all stages.
    """

    places: list[tuple[int, int, int]]
    region: NDArray[np.int64]
    groups: list[tuple[int, int, int]]
    serves: list[tuple[int, int]]
    rows: list[Row]

    def places_at(self) -> dict[tuple[int, int], list[int]]:
        """(expert, chiplet) -> places."""
        out: dict[tuple[int, int], list[int]] = {}
        for p, (expert, _, chiplet) in enumerate(self.places):
            out.setdefault((expert, chiplet), []).append(p)
        return out


def layer_rows(
    scene: Scene, layer: int, demand: NDArray[np.int32], places: Iterable[tuple[int, int, int]]
) -> LayerRows:
    """Rows of a layer with demand [E, C]; ``places`` are the replicas that may be read, experts in use only."""
    hardware = scene.hardware
    tokens_of = demand.sum(axis=1, dtype=np.int64)
    kept = [(e, t, c) for e, t, c in places if tokens_of[e] > 0]
    region = np.array([hardware.region_of[t, c] for _, t, c in kept], dtype=np.int64)
    groups = [(int(e), int(c), int(demand[e, c])) for e, c in np.argwhere(demand > 0)]
    chiplets: dict[int, list[int]] = {}
    for e, _, c in kept:
        if c not in chiplets.setdefault(e, []):
            chiplets[e].append(c)
    serves = [(n, c) for n, (e, _, _) in enumerate(groups) for c in sorted(chiplets[e])]
    rows = _travel_rows(scene, groups, serves) + _compute_rows(scene, groups, serves)
    rows += _memory_rows(scene, float(scene.expert_bytes[layer]), kept, region)
    return LayerRows(kept, region, groups, serves, rows)


def _travel_rows(scene: Scene, groups: Sequence[tuple[int, int, int]], serves: Sequence[tuple[int, int]]) -> list[Row]:
    hardware, rows = scene.hardware, []
    for stage in (DISPATCH, GATHER):
        links: dict[int, Row] = {}
        for k, (n, chiplet) in enumerate(serves):
            _, source, tokens = groups[n]
            if source == chiplet:
                continue
            start, end = (source, chiplet) if stage == DISPATCH else (chiplet, source)
            data = tokens * scene.token_bytes
            for u in hardware.route(start, end).tolist():
                links.setdefault(u, Row(stage)).serve[k] = float(data / hardware.link_bandwidth[u])
            seconds = hardware.route_latency_s[start, end] + data * hardware.route_inverse_bandwidth[start, end]
            rows.append(Row(stage, serve={k: float(seconds)}))
        rows += links.values()
    return rows


def _compute_rows(scene: Scene, groups: Sequence[tuple[int, int, int]], serves: Sequence[tuple[int, int]]) -> list[Row]:
    rows: dict[int, Row] = {}
    for k, (n, chiplet) in enumerate(serves):
        seconds = groups[n][2] * scene.expert_ops / scene.hardware.chiplet_ops[chiplet]
        rows.setdefault(chiplet, Row(WORK)).serve[k] = float(seconds)
    return list(rows.values())


def _memory_rows(
    scene: Scene, size: float, places: Sequence[tuple[int, int, int]], region: NDArray[np.int64]
) -> list[Row]:
    hardware = scene.hardware
    rows: list[Row] = []
    links: dict[int, Row] = {}
    banks: dict[int, tuple[Row, Row]] = {}
    for p, (_, tier, chiplet) in enumerate(places):
        g, node = int(region[p]), int(hardware.memory_node[tier, chiplet])
        latency = float(hardware.region_latency_s[g])
        memory, queue = banks.setdefault(g, (Row(WORK, bank={g: latency}), Row(QUEUE)))
        memory.read[p] = float(size / hardware.region_bandwidth[g])
        queue.read[p] = latency
        for u in hardware.route(node, chiplet).tolist():
            links.setdefault(u, Row(WORK)).read[p] = float(size / hardware.link_bandwidth[u])
        if node != chiplet:
            seconds = hardware.route_latency_s[node, chiplet] + size * hardware.route_inverse_bandwidth[node, chiplet]
            rows.append(Row(WORK, read={p: float(seconds)}))
    return rows + list(links.values()) + [row for pair in banks.values() for row in pair]
