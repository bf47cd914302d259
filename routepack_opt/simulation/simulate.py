"""Predicted step time of a layout on a cluster: compute, all-to-all, pipeline bubble, moved experts, gradients.

A model, not a measurement: everything made here is called simulated wherever it is shown.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.simulation.traffic import dispatch_counts, exchange_seconds, gpu_bytes, moved_traffic, shard_gpus
from routepack_opt.simulation.work import AttentionKernel, ExpertKernel, layout_work, step_time

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.simulation.cluster import Cluster
    from routepack_opt.simulation.kernel_shape import KernelShape
    from routepack_opt.simulation.layouts import Layout
    from routepack_opt.simulation.step_model import StepModel
    from routepack_opt.simulation.work import Kernel, Times
    from routepack_opt.window import Window


@dataclass(frozen=True)
class Assumptions:
    """What no sheet tells.

    Parameters
    ----------
    efficiency
        Share of the peak flops that dense kernels reach, where no measured times are given.
    backward
        Backward over forward, compute and all-to-all alike counted once more: compute takes ``backward`` times the
        forward, the all-to-all of the backward is as large as that of the forward. 0: forward only.
    activation_bytes, weight_bytes
        Bytes of an activation number, and of a weight in memory (2: bf16).
    state_bytes
        Bytes that move with one expert parameter: weight, master and two moments (14).
    gradient_bytes
        Bytes of a reduced gradient number.
    pipeline
        Pipeline stages; layers are shared evenly.
    overlap
        Share of the expert movement that is hidden behind other work.
    reduce_gradients
        Whether the gradient reduction is added, without overlap.
    """

    efficiency: float = 0.5
    backward: float = 2.0
    activation_bytes: float = 2.0
    weight_bytes: float = 2.0
    state_bytes: float = 14.0
    gradient_bytes: float = 4.0
    pipeline: int = 1
    overlap: float = 0.0
    reduce_gradients: bool = False

    def __post_init__(self) -> None:
        """Validate."""
        for name, low, high in (
            ("efficiency", 1e-6, 1.0),
            ("backward", 0.0, 100.0),
            ("activation_bytes", 0.0, 1e6),
            ("weight_bytes", 0.0, 1e6),
            ("state_bytes", 0.0, 1e6),
            ("gradient_bytes", 0.0, 1e6),
            ("overlap", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise InvalidInput(f"{name}: {value!r} is not a number from {low:g} to {high:g}")
        if isinstance(self.pipeline, bool) or not isinstance(self.pipeline, int) or self.pipeline < 1:
            raise InvalidInput(f"pipeline: {self.pipeline!r} is not an integer >= 1")


@dataclass(frozen=True, eq=False)
class Simulated:
    """Predicted step of one layout.

    Attributes
    ----------
    attention_s, experts_s, exchange_s
        float64 [R, G], all layers, forward and backward.
    bubble_s
        Idle time of the pipeline, of the slowest shard.
    moves_s, gradients_s
        Exposed expert movement, and gradient reduction.
    moved_bytes, exchanged_bytes
        Per shard copy: bytes of all experts that change rank; bytes all shards send between GPUs in the step.
    step_s
        The whole step.
    """

    name: str
    attention_s: NDArray[np.float64]
    experts_s: NDArray[np.float64]
    exchange_s: NDArray[np.float64]
    bubble_s: float
    moves_s: float
    gradients_s: float
    moved_bytes: float
    exchanged_bytes: float
    step_s: float


class ComputeModel:
    """Seconds of kernels, from measured fits where there are any, else from the sheet's flops and memory rates."""

    def __init__(
        self, shape: KernelShape, cluster: Cluster, assumptions: Assumptions, measured: StepModel | None = None
    ) -> None:
        """``measured`` must be of the same sizes (checked by its reader)."""
        self.shape, self.cluster, self.assumptions, self.measured = shape, cluster, assumptions, measured

    def seconds(self, kernel: Kernel) -> float:
        """Forward and backward of one layer."""
        measured = self.measured
        whole = 1.0 + self.assumptions.backward
        if measured is not None and measured.backward:
            factor = 1.0 if self.assumptions.backward else 1.0 / 3.0
        else:
            factor = whole
        if isinstance(kernel, ExpertKernel):
            if measured is not None and measured.experts is not None:
                constant, active, assignment = measured.experts
                return factor * (constant + active * kernel.num_active + assignment * kernel.tokens)
            return whole * self._roofline(*self._expert_work(kernel))
        terms = None if measured is None else measured.blocks.get(self.shape.blocks[kernel.block].name)
        if terms is not None:
            return factor * (terms[0] + terms[1] * kernel.tokens + terms[2] * kernel.squares)
        return whole * self._roofline(*self._block_work(kernel))

    def _roofline(self, madds: float, moved_bytes: float) -> float:
        compute = 2.0 * madds / (self.cluster.flops_per_s * self.assumptions.efficiency)
        return max(compute, moved_bytes / self.cluster.memory_bytes_per_s)

    def _expert_work(self, kernel: ExpertKernel) -> tuple[float, float]:
        parameters, a = self.shape.expert_parameters, self.assumptions
        weights = kernel.num_active * parameters * a.weight_bytes
        rows = kernel.tokens * (2.0 * self.shape.hidden + 3.0 * self.shape.expert_width) * a.activation_bytes
        return float(kernel.tokens) * parameters, weights + rows

    def _block_work(self, kernel: AttentionKernel) -> tuple[float, float]:
        block, hidden, a = self.shape.blocks[kernel.block], self.shape.hidden, self.assumptions
        madds = self.shape.attention_madds(block, kernel.tokens, kernel.squares)
        columns = block.projection_width + block.num_heads * block.v_dim + 3 * block.dense_width
        return madds, hidden * columns * a.weight_bytes + kernel.tokens * (2 * hidden + columns) * a.activation_bytes


