"""Where the time of a step goes, rank by rank, as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from routepack_opt.files import write_json
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh, all_gather_equal

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


class Timeline:
    """Spans of the last steps of one rank.

    Clocks of one machine are one; over several machines traces are as far apart as their clocks.
    """

    def __init__(self, keep_steps: int) -> None:
        """``keep_steps`` 0 records nothing."""
        self._steps: deque[list[dict[str, Any]]] = deque(maxlen=keep_steps)
        self._seconds: dict[str, float] = {}

    def begin_step(self, step: int) -> None:
        """Start the spans and the sums of a step."""
        self._step, self._seconds = step, {}
        self._steps.append([])

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the step; parts of one name add up, and may lie inside others."""
        start_ns = time.time_ns()
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.add(name, start_ns / 1e9, seconds)

    def add(self, name: str, start_s: float, seconds: float, *, lane: int = 0) -> None:
        """A part timed elsewhere; ``start_s`` is seconds of ``time.time``, lanes other than 0 run beside the step."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if self._steps:
            span = {"name": name, "ts": start_s * 1e6, "dur": seconds * 1e6, "tid": lane, "step": self._step}
            self._steps[-1].append(span)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part of the step that runs."""
        return dict(self._seconds)

    def write(self, path: str | os.PathLike[str], mesh: ParallelMesh) -> None:
        """Gather all ranks' spans and write them from rank 0; every rank calls it."""
        spans = [span for step in self._steps for span in step]
        parts = _gather_json(spans, mesh)
        if mesh.rank == 0:
            write_json(path, {"traceEvents": _events(parts), "displayTimeUnit": "ms"})


def _events(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    origin = min((span["ts"] for spans in parts for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(parts):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for span in spans:
            when = {"ts": round(span["ts"] - origin, 1), "dur": round(span["dur"], 1), "pid": rank, "tid": span["tid"]}
            events.append({"name": span["name"], "ph": "X", "cat": "step", **when, "args": {"step": span["step"]}})
    return events


def _gather_json(value: Any, mesh: ParallelMesh) -> list[Any]:
    text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    sizes = torch.cat(all_gather_equal(torch.tensor([text.size], device=mesh.device), mesh.dp_group)).tolist()
    padded = np.zeros(max(sizes), dtype=np.uint8)
    padded[: text.size] = text
    gathered = all_gather_equal(torch.from_numpy(padded).to(mesh.device), mesh.dp_group)
    return [
        json.loads(part[:size].cpu().numpy().tobytes().decode()) for part, size in zip(gathered, sizes, strict=True)
    ]
