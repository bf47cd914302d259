"""Step time of layouts from the kernels they run, measured on one device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from routepack_opt.simulation.timing import layers_within, measure
from routepack_opt.simulation.work import layout_work, step_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from routepack_opt.simulation.kernel_shape import KernelShape
    from routepack_opt.simulation.layouts import Layout
    from routepack_opt.simulation.timing import Measured, Statistic, Timer
    from routepack_opt.simulation.work import Kernel, StepTime
    from routepack_opt.window import Window


@dataclass(frozen=True, eq=False)
class Replay:
    """What was measured, and the step times it adds up to.

    Attributes
    ----------
    step_times
        One for each layout, in order.
    measured
        Runs of every distinct kernel.
    notes
        What was left out or scaled.
    """

    step_times: tuple[StepTime, ...]
    measured: dict[Kernel, Measured]
    notes: tuple[str, ...]
    statistic: Statistic
    seconds: float


def replay(
    window: Window,
    layouts: Sequence[Layout],
    shape: KernelShape,
    timer: Timer,
    *,
    sync: Literal["shard", "row"] = "shard",
    repeats: int = 5,
    warmup: int = 1,
    budget_s: float | None = None,
    layers: Sequence[int] | None = None,
    extra: Sequence[Kernel] = (),
    statistic: Statistic = "median",
    seed: int = 0,
) -> Replay:
    """Measure each distinct kernel of all layouts and add the times up as the job would wait for them.

    Parameters
    ----------
    timer
        Runs a kernel; :class:`~routepack_opt.simulation.torch_kernels.TorchTimer`, or anything with its ``time_s``.
    budget_s
        About how long to measure: layers are sampled to fit, and a note says so. None measures all of them.
    layers
        MoE layers to measure, instead of choosing by ``budget_s``.
    extra
        Kernels to measure as well, for :mod:`~routepack_opt.simulation.calibrate`; no layout runs them.
    statistic
        What stands for a kernel's runs. The largest of several noisy medians is above the largest of the true times,
        most so where loads are level; "min" suffers less on a machine that others use too.
    """
    start = time.perf_counter()
    num_blocks = len(shape.blocks)
    works = [layout_work(window, layout, layers) for layout in layouts]
    notes = []
    if layers is None and budget_s is not None:
        chosen = layers_within(works, num_blocks, timer, budget_s, warmup + repeats, extra)
        if len(chosen) < window.num_layers:
            works = [layout_work(window, layout, chosen) for layout in layouts]
    if len(works[0].layers) < window.num_layers:
        notes.append(
            f"sampled: experts of {len(works[0].layers)} of {window.num_layers} MoE layers were measured and scaled up"
        )
    notes += shape.layer_notes(window.num_layers)
    linear = [block.name for block in shape.blocks if block.kind == "linear"]
    if linear:
        notes.append(f"{', '.join(linear)} attention: projections are run, the recurrent state is not")
    needed = dict.fromkeys(kernel for work in works for kernel in work.kernels(num_blocks))
    kernels = list(needed | dict.fromkeys(extra))
    deadline = None if budget_s is None else start + budget_s
    measured = measure(kernels, timer, repeats=repeats, warmup=warmup, deadline=deadline, seed=seed)
    fewest = min(len(m.runs_s) for m in measured.values())
    if fewest < repeats:
        notes.append(f"time was up after {fewest} of {repeats} rounds")
    spent_s = time.perf_counter() - start
    if budget_s is not None and spent_s > max(1.5 * budget_s, budget_s + 1.0):
        notes.append(f"time budget: {spent_s:.0f} s instead of {budget_s:g}; attention and one MoE layer take so long")
    times = {kernel: m.value_s(statistic) for kernel, m in measured.items()}
    block_layers = shape.block_layers(window.num_layers)
    results = tuple(step_time(work, times, block_layers, sync) for work in works)
    return Replay(results, measured, tuple(notes), statistic, time.perf_counter() - start)
