"""plan_window: place experts, count rows, seed, anneal and co-refine, inside a time budget."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt import __version__
from routepack_opt.constraints import Constraints
from routepack_opt.cost import CostModel, score
from routepack_opt.cost import rank_loads as row_rank_loads
from routepack_opt.errors import InvalidInput, MissingDependency
from routepack_opt.models.atoms import AtomSet, build_atoms
from routepack_opt.models.layout import canonical_ranks, cells_from_assignment, shard_row_of_cell
from routepack_opt.plan import Plan
from routepack_opt.topology import Topology
from routepack_opt.window import Window, positive_int

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.models.layout_bounds import LayoutBound
    from routepack_opt.models.layout_search import LayoutTask, SearchResult
    from routepack_opt.models.placement import PlacementResult
    from routepack_opt.models.rows import RowsProblem, RowsResult
    from routepack_opt.solvers.annealing.population import LevelStatistics

logger = logging.getLogger(__name__)

_COMPILE_NOTICE_S = 1.5
_THOROUGH_BOUND_S = 0.2  # budgets from which linear programs of a few milliseconds may tighten the bound


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
    start = time.perf_counter()
    from routepack_opt.models import finish, idle_ranks, layout_bounds, layout_search, placement, rows  # noqa: F401
    from routepack_opt.solvers.annealing import chain

    notice = threading.Timer(
        _COMPILE_NOTICE_S, logger.warning, ("compiling CPU kernels, once; they are cached on disk",)
    )
    notice.daemon = True
    notice.start()
    try:
        rows.warmup()
        placement.warmup()
        layout_bounds.warmup()
        chain.warmup()
    finally:
        notice.cancel()
    _warm.set()
    return time.perf_counter() - start


_warm = threading.Event()


def _ensure_warm() -> None:
    if not _warm.is_set():
        warmup()


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
    co_refine: bool = True,
    statistics: list[LevelStatistics] | None = None,
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
        "auto" and "cpu" are the compiled CPU engine; "torch" is the torch engine on the CPU, "cuda" and "cuda:N" on a
        GPU. "auto" does not choose a GPU: no measurement shows yet that it pays.
    previous
        The plan, or logical_to_slot [L, E], in force now; None means slot e holds expert e.
    constraints
        Side constraints, default none.
    stop
        An event that ends the search early; the incumbent is returned.
    co_refine
        Whether the layout search may move experts too; False keeps the placement of the window totals.
    statistics
        A list that receives one entry for every temperature of the search.

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
    _check_types(window, topology, cost, constraints, stop)
    token_cap = positive_int("token_cap", token_cap)
    if budget_steps is not None:
        budget_steps = positive_int("budget_steps", budget_steps, low=0)
    elif not _is_number(budget_s) or not 0 <= budget_s < 1e9:
        raise InvalidInput(f"budget_s: {budget_s!r} is not a number of seconds >= 0")
    if not isinstance(co_refine, (bool, np.bool_)):
        raise InvalidInput(f"co_refine: {co_refine!r} is not a boolean")
    engine = _engine(device)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**63:
        raise InvalidInput(f"seed: {seed!r} is not an integer from 0 to 2^63 - 1")
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
    run = _Run(window, topology, token_cap, cost, constraints, standing_slots, int(seed), stop, notes, engine)
    plan = run.plan(float(budget_s) if budget_steps is None else None, budget_steps, bool(co_refine))
    if statistics is not None:
        statistics.extend(run.levels)
    return plan


def place_window(
    window: Window,
    topology: Topology,
    *,
    previous: Plan | NDArray[np.int64] | None = None,
    max_moved: float | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Only the placement of the window totals, where :func:`plan_window` starts: known before any row is packed.

    Parameters
    ----------
    previous
        The plan, or logical_to_slot [L, E], in force now; None means slot e holds expert e.
    max_moved
        Share of the experts of each layer that may leave their EP rank.
    time_limit_s
        Of the search; None does a fixed amount of work, the same on every machine.

    Returns
    -------
    logical_to_slot
        int64 [L, E]; experts that stay in their EP rank keep their slot.
    """
    from routepack_opt.models.placement import slots_from_ranks, solve_placement

    _check_types(window, topology, None, None, None)
    per_rank = topology.experts_per_rank(window.num_experts)
    standing = _standing_slots(previous, window, topology)
    placement = solve_placement(
        window.total_load,
        topology.ep,
        standing=standing // per_rank,
        max_moved=max_moved,
        time_limit_s=time_limit_s,
        seed=seed,
    )
    return slots_from_ranks(placement.rank_of, topology.ep, standing)


def _check_types(window: Any, topology: Any, cost: Any, constraints: Any, stop: Any) -> None:
    for name, value, kind in (
        ("window", window, Window),
        ("topology", topology, Topology),
        ("cost", cost, (CostModel, type(None))),
        ("constraints", constraints, (Constraints, type(None))),
    ):
        if not isinstance(value, kind):
            wanted = kind if isinstance(kind, type) else kind[0]
            raise InvalidInput(f"{name}: expected a {wanted.__name__}, found {type(value).__name__}")
    if stop is not None and not callable(getattr(stop, "is_set", None)):
        raise InvalidInput(f"stop: expected a threading.Event, found {type(stop).__name__}")


