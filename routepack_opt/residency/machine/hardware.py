"""Hardware: a package as a graph and as flat arrays, with the route of every pair of nodes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.package import LinkSpec, Package

Links = dict[tuple[int, int], "LinkSpec"]

# Routes outside a mesh are chosen for messages of this size, about a block of tokens: latency alone would send bulk
# data through the slow but near switch.
_ROUTE_MESSAGE_BYTES = 65536


@dataclass(frozen=True, eq=False)
class Hardware:
    """A package as simulators see it.

    Nodes are the chiplets 0..C-1, then the routers. Links are directed. Routes are stored row by row: the links of
    the route from node a to node b are ``route_links[route_offsets[k]:route_offsets[k + 1]]``, k = a * num_nodes + b.

    Parameters
    ----------
    package, graph
        The description, and its nodes and links as a networkx DiGraph (edge attribute ``link``: number).
    link_bandwidth, link_latency_s, link_energy_j_per_byte
        [U] B/s, s, J/B.
    route_latency_s, route_inverse_bandwidth
        [num_nodes, num_nodes] sums over the links of a route, in s and s/B: D bytes take latency + D * inverse.
    route_energy_j_per_byte
        [num_nodes, num_nodes].
    chiplet_ops, cores
        [C] multiply-adds a second of a chiplet (utilisation included), and its cores.
    region_*
        [G] of every region: usable bytes are capacity less the reserves (see Scene).
    region_of
        [num_tiers, C] the region that serves a chiplet, -1 none; tiers from fast to slow.
    memory_node
        [num_tiers, C] the node the weights leave from when chiplet c reads tier t (c itself where stacked), -1 none.
    """

    package: Package
    graph: nx.DiGraph
    node_names: tuple[str, ...]
    tier_names: tuple[str, ...]
    link_ends: NDArray[np.int32]
    link_bandwidth: NDArray[np.float64]
    link_latency_s: NDArray[np.float64]
    link_energy_j_per_byte: NDArray[np.float64]
    route_offsets: NDArray[np.int32]
    route_links: NDArray[np.int32]
    route_latency_s: NDArray[np.float64]
    route_inverse_bandwidth: NDArray[np.float64]
    route_energy_j_per_byte: NDArray[np.float64]
    chiplet_ops: NDArray[np.float64]
    cores: NDArray[np.int64]
    region_capacity: NDArray[np.float64]
    region_bandwidth: NDArray[np.float64]
    region_latency_s: NDArray[np.float64]
    region_energy_j_per_byte: NDArray[np.float64]
    region_node: NDArray[np.int32]
    region_stacked: NDArray[np.bool_]
    region_tier: NDArray[np.int32]
    region_banks: NDArray[np.int32]
    region_of: NDArray[np.int32]
    memory_node: NDArray[np.int32]
    mac_energy_j: float
    idle_power_w: float
    power_budget_w: float

    @property
    def num_chiplets(self) -> int:
        """C."""
        return len(self.chiplet_ops)

    @property
    def num_nodes(self) -> int:
        """Chiplets and routers."""
        return len(self.node_names)

    @property
    def num_links(self) -> int:
        """U, directed."""
        return len(self.link_bandwidth)

    @property
    def num_regions(self) -> int:
        """G."""
        return len(self.region_capacity)

    @property
    def num_tiers(self) -> int:
        """Of memory."""
        return len(self.tier_names)

    def route(self, source: int, target: int) -> NDArray[np.int32]:
        """Links from node ``source`` to node ``target``, in order; empty when they are the same."""
        k = source * self.num_nodes + target
        return self.route_links[self.route_offsets[k] : self.route_offsets[k + 1]]

    def link_name(self, link: int) -> str:
        """Such as "c0->c1"."""
        source, target = self.link_ends[link]
        return f"{self.node_names[source]}->{self.node_names[target]}"

    @classmethod
    def from_package(cls, package: Package) -> Hardware:
        """Build graph, routes and arrays.

        Raises
        ------
        InvalidInput
            Nodes that cannot reach each other; names two of them.
        """
        links = _links(package)
        graph = _graph(package, links)
        names = package.node_names
        numbers = {pair: number for number, pair in enumerate(links)}
        routes = [[numbers[pair] for pair in path] for path in _routes(package, links, len(names))]
        specs = list(links.values())
        latency = np.array([spec.latency_s for spec in specs], dtype=np.float64)
        bandwidth = np.array([spec.bandwidth for spec in specs], dtype=np.float64)
        energy = np.array([spec.energy_j_per_byte for spec in specs], dtype=np.float64)

        def over_routes(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.array([sum(values[u] for u in route) for route in routes], dtype=np.float64).reshape(
                len(names), -1
            )

        compute = package.compute
        ops = compute.cores * compute.clock_hz * compute.mac_per_cycle * compute.utilisation
        return cls(
            package=package,
            graph=graph,
            node_names=names,
            tier_names=tuple(tier.name for tier in package.tiers),
            link_ends=np.array(list(links), dtype=np.int32).reshape(-1, 2),
            link_bandwidth=bandwidth,
            link_latency_s=latency,
            link_energy_j_per_byte=energy,
            route_offsets=np.cumsum([0] + [len(route) for route in routes], dtype=np.int32),
            route_links=np.array([u for route in routes for u in route], dtype=np.int32),
            route_latency_s=over_routes(latency),
            route_inverse_bandwidth=over_routes(1.0 / bandwidth),
            route_energy_j_per_byte=over_routes(energy),
            chiplet_ops=np.full(compute.num_chiplets, ops, dtype=np.float64),
            cores=np.full(compute.num_chiplets, compute.cores, dtype=np.int64),
            mac_energy_j=compute.mac_energy_j,
            idle_power_w=package.idle_power_w,
            power_budget_w=package.power_budget_w,
            **_regions(package),
        )


def _links(package: Package) -> Links:
    """All directed links by (source, target), mesh first, in a fixed order."""
    links: Links = {}
    number = {name: k for k, name in enumerate(package.node_names)}
    mesh = package.compute.mesh
    if mesh is not None and package.mesh_link is not None:
        rows, columns = mesh
        for chiplet in range(rows * columns):
            row, column = divmod(chiplet, columns)
            for other_row, other_column in ((row, column + 1), (row, column - 1), (row + 1, column), (row - 1, column)):
                if 0 <= other_row < rows and 0 <= other_column < columns:
                    links[chiplet, other_row * columns + other_column] = package.mesh_link
    for router in package.routers:
        for other in router.attach:
            links[number[router.name], number[other]] = router.link
            links[number[other], number[router.name]] = router.link
    return links


def _graph(package: Package, links: Links) -> nx.DiGraph:
    names = package.node_names
    graph = nx.DiGraph()
    for k, name in enumerate(names):
        graph.add_node(k, name=name, kind="chiplet" if k < package.compute.num_chiplets else "router")
    for number, ((source, target), spec) in enumerate(links.items()):
        graph.add_edge(source, target, link=number, bandwidth=spec.bandwidth, latency_s=spec.latency_s)
    reached = nx.descendants(graph, 0) | {0}  # every link has its reverse: one search is enough
    lost = sorted(set(graph) - reached)
    if lost:
        raise package.error("router", f"no route from {names[0]} to {names[lost[0]]}; expected a connected graph")
    return graph


def _xy_path(source: int, target: int, columns: int) -> list[tuple[int, int]]:
    """Along the row first, then along the column."""
    path = []
    at = source
    while at != target:
        if at % columns != target % columns:
            step = 1 if target % columns > at % columns else -1
        else:
            step = columns if target > at else -columns
        path.append((at, at + step))
        at += step
    return path


def _routes(package: Package, links: Links, num_nodes: int) -> list[list[tuple[int, int]]]:
    """The path of every pair of nodes: XY inside the mesh, else the least time of a message of fixed size.

    Ties go to fewer hops, then to lower node numbers. A path between routers enters and leaves the mesh where that
    time is least and follows XY in between, so that the routing stays free of deadlocks.
    """
    num_chiplets, mesh = package.compute.num_chiplets, package.compute.mesh
    hops: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source, target in links:
        if mesh is None or source >= num_chiplets or target >= num_chiplets:
            hops[source, target] = [(source, target)]
    if mesh is not None:
        for source in range(num_chiplets):
            for target in range(num_chiplets):
                if source != target:
                    hops[source, target] = _xy_path(source, target, mesh[1])
    ways: dict[int, list[tuple[int, float, int]]] = {node: [] for node in range(num_nodes)}
    for (source, target), path in hops.items():
        seconds = sum(links[pair].latency_s + _ROUTE_MESSAGE_BYTES / links[pair].bandwidth for pair in path)
        ways[source].append((target, seconds, len(path)))
    routes: list[list[tuple[int, int]]] = []
    for source in range(num_nodes):
        nodes = _least_time(ways, source, 0 if mesh is None else num_chiplets)
        for target in range(num_nodes):
            if mesh is not None and source < num_chiplets and target < num_chiplets:
                routes.append(hops.get((source, target), []))
            else:
                stops = nodes[target]
                routes.append([pair for a, b in pairwise(stops) for pair in hops[a, b]])
    return routes


def _least_time(
    ways: dict[int, list[tuple[int, float, int]]], source: int, num_mesh: int
) -> dict[int, tuple[int, ...]]:
    """The stops of the best path to every node; ties go to fewer hops, then to the lower node numbers.

    The first ``num_mesh`` nodes are a mesh, every way between them a whole XY path: two such ways never follow one
    another, they would turn where XY does not.
    """
    best: dict[int, tuple[int, ...]] = {}
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, (source,))]
    while heap:
        seconds, length, stops = heapq.heappop(heap)
        node = stops[-1]
        if node in best:
            continue
        best[node] = stops
        crossed = len(stops) > 1 and max(stops[-2:]) < num_mesh
        for target, more, steps in ways[node]:
            if target not in best and not (crossed and target < num_mesh):
                # sums in another order must tie all the same: compare to the femtosecond
                heapq.heappush(heap, (round(seconds + more, 15), length + steps, (*stops, target)))
    return best


def _regions(package: Package) -> dict[str, NDArray[Any]]:
    number = {name: k for k, name in enumerate(package.node_names)}
    num_tiers, num_chiplets = len(package.tiers), package.compute.num_chiplets
    region_of = np.full((num_tiers, num_chiplets), -1, dtype=np.int32)
    memory_node = np.full((num_tiers, num_chiplets), -1, dtype=np.int32)
    flat = [(t, tier, region) for t, tier in enumerate(package.tiers) for region in tier.regions]
    for g, (t, _, region) in enumerate(flat):
        for chiplet in region.chiplets:
            region_of[t, chiplet] = g
            memory_node[t, chiplet] = chiplet if region.node is None else number[region.node]
    return {
        "region_capacity": np.array([tier.capacity_bytes for _, tier, _ in flat], dtype=np.float64),
        "region_bandwidth": np.array([tier.bandwidth for _, tier, _ in flat], dtype=np.float64),
        "region_latency_s": np.array([tier.latency_s for _, tier, _ in flat], dtype=np.float64),
        "region_energy_j_per_byte": np.array([tier.energy_j_per_byte for _, tier, _ in flat], dtype=np.float64),
        "region_node": np.array(
            [region.chiplets[0] if region.node is None else number[region.node] for _, _, region in flat],
            dtype=np.int32,
        ),
        "region_stacked": np.array([region.node is None for _, _, region in flat], dtype=np.bool_),
        "region_tier": np.array([t for t, _, _ in flat], dtype=np.int32),
        "region_banks": np.array([tier.banks for _, tier, _ in flat], dtype=np.int32),
        "region_of": region_of,
        "memory_node": memory_node,
    }
