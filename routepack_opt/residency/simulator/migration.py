"""Migration: weights copied in chunks over links with room to spare, the throttle, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.simulator.layout import Replica
from routepack_opt.residency.simulator.stage import MigrationTraffic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from routepack_opt.residency.simulator.directory import Directory, Edit, PendingCopy


@dataclass(frozen=True)
class MigrationStep:
    """What one window moved.

    ``traffic`` per link and region, ``bytes_moved`` weights, ``energy_j`` of banks and links, ``deferred`` copies that
    moved nothing because a link of their path had no room.
    """

    traffic: MigrationTraffic
    bytes_moved: float
    energy_j: float
    deferred: int


class Migrator:
    """Moves the copies under way of one directory, oldest first."""

    def __init__(self, directory: Directory) -> None:
        """Threshold and chunk size are the package's."""
        self.directory = directory
        rules = directory.layout.scene.hardware.package.rules
        self.threshold = rules.migration_threshold
        self.chunk_bytes = rules.migration_chunk_kib * 1024

    def submit(self, edits: Iterable[Edit], window: int) -> list[tuple[Edit, str]]:
        """Start what is legal, in order, at the end of ``window``; returns the others with the reason."""
        refused = []
        for edit in edits:
            reason = self.directory.why_not(edit, window)
            if reason:
                refused.append((edit, reason))
            elif edit.kind == "evict":
                self.directory.evict(edit)
            elif edit.copies:
                self.directory.begin(edit, window)
        return refused

    def advance(self, link_utilisation: NDArray[np.float64], window_s: float) -> MigrationStep:
        """Move chunks during one window.

        A copy moves only as far as foreground and migration utilisation stay under the threshold on every link of its
        path; the rest waits for a later window. Banks are not throttled: their share shows as exposed migration.

        Parameters
        ----------
        link_utilisation
            [U] foreground utilisation of the last window: what is known when the window starts.
        window_s
            Length of the last window, the estimate for this one.
        """
        hardware = self.directory.layout.scene.hardware
        room = np.maximum(self.threshold - link_utilisation, 0.0) * hardware.link_bandwidth * window_s
        links, regions = np.zeros(hardware.num_links), np.zeros(hardware.num_regions)
        moved = energy = 0.0
        deferred = 0
        for copy in self.directory.pending:
            data = self._chunks(copy, room, window_s)
            if data == 0.0:
                deferred += 1
                continue
            source, target = self._ends(copy)
            path = hardware.route(*source[:1], *target[:1])
            room[path] -= data
            links[path] += data
            for region in (source[1], target[1]):
                regions[region] += data
                energy += data * float(hardware.region_energy_j_per_byte[region])
            energy += data * float(hardware.link_energy_j_per_byte[path].sum())
            copy.bytes_left -= data
            moved += data
        return MigrationStep(MigrationTraffic(links, regions), moved, energy, deferred)

    def _ends(self, copy: PendingCopy) -> tuple[tuple[int, int], tuple[int, int]]:
        """(node, region) of source and target."""
        region_of = self.directory.layout.scene.hardware.region_of
        places = copy.source, Replica(copy.edit.tier, copy.edit.chiplet)
        source, target = ((self.directory.node(place), int(region_of[place])) for place in places)
        return source, target

    def _chunks(self, copy: PendingCopy, room: NDArray[np.float64], window_s: float) -> float:
        """Bytes the copy may move: whole chunks that fit every link of the path, or all that is left."""
        hardware = self.directory.layout.scene.hardware
        (source, source_region), (target, target_region) = self._ends(copy)
        slowest = min(hardware.region_bandwidth[source_region], hardware.region_bandwidth[target_region])
        most = float(slowest * window_s)
        path = hardware.route(source, target)
        if len(path):
            most = min(most, float(room[path].min()))
        if most >= copy.bytes_left:
            return copy.bytes_left
        return float(np.floor(most / self.chunk_bytes) * self.chunk_bytes)

    def publish(self, window: int) -> list[PendingCopy]:
        """See :meth:`Directory.publish`."""
        return self.directory.publish(window)
