"""Reading stays small: memory follows N L E, not tokens; importing the package compiles nothing."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np

import routepack_opt as rp
from routepack_opt.routes import IngestReport, warmup, window_from_routes

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_memory_is_linear_in_counts_not_in_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, tokens, layers, top_k = 60, 4000, 8, 4
    monkeypatch.setattr("routepack_opt.routes.npz.BLOCK_BYTES", 1)  # one sample a block
    routes = np.broadcast_to(np.arange(top_k, dtype=np.uint8), (samples * (tokens - 1), layers, top_k))
    np.savez_compressed(tmp_path / "long.npz", routed_experts=routes, seq_lens=np.full(samples, tokens))
    warmup()
    rp.read_routes(tmp_path / "long.npz", 16, report=IngestReport(), max_workers=1)
    tracemalloc.start()
    try:
        window = rp.read_routes(tmp_path / "long.npz", 16, report=IngestReport(), max_workers=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    one_sample = tokens * layers * top_k
    assert window.demand[:, :, :top_k].sum() == routes.size == samples * (one_sample - layers * top_k)
    assert peak < 8 * one_sample + 4 * window.demand.nbytes + (1 << 18)
    assert peak < routes.size / 4


def test_importing_routes_loads_neither_numba_nor_torch_nor_pyarrow() -> None:
    code = (
        "import sys, routepack_opt.routes as r; r.read_routes, r.count_experts, r.pad_routes;"
        "print([m for m in ('numba', 'torch', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_report_as_text_and_json() -> None:
    report = IngestReport()
    window_from_routes([np.array([[[1, 2], [2, 2]]])], [2], 4, report=report)
    text = report.lines()
    assert text[0] == "1 sample, 2 tokens, 1 route row, 2 MoE layers, top-2: 4 assignments"
    assert text[1].startswith("warning: duplicate ids: 1 token row")
    assert report.to_json()["num_duplicate_rows"] == 1
