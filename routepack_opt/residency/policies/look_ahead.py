"""Ours: look ahead on the stage model. Every window the edit that saves most on the forecast, if it repays its copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.control.look_ahead_plan import ADD, EVICT, MOVE, Draft, LayerPlan, Planner, Step
from routepack_opt.residency.mapping.balance_map import SWEEPS, balance_map

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout
    from routepack_opt.residency.simulator.stage_kernels import StageTables


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
    layers: int = 1
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
        """The best next edit, or an eviction and what it makes room for; None when nothing pays."""
        best_net, pick = 0.0, None
        plans = [(layer, draft.plan(layer)) for layer in layers]
        for layer, plan in plans:
            now_s = float(plan.value[3])
            charge = (self.mu1 * exposed_s + self.mu2 * now_s) / self.horizon + self.hysteresis * now_s
            for gain, steps in self._options(draft, layer, plan) + self._trades(draft, layer, plans):
                net = (gain - charge) / len(steps)
                if net > best_net:
                    best_net, pick = net, steps
        if pick is None:
            return None
        last = pick[-1]
        if (pick[0].layer != last.layer or len(pick) == 1) and not draft.fits(last):
            draft.layers[last.layer].plan = None  # planned before another layer took the room
            return self._best(draft, layers, exposed_s, most)
        return pick[: most - len(draft.edits)]

    def _options(self, draft: Draft, layer: int, plan: LayerPlan) -> list[tuple[float, list[Step]]]:
        """(seconds saved a window, edits) of one layer."""
        size = self._planner.scene.expert_bytes[layer]
        options = [(plan.gain(MOVE), [plan.step(layer, MOVE)])]
        if draft.budget >= size:
            options.append((plan.gain(ADD), [plan.step(layer, ADD)]))
        if draft.crowded(layer) and np.isfinite(plan.value[EVICT]):
            evict = plan.step(layer, EVICT)
            if np.isfinite(plan.value[ADD]) and plan.best[ADD, 0] != evict.expert:  # room, but no budget: gains add up
                options.append((plan.gain(ADD) + plan.gain(EVICT), [evict, plan.step(layer, ADD)]))
            else:
                then = draft.after_eviction(layer)
                for kind in (MOVE, ADD):
                    options.append((float(plan.value[3] - then.value[kind]), [evict, then.step(layer, kind)]))
        return [(gain, steps) for gain, steps in options if np.isfinite(gain)]

    def _trades(self, draft: Draft, layer: int, plans: list[tuple[int, LayerPlan]]) -> list[tuple[float, list[Step]]]:
        """An addition paid by the cheapest eviction of another layer, when the budget is used up."""
        size, plan = self._planner.scene.expert_bytes[layer], draft.plan(layer)
        if draft.budget >= size or not np.isfinite(plan.value[ADD]):
            return []
        others = [(other.gain(EVICT), at) for at, other in plans if at != layer and np.isfinite(other.value[EVICT])]
        if not others:
            return []
        gain, at = max(others)
        return [(plan.gain(ADD) + gain, [draft.plan(at).step(at, EVICT), plan.step(layer, ADD)])]
