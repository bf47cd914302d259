"""The hardware graph: routes are connected paths, XY in the mesh, and sums agree with the links."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.machine.hardware import Hardware
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.package_file import PRESETS, parse_package

SMALL = """
name = "small"
[compute]
chiplets = 2
cores = 1
clock_ghz = 1.0
[[tier]]
name = "ram"
capacity_mib = 64
bandwidth_gbs = 10
latency_ns = 10
energy_pj_per_byte = 1
regions = [{ chiplets = [0] }, { chiplets = [1] }]
"""
SWITCH = '[[router]]\nname = "s"\nattach = ["c0"{}]\nbandwidth_gbs = 1\nlatency_ns = 5\n'


@pytest.mark.parametrize("name", PRESETS)
def test_routes_are_paths_of_the_graph(name: str) -> None:
    hardware = Hardware.from_package(Package.load(name))
    assert nx.is_strongly_connected(hardware.graph)
    for source in range(hardware.num_nodes):
        for target in range(hardware.num_nodes):
            at = source
            for link in hardware.route(source, target):
                assert hardware.link_ends[link, 0] == at
                at = hardware.link_ends[link, 1]
            assert at == target
            links = hardware.route(source, target)
            assert len(set(links)) == len(links)
            assert hardware.route_latency_s[source, target] == pytest.approx(hardware.link_latency_s[links].sum())
            inverse = (1 / hardware.link_bandwidth[links]).sum()
            assert hardware.route_inverse_bandwidth[source, target] == pytest.approx(inverse)


def test_paper_mesh_is_xy_and_io_enters_in_the_row() -> None:
    hardware = Hardware.from_package(Package.load("paper"))
    assert (hardware.num_links, hardware.num_nodes, hardware.num_regions) == (48 + 16, 20, 12)
    text = lambda a, b: [hardware.link_name(u) for u in hardware.route(a, b)]  # noqa: E731
    assert text(0, 15)[:4] == ["c0->c1", "c1->c2", "c2->c3", "c3->c7"]
    assert text(16, 6) == ["io0->c4", "c4->c5", "c5->c6"]
    for source in range(16):
        for target in range(16):
            hops = abs(source // 4 - target // 4) + abs(source % 4 - target % 4)
            assert len(hardware.route(source, target)) == hops
    stacked = hardware.region_stacked[hardware.region_of[0]]
    assert stacked.all() and (hardware.memory_node[0] == np.arange(16)).all()
    assert (hardware.memory_node[1] == 16 + hardware.region_of[1] - 4).all()
    assert hardware.chiplet_ops[0] == pytest.approx(16 * 256 * 0.7 * 1e9)


def test_bulk_data_does_not_take_the_slow_but_near_switch() -> None:
    hardware = Hardware.from_package(Package.load("cxl"))
    assert [hardware.link_name(u) for u in hardware.route(0, 3)] == ["c0->fabric", "fabric->c3"]


def test_a_disconnected_graph_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"small.*no route from c0 to c1; expected a connected graph"):
        Hardware.from_package(parse_package(SMALL + SWITCH.format(""), "small"))
    with pytest.raises(InvalidInput, match="no route from c0 to c1"):
        Hardware.from_package(parse_package(SMALL, "small"))
    assert Hardware.from_package(parse_package(SMALL + SWITCH.format(', "c1"'), "small")).num_links == 4


def test_routes_from_io_chiplets_turned_where_xy_does_not() -> None:
    hardware = Hardware.from_package(Package.load("paper"))
    for io in range(16, 20):
        for chiplet in range(16):
            for ends, inside in (((io, chiplet), slice(1, None)), ((chiplet, io), slice(0, -1))):
                hops = hardware.link_ends[hardware.route(*ends)][inside]
                in_row = (hops[:, 0] // 4 == hops[:, 1] // 4).tolist()
                assert in_row == sorted(in_row, reverse=True), ends  # along the row first


def test_packages_too_large_for_tables_of_routes_are_refused() -> None:
    """1024 chiplets took a minute before anything was printed."""
    mesh = "mesh = [32, 32]\ncores = 1\n"
    link = "[mesh_link]\nbandwidth_gbs = 1\nlatency_ns = 1\n[[tier]]"
    large = SMALL.replace("chiplets = 2\ncores = 1\n", "chiplets = 1024\n" + mesh).replace("[[tier]]", link)
    with pytest.raises(InvalidInput, match=r"compute.chiplets': 1024 is above 256"):
        parse_package(large, "large.toml")
    routers = "".join(
        f'[[router]]\nname = "r{k}"\nattach = ["c0"]\nbandwidth_gbs = 1\nlatency_ns = 1\n' for k in range(257)
    )
    with pytest.raises(InvalidInput, match="257 routers; expected at most 256"):
        parse_package(SMALL.replace("[[tier]]", routers + "[[tier]]"), "large.toml")
