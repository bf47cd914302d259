"""One workload of a comparison: its demand, and every policy run and bound on it, as records."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput, RoutePackError
from routepack_opt.residency.comparison.sweeps import MAIN, Table, Variation, tables_of
from routepack_opt.residency.control.policy_registry import REGISTRY
from routepack_opt.residency.control.run_windows import PolicyRun, run_policy
from routepack_opt.residency.control.start_layout import popularity_layout
from routepack_opt.residency.machine.moe_models import moe_model
from routepack_opt.residency.machine.scene import Scene, build_scene
from routepack_opt.residency.machine.scope import choose_scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from routepack_opt.residency.comparison.run import Comparison
    from routepack_opt.residency.control.observation import Policy, PolicyView
    from routepack_opt.residency.simulator.layout import Layout
    from routepack_opt.residency.simulator.simulate_window import Level
    from routepack_opt.residency.traces.windows import Workload

Record = dict[str, Any]
TRACES = {"deepseek-v2-lite": ("dsv2lite_intent.npz", "dsv2lite_law.npz", "dsv2lite_summary.npz")}
_LATE = 4  # utilisations are means over the last 1 / _LATE of the windows


@dataclass(frozen=True)
class Case:
    """One workload."""

    model: str
    phase: str
    seed: int

    def key(self, comparison: Comparison, *parts: str) -> str:
        """Of a record of this case, unique in a folder of results."""
        number, source = f"{comparison.windows} windows", source_of(self.model, comparison.data)
        return "/".join((comparison.fingerprint, self.model, source, self.phase, str(self.seed), number, *parts))


@dataclass(frozen=True)
class Setting:
    """One run of one policy."""

    table: Table
    variation: Variation
    level: Level
    policy: str

    def key(self, comparison: Comparison, case: Case) -> str:
        """Of its record."""
        return case.key(comparison, self.table.name, self.variation.label, self.level, self.policy)


def settings_of(comparison: Comparison, case: Case) -> Iterator[Setting]:
    """All runs of a case; tables beside the main one take the first seed only."""
    for table in comparison.tables():
        if table.name != MAIN and case.seed != 0:
            continue
        for variation in table.variations:
            for level in table.levels:
                for policy in table.policies:
                    yield Setting(table, variation, level, policy)


def bound_key(comparison: Comparison, case: Case) -> str:
    """Of the record of a case's bounds."""
    return case.key(comparison, "bound", str(comparison.bounds))


def run_case(
    comparison: Comparison,
    case: Case,
    known: frozenset[str],
    journal: str | None,
    stopped: Callable[[], bool],
) -> list[Record]:
    """Run what ``known`` does not hold, each record appended to ``journal`` at once; ends early when ``stopped``."""
    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(record)
        if journal is not None:
            append_record(journal, record)

    try:
        bench = _Bench(comparison, case)
    except RoutePackError as error:  # this model does not fit; others may
        message = " ".join(str(error).split())
        for setting in settings_of(comparison, case):
            keep({"key": setting.key(comparison, case), **_identity(case, setting), "error": message})
        return records
    for setting in settings_of(comparison, case):
        if stopped():
            return records
        key = setting.key(comparison, case)
        if key not in known:
            keep({"key": key, **bench.run(setting)})
    key = bound_key(comparison, case)
    if comparison.bounds and key not in known and not stopped():
        keep({"key": key, **bench.bounds()})
    return records


def _identity(case: Case, setting: Setting) -> Record:
    variation = setting.variation
    return {
        "table": setting.table.name, "model": case.model, "phase": case.phase, "seed": case.seed,
        "policy": setting.policy, "level": setting.level, "variation": variation.label,
        "budget_copies": variation.copies, "fast_capacity": variation.fast_capacity,
        "without": variation.without, "cold": variation.cold,
    }  # fmt: skip


def append_record(journal: str, record: Record) -> None:
    """One line, written in one piece: several processes append to the file."""
    line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
    handle = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


