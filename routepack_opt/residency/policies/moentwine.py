"""MoEntwine-like: balanced mapping, and shadow replicas of overloaded experts that migrate in steps over cold links."""

from __future__ import annotations

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
class MoEntwine:
    """Every window each layer gives the hottest expert of its busiest chiplet a shadow on the least busy chiplet.

    A layer that is bound by streaming makes none. Where budget or room is missing, the layer's coldest shadow leaves.

    Parameters
    ----------
    trigger
        Largest over mean chiplet load above which a layer acts.
    margin
        How much hotter the expert must be than the shadow that leaves, per replica.
    cold
        Utilisation under which a link is cold: paths over others are not used.
    """

    trigger: float = 1.2
    margin: float = 1.5
    cold: float = 0.5
    name: str = "moentwine"
    mapping: str | MapWeights = BALANCED
    max_edits: int | None = None

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """The start layout: its replicas are the first shadows."""
        return start_layout

    def decide(self, view: PolicyView) -> list[Edit]:
        """At most one shadow and one departure a layer."""
        return [edit for layer in range(view.scene.num_layers) for edit in self._layer(view, layer)]

    def _layer(self, view: PolicyView, layer: int) -> list[Edit]:
        layout, state = view.layout, view.result.base.state
        busy = state.chiplet_tokens[layer]
        stages = view.result.stages[layer]
        if busy.max() <= self.trigger * busy.mean() or stages[3] >= stages[4]:
            return []
        count = layout.count[layer].astype(np.float64)
        share = view.hotness.hot[layer] / count
        served = (layout.chiplet[layer] == int(np.argmax(busy))).any(axis=1)
        expert = int(np.argmax(np.where(served, share, -1.0)))
        edits: list[Edit] = []
        place = self._place(view, layer, expert)
        if place is None:
            coldest = self._coldest(view, layer, expert, share)
            if coldest is not None:
                edits.append(coldest)
            return edits
        return [addition(layer, expert, *place)]

    def _place(self, view: PolicyView, layer: int, expert: int) -> tuple[int, int] | None:
        """The legal place that balances best, over cold links only."""
        legal = legal_targets(view.directory, layer, expert)
        placed = view.layout.chiplet[layer, expert, : view.layout.count[layer, expert]].astype(np.int64)
        legal[:, placed] = False
        source = view.directory.node(view.layout.replicas(layer, expert)[0])
        hardware = view.scene.hardware
        for tier, chiplet in np.argwhere(legal).tolist():
            path = hardware.route(source, int(hardware.memory_node[tier, chiplet]))
            if len(path) and view.result.link_utilisation[path].max() > self.cold:
                legal[tier, chiplet] = False
        if not legal.any():
            return None
        book = LayerBook.of_layout(view.layout, layer, view.hotness.demand[layer].astype(np.float64))
        cost = np.where(legal, book.cost(expert, placed), np.inf)
        tier, chiplet = divmod(int(np.argmin(cost)), cost.shape[1])
        return tier, chiplet

    def _coldest(self, view: PolicyView, layer: int, expert: int, share: NDArray[np.float64]) -> Edit | None:
        """Eviction of the layer's coldest shadow, if the expert is enough hotter."""
        layout = view.layout
        leave = may_leave(view.directory, layer, view.window)
        leave[:, 0] = False  # primaries stay
        leave[expert] = False
        cold = np.where(leave.any(axis=1), share, np.inf)
        victim = int(np.argmin(cold))
        if not np.isfinite(cold[victim]) or share[expert] < self.margin * cold[victim]:
            return None
        slot = int(np.flatnonzero(leave[victim])[-1])
        return eviction(layer, victim, int(layout.tier[layer, victim, slot]), int(layout.chiplet[layer, victim, slot]))
