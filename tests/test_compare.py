"""routepack compare: every method's answer is sound and scored alike; the page is one file."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import types
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import CostModel, Topology, Window, score
from routepack_opt.cli import main
from routepack_opt.compare.builtin import lpt_slots
from routepack_opt.compare.case import Answer, Case
from routepack_opt.compare.experiment import Experiment, append_record, read_journal, run_experiment, share_bounds
from routepack_opt.compare.external import TABLE
from routepack_opt.compare.heuristics import karmarkar_karp, partition_cells
from routepack_opt.compare.judge import Judge
from routepack_opt.compare.methods import METHODS, Method, all_methods, available, find_methods
from routepack_opt.compare.summary import failures, summarise, without_repeats
from routepack_opt.errors import Infeasible, InvalidInput, MissingDependency, VerificationError

if TYPE_CHECKING:
    from pathlib import Path


def small_window(seed: int = 0, num_samples: int = 20) -> Window:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 200, num_samples)
    demand = rng.multinomial(2, rng.dirichlet(np.ones(8), 3), size=(num_samples, 3)) * lengths[:, None, None] // 2
    return Window(lengths, demand)


def small_case(seed: int = 0, **sizes: int) -> Case:
    window = small_window(seed, sizes.pop("num_samples", 20))
    return Case("small", window, Topology(dp=4, ep=4, shards=2), 400, CostModel.default(window.num_layers, 400))


@pytest.fixture(scope="module")
def records() -> list[dict]:
    case = small_case()
    return run_experiment(Experiment([case], list(available().values()), [0.05], [0, 1]))


def test_every_method_gives_a_verified_record_with_the_contract_keys(records: list[dict]) -> None:
    assert [(r["method"], r["seed"]) for r in records] == [(m, s) for m in available() for s in (0, 1)]
    for record in records:
        for key in (
            "window",
            "method",
            "seed",
            "budget_s",
            "seconds",
            "score",
            "bound",
            "gap",
            "rows",
            "rows_status",
            "eta_ep",
        ):
            assert key in record
        assert record["verified"], record
        assert record["bound"] <= record["score"][0]
        assert record["gap"] == pytest.approx(record["score"][0] / record["bound"] - 1)
    json.dumps(records, allow_nan=False)


def test_shared_bounds_are_the_best_proved_for_the_same_rows_and_placement(records: list[dict]) -> None:
    for record in records:
        same = [r for r in records if r["rows"] == record["rows"]]
        assert record["best_bound"] == min(record["score"][0], max(r["bound"] for r in same))
        assert record["fixed_gap"] <= record["best_gap"] + 1e-12
    exact = [r for r in records if r["method"] == "cp-sat"]
    kept = [r for r in records if r["method"] == "lpt+anneal" and r["rows"] == exact[0]["rows"]]
    assert all(r["placement"] == exact[0]["placement"] for r in kept)
    assert all(r["score"][0] >= exact[0]["fixed_bound"] * (1 - 1e-9) for r in kept)


def test_the_planner_is_never_worse_than_lpt_ffd(records: list[dict]) -> None:
    best = {
        m: min((r["rows"], r["score"]) for r in records if r["method"] == m) for m in ("lpt+ffd", "plan", "plan-fixed")
    }
    assert best["plan"] <= best["lpt+ffd"]
    assert best["plan-fixed"] <= best["lpt+ffd"]


def test_the_score_is_the_exact_one_whatever_the_method_says() -> None:
    case = small_case()
    answer = METHODS["lpt+kk"].run(case, 0.0, 0)
    record = Judge(case).record(answer)
    assert tuple(record["score"]) == score(
        case.window, answer.cells, answer.logical_to_slot, case.topology, case.token_cap, case.cost
    )


def test_a_method_that_breaks_the_cap_is_reported_as_broken() -> None:
    def everything_in_one_cell(case: Case, budget_s: float, seed: int) -> Answer:
        n = case.window.num_samples
        return Answer([[list(range(n - 3)), [n - 3], [n - 2], [n - 1]]], lpt_slots(case))

    case = small_case()
    with pytest.raises(VerificationError):
        Judge(case).record(everything_in_one_cell(case, 0.0, 0))
    (record,) = run_experiment(Experiment([case], [Method("bad", "", everything_in_one_cell)], [0.0], [0]))
    assert record["broken"]
    assert record["score"] is None
    (entry,) = summarise([record])
    assert failures([entry])[0][:2] == ("bad", "1 of 1 runs")


def test_the_journal_resumes_and_forgives_a_torn_line(tmp_path: Path) -> None:
    calls = []

    def counted(case: Case, budget_s: float, seed: int) -> Answer:
        calls.append(seed)
        return METHODS["lpt+ffd"].run(case, budget_s, seed)

    case, journal = small_case(), tmp_path / "results.jsonl"
    experiment = Experiment([case], [Method("counted", "", counted)], [0.0], [0, 1, 2])
    first = run_experiment(experiment, journal=journal)
    text = journal.read_text()
    journal.write_text(text[: len(text) - 40])  # the last record was cut short
    again = run_experiment(experiment, journal=journal)
    assert calls == [0, 1, 2, 2]
    assert [r["score"] for r in again] == [r["score"] for r in first]
    assert len(read_journal(journal)) == 3
    assert run_experiment(experiment, journal=journal) and len(calls) == 4


def test_a_record_of_another_window_or_setting_is_not_reused() -> None:
    one, other = small_case(0), small_case(1)
    keys = {case.key("plan", budget, seed) for case in (one, other) for budget in (1.0, 2.0) for seed in (0, 1)}
    assert len(keys) == 8
    assert one.key("plan", 1, 0) == one.key("plan", 1.0, 0)


def test_append_record_starts_a_new_line_after_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"key": "a"}\n{"key": "b')
    append_record(path, {"key": "c"})
    assert [r["key"] for r in read_journal(path)] == ["a", "c"]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 6), st.booleans())
@settings(deadline=None)
def test_karmarkar_karp_is_a_partition_with_the_asked_counts(weights: list[int], parts: int, equal: bool) -> None:
    if equal and len(weights) % parts:
        with pytest.raises(Infeasible):
            karmarkar_karp(weights, parts, equal)
        return
    found = karmarkar_karp(weights, parts, equal)
    assert len(found) == parts
    assert sorted(i for part in found for i in part) == list(range(len(weights)))
    if equal:
        assert {len(part) for part in found} == {len(weights) // parts}
    sums = [sum(weights[i] for i in part) for part in found]
    if not equal:
        assert max(sums) - min(sums) <= max(weights)


def test_karmarkar_karp_on_the_textbook_example() -> None:
    weights = [8, 7, 6, 5, 4]  # differencing ends at 16 and 14
    assert sorted(sum(weights[i] for i in part) for part in karmarkar_karp(weights, 2, False)) == [14, 16]


def test_balanced_partitions_give_equal_counts_and_keep_the_cap() -> None:
    case = small_case()
    cells = partition_cells(case)
    lengths = case.window.lengths
    assert all(lengths[cell].sum() <= case.token_cap and cell for row in cells for cell in row)
    assert {sum(len(row[d]) for row in cells) for d in range(4)} == {5}


def test_too_few_samples_are_refused_by_every_method_alike() -> None:
    case = small_case(num_samples=3)
    for name in ("lpt+ffd", "lpt+kk", "plan"):
        with pytest.raises(Infeasible, match="dummy sample"):
            METHODS[name].run(case, 0.05, 0)


def test_unknown_and_missing_methods_are_named() -> None:
    with pytest.raises(InvalidInput, match="'nonsense' is unknown"):
        find_methods(["plan", "nonsense"])
    absent = next(e for e in TABLE if e.missing() is not None)
    with pytest.raises(MissingDependency, match=re.escape(absent.distribution)):
        find_methods([absent.name])
    assert [m.name for m in find_methods(["LPT+FFD", "lpt+ffd", " Plan "])] == ["lpt+ffd", "plan"]


def test_installed_packages_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    verl = types.ModuleType("verl.utils.seqlen_balancing")
    verl.get_seqlen_balanced_partitions = lambda lengths, parts, equal: karmarkar_karp(lengths, parts, equal)
    eplb = types.ModuleType("eplb")

    def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):
        assert weight.shape[1] == num_replicas
        return torch.argsort(weight, dim=1), None, None

    eplb.rebalance_experts = rebalance_experts
    for name, module in (("verl", types.ModuleType("verl")), ("verl.utils", types.ModuleType("verl.utils"))):
        monkeypatch.setitem(sys.modules, name, module)
    for module in (verl, eplb):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    case = small_case()
    records = run_experiment(Experiment([case], find_methods(["verl", "lpt+kk", "eplb+ffd"]), [0.0], [0]))
    assert [r["verified"] for r in records] == [True] * 3
    assert records[0]["score"] == records[1]["score"]


def test_entry_points_add_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "mine"

        def __init__(self, value: object) -> None:
            self.value = value

        def load(self) -> object:
            return self.value

    mine = Method("mine", "a method of another package", METHODS["lpt+ffd"].run)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry(mine)])
    assert all_methods()["mine"] is mine
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry("text")])
    with pytest.raises(InvalidInput, match="'mine'"):
        all_methods()


def test_methods_without_search_are_listed_once(records: list[dict]) -> None:
    doubled = [*records, *({**r, "budget_s": 1.0} for r in records)]
    share_bounds(doubled)
    entries = without_repeats(summarise(doubled))
    for name, method in available().items():
        assert sum(e.method == name for e in entries) == (2 if method.searches else 1)


# The command


@pytest.fixture
def window_file(tmp_path: Path) -> Path:
    path = tmp_path / "windows" / "w.npz"
    path.parent.mkdir()
    small_window().save(path)
    return path


OPTIONS = ["--ep", "4", "--dp", "4", "--shards", "2", "--token-cap", "400"]


def test_command_writes_results_and_a_page_without_references(
    window_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "report"
    arguments = [
        "compare",
        str(window_file.parent),
        *OPTIONS,
        "--budgets",
        "0.05,0.1",
        "--seeds",
        "0,1",
        "-o",
        str(out),
    ]
    assert main([*arguments, "--methods", "lpt+ffd,lpt+kk,plan"]) == 0
    assert "plan" in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert len(results) == 3 * 2 * 2
    page = (out / "index.html").read_text()
    assert page.count("<svg") == 5
    assert not re.search(r"https?:|src=|<link|@import|<!DOCTYPE svg|xmlns", page, re.IGNORECASE)
    assert all(match.startswith("#") for match in re.findall(r'href="([^"]*)"', page))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert all(name in ids for name in re.findall(r'href="#([^"]+)"', page))
    assert json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]) == results
    before = (out / "results.jsonl").read_text()
    assert main([*arguments, "--methods", "lpt+ffd,plan", "--json"]) == 0
    assert (out / "results.jsonl").read_text() == before  # nothing was run again
    printed = json.loads(capsys.readouterr().out)
    assert [r["method"] for r in printed] == ["lpt+ffd"] * 4 + ["plan"] * 4


def test_page_has_tables_when_matplotlib_is_missing(
    window_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "report"
    assert main(["compare", str(window_file), *OPTIONS, "--methods", "lpt+ffd", "-o", str(out)]) == 0
    page = (out / "index.html").read_text()
    assert "<table" in page
    assert "routepack-opt[report]" in page
    assert "<svg" not in page
    assert "routepack-opt[report]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (["--methods", "nonsense"], 4, "nonsense"),
        (["--methods", ","], 2, "names no method"),
        (["--budgets", "1,x"], 2, "'x'"),
        (["--budgets", "-1"], 2, "-1"),
        (["--seeds", "1.5"], 2, "1.5"),
        (["--methods", "verl"], 2, "verl"),
        (["--ep", "3"], 4, "ep"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    window_file: Path, change: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(window_file), *OPTIONS, *change]) == code
    message = capsys.readouterr().err.strip()
    assert words in message
    assert "\n" not in message


def test_missing_options_and_files_are_named(
    window_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *OPTIONS]) == 2
    assert main(["compare", str(window_file), "--ep", "4"]) == 2
    assert main(["compare", str(tmp_path / "none.npz"), *OPTIONS]) == 4
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["compare", str(empty), *OPTIONS]) == 4
    assert "holds no window" in capsys.readouterr().err


def test_list_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--list-methods", "--json"]) == 0
    listed = {m["name"]: m for m in json.loads(capsys.readouterr().out)}
    assert listed["plan"]["missing"] is None
    assert set(METHODS) <= set(listed)


def test_a_window_no_method_can_pack_is_reported_not_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.npz"
    small_window(num_samples=3).save(path)
    assert main(["compare", str(path), *OPTIONS, "--methods", "lpt+ffd,plan", "--budgets", "0.05", "--json"]) == 0
    for record in json.loads(capsys.readouterr().out):
        assert record["score"] is None
        assert "dummy sample" in record["error"]


@pytest.mark.data
def test_benchmark_registry_reads_real_windows(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path as P

    monkeypatch.syspath_prepend(str(P(__file__).resolve().parents[1] / "benchmarks"))
    import registry

    real = registry.real_sequences(data_dir)
    assert real.window.num_samples == 173
    grpo = registry.real_grpo(data_dir)
    assert grpo.window.num_samples == 512
    assert (grpo.window.demand.sum(axis=2) == 6 * (grpo.window.lengths - 1)[:, None]).all()
