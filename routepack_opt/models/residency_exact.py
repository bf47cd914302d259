"""Placement and assignment of one window to proven optimality, by CP-SAT or HiGHS, for small instances.

Replicas that serve nothing never help, so an expert in use has exactly the replicas that are read, at most one of them
a chiplet, and an expert not in use has one copy anywhere: the program needs no other variables.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.models.residency import check_demand, layout_bound
from routepack_opt.models.residency_bounds import fixed_seconds
from routepack_opt.models.residency_rows import NUM_STAGES, LayerRows, layer_rows
from routepack_opt.solvers.integer_program import IntegerProgram, ProgramResult, solve_program

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.layout import Layout

ENGINES = ("cp-sat", "highs")
_UNITS = 10**8  # integer units the bound over all layouts is measured in
_FLOAT_MARGIN = 1e-9  # relative: the stage-level model adds doubles, the program exact integers


@dataclass(frozen=True)
class ExactWindow:
    """What an engine found and what it proved.

    Attributes
    ----------
    status
        "optimal": nothing is faster by more than ``rounding`` (relative); "feasible": a solution without that proof;
        "infeasible": no layout keeps the rules; "unknown": neither.
    layout, slots
        The layout and the slot that serves each group, int8 [L, E, C]; None without a solution. The layout holds the
        replicas that are used (and one copy of each expert that is not).
    objective_s
        Routed seconds of that solution by the stage-level model (inf without one).
    bound_s
        No layout (or, for a given layout, no assignment) is faster.
    rounding
        Relative error of "optimal" through integer costs.
    """

    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    layout: Layout | None
    slots: NDArray[np.int8] | None
    objective_s: float
    bound_s: float
    rounding: float
    solver: str
    version: str
    runtime_s: float
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def solve_window_exact(
    scene: Scene,
    demand: NDArray[np.int32],
    *,
    layout: Layout | None = None,
    engine: Literal["cp-sat", "highs"] = "cp-sat",
    time_limit_s: float = 30.0,
    seed: int = 0,
    num_workers: int = 1,
) -> ExactWindow:
    """Least routed time of one window.

    Parameters
    ----------
    scene, demand
        Model on machine; int32 [L, E, C].
    layout
        Choose the assignment only, under this layout; None: the layout too.
    engine, time_limit_s, seed, num_workers
        As in :func:`~routepack_opt.solvers.integer_program.solve_program`.

    Raises
    ------
    InvalidInput
        Unknown engine; see also :func:`~routepack_opt.models.residency.check_demand`.
    """
    if engine not in ENGINES:
        raise InvalidInput(f"engine: {engine!r} is unknown; expected one of {', '.join(ENGINES)}")
    check_demand(scene, demand)
    start = time.perf_counter()
    program = WindowProgram(scene, demand, layout)
    left_s = max(0.0, time_limit_s - (time.perf_counter() - start))
    result = solve_program(
        program.program, engine=engine, time_limit_s=left_s, seed=seed, num_workers=num_workers
    )  # fmt: skip
    return _checked(program, result, time.perf_counter() - start)


def _checked(program: WindowProgram, result: ProgramResult, runtime_s: float) -> ExactWindow:
    """Evaluate the engine's answer by the stage-level model and translate its bound to seconds."""
    from routepack_opt.residency.simulator.stage import StageModel

    status, note, layout, slots, objective = result.status, result.note, None, None, math.inf
    if result.values is not None and program.program.broken_row(result.values) is not None:
        status, note = "unknown", f"{result.solver} returned a solution that breaks a rule"
    elif result.values is not None:
        layout, slots = program.solution(result.values)
        objective = StageModel(program.scene).evaluate(layout, program.demand, slots).routed_s
    bound = program.known_s
    if math.isfinite(result.bound):
        bound = max(bound, (result.bound / program.scale + program.fixed_s) * (1.0 - _FLOAT_MARGIN))
    if status == "infeasible":
        bound = math.inf
    rounding = program.loss / program.scale / objective + 2 * _FLOAT_MARGIN if 0 < objective < math.inf else 0.0
    return ExactWindow(
        status, layout, slots, objective, min(bound, objective), rounding, result.solver, result.version, runtime_s,
        result.settings, note,
    )  # fmt: skip