def simulate(
    window: Window,
    layout: Layout,
    shape: KernelShape,
    cluster: Cluster,
    assumptions: Assumptions | None = None,
    *,
    measured: StepModel | None = None,
    sync: Literal["shard", "row"] = "shard",
    standing_slots: NDArray[np.int64] | None = None,
) -> Simulated:
    """Predict one step.

    The all-to-all sends every assignment on its own (hidden x activation_bytes each way), as the torch dispatcher
    does; a token that goes to two experts of one rank is sent twice.

    Parameters
    ----------
    measured
        Kernel times of :mod:`~routepack_opt.simulation.calibrate`; the sheet's rates stand in for what is missing.
    standing_slots
        int64 [L, E], the placement in force before; None: nothing is moved.
    """
    assumptions = assumptions or Assumptions()
    num_layers = max(window.num_layers, math.ceil(sum(shape.block_layers(window.num_layers))))
    if assumptions.pipeline > num_layers:
        raise InvalidInput(f"pipeline: {assumptions.pipeline} stages for {num_layers} layers")
    work = layout_work(window, layout)
    compute = ComputeModel(shape, cluster, assumptions, measured)
    times: Times = {kernel: compute.seconds(kernel) for kernel in work.kernels(len(shape.blocks))}
    kernels = step_time(work, times, shape.block_layers(window.num_layers), sync)
    with np.errstate(over="ignore"):  # refused below
        exchange, exchanged_bytes = exchange_times(window, layout, shape, cluster, assumptions)
    rows = kernels.costs_s + exchange
    if sync == "row":
        rows = np.repeat(rows.max(axis=1, keepdims=True), rows.shape[1], axis=1)
    steps = [pipeline_seconds(rows[:, g], assumptions.pipeline) for g in range(rows.shape[1])]
    slowest = int(np.argmax(steps))
    if not math.isfinite(steps[slowest]):
        raise InvalidInput(f"cluster {cluster.name}: the simulated step is not a finite time; a rate is too small")
    bubble = steps[slowest] - math.fsum(rows[:, slowest]) / assumptions.pipeline
    moves_s, moved_bytes = _moves(window, layout, shape, cluster, assumptions, standing_slots)
    gradients_s = _gradients(layout, shape, window, cluster, assumptions) if assumptions.reduce_gradients else 0.0
    return Simulated(
        layout.name,
        kernels.attention_s,
        kernels.experts_s,
        exchange,
        bubble,
        moves_s,
        gradients_s,
        moved_bytes,
        exchanged_bytes,
        steps[slowest] + moves_s + gradients_s,
    )


