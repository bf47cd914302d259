"""Weights of the fast map for baselines with several copies, tuned for them (docs/residency-policies.md)."""

from __future__ import annotations

from routepack_opt.residency.mapping.mapping import MapWeights

BALANCED = MapWeights(queue=0.1, path=0.1, bank=0.1, streaming=0.5, peak=8.0)
