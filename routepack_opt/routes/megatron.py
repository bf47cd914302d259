"""Megatron-LM routing traces (``--moe-routing-trace-path``): one JSON line per (step, block, layer) and micro-batch.

The trace has no sequence boundaries, so one micro-batch of one rank becomes one sample of the window. A layer that
comes again within a step begins the next micro-batch, as the tracer itself counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.routes.payloads import decode_routes
from routepack_opt.routes.samples import RouteBlock, single_sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from routepack_opt.routes.report import IngestReport

_INTEGERS = ("step", "layer", "rank", "num_tokens", "topk")


@dataclass
class _MicroBatch:
    name: str
    where: str
    layers: dict[int, NDArray[Any]] = field(default_factory=dict)


def is_trace_record(record: Any) -> bool:
    """Whether a JSON value looks like a line of a routing trace."""
    return isinstance(record, dict) and "top_indices" in record and "layer" in record


def read_trace(path: Path, records: Iterator[tuple[str, Any]], report: IngestReport) -> Iterator[RouteBlock]:
    """Blocks of one trace file; holds the micro-batches of one step."""
    open_batches: list[_MicroBatch] = []
    current: dict[tuple[Any, ...], _MicroBatch] = {}
    occurrence: dict[tuple[Any, ...], int] = {}
    num_samples, step, skipped = 0, None, 0
    for where, record in records:
        values, ids = _checked(record, where)
        if record["block"] == "mtp":  # prediction heads have experts of their own
            skipped += 1
            continue
        if values["step"] != step:
            for batch in open_batches:
                yield _block(path, batch, num_samples)
                num_samples += 1
            open_batches, current, occurrence, step = [], {}, {}, values["step"]
        key = (values["rank"], str(record["block"]))
        if key not in current or values["layer"] in current[key].layers:
            number = occurrence.get(key, -1) + 1
            name = f"step{step}.rank{values['rank']}.{record['block']}.{number}"
            current[key], occurrence[key] = _MicroBatch(name, where), number
            open_batches.append(current[key])
        current[key].layers[values["layer"]] = ids
    for batch in open_batches:
        yield _block(path, batch, num_samples)
        num_samples += 1
    if skipped:
        report.note(f"{path}: {skipped} records of multi-token prediction layers skipped")
    report.note(f"{path}: a trace has no sequence boundaries; each micro-batch of a rank is one sample")


def _checked(record: Any, where: str) -> tuple[dict[str, int], NDArray[Any]]:
    if not is_trace_record(record):
        raise InvalidInput(f"{where}: expected a trace record with 'layer' and 'top_indices'")
    values: dict[str, int] = {}
    for name in _INTEGERS:
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise InvalidInput(f"{where}: field {name!r}: {value!r} is not an integer from 0 to {2**31 - 1}")
        values[name] = value
    if not isinstance(record.get("block"), (str, int)):
        raise InvalidInput(f"{where}: field 'block': expected text such as 'decoder'")
    shape = (values["num_tokens"], values["topk"])
    ids = decode_routes(
        record["top_indices"],
        shape=[shape[0], 1, shape[1]],
        where=f"{where}: field 'top_indices'",
    )
    lowest, highest = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    if lowest < -(2**31) or highest >= 2**31:
        raise InvalidInput(
            f"{where}: field 'top_indices': id {highest if highest > 0 else lowest} does not fit 32 bits"
        )
    return values, ids.astype(np.int32)


def _block(path: Path, batch: _MicroBatch, index: int) -> RouteBlock:
    numbers = tuple(sorted(batch.layers))
    parts = [batch.layers[number] for number in numbers]
    if len({part.shape for part in parts}) > 1:
        raise InvalidInput(f"{batch.where}: micro-batch {batch.name}: layers differ in num_tokens or topk")
    if parts[0].shape[0] < 1:
        raise InvalidInput(f"{batch.where}: micro-batch {batch.name}: num_tokens is 0; expected at least 1")
    return single_sample(
        np.concatenate(parts, axis=1),
        parts[0].shape[0],
        source=str(path),
        index=index,
        sample_id=batch.name,
        layer_numbers=numbers,
    )
