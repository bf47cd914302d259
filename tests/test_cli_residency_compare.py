"""``routepack residency compare`` and ``run --package`` as users call them."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "residency"))
from trace_files import HEADER, NAMES, ROWS, write

from routepack_opt.cli import main

SMALL = ("compare", "--models", "deepseek-v3", "--phases", "decode", "--windows", "4", "--jobs", "1", "--bounds", "1",
         "--data", ".", "-q")  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["residency", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report")
    assert main(["residency", *SMALL, "--policies", "static,hydra,fixed-our-map,look-ahead", "-o", str(path)]) == 0
    return path


def test_page_loads_nothing_and_names_scope_and_defaults(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    assert not re.search(r'(src|href)="(?!#)', page) and "@import" not in page and "url(http" not in page
    assert "layer window: the first 1 of 58 MoE layers" in page and "synthetic, calibrated to" in page
    for text in ("min_residency_windows: 4", "horizon 8", "domain_windows 64", "latency below hydra", "43.6%"):
        assert text in page, text
    pytest.importorskip("matplotlib")
    assert page.count("<svg") >= 10


def test_results_and_table(folder: Path) -> None:
    records = json.loads((folder / "results.json").read_text())
    lines = (folder / "results.jsonl").read_text().splitlines()
    assert sorted(r["key"] for r in records) == sorted(json.loads(line)["key"] for line in lines)
    with (folder / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(records) - 1 and {"policy", "routed_s", "stages_memory", "tier_use_hbm"} <= set(rows[0])


def test_a_second_run_takes_up_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "results.jsonl").read_text()
    policies = ("--policies", "static,hydra,fixed-our-map,look-ahead", "-o", str(folder))
    code, out, err = run(capsys, *SMALL, *policies, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "") and (folder / "results.jsonl").read_text() == before
    assert document["headline"]["stage"]["decode"][0]["policy"] == "static"
    assert all(figure["sentence"] for figure in document["paper"])


def test_text_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--no-sweeps", "--policies", "static,look-ahead", "--level", "stage")
    assert code == 0 and out.startswith("Scope: deepseek-v3 on paper") and "above bound" in out


def test_list_policies(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "compare", "--list-policies", "--json")
    assert code == 0 and {"static", "hydra", "look-ahead"} <= {entry["name"] for entry in json.loads(out)}
    assert run(capsys, "compare", "--list-policies")[1].startswith("policy")


def test_an_interrupted_run_says_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from routepack_opt.residency.comparison import case as comparison_case
    from routepack_opt.residency.control import run_windows

    real, calls = run_windows.run_policy, []

    def stop(*arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(comparison_case, "run_policy", stop)
    wanted = (*SMALL, "--no-sweeps", "--policies", "static,look-ahead", "-o", str(tmp_path))
    code, _, err = run(capsys, *wanted)
    assert code == 130 and "interrupted after 1 run of 5" in err
    assert len(json.loads((tmp_path / "results.json").read_text())) == 1
    monkeypatch.undo()
    assert run(capsys, *wanted)[0] == 0
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("compare", "--models", "nope"), 4, "'nope'"),
        (("compare", "--policies", "fifo"), 4, "'fifo'"),
        (("compare", "--package", "nope.toml"), 4, "nope.toml"),
        (("compare", "--windows", "0"), 2, "--windows"),
        (("run", "--package", "paper", "--policy", "lru"), 2, "--model --trace"),
        (("run", "--package", "paper", "--model", "dbrx", "--policy", "belady"), 2, "'belady'"),
        (("run", "--package", "paper", "--model", "dbrx", "--policy", "lru", "--capacity-mib", "1"), 2, "--trace"),
        (("run", "--package", "paper", "--model", "nope", "--policy", "lru"), 4, "'nope'"),
        (("run", "--policy", "lru", "--capacity-mib", "1"), 2, "--trace"),
    ],
)
def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (code, "") and message in err and err.count("\n") == 1


def test_a_model_that_fits_nowhere_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from routepack_opt.residency.machine import package_file

    text = (Path(package_file.__file__).parent / "presets" / "paper.toml").read_text()
    path = tmp_path / "small.toml"
    path.write_text(text.replace("capacity_mib = 8192.0", "capacity_mib = 600.0"))
    code, out, err = run(capsys, *SMALL, "--package", str(path), "--policies", "static")
    assert (code, out) == (4, "") and "one layer of deepseek-v3 has 256" in err and err.count("\n") == 1


def test_show_package(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "run", "--show-package", "--model", "deepseek-v3")
    assert code == 0 and "16 chiplets (mesh 4x4)" in out and "first 1 of 58 MoE layers" in out
    _, out, _ = run(capsys, "run", "--show-package", "--package", "cxl", "--json")
    assert json.loads(out)["package"] == "cxl"


def test_run_on_a_package(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("run", "--package", "paper", "--model", "deepseek-v3", "--windows", "3")
    code, out, _ = run(capsys, *wanted, "--policy", "ours", "--json")
    document = json.loads(out)
    assert code == 0 and document["policy"] == "look-ahead" and document["synthetic"]
    assert 0 < document["routed_s"] < document["latency_s"] and document["energy_j"] > 0
    assert 0 <= document["hits"] <= document["accesses"] and document["bytes_streamed"] > 0
    code, out, _ = run(capsys, *wanted, "--policy", "all")
    assert code == 0 and "fixed-our-map" in out and out.startswith("Scope:")


def test_cache_counts_stay_with_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, HEADER + NAMES + ROWS)
    wanted = ("run", "--trace", trace, "--policy", "lru", "--capacity-mib", "1")
    plain = json.loads(run(capsys, *wanted, "--json")[1])
    both = json.loads(run(capsys, *wanted, "--package", "paper", "--windows", "2", "--json")[1])
    keys = ("accesses", "hits", "bytes_streamed", "prefill", "decode")
    assert {k: both[k] for k in keys} == {k: plain[k] for k in keys}
    assert both["latency_s"] > 0 and both["energy_j"] > 0 and both["package_run"]["accesses"] > 0
    assert "lru" in run(capsys, *wanted, "--package", "paper", "--windows", "2")[1]


@pytest.mark.parametrize("command", ["compare", "bound"])
def test_a_data_folder_that_is_not_there_gave_synthetic_workloads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    missing = str(tmp_path / "none")
    sizes = {
        "compare": ("--models", "deepseek-v3", "-o", str(tmp_path)),
        "bound": ("--model", "deepseek-v3", "--phase", "decode"),
    }
    code, out, err = run(capsys, command, *sizes[command], "--data", missing)
    assert code == 4 and out == "" and err.count("\n") == 1 and missing in err
