"""Layouts keep capacity, budget, R_max and the last copy, whatever is tried."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_stage import random_layout

from routepack_opt.errors import Infeasible, InvalidInput
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import scene_of
from routepack_opt.residency.simulator.layout import Layout, Replica

EVERY = [(layer, expert, 1, expert) for layer in range(2) for expert in range(6)]
SCENE = scene_of(Package.load("paper"), num_layers=2, num_experts=6, top_k=2, expert_bytes=20.0 * 2**20)


def test_replicas_come_and_go_in_packed_slots() -> None:
    layout = Layout.from_replicas(SCENE, EVERY)
    assert layout.add(0, 0, 0, 5, window=3, version=7) == 1
    assert layout.replicas(0, 0) == [Replica(1, 0), Replica(0, 5)]
    assert (layout.since[0, 0, 1], layout.version[0, 0, 1]) == (3, 7)
    layout.check()
    assert layout.why_not_add(0, 0, 0, 5) == "already at tier 0, chiplet 5"
    assert "resident for 1 of at least 4 windows" in layout.why_not_remove(0, 0, 0, 5, window=4)
    assert not layout.why_not_remove(0, 0, 0, 5, window=7)
    other = layout.copy()
    layout.remove(0, 0, 1, 0)
    assert layout.replicas(0, 0) == [Replica(0, 5)] and layout.version[0, 0, 0] == 7
    assert other.replicas(0, 0) == [Replica(1, 0), Replica(0, 5)] and other.primaries().replicas(0, 0) == [
        Replica(1, 0)
    ]
    assert layout.why_not_remove(0, 0, 0, 5) == "the last copy stays"
    layout.check()
    other.check()


def test_capacity_budget_and_r_max_bind() -> None:
    layout = Layout.from_replicas(SCENE, EVERY)
    for expert in range(3):
        assert not layout.why_not_add(0, expert, 0, 0)
        layout.add(0, expert, 0, 0)
    assert "free in region 0" in layout.why_not_add(0, 3, 0, 1)  # SRAM of 64 MiB holds three experts of 20 MiB
    assert "left of the budget" in layout.why_not_add(0, 3, 2, 1)  # 1.3 x 12 copies = 15.6
    assert not layout.may_add(0, 3).any()
    assert not layout.why_not_add(0, 3, 2, 1, moves=True)
    wide = scene_of(Package.load("paper"), num_layers=1, num_experts=1, top_k=1, expert_bytes=1.0, budget_copies=9)
    layout = Layout.from_replicas(wide, [(0, 0, 2, c) for c in range(4)])
    assert layout.why_not_add(0, 0, 1, 0) == "has R_max = 4 replicas"
    assert not layout.may_add(0, 0).any()


def test_wrong_entries_are_named() -> None:
    with pytest.raises(InvalidInput, match="expert 1 of layer 0 has none"):
        Layout.from_replicas(SCENE, [(0, 0, 1, 0)])
    with pytest.raises(InvalidInput, match=r"replicas\[1\]: expert 0 of layer 0: tier 3, chiplet 0 not in"):
        Layout.from_replicas(SCENE, [(0, 0, 1, 0), (0, 0, 3, 0)])
    layout = Layout.from_replicas(SCENE, EVERY)
    layout.region_bytes[0] += 1
    with pytest.raises(Infeasible, match="region bytes disagree"):
        layout.check()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_random_legal_edits_never_break_a_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(SCENE, rng)
    for _ in range(60):
        layer, expert = int(rng.integers(2)), int(rng.integers(6))
        tier, chiplet = int(rng.integers(3)), int(rng.integers(16))
        assert layout.may_add(layer, expert)[tier, chiplet] == (not layout.why_not_add(layer, expert, tier, chiplet))
        if not layout.why_not_add(layer, expert, tier, chiplet):
            layout.add(layer, expert, tier, chiplet)
        elif not layout.why_not_remove(layer, expert, tier, chiplet):
            layout.remove(layer, expert, tier, chiplet)
        layout.check()
