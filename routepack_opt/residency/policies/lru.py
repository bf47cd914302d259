"""LRU residency: replicas for the experts used last, those with more tokens first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.residency.policies.cached_replicas import CachedReplicas

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import PolicyView


@dataclass
class Lru(CachedReplicas):
    """Rank: tokens in the last window; an expert without any ranks by how long ago it was used."""

    name: str = "lru"

    def rank(self, view: PolicyView, layer: int) -> NDArray[np.float64]:
        """See the class."""
        tokens = view.demand[layer].sum(axis=1).astype(np.float64)
        age = view.window - view.hotness.last_used[layer]
        return np.asarray(np.where(tokens > 0, tokens, 1.0 / (1.0 + age)))
