"""Time many kernels fairly: shuffled rounds, so that a machine that drifts slows all layouts alike."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.simulation.work import AttentionKernel, ExpertKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from routepack_opt.simulation.work import Kernel, LayoutWork

logger = logging.getLogger(__name__)

Statistic = Literal["median", "min"]
_PILOTS = 5


class Timer(Protocol):
    """Runs one kernel once."""

    def time_s(self, kernel: Kernel) -> float:
        """Seconds of one run, finished when this returns."""


@dataclass(frozen=True)
class Measured:
    """Runs of one kernel, warm-up left out."""

    runs_s: tuple[float, ...]

    def value_s(self, statistic: Statistic) -> float:
        """Median or smallest run."""
        return min(self.runs_s) if statistic == "min" else float(statistics.median(self.runs_s))


def measure(
    kernels: Sequence[Kernel],
    timer: Timer,
    *,
    repeats: int = 5,
    warmup: int = 1,
    deadline: float | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Kernel, Measured]:
    """Run every kernel ``repeats`` times in rounds, each in an order of its own.

    Parameters
    ----------
    deadline
        On ``clock``: no further round starts after it, once every kernel has been timed.
    warmup
        Rounds that are run and thrown away.
    """
    rng = np.random.default_rng(seed)
    runs: dict[Kernel, list[float]] = {kernel: [] for kernel in kernels}
    for number in range(warmup + repeats):
        if number > warmup and deadline is not None and clock() >= deadline:
            logger.info("time is up after %d of %d rounds", number - warmup, repeats)
            break
        logger.info("round %d of %d: %d kernels", number + 1, warmup + repeats, len(kernels))
        for k in rng.permutation(len(kernels)).tolist():
            seconds = timer.time_s(kernels[k])
            if number >= warmup:
                runs[kernels[k]].append(seconds)
    return {kernel: Measured(tuple(values)) for kernel, values in runs.items()}


def layers_within(
    works: Sequence[LayoutWork],
    num_blocks: int,
    timer: Timer,
    budget_s: float,
    rounds: int,
    extra: Sequence[Kernel] = (),
) -> list[int]:
    """MoE layers, evenly spread, whose kernels fit ``rounds`` times into ``budget_s``; at least one.

    A few kernels of each kind are run to learn the pace: seconds a token for experts, seconds a token for attention.
    """
    kernels = list(dict.fromkeys(kernel for work in works for kernel in work.kernels(num_blocks)))
    attention = [k for k in kernels if isinstance(k, AttentionKernel)]
    experts = [k for k in kernels if isinstance(k, ExpertKernel)]
    spent_s = _predict_s(attention, timer)
    for kind in (AttentionKernel, ExpertKernel):
        spent_s += _predict_s([k for k in extra if isinstance(k, kind)], timer)
    per_layer_s = _predict_s(experts, timer) / works[0].num_layers
    left_s = budget_s / rounds - spent_s
    count = works[0].num_layers if per_layer_s <= 0 else int(left_s / per_layer_s)
    return spread_layers(works[0].num_layers, max(1, count))


def spread_layers(num_layers: int, count: int) -> list[int]:
    """``count`` of ``num_layers`` layers, one from the middle of each of as many equal parts."""
    if count < 1:
        raise InvalidInput(f"layers: {count} is below 1")
    count = min(count, num_layers)
    return [(2 * k + 1) * num_layers // (2 * count) for k in range(count)]


def _predict_s(kernels: Sequence[Kernel], timer: Timer) -> float:
    """Seconds of one round, from the pace of a few kernels of all sizes."""
    if not kernels:
        return 0.0
    ordered = sorted(kernels, key=lambda kernel: kernel.tokens)
    pilots = [ordered[k] for k in sorted(set(np.linspace(0, len(ordered) - 1, _PILOTS).astype(int).tolist()))]
    timer.time_s(pilots[-1])  # the first run of all also sets buffers up
    seconds = sum(timer.time_s(kernel) for kernel in pilots)
    share = len(kernels) / len(pilots)
    tokens = sum(kernel.tokens for kernel in pilots)
    if tokens:
        share = sum(kernel.tokens for kernel in kernels) / tokens
    return float(seconds * share)
