"""One policy over the windows of a workload: simulate, show, decide, migrate, publish."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.control.hotness import KEEP, Hotness
from routepack_opt.residency.control.observation import PolicyView
from routepack_opt.residency.control.start_layout import popularity_layout
from routepack_opt.residency.mapping.balance_map import balance_map
from routepack_opt.residency.simulator.directory import Directory
from routepack_opt.residency.simulator.migration import Migrator
from routepack_opt.residency.simulator.simulate_window import WindowResult, WindowSimulator, no_migration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.residency.control.observation import Policy
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.directory import Edit
    from routepack_opt.residency.simulator.layout import Layout
    from routepack_opt.residency.simulator.simulate_window import Level
    from routepack_opt.residency.traces.windows import Workload


@dataclass(frozen=True)
class PolicyRun:
    """One policy over one workload; rows are the measured windows, in order.

    Parameters
    ----------
    policy, workload, phase, level
        Names.
    first_window
        Number of the first measured window.
    routed_s, end_to_end_s, energy_j, edp
        [W] per window; end to end and energy include the non-routed events.
    stages
        [W, 7] stage times summed over layers, in s, order of ``stage.STAGES``.
    reads, token_reads
        int64 [W, num_tiers] replica reads, and token assignments, by the tier that served them.
    streamed_bytes, migrated_bytes
        [W, num_tiers] weights read; [W] weights copied.
    copies, evictions, refused, deferred
        int64 [W] copies begun, replicas dropped, edits that were illegal, copies that waited for room on a link.
    pressures
        [W, 4]: load, link, bank, migration.
    tier_use
        [W, num_tiers] used share of each tier.
    decide_s
        [W] CPU time of the running means and the decision, one thread.
    """

    policy: str
    workload: str
    phase: str
    level: str
    first_window: int
    routed_s: NDArray[np.float64]
    end_to_end_s: NDArray[np.float64]
    energy_j: NDArray[np.float64]
    edp: NDArray[np.float64]
    stages: NDArray[np.float64]
    reads: NDArray[np.int64]
    token_reads: NDArray[np.int64]
    streamed_bytes: NDArray[np.float64]
    migrated_bytes: NDArray[np.float64]
    copies: NDArray[np.int64]
    evictions: NDArray[np.int64]
    refused: NDArray[np.int64]
    deferred: NDArray[np.int64]
    pressures: NDArray[np.float64]
    tier_use: NDArray[np.float64]
    decide_s: NDArray[np.float64]

    @property
    def read_hit_rate(self) -> float:
        """Share of replica reads that a tier faster than the slowest served."""
        return float(self.reads[:, :-1].sum() / max(self.reads.sum(), 1))

    @property
    def token_hit_rate(self) -> float:
        """Share of token assignments that a tier faster than the slowest served."""
        return float(self.token_reads[:, :-1].sum() / max(self.token_reads.sum(), 1))


class _Rows:
    """Collects one row a window."""

    def __init__(self) -> None:
        self.values: dict[str, list[object]] = {}

    def add(self, **row: object) -> None:
        for name, value in row.items():
            self.values.setdefault(name, []).append(value)


def start_of(scene: Scene, workload: Workload) -> tuple[Layout, NDArray[np.float64]]:
    """The common start layout of a workload, and its profile: mean demand [L, E, C] of the first tenth."""
    profile = workload.profile() / workload.profile_windows
    return popularity_layout(scene, profile), profile


def run_policy(
    scene: Scene,
    workload: Workload | Sequence[NDArray[np.int32]],
    policy: Policy,
    *,
    level: Level = "stage",
    start: tuple[Layout, NDArray[np.float64]] | None = None,
    first_window: int | None = None,
    num_blocks: int = 1,
    keep: float = KEEP,
) -> PolicyRun:
    """Run a policy.

    The first tenth of the workload builds the start layout and the first running means; the run begins after it. In
    each window copies under way move first (throttled by the utilisations of the window before), the window is
    simulated, finished copies are published, then the policy sees the window and its edits are submitted: at most
    ``policy.max_edits`` of them, legal ones only. They take effect from the next window on at the earliest.

    Parameters
    ----------
    scene, workload
        Of the same sizes.
    policy
        A fresh object.
    level
        "stage" or "event".
    start
        :func:`start_of`, when it is at hand.
    first_window
        Default: the first after the profile.
    num_blocks
        Token blocks at event level.
    keep
        EWMA factor of the running means.

    Raises
    ------
    InvalidInput
        Workload of other sizes than the scene, or no window left to run.
    """
    layout, profile = start_of(scene, workload) if start is None else start  # type: ignore[arg-type]
    first = getattr(workload, "profile_windows", 0) if first_window is None else first_window
    if profile.shape != (scene.num_layers, scene.num_experts, scene.num_chiplets):
        shape = scene.num_layers, scene.num_experts, scene.num_chiplets
        raise InvalidInput(f"workload: demand {profile.shape}; expected {shape}, the scene's")
    if not 0 <= first < len(workload):
        raise InvalidInput(f"first_window: {first} is not in 0..{len(workload) - 1}, the windows of the workload")
    simulator = WindowSimulator(scene, num_blocks=num_blocks)
    directory = Directory(policy.start(scene, layout, profile).copy())
    directory.layout.check()
    migrator, hotness = Migrator(directory), Hotness(profile.shape, keep=keep)
    hotness.start(profile)
    rows, result = _Rows(), None
    for window in range(first, len(workload)):
        demand = workload[window]
        step = no_migration(scene)
        if result is not None:
            step = migrator.advance(result.link_utilisation, result.routed_s)
        slots = serve(simulator, policy, directory.layout, demand)
        throttle = 1.0 if result is None else result.next_throttle
        result = simulator.simulate(directory.layout, demand, slots, step, level, throttle=throttle)
        token_reads = tokens_by_tier(directory.layout, demand, slots)
        migrator.publish(window)
        begun = time.thread_time()
        hotness.update(demand, window)
        edits = policy.decide(PolicyView(scene, window, demand, result, directory, hotness))
        decide_s = time.thread_time() - begun
        edits = [edit for edit in edits if edit.kind not in ("no-op", "retain")][: policy.max_edits]
        refused = [edit for edit, _ in migrator.submit(edits, window)]
        begun_copies, evicted = (
            sum(is_kind(edit) for edit in edits) - sum(is_kind(edit) for edit in refused)
            for is_kind in (_copies, _evicts)
        )
        _add_row(rows, result, token_reads)
        rows.add(copies=begun_copies, evictions=evicted, refused=len(refused), decide_s=decide_s)
    arrays = {name: np.asarray(values) for name, values in rows.values.items()}
    name, phase = getattr(workload, "name", "windows"), getattr(workload, "phase", "")
    return PolicyRun(policy=policy.name, workload=name, phase=phase, level=level, first_window=first, **arrays)


def _copies(edit: Edit) -> bool:
    return edit.copies


def _evicts(edit: Edit) -> bool:
    return edit.kind == "evict"


def serve(simulator: WindowSimulator, policy: Policy, layout: Layout, demand: NDArray[np.int32]) -> NDArray[np.int8]:
    """Slots of a window under the policy's rule, which may be "balance" or an object with a ``serve`` method."""
    custom = getattr(policy, "serve", None)
    if custom is not None:
        return np.asarray(custom(simulator.stage.tables, layout, demand), dtype=np.int8)
    if policy.mapping == "balance":
        return balance_map(simulator.stage.tables, layout, demand)
    return simulator.assign(layout, demand, policy.mapping)


