"""Candidate edits of a window: from the layers that lose most to imbalance, with mask and features for the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.control.edits import addition, eviction, move
from routepack_opt.residency.control.hotness import SCALE
from routepack_opt.residency.dqn import candidate_kernels as kernels
from routepack_opt.residency.mapping.balance_map import SWEEPS, WEIGHTS
from routepack_opt.residency.simulator.directory import NO_OP, Edit
from routepack_opt.residency.simulator.layout import Replica
from routepack_opt.residency.simulator.stage import stage_tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.machine.scene import Scene

KINDS = ("no-op", "promote", "retain", "demote", "evict")
# Columns of a candidate's features: kind, what the kernel measures, then the window it stands in.
FEATURES = (
    *KINDS, "replica leaves", "hotness", "volatility", "source entropy", "replicas", "age", "served share",
    "target tier", "leaving tier", "target load", "target bank", "leaving load", "leaving bank", "source distance",
    "distance to replicas", "free capacity", "tier scarcity", "copy cost", "windows unused", "budget left",
    "load pressure", "link pressure", "bank pressure", "tier pressure", "migration pressure", "layer share",
    "memory share", "layer imbalance", "copies under way", "predicted gain", "predicted peak gain",
    "gain made room for",
)  # fmt: skip
NUM_GAINS = 3  # the last columns: what the stage model predicts; a network may be trained without them
_MEASURES = FEATURES.index("hotness")
_UNUSED = FEATURES.index("windows unused")
_GAIN = len(FEATURES) - NUM_GAINS
_RETAIN_WINDOWS = 8


@dataclass(frozen=True)
class Candidates:
    """Candidates of one window, row 0 is no-op.

    Parameters
    ----------
    edits
        int64 [K, 7]: layer, then the columns of the kernel (kind, expert, tier, chiplet, slot that leaves, legal).
    features
        float32 [K, len(FEATURES)].
    leaving
        int64 [K, 2] tier and chiplet of the replica that leaves; -1 where none does.
    """

    edits: NDArray[np.int64]
    features: NDArray[np.float32]
    leaving: NDArray[np.int64]

    def __len__(self) -> int:
        """K."""
        return len(self.edits)

    @property
    def legal(self) -> NDArray[np.bool_]:
        """[K] the mask."""
        return np.asarray(self.edits[:, 1 + kernels.LEGAL] > 0)

    def kind(self, row: int) -> str:
        """As the directory calls it."""
        return KINDS[self.edits[row, 1 + kernels.KIND]]

    def edit(self, row: int) -> Edit:
        """The edit of a row."""
        layer, kind, expert, tier, chiplet = (int(value) for value in self.edits[row, :5])
        if kind == 0:
            return NO_OP
        if kind == kernels.RETAIN:
            return Edit("retain", layer, expert, tier, chiplet)
        if kind == kernels.EVICT:
            return eviction(layer, expert, tier, chiplet)
        if self.leaving[row, 0] >= 0:
            source = Replica(int(self.leaving[row, 0]), int(self.leaving[row, 1]))
            return move(layer, expert, source, tier, chiplet)
        return addition(layer, expert, tier, chiplet)


class CandidateMaker:
    """Makes the candidates of one run; remembers which layers it looked at and what was retained."""

    def __init__(self, scene: Scene, *, layers: int = 2, rest: int = 4) -> None:
        """``layers`` looked at a window, each again after ``rest`` windows, or at once after an edit."""
        self.scene, self.layers, self.rest = scene, layers, rest
        tables = stage_tables(scene)
        self._tables = tables._replace(expert_ops=tables.expert_ops / SCALE, token_bytes=tables.token_bytes / SCALE)
        self._looked = np.full(scene.num_layers, -(10**9))
        self._retained: dict[tuple[int, int], int] = {}
        self._edits = np.zeros((kernels.MAX_EDITS, 6), dtype=np.int64)
        self._measures = np.zeros((kernels.MAX_EDITS, kernels.NUM_MEASURES))
        self._room = np.bincount(scene.hardware.region_tier, weights=scene.region_room, minlength=scene.num_tiers)

    def make(self, view: PolicyView) -> Candidates:
        """Candidates of a window."""
        context = self._context(view)
        first = np.zeros((1, 7), dtype=np.int64), context[None].copy(), np.full((1, 2), -1)
        first[0][0, -1] = first[1][0, 0] = 1
        losses = self._losses(view)
        chosen = self._choose_layers(view.window, losses)
        parts = [first, *(self._of_layer(view, layer, context, losses[layer]) for layer in chosen)]
        edits, features, leaving = (np.concatenate([part[i] for part in parts]) for i in range(3))
        return Candidates(edits, features, leaving)

    def chosen(self, candidates: Candidates, row: int, window: int) -> None:
        """Take note of the choice."""
        if row == 0:
            return
        layer, kind, expert = (int(value) for value in candidates.edits[row, :3])
        if kind == kernels.RETAIN:
            self._retained[layer, expert] = window + _RETAIN_WINDOWS
        self._looked[layer] = -(10**9)

    def _losses(self, view: PolicyView) -> NDArray[np.float64]:
        """[L] distance of the busiest place from even loads, in s."""
        state, scene = view.result.base.state, view.scene
        work = state.chiplet_tokens * (scene.expert_ops / scene.hardware.chiplet_ops)
        bank = state.region_bytes / scene.hardware.region_bandwidth
        peak = np.maximum(work.max(axis=1), bank.max(axis=1))
        return np.asarray(peak - np.maximum(work.mean(axis=1), bank.mean(axis=1)))

    def _choose_layers(self, window: int, losses: NDArray[np.float64]) -> list[int]:
        lost = np.where(window - self._looked < self.rest, -1.0, losses)
        chosen = [int(layer) for layer in np.argsort(-lost, kind="stable")[: self.layers] if lost[layer] > 0.0]
        self._looked[chosen] = window
        return chosen

    def _context(self, view: PolicyView) -> NDArray[np.float32]:
        """Features that all candidates of the window share."""
        pressures, layout = view.result.pressures, view.layout
        row = np.zeros(len(FEATURES), dtype=np.float32)
        left = layout.budget_left() / float(view.scene.expert_bytes.max())
        row[_UNUSED + 1 : _UNUSED + 7] = (
            min(left, 8.0) / 8.0, pressures.load, pressures.link, pressures.bank, pressures.tier[0],
            min(pressures.migration, 1.0),
        )  # fmt: skip
        row[_GAIN - 1] = min(len(view.directory.pending), 4) / 4
        return row

    def _of_layer(
        self, view: PolicyView, layer: int, context: NDArray[np.float32], loss: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
        """Edits, features and leaving replicas of one layer."""
        scene, layout, hotness = view.scene, view.layout, view.hotness
        free = layout.free_bytes()
        scarcity = 1.0 - np.bincount(scene.hardware.region_tier, weights=free, minlength=scene.num_tiers) / np.maximum(
            self._room, 1.0
        )
        free[scene.region_room < scene.expert_bytes[layer]] = -1.0  # an expert never fits there
        hot = hotness.hot[layer]
        times = np.zeros(2)
        tiers, chiplets = layout.tier[layer], layout.chiplet[layer]
        count = kernels.layer_edits(
            self._tables._replace(expert_bytes=scene.expert_bytes[layer : layer + 1]), hotness.forecast(layer),
            np.argsort(-hot, kind="stable"), tiers, chiplets, (view.window - layout.since[layer]).astype(np.int64),
            self._busy(view, layer), hot, hotness.volatility[layer], hotness.entropy(layer), free,
            layout.budget_left(), scene.hardware.package.rules.min_residency_windows, scarcity, np.array(WEIGHTS),
            SWEEPS, self._edits, self._measures, times,
        )  # fmt: skip
        edits = np.concatenate([np.full((count, 1), layer), self._edits[:count]], axis=1)
        experts, slots = edits[:, 1 + kernels.EXPERT], edits[:, 1 + kernels.SLOT]
        leaves = (slots >= 0) & (edits[:, 1 + kernels.KIND] != kernels.RETAIN)
        leaving = np.stack([tiers[experts, slots], chiplets[experts, slots]], axis=1).astype(np.int64)
        leaving[~leaves] = -1
        features = np.repeat(context[None], count, axis=0)
        features[np.arange(count), edits[:, 1 + kernels.KIND]] = 1
        features[:, len(KINDS)] = leaves
        measures = self._measures[:count]
        features[:, _MEASURES:_UNUSED] = measures[:, : kernels.GAIN]
        features[:, _UNUSED] = np.log2(1.0 + view.window - hotness.last_used[layer, experts]) / 8.0
        stages, layer_s = view.result.stages[layer], float(view.result.layer_s[layer])
        share = layer_s * scene.num_layers / max(float(view.result.layer_s.sum()), 1e-30)
        features[:, _GAIN - 4 : _GAIN - 1] = (
            min(share, 4.0), stages[3] / max(stages[3] + stages[4], 1e-30), loss / max(layer_s, 1e-30),
        )  # fmt: skip
        # gains in tenths of a mean layer's time: what one edit can do to a window, whatever its number of layers
        features[:, _GAIN:] = np.clip(10.0 * share * measures[:, kernels.GAIN :], -3.0, 3.0)
        return edits, features, leaving

    def _busy(self, view: PolicyView, layer: int) -> NDArray[np.bool_]:
        """[E] experts with a copy under way or retained lately: left alone."""
        busy = np.zeros(view.scene.num_experts, dtype=np.bool_)
        for copy in view.directory.pending:
            if copy.edit.layer == layer:
                busy[copy.edit.expert] = True
        for (retained_layer, expert), until in self._retained.items():
            if retained_layer == layer and view.window < until:
                busy[expert] = True
        return busy


def warmup() -> None:
    """Compile (or load from the cache) the kernels."""
    from routepack_opt.residency.machine.package import Package
    from routepack_opt.residency.machine.scene import scene_of

    scene = scene_of(Package.load("paper"), num_layers=1, num_experts=2, top_k=1, expert_bytes=1024.0)
    maker, floats = CandidateMaker(scene), np.zeros(2)
    tiers, chiplets = np.full((2, scene.r_max), -1, dtype=np.int8), np.full((2, scene.r_max), -1, dtype=np.int16)
    tiers[:, 0], chiplets[:, 0] = 0, (0, 1)
    kernels.layer_edits(
        maker._tables, np.ones((2, scene.num_chiplets), dtype=np.int32), np.arange(2), tiers, chiplets,
        np.zeros(tiers.shape, dtype=np.int64), np.zeros(2, dtype=np.bool_), floats, floats, floats,
        scene.region_room.copy(), scene.budget_bytes, scene.hardware.package.rules.min_residency_windows,
        np.zeros(scene.num_tiers), np.array(WEIGHTS), SWEEPS, maker._edits, maker._measures, np.zeros(2),
    )  # fmt: skip
