"""The directory: versions, pending regions, and edits it must refuse."""

from __future__ import annotations

import numpy as np
import pytest

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.control.legality import legal_targets
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scene import build_scene, scene_of
from routepack_opt.residency.simulator.directory import NO_OP, Directory, Edit
from routepack_opt.residency.simulator.layout import Layout, Replica

EVERY = [(layer, expert, 2, expert) for layer in range(2) for expert in range(6)]
SCENE = scene_of(Package.load("paper"), num_layers=2, num_experts=6, top_k=2, expert_bytes=20.0 * 2**20)


def start() -> Directory:
    return Directory(Layout.from_replicas(SCENE, EVERY))


def test_a_copy_is_invisible_until_published_and_gets_a_version() -> None:
    directory = start()
    edit = Edit("promote", 0, 1, 0, 9)
    assert not directory.why_not(edit, 0)
    copy = directory.begin(edit, 0)
    layout = directory.layout
    assert layout.replicas(0, 1) == [Replica(2, 1)] and layout.pending_total == copy.size
    assert layout.free_bytes()[SCENE.hardware.region_of[0, 9]] == layout.scene.region_room[1] - copy.size
    assert directory.publish(0) == [] and layout.replicas(0, 1) == [Replica(2, 1)]
    copy.bytes_left = 0
    assert directory.publish(3) == [copy] and not directory.pending
    assert directory.entries(0, 1) == [(Replica(2, 1), 0), (Replica(0, 9), 1)]
    assert layout.since[0, 1, 1] == 4 and layout.pending_total == 0 and not layout.pending_bytes.any()
    layout.check()


def test_moves_cost_no_budget_and_drop_the_old_replica_at_publication() -> None:
    directory = start()
    edit = Edit("promote", 0, 1, 0, 9, drop=Replica(2, 1))
    assert "resident for 3 of at least 4" in directory.why_not(edit, 3)  # even as the only copy
    assert not directory.why_not(edit, 4)
    copy = directory.begin(edit, 4)
    assert directory.layout.pending_total == 0
    assert "in use by a copy under way" in directory.why_not(Edit("evict", 0, 1, 2, 1), 9)
    copy.bytes_left = 0
    directory.publish(4)
    assert directory.entries(0, 1) == [(Replica(0, 9), 1)]
    down = Edit("demote", 0, 1, 2, 3, drop=Replica(0, 9))
    assert "resident for 3" in directory.why_not(down, 8)
    assert not directory.why_not(down, 9)
    assert "not slower" in directory.why_not(Edit("demote", 0, 2, 2, 3, drop=Replica(2, 2)), 9)
    assert "needs the replica that leaves" in directory.why_not(Edit("demote", 0, 2, 2, 3), 9)
    directory.layout.check()


def test_illegal_edits_are_named() -> None:
    directory = start()
    assert not directory.why_not(NO_OP, 0) and not directory.why_not(Edit("retain", 0, 0, 2, 0), 0)
    assert directory.why_not(Edit("evict", 0, 0, 2, 0), 9) == "the last copy stays"
    assert "no replica" in directory.why_not(Edit("evict", 0, 0, 1, 0), 9)
    assert "already at" in directory.why_not(Edit("promote", 0, 0, 2, 0), 9)
    assert "no replica" in directory.why_not(Edit("promote", 0, 0, 1, 0, drop=Replica(1, 3)), 9)
    directory.begin(Edit("promote", 0, 0, 1, 0), 0)
    assert "under way" in directory.why_not(Edit("promote", 0, 0, 1, 0), 0)
    for chiplet in (4, 8):
        directory.begin(Edit("promote", 0, 0, 1, chiplet), 0)
    assert "left of the budget" in directory.why_not(Edit("promote", 0, 1, 1, 12), 0)  # 1.3 x 12 copies = 15.6
    scene = scene_of(Package.load("paper"), num_layers=1, num_experts=1, top_k=1, expert_bytes=100.0, budget_copies=9)
    directory = Directory(Layout.from_replicas(scene, [(0, 0, 2, 0)]))
    for chiplet in (0, 4, 8):
        directory.begin(Edit("promote", 0, 0, 1, chiplet), 0)
    assert directory.why_not(Edit("promote", 0, 0, 1, 12), 0).startswith("has R_max")


def test_a_full_expert_can_still_move() -> None:
    scene = scene_of(Package.load("paper"), num_layers=1, num_experts=1, top_k=1, expert_bytes=100.0, budget_copies=4)
    directory = Directory(Layout.from_replicas(scene, [(0, 0, 2, c) for c in range(4)]))
    edit = Edit("promote", 0, 0, 0, 9, drop=Replica(2, 2))
    assert not directory.why_not(edit, 4)
    directory.begin(edit, 4).bytes_left = 0
    directory.publish(4)
    assert directory.layout.replicas(0, 0) == [Replica(2, 0), Replica(2, 1), Replica(2, 3), Replica(0, 9)]
    directory.layout.check()


def test_the_directory_of_v3_stays_under_two_megabytes() -> None:
    scene = build_scene("paper", "deepseek-v3", scope="capacity")
    layout = Layout(scene)
    layout.count[:] = 1
    assert Directory(layout).metadata_bytes < 2 << 20
    large = scene_of(Package.load("gpu-host-nvme"), num_layers=100, num_experts=512, top_k=1, expert_bytes=100.0)
    with pytest.raises(InvalidInput, match="directory: 66560 replicas"):
        Directory(Layout(large))


def test_copies_come_from_the_nearest_replica() -> None:
    directory = start()
    directory.layout.add(0, 0, 0, 15)
    assert directory.begin(Edit("promote", 0, 0, 1, 14), 0).source == Replica(0, 15)
    assert directory.begin(Edit("promote", 0, 1, 0, 5), 0).source == Replica(2, 1)
    assert np.count_nonzero(directory.layout.pending_bytes) == 2


def test_a_copy_read_from_a_replica_that_left_before_it_was_done() -> None:
    directory = start()
    directory.begin(Edit("promote", 0, 1, 0, 9, drop=Replica(2, 1)), 4)  # the only replica leaves when this is done
    late = Edit("promote", 0, 1, 2, 2)
    assert "its only replica leaves" in directory.why_not(late, 4)
    assert not legal_targets(directory, 0, 1).any()
    directory.pending[0].bytes_left = 0
    directory.publish(4)
    directory.begin(late, 5)
    directory.pending[0].bytes_left = 0
    directory.publish(5)  # now two: (0, 9) and (2, 2)
    directory.begin(Edit("promote", 0, 1, 0, 3, drop=Replica(2, 2)), 12)
    assert directory.begin(Edit("promote", 0, 1, 2, 3), 12).source == Replica(0, 9)  # (2, 2) is nearer but leaves
