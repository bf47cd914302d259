"""The stage-level model written out slowly, from the hardware's routes and the words of the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.simulator.layout import Layout

if TYPE_CHECKING:
    from routepack_opt.residency.machine.scene import Scene


def random_layout(scene: Scene, rng: np.random.Generator, copies: float = 1.3) -> Layout:
    """One copy of every expert, then random legal replicas up to ``copies``."""
    layout = Layout(scene)
    places = [(t, c) for t in range(scene.num_tiers) for c in range(scene.num_chiplets)]
    for layer in range(scene.num_layers):
        for expert in range(scene.num_experts):
            legal = [p for p in places if not layout.why_not_add(layer, expert, *p)]
            layout.add(layer, expert, *legal[rng.integers(len(legal))])
    for _ in range(int((copies - 1) * scene.num_layers * scene.num_experts)):
        layer, expert = int(rng.integers(scene.num_layers)), int(rng.integers(scene.num_experts))
        tier, chiplet = places[rng.integers(len(places))]
        if not layout.why_not_add(layer, expert, tier, chiplet):
            layout.add(layer, expert, tier, chiplet)
    layout.check()
    return layout


def random_demand(scene: Scene, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Skewed random assignments [L, E, C]."""
    shape = (scene.num_layers, scene.num_experts, scene.num_chiplets)
    share = rng.dirichlet(np.full(scene.num_experts, 0.3), size=scene.num_layers)
    demand = rng.poisson(tokens * scene.top_k * share[:, :, None] / scene.num_chiplets, size=shape)
    return demand.astype(np.int32)


def naive_stages(scene: Scene, layout: Layout, demand: np.ndarray, slots: np.ndarray, layer: int,
                 migration_links: np.ndarray, migration_regions: np.ndarray) -> list[float]:  # fmt: skip
    """Seven stage times of one layer; migration arrays are this layer's share."""
    hardware = scene.hardware
    link_bandwidth, ops = hardware.link_bandwidth, hardware.chiplet_ops
    loads = {name: np.zeros(hardware.num_links) for name in ("dispatch", "gather", "memory")}
    longest = dict.fromkeys(loads, 0.0)
    loads["memory"] += migration_links
    macs, reads = np.zeros(scene.num_chiplets), np.zeros(hardware.num_regions)
    region_bytes = np.array(migration_regions, dtype=float)

    def send(kind: str, source: int, target: int, data: float) -> None:
        route = hardware.route(source, target)
        loads[kind][route] += data
        seconds = sum(hardware.link_latency_s[u] + data / link_bandwidth[u] for u in route)
        longest[kind] = max(longest[kind], seconds)

    assignments = demand[layer].sum(axis=0)
    for expert in range(scene.num_experts):
        replicas = layout.replicas(layer, expert)
        used = set()
        for source in range(scene.num_chiplets):
            tokens = int(demand[layer, expert, source])
            if tokens:
                replica = replicas[slots[layer, expert, source]]
                used.add(replica)
                macs[replica.chiplet] += tokens * scene.expert_ops
                send("dispatch", source, replica.chiplet, tokens * scene.token_bytes)
                send("gather", replica.chiplet, source, tokens * scene.token_bytes)
        for tier, chiplet in used:
            region = hardware.region_of[tier, chiplet]
            size = scene.expert_bytes[layer]
            region_bytes[region] += size
            reads[region] += 1
            send("memory", int(hardware.memory_node[tier, chiplet]), chiplet, size)
    banks = [
        hardware.region_latency_s[g] + region_bytes[g] / hardware.region_bandwidth[g]
        for g in range(hardware.num_regions)
        if region_bytes[g] > 0
    ]
    network = {kind: max((loads[kind] / link_bandwidth).max(), longest[kind]) for kind in loads}
    gate = (assignments / scene.top_k * scene.gate_ops / ops).max()
    if assignments.any():
        gate += hardware.package.rules.gate_constant_s
    queue = (reads * hardware.region_latency_s).max()
    memory = max([network["memory"], *banks])
    combine = (assignments * scene.combine_ops / ops).max()
    return [gate, network["dispatch"], queue, memory, (macs / ops).max(), network["gather"], combine]
