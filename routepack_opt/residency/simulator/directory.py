"""Directory: published replicas with versions, copies under way in pending regions, and the legality of every edit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.simulator.layout import Replica

if TYPE_CHECKING:
    from collections.abc import Iterator

    from routepack_opt.residency.simulator.layout import Layout

EditKind = Literal["no-op", "retain", "promote", "demote", "evict"]

ENTRY_BYTES = 64  # most of one replica's entry (residency.md section 5)
DIRECTORY_BYTES = 2 << 20  # most of the whole directory


@dataclass(frozen=True)
class Edit:
    """One residency edit.

    Parameters
    ----------
    kind
        "promote": a copy to (tier, chiplet). "demote": a copy to the slower (tier, chiplet), then ``drop`` leaves.
        "evict": the replica at (tier, chiplet) leaves at the end of the window. "retain" and "no-op" change nothing.
    layer, expert, tier, chiplet
        What and where.
    drop
        Replica of the same expert that leaves when the copy is published (a move); optional for "promote".
    """

    kind: EditKind
    layer: int = 0
    expert: int = 0
    tier: int = 0
    chiplet: int = 0
    drop: Replica | None = None

    @property
    def copies(self) -> bool:
        """Whether weights are copied."""
        return self.kind in ("promote", "demote")


NO_OP = Edit("no-op")


@dataclass
class PendingCopy:
    """A copy under way: nothing of it is visible until the directory publishes it."""

    edit: Edit
    source: Replica
    size: float
    started: int
    bytes_left: float = field(init=False)

    def __post_init__(self) -> None:
        """Nothing has moved yet."""
        self.bytes_left = self.size


class Directory:
    """Versions of a layout. Changes become visible between windows only: groups in flight finish on the old version.

    Attributes
    ----------
    layout
        The published replicas; owned by the directory from now on.
    version
        Number of publications and departures so far; each gets the next number.
    pending
        Copies under way, oldest first.
    """

    def __init__(self, layout: Layout) -> None:
        """Version 0 is the start layout.

        Raises
        ------
        InvalidInput
            More replicas in the budget than the directory has room for.
        """
        scene = layout.scene
        smallest = float(scene.expert_bytes.min())
        most = min(scene.budget_bytes // smallest, float(scene.num_layers * scene.num_experts * scene.r_max))
        if most * ENTRY_BYTES > DIRECTORY_BYTES:
            raise InvalidInput(
                f"directory: {most:.0f} replicas of {ENTRY_BYTES} bytes are above {DIRECTORY_BYTES} bytes; expected "
                f"at most {DIRECTORY_BYTES // ENTRY_BYTES} replicas: fewer layers or a smaller budget"
            )
        self.layout = layout
        self.version = 0
        self.pending: list[PendingCopy] = []

    def entries(self, layer: int, expert: int) -> list[tuple[Replica, int]]:
        """Published replicas of an expert, each with its version."""
        versions = self.layout.version[layer, expert]
        return [(replica, int(versions[slot])) for slot, replica in enumerate(self.layout.replicas(layer, expert))]

    def pending_of(self, layer: int, expert: int) -> Iterator[PendingCopy]:
        """Copies of one expert under way."""
        return (copy for copy in self.pending if (copy.edit.layer, copy.edit.expert) == (layer, expert))

    def why_not(self, edit: Edit, window: int) -> str:
        """Why an edit is illegal now; empty when it is legal. The mask every policy works under."""
        if edit.kind in ("no-op", "retain"):
            return ""
        layout, where = self.layout, (edit.layer, edit.expert)
        target = Replica(edit.tier, edit.chiplet)
        if edit.kind == "evict":
            return self._why_not_leave(where, target, window)
        if edit.kind == "demote" and edit.drop is None:
            return "a demotion needs the replica that leaves (drop)"
        reason = layout.why_not_add(*where, *target, moves=edit.drop is not None)
        if reason:
            return reason
        under_way = list(self.pending_of(*where))
        if any((copy.edit.tier, copy.edit.chiplet) == target for copy in under_way):
            return f"a copy to tier {edit.tier}, chiplet {edit.chiplet} is under way"
        if layout.count[where] + len(under_way) >= layout.scene.r_max + (edit.drop is not None):
            return f"has R_max = {layout.scene.r_max} replicas, copies under way included"
        if not self._sources(*where):
            return "its only replica leaves for a copy under way"
        if edit.drop is None:
            return ""
        if edit.kind == "demote" and edit.drop.tier >= edit.tier:
            return f"tier {edit.tier} is not slower than tier {edit.drop.tier}"
        return self._why_not_leave(where, edit.drop, window, replaced=True)

    def _sources(self, layer: int, expert: int) -> list[Replica]:
        """Replicas a new copy may read: those that leave with a copy under way may be gone before it is done."""
        leaving = [copy.edit.drop for copy in self.pending_of(layer, expert)]
        return [replica for replica in self.layout.replicas(layer, expert) if replica not in leaving]

    def _why_not_leave(self, where: tuple[int, int], replica: Replica, window: int, *, replaced: bool = False) -> str:
        """``replaced``: a copy takes its place, so that even the last one may go."""
        for copy in self.pending_of(*where):
            if replica in (copy.source, copy.edit.drop):
                return f"tier {replica.tier}, chiplet {replica.chiplet} is in use by a copy under way"
        return self.layout.why_not_remove(*where, *replica, window=window, replaced=replaced)

    def begin(self, edit: Edit, window: int) -> PendingCopy:
        """Reserve the pending region of a legal copy; its source is the nearest replica that stays."""
        layout, hardware = self.layout, self.layout.scene.hardware
        target = self.node(Replica(edit.tier, edit.chiplet))
        size = float(layout.scene.expert_bytes[edit.layer])

        def seconds(replica: Replica) -> float:
            node = self.node(replica)
            region = hardware.region_of[replica.tier, replica.chiplet]
            route = hardware.route_latency_s[node, target] + size * hardware.route_inverse_bandwidth[node, target]
            return float(route + size / hardware.region_bandwidth[region])

        source = min(self._sources(edit.layer, edit.expert), key=seconds)
        copy = PendingCopy(edit, source, size, window)
        layout.pending_bytes[hardware.region_of[edit.tier, edit.chiplet]] += size
        if edit.drop is None:
            layout.pending_total += size
        self.pending.append(copy)
        return copy

    def node(self, replica: Replica) -> int:
        """Where a replica's weights enter and leave the network."""
        return int(self.layout.scene.hardware.memory_node[replica.tier, replica.chiplet])

    def evict(self, edit: Edit) -> None:
        """A legal departure."""
        self.layout.remove(edit.layer, edit.expert, edit.tier, edit.chiplet)
        self.version += 1

    def publish(self, window: int) -> list[PendingCopy]:
        """At the end of ``window``: copies whose last chunk arrived become replicas, usable from the next window on."""
        done = [copy for copy in self.pending if copy.bytes_left == 0]
        self.pending = [copy for copy in self.pending if copy.bytes_left > 0]
        layout, region_of = self.layout, self.layout.scene.hardware.region_of
        for copy in done:
            edit = copy.edit
            self.version += 1
            layout.pending_bytes[region_of[edit.tier, edit.chiplet]] -= copy.size
            if edit.drop is None:
                layout.pending_total -= copy.size
            else:  # first out, then in: the expert may have all its slots in use
                layout.remove(edit.layer, edit.expert, *edit.drop)
            layout.add(edit.layer, edit.expert, edit.tier, edit.chiplet, window=window + 1, version=self.version)
        return done

    @property
    def metadata_bytes(self) -> int:
        """Of all entries, copies under way included."""
        return ENTRY_BYTES * (int(np.sum(self.layout.count)) + len(self.pending))
