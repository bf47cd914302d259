"""Replay memory: the last transitions of every kind of edit, drawn evenly over kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.dqn.candidates import KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.dqn.candidates import Candidates


@dataclass
class Transition:
    """One window: its candidates, the row chosen, the reward; ``after`` is None at the end of an episode."""

    before: Candidates
    row: int
    reward: float
    after: Candidates | None = None


@dataclass(frozen=True)
class Batch:
    """Transitions padded to the most candidates among them.

    Parameters
    ----------
    features, next_features
        float32 [B, K, F].
    legal, next_legal
        [B, K].
    rows, rewards, ended
        int64, float32 and bool [B].
    """

    features: NDArray[np.float32]
    legal: NDArray[np.bool_]
    rows: NDArray[np.int64]
    rewards: NDArray[np.float32]
    next_features: NDArray[np.float32]
    next_legal: NDArray[np.bool_]
    ended: NDArray[np.bool_]


class ReplayMemory:
    """The last transitions of each kind of edit: copies, which outnumber all else, leave the others their room."""

    def __init__(self, capacity: int) -> None:
        """``capacity`` of all kinds together; each gets an even share, at least 1."""
        self._share = max(1, capacity // len(KINDS))
        self._kinds: dict[str, list[Transition]] = {}
        self._next: dict[str, int] = {}

    def __len__(self) -> int:
        """Transitions held."""
        return sum(len(rows) for rows in self._kinds.values())

    def add(self, transition: Transition) -> None:
        """Take one in; the oldest of its kind goes when there are too many."""
        kind = transition.before.kind(transition.row)
        rows, at = self._kinds.setdefault(kind, []), self._next.get(kind, 0)
        if len(rows) < self._share:
            rows.append(transition)
        else:
            rows[at] = transition
        self._next[kind] = (at + 1) % self._share

    def draw(self, count: int, rng: np.random.Generator) -> Batch:
        """``count`` transitions, with replacement: a kind, then one of it, all alike."""
        kinds = list(self._kinds.values())
        drawn = []
        for kind in rng.integers(len(kinds), size=count):
            drawn.append(kinds[kind][int(rng.integers(len(kinds[kind])))])
        features, legal = _padded([t.before for t in drawn])
        next_features, next_legal = _padded([t.after if t.after is not None else t.before for t in drawn])
        return Batch(
            features, legal, np.array([t.row for t in drawn]), np.array([t.reward for t in drawn], dtype=np.float32),
            next_features, next_legal, np.array([t.after is None for t in drawn]),
        )  # fmt: skip


def _padded(sets: list[Candidates]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    most = max(len(one) for one in sets)
    features = np.zeros((len(sets), most, sets[0].features.shape[1]), dtype=np.float32)
    legal = np.zeros((len(sets), most), dtype=np.bool_)
    for i, one in enumerate(sets):
        features[i, : len(one)] = one.features
        legal[i, : len(one)] = one.legal
    return features, legal
