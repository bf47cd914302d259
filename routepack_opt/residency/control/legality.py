"""Legality masks: which edits the directory would take now, for whole layers at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.simulator.directory import Directory


def legal_targets(directory: Directory, layer: int, expert: int, *, moves: bool = False) -> NDArray[np.bool_]:
    """[num_tiers, C] where a copy of an expert may come: ``Directory.why_not`` of a promotion, all targets at once.

    Parameters
    ----------
    directory
        Published replicas and copies under way.
    layer, expert
        Of the copy.
    moves
        A published replica leaves for it: the budget does not count, and one more than R_max may be in hand. Whether
        that replica may leave is :func:`may_leave`.
    """
    layout = directory.layout
    scene = layout.scene
    region_of, size = scene.hardware.region_of, float(scene.expert_bytes[layer])
    under_way = list(directory.pending_of(layer, expert))
    mask = (region_of >= 0) & (layout.free_bytes()[region_of] >= size)
    count = int(layout.count[layer, expert])
    if count >= scene.r_max + moves or count + len(under_way) >= scene.r_max + moves:
        mask[:] = False
    if not moves and size > layout.budget_left():
        mask[:] = False
    if sum(copy.edit.drop is not None for copy in under_way) >= count:  # no replica that stays: nothing to copy from
        mask[:] = False
    for tier, chiplet in layout.replicas(layer, expert):
        mask[tier, chiplet] = False
    for copy in under_way:
        mask[copy.edit.tier, copy.edit.chiplet] = False
    return np.asarray(mask)


def may_leave(directory: Directory, layer: int, window: int, *, replaced: bool = False) -> NDArray[np.bool_]:
    """[E, R_max] which replicas of a layer may leave after ``window``.

    ``replaced``: a copy takes its place, so that even the last one may go. A_min and copies under way count.
    """
    layout = directory.layout
    least = layout.scene.hardware.package.rules.min_residency_windows
    mask = (layout.tier[layer] >= 0) & (window - layout.since[layer] >= least)
    if not replaced:
        mask &= (layout.count[layer] > 1)[:, None]
    for copy in directory.pending:
        if copy.edit.layer != layer:
            continue
        for replica in (copy.source, copy.edit.drop):
            if replica is not None:
                slot = layout.find(layer, copy.edit.expert, *replica)
                if slot >= 0:
                    mask[copy.edit.expert, slot] = False
    return np.asarray(mask)
