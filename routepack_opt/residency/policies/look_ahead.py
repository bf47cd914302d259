"""Ours: look ahead on the stage model. Every window the edit that saves most on the forecast, if it repays its copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.balance_map import SWEEPS, balance_map
from routepack_opt.residency.look_ahead_plan import ADD, EVICT, MOVE, Draft, Planner, Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.directory import Edit
    from routepack_opt.residency.layout import Layout
    from routepack_opt.residency.observation import PolicyView
    from routepack_opt.residency.scene import Scene
    from routepack_opt.residency.stage_kernels import StageTables


@dataclass(frozen=True)
class Signals:
    """Pressure signals the controller looks at, for the ablation. A missing one counts as zero pressure."""

    load: bool = True
    link: bool = True
    bank: bool = True
    migration: bool = True

    @property
    def weights(self) -> tuple[float, float, float]:
        """Load, bank, link, as the kernels take them."""
        return float(self.load), float(self.bank), float(self.link)


@dataclass
class LookAhead:
    """Model-based controller of the slow loop, with the balancing map.

    Parameters
    ----------
    max_edits
        U_max: edits a window.
    signals
        Pressure signals it looks at, in edits and map.
    horizon
        Windows over which an edit must repay its copy.
    mu1, mu2
        Weights of exposed migration (in s) and churn (in layer times).
    hysteresis
        Least gain of an edit, as a share of its layer's time.
    place
        Location score: source distance, chiplet queue, bank use, tier scarcity, distance to its other replicas.
    layers
        Layers planned a window: those that lose most to imbalance, each again after ``rest`` windows.
    rest
        Windows until a layer without a worthwhile edit is planned again.
    """

    max_edits: int | None = 1
    signals: Signals = field(default_factory=Signals)
    horizon: float = 8.0
    mu1: float = 1.0
    mu2: float = 0.01
    hysteresis: float = 0.001
    place: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 0.0, 1.0)
    layers: int = 2
    rest: int = 4
    name: str = "look-ahead"
    mapping: str = "balance"

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """The start layout."""
        weights = np.array(self.signals.weights)
        self._planner = Planner(scene, weights, np.array(self.place), SWEEPS)
        self._planned = np.full(scene.num_layers, -(10**9))
        return start_layout

    def serve(self, tables: StageTables, layout: Layout, demand: NDArray[np.int32]) -> NDArray[np.int8]:
        """The balancing map, without the signals taken away."""
        return balance_map(tables, layout, demand, weights=self.signals.weights)

    def decide(self, view: PolicyView) -> list[Edit]:
        """Edits of the layers that lose most, best first, each on top of the ones before."""
        draft = Draft(self._planner, view)
        chosen = self._choose_layers(view)
        exposed_s = self._exposed(view)
        most = 10**9 if self.max_edits is None else self.max_edits
        while len(draft.edits) < most:
            pick = self._best(draft, chosen, exposed_s, most)
            if pick is None:
                break
            for step in pick:
                draft.apply(step)
                self._planned[step.layer] = -(10**9)
        return draft.edits

    def _choose_layers(self, view: PolicyView) -> list[int]:
        """Layers with the largest distance from even loads that were not planned lately."""
        state, scene = view.result.base.state, view.scene
        work = state.chiplet_tokens * (scene.expert_ops / scene.hardware.chiplet_ops)
        bank = state.region_bytes / scene.hardware.region_bandwidth
        lost = np.maximum(work.max(axis=1), bank.max(axis=1)) - np.maximum(work.mean(axis=1), bank.mean(axis=1))
        lost[view.window - self._planned < self.rest] = -1.0
        order = np.argsort(-lost, kind="stable")[: self.layers]
        chosen = [int(layer) for layer in order if lost[layer] > 0.0]
        self._planned[chosen] = view.window
        return chosen

    def _exposed(self, view: PolicyView) -> float:
        """Share of a copy's streaming time that the window would feel: layers whose memory stage binds."""
        if not self.signals.migration:
            return 0.0
        stages = view.result.stages
        bound = float((stages[:, 3] >= stages[:, 4]).mean())
        slowest = float(view.scene.hardware.region_bandwidth.min())
        return bound * float(view.scene.expert_bytes.max()) / slowest

    def _best(self, draft: Draft, layers: list[int], exposed_s: float, most: int) -> list[Step] | None:
        """The best next edit, or eviction and addition together; None when nothing pays."""
        best_net, pick = 0.0, None
        scene = self._planner.scene
        plans = [(layer, draft.plan(layer)) for layer in layers]
        cheapest = min(plans, key=lambda entry: -entry[1].gain(EVICT), default=None)
        for layer, plan in plans:
            now_s = float(plan.value[3])
            for kind in (MOVE, ADD):
                gain = plan.gain(kind)
                steps = [plan.step(layer, kind)]
                if not np.isfinite(gain):
                    continue
                if kind == ADD and draft.budget < scene.expert_bytes[layer]:
                    if cheapest is None or not np.isfinite(cheapest[1].value[EVICT]):
                        continue
                    if cheapest[0] == layer and cheapest[1].best[EVICT, 0] == plan.best[ADD, 0]:
                        continue
                    gain += cheapest[1].gain(EVICT)
                    steps = [cheapest[1].step(cheapest[0], EVICT), *steps]
                net = gain - (self.mu1 * exposed_s + self.mu2 * now_s) / self.horizon
                net = (net - self.hysteresis * now_s) / len(steps)
                if net > best_net:
                    best_net, pick = net, steps
        if pick is not None and len(draft.edits) + len(pick) > most:
            pick = pick[: most - len(draft.edits)]
        return pick
