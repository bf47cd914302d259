"""Statistics of the search: every temperature, in files and in a plot."""

from __future__ import annotations

import csv
import itertools
import json
from typing import TYPE_CHECKING

import pytest

from routepack_opt import Topology, plan_window
from routepack_opt.cli import main
from routepack_opt.errors import InvalidInput
from routepack_opt.report.annealing import plot_annealing, write_statistics
from routepack_opt.synth import synth

if TYPE_CHECKING:
    from pathlib import Path

    from routepack_opt.solvers.annealing.population import LevelStatistics


@pytest.fixture(scope="module")
def levels() -> list[LevelStatistics]:
    window = synth("qwen3-30b", 256, 0)
    found: list[LevelStatistics] = []
    plan_window(window, Topology(dp=8, ep=8), token_cap=8192, budget_s=0.4, statistics=found)
    return found


def test_levels_follow_the_clock_and_count_what_was_done(levels: list[LevelStatistics]) -> None:
    assert [level.level for level in levels] == list(range(len(levels)))
    assert all(a.seconds <= b.seconds and a.temperature > b.temperature for a, b in itertools.pairwise(levels))
    assert all(a.best_slowest_shard >= b.best_slowest_shard for a, b in itertools.pairwise(levels))
    for level in levels:
        assert 0 <= level.num_accepted <= level.num_scored <= level.num_proposals
        assert level.lowest_energy <= level.mean_energy
    assert sum(level.num_scored for level in levels) > 0


def test_files_hold_every_level(levels: list[LevelStatistics], tmp_path: Path) -> None:
    write_statistics(levels, tmp_path / "s.csv")
    write_statistics(levels, tmp_path / "s.jsonl")
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert len(rows) == len(lines) == len(levels)
    for row, line, level in zip(rows, lines, levels, strict=True):
        assert int(row["num_scored"]) == line["num_scored"] == level.num_scored
        assert float(row["temperature"]) == line["temperature"] == level.temperature
    with pytest.raises(InvalidInput, match=r"\.csv or \.jsonl"):
        write_statistics(levels, tmp_path / "s.txt")


def test_the_plot_is_drawn_on_the_axes_given(levels: list[LevelStatistics]) -> None:
    pytest.importorskip("matplotlib")
    ax = plot_annealing(levels)
    assert plot_annealing(levels, ax) is ax
    assert len(ax.lines) == 2


def test_the_command_writes_statistics_and_refuses_another_extension(tmp_path: Path) -> None:
    window = tmp_path / "w.npz"
    synth("qwen3-30b", 64, 0).save(window)
    plan = tmp_path / "p.json"
    common = ["plan", str(window), "--ep", "8", "--token-cap", "8192", "--budget", "0.3", "-q", "-o", str(plan)]
    assert main([*common, "--stats", str(tmp_path / "s.csv")]) == 0
    assert len((tmp_path / "s.csv").read_text().splitlines()) > 2
    plan.unlink()
    assert main([*common, "--stats", str(tmp_path / "s.txt")]) == 4
    assert not plan.exists()
