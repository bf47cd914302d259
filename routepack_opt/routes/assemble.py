"""Counted blocks -> Window: the rules that only the whole call can decide (dense layers, groups, one top-k)."""

from __future__ import annotations

import os
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.routes.counting import BlockCounts, count_block, select_layers
from routepack_opt.routes.report import IngestReport, RouteWarning, plural
from routepack_opt.routes.samples import RouteBlock, checked_moe_layers, checked_num_experts, layer_ranges, refuse_huge
from routepack_opt.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


class WindowBuilder:
    """Collects counted blocks in order and turns them into one window.

    Memory is that of the counts: 4 N L E bytes, plus the blocks in flight.
    """

    def __init__(self, num_experts: int, moe_layers: Sequence[int] | None, report: IngestReport) -> None:
        """See the class; ``report`` is filled as blocks come."""
        self.num_experts = checked_num_experts(num_experts)
        self.moe_layers = checked_moe_layers(moe_layers)
        self.report = report
        self._counted: deque[tuple[RouteBlock, BlockCounts]] = deque()  # routes removed
        self._shape: tuple[int, int] | None = None  # counted layers, top_k
        self._shape_label = ""
        self._layer_numbers: tuple[int, ...] | None = None
        self._any_real: NDArray[np.bool_] | None = None  # [L], some sample has a row other than zero
        self._first_zero: dict[int, str] = {}  # layer -> label of the first sample that is zero there
        self._first_real: dict[int, str] = {}
        self._first_duplicate = ""
        self._first_missing = ""
        self._partly_missing = ""

    def layers_of(self, block: RouteBlock) -> NDArray[np.int64]:
        """The dump layers to count in this block; checks that all blocks agree on layers and top-k."""
        if block.routes is None:
            return np.empty(0, dtype=np.int64)
        dump_layers, top_k = block.routes.shape[1:]
        layers = select_layers(dump_layers, self.moe_layers, block.layer_numbers, block.label(0))
        shape = (int(layers.size), int(top_k))
        if self._shape is None:
            self._shape, self._shape_label, self._layer_numbers = shape, block.label(0), block.layer_numbers
        if shape[1] != self._shape[1]:
            raise InvalidInput(
                f"{block.label(0)}: top_k {shape[1]} but {self._shape_label} has {self._shape[1]}; they must agree"
            )
        if shape[0] != self._shape[0] or (self.moe_layers is None and block.layer_numbers != self._layer_numbers):
            raise InvalidInput(
                f"{block.label(0)}: {shape[0]} layers but {self._shape_label} has {self._shape[0]};"
                " give moe_layers to mix dumps of all layers with dumps of MoE layers only"
            )
        refuse_huge(block.num_samples * shape[0] * self.num_experts * 4, f"{block.label(0)}: counts")
        return layers

    def add(self, block: RouteBlock, counted: BlockCounts) -> None:
        """Take the next block's counts; call in order of samples."""
        report = self.report
        report.num_samples += block.num_samples
        report.num_tokens += int(block.lengths.sum())
        report.num_rows += int(counted.counted_rows.sum())
        report.num_filler_rows += int(counted.filler.sum())
        report.num_unrecorded_tokens += int(np.maximum(block.start_lens, 0).sum())
        report.num_assignments += int(counted.counts.sum(dtype=np.int64))
        if counted.counts.shape[1]:
            self._note_layers(block, counted)
            self._note_missing(block, counted)
        if counted.unlisted_layer >= 0:
            report.warn(f"layer {counted.unlisted_layer} carries routes but moe_layers leaves it out; not counted")
        self._counted.append((block, counted))

    def _note_layers(self, block: RouteBlock, counted: BlockCounts) -> None:
        real = counted.present & ~counted.all_zero
        if self._any_real is None:
            self._any_real = np.zeros(real.shape[1], dtype=np.bool_)
        self._any_real |= real.any(axis=0)
        for seen, firsts in ((counted.all_zero, self._first_zero), (real, self._first_real)):
            for layer in np.flatnonzero(seen.any(axis=0)):
                if int(layer) not in firsts:
                    firsts[int(layer)] = block.label(int(np.argmax(seen[:, layer])))
        # an all-zero layer repeats expert 0 in every row: it is judged as dense or as a failure, not as duplicates
        duplicates = np.where(counted.all_zero, 0, counted.duplicate_rows)
        self.report.num_duplicate_rows += int(duplicates.sum())
        if not self._first_duplicate and duplicates.any():
            sample, layer = np.argwhere(duplicates)[0]
            row = counted.first_duplicate[sample, layer]
            self._first_duplicate = f"{block.label(int(sample))}: row {row}, layer {self._number(int(layer))}"

    def _note_missing(self, block: RouteBlock, counted: BlockCounts) -> None:
        most = counted.missing_rows.max(axis=1)
        self.report.num_missing_rows += int(most.sum())
        if not self._first_missing and most.any():
            self._first_missing = block.label(int(np.argmax(most > 0)))
        uneven = most > counted.missing_rows.min(axis=1)
        if not self._partly_missing and uneven.any():
            self._partly_missing = block.label(int(np.argmax(uneven)))

    def _number(self, layer: int) -> int:
        """Dump layer number of a counted layer, as the user knows it."""
        if self.moe_layers is not None:
            return int(self.moe_layers[layer])
        return layer if self._layer_numbers is None else self._layer_numbers[layer]

    def _kept_layers(self) -> NDArray[np.int64]:
        """Counted layers that are MoE layers; raises on a layer recorded in some samples only."""
        assert self._shape is not None
        num_layers, top_k = self._shape
        real = np.zeros(num_layers, dtype=np.bool_) if self._any_real is None else self._any_real
        zero = np.zeros(num_layers, dtype=np.bool_)
        zero[list(self._first_zero)] = True
        if self.num_experts == 1:
            return np.arange(num_layers, dtype=np.int64)
        failed = zero & (real if self.moe_layers is None else True)
        if top_k > 1 and failed.any():
            layer = int(np.argmax(failed))
            beside = f" but not in {self._first_real[layer]}" if layer in self._first_real else ""
            raise InvalidInput(
                f"{self._first_zero[layer]}: MoE layer {self._number(layer)} is all zero here{beside};"
                " its routes were not recorded (recording failure)"
            )
        if self.moe_layers is not None:
            return np.arange(num_layers, dtype=np.int64)
        dense = zero & ~real
        if dense.all():
            raise InvalidInput(
                f"{self._shape_label}: every layer is zero in every sample; no routes were recorded"
                " (moe_layers names MoE layers whose tokens all chose expert 0)"
            )
        if dense.any():
            self.report.dense_layers = [self._number(int(layer)) for layer in np.flatnonzero(dense)]
            self.report.note(
                f"layers {layer_ranges(self.report.dense_layers)} are zero in every sample: taken as dense and dropped"
            )
        return np.flatnonzero(~dense).astype(np.int64)

    def _group_ids(self) -> NDArray[np.int64] | None:
        groups = [group for block, _ in self._counted for group in block.groups]
        absent = [at for at, group in enumerate(groups) if group is None]
        if len(absent) == len(groups):
            return None
        if absent:
            raise InvalidInput(f"sample {absent[0]} of the window has no group but others have one; give all or none")
        if all(isinstance(group, int) for group in groups):
            return np.array(groups, dtype=np.int64)
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(str(group), len(numbers)) for group in groups], dtype=np.int64)

    def _report_anomalies(self) -> None:
        report = self.report
        if report.num_filler_rows:
            report.note(f"{plural(report.num_filler_rows, 'filler last row')} (all zero or all -1) dropped")
        if report.num_unrecorded_tokens:
            report.warn(f"{plural(report.num_unrecorded_tokens, 'token')} before start_len carry no routes")
        if not report.num_assignments:
            report.warn("no route was counted in any sample; the demand is zero")
        if report.num_missing_rows:
            report.warn(
                f"{plural(report.num_missing_rows, 'missing row')} (all -1) counted as nothing;"
                f" first in {self._first_missing}"
            )
        if self._partly_missing:
            report.warn(f"some rows are missing in some layers only; first in {self._partly_missing}")
        if report.num_duplicate_rows:
            report.warn(
                f"duplicate ids: {plural(report.num_duplicate_rows, 'token row')} with an expert named twice"
                f" (counted as given); first in {self._first_duplicate}"
            )

    def finish(self, *, counts: Literal["recorded", "predicted"] = "recorded") -> Window:
        """The window of all blocks added."""
        if not self._counted:
            raise InvalidInput("no samples were found; expected at least one")
        if self._shape is None:
            raise InvalidInput(f"{self._counted[0][0].label(0)}: no sample has any route row; layers are unknown")
        kept = self._kept_layers()
        names, groups = self._sample_ids(), self._group_ids()
        self._report_anomalies()
        lengths = np.concatenate([block.lengths for block, _ in self._counted])
        demand = np.zeros((lengths.size, kept.size, self.num_experts), dtype=np.int32)
        whole, start = kept.size == self._shape[0], 0
        while self._counted:  # release each block once copied: the peak stays near one copy of the counts
            block, counted = self._counted.popleft()
            stop = start + block.num_samples
            if counted.counts.shape[1]:
                demand[start:stop] = counted.counts if whole else counted.counts[:, kept]
            start = stop
        report = self.report
        report.num_layers, report.top_k = int(kept.size), self._shape[1]
        if self.moe_layers is not None or self._layer_numbers is not None or report.dense_layers:
            report.moe_layers = [self._number(int(layer)) for layer in kept]
        dropped = self._shape[0] - kept.size
        report.num_assignments = int(demand.sum(dtype=np.int64)) if dropped else report.num_assignments
        meta: dict[str, Any] = {}
        if report.notes or report.warnings:
            meta["ingest"] = {"notes": list(report.notes), "warnings": list(report.warnings)}
        return Window(
            lengths,
            demand,
            sample_ids=names,
            group_ids=groups,
            moe_layers=report.moe_layers,
            top_k=report.top_k,
            counts=counts,
            meta=meta,
        )

    def _sample_ids(self) -> list[str] | None:
        names = [name for block, _ in self._counted for name in block.ids]
        if all(name is None for name in names):
            return None
        texts = [str(at) if name is None else name for at, name in enumerate(names)]
        if len(set(texts)) < len(texts):
            seen: set[str] = set()
            twice = next(text for text in texts if text in seen or seen.add(text))  # type: ignore[func-returns-value]
            self.report.warn(f"sample id {twice!r} appears more than once")
        return texts


