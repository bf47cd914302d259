"""Energy of a window, and the power budget that throttles the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.stage_kernels import WindowState


class Energy(NamedTuple):
    """Joules of one window.

    ``mac_j`` routed experts; ``gate_j`` gate and combine; ``link_j`` dispatch, gather, weights; ``bank_j`` a tuple by
    tier; ``migration_j``; ``other_j`` the non-routed events; ``idle_j`` idle power times end-to-end time.
    """

    mac_j: float
    gate_j: float
    link_j: float
    bank_j: tuple[float, ...]
    migration_j: float
    other_j: float
    idle_j: float

    @property
    def total_j(self) -> float:
        """All of it."""
        return self[0] + self[1] + self[2] + sum(self.bank_j) + sum(self[4:])


def other_tier(scene: Scene) -> int:
    """The tier the non-routed weights stream from."""
    name = scene.hardware.package.rules.other_weights_tier
    return scene.hardware.tier_names.index(name) if name else scene.num_tiers - 1


def other_seconds(scene: Scene, num_tokens: float) -> float:
    """Time of the non-routed transformer events of the layers in scope, the same for every policy.

    Attention, shared experts and dense layers, spread evenly over all chiplets; their weights stream once a window at
    the summed bandwidth of their tier, overlapped with the arithmetic.
    """
    if num_tokens == 0:
        return 0.0
    hardware = scene.hardware
    pairs = scene.other_pair_ops * hardware.package.rules.context_tokens
    compute = num_tokens * (scene.other_ops + pairs) / hardware.chiplet_ops.sum()
    bandwidth = hardware.region_bandwidth[hardware.region_tier == other_tier(scene)].sum()
    return float(max(compute, scene.other_bytes / bandwidth))


def window_energy(
    scene: Scene, state: WindowState, num_assignments: float, migration_j: float, end_to_end_s: float
) -> Energy:
    """Energy of a window from its loads.

    Parameters
    ----------
    scene, state
        Scene and stage-level loads (the event level moves the same bytes).
    num_assignments
        Token assignments of all layers.
    migration_j
        From :class:`~routepack_opt.residency.simulator.migration.MigrationStep`.
    end_to_end_s
        For idle power.
    """
    hardware, mac = scene.hardware, scene.hardware.mac_energy_j
    link_bytes = (state.dispatch_links + state.gather_links + state.memory_links).sum(axis=0)
    bank = state.region_bytes.sum(axis=0) * hardware.region_energy_j_per_byte
    tiers = np.bincount(hardware.region_tier, weights=bank, minlength=scene.num_tiers)
    tokens = num_assignments / scene.top_k  # token passes, summed over layers
    num_tokens = tokens / scene.num_layers
    pairs = scene.other_pair_ops * hardware.package.rules.context_tokens
    other_bank = hardware.region_energy_j_per_byte[hardware.region_tier == other_tier(scene)].mean()
    read = scene.other_bytes if num_assignments else 0.0
    return Energy(
        mac_j=float(num_assignments * scene.expert_ops * mac),
        gate_j=float((tokens * scene.gate_ops + num_assignments * scene.combine_ops) * mac),
        link_j=float((link_bytes * hardware.link_energy_j_per_byte).sum()),
        bank_j=tuple(float(value) for value in tiers),
        migration_j=migration_j,
        other_j=float(num_tokens * (scene.other_ops + pairs) * mac + read * other_bank),
        idle_j=hardware.idle_power_w * end_to_end_s,
    )


def throttle_of(scene: Scene, energy: Energy, end_to_end_s: float) -> float:
    """Factor on the times of the next window: power over budget, at least 1."""
    if end_to_end_s <= 0:
        return 1.0
    return max(1.0, energy.total_j / end_to_end_s / scene.hardware.power_budget_w)


def edp(energy_j: float | NDArray[np.float64], seconds: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
    """Energy-delay product, J s."""
    return energy_j * seconds