def exchange_times(
    window: Window, layout: Layout, shape: KernelShape, cluster: Cluster, assumptions: Assumptions
) -> tuple[NDArray[np.float64], float]:
    """float64 [R, G] seconds of dispatch and combine over all layers, and bytes sent between GPUs in the step."""
    passes = 2.0 * (2.0 if assumptions.backward else 1.0)  # dispatch and combine, forward and backward
    per_assignment = shape.hidden * assumptions.activation_bytes
    seconds = np.zeros((len(layout.cells), layout.topology.num_shards))
    total = 0.0
    gpus_of = shard_gpus(layout.topology, cluster.gpus_per_node)
    for g, counts in enumerate(dispatch_counts(window, layout)):
        for r, layers in enumerate(counts):
            traffic = gpu_bytes(layers, gpus_of[g], per_assignment)
            seconds[r, g] = passes * float(exchange_seconds(traffic, gpus_of[g], cluster).sum())
            total += passes * float(traffic.sum() - np.trace(traffic, axis1=-2, axis2=-1).sum())
    return seconds, total


def pipeline_seconds(rows_s: NDArray[np.float64], num_stages: int) -> float:
    """A step of microbatches ``rows_s`` (seconds through all stages) on equal stages.

    Each stage spends 1 / stages of a row on it; the last stage starts after the first row has passed the others, and
    the longest row sets the pace of filling and draining: sum / S + (S - 1) / S * max.
    """
    total = math.fsum(rows_s)
    return total / num_stages + (num_stages - 1) / num_stages * float(rows_s.max())


def _moves(
    window: Window,
    layout: Layout,
    shape: KernelShape,
    cluster: Cluster,
    assumptions: Assumptions,
    standing_slots: NDArray[np.int64] | None,
) -> tuple[float, float]:
    """Exposed seconds (the shards move at the same time), and bytes of one shard's copy."""
    if standing_slots is None:
        return 0.0, 0.0
    per_rank = layout.topology.experts_per_rank(window.num_experts)
    rank_of, standing = layout.logical_to_slot // per_rank, standing_slots // per_rank
    expert_bytes = shape.expert_parameters * assumptions.state_bytes
    seconds = [
        float(exchange_seconds(moved_traffic(rank_of, standing, gpus, expert_bytes), gpus, cluster))
        for gpus in shard_gpus(layout.topology, cluster.gpus_per_node)
    ]
    moved = int((rank_of != standing).sum())
    share = 1.0 / assumptions.pipeline  # stages move their own layers at the same time
    return max(seconds) * share * (1.0 - assumptions.overlap), moved * expert_bytes


def _gradients(layout: Layout, shape: KernelShape, window: Window, cluster: Cluster, assumptions: Assumptions) -> float:
    """Ring all-reduces of dense gradients over DP and expert gradients over shards, at the slower link's rate."""
    topology = layout.topology
    dense = sum(
        n * shape.hidden * (b.projection_width + b.num_heads * b.v_dim + 3 * b.dense_width)
        for b, n in zip(shape.blocks, shape.block_layers(window.num_layers), strict=True)
    )
    experts = window.num_layers * topology.experts_per_rank(window.num_experts) * shape.expert_parameters
    rate = cluster.intra_bytes_per_s if topology.dp <= cluster.gpus_per_node else cluster.inter_bytes_per_s
    seconds = 0.0
    for parameters, group in ((dense, topology.dp), (experts, topology.num_shards)):
        ring = 2.0 * (group - 1) / group * parameters * assumptions.gradient_bytes / assumptions.pipeline
        seconds += ring / rate
    return seconds


def simulated_json(result: Simulated, tokens: int) -> dict[str, Any]:
    """Plain values; ``simulated`` is true so that no reader takes them for measured ones."""
    return {
        "simulated": True,
        "name": result.name,
        "rows": len(result.attention_s),
        "step_s": result.step_s,
        "tokens_per_s": tokens / result.step_s if result.step_s > 0 else None,
        "shards": [
            {"attention_s": float(a), "experts_s": float(e), "exchange_s": float(x)}
            for a, e, x in zip(
                result.attention_s.sum(axis=0),
                result.experts_s.sum(axis=0),
                result.exchange_s.sum(axis=0),
                strict=True,
            )
        ],
        "bubble_s": result.bubble_s,
        "moves_s": result.moves_s,
        "gradients_s": result.gradients_s,
        "moved_bytes": result.moved_bytes,
        "exchanged_bytes": result.exchanged_bytes,
    }


def assumptions_json(assumptions: Assumptions) -> dict[str, Any]:
    """Plain values."""
    return asdict(assumptions)