def build_window(
    blocks: Iterable[RouteBlock],
    builder: WindowBuilder,
    *,
    max_workers: int | None = None,
    counts: Literal["recorded", "predicted"] = "recorded",
) -> Window:
    """Count ``blocks`` on threads while the next ones are read, and assemble the window in order.

    At most two blocks a worker are in flight, so memory does not grow with the number of tokens. The first error in
    order of samples wins, whatever the timing.
    """
    workers = max_workers or min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    waiting: deque[tuple[RouteBlock, Future[BlockCounts]]] = deque()

    def take_first() -> None:
        block, future = waiting.popleft()
        builder.add(_without_routes(block), future.result())

    source = iter(blocks)
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="count-routes") as pool:
        while True:
            try:
                block = next(source, None)
                layers = None if block is None else builder.layers_of(block)
            except InvalidInput:
                while waiting:  # an earlier sample may be wrong too: name the first one
                    take_first()
                raise
            if block is None or layers is None:
                break
            waiting.append((block, pool.submit(count_block, block, builder.num_experts, layers)))
            if len(waiting) >= 2 * workers:
                take_first()
        while waiting:
            take_first()
    return builder.finish(counts=counts)


def _without_routes(block: RouteBlock) -> RouteBlock:
    from dataclasses import replace

    return replace(block, routes=None)


def announce(report: IngestReport) -> None:
    """Raise Python warnings for a caller who passed no report."""
    for text in report.warnings:
        warnings.warn(text, RouteWarning, stacklevel=3)