class _Bench:
    """Demand of one case, and scenes and start layouts of its settings, each made once."""

    def __init__(self, comparison: Comparison, case: Case) -> None:
        self.comparison, self.case = comparison, case
        self._starts: dict[tuple[str, Variation], tuple[Scene, Layout, NDArray[np.float64]]] = {}
        self.layers = {table.name: self._layers(table) for table in comparison.tables()}
        every = tables_of(comparison.policies, comparison.levels, comparison.machine, sweeps=True)
        whole = max(self._layers(table) for table in every)  # the same demand with and without sweeps
        package = comparison.machine
        scene = build_scene(package, case.model, num_layers=whole)
        total = -(-comparison.windows * 10 // 9)  # the first tenth is the profile
        self.workload = workload_of(case, scene, total, comparison.data)
        self.demand = self.workload.array()
        self.first = total - comparison.windows
        self.profile = self.demand[: self.workload.profile_windows].mean(axis=0)

    def _layers(self, table: Table) -> int:
        from routepack_opt.residency.machine.hardware import Hardware

        model, counts = moe_model(self.case.model), []
        for variation in table.variations:
            hardware = Hardware.from_package(variation.package(self.comparison.machine))
            try:
                counts.append(choose_scope(hardware, model, budget_copies=variation.copies).num_layers)
            except RoutePackError:  # the run under this variation says so
                continue
        return min(counts, default=1)

    def _start(self, setting: Setting) -> tuple[Scene, Layout, NDArray[np.float64]]:
        layers, variation = self.layers[setting.table.name], setting.variation
        key = setting.table.name, variation
        if key not in self._starts:
            machine = variation.package(self.comparison.machine)
            scene = build_scene(machine, self.case.model, num_layers=layers, budget_copies=variation.copies)
            profile = self.profile[:layers]
            if variation.cold:
                profile = np.broadcast_to(profile.mean(axis=(1, 2), keepdims=True), profile.shape).copy()
            layout = popularity_layout(scene, profile)
            self._starts[key] = scene, layout.primaries() if variation.cold else layout, profile
        return self._starts[key]

    def run(self, setting: Setting) -> Record:
        """One policy; a refusal becomes the record's ``error``."""
        case, begun = self.case, time.process_time()
        record = _identity(case, setting)
        record |= {"workload": "synthetic" if self.workload.synthetic else "real", "note": self.workload.note}
        try:
            scene, layout, profile = self._start(setting)
            demand = self.demand[:, : scene.num_layers]
            policy = Recorder(REGISTRY[setting.policy].make(demand), len(demand) - self.comparison.windows // _LATE)
            run = run_policy(
                scene, list(demand), policy, level=setting.level, start=(layout, profile), first_window=self.first
            )
        except RoutePackError as error:
            return record | {"error": " ".join(str(error).split())}
        hardware = scene.hardware
        record |= {"scope": scene.scope, "layers": scene.num_layers, "tiers": list(hardware.tier_names)}
        record["region_tier"] = hardware.region_tier.tolist()
        return record | metrics(run, policy) | {"cpu_s": round(time.process_time() - begun, 3)}

    def bounds(self) -> Record:
        """Bounds of evenly spread windows of the main table."""
        from routepack_opt.models.residency import layout_bound

        case, begun = self.case, time.process_time()
        scene = build_scene(self.comparison.machine, case.model, num_layers=self.layers[MAIN])
        picked = np.unique(np.linspace(self.first, len(self.demand) - 1, self.comparison.bounds).astype(int))
        demand = self.demand[:, : scene.num_layers]
        seconds = [layout_bound(scene, np.ascontiguousarray(demand[window])).bound_s for window in picked]
        return {
            "table": "bound", "model": case.model, "phase": case.phase, "seed": case.seed,
            "windows": [int(window - self.first) for window in picked], "bound_s": seconds,
            "cpu_s": round(time.process_time() - begun, 3),
        }  # fmt: skip


class Recorder:
    """A policy that is watched: utilisations of the late windows, and which stage binds each layer.

    Attributes
    ----------
    windows, memory_bound
        Windows seen; sum over them of the share of layers whose memory stage is the longer one.
    binding_s
        Seconds of memory where it is the longer stage of a layer, and of compute where that is.
    use
        Sums of chiplet [C], link [U] and region [G] utilisation over the late windows.
    own_s
        Seconds of each decision.
    """

    def __init__(self, policy: Policy, late: int) -> None:
        """``late`` is the first window whose utilisations count."""
        self.policy, self.late = policy, late
        self.windows = self.memory_bound = 0.0
        self.binding_s: NDArray[np.float64] = np.zeros(2)
        self.use: list[NDArray[np.float64]] = []
        self.own_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        """Name, mapping, start and the rest are the policy's own."""
        return getattr(self.policy, name)

    def decide(self, view: PolicyView) -> Any:
        """Watch, then let the policy decide; ``own_s`` is the time of its decision."""
        result = view.result
        self.windows += 1
        memory, compute = result.stages[:, 3], result.stages[:, 4]
        longer = memory >= compute
        self.memory_bound += float(longer.mean())
        self.binding_s += (float(memory[longer].sum()), float(compute[~longer].sum()))
        if view.window >= self.late:
            use = [result.chiplet_utilisation, result.link_utilisation, result.region_utilisation]
            self.use = [a + b for a, b in zip(self.use, use, strict=True)] if self.use else use
        begun = time.perf_counter()
        edits = self.policy.decide(view)
        self.own_s.append(time.perf_counter() - begun)
        return edits


def metrics(run: PolicyRun, policy: Recorder) -> Record:
    """Figures of a run, means over its windows unless named otherwise; finite numbers only."""
    late = max(1, int(policy.windows // _LATE))
    own_s = policy.own_s[1:] or policy.own_s  # the first decision of a process compiles
    chiplets, links, regions = ((total / late).round(4).tolist() for total in policy.use or [np.zeros(1)] * 3)
    return {
        "windows": len(run.routed_s),
        "routed_s": float(run.routed_s.mean()),
        "end_to_end_s": float(run.end_to_end_s.mean()),
        "energy_j": float(run.energy_j.mean()),
        "edp": float(run.edp.mean()),
        "stages": run.stages.mean(axis=0).tolist(),
        "reads": run.reads.mean(axis=0).tolist(),
        "read_hit_rate": run.read_hit_rate,
        "token_hit_rate": run.token_hit_rate,
        "streamed_bytes": run.streamed_bytes.mean(axis=0).tolist(),
        "migrated_bytes": float(run.migrated_bytes.mean()),
        "copies": int(run.copies.sum()),
        "evictions": int(run.evictions.sum()),
        "refused": int(run.refused.sum()),
        "deferred": int(run.deferred.sum()),
        "pressures": run.pressures.mean(axis=0).tolist(),
        "tier_use": run.tier_use[-1].tolist(),
        "binding_s": (policy.binding_s / max(policy.windows, 1)).tolist(),
        "memory_bound": policy.memory_bound / max(policy.windows, 1),
        "decide_s": [float(np.median(own_s)), float(np.max(own_s))],
        "chiplet_use": chiplets,
        "link_use": links,
        "region_use": regions,
        "routed_by_window": [float(f"{value:.7g}") for value in run.routed_s],
    }


def data_folder() -> Path:
    """Where recorded traces are looked for: ROUTEPACK_DATA, or shared/data beside the checkout."""
    named = os.environ.get("ROUTEPACK_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[4] / "shared" / "data"


def checked_folder(data: str | None) -> str | None:
    """``data``, which a user named; None is the default folder, which may be missing.

    Raises
    ------
    InvalidInput
        No such folder: its workloads would quietly be synthetic.
    """
    if data is not None and not Path(data).is_dir():
        raise InvalidInput(f"--data: {data!r} is no folder; expected the one that holds routes/")
    return data


def trace_files(model: str, data: str | None) -> list[Path]:
    """Recorded routes of a model in ``data``; empty when one of them is missing."""
    folder = data_folder() if data is None else Path(data)
    files = [folder / "routes" / name for name in TRACES.get(model, ())]
    return files if all(file.is_file() for file in files) else []


@cache
def source_of(model: str, data: str | None) -> str:
    """What a case's demand comes from, short: the sizes of the model, and what its recorded routes hold."""
    digest = hashlib.sha256(repr(moe_model(model)).encode())
    for file in trace_files(model, data):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:10]


def workload_of(case: Case, scene: Scene, num_windows: int, data: str | None) -> Workload:
    """Recorded routes where ``data`` has them, else the generator's."""
    from routepack_opt.residency.traces.token_trace import read_trace
    from routepack_opt.residency.traces.windows import synthetic_workload, trace_workload

    files = trace_files(case.model, data)
    phase: Any = case.phase
    if files:
        size = int(scene.expert_bytes[0])
        traces = [read_trace(file, num_experts=scene.num_experts, expert_bytes=size) for file in files]
        layers = range(scene.num_layers)
        return trace_workload(traces, phase, scene.num_chiplets, num_windows=num_windows, layers=layers, seed=case.seed)
    return synthetic_workload(
        case.model, phase, scene.num_chiplets, num_layers=scene.num_layers, num_experts=scene.num_experts,
        top_k=scene.top_k, num_windows=num_windows, seed=case.seed,
    )  # fmt: skip
