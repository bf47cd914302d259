"""How far policies are from the bounds, window by window, on the same workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.models.residency import layout_bound
from routepack_opt.models.residency_fixed import assignment_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from routepack_opt.residency.control.policy_registry import Entry
    from routepack_opt.residency.control.run_windows import PolicyRun
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.layout import Layout
    from routepack_opt.residency.traces.windows import Workload


@dataclass(frozen=True)
class PolicyGap:
    """One policy against the bounds.

    Attributes
    ----------
    run
        All measured windows.
    routed_s
        [n] in the windows that have a bound.
    gaps
        [n] routed / bound over all layouts - 1.
    assignment_s
        [n] bound under the layout the policy had in that window; None when not asked for.
    """

    policy: str
    run: PolicyRun
    routed_s: NDArray[np.float64]
    gaps: NDArray[np.float64]
    assignment_s: NDArray[np.float64] | None

    @property
    def gap(self) -> float:
        """Sum over windows against the sum of the bounds; ``gaps`` are those of single windows."""
        return float(self.routed_s.sum() / (self.routed_s / (1.0 + self.gaps)).sum() - 1.0)


@dataclass(frozen=True)
class BoundReport:
    """Bounds of the windows ``windows`` [n]: ``bound_s`` [n] over all layouts, and the policies."""

    windows: NDArray[np.int64]
    bound_s: NDArray[np.float64]
    policies: list[PolicyGap]


class RecordedPolicy:
    """A policy as it is, which also keeps a copy of its layout in some windows."""

    def __init__(self, policy: Any, first_window: int, windows: Sequence[int]) -> None:
        """Window numbers count from ``first_window``, one a call of :meth:`serve`."""
        self._policy, self._window, self._wanted = policy, first_window, set(windows)
        self.layouts: dict[int, Layout] = {}

    def __getattr__(self, name: str) -> Any:
        """Whatever the policy has."""
        return getattr(self._policy, name)

    def serve(self, tables: Any, layout: Layout, demand: NDArray[np.int32]) -> NDArray[np.int8]:
        """Slots by the policy's own rule."""
        from routepack_opt.residency.mapping.balance_map import balance_map
        from routepack_opt.residency.mapping.mapping import assign

        if self._window in self._wanted:
            self.layouts[self._window] = layout.copy()
        self._window += 1
        custom = getattr(self._policy, "serve", None)
        if custom is not None:
            return np.asarray(custom(tables, layout, demand), dtype=np.int8)
        if self._policy.mapping == "balance":
            return balance_map(tables, layout, demand)
        return assign(tables, layout, demand, self._policy.mapping)


def spaced_windows(first: int, last: int, count: int) -> NDArray[np.int64]:
    """At most ``count`` window numbers of [first, last), evenly spaced from the first to the last."""
    return np.unique(np.linspace(first, last - 1, min(count, last - first)).astype(np.int64))


def bound_report(
    scene: Scene,
    workload: Workload,
    entries: Sequence[Entry],
    *,
    num_windows: int = 8,
    first_window: int | None = None,
    with_assignment: bool = False,
    progress: Callable[[str], None] | None = None,
) -> BoundReport:
    """Bounds of some windows of a workload, and each policy's distance from them.

    Parameters
    ----------
    scene, workload
        Of the same sizes.
    entries
        Policies of the registry; each runs over all windows after the profile, at stage level, from the common start
        layout.
    num_windows
        Windows with a bound, evenly spaced.
    first_window
        The first measured window; default: the first after the profile.
    with_assignment
        Also bound the best assignment under each policy's own layouts.
    progress
        Called with a line before each step.
    """
    from routepack_opt.residency.control.run_windows import run_policy, start_of

    tell = progress or (lambda _: None)
    first = workload.profile_windows if first_window is None else first_window
    windows = spaced_windows(first, len(workload), num_windows)
    tell(f"bounds of {len(windows)} windows")
    bound_s = np.array([layout_bound(scene, workload[int(w)]).bound_s for w in windows])
    start = start_of(scene, workload) if entries else None
    gaps = []
    for entry in entries:
        tell(f"policy {entry.name}")
        policy = RecordedPolicy(entry.make(workload), first, windows.tolist() if with_assignment else [])
        run = run_policy(scene, workload, policy, start=start, first_window=first)
        routed = run.routed_s[windows - first]
        under = None
        if with_assignment:
            under = np.array([
                assignment_bound(scene, policy.layouts[int(w)], workload[int(w)]).bound_s for w in windows
            ])  # fmt: skip
        ratio = np.divide(routed, bound_s, out=np.ones_like(routed), where=bound_s > 0)
        gaps.append(PolicyGap(entry.name, run, routed, ratio - 1.0, under))
    return BoundReport(windows, bound_s, gaps)