def _engine(device: str) -> str:
    """The engine a device name asks for; torch is imported only when it is asked for."""
    known = isinstance(device, str) and (
        device in ("auto", "cpu", "torch", "cuda") or (device.startswith("cuda:") and device[5:].isdigit())
    )
    if not known:
        raise InvalidInput(f"device: {device!r} is unknown; expected auto, cpu, torch, cuda or cuda:N")
    if device in ("auto", "cpu"):
        return "cpu"
    try:
        import torch
    except ImportError:
        raise MissingDependency(
            f"device {device!r} needs torch; install it with: pip install routepack-opt[torch]"
        ) from None
    if device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count <= int(device[5:] or 0):
            raise InvalidInput(f"device: {device!r} is not there; this machine has {count} CUDA devices")
    return device


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _standing_slots(previous: Plan | NDArray[np.int64] | None, window: Window, topology: Topology) -> NDArray[np.int64]:
    shape = (window.num_layers, window.num_experts)
    if previous is None:
        return np.tile(np.arange(shape[1], dtype=np.int64), (shape[0], 1))
    try:
        slots = np.asarray(previous.logical_to_slot if isinstance(previous, Plan) else previous)
    except ValueError:
        raise InvalidInput(f"previous: not a rectangular array; expected integers of shape {shape}") from None
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
        device: str,
    ) -> None:
        self.window, self.topology, self.token_cap, self.cost = window, topology, token_cap, cost
        self.constraints, self.standing_slots, self.seed, self.stop = constraints, standing_slots, seed, stop
        self.notes = notes
        self.levels: list[LevelStatistics] = []
        self.device = device
        self.timer = _Timer()
        self.has_previous = bool((standing_slots != np.arange(window.num_experts)).any())
        self.standing = standing_slots // topology.experts_per_rank(window.num_experts)

    def plan(self, budget_s: float | None, budget_steps: int | None, co_refine: bool) -> Plan:
        """Run all stages."""
        from routepack_opt.models.layout_bounds import layout_bound
        from routepack_opt.models.layout_search import LayoutTask, search_layout
        from routepack_opt.models.placement import lpt, solve_placement
        from routepack_opt.models.rows import solve_rows

        timer = self.timer
        hashing = threading.Thread(target=lambda: self.window.sha256, daemon=True)  # hashlib releases the GIL
        hashing.start()
        atoms = build_atoms(self.window, self.constraints, self.token_cap)
        problem = rows_problem(atoms, self.topology, self.token_cap, self.constraints)
        timer.lap("atoms_s")
        # the rungs that watch the clock are left out of step mode: its plans may not depend on the machine
        rows = solve_rows(problem, time_limit_s=0.0 if budget_s is None else 0.2 * budget_s, seed=self.seed)
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
        bound = layout_bound(
            atoms,
            rows.rows,
            placement.bound,
            self.topology,
            self.token_cap,
            self.cost,
            self.constraints,
            thorough=budget_s is None or budget_s >= _THOROUGH_BOUND_S,
        )
        timer.lap("bound_s")
        task = LayoutTask(
            window=self.window,
            topology=self.topology,
            token_cap=self.token_cap,
            cost=self.cost,
            constraints=self.constraints,
            atoms=atoms,
            rows_problem=problem,
            cells=rows.cells,
            rank_of=placement.rank_of,
            lpt_ranks=lpt_ranks,
            standing=self.standing,
            bound=bound.value,
            previous_placement=self.has_previous,
        )
        deadline = None if budget_s is None else timer.start + budget_s - self._reserve_s(budget_s)
        found = search_layout(
            task,
            deadline=deadline,
            steps=budget_steps,
            seed=self.seed,
            stop=self.stop,
            refine=co_refine,
            device=self.device,
        )
        self.levels = found.levels
        if found.note:
            self.notes.append(found.note)
        timer.lap("search_s")
        plan = self._finish(task, rows, placement, bound, found)
        hashing.join()
        return plan

    def _reserve_s(self, budget_s: float) -> float:
        """Time the exact re-scoring and the final touches need: passes over demand, samples and cells, and a floor."""
        passes = 6e-9 * self.window.demand.size + 3e-6 * self.window.num_samples + 3e-5 * self.topology.dp
        return min(0.5 * budget_s, 0.01 + passes)

    def _finish(
        self,
        task: LayoutTask,
        rows: RowsResult,
        placement: PlacementResult,
        bound: LayoutBound,
        found: SearchResult,
    ) -> Plan:
        from routepack_opt.models.finish import even_sample_counts, keep_standing_layers, row_demand
        from routepack_opt.models.idle_ranks import fill_idle_ranks, idle_ranks_note
        from routepack_opt.models.placement import rank_loads, relabel_ranks, slots_from_ranks

        window, topology, c, atoms = self.window, self.topology, self.constraints, task.atoms
        cell_of, rank_of = found.best.cell_of, found.best.rank_of
        demand = row_demand(atoms, cell_of, shard_row_of_cell(topology, rows.rows))
        rank_of = keep_standing_layers(demand, rank_of, self.standing, topology.ep)
        rank_of = relabel_ranks(rank_of, self.standing, topology.ep)
        rank_of = fill_idle_ranks(demand, rank_of, self.standing, topology.ep)
        if task.cells_may_move:
            cell_of = even_sample_counts(
                atoms, cell_of, rank_of, topology, self.cost, self.token_cap, c.max_samples_per_cell
            )
        cell_of = canonical_ranks(atoms, cell_of, topology, rows.rows, task.cells_may_move)
        slots = slots_from_ranks(rank_of, topology.ep, self.standing_slots)
        cells = cells_from_assignment(atoms, cell_of, rows.rows, topology.dp)
        final = score(window, cells, slots, topology, self.token_cap, self.cost)
        idle = idle_ranks_note(row_rank_loads(window, cells, slots, topology))
        if idle is not None:
            self.notes.append(idle)
        reached = rank_loads(window.total_load, rank_of, topology.ep).max(axis=1)
        value = min(bound.value, final.slowest_shard)
        self.timer.lap("finish_s")
        self.timer.stages["total_s"] = self.timer.elapsed
        self.timer.stages["proposals"] = float(found.num_scored)
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
            seed_score=found.baseline,
            seed_rows=found.baseline_rows,
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
