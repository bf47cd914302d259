"""The counterfactual reward of an edit: the same token groups served with it and without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.dqn import candidate_kernels as kernels
from routepack_opt.residency.mapping import balance_kernels
from routepack_opt.residency.mapping.balance_map import SWEEPS, WEIGHTS
from routepack_opt.residency.simulator import stage_kernels
from routepack_opt.residency.simulator.layout import Replica
from routepack_opt.residency.simulator.stage import STAGES, StageModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.dqn.candidates import Candidates
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Edit

SCALE = 10.0  # rewards are in tenths of a mean layer's time: an edit changes one layer of L


class LayerTimer:
    """Stage-level time of one layer under the balancing map; holds scratch memory."""

    def __init__(self, scene: Scene) -> None:
        """Tables of one layer."""
        model = StageModel(scene)
        self.scene, self.tables = scene, model.tables
        full = model.new_state()
        self._state = full._replace(**{name: value[:1] for name, value in full._asdict().items() if value.ndim == 2})
        num_chiplets, num_regions = scene.num_chiplets, scene.hardware.num_regions
        self._chip_s, self._region_s = np.zeros((1, num_chiplets)), np.zeros((1, num_regions))
        self._trial_s, self._trial = np.zeros(num_chiplets), np.zeros(num_chiplets, dtype=np.int8)
        self._slots = np.zeros((1, scene.num_experts, num_chiplets), dtype=np.int8)
        self._stages, self._times = np.zeros((1, len(STAGES))), np.zeros(1)

    def seconds(
        self, layer: int, demand: NDArray[np.int32], tiers: NDArray[np.int8], chiplets: NDArray[np.int16]
    ) -> float:
        """Time of ``layer`` for demand [E, C] with replicas tiers, chiplets [E, R]; nothing is migrated."""
        tables = self.tables._replace(expert_bytes=self.scene.expert_bytes[layer : layer + 1])
        order = np.argsort(-demand.sum(axis=1), kind="stable")[None]
        balance_kernels.balance_window(
            tables, demand[None], order, tiers[None], chiplets[None], np.array(WEIGHTS), SWEEPS, self._chip_s,
            self._region_s, self._trial_s, self._trial, self._slots,
        )  # fmt: skip
        stage_kernels.window_stages(
            tables, self._state, demand[None], tiers[None], chiplets[None], self._slots, self._stages, self._times
        )
        return float(self._times[0])


class Reward:
    """(T_cf - T_act) / T_cf - mu1 * exposed migration - mu2 * churn, in units of :data:`SCALE` a mean layer's time.

    T_act has the edit as if its copy were published, T_cf has not; both serve the same token groups, those of the
    windows after the decision, and differ in the edited layer only (the other layers' times are those of the window
    just seen). Exposed migration is the growth of that window if it also carried the copy. Churn: replicas that come
    or leave, a layer.
    """

    def __init__(self, scene: Scene, *, mu1: float, mu2: float) -> None:
        """Weights of exposed migration and churn."""
        self.scene, self.mu1, self.mu2 = scene, mu1, mu2
        self.timer = LayerTimer(scene)

    def of(self, view: PolicyView, candidates: Candidates, row: int, following: Sequence[NDArray[np.int32]]) -> float:
        """Reward of one candidate on the demand [L, E, C] of the windows that follow."""
        edit = candidates.edit(row)
        if edit.kind in ("no-op", "retain"):
            return 0.0
        layer, expert, layout = edit.layer, edit.expert, view.layout
        slot = int(candidates.edits[row, 1 + kernels.SLOT])
        tiers, chiplets = layout.tier[layer].copy(), layout.chiplet[layer].copy()
        where = (edit.tier, edit.chiplet) if edit.copies else (-1, -1)
        kernels.replace_slot(
            layout.tier[layer, expert], layout.chiplet[layer, expert], slot, *where, tiers[expert], chiplets[expert]
        )
        without = with_edit = 0.0
        for demand in following:
            groups = np.ascontiguousarray(demand[layer])
            without += self.timer.seconds(layer, groups, layout.tier[layer], layout.chiplet[layer]) / len(following)
            with_edit += self.timer.seconds(layer, groups, tiers, chiplets) / len(following)
        layer_s = view.result.base.layer_s
        window_s = float(layer_s.sum() - layer_s[layer]) + without
        gain = (without - with_edit) / window_s
        exposed = self._exposed_s(view, edit) / window_s
        layers = self.scene.num_layers
        churn = (float(edit.copies) + float(slot >= 0)) / layers
        return SCALE * layers * (gain - self.mu1 * exposed - self.mu2 * churn)

    def _exposed_s(self, view: PolicyView, edit: Edit) -> float:
        """Seconds the window just seen would have taken longer, had it carried the copy."""
        if not edit.copies:
            return 0.0
        hardware, base = self.scene.hardware, view.result.base
        size, num_layers = float(self.scene.expert_bytes[edit.layer]), self.scene.num_layers
        target = Replica(edit.tier, edit.chiplet)
        target_node = view.directory.node(target)
        region_of = hardware.region_of

        def seconds(replica: Replica) -> float:
            node = view.directory.node(replica)
            route = hardware.route_latency_s[node, target_node]
            route += size * hardware.route_inverse_bandwidth[node, target_node]
            return float(route + size / hardware.region_bandwidth[region_of[replica]])

        source = min(view.layout.replicas(edit.layer, edit.expert), key=seconds)
        links, regions = np.zeros(hardware.num_links), np.zeros(hardware.num_regions)
        links[hardware.route(view.directory.node(source), target_node)] += size / num_layers
        for replica in (source, target):
            regions[region_of[replica]] += size / num_layers
        stages, total = np.empty(len(STAGES)), [0.0, 0.0]
        for i, share in enumerate((0.0, 1.0)):
            state = base.state._replace(migration_links=share * links, migration_regions=share * regions)
            for layer in range(num_layers):
                total[i] += stage_kernels.layer_stages(self.timer.tables, state, layer, stages)
        return total[1] - total[0]
