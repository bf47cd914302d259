"""Floors of one layer's time that hold for every layout and assignment: compute, memory, queue and network.

Counting arguments only, each in exact or nearly exact arithmetic; :mod:`routepack_opt.models.residency` puts them
together under the shared capacities and budget.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene


class TierFloors(NamedTuple):
    """Least memory and queue seconds with n replicas of one layer read from a tier, n = 0..held; [held + 1] each."""

    memory_s: NDArray[np.float64]
    queue_s: NDArray[np.float64]


def held_per_region(scene: Scene, layer: int) -> NDArray[np.int64]:
    """[G] experts of ``layer`` that a region holds."""
    return np.asarray(np.floor(scene.region_room / scene.expert_bytes[layer]), dtype=np.int64)


def tier_floors(scene: Scene, layer: int, most: int) -> list[TierFloors]:
    """Floors of every tier for up to ``most`` replicas.

    n replicas spread over the regions of a tier so that the slowest region is as fast as possible: adding each to the
    region that is then fastest is optimal, since a region's time only depends on its own count and grows with it.
    """
    hardware, size = scene.hardware, float(scene.expert_bytes[layer])
    held = held_per_region(scene, layer)
    floors = []
    for tier in range(scene.num_tiers):
        regions = [int(g) for g in np.flatnonzero(hardware.region_tier == tier)]
        room = {g: int(held[g]) for g in regions}
        latency, stream = hardware.region_latency_s, size / hardware.region_bandwidth
        memory = _spread({g: (float(latency[g]), float(stream[g])) for g in regions}, room, most)
        queue = _spread({g: (0.0, float(latency[g])) for g in regions}, room, most)
        memory[1:] = np.maximum(memory[1:], _shortest_memory_route(scene, tier, size))
        floors.append(TierFloors(memory, queue))
    return floors


def _spread(regions: dict[int, tuple[float, float]], room: dict[int, int], most: int) -> NDArray[np.float64]:
    """Least largest ``start + n * step`` for 0, 1, ... items spread over regions of limited room."""
    heap = [(start + step, g, 1) for g, (start, step) in regions.items() if room[g] > 0]
    heapq.heapify(heap)
    floor = [0.0]
    while heap and len(floor) <= most:
        seconds, g, count = heapq.heappop(heap)
        floor.append(max(seconds, floor[-1]))
        if count < room[g]:
            start, step = regions[g]
            heapq.heappush(heap, (start + (count + 1) * step, g, count + 1))
    return np.array(floor)


def _shortest_memory_route(scene: Scene, tier: int, size: float) -> float:
    """Seconds the weights of one expert are under way at least, from a tier to any chiplet it serves."""
    hardware = scene.hardware
    shortest = np.inf
    for chiplet in np.flatnonzero(hardware.region_of[tier] >= 0).tolist():
        node = int(hardware.memory_node[tier, chiplet])
        away = hardware.route_latency_s[node, chiplet] + size * hardware.route_inverse_bandwidth[node, chiplet]
        shortest = min(shortest, 0.0 if node == chiplet else float(away))
    return shortest if np.isfinite(shortest) else 0.0


def fixed_seconds(scene: Scene, demand: NDArray[np.int32]) -> float:
    """Gate and combine of one layer, [E, C]: no placement changes them."""
    assignments = demand.sum(axis=0, dtype=np.int64)
    if not assignments.any():
        return 0.0
    ops = scene.hardware.chiplet_ops
    gate = (
        float((assignments / scene.top_k * scene.gate_ops / ops).max()) + scene.hardware.package.rules.gate_constant_s
    )
    return gate + float((assignments * scene.combine_ops / ops).max())


def compute_floor(scene: Scene, demand: NDArray[np.int32], most_extra: int) -> NDArray[np.float64]:
    """[most_extra + 1] least compute seconds of a layer when used replicas exceed used experts by x.

    Parameters
    ----------
    demand
        int32 [E, C].

    Notes
    -----
    With limit T on a chiplet's tokens: all chiplets together take C T; expert e needs ceil(w_e / T) chiplets, hence
    replicas, at most R_max; and since x extra replicas split at most x experts, of the other experts' i * C + 1
    largest some i + 1 share a chiplet. On chiplets of unequal speed T is that of the fastest.
    """
    ops = scene.hardware.chiplet_ops
    tokens = demand.sum(axis=1, dtype=np.int64)
    loads = np.sort(tokens[tokens > 0])[::-1]
    floor = np.zeros(most_extra + 1)
    if not len(loads):
        return floor
    equal = bool((ops == ops[0]).all())
    work = int(loads.sum())
    together = -(-work // len(ops)) if equal else work * float(ops.max() / ops.sum())
    together = max(together, int(demand.max()), -(-int(loads[0]) // scene.r_max))
    for x in range(most_extra + 1):
        least = max(together, _split_floor(loads, x), _whole_floor(loads[x:], len(ops)))
        floor[x] = least * scene.expert_ops / float(ops.max())
    return np.minimum.accumulate(floor)


def _split_floor(loads: NDArray[np.int64], extra: int) -> int:
    """Least T with sum over e of ceil(w_e / T) <= num_experts + extra."""
    low, high = 1, int(loads[0])
    while low < high:
        middle = (low + high) // 2
        if int((-(-loads // middle)).sum()) <= len(loads) + extra:
            high = middle
        else:
            low = middle + 1
    return low


def _whole_floor(loads: NDArray[np.int64], num_chiplets: int) -> int:
    """Pigeonhole for experts that stay whole: of the i * C + 1 largest some i + 1 share a chiplet."""
    floor = 0
    for share in range(1, (len(loads) - 1) // num_chiplets + 1):
        last = share * num_chiplets  # the smallest share + 1 of the largest share * C + 1
        floor = max(floor, int(loads[last - share : last + 1].sum()))
    return floor


def network_floor(scene: Scene, demand: NDArray[np.int32], most_extra: int) -> NDArray[np.float64]:
    """[most_extra + 1] least dispatch plus gather seconds of a layer [E, C] with x replicas more than experts used.

    Cuts: an expert on one chiplet lies on one side, so its tokens of the other side cross, there in dispatch and back
    in gather; only the at most x experts with several replicas may avoid that. Tokens that cross from A to B and from B
    to A load the links of that direction in dispatch, and of the other in gather.
    """
    best = _volume_floor(scene, demand, most_extra)
    tokens = demand.sum(axis=1, dtype=np.int64)
    for inside, forward, backward in _cuts(scene):
        here = demand[:, inside].sum(axis=1, dtype=np.int64)
        crossing = np.sort(np.minimum(here, tokens - here))
        kept = np.concatenate(([0], np.cumsum(crossing)))[::-1]  # least crossing when x experts are split
        total = kept[np.minimum(np.arange(most_extra + 1), len(kept) - 1)] * scene.token_bytes
        # a bytes go forward and total - a backward; dispatch + gather >= max(a/F, b/B) + max(b/F, a/B) >= the mean
        best = np.maximum(best, total * 0.5 * (1.0 / forward + 1.0 / backward))
    return best


def _volume_floor(scene: Scene, demand: NDArray[np.int32], most_extra: int) -> NDArray[np.float64]:
    """[most_extra + 1] dispatch plus gather seconds if every link between chiplets were busy all the time.

    An expert with r replicas serves at most its r largest sources without travel; every other token crosses at least
    the links of the shortest route, there and back.
    """
    hardware, num_chiplets = scene.hardware, scene.num_chiplets
    used, hops = np.zeros(hardware.num_links, dtype=np.bool_), hardware.num_links
    for source in range(num_chiplets):
        for target in range(num_chiplets):
            if source != target:
                used[hardware.route(source, target)] = True
                hops = min(hops, len(hardware.route(source, target)))
    if not used.any():
        return np.zeros(most_extra + 1)
    sources = np.sort(demand.astype(np.int64), axis=1)[:, ::-1]
    more = np.sort(sources[:, 1:].ravel())[::-1]  # an extra replica keeps at most another source
    kept = sources[:, 0].sum() + np.concatenate(([0], np.cumsum(more)))
    away = demand.sum(dtype=np.int64) - kept[np.minimum(np.arange(most_extra + 1), len(kept) - 1)]
    return np.asarray(2.0 * away * scene.token_bytes * hops / float(hardware.link_bandwidth[used].sum()))


def _cuts(scene: Scene) -> list[tuple[NDArray[np.bool_], float, float]]:
    """(chiplets inside [C], bandwidth out, bandwidth in) of cuts between rows, between columns, by number."""
    hardware = scene.hardware
    num_chiplets = scene.num_chiplets
    number = np.arange(num_chiplets)
    mesh = hardware.package.compute.mesh
    sides = [number < k for k in range(1, num_chiplets)]
    if mesh is not None:
        columns = mesh[1]
        sides = [number // columns < k for k in range(1, mesh[0])] + [number % columns < k for k in range(1, columns)]
    used = np.zeros(hardware.num_links, dtype=np.bool_)  # by routes between chiplets
    for source in range(num_chiplets):
        for target in range(num_chiplets):
            used[hardware.route(source, target)] = True
    cuts = []
    for inside in sides:
        for routers_inside in (False, True):
            nodes = np.full(hardware.num_nodes, routers_inside)
            nodes[:num_chiplets] = inside
            start, end = nodes[hardware.link_ends[:, 0]], nodes[hardware.link_ends[:, 1]]
            out = float(hardware.link_bandwidth[used & start & ~end].sum())
            back = float(hardware.link_bandwidth[used & ~start & end].sum())
            if out > 0 and back > 0:
                cuts.append((inside, out, back))
    return cuts
