"""plan_window: place experts, count rows, seed, anneal and co-refine, inside a time budget."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt import __version__
from routepack_opt.constraints import Constraints
from routepack_opt.cost import CostModel, Score, score
from routepack_opt.errors import InvalidInput
from routepack_opt.models.atoms import AtomSet, build_atoms
from routepack_opt.models.layout import averaging_bound, canonical_ranks, cells_from_assignment
from routepack_opt.plan import Plan
from routepack_opt.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from routepack_opt.models.placement import PlacementResult
    from routepack_opt.models.rows import RowsProblem, RowsResult
    from routepack_opt.solvers.annealing.chain import Chain, ChainProblem
    from routepack_opt.window import Window

logger = logging.getLogger(__name__)

_STEP_MODE_CHAINS = 2  # fixed, so that a plan does not depend on the cores of the machine it is made on
_COMPILE_NOTICE_S = 1.5


@dataclass
class _Timer:
    """Seconds by stage."""

    start: float = field(default_factory=time.perf_counter)
    stages: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.stages[name] = self.stages.get(name, 0.0) + now - self.last
        self.last = now

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start


def warmup() -> float:
    """Compile (once; cached on disk) and load all kernels of the planner; returns the seconds it took.

    ``plan_window`` calls it before its clock starts, so calling it is only needed to choose the moment.
    """
    from routepack_opt.models import placement, rows
    from routepack_opt.solvers.annealing import chain

    start = time.perf_counter()
    notice = threading.Timer(
        _COMPILE_NOTICE_S, logger.warning, ("compiling CPU kernels, once; they are cached on disk",)
    )
    notice.daemon = True
    notice.start()
    try:
        rows.warmup()
        placement.warmup()
        chain.warmup()
    finally:
        notice.cancel()
    return time.perf_counter() - start


_warm = threading.Event()


def _ensure_warm() -> None:
    if not _warm.is_set():
        warmup()
        _warm.set()


def plan_window(
    window: Window,
    topology: Topology,
    *,
    token_cap: int,
    cost: CostModel | None = None,
    budget_s: float = 1.0,
    budget_steps: int | None = None,
    seed: int = 0,
    device: str = "auto",
    previous: Plan | NDArray[np.int64] | None = None,
    constraints: Constraints | None = None,
    stop: threading.Event | None = None,
) -> Plan:
    """Plan one optimizer step.

    Parameters
    ----------
    window
        Lengths [N] and demand [N, L, E].
    topology
        DP ranks, EP ranks and EDP shards.
    token_cap
        C, most tokens of a cell.
    cost
        None takes :meth:`CostModel.default`, and the plan says so in its notes.
    budget_s
        Seconds the call may take, compilation excluded (see :func:`warmup`).
    budget_steps
        Instead of seconds: proposals per chain. Same input, seed and steps give the same plan on every machine, and
        more steps never give a worse one.
    seed
        Of every random choice.
    device
        "auto" or "cpu".
    previous
        The plan, or logical_to_slot [L, E], in force now; None means slot e holds expert e.
    constraints
        Side constraints, default none.
    stop
        An event that ends the search early; the incumbent is returned.

    Returns
    -------
    A feasible plan, never worse in (rows, score) than LPT placement with first-fit-decreasing rows
    (``constraints.max_moved`` may forbid that placement).

    Raises
    ------
    Infeasible
        No layout exists; says why, and how many dummy samples or which cap would do.
    InvalidInput
        A parameter is wrong; names it.
    """
    token_cap = _positive_int("token_cap", token_cap)
    if budget_steps is not None:
        budget_steps = _positive_int("budget_steps", budget_steps, low=0)
    elif isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not 0 <= budget_s < 1e9:
        raise InvalidInput(f"budget_s: {budget_s!r} is not a number of seconds >= 0")
    if device not in ("auto", "cpu"):
        raise InvalidInput(f"device: {device!r} is not available in this version; use 'auto' or 'cpu'")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise InvalidInput(f"seed: {seed!r} is not an integer")
    constraints = constraints or Constraints()
    topology.experts_per_rank(window.num_experts)
    notes = []
    if cost is None:
        cost = CostModel.default(window.num_layers, token_cap)
        notes.append("cost: default (one stage alpha = 4 L, beta = 7e-4 C L, expert_weight 1)")
    cost.expert_weights(window.num_layers)
    if window.counts == "predicted":
        notes.append("counts: predicted (the demand comes from an older policy)")
    standing_slots = _standing_slots(previous, window, topology)
    _ensure_warm()
    run = _Run(window, topology, token_cap, cost, constraints, standing_slots, int(seed), stop, notes)
    return run.plan(budget_s if budget_steps is None else None, budget_steps)


def _positive_int(name: str, value: Any, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InvalidInput(f"{name}: {value!r} is not an integer >= {low}")
    return int(value)


def _standing_slots(previous: Plan | NDArray[np.int64] | None, window: Window, topology: Topology) -> NDArray[np.int64]:
    shape = (window.num_layers, window.num_experts)
    if previous is None:
        return np.tile(np.arange(shape[1], dtype=np.int64), (shape[0], 1))
    slots = np.asarray(previous.logical_to_slot if isinstance(previous, Plan) else previous)
    if slots.shape != shape or slots.dtype.kind not in "iu":
        raise InvalidInput(f"previous: logical_to_slot has shape {slots.shape}, expected integers of shape {shape}")
    if not (np.sort(slots, axis=1) == np.arange(shape[1])).all():
        layer = int(np.argmin((np.sort(slots, axis=1) == np.arange(shape[1])).all(axis=1)))
        raise InvalidInput(f"previous: layer {layer} is not a bijection of experts to slots 0..{shape[1] - 1}")
    return slots.astype(np.int64)


class _Run:
    """One call of plan_window: the stages in order, each a method."""

    def __init__(
        self,
        window: Window,
        topology: Topology,
        token_cap: int,
        cost: CostModel,
        constraints: Constraints,
        standing_slots: NDArray[np.int64],
        seed: int,
        stop: threading.Event | None,
        notes: list[str],
    ) -> None:
        self.window, self.topology, self.token_cap, self.cost = window, topology, token_cap, cost
        self.constraints, self.standing_slots, self.seed, self.stop = constraints, standing_slots, seed, stop
        self.notes = notes
        self.timer = _Timer()
        self.standing = standing_slots // topology.experts_per_rank(window.num_experts)

    def plan(self, budget_s: float | None, budget_steps: int | None) -> Plan:
        """Run all stages."""
        from routepack_opt.models.placement import lpt, solve_placement
        from routepack_opt.models.rows import solve_rows

        timer = self.timer
        hashing = threading.Thread(target=lambda: self.window.sha256, daemon=True)  # hashlib releases the GIL
        hashing.start()
        atoms = build_atoms(self.window, self.constraints, self.token_cap)
        problem = rows_problem(atoms, self.topology, self.token_cap, self.constraints)
        timer.lap("atoms_s")
        rows = solve_rows(problem, time_limit_s=2.0 if budget_s is None else 0.2 * budget_s, seed=self.seed)
        timer.lap("rows_s")
        load = self.window.total_load
        placement = solve_placement(
            load,
            self.topology.ep,
            standing=self.standing,
            max_moved=self.constraints.max_moved,
            time_limit_s=None if budget_s is None else 0.03 * budget_s,
            seed=self.seed,
        )
        lpt_ranks = lpt(load, self.topology.ep)
        timer.lap("placement_s")
        search = _Search(self, atoms, problem, rows, placement, lpt_ranks)
        cell_of, rank_of = search.run(budget_s, budget_steps)
        timer.lap("search_s")
        plan = self._finish(atoms, rows, placement, search, cell_of, rank_of)
        hashing.join()
        return plan

    def _finish(
        self,
        atoms: AtomSet,
        rows: RowsResult,
        placement: PlacementResult,
        search: _Search,
        cell_of: NDArray[np.int64],
        rank_of: NDArray[np.int64],
    ) -> Plan:
        from routepack_opt.models.finish import even_sample_counts, keep_standing_layers
        from routepack_opt.models.placement import rank_loads, relabel_ranks, slots_from_ranks

        window, topology, c = self.window, self.topology, self.constraints
        free = not c.equal_samples_per_rank and atoms.rank_groups is None
        shard_rows = search.problem_grid_shard_rows()
        rank_of = keep_standing_layers(atoms, cell_of, shard_rows, rank_of, self.standing, topology.ep)
        rank_of = relabel_ranks(rank_of, self.standing, topology.ep)
        if free:
            cell_of = even_sample_counts(
                atoms, cell_of, rank_of, topology, self.cost, self.token_cap, c.max_samples_per_cell
            )
        cell_of = canonical_ranks(atoms, cell_of, topology, rows.rows, free)
        slots = slots_from_ranks(rank_of, topology.ep, self.standing_slots)
        cells = cells_from_assignment(atoms, cell_of, rows.rows, topology.dp)
        final = score(window, cells, slots, topology, self.token_cap, self.cost)
        bound = averaging_bound(window.lengths, placement.bound, topology, self.token_cap, self.cost)
        reached = rank_loads(window.total_load, rank_of, topology.ep).max(axis=1)
        value = min(bound.value, final.slowest_shard)
        self.timer.lap("finish_s")
        self.timer.stages["total_s"] = self.timer.elapsed
        self.timer.stages["proposals"] = float(search.num_scored)
        return Plan(
            window={
                "samples": window.num_samples,
                "layers": window.num_layers,
                "experts": window.num_experts,
                "sha256": window.sha256,
                "counts": window.counts,
            },
            topology=topology,
            token_cap=self.token_cap,
            cost=self.cost,
            constraints=c,
            rows=rows.rows,
            rows_lower_bound=rows.lower_bound,
            rows_status=rows.status,
            cells=tuple(tuple(tuple(cell) for cell in row) for row in cells),
            cell_tokens=tuple(tuple(int(window.lengths[cell].sum()) for cell in row) for row in cells),
            total_tokens=int(window.lengths.sum()),
            logical_to_slot=slots,
            score=final,
            seed_score=search.baseline,
            seed_rows=search.baseline_rows,
            bound=value,
            gap=(final.slowest_shard - value) / value if value > 0 else final.slowest_shard,
            moved_experts=(rank_of != self.standing).sum(axis=1).astype(np.int64),
            certificates={
                "rows": rows.certificate,
                "placement": [
                    {"bound": int(b), "kind": k, "reached": int(r)}
                    for b, k, r in zip(placement.bound, placement.kind, reached, strict=True)
                ],
                "layout": bound.to_json(),
            },
            seed=self.seed,
            version=__version__,
            timings={name: round(value, 6) for name, value in self.timer.stages.items()},
            notes=tuple(self.notes),
        )


class _Search:
    """Seeds, then annealing with co-refinement; keeps the best by exact score."""

    def __init__(
        self,
        run: _Run,
        atoms: AtomSet,
        rows_problem: RowsProblem,
        rows: RowsResult,
        placement: PlacementResult,
        lpt_ranks: NDArray[np.int64],
    ) -> None:
        self.run_info, self.atoms, self.rows_problem, self.rows = run, atoms, rows_problem, rows
        self.placement, self.lpt_ranks = placement, lpt_ranks
        self.baseline: Score | None = None
        self.baseline_rows: int | None = None
        self.num_scored = 0

    def problem_grid_shard_rows(self) -> NDArray[np.int64]:
        """int64 [B], row-shard of each cell."""
        topology = self.run_info.topology
        rows, ranks = np.divmod(np.arange(self.rows.rows * topology.dp, dtype=np.int64), topology.dp)
        return np.asarray(rows * topology.num_shards + topology.shard_of_rank[ranks])

    def _chain_problem(self) -> ChainProblem:
        from routepack_opt.solvers.annealing.chain import ChainProblem

        run, atoms = self.run_info, self.atoms
        num_layers, num_experts = run.window.num_layers, run.window.num_experts
        budget = -1 if run.constraints.max_moved is None else int(run.constraints.max_moved * num_experts)
        return ChainProblem(
            padded=atoms.padded,
            tokens=atoms.tokens,
            squares=atoms.squares,
            samples=atoms.samples,
            pinned=atoms.pinned,
            demand=atoms.demand,
            shards=run.topology.shards,
            num_rows=self.rows.rows,
            num_ranks=run.topology.dp,
            cap=run.token_cap,
            max_samples=run.constraints.max_samples_per_cell or 0,
            equal_samples=run.constraints.equal_samples_per_rank,
            alpha=np.array([s.alpha for s in run.cost.stages], dtype=np.float64),
            beta=np.array([s.beta for s in run.cost.stages], dtype=np.float64),
            gamma=run.cost.expert_weights(num_layers),
            sync=run.cost.sync,
            num_expert_ranks=run.topology.ep,
            home=run.standing,
            move_budget=np.full(num_layers, budget, dtype=np.int64),
        )

    def _seed_assignments(self) -> Iterator[NDArray[np.int64]]:
        """Cell number of each atom: the rows' packing, FFD, and both dealt by EDPAwarePair."""
        from routepack_opt.models.rows import ffd_rows, pack_into
        from routepack_opt.models.seeds import edp_aware_pair

        topology, num_rows = self.run_info.topology, self.rows.rows
        free = not self.run_info.constraints.equal_samples_per_rank and self.atoms.rank_groups is None
        num_x = num_rows * topology.num_shards
        work = len(self.rows.cells) * min(num_x, 64) * self.run_info.window.num_layers * topology.ep
        packings = [self.rows.cells]
        ffd = ffd_rows(self.rows_problem)
        if ffd is not None:
            self.baseline_rows = len(ffd) // topology.dp
            if self.baseline_rows == num_rows:
                packings.append(ffd)
        other = pack_into(self.rows_problem, num_rows, seed=self.run_info.seed)
        if other is not None:
            packings.append(other)
        self._ffd = ffd
        for cells in packings:
            yield _assignment(cells, self.atoms.num_atoms)
        if free and num_x > 1 and work < 2e7:
            for cells in packings[:2]:
                yield edp_aware_pair(self.atoms, cells, self.placement.rank_of, topology, num_rows)

    def run(self, budget_s: float | None, budget_steps: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (cell_of [n], rank_of [L, E]) of the best layout found."""
        from routepack_opt.solvers.annealing.chain import Chain
        from routepack_opt.solvers.annealing.schedule import run_chains

        run = self.run_info
        problem = self._chain_problem()
        assignments = list(self._seed_assignments())
        first = Chain(problem, assignments[0], self.placement.rank_of, seed=run.seed, stream=0)
        seeds = [(first.score(), 0, assignments[0], self.placement.rank_of)]
        for index, cell_of in enumerate(assignments[1:], 1):
            first.copy_from(cell_of, self.placement.rank_of)
            seeds.append((first.score(), index, cell_of, self.placement.rank_of))
        self._score_baseline(first, seeds)
        run.timer.lap("seeds_s")
        seeds.sort(key=lambda s: (s[0], s[1]))
        best_score, _, best_cells, best_ranks = seeds[0]
        left = None if budget_s is None else budget_s - run.timer.elapsed - self._reserve_s(budget_s)
        if (left is not None and left < 1e-3) or budget_steps == 0 or self._nothing_to_gain(best_score):
            return best_cells, best_ranks
        chains = self._chains(problem, first, seeds, budget_steps)
        deadline = None if budget_s is None else run.timer.start + budget_s - self._reserve_s(budget_s)
        unit = max(best_score.total, 1e-300) / self.atoms.num_atoms
        results = run_chains(
            chains,
            deadline=deadline,
            steps=budget_steps,
            mean_atom_cost=unit,
            refine=run.constraints.max_moved != 0.0,
            stop=run.stop,
        )
        for result in results:
            self.num_scored += result.num_scored
            if result.score < best_score:
                best_score, best_cells, best_ranks = result.score, result.cell_of, result.rank_of
        return best_cells, best_ranks

    def _score_baseline(
        self, chain: Chain, seeds: list[tuple[Score, int, NDArray[np.int64], NDArray[np.int64]]]
    ) -> None:
        """LPT + FFD: what users run today; a seed too when it is legal here."""
        if self._ffd is None:
            return
        run = self.run_info
        cell_of = _assignment(self._ffd, self.atoms.num_atoms)
        if self.baseline_rows == self.rows.rows:
            chain.copy_from(cell_of, self.lpt_ranks)
            self.baseline = chain.score()
            if run.constraints.max_moved is None:
                seeds.append((self.baseline, len(seeds), cell_of, self.lpt_ranks))
        else:
            from routepack_opt.models.placement import slots_from_ranks

            cells = cells_from_assignment(self.atoms, cell_of, self.baseline_rows or 0, run.topology.dp)
            slots = slots_from_ranks(self.lpt_ranks, run.topology.ep)
            self.baseline = score(run.window, cells, slots, run.topology, run.token_cap, run.cost)

    def _chains(
        self,
        problem: ChainProblem,
        first: Chain,
        seeds: list[tuple[Score, int, NDArray[np.int64], NDArray[np.int64]]],
        budget_steps: int | None,
    ) -> list[Chain]:
        from routepack_opt.solvers.annealing.chain import Chain

        if budget_steps is not None:
            count = _STEP_MODE_CHAINS
        else:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            # chains of a large window together stay under half its own size
            room = max(1, int(0.5 * max(problem.demand.nbytes, 1 << 28) / max(first.loads.nbytes, 1)))
            count = max(1, min(cores, room, 16))
        chains = []
        for k in range(count):
            _, _, cell_of, rank_of = seeds[k % len(seeds)]
            if k == 0:
                first.copy_from(cell_of, rank_of)
                chains.append(first)
            else:
                chains.append(Chain(problem, cell_of, rank_of, seed=self.run_info.seed, stream=k))
        return chains

    def _reserve_s(self, budget_s: float) -> float:
        """Time the exact re-scoring and the final touches need: three passes over the demand, and a floor."""
        return min(0.5 * budget_s, 0.01 + 6e-9 * self.atoms.demand.size)

    def _nothing_to_gain(self, seed_score: Score) -> bool:
        run = self.run_info
        bound = averaging_bound(run.window.lengths, self.placement.bound, run.topology, run.token_cap, run.cost)
        if seed_score.slowest_shard <= bound.value * (1.0 + 1e-9) and run.topology.num_shards == 1:
            run.notes.append("refinement bypassed: the seed already meets the lower bound")
            return True
        return False


def rows_problem(atoms: AtomSet, topology: Topology, token_cap: int, constraints: Constraints) -> RowsProblem:
    """The rows problem of a window's atoms under its constraints."""
    from routepack_opt.models.rows import RowsProblem

    return RowsProblem(
        tokens=atoms.padded,
        samples=atoms.samples,
        num_ranks=topology.dp,
        cap=token_cap,
        min_rows=constraints.min_rows,
        row_multiple=constraints.row_multiple,
        max_samples_per_cell=constraints.max_samples_per_cell,
        equal_samples_per_rank=constraints.equal_samples_per_rank,
        rank_groups=atoms.rank_groups,
    )


def _assignment(cells: list[list[int]], num_atoms: int) -> NDArray[np.int64]:
    result = np.empty(num_atoms, dtype=np.int64)
    for k, members in enumerate(cells):
        result[members] = k
    return result
