"""Experts move into the tensors that exist, byte for byte, or every rank refuses to go on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from harness import RankFailure, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

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


def test_a_disagreement_raises_everywhere_and_changes_nothing() -> None:
    kinds = ["placement", "version", "tensors", "bijection", "budget", "tiny budget"]
    for rank, results in enumerate(run_ranks(f"{WORKERS}:disagreements", 4, {"ep": 2, "shards": 2, "kinds": kinds})):
        for what, result in zip(kinds, results, strict=True):
            own = what in ("version", "bijection", "tiny budget") and rank == 2
            assert result["error"] == ("InvalidInput" if own else "PlacementDisagreement"), (what, result)
            assert own or "rank 2" in result["message"]
            assert result["untouched"] and result["version"] == 0
            assert result["afterwards"] and result["version_after"] == 1


@pytest.mark.parametrize(("ep", "shards"), [(4, 1), (2, 2)])
def test_an_exception_on_one_rank_stops_all(ep: int, shards: int) -> None:
    results = run_ranks(f"{WORKERS}:failure", 4, {"ep": ep, "shards": shards, "what": "raise", "timeout_s": 15})
    for result in results:
        assert result["error"] == "MovementFailed" and "rank 1: ValueError: no more rounds" in result["message"]
        assert result["broken"] and "restart from the last checkpoint" in result["refused"]
        assert "\n" not in result["message"]


@pytest.mark.parametrize("what", ["hang", "absent"])
@pytest.mark.parametrize(("ep", "shards"), [(4, 1), (2, 2)])
def test_a_rank_that_hangs_is_not_waited_for(ep: int, shards: int, what: str) -> None:
    kwargs = {"ep": ep, "shards": shards, "what": what, "timeout_s": 1.0}
    for result in run_ranks(f"{WORKERS}:failure", 4, kwargs, timeout_s=30):
        assert result["error"] == "MovementFailed" and result["broken"]
        assert "restart from the last checkpoint" in result["refused"]


@pytest.mark.parametrize(("ep", "shards"), [(4, 1), (2, 2)])
def test_a_rank_that_dies_takes_no_one_along_in_silence(ep: int, shards: int, tmp_path: Path) -> None:
    kwargs = {"ep": ep, "shards": shards, "what": "die", "timeout_s": 15, "folder": str(tmp_path)}
    with pytest.raises(RankFailure) as caught:
        run_ranks(f"{WORKERS}:failure", 4, kwargs)
    assert caught.value.rank == 1
    survivors = sorted(tmp_path.glob("rank*.json"))
    assert [path.name for path in survivors] == ["rank0.json", "rank2.json", "rank3.json"]
    for path in survivors:
        result = json.loads(path.read_text())
        assert result["error"] == "MovementFailed" and result["broken"]


@pytest.mark.parametrize(("ep", "shards"), [(4, 1), (2, 2)])
def test_nothing_travels_when_the_placement_does_not_change(ep: int, shards: int) -> None:
    for result in run_ranks(f"{WORKERS}:unchanged", 4, {"ep": ep, "shards": shards}):
        assert result["messages"] == result["messages_inside"] == 0
        assert result["version"] == 2 and result["right"]
        first, second = result["reports"]
        assert first["planned_bytes"] == first["moved_bytes"] == first["chunks"] == first["peak_extra_bytes"] == 0
        assert second["planned_bytes"] == second["moved_bytes"] == second["rounds"] == 0
        assert second["chunks"] > 0 and 0 < second["peak_extra_bytes"] <= 64


def test_torch_allocates_no_more_than_the_budget() -> None:
    budget, width = 40_000, 30_000
    records = 4 * 400 + 4096  # agreement, and maps of a few hundred bytes
    kwargs = {"ep": 4, "shards": 1, "chunk_bytes": budget, "width": width}
    for result in run_ranks(f"{WORKERS}:allocations", 4, kwargs):
        assert result["moved_bytes"] == result["planned_bytes"] == 4 * width * sum(result["moved_experts"])
        assert result["peak_extra_bytes"] <= result["peak"] <= budget + records
        assert result["chunks"] > 3
