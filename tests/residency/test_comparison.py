"""The residency comparison: what runs, what is kept, what the records say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.comparison import summary as summary
from routepack_opt.residency.comparison.case import TRACES, Case, Record, _Bench, bound_key, run_case, settings_of
from routepack_opt.residency.comparison.run import Comparison, run_comparison
from routepack_opt.residency.comparison.sweeps import BUDGET, COLD, MAIN, Variation, tables_of
from routepack_opt.residency.control.policy_registry import OURS, REGISTRY, STATIC, find_policies
from routepack_opt.residency.machine import package_file
from routepack_opt.residency.machine.package import Package

SMALL = Comparison(
    models=("deepseek-v3",), phases=("decode",), policies=(STATIC, "hydra", "fixed-our-map", OURS), windows=6,
    levels=("stage", "event"), sweeps=False, bounds=2, data="nowhere",
)  # fmt: skip


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return run_comparison(SMALL)


def test_every_policy_runs_on_the_same_windows(records: list[Record]) -> None:
    runs = summary.select(records)
    assert summary.names(runs) == list(SMALL.policies)
    assert {r["windows"] for r in runs} == {6} and all(len(r["routed_by_window"]) == 6 for r in runs)
    assert {r["workload"] for r in runs} == {"synthetic"} and len({r["scope"] for r in runs}) == 1
    assert len(records) == len(SMALL.keys(SMALL.cases()[0])) == 9
    for r in runs:
        assert r["routed_s"] == pytest.approx(sum(r["routed_by_window"]) / 6, rel=1e-6)
        assert 0 < r["routed_s"] <= r["end_to_end_s"] and r["energy_j"] > 0
        fixed = sum(s for name, s in zip(summary.STAGE_NAMES, r["stages"], strict=True) if name not in
                    ("memory", "compute"))  # fmt: skip
        assert fixed + sum(r["binding_s"]) == pytest.approx(r["routed_s"], rel=1e-6)


def test_bounds_are_below_every_policy(records: list[Record]) -> None:
    runs = summary.select(records)
    for name in SMALL.policies:
        above = summary.above_bound(records, runs, name)
        assert above is not None and above >= 0
        most = summary.most_possible(records, runs, name)
        assert most == pytest.approx(1 - 1 / (1 + above))


def test_records_are_json(records: list[Record]) -> None:
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_what_is_done_is_not_run_again(tmp_path: Path, records: list[Record]) -> None:
    journal = tmp_path / "results.jsonl"
    first = run_comparison(replace(SMALL, policies=(STATIC, OURS)), journal=journal)
    text = journal.read_text()
    assert len(text.splitlines()) == len(first) == 5
    assert run_comparison(replace(SMALL, policies=(STATIC, OURS)), journal=journal) == first
    assert journal.read_text() == text
    more = run_comparison(SMALL, journal=journal)
    assert journal.read_text().startswith(text) and len(more) == 9

    def routed(found: list[Record]) -> dict[tuple[str, str], float]:
        return {(r["policy"], r["level"]): r["routed_s"] for r in found if "routed_s" in r}

    assert routed(more) == routed(records)


def test_a_stopped_case_keeps_its_first_runs(tmp_path: Path) -> None:
    journal = tmp_path / "results.jsonl"
    asked = iter([False, False, True])
    done = run_case(SMALL, SMALL.cases()[0], frozenset(), str(journal), lambda: next(asked))
    assert len(done) == 2 and [json.loads(line)["key"] for line in journal.read_text().splitlines()] == [
        r["key"] for r in done
    ]
    with journal.open("a") as stream:
        stream.write('{"key": "cut sho')
    assert len(run_comparison(SMALL, journal=journal)) == 9


def test_two_processes_give_the_same(tmp_path: Path, records: list[Record]) -> None:
    both = replace(SMALL, policies=(STATIC,), phases=("decode", "prefill"), bounds=0)
    found = run_comparison(both, jobs=2, journal=tmp_path / "results.jsonl")
    assert len(found) == 4
    one = [r["routed_s"] for r in found if r["phase"] == "decode" and r["level"] == "stage"]
    assert one == [r["routed_s"] for r in summary.select(records) if r["policy"] == STATIC]


def test_sweeps_cover_one_set_of_layers_each() -> None:
    sweeping = replace(SMALL, sweeps=True)
    tables = {table.name: table for table in sweeping.tables()}
    assert [v.copies for v in tables[BUDGET].variations] == [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    assert tables[COLD].variations[0].cold and STATIC in tables[COLD].policies
    keys = sweeping.keys(sweeping.cases()[0])
    assert len(keys) == len(set(keys))
    second = Case("deepseek-v3", "decode", 1)
    assert {setting.table.name for setting in settings_of(sweeping, second)} == {MAIN}
    assert bound_key(sweeping, second) not in keys


def test_variations_change_the_machine() -> None:
    package = Package.load("paper")
    grown = Variation(fast_capacity=2.0).package(package)
    assert [t.capacity_bytes for t in grown.tiers[:2]] == [2 * t.capacity_bytes for t in package.tiers[:2]]
    assert grown.tiers[2] == package.tiers[2]
    less = Variation(without="hbm").package(package)
    assert [t.name for t in less.tiers] == ["sram", "dram"] and less.rules.other_weights_tier == ""
    assert Variation().package(package) == package and Variation().label == "as-given"
    assert len(tables_of((STATIC, OURS), ("stage",), package, sweeps=True)) == 6


def test_a_model_that_does_not_fit_is_a_record(tmp_path: Path) -> None:
    text = (Path(package_file.__file__).parent / "presets" / "paper.toml").read_text()
    path = tmp_path / "small.toml"
    path.write_text(text.replace("capacity_mib = 8192.0", "capacity_mib = 600.0"))
    small = replace(SMALL, models=("deepseek-v3", "mixtral-8x7b"), package=str(path), policies=(STATIC,), bounds=0)
    found = run_comparison(small)
    assert len(found) == 4
    for record in found:
        assert ("routed_s" in record) == (record["model"] == "mixtral-8x7b")
        assert "one layer of deepseek-v3 has 256" in record.get("error", "one layer of deepseek-v3 has 256")
    assert len(summary.select(found)) == 1


def test_geometric_means() -> None:
    a, b, c = ("m", "prefill", 0), ("m", "decode", 0), ("n", "decode", 0)
    assert summary.geometric({a: 2.0, b: 8.0}, {a: 1.0, b: 1.0, c: 3.0}) == pytest.approx(4.0)
    assert summary.geometric({a: 2.0}, {b: 1.0}) is None


def test_strongest_fixed_is_the_best_of_each_workload() -> None:
    runs = [
        {"model": m, "phase": "decode", "seed": 0, "policy": p, "routed_s": s, "edp": 10 * s}
        for m, p, s in (("m", "fixed-near", 2.0), ("m", "fixed-our-map", 3.0), ("n", "fixed-near", 5.0),
                        ("n", "fixed-our-map", 4.0), ("n", OURS, 1.0))
    ]  # fmt: skip
    best = summary.values(runs, summary.STRONGEST, "edp")
    assert sorted(best.values()) == [20.0, 40.0]
    assert summary.reduction(runs, summary.STRONGEST) == pytest.approx(1 - math.sqrt(1.0 / 4.0) ** 2)


def test_refusals() -> None:
    for change, message in (
        ({"windows": 0}, "windows: 0"),
        ({"phases": ("both",)}, "phase: 'both'"),
        ({"policies": ("fifo",)}, "policy: 'fifo' is unknown"),
        ({"models": ("nope",)}, "'nope'"),
        ({"package": "nope"}, "nope"),
    ):
        with pytest.raises(InvalidInput, match=message):
            replace(SMALL, **change)


def test_every_policy_can_be_made() -> None:
    for entry in find_policies(list(REGISTRY)):
        if entry.missing() is None and entry.name != "dqn":
            assert entry.make([]).name == entry.name


def test_results_of_other_routes_or_of_another_machine_were_taken_up(tmp_path: Path) -> None:
    """Keys of a folder's records did not tell recorded from synthetic routes, nor which chiplets a region serves."""
    case, synthetic = Case("deepseek-v2-lite", "decode", 0), replace(SMALL, models=("deepseek-v2-lite",))
    (tmp_path / "routes").mkdir()
    for name in TRACES["deepseek-v2-lite"]:
        (tmp_path / "routes" / name).write_bytes(b"one")
    recorded = replace(synthetic, data=str(tmp_path))
    assert not set(synthetic.keys(case)) & set(recorded.keys(case))
    other = tmp_path / "other"
    (other / "routes").mkdir(parents=True)
    for name in TRACES["deepseek-v2-lite"]:
        (other / "routes" / name).write_bytes(b"two")
    assert not set(recorded.keys(case)) & set(replace(synthetic, data=str(other)).keys(case))

    text = Path(package_file.__file__).parent.joinpath("presets", "paper.toml").read_text()
    same, swapped = tmp_path / "same.toml", tmp_path / "swapped.toml"
    same.write_text(text)
    first, last = "chiplets = [0, 1, 4, 5]", "chiplets = [10, 11, 14, 15]"
    assert text.count(first) == text.count(last) == 3
    swapped.write_text(text.replace(first, "first").replace(last, first).replace("first", last))
    assert replace(SMALL, package=str(same)).fingerprint == SMALL.fingerprint
    assert replace(SMALL, package=str(swapped)).fingerprint != SMALL.fingerprint


def test_sweeps_changed_the_demand_of_the_main_table(tmp_path: Path) -> None:
    """With a budget above the sweep's largest a sweep covers more layers, and draws depend on their number."""
    text = Path(package_file.__file__).parent.joinpath("presets", "paper.toml").read_text()
    rich = tmp_path / "rich.toml"
    rich.write_text(text.replace("budget_copies = 1.3", "budget_copies = 3.0"))
    assert "3.0" in rich.read_text()
    base = replace(SMALL, models=("mixtral-8x7b",), package=str(rich), policies=(STATIC, "hydra"), bounds=0)
    case = base.cases()[0]
    plain, swept = (_Bench(replace(base, sweeps=sweeps), case) for sweeps in (False, True))
    assert swept.layers[BUDGET] > swept.layers[MAIN] == plain.layers[MAIN]
    assert (plain.demand == swept.demand).all()


def test_a_mistyped_number_of_seeds_filled_the_memory() -> None:
    with pytest.raises(InvalidInput, match="seeds: 1000000000; expected at most 1000"):
        replace(SMALL, seeds=10**9)
