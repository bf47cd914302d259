"""Many cases: what the journal holds is taken over, the rest is solved by workers and kept as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from routepack_opt.certify.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from routepack_opt.certify.cases import Case
    from routepack_opt.certify.journal import Journal
    from routepack_opt.certify.one import Record, Settings


def certify_all(
    cases: Sequence[Case],
    settings: Settings,
    *,
    journal: Journal | None = None,
    jobs: int = 1,
    ray_address: str | None = None,
    on_record: Callable[[Record], None] | None = None,
    records: list[Record] | None = None,
) -> list[Record]:
    """Certify every case.

    Parameters
    ----------
    journal
        Results of earlier runs, and where new ones go.
    jobs
        Worker processes. They are spawned, so a script that calls this needs the usual ``if __name__ == "__main__"``.
    ray_address
        Run on this Ray cluster instead.
    on_record
        Called with each record once it is kept.
    records
        Filled as results come, so that an interrupted caller has what is done.

    Returns
    -------
    One record a case: those taken over first, then in the order they were finished.
    """
    result = [] if records is None else records
    tasks: list[Task] = []
    for case in cases:
        known = None if journal is None else journal.find(case, settings)
        if known is None:
            tasks.append(Task(case, settings))
        else:
            result.append(known)
    if not tasks:
        return result
    if ray_address is not None:
        from routepack_opt.certify.ray_workers import run_ray

        finished = run_ray(tasks, settings, ray_address)
    else:
        from routepack_opt.certify.workers import run_local

        finished = run_local(tasks, settings, jobs)
    for record in finished:
        if journal is not None:
            journal.append(record)
        result.append(record)
        if on_record is not None:
            on_record(record)
    return result
