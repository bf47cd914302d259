"""The residency comparison: models x phases x seeds, each with all policies, on several processes, resumable."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from routepack_opt import __version__
from routepack_opt.errors import InvalidInput
from routepack_opt.residency.comparison.case import Case, Record, bound_key, run_case, settings_of
from routepack_opt.residency.comparison.sweeps import Table, tables_of
from routepack_opt.residency.control.policy_registry import default_policies, find_policies
from routepack_opt.residency.machine.moe_models import PAPER_MODELS, moe_model
from routepack_opt.residency.machine.package import Package

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Event
    from pathlib import Path

    from routepack_opt.residency.simulator.simulate_window import Level

logger = logging.getLogger(__name__)

PHASES = ("prefill", "decode")
NUM_WINDOWS = 256
NUM_BOUNDS = 8
MAX_SEEDS = 1000


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    Parameters
    ----------
    package
        Preset or TOML file.
    models, phases, policies
        Names.
    windows
        Measured windows of every workload; the profile (a ninth of them) comes before.
    seeds
        How many workload seeds, from 0.
    levels
        Of the main table.
    sweeps
        See :func:`~routepack_opt.residency.comparison.sweeps.tables_of`.
    bounds
        Windows of each workload that get a bound, spread evenly.
    data
        Folder of recorded traces; None: where ``data_folder`` looks.
    """

    package: str = "paper"
    models: tuple[str, ...] = PAPER_MODELS
    phases: tuple[str, ...] = PHASES
    policies: tuple[str, ...] = field(default_factory=default_policies)
    windows: int = NUM_WINDOWS
    seeds: int = 1
    levels: tuple[Level, ...] = ("stage", "event")
    sweeps: bool = True
    bounds: int = NUM_BOUNDS
    data: str | None = None

    def __post_init__(self) -> None:
        """Refuse what would fail later."""
        for name, value in (("windows", self.windows), ("seeds", self.seeds)):
            if value < 1:
                raise InvalidInput(f"{name}: {value} is below 1")
        if self.seeds > MAX_SEEDS:
            raise InvalidInput(f"seeds: {self.seeds}; expected at most {MAX_SEEDS}")
        for phase in self.phases:
            if phase not in PHASES:
                raise InvalidInput(f"phase: {phase!r} is unknown; expected prefill or decode")
        for entry in find_policies(self.policies):
            reason = entry.missing()
            if reason is not None:
                raise InvalidInput(f"policy: {entry.name!r} cannot run here: {reason}")
        for model in self.models:
            moe_model(model)
        _ = self.machine  # read it now

    @cached_property
    def machine(self) -> Package:
        """The package."""
        return Package.load(self.package)

    @cached_property
    def fingerprint(self) -> str:
        """Of version and machine, whatever its file is called: results of another one are not taken up."""
        return hashlib.sha256(f"{__version__}\n{replace(self.machine, where='')!r}".encode()).hexdigest()[:10]

    def tables(self) -> list[Table]:
        """What runs on each workload."""
        return tables_of(self.policies, self.levels, self.machine, sweeps=self.sweeps)

    def cases(self) -> list[Case]:
        """Workloads, first seed first, long ones first."""
        found = [Case(m, p, seed) for m in self.models for p in self.phases for seed in range(self.seeds)]
        size = {name: moe_model(name) for name in self.models}
        return sorted(found, key=lambda c: (c.seed, -size[c.model].num_layers * size[c.model].num_experts))

    def keys(self, case: Case) -> list[str]:
        """Of all records of a case."""
        bounds = [bound_key(self, case)] if self.bounds else []
        return [setting.key(self, case) for setting in settings_of(self, case)] + bounds


def run_comparison(
    comparison: Comparison,
    *,
    journal: Path | None = None,
    jobs: int = 1,
    records: list[Record] | None = None,
) -> list[Record]:
    """Run what the journal does not hold yet.

    Parameters
    ----------
    comparison
        What to run.
    journal
        File of one record a line; appended to by the workers as runs end, and read again at the end.
    jobs
        Worker processes; 1 runs here.
    records
        Filled as workloads end, so that an interrupted caller has what is done.

    Raises
    ------
    InvalidInput
        A workload that cannot be made.
    """
    from routepack_opt.compare.experiment import read_journal

    result: list[Record] = [] if records is None else records
    known = {} if journal is None else {record["key"]: record for record in read_journal(journal)}
    todo = []
    for case in comparison.cases():
        keys = comparison.keys(case)
        done = [known[key] for key in keys if key in known]
        result.extend(done)
        if len(done) < len(keys):
            todo.append(case)
    if not todo:
        return result
    if journal is not None:
        _end_line(journal)
    path, held = None if journal is None else str(journal), frozenset(known)
    begun = time.perf_counter()
    try:
        work = _here if jobs == 1 or len(todo) == 1 else _processes
        for number, (case, made) in enumerate(work(comparison, todo, held, path, min(jobs, len(todo))), 1):
            result.extend(made)
            spent = time.perf_counter() - begun
            left = spent / number * (len(todo) - number)
            logger.info(
                "%s %s seed %d: %d records; %d of %d workloads, %.0f s, about %.0f s left",
                case.model, case.phase, case.seed, len(made), number, len(todo), spent, left,
            )  # fmt: skip
    finally:
        if journal is not None:
            _take_up(journal, comparison, result)
    return result


def _end_line(journal: Path) -> None:
    """After a line that a crash cut short, begin a new one."""
    if journal.exists() and journal.stat().st_size and journal.read_bytes()[-1:] != b"\n":
        with open(journal, "a", encoding="utf-8") as stream:
            stream.write("\n")


def _take_up(journal: Path, comparison: Comparison, result: list[Record]) -> None:
    """Records that interrupted workers wrote."""
    from routepack_opt.compare.experiment import read_journal

    wanted = {key for case in comparison.cases() for key in comparison.keys(case)}
    wanted -= {record["key"] for record in result}
    result.extend(record for record in read_journal(journal) if record["key"] in wanted)


_Done = tuple[Case, list[Record]]


def _here(
    comparison: Comparison, todo: list[Case], known: frozenset[str], journal: str | None, jobs: int
) -> Iterator[_Done]:
    for case in todo:
        yield case, run_case(comparison, case, known, journal, lambda: False)


def _processes(
    comparison: Comparison, todo: list[Case], known: frozenset[str], journal: str | None, jobs: int
) -> Iterator[_Done]:
    context = multiprocessing.get_context("spawn")  # threads of the parent must not be copied half-way
    stop = context.Event()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers are as many as cores: none needs threads of its own
    with ProcessPoolExecutor(jobs, context, initializer=_set_up, initargs=(stop,)) as pool:
        futures = {pool.submit(_run, comparison, case, known, journal): case for case in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


_stop: Event | None = None


def _set_up(stop: Event) -> None:
    """In a worker: Ctrl-C is the parent's to handle; it ends after its current run, or with its parent."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(comparison: Comparison, case: Case, known: frozenset[str], journal: str | None) -> list[Record]:
    stopped: Callable[[], Any] = (lambda: False) if _stop is None else _stop.is_set
    return run_case(comparison, case, known, journal, stopped)