def tokens_by_tier(layout: Layout, demand: NDArray[np.int32], slots: NDArray[np.int8]) -> NDArray[np.int64]:
    """[num_tiers] token assignments by the tier whose weights served them."""
    tiers = np.take_along_axis(layout.tier, np.maximum(slots, 0).astype(np.int64), axis=2)
    count = np.bincount(tiers.ravel(), weights=demand.ravel(), minlength=layout.scene.num_tiers)
    return np.asarray(np.rint(count), dtype=np.int64)


def _add_row(rows: _Rows, result: WindowResult, token_reads: NDArray[np.int64]) -> None:
    pressures = result.pressures
    rows.add(
        routed_s=result.routed_s,
        end_to_end_s=result.end_to_end_s,
        energy_j=result.energy.total_j,
        edp=result.edp,
        stages=result.stages.sum(axis=0),
        reads=result.reads,
        token_reads=token_reads,
        streamed_bytes=result.streamed_bytes,
        migrated_bytes=result.migration.bytes_moved,
        deferred=result.migration.deferred,
        pressures=(pressures.load, pressures.link, pressures.bank, pressures.migration),
        tier_use=pressures.tier,
    )


def warmup() -> None:
    """Compile (or load from the cache) all kernels of simulator, maps, running means and look-ahead."""
    from routepack_opt.residency.machine.package import Package
    from routepack_opt.residency.machine.scene import scene_of
    from routepack_opt.residency.policies.look_ahead import LookAhead
    from routepack_opt.residency.simulator import simulate_window

    simulate_window.warmup()
    scene = scene_of(Package.load("paper"), num_layers=1, num_experts=3, top_k=1, expert_bytes=1024.0)
    profile = np.ones((1, 3, scene.num_chiplets))
    demand = np.ones(profile.shape, dtype=np.int32)
    demand[0, 0] = 90
    start = popularity_layout(scene, profile), profile
    run_policy(scene, [demand] * 6, LookAhead(max_edits=2, rest=0), start=start, first_window=0)
