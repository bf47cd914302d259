"""Training ground: workloads in memory, and episodes that start from layouts of fresh, old or foreign popularity."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.control.start_layout import popularity_layout
from routepack_opt.residency.machine.scene import build_scene
from routepack_opt.residency.traces.windows import synthetic_workload, trace_workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.dqn.settings import Settings, WorkloadSettings
    from routepack_opt.residency.machine.package import Package
    from routepack_opt.residency.machine.scene import Scene
    from routepack_opt.residency.simulator.layout import Layout
    from routepack_opt.residency.traces.route_trace import RouteTrace
    from routepack_opt.residency.traces.windows import Phase

_PROFILE_WINDOWS = 8


@dataclass(frozen=True)
class Ground:
    """One workload on its scene.

    Parameters
    ----------
    name
        Model and phase.
    scene
        Of the model, default scope.
    windows
        int32 [W, L, E, C].
    """

    name: str
    scene: Scene
    windows: NDArray[np.int32]

    @property
    def sha256(self) -> str:
        """Over shape and counts."""
        return hashlib.sha256(str(self.windows.shape).encode() + self.windows.tobytes()).hexdigest()


@dataclass(frozen=True)
class Episode:
    """A stretch of a workload with its start.

    ``windows`` the demand of each window and of some that follow; ``start`` layout and profile.
    """

    ground: Ground
    windows: list[NDArray[np.int32]]
    start: tuple[Layout, NDArray[np.float64]]


def load_ground(package: Package, work: WorkloadSettings, seed: int) -> Ground:
    """Build the scene and draw, or read, all windows."""
    scene = build_scene(package, work.model)
    phase: Phase = "prefill" if work.phase == "prefill" else "decode"
    if work.trace:
        workload = trace_workload(
            _read_trace(work, scene), phase, scene.num_chiplets, num_windows=work.num_windows,
            layers=range(scene.num_layers), seed=seed,
        )  # fmt: skip
    else:
        workload = synthetic_workload(
            work.model, phase, scene.num_chiplets, num_layers=scene.num_layers, num_experts=scene.num_experts,
            top_k=scene.top_k, num_windows=work.num_windows, seed=seed,
        )  # fmt: skip
    return Ground(f"{work.model} {work.phase}{' trace' if work.trace else ''}", scene, workload.array())


def _read_trace(work: WorkloadSettings, scene: Scene) -> RouteTrace:
    """The trace, refused when it is of another model."""
    from routepack_opt.residency.traces.token_trace import read_trace

    trace = read_trace(work.trace, num_experts=scene.num_experts, expert_bytes=int(scene.expert_bytes[0]))
    if (trace.num_experts, trace.top_k) != (scene.num_experts, scene.top_k):
        raise InvalidInput(
            f"{work.trace}: {trace.num_experts} experts, top-{trace.top_k}; expected {scene.num_experts}, "
            f"top-{scene.top_k}, those of {work.model}"
        )
    if trace.num_layers < scene.num_layers:
        raise InvalidInput(f"{work.trace}: {trace.num_layers} layers; expected {scene.num_layers}, those in scope")
    return trace


def draw_episode(ground: Ground, settings: Settings, rng: np.random.Generator) -> Episode:
    """A stretch at a random place.

    Its start layout follows the popularity of the windows before it, of windows elsewhere in the workload, or (an
    arrival of other users) of the same windows with the experts of each layer renamed, a third of the time each.
    """
    length = settings.episode_windows + settings.reward_windows
    first = int(rng.integers(len(ground.windows) - length + 1))
    age = int(rng.integers(3))
    begun = first - _PROFILE_WINDOWS if age == 0 else int(rng.integers(len(ground.windows)))
    at = np.arange(begun, begun + _PROFILE_WINDOWS) % len(ground.windows)
    profile = ground.windows[at].mean(axis=0)
    if age == 2:
        for layer in range(len(profile)):
            profile[layer] = profile[layer, rng.permutation(profile.shape[1])]
    layout = popularity_layout(ground.scene, profile)
    return Episode(ground, list(ground.windows[first : first + length]), (layout, profile))
