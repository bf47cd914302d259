"""Replicas as a cache: primaries stay, the rest of the budget holds the experts that rank first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.control.edits import addition, eviction
from routepack_opt.residency.control.layer_book import LayerBook
from routepack_opt.residency.control.legality import legal_targets, may_leave
from routepack_opt.residency.policies.tuned_maps import BALANCED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.mapping.mapping import MapWeights
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout


@dataclass
class CachedReplicas(ABC):
    """Base of LRU and LFU: ``rank`` says which expert deserves a replica.

    Layers bound by streaming are left alone: replacing replicas there made both worse than a single copy.

    Parameters
    ----------
    swaps
        Replacements a layer and window.
    margin
        How many times the newcomer's rank must exceed the victim's, per replica.
    """

    swaps: int = 1
    margin: float = 1.5
    name: str = "cache"
    mapping: str | MapWeights = BALANCED
    max_edits: int | None = None

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """The start layout: its replicas are the first cached ones."""
        return start_layout

    @abstractmethod
    def rank(self, view: PolicyView, layer: int) -> NDArray[np.float64]:
        """[E] more for experts that deserve a replica more."""

    def decide(self, view: PolicyView) -> list[Edit]:
        """Replacements, layer by layer: out go those that rank last, in come those that rank first."""
        return [edit for layer in range(view.scene.num_layers) for edit in self._layer(view, layer)]

    def _layer(self, view: PolicyView, layer: int) -> list[Edit]:
        layout, stages = view.layout, view.result.stages[layer]
        if stages[3] >= stages[4]:  # bound by streaming: copies would cost time and save none
            return []
        share = self.rank(view, layer) / layout.count[layer]
        leave = may_leave(view.directory, layer, view.window)
        leave[:, 0] = False
        edits: list[Edit] = []
        victims = np.argsort(np.where(leave.any(axis=1), share, np.inf), kind="stable")
        waiting = iter(victims[: int(leave.any(axis=1).sum())].tolist())
        for expert in np.argsort(-share, kind="stable")[: self.swaps].tolist():
            place = self._place(view, layer, expert)
            if place is not None:
                edits.append(addition(layer, expert, *place))
                continue
            victim = next(waiting, None)
            if victim is None or share[expert] < self.margin * share[victim]:
                break
            slot = int(np.flatnonzero(leave[victim])[-1])
            place = layout.replicas(layer, victim)[slot]
            edits.append(eviction(layer, victim, *place))
        return edits

    def _place(self, view: PolicyView, layer: int, expert: int) -> tuple[int, int] | None:
        """The fastest tier with room for the expert, there the place that balances best."""
        legal = legal_targets(view.directory, layer, expert)
        placed = view.layout.chiplet[layer, expert, : view.layout.count[layer, expert]].astype(np.int64)
        legal[:, placed] = False
        if not legal.any():
            return None
        book = LayerBook.of_layout(view.layout, layer, view.hotness.demand[layer].astype(np.float64))
        tier = int(np.argmax(legal.any(axis=1)))
        chiplet = int(np.argmin(np.where(legal[tier], book.cost(expert, placed)[tier], np.inf)))
        return tier, chiplet
