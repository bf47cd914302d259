"""The learned slow loop: a frozen Double DQN scores the legal edits of a window; at most one takes effect."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.dqn.candidates import CandidateMaker

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout


@dataclass
class Dqn:
    """Masked Double DQN, frozen, with the balancing map.

    Parameters
    ----------
    checkpoint
        Weights (.safetensors, the record beside them); None: those shipped with the package.
    margin
        Least advantage over no-op at which it edits, in tenths of a mean layer's time; None: the checkpoint's.

    Raises
    ------
    MissingDependency
        No torch.
    FormatError
        A checkpoint that is missing or cannot be used.
    """

    checkpoint: str | os.PathLike[str] | None = None
    margin: float | None = None
    max_edits: int | None = 1
    name: str = "dqn"
    mapping: str = "balance"

    def __post_init__(self) -> None:
        """Load the weights."""
        importlib.import_module("routepack_opt.residency.dqn.network")  # says in one line that torch is missing
        from routepack_opt.residency.dqn.checkpoint import load_checkpoint

        loaded = load_checkpoint(self.checkpoint)
        self._network = loaded.network
        if self.margin is None:
            self.margin = loaded.settings.margin

    def start(self, scene: Scene, start_layout: Layout, profile: NDArray[np.float64]) -> Layout:
        """The start layout."""
        self._maker = CandidateMaker(scene)
        return start_layout

    def decide(self, view: PolicyView) -> list[Edit]:
        """The legal candidate with the largest advantage, if that is above the margin."""
        candidates = self._maker.make(view)
        scores = np.where(candidates.legal, self._network.scores(candidates.features), -np.inf)
        row = int(np.argmax(scores))
        if scores[row] <= self.margin:
            return []
        self._maker.chosen(candidates, row, view.window)
        return [candidates.edit(row)]
