"""Masks agree with the directory's own verdict on every edit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.residency.control.edits import addition, eviction, move
from routepack_opt.residency.control.legality import legal_targets, may_leave
from routepack_opt.residency.control.start_layout import popularity_layout
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import scene_of
from routepack_opt.residency.simulator.directory import Directory
from routepack_opt.residency.simulator.layout import Replica

SCENE = scene_of(
    Package.load("paper"), num_layers=2, num_experts=6, top_k=2, expert_bytes=30 * 2**20, budget_copies=1.6
)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), window=st.integers(0, 6))
def test_masks_equal_why_not(seed: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    directory = Directory(popularity_layout(SCENE, rng.integers(0, 50, (2, 6, 16)).astype(np.float64)))
    layout = directory.layout
    layout.since[:] = rng.integers(0, 3, layout.since.shape)
    for _ in range(3):  # some copies under way, some departures
        layer, expert = int(rng.integers(2)), int(rng.integers(6))
        edits = [addition(layer, expert, int(rng.integers(3)), int(rng.integers(16)))]
        edits += [eviction(layer, expert, *replica) for replica in layout.replicas(layer, expert)]
        for edit in edits:
            if not directory.why_not(edit, window):
                directory.evict(edit) if edit.kind == "evict" else directory.begin(edit, window)
    for layer in range(2):
        leave = may_leave(directory, layer, window)
        moved = may_leave(directory, layer, window, replaced=True)
        for expert in range(6):
            adds = legal_targets(directory, layer, expert)
            moves = legal_targets(directory, layer, expert, moves=True)
            for slot, replica in enumerate(layout.replicas(layer, expert)):
                assert leave[expert, slot] == (not directory.why_not(eviction(layer, expert, *replica), window))
            for tier, chiplet in np.ndindex(adds.shape):
                assert adds[tier, chiplet] == (not directory.why_not(addition(layer, expert, tier, chiplet), window))
                for slot, replica in enumerate(layout.replicas(layer, expert)):
                    verdict = directory.why_not(move(layer, expert, replica, tier, chiplet), window)
                    assert (moves[tier, chiplet] and moved[expert, slot]) == (not verdict)


def test_move_names_its_kind() -> None:
    assert move(0, 1, Replica(1, 2), 2, 3).kind == "demote"
    assert move(0, 1, Replica(1, 2), 0, 3).kind == "promote"
    assert move(0, 1, Replica(1, 2), 1, 3).drop == (1, 2)
