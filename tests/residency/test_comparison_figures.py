"""Figures of the paper next to ours, and the sentences and page made of records."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from routepack_opt.report.residency import residency_page
from routepack_opt.report.residency_text import findings
from routepack_opt.residency.comparison import summary as summary
from routepack_opt.residency.comparison.paper_figures import figures, order_sentence
from routepack_opt.residency.comparison.run import Comparison
from routepack_opt.residency.comparison.sweeps import ABLATION, BUDGET, MAIN
from routepack_opt.residency.control.policy_registry import OURS, STATIC

Record = dict[str, Any]
COMPARISON = Comparison(models=("deepseek-v3",), phases=("prefill",), policies=(STATIC, "hydra", OURS))


def made(policy: str, routed_s: float, *, table: str = MAIN, memory: bool = True, **fields: object) -> Record:
    """A record with the fields that summaries read."""
    hardware_links, binding = 56, [0.9 * routed_s, 0.0] if memory else [0.0, 0.9 * routed_s]
    return {
        "key": f"{table}/{policy}/{fields}", "table": table, "level": "stage", "model": "deepseek-v3",
        "phase": "prefill", "seed": 0, "policy": policy, "variation": "as-given", "budget_copies": None,
        "fast_capacity": 1.0, "without": "", "cold": False, "workload": "synthetic", "note": "made", "scope": "Scope.",
        "layers": 1, "tiers": ["sram", "hbm", "dram"], "region_tier": [0, 1, 2], "windows": 2, "routed_s": routed_s,
        "end_to_end_s": routed_s + 1, "energy_j": 2.0, "edp": 2.0 * (routed_s + 1),
        "stages": [0.0, 0.1 * routed_s, 0.0, *binding, 0.0, 0.0], "binding_s": binding, "reads": [1, 2, 3],
        "read_hit_rate": 0.5, "token_hit_rate": 0.5, "streamed_bytes": [1e9, 2e9, 3e9], "migrated_bytes": 0.0,
        "copies": 0, "evictions": 0, "refused": 0, "deferred": 0, "pressures": [0.1] * 4, "tier_use": [0.0, 1.0, 0.9],
        "memory_bound": float(memory), "decide_s": [1e-4, 1e-3], "chiplet_use": [0.5] * 16,
        "link_use": [0.1] * hardware_links, "region_use": [0.1, 0.6, 0.97], "routed_by_window": [routed_s, routed_s],
        "cpu_s": 0.1,
    } | fields  # fmt: skip


BOUND: Record = {"key": "b", "table": "bound", "model": "deepseek-v3", "phase": "prefill", "seed": 0, "windows": [0, 1],
                 "bound_s": [0.9, 0.9], "cpu_s": 0.1}  # fmt: skip


def find(records: list[Record], name: str, phase: str = "prefill") -> Any:
    return next(f for f in figures(records) if f.name == name and f.phase == phase)


def test_without_runs_every_figure_says_so() -> None:
    shown = figures([])
    assert len(shown) == 46 and {f.sentence for f in shown} == {"not run"} and not any(f.agrees for f in shown)
    assert order_sentence([]) is None


def test_agreement() -> None:
    figure = find([made("hydra", 1.0), made(OURS, 0.6)], "latency below hydra")
    assert figure.agrees and figure.show(figure.ours) == "40.0%" and "agrees" in figure.sentence


def test_a_bound_says_that_the_paper_is_out_of_reach() -> None:
    records = [made("hydra", 1.0), made(OURS, 0.95), BOUND]
    figure = find(records, "latency below hydra")
    assert figure.ours == pytest.approx(0.05) and not figure.agrees
    assert "no layout is more than 10.0% below hydra" in figure.sentence and "out of reach" in figure.sentence
    assert "streaming weights binds deepseek-v3 (busiest region 97% busy)" in figure.sentence
    roomy = [made("hydra", 1.0), made(OURS, 0.95), BOUND | {"bound_s": [0.3, 0.3]}]
    assert "there is room" in find(roomy, "latency below hydra").sentence


def test_binding_by_workload() -> None:
    runs = [made(STATIC, 1.0), made(STATIC, 1.0, memory=False, model="dbrx", chiplet_use=[0.8, 0.2])]
    found = summary.binding(runs, STATIC)
    assert found is not None and (found.streaming, found.arithmetic) == (["deepseek-v3"], ["dbrx"])
    assert "arithmetic binds dbrx (busiest chiplet 80% busy)" in found.sentence
    assert found.share["dispatch"] == pytest.approx(0.1) and "token traffic takes 10.0%" in found.sentence
    assert summary.binding(runs, "lru") is None


def test_ablation_and_budgets() -> None:
    records = [made(OURS, 1.0, table=ABLATION), made(f"{OURS}-no-load", 1.38, table=ABLATION)]
    figure = find(records, "latency without the load signal")
    assert figure.ours == pytest.approx(1.38) and figure.agrees
    records = [made(p, s, table=BUDGET, budget_copies=c) for p, s, c in (("hydra", 2.0, 1.0), (OURS, 0.9, 1.3))]
    figure = find(records, f"{OURS} at 1.3x copies over hydra at 1x", "")
    assert figure.ours == pytest.approx(0.45) and figure.agrees


def test_interrupted_comparisons_count_whole_workloads() -> None:
    runs = [made(STATIC, 1.0), made(OURS, 0.9), made(STATIC, 1.0, model="dbrx")]
    assert [r["model"] for r in summary.complete(runs)] == ["deepseek-v3"] * 2
    assert len(summary.complete(runs[1:])) == 2
    (line,) = [line for line in summary.headline(runs, "prefill") if line.policy == STATIC]
    assert line.hit_rate == 0.5 and line.against[STATIC] == 1.0


def test_findings_name_what_is_slower_than_static() -> None:
    records = [made(STATIC, 1.0), made("hydra", 1.1), made(OURS, 0.9), BOUND]
    lines = findings(COMPARISON, records, figures(records))
    assert "10.0% below static" in lines[0] and "0.0% above the bound" in lines[0]
    assert "prefill: slower than static on average: hydra (1.100)." in lines
    assert lines[-1] == "Recorded routes: none; all other workloads are synthetic."


def test_page_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_figures(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", no_figures)
    page = residency_page(COMPARISON, [made(STATIC, 1.0), made("hydra", 1.0), made(OURS, 0.9), BOUND])
    assert "figures need matplotlib" in page and "<svg" not in page and "0.900" in page


def test_page_of_refused_runs() -> None:
    refused = {"key": "k", "table": MAIN, "model": "deepseek-v3", "phase": "prefill", "seed": 0, "policy": OURS,
               "level": "stage", "variation": "as-given", "error": "does not fit"}  # fmt: skip
    assert "does not fit" in residency_page(COMPARISON, [refused])
