"""What came out of a run: cases by the rung that closed them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from routepack_opt.certify.one import Record

STATUSES = ("certified", "solver-proved", "best-known", "infeasible", "failed")


@dataclass(frozen=True)
class Rung:
    """The cases that one rung closed, or that stayed open in one way."""

    status: str
    rung: str
    num_cases: int
    median_s: float
    max_s: float


def by_rung(records: Sequence[Record]) -> list[Rung]:
    """One entry for each pair of status and rung, closed ones first, most cases first."""
    groups: dict[tuple[str, str], list[float]] = {}
    for record in records:
        groups.setdefault((record["rows_status"], record["rung"]), []).append(record["seconds"])
    rungs = [Rung(*key, len(seconds), median(seconds), max(seconds)) for key, seconds in groups.items()]
    return sorted(rungs, key=lambda r: (STATUSES.index(r.status), -r.num_cases, r.rung))


def totals(records: Sequence[Record]) -> dict[str, Any]:
    """Counts by status, seconds in solvers, and rows above the bound of open cases."""
    count = Counter(record["rows_status"] for record in records)
    open_rows = [r["rows"] - r["rows_lower_bound"] for r in records if r["rows_status"] == "best-known"]
    result: dict[str, Any] = {"cases": len(records)}
    result.update((status.replace("-", "_"), count[status]) for status in STATUSES)
    result["seconds"] = sum(record["seconds"] for record in records)
    result["open_rows_above_bound"] = sum(open_rows)
    gaps = [record["placement_gap"] for record in records if record.get("placement_gap") is not None]
    if gaps:
        result["placement_gap"] = sum(gaps) / len(gaps)
    return result