class WindowProgram:
    """The integer program of a window, with its variables by meaning.

    Seconds become integers by rounding each coefficient down, so the program never charges a solution more than it
    costs; ``loss`` is the most it undercharges, in units of 1 / ``scale`` seconds.
    """

    def __init__(self, scene: Scene, demand: NDArray[np.int32], layout: Layout | None = None) -> None:
        """Build variables, rows and objective."""
        self.scene, self.demand, self.given = scene, demand, layout
        self.program = IntegerProgram()
        self.fixed_s = sum(fixed_seconds(scene, demand[layer]) for layer in range(scene.num_layers))
        self.known_s = layout_bound(scene, demand).bound_s
        self.scale = _UNITS / self.known_s if self.known_s > 0 else 1.0
        self.loss = 0
        self.layers = [self._rows(layer) for layer in range(scene.num_layers)]
        self.serve: list[list[int]] = []
        self.read: list[list[int]] = []
        self.idle: list[list[int]] = []
        for layer, rows in enumerate(self.layers):
            self._add_layer(layer, rows)
        if layout is None:
            self._add_room()
        # the program undercharges by at most its loss: the known bound holds for it less that
        low = math.floor((self.known_s - self.fixed_s) * self.scale) - self.loss
        if self.program.cost and low > 0:
            self.program.add_row(self.program.cost, low=low)

    def _rows(self, layer: int) -> LayerRows:
        scene = self.scene
        if self.given is None:
            legal = np.argwhere(scene.tier_holds(layer)).tolist()
            places = [(e, t, c) for e in range(scene.num_experts) for t, c in legal]
        else:
            places = [(e, t, c) for e in range(scene.num_experts) for t, c in self.given.replicas(layer, e)]
        return layer_rows(scene, layer, self.demand[layer], places)

    def _add_layer(self, layer: int, rows: LayerRows) -> None:
        program, scene = self.program, self.scene
        serve = [program.add_variable(0, 1) for _ in rows.serves]
        read = [program.add_variable(0, 1) for _ in rows.places]
        bank = {g: program.add_variable(0, 1, continuous=True) for g in sorted(set(rows.region.tolist()))}
        self.serve.append(serve)
        self.read.append(read)
        by_group: dict[int, list[int]] = {}
        places_at = rows.places_at()
        for k, (n, chiplet) in enumerate(rows.serves):
            by_group.setdefault(n, []).append(serve[k])
            at = [read[p] for p in places_at[rows.groups[n][0], chiplet]]
            program.add_row([serve[k], *at], [1] + [-1] * len(at), high=0)
        for variables in by_group.values():
            program.add_row(variables, low=1, high=1)
        of_expert: dict[int, list[int]] = {}
        for p, (expert, _, _) in enumerate(rows.places):
            of_expert.setdefault(expert, []).append(read[p])
            program.add_row([read[p], bank[int(rows.region[p])]], [1, -1], high=0)
        for at in places_at.values():
            program.add_row([read[p] for p in at], high=1)
        if self.given is None:
            for variables in of_expert.values():
                program.add_row(variables, low=1, high=scene.r_max)
        self._add_stages(rows, serve, read, bank)
        idle = scene.num_experts - len(of_expert) if self.given is None else 0
        self.idle.append([program.add_variable(0, idle) for _ in range(scene.hardware.num_regions)] if idle else [])
        if idle:
            program.add_row(self.idle[-1], low=idle, high=idle)

    def _add_stages(self, rows: LayerRows, serve: list[int], read: list[int], bank: dict[int, int]) -> None:
        """One variable a stage and the rows that hold it up."""
        terms: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(NUM_STAGES)]
        for row in rows.rows:
            variables = [serve[k] for k in row.serve] + [read[p] for p in row.read] + [bank[g] for g in row.bank]
            seconds = [*row.serve.values(), *row.read.values(), *row.bank.values()]
            terms[row.stage].append((variables, [math.floor(s * self.scale) for s in seconds]))
        for parts in terms:
            if not parts:
                continue
            most = max(sum(weights) for _, weights in parts)
            stage = self.program.add_variable(0, most, continuous=True)
            self.program.cost[stage] = 1
            self.loss += max(len(variables) for variables, _ in parts)
            for variables, weights in parts:
                self.program.add_row([stage, *variables], [1, *(-w for w in weights)], low=0)

    def _add_room(self) -> None:
        """Capacity of every region, and the budget; bytes are whole numbers."""
        scene = self.scene
        sizes = [int(size) for size in scene.expert_bytes]
        by_region: list[tuple[list[int], list[int]]] = [([], []) for _ in range(scene.hardware.num_regions)]
        for size, rows, read, idle in zip(sizes, self.layers, self.read, self.idle, strict=True):
            for p, g in enumerate(rows.region.tolist()):
                by_region[g][0].append(read[p])
                by_region[g][1].append(size)
            for g, variable in enumerate(idle):
                by_region[g][0].append(variable)
                by_region[g][1].append(size)
        unit = math.gcd(*sizes)
        every: tuple[list[int], list[int]] = ([], [])
        for (variables, weights), room in zip(by_region, scene.region_room.tolist(), strict=True):
            whole = [w // unit for w in weights]
            self.program.add_row(variables, whole, high=int(room) // unit)
            every[0].extend(variables)
            every[1].extend(whole)
        self.program.add_row(*every, high=int(scene.budget_bytes) // unit)

    def solution(self, values: NDArray[np.int64]) -> tuple[Layout, NDArray[np.int8]]:
        """Layout and slots of an engine's answer; replicas that serve nothing are left out.

        Raises
        ------
        Infeasible
            The answer breaks a rule of the layout.
        """
        from routepack_opt.residency.simulator.layout import Layout

        scene = self.scene
        layout = Layout(scene) if self.given is None else self.given
        slots = np.full(self.demand.shape, -1, dtype=np.int8)
        for layer, rows in enumerate(self.layers):
            places_at = rows.places_at()
            for k, (n, chiplet) in enumerate(rows.serves):
                if not values[self.serve[layer][k]]:
                    continue
                expert, source, _ = rows.groups[n]
                place = next(p for p in places_at[expert, chiplet] if values[self.read[layer][p]])
                tier = rows.places[place][1]
                slot = layout.find(layer, expert, tier, chiplet)
                slots[layer, expert, source] = layout.add(layer, expert, tier, chiplet) if slot < 0 else slot
            self._add_idle(layer, layout, values)
        layout.check()
        return layout, slots

    def _add_idle(self, layer: int, layout: Layout, values: NDArray[np.int64]) -> None:
        hardware = self.scene.hardware
        free = [e for e in range(self.scene.num_experts) if layout.count[layer, e] == 0]
        for g, variable in enumerate(self.idle[layer]):
            tier = int(hardware.region_tier[g])
            chiplet = int(np.flatnonzero(hardware.region_of[tier] == g)[0])
            for _ in range(int(values[variable])):
                layout.add(layer, free.pop(), tier, chiplet)
