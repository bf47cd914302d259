"""The GPU benchmark runs on a CPU too, and its report holds what it promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.slow
def test_quick_run_reports_rates_and_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_layout

    out = tmp_path / "report.json"
    gpu_layout.main(["--device", "cpu", "--quick", "-o", str(out)])
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["machine"]["device"] == "cpu"
    (window,) = report["windows"]
    for engine in ("numpy", "cpu_engine"):
        assert window[engine]["scored_per_s"] > 0
        assert set(window[engine]["gap"]) == {"0.05", "0.2"}
    assert any(set(entry["search"]) == {"0.05", "0.2"} for entry in window["torch"])
    for entry in window["torch"]:
        assert all(0.0 <= found["gap"] <= window["start_gap"] * (1 + 1e-12) for found in entry["search"].values())
    sys.modules.pop("gpu_layout")


def test_numpy_chain_keeps_its_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    from chain_problems import random_chain_problem

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from numpy_chain import NumpyChain

    from routepack_opt.solvers.annealing.exact_score import score_assignment

    for seed in range(5):
        problem, cell_of, rank_of = random_chain_problem(np.random.default_rng(seed), plain=True, sync="shard")
        chain = NumpyChain(problem, cell_of, rank_of, seed)
        chain.anneal(0.1, 200)
        score = score_assignment(problem, chain.cell_of, rank_of)
        assert chain.slowest_shard == pytest.approx(score.slowest_shard, rel=1e-9)
        padded = np.bincount(chain.cell_of, weights=problem.padded)
        assert padded.max() <= problem.cap
