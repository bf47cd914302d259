"""Experts move into the tensors that exist, byte for byte, or every rank refuses to go on."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from harness import run_ranks

WORKERS = "movement_workers"
pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("ep", "shards"), [(4, 1), (2, 2), (2, [[3, 0], [1, 2]])])
def test_random_permutations_land_where_they_should(ep: int, shards: Any) -> None:
    budgets = [1 << 20, 64, 200, 33, 1000, 4096]
    results = run_ranks(f"{WORKERS}:random_moves", 4, {"ep": ep, "shards": shards, "seed": ep, "chunk_bytes": budgets})
    for rank in results:
        for budget, move in zip(budgets, rank, strict=True):
            assert move["right"] and move["published"] and move["in_place"]
            assert move["moved_bytes"] == move["planned_bytes"] > 0
            assert move["sent_bytes"] == move["rank_planned_bytes"]
            assert 0 < move["peak_extra_bytes"] <= budget
