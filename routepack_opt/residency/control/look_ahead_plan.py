"""Look-ahead over several layers: the best edit of each on the forecast, applied to a draft, planned again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from routepack_opt.residency.control.edits import addition, eviction, move
from routepack_opt.residency.control.hotness import SCALE
from routepack_opt.residency.control.legality import may_leave
from routepack_opt.residency.control.look_ahead_kernels import ADD, EVICT, MOVE, plan_layer
from routepack_opt.residency.simulator.layout import Replica
from routepack_opt.residency.simulator.stage import stage_tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.stage_kernels import StageTables


class Step(NamedTuple):
    """One edit of a plan: ``slot`` is the replica that leaves, -1 none."""

    layer: int
    kind: int
    expert: int
    tier: int
    chiplet: int
    slot: int


@dataclass
class LayerPlan:
    """Best single edits of a layer.

    ``best`` int64 [3, 4] and ``value`` float64 [4] as ``look_ahead_kernels.plan_layer`` fills them.
    """

    best: NDArray[np.int64]
    value: NDArray[np.float64]

    def gain(self, kind: int) -> float:
        """Seconds a window the edit saves; -inf when there is none."""
        return float(self.value[3] - self.value[kind])

    def step(self, layer: int, kind: int) -> Step:
        """The best edit of a kind."""
        return Step(layer, kind, *(int(x) for x in self.best[kind]))


@dataclass
class LayerDraft:
    """One layer as it will be after the edits drafted so far."""

    tiers: NDArray[np.int8]
    chiplets: NDArray[np.int16]
    may: NDArray[np.bool_]
    leave: NDArray[np.bool_]
    demand: NDArray[np.int32]
    order: NDArray[np.int64]
    plan: LayerPlan | None = None

    def copy(self) -> LayerDraft:
        """An independent draft, not planned."""
        fields = self.tiers.copy(), self.chiplets.copy(), self.may.copy(), self.leave.copy()
        return LayerDraft(*fields, self.demand, self.order)


class Planner:
    """Plans layers of one scene; holds tables and scratch memory."""

    def __init__(self, scene: Scene, weights: NDArray[np.float64], place: NDArray[np.float64], sweeps: int) -> None:
        """``weights`` [3] load, bank, link; ``place`` [5] of the location score; ``sweeps`` of the map."""
        self.scene, self.weights, self.place, self.sweeps = scene, weights, place, sweeps
        tables = stage_tables(scene)
        self._tables = tables._replace(expert_ops=tables.expert_ops / SCALE, token_bytes=tables.token_bytes / SCALE)
        self._slots = np.zeros((scene.num_experts, scene.num_chiplets), dtype=np.int8)
        tiers = scene.hardware.region_tier
        self._tiers = tiers
        self._room = np.bincount(tiers, weights=scene.region_room, minlength=scene.num_tiers)

    def tables(self, layer: int) -> StageTables:
        """Of one layer alone, demand in units of the forecast."""
        return self._tables._replace(expert_bytes=self.scene.expert_bytes[layer : layer + 1])

    def plan(self, layer: int, draft: LayerDraft, free: NDArray[np.float64]) -> LayerPlan:
        """Best move, addition and eviction of a layer; ``free`` [G] bytes left in the regions."""
        best, value = np.empty((3, 4), dtype=np.int64), np.empty(4)
        held = np.bincount(self._tiers, weights=free, minlength=len(self._room))
        plan_layer(
            self.tables(layer), draft.demand, draft.order, draft.tiers, draft.chiplets, draft.may, draft.leave,
            free >= self.scene.expert_bytes[layer], held / np.maximum(self._room, 1.0), self.place, self.weights,
            self.sweeps, self._slots, best, value,
        )  # fmt: skip
        return LayerPlan(best, value)


class Draft:
    """The layout as it will be after the edits drafted so far, layer by layer, and the edits."""

    def __init__(self, planner: Planner, view: PolicyView) -> None:
        """Nothing drafted: the published layout, copies under way counted in room and budget."""
        self.planner, self.view = planner, view
        self.free = view.layout.free_bytes()
        self.budget = view.layout.budget_left()
        self.layers: dict[int, LayerDraft] = {}
        self.edits: list[Edit] = []

    def plan(self, layer: int) -> LayerPlan:
        """The plan of a layer as drafted."""
        draft = self.layers.get(layer)
        if draft is None:
            view = self.view
            forecast = view.hotness.forecast(layer)
            leave = may_leave(view.directory, layer, view.window, replaced=True)
            may = np.ones(len(leave), dtype=np.bool_)
            for copy in view.directory.pending:
                if copy.edit.layer == layer:
                    may[copy.edit.expert] = False
                    leave[copy.edit.expert] = False
            order = np.argsort(-view.hotness.hot[layer], kind="stable")
            layout = view.layout
            draft = LayerDraft(layout.tier[layer].copy(), layout.chiplet[layer].copy(), may, leave, forecast, order)
            self.layers[layer] = draft
        if draft.plan is None:
            draft.plan = self.planner.plan(layer, draft, self.free)
        return draft.plan

    def fits(self, step: Step) -> bool:
        """Whether the target still has room."""
        region = self.planner.scene.hardware.region_of[step.tier, step.chiplet]
        return bool(self.free[region] >= self.planner.scene.expert_bytes[step.layer])

    def crowded(self, layer: int) -> bool:
        """Whether the layer gains nothing before some replica leaves: no budget, or no region with room."""
        size = self.planner.scene.expert_bytes[layer]
        return bool(self.budget < size or not (self.free >= size).any())

    def after_eviction(self, layer: int) -> LayerPlan:
        """The plan of a layer whose best eviction is done."""
        step, kept = self.plan(layer).step(layer, EVICT), (self.layers[layer], self.free, self.budget)
        self.layers[layer], self.free = kept[0].copy(), self.free.copy()
        self.apply(step)
        self.edits.pop()
        plan = self.plan(layer)
        self.layers[layer], self.free, self.budget = kept
        return plan

    def apply(self, step: Step) -> Edit:
        """Draft an edit; the plans of other layers stay as they are."""
        layer, kind, expert, tier, chiplet, slot = step
        draft = self.layers[layer]
        size, region_of = float(self.planner.scene.expert_bytes[layer]), self.planner.scene.hardware.region_of
        leaving = None
        if slot >= 0:
            leaving = Replica(int(draft.tiers[expert, slot]), int(draft.chiplets[expert, slot]))
            for row in (draft.tiers[expert], draft.chiplets[expert]):
                row[slot:-1] = row[slot + 1 :].copy()
                row[-1] = -1
        if kind == EVICT:
            self.free[region_of[tier, chiplet]] += size
            self.budget += size
            edit = eviction(layer, expert, tier, chiplet)
        else:
            count = int((draft.tiers[expert] >= 0).sum())
            draft.tiers[expert, count], draft.chiplets[expert, count] = tier, chiplet
            self.free[region_of[tier, chiplet]] -= size  # a replica that leaves frees its room later
            if leaving is None:
                self.budget -= size
                edit = addition(layer, expert, tier, chiplet)
            else:
                edit = move(layer, expert, leaving, tier, chiplet)
        draft.leave[expert] = draft.may[expert] = False  # one edit an expert and window
        draft.plan = None
        self.edits.append(edit)
        return edit


__all__ = ["ADD", "EVICT", "MOVE", "Draft", "LayerPlan", "Planner", "Step"]
