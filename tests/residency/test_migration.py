"""Migration: chunks add up, the throttle holds on every link, nothing is used before it is published."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_stage import random_demand, random_layout

from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import scene_of
from routepack_opt.residency.simulator.directory import Directory, Edit
from routepack_opt.residency.simulator.layout import Layout, Replica
from routepack_opt.residency.simulator.migration import Migrator
from routepack_opt.residency.simulator.simulate_window import WindowSimulator

SCENE = scene_of(Package.load("paper"), num_layers=2, num_experts=6, top_k=2, expert_bytes=20.0 * 2**20)
EVERY = [(layer, expert, 2, expert) for layer in range(2) for expert in range(6)]
IDLE = np.zeros(SCENE.hardware.num_links)
SIZE = 20 * 2**20


def test_a_copy_takes_the_windows_its_links_allow() -> None:
    migrator = Migrator(Directory(Layout.from_replicas(SCENE, EVERY)))
    assert not migrator.submit([Edit("promote", 0, 0, 0, 10)], 0)
    path = SCENE.hardware.route(16, 10)
    window_s = 8e6 / (0.2 * 256e9)  # room for 8 MB on links used to 0.7: 30 chunks of 256 KiB
    moved = []
    while migrator.directory.pending:
        step = migrator.advance(IDLE + 0.7, window_s)
        assert (step.traffic.links[path] == step.bytes_moved).all()
        assert step.traffic.links.sum() == step.bytes_moved * len(path)
        assert step.traffic.regions.sum() == 2 * step.bytes_moved
        moved.append(step.bytes_moved)
        published = migrator.publish(len(moved))
        assert bool(published) == (sum(moved) == SIZE)
    assert moved == [30 * 2**18, 30 * 2**18, SIZE - 60 * 2**18]


def test_busy_links_defer_and_banks_bound_the_rate() -> None:
    migrator = Migrator(Directory(Layout.from_replicas(SCENE, EVERY)))
    migrator.submit([Edit("promote", 0, 0, 0, 10), Edit("promote", 0, 1, 0, 0)], 0)
    busy = IDLE.copy()
    busy[SCENE.hardware.route(16, 10)[-1]] = 0.95
    step = migrator.advance(busy, 1.0)
    assert step.deferred == 1 and step.bytes_moved == SIZE  # the second copy does not pass that link
    step = migrator.advance(IDLE, 1e-4)
    assert step.bytes_moved <= 102.4e9 * 1e-4
    assert migrator.advance(IDLE, 0.0).bytes_moved == 0


def test_energy_counts_both_banks_and_every_link() -> None:
    migrator = Migrator(Directory(Layout.from_replicas(SCENE, EVERY)))
    migrator.submit([Edit("promote", 0, 0, 0, 5)], 0)
    step = migrator.advance(IDLE, 1.0)
    assert step.energy_j == pytest.approx(SIZE * (160e-12 + 1.25e-12 + 2 * 6.4e-12))


def test_refused_edits_come_back_with_reasons() -> None:
    migrator = Migrator(Directory(Layout.from_replicas(SCENE, EVERY)))
    bad = Edit("evict", 0, 0, 2, 0)
    assert migrator.submit([bad, Edit("no-op"), Edit("promote", 0, 0, 1, 0)], 9) == [(bad, "the last copy stays")]
    assert len(migrator.directory.pending) == 1


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_random_runs_conserve_bytes_and_keep_every_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    simulator, directory = WindowSimulator(SCENE), Directory(random_layout(SCENE, rng, 1.1))
    migrator, moved, published, throttle = Migrator(directory), 0.0, 0, 1.0
    utilisation, window_s = IDLE, 0.0
    for window in range(25):
        demand = random_demand(SCENE, rng, 100)
        step = migrator.advance(utilisation, window_s)
        links = step.traffic.links / SCENE.hardware.link_bandwidth
        if window_s:
            assert (utilisation + links / window_s <= np.maximum(0.9, utilisation) + 1e-9).all()
        before = directory.layout.copy()
        result = simulator.simulate(directory.layout, demand, migration=step, throttle=throttle)
        assert result.exposed_migration_s >= 0 and result.routed_s > 0
        assert (result.slots < before.count[:, :, None]).all()  # only what is published serves
        utilisation, window_s, throttle = result.link_utilisation, result.routed_s, result.next_throttle
        moved += step.bytes_moved
        published += len(migrator.publish(window))
        for _ in range(3):
            layer, expert = int(rng.integers(2)), int(rng.integers(6))
            have = directory.layout.replicas(layer, expert)
            drop = have[rng.integers(len(have))] if rng.random() < 0.5 else None
            place = int(rng.integers(3)), int(rng.integers(16))
            kind = ("promote", "demote", "evict")[rng.integers(3)]
            edit = Edit(kind, layer, expert, *(have[-1] if kind == "evict" else place), drop=drop)  # type: ignore[arg-type]
            migrator.submit([edit], window)
        directory.layout.check()
        pending = sum(copy.size - copy.bytes_left for copy in directory.pending)
        assert moved == published * SIZE + pending
    assert isinstance(directory.layout.replicas(0, 0)[0], Replica)
