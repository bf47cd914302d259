"""Layout: which replicas of every expert are resident, where, since when; every change keeps the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from routepack_opt.errors import Infeasible, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene


class Replica(NamedTuple):
    """Where a replica lives: memory tier, and the chiplet that executes it."""

    tier: int
    chiplet: int


class Layout:
    """The published replicas of all experts.

    Slots of an expert are packed: slots 0..count-1 are resident, slot 0 is its primary. Removing a replica moves the
    later ones up. A replica takes ``expert_bytes[layer]`` of the region that serves its chiplet in its tier.

    Attributes
    ----------
    tier, chiplet
        int8 and int16 [L, E, R_max], -1 in free slots.
    since, version
        int32 [L, E, R_max]: window of arrival, and version under which the directory published it.
    count
        int8 [L, E].
    region_bytes, pending_bytes
        float64 [G] (whole numbers): of published replicas, and reserved for copies under way.
    total_bytes, pending_total
        Bytes that count against the budget.
    """

    def __init__(self, scene: Scene) -> None:
        """Empty: the caller adds at least one replica of every expert before use (``check`` tells)."""
        shape = (scene.num_layers, scene.num_experts, scene.r_max)
        self.scene = scene
        self.tier: NDArray[np.int8] = np.full(shape, -1, dtype=np.int8)
        self.chiplet: NDArray[np.int16] = np.full(shape, -1, dtype=np.int16)
        self.since: NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        self.version: NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        self.count: NDArray[np.int8] = np.zeros(shape[:2], dtype=np.int8)
        self.region_bytes: NDArray[np.float64] = np.zeros(scene.hardware.num_regions)
        self.pending_bytes: NDArray[np.float64] = np.zeros(scene.hardware.num_regions)
        self.total_bytes = 0.0
        self.pending_total = 0.0

    @classmethod
    def from_replicas(cls, scene: Scene, replicas: Iterable[tuple[int, int, int, int]]) -> Layout:
        """A layout of (layer, expert, tier, chiplet) entries; the first of an expert is its primary.

        Raises
        ------
        InvalidInput
            An entry that breaks a rule (named), or an expert without any.
        """
        layout = cls(scene)
        for index, (layer, expert, tier, chiplet) in enumerate(replicas):
            reason = layout.why_not_add(layer, expert, tier, chiplet)
            if reason:
                raise InvalidInput(f"replicas[{index}]: expert {expert} of layer {layer}: {reason}")
            layout.add(layer, expert, tier, chiplet)
        missing = np.argwhere(layout.count == 0)
        if len(missing):
            raise InvalidInput(
                f"replicas: expert {missing[0][1]} of layer {missing[0][0]} has none; expected one or more"
            )
        return layout

    def copy(self) -> Layout:
        """An independent layout with the same replicas."""
        other = Layout.__new__(Layout)
        other.__dict__.update(self.__dict__)
        for name in ("tier", "chiplet", "since", "version", "count", "region_bytes", "pending_bytes"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def replicas(self, layer: int, expert: int) -> list[Replica]:
        """Resident replicas of an expert, the primary first."""
        count = self.count[layer, expert]
        tiers, chiplets = self.tier[layer, expert, :count].tolist(), self.chiplet[layer, expert, :count].tolist()
        return [Replica(t, c) for t, c in zip(tiers, chiplets, strict=True)]

    def find(self, layer: int, expert: int, tier: int, chiplet: int) -> int:
        """Slot of the replica, or -1."""
        for slot, replica in enumerate(self.replicas(layer, expert)):
            if replica == (tier, chiplet):
                return slot
        return -1

    def free_bytes(self) -> NDArray[np.float64]:
        """[G] room left in every region, copies under way counted."""
        return np.asarray(self.scene.region_room - self.region_bytes - self.pending_bytes)

    def budget_left(self) -> float:
        """Bytes left of B_res, copies under way counted."""
        return self.scene.budget_bytes - self.total_bytes - self.pending_total

    def why_not_add(self, layer: int, expert: int, tier: int, chiplet: int, *, moves: bool = False) -> str:
        """Why a replica may not come to (tier, chiplet); empty when it may. ``moves``: another copy leaves for it."""
        scene = self.scene
        if not (0 <= layer < scene.num_layers and 0 <= expert < scene.num_experts):
            return f"not in 0..{scene.num_layers - 1} x 0..{scene.num_experts - 1}"
        if not (0 <= tier < scene.num_tiers and 0 <= chiplet < scene.num_chiplets):
            return f"tier {tier}, chiplet {chiplet} not in 0..{scene.num_tiers - 1} x 0..{scene.num_chiplets - 1}"
        region, size = int(scene.hardware.region_of[tier, chiplet]), float(scene.expert_bytes[layer])
        if region < 0:
            return f"tier {scene.hardware.tier_names[tier]} does not serve chiplet {chiplet}"
        if self.find(layer, expert, tier, chiplet) >= 0:
            return f"already at tier {tier}, chiplet {chiplet}"
        if self.count[layer, expert] >= scene.r_max + moves:
            return f"has R_max = {scene.r_max} replicas"
        room = float(scene.region_room[region] - self.region_bytes[region] - self.pending_bytes[region])
        if size > room:
            return f"{size:.0f} bytes over the {room:.0f} free in region {region}"
        if not moves and size > self.budget_left():
            return f"{size:.0f} bytes over the {self.budget_left():.0f} left of the budget"
        return ""

    def may_add(self, layer: int, expert: int) -> NDArray[np.bool_]:
        """[num_tiers, C] mask of ``why_not_add`` for a new replica of one expert."""
        scene = self.scene
        region_of, size = scene.hardware.region_of, scene.expert_bytes[layer]
        mask = (region_of >= 0) & (self.free_bytes()[region_of] >= size)
        if self.count[layer, expert] >= scene.r_max or size > self.budget_left():
            mask[:] = False
        for tier, chiplet in self.replicas(layer, expert):
            mask[tier, chiplet] = False
        return np.asarray(mask)

    def why_not_remove(
        self, layer: int, expert: int, tier: int, chiplet: int, *, window: int | None = None, replaced: bool = False
    ) -> str:
        """Why a replica may not leave; empty when it may.

        With ``window`` A_min counts too; ``replaced``: another copy takes its place, even if it is the last.
        """
        slot = self.find(layer, expert, tier, chiplet)
        if slot < 0:
            return f"no replica at tier {tier}, chiplet {chiplet}"
        if self.count[layer, expert] <= 1 and not replaced:
            return "the last copy stays"
        if window is not None:
            age, least = window - int(self.since[layer, expert, slot]), self.scene.hardware.package.rules
            if age < least.min_residency_windows:
                return f"resident for {age} of at least {least.min_residency_windows} windows"
        return ""

    def add(self, layer: int, expert: int, tier: int, chiplet: int, *, window: int = 0, version: int = 0) -> int:
        """Make a replica resident; returns its slot. Legality (``why_not_add``) is the caller's to check."""
        slot, size = int(self.count[layer, expert]), float(self.scene.expert_bytes[layer])
        self.tier[layer, expert, slot] = tier
        self.chiplet[layer, expert, slot] = chiplet
        self.since[layer, expert, slot] = window
        self.version[layer, expert, slot] = version
        self.count[layer, expert] = slot + 1
        self.region_bytes[self.scene.hardware.region_of[tier, chiplet]] += size
        self.total_bytes += size
        return slot

    def remove(self, layer: int, expert: int, tier: int, chiplet: int) -> None:
        """Drop a replica; legality (``why_not_remove``) is the caller's to check."""
        slot, size = self.find(layer, expert, tier, chiplet), float(self.scene.expert_bytes[layer])
        for values, empty in ((self.tier, -1), (self.chiplet, -1), (self.since, 0), (self.version, 0)):
            row = values[layer, expert]
            row[slot:-1] = row[slot + 1 :].copy()
            row[-1] = empty
        self.count[layer, expert] -= 1
        self.region_bytes[self.scene.hardware.region_of[tier, chiplet]] -= size
        self.total_bytes -= size

    def primaries(self) -> Layout:
        """The layout with the primary of every expert only."""
        other = Layout(self.scene)
        for layer, expert in np.ndindex(self.count.shape):
            tier, chiplet = self.replicas(layer, expert)[0]
            other.add(layer, expert, tier, chiplet)
        return other

    def check(self) -> None:
        """Re-derive every sum and rule.

        Raises
        ------
        Infeasible
            The first broken rule.
        """
        scene = self.scene
        resident = self.tier >= 0
        if not ((self.count >= 1) & (self.count == resident.sum(axis=2))).all():
            raise Infeasible("layout: an expert has no replica, or its slots are not packed")
        region = scene.hardware.region_of[self.tier, self.chiplet]
        if (region[resident] < 0).any():
            raise Infeasible("layout: a replica lies in a tier that does not serve its chiplet")
        sizes = np.broadcast_to(scene.expert_bytes[:, None, None], region.shape)
        held = np.bincount(region[resident], weights=sizes[resident], minlength=scene.hardware.num_regions)
        if not (held == self.region_bytes).all() or held.sum() != self.total_bytes:
            raise Infeasible("layout: region bytes disagree with the replicas")
        over = held + self.pending_bytes > scene.region_room
        if over.any():
            g = int(np.argmax(over))
            raise Infeasible(f"layout: region {g} holds {held[g]:.0f} of {scene.region_room[g]:.0f} bytes")
        if self.total_bytes + self.pending_total > scene.budget_bytes:
            raise Infeasible(f"layout: {self.total_bytes:.0f} bytes over the budget of {scene.budget_bytes:.0f}")
