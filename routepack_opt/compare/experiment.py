"""The experiment: cases x methods x budgets x seeds, one after another, each result kept as soon as it is known."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.compare.judge import Judge, gap
from routepack_opt.errors import RoutePackError, VerificationError
from routepack_opt.files import read_text
from routepack_opt.planner import warmup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from routepack_opt.compare.case import Case
    from routepack_opt.compare.methods import Method

logger = logging.getLogger(__name__)

Record = dict[str, Any]
_NOTHING = ("score", "bound", "gap", "rows", "rows_status", "eta_ep")


@dataclass(frozen=True)
class Experiment:
    """What to run."""

    cases: Sequence[Case]
    methods: Sequence[Method]
    budgets: Sequence[float]
    seeds: Sequence[int]

    @property
    def num_runs(self) -> int:
        """Records it will have."""
        return len(self.cases) * len(self.methods) * len(self.budgets) * len(self.seeds)

    @property
    def search_s(self) -> float:
        """Seconds the searching methods will use, about."""
        searching = sum(method.searches for method in self.methods)
        return len(self.cases) * searching * len(self.seeds) * sum(self.budgets)


def run_experiment(
    experiment: Experiment,
    *,
    journal: Path | None = None,
    on_record: Callable[[Record], None] | None = None,
    records: list[Record] | None = None,
) -> list[Record]:
    """Run what the journal does not hold yet.

    Parameters
    ----------
    journal
        A file of one record a line, appended to; records in it are not made again.
    on_record
        Called after each new record.
    records
        Filled as results come, so that an interrupted caller has what is done.

    Returns
    -------
    One record per case, method, budget and seed, in this order, with the bounds of all methods shared
    (:func:`share_bounds`). A method that finds no layout, or whose layout is wrong, has ``score`` None and an
    ``error``.
    """
    known = {} if journal is None else {record["key"]: record for record in read_journal(journal)}
    result = [] if records is None else records
    warmup()
    for method in experiment.methods:
        method.prepare()
    judges = {case: Judge(case) for case in experiment.cases}
    for case, method, budget_s, seed in _combinations(experiment):
        key = case.key(method.name, budget_s, seed)
        record = known.get(key)
        if record is None:
            record = {"key": key, **_run_one(judges[case], method, budget_s, seed)}
            if journal is not None:
                append_record(journal, record)
            if on_record is not None:
                on_record(record)
        result.append(record)
    share_bounds(result)
    return result


def _combinations(experiment: Experiment) -> Iterator[tuple[Case, Method, float, int]]:
    for case in experiment.cases:
        for method in experiment.methods:
            for budget_s in experiment.budgets:
                for seed in experiment.seeds:
                    yield case, method, budget_s, seed


def _run_one(judge: Judge, method: Method, budget_s: float, seed: int) -> Record:
    case = judge.case
    record: Record = {"window": case.name, "method": method.name, "seed": seed, "budget_s": budget_s}
    record["searches"] = method.searches
    start = time.perf_counter()
    try:
        answer = method.run(case, budget_s, seed)
        record["seconds"] = time.perf_counter() - start
        record.update(judge.record(answer))
    except RoutePackError as error:
        record.setdefault("seconds", time.perf_counter() - start)
        record.update(dict.fromkeys(_NOTHING))
        record["verified"] = False
        record["error"] = " ".join(str(error).split())
        record["broken"] = isinstance(error, VerificationError)
        if record["broken"]:
            logger.warning("%s on %s: %s", method.name, case.name, record["error"])
    return record


def append_record(path: Path, record: Record) -> None:
    """One more line; after a line that an interruption cut short, a new one is begun first."""
    whole = not path.exists() or not path.stat().st_size or path.read_bytes()[-1:] == b"\n"
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(("" if whole else "\n") + json.dumps(record, allow_nan=False) + "\n")


def read_journal(path: Path) -> list[Record]:
    """Records of a journal; a line cut short by an interruption is skipped."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            logger.warning("%s: line %d is not a whole record, it is run again", path, number)
            continue
        if isinstance(record, dict) and isinstance(record.get("key"), str):
            records.append(record)
    return records


def share_bounds(records: list[Record]) -> None:
    """Add to each record what any method proved: ``best_bound`` and ``best_gap``, ``fixed_gap`` for its placement.

    A bound of one plan holds for the same window and number of rows; one proved for a placement only for records with
    that placement as well.
    """
    best: dict[tuple[Any, ...], float] = {}
    fixed: dict[tuple[Any, ...], float] = {}
    for record in records:
        if record["score"] is None:
            continue
        key = (record["window"], record["rows"])
        best[key] = max(best.get(key, 0.0), record["bound"])
        if record.get("fixed_bound") is not None:
            own = (*key, record["placement"])
            fixed[own] = max(fixed.get(own, 0.0), record["fixed_bound"])
    for record in records:
        if record["score"] is None:
            continue
        key = (record["window"], record["rows"])
        value = record["score"][0]
        record["best_bound"] = min(best[key], value)
        record["best_gap"] = gap(value, record["best_bound"])
        proved = max(fixed.get((*key, record["placement"]), 0.0), best[key])
        record["fixed_gap"] = gap(value, min(proved, value))
