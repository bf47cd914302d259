"""One case: solve it, and let the independent checker re-derive every claim before it is believed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import Infeasible, VerificationError
from routepack_opt.models.rows import RowsProblem, solve_rows
from routepack_opt.verify.facts import Facts, Rules
from routepack_opt.verify.layout import check_layout
from routepack_opt.verify.placement import rank_load_bound
from routepack_opt.verify.rows import check_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.certify.cases import Case

Record = dict[str, Any]

CLOSED = ("certified", "solver-proved", "infeasible")
_NO_RULES = Rules(1, 1, 1, None, False, None, False, None)


@dataclass(frozen=True)
class Settings:
    """How cases are certified: DP ranks (cells of a row), seconds for each, EP ranks of the placement, seed."""

    dp: int
    time_limit_s: float
    ep: int | None = None
    seed: int = 0


def certify_case(case: Case, settings: Settings) -> Record:
    """Solve one case and re-check the answer in integers.

    Returns
    -------
    One JSON object. ``rows_status`` is "certified", "solver-proved" or "best-known", or "infeasible" (``error`` says
    what would do) or "failed" (a claim was refuted by the checker; nothing is claimed then). ``rung`` names what
    closed it, ``packing`` the cell r * D + d of every sample.
    """
    record = blank_record(case, settings)
    start = time.perf_counter()
    over = np.flatnonzero(case.lengths > case.cap)
    try:
        if over.size:
            first, worst = int(over[0]), int(case.lengths.max())
            length = int(case.lengths[first])
            raise Infeasible(f"sample {first}: length {length} exceeds the cap {case.cap}; a cap of {worst} would do")
        problem = RowsProblem(case.lengths, np.ones_like(case.lengths), settings.dp, case.cap)
        result = solve_rows(problem, time_limit_s=settings.time_limit_s, seed=settings.seed)
    except Infeasible as error:
        record.update(rows_status="infeasible", error=str(error), seconds=time.perf_counter() - start)
        return record
    record.update(
        rows=result.rows,
        rows_lower_bound=result.lower_bound,
        rows_status=result.status,
        rung=result.rung,
        seconds=time.perf_counter() - start,
        certificate=result.certificate,
        packing=_packing(result.cells, case.lengths.size),
    )
    start = time.perf_counter()
    _recheck(record, case)
    record["check_s"] = time.perf_counter() - start
    if settings.ep is not None and case.load is not None:
        record["placement"] = certify_placement(case.load, settings.ep, settings.seed)
        record["placement_gap"] = record["placement"]["gap"]
    return record


def blank_record(case: Case, settings: Settings) -> Record:
    """The record of a case nothing is known of."""
    return {
        "name": case.name,
        "source": case.source,
        "sha256": case.sha256,
        "samples": int(case.lengths.size),
        "dp": settings.dp,
        "token_cap": case.cap,
        "ep": settings.ep,
        "time_limit_s": settings.time_limit_s,
        "seed": settings.seed,
        "rows": None,
        "rows_lower_bound": None,
        "rows_status": "failed",
        "rung": "",
        "seconds": 0.0,
        "certificate": None,
        "packing": None,
    }


def _packing(cells: Sequence[Sequence[int]], num_samples: int) -> list[int]:
    """Cell of each sample."""
    packing = [-1] * num_samples
    for cell, members in enumerate(cells):
        for sample in members:
            packing[sample] = cell
    return packing


def _recheck(record: Record, case: Case) -> None:
    """Hold the claims against the checker; what it refutes is withdrawn and said."""
    try:
        check_record(record, case.lengths)
        return
    except VerificationError as error:
        record["error"] = f"refuted by the checker: {error}"
    try:  # the layout may stand though the certificate fell
        volume = _volume_certificate(case.lengths, case.cap)
        bound = -(-volume["cells"] // record["dp"])
        met = bound == record["rows"]
        status, rung = ("certified", "volume") if met else ("best-known", "")
        record.update(rows_lower_bound=bound, rows_status=status, rung=rung, certificate=volume)
        check_record(record, case.lengths)
    except VerificationError:
        record.update(rows=None, rows_lower_bound=None, rows_status="failed", certificate=None, packing=None)


def _volume_certificate(lengths: NDArray[np.int64], cap: int) -> dict[str, Any]:
    distinct = np.unique(lengths).tolist()
    cells = -(-int(lengths.sum()) // cap)
    return {"kind": "volume", "cap": cap, "table": [[t, t] for t in distinct], "max_cell": cap, "cells": cells}


def check_record(record: Record, lengths: NDArray[np.int64]) -> list[str]:
    """Re-derive packing, row count and certificate of a record with the checker of plan.json.

    Raises
    ------
    VerificationError
        Names the first broken claim.
    """
    rows, dp = record["rows"], record["dp"]
    tokens = [int(t) for t in lengths]
    cells: list[list[list[int]]] = [[[] for _ in range(dp)] for _ in range(rows)]
    if len(record["packing"]) != len(tokens):
        raise VerificationError("packing", f"{len(record['packing'])} cells for {len(tokens)} samples")
    for sample, cell in enumerate(record["packing"]):
        if not 0 <= cell < rows * dp:
            raise VerificationError("packing", f"sample {sample} is in cell {cell} of {rows * dp}")
        cells[cell // dp][cell % dp].append(sample)
    plan = {
        "rows": rows,
        "rows_lower_bound": record["rows_lower_bound"],
        "rows_status": record["rows_status"],
        "cells": cells,
        "cell_tokens": [[sum(tokens[i] for i in cell) for cell in row] for row in cells],
        "total_tokens": sum(tokens),
        "constraints": {},
        "certificates": {"rows": record["certificate"]},
    }
    nothing = np.zeros((len(tokens), 1, 1), dtype=np.int32)
    shards = [list(range(dp))]
    facts = Facts(
        rows, dp, 1, shards, record["token_cap"], _NO_RULES, tokens, tokens, nothing, nothing[0], None, [], [], "shard"
    )
    return check_layout(plan, facts) + check_rows(plan, facts)


def certify_placement(load: NDArray[np.int64], ep: int, seed: int) -> dict[str, Any]:
    """The placement of a window's total load and its proved gap; bounds re-derived by the checker.

    Returns
    -------
    ``max_over_mean``, ``bound_over_mean`` and ``gap`` (means over layers that carry load), ``layers``,
    ``layers_certified`` (reached = bound) and ``seconds``.
    """
    from routepack_opt.models.moves import contiguous_ranks, num_moved
    from routepack_opt.models.placement import check_ranks, placement_summary, rank_loads, solve_placement

    start = time.perf_counter()
    result = solve_placement(load, ep, seed=seed)
    seconds = time.perf_counter() - start
    rank_of = check_ranks(result.rank_of, load.shape, ep, "placement")
    reached = rank_loads(load, rank_of, ep).max(axis=1)
    proved = np.array([rank_load_bound([int(a) for a in row], ep) for row in load], dtype=np.int64)
    bound = np.minimum(result.bound, proved)
    moved = num_moved(rank_of, contiguous_ranks(len(load), load.shape[1], ep))
    summary = placement_summary(load, ep, reached, bound, result.kind, moved)
    met = int((reached == bound).sum())
    kept = {key: summary[key] for key in ("max_over_mean", "bound_over_mean", "gap", "moved")}
    return {**kept, "layers": len(load), "layers_certified": met, "seconds": seconds}


def warmup(placement: bool) -> None:
    """Compile kernels and load solvers, so that the first case does not pay for it."""
    from routepack_opt.models import rows
    from routepack_opt.solvers import highs

    rows.warmup()
    highs.new_highs()  # loads the library
    if placement:
        from routepack_opt.models import placement as placement_model

        placement_model.warmup()
