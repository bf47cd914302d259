"""Weights of the fast map for baselines with several copies, tuned for them (docs/residency-policies.md)."""

from __future__ import annotations

from routepack_opt.residency.mapping import MapWeights

BALANCED = MapWeights(queue=1.0, path=1.0, bank=1.0, streaming=1.0, peak=3.0)
