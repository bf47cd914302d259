"""Building edits: what to call a copy that comes, a replica that moves, a replica that leaves."""

from __future__ import annotations

from routepack_opt.residency.simulator.directory import Edit, EditKind
from routepack_opt.residency.simulator.layout import Replica


def addition(layer: int, expert: int, tier: int, chiplet: int) -> Edit:
    """One more replica."""
    return Edit("promote", int(layer), int(expert), int(tier), int(chiplet))


def move(layer: int, expert: int, source: Replica, tier: int, chiplet: int) -> Edit:
    """``source`` leaves for (tier, chiplet): a demotion when that tier is slower, else a promotion."""
    kind: EditKind = "demote" if tier > source.tier else "promote"
    return Edit(kind, int(layer), int(expert), int(tier), int(chiplet), drop=Replica(*map(int, source)))


def eviction(layer: int, expert: int, tier: int, chiplet: int) -> Edit:
    """A replica leaves."""
    return Edit("evict", int(layer), int(expert), int(tier), int(chiplet))
