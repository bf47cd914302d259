"""One judge for all: every answer is scored by the exact evaluator and checked by the independent verifier."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt import __version__
from routepack_opt.compare.case import PLAIN
from routepack_opt.compare.heuristics import atoms_and_rows
from routepack_opt.cost import rank_loads, score
from routepack_opt.models.layout_bounds import layout_bound
from routepack_opt.models.placement import placement_bounds
from routepack_opt.models.rows import solve_rows
from routepack_opt.plan import Plan
from routepack_opt.report.gains import layout_figures

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.compare.case import Answer, Case
    from routepack_opt.models.layout_bounds import LayoutBound
    from routepack_opt.models.rows import RowsResult

_ROWS_TIME_S = 2.0


@dataclass(frozen=True, eq=False)
class Judge:
    """What is known of a case before any method runs, and the measuring of answers."""

    case: Case
    bounds: dict[int, LayoutBound] = field(default_factory=dict)

    @cached_property
    def rows(self) -> RowsResult:
        """Proved least number of rows."""
        return solve_rows(atoms_and_rows(self.case)[1], time_limit_s=_ROWS_TIME_S)

    @cached_property
    def placement(self) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Bound of each layer on the fullest rank, and its kind."""
        return placement_bounds(self.case.window.total_load, self.case.topology.ep)

    def layout(self, num_rows: int) -> LayoutBound:
        """Bound on the slowest shard for every placement and every layout of that many rows."""
        if num_rows not in self.bounds:
            case = self.case
            atoms, _ = atoms_and_rows(case)
            self.bounds[num_rows] = layout_bound(
                atoms, num_rows, self.placement[0], case.topology, case.token_cap, case.cost, PLAIN
            )
        return self.bounds[num_rows]

    def record(self, answer: Answer) -> dict[str, Any]:
        """The measured part of a record; raises VerificationError where the answer breaks a rule."""
        case = self.case
        plan = answer.plan or self._plan(answer)
        plan.verify(case.window)
        figures = layout_figures(
            case.window, plan.cells, plan.logical_to_slot, case.topology, case.token_cap, case.cost
        ).to_json()
        bound = max(plan.bound, min(self.layout(plan.rows).value, plan.score.slowest_shard))
        ranks = plan.logical_to_slot // case.topology.experts_per_rank(case.window.num_experts)
        return {
            "score": list(plan.score),
            "bound": bound,
            "gap": gap(plan.score.slowest_shard, bound),
            "rows": plan.rows,
            "rows_status": plan.rows_status,
            "rows_lower_bound": plan.rows_lower_bound,
            "eta_ep": figures["eta_ep"],
            "figures": figures,
            "row_peaks": self._row_peaks(plan),
            "num_shards": case.topology.num_shards,
            "fixed_bound": answer.fixed_bound,
            "placement": hashlib.sha256(np.ascontiguousarray(ranks).tobytes()).hexdigest()[:16],
            "proposals": answer.proposals,
            "verified": True,
            "notes": list(answer.notes),
        }

    def _row_peaks(self, plan: Plan) -> list[int]:
        """Assignments of the fullest rank, summed over layers, of every row."""
        loads = rank_loads(self.case.window, plan.cells, plan.logical_to_slot, plan.topology)
        return [int(peak) for peak in loads.max(axis=(1, 3)).sum(axis=1)]

    def _plan(self, answer: Answer) -> Plan:
        """A plan around an answer, with the proofs that hold for every answer."""
        case, window, rows = self.case, self.case.window, self.rows
        found = score(window, answer.cells, answer.logical_to_slot, case.topology, case.token_cap, case.cost)
        bounds, kinds = self.placement
        slots = np.asarray(answer.logical_to_slot, dtype=np.int64)
        ranks = slots // case.topology.experts_per_rank(window.num_experts)
        per_rank = np.zeros((window.num_layers, case.topology.ep), dtype=np.int64)
        np.add.at(per_rank, (np.arange(window.num_layers)[:, None], ranks), window.total_load)
        home = np.arange(window.num_experts) // case.topology.experts_per_rank(window.num_experts)
        bound = self.layout(len(answer.cells))
        closed = len(answer.cells) == rows.lower_bound
        value = min(bound.value, found.slowest_shard)
        return Plan(
            window={
                "samples": window.num_samples,
                "layers": window.num_layers,
                "experts": window.num_experts,
                "sha256": window.sha256,
                "counts": window.counts,
            },
            topology=case.topology,
            token_cap=case.token_cap,
            cost=case.cost,
            constraints=PLAIN,
            rows=len(answer.cells),
            rows_lower_bound=rows.lower_bound,
            rows_status="certified" if closed else "best-known",
            cells=tuple(tuple(tuple(int(i) for i in cell) for cell in row) for row in answer.cells),
            cell_tokens=tuple(tuple(int(window.lengths[list(cell)].sum()) for cell in row) for row in answer.cells),
            total_tokens=int(window.lengths.sum()),
            logical_to_slot=slots,
            score=found,
            seed_score=None,
            seed_rows=None,
            bound=value,
            gap=gap(found.slowest_shard, value),
            moved_experts=(ranks != home).sum(axis=1).astype(np.int64),
            certificates={
                "rows": rows.certificate,
                "placement": [
                    {"bound": int(b), "kind": k, "reached": int(r)}
                    for b, k, r in zip(bounds, kinds, per_rank.max(axis=1), strict=True)
                ],
                "layout": bound.to_json(),
            },
            seed=0,
            version=__version__,
        )


def gap(value: float, bound: float) -> float:
    """(value - bound) / bound, a fraction; the value itself where the bound is 0."""
    return (value - bound) / bound if bound > 0 else value
