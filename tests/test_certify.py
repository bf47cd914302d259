"""Offline certification: records that hold, files that survive, workers that may die."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routepack_opt as rp
from routepack_opt.certify import Case, Journal, Settings, certify_all, certify_case, read_cases
from routepack_opt.certify import workers as workers_module
from routepack_opt.certify.one import check_record
from routepack_opt.certify.summary import by_rung, totals
from routepack_opt.cli import main
from routepack_opt.errors import FormatError, InvalidInput, RoutePackError, VerificationError

ONE = Settings(dp=1, time_limit_s=0.5)


def case(lengths: list[int], cap: int = 10, name: str = "a", **fields: Any) -> Case:
    return Case(name, "memory", np.array(lengths, dtype=np.int64), cap, **fields)


def least_bins(lengths: list[int], cap: int) -> int:
    def put(index: int, room: tuple[int, ...]) -> int:
        if index == len(lengths):
            return len(room)
        ways = [(*room, cap - lengths[index])]  # a new bin, or any that has room
        ways += [(*room[:b], r - lengths[index], *room[b + 1 :]) for b, r in enumerate(room) if r >= lengths[index]]
        return min(put(index + 1, way) for way in ways)

    return put(0, ())


def instances(path: Path, count: int, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    lines = [
        json.dumps({"name": f"i{k}", "capacity": 100, "weights": rng.integers(1, 60, 30).tolist()})
        for k in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- one case


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_tiny_instances_get_the_least_number_of_bins(lengths: list[int]) -> None:
    record = certify_case(case(lengths), ONE)
    assert record["rows"] == least_bins(lengths, 10)
    assert record["rows_status"] == "certified"
    assert record["rung"]
    assert check_record(record, np.array(lengths))
    json.dumps(record, allow_nan=False)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=8, max_size=40), st.integers(1, 4))
def test_every_record_passes_the_checker(lengths: list[int], dp: int) -> None:
    record = certify_case(case(lengths, 20), Settings(dp, 0.1))
    if record["rows_status"] == "infeasible":
        assert "dummy sample" in record["error"]
        return
    assert "error" not in record
    assert len(record["packing"]) == record["samples"] == len(lengths)
    assert set(record["packing"]) == set(range(record["rows"] * dp))
    check_record(record, np.array(lengths))


@pytest.mark.parametrize(
    "change",
    [
        {"rows_lower_bound": 1},
        {"rows_status": "best-known"},
        {"packing": [0, 0, 1, 1]},
        {"packing": [0, 1, 2, 3]},
        {"packing": [0, 1]},
        {"token_cap": 9},
    ],
)
def test_altered_records_are_refuted(change: dict[str, Any]) -> None:
    record = certify_case(case([6, 6, 4, 4]), ONE)
    with pytest.raises(VerificationError):
        check_record({**record, **change}, np.array([6, 6, 4, 4]))


def test_a_false_certificate_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from routepack_opt.certify import one

    solve = one.solve_rows

    def lie(*args: Any, **kwargs: Any) -> Any:
        result = solve(*args, **kwargs)
        result.certificate["max_cell"] -= 1
        return result

    monkeypatch.setattr(one, "solve_rows", lie)
    record = certify_case(case([6, 6, 6, 1]), ONE)  # 19 tokens: by volume two bins at least
    assert (record["rows"], record["rows_lower_bound"], record["rows_status"], record["rung"]) == (
        3,
        2,
        "best-known",
        "",
    )
    assert "refuted" in record["error"]
    check_record(record, np.array([6, 6, 6, 1]))


def test_a_sample_over_the_cap_is_infeasible_and_named() -> None:
    record = certify_case(case([3, 21], 20), ONE)
    assert record["rows_status"] == "infeasible"
    assert "sample 1: length 21 exceeds the cap 20" in record["error"]


def test_too_few_samples_say_how_many_dummies() -> None:
    record = certify_case(case([3, 3, 3]), Settings(4, 0.1))
    assert record["rows_status"] == "infeasible"
    assert "needs 1 dummy sample" in record["error"]


def test_placement_gap_comes_with_ep() -> None:
    load = np.array([[8, 1, 0, 7], [0, 0, 0, 0]], dtype=np.int64)
    record = certify_case(case([5, 5], load=load), Settings(1, 0.1, ep=2))
    assert record["placement_gap"] == record["placement"]["gap"] == 0
    assert record["placement"]["layers_certified"] == 2
    assert certify_case(case([5, 5]), Settings(1, 0.1, ep=2)).get("placement_gap") is None


# ---------------------------------------------------------------- what is read


def test_windows_instances_and_folders(tmp_path: Path) -> None:
    rp.Window([5, 6], np.ones((2, 1, 4), dtype=np.int32)).save(tmp_path / "w.npz")
    instances(tmp_path / "b.jsonl", 2)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"name": "i0", "capacity": 7, "weights": [7, 1]}\n\n'))
    cases = read_cases([tmp_path], token_cap=11, ep=2)
    names = {c.name: c for c in cases}
    assert names["w"].cap == 11
    assert names["w"].load is not None
    assert names["w"].load.tolist() == [[2, 2, 2, 2]]
    assert names[f"{tmp_path / 'c.jsonl.gz'}:i0"].cap == 7
    assert len(names) == len(cases) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "line 1"),
        ('{"name": "a", "capacity": 5}', "'weights' is missing"),
        ('{"name": "a", "capacity": 5, "weights": []}', "at least one"),
        ('{"name": "a", "capacity": 5, "weights": [1, 2.5]}', "weights[1]"),
        ('{"name": "a", "capacity": 5, "weights": [1, 0]}', "weights[1]"),
        ('{"name": "a", "capacity": 5, "weights": [true]}', "weights[0]"),
        ('{"name": "a", "capacity": 0, "weights": [1]}', "capacity"),
        ('{"name": "", "capacity": 5, "weights": [1]}', "name"),
        ('{"name": "a", "capacity": 5, "weights": [1]}\n{', "line 2"),
    ],
)
def test_bad_instances_name_line_and_field(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(text)
    with pytest.raises(FormatError, match="line") as caught:
        read_cases([path], token_cap=None)
    assert words in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"name": 1}' * 99)[:-9])
    (tmp_path / "plain.jsonl.gz").write_text("{}")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe")
    rp.Window([5], np.ones((1, 1, 4), dtype=np.int32)).save(tmp_path / "w.npz")
    for name in ("cut.jsonl.gz", "plain.jsonl.gz", "latin.jsonl", "missing.jsonl", "missing.npz", "w.txt"):
        with pytest.raises(FormatError, match=name):
            read_cases([tmp_path / name], token_cap=9)
    with pytest.raises(InvalidInput, match="token cap"):
        read_cases([tmp_path / "w.npz"], token_cap=None)
    with pytest.raises(InvalidInput, match=r"E = 4.*P = 3"):
        read_cases([tmp_path / "w.npz"], token_cap=9, ep=3)


# ---------------------------------------------------------------- what is kept


def test_journal_takes_over_what_is_closed_and_what_had_as_much_time(tmp_path: Path) -> None:
    done, open_case, failed = case([5, 5]), case([5, 5], name="b"), case([5, 5], name="c")
    with Journal(tmp_path / "r.jsonl") as journal:
        journal.append(certify_case(done, ONE))
        journal.append({**certify_case(open_case, ONE), "rows": 2, "packing": [0, 1], "rows_status": "best-known"})
        journal.append({**certify_case(failed, ONE), "rows_status": "failed", "error": "killed"})
    with Journal(tmp_path / "r.jsonl") as journal:
        assert journal.find(done, Settings(1, 99.0, seed=5)) is not None
        assert journal.find(open_case, ONE) is not None
        assert journal.find(open_case, Settings(1, 99.0)) is None
        assert journal.find(open_case, Settings(1, 0.5, seed=1)) is None
        assert journal.find(failed, ONE) is None
        for other in (Settings(2, 0.5), Settings(1, 0.5, ep=2)):
            assert journal.find(done, other) is None
        assert journal.find(case([5, 4]), ONE) is None
        assert journal.find(case([5, 5], cap=11), ONE) is None
        journal.append({**certify_case(failed, ONE)})
    names = [record["name"] for record in read(tmp_path / "r.jsonl")]
    assert names == ["a", "b", "c"]  # one line a case


@pytest.mark.parametrize("keep", [1, 9, 40, -1])
def test_a_line_cut_short_is_dropped(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "r.jsonl"
    with Journal(path) as journal:
        journal.append(certify_case(case([5, 5]), ONE))
        whole = path.read_bytes()
        journal.append(certify_case(case([5, 5], name="b"), ONE))
    data = path.read_bytes()
    path.write_bytes(whole + data[len(whole) :][:keep])
    with Journal(path) as journal:
        assert journal.find(case([5, 5]), ONE) is not None
        assert journal.find(case([5, 5], name="b"), ONE) is None
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ["my notes", "my notes\n", '{"x": 1}\n', '{"name": "a"}\n\n{"name": "b"}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="not a result of certify"):
        Journal(path)
    assert path.read_text() == text


def test_two_runs_on_one_file_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with Journal(tmp_path / "r.jsonl"), pytest.raises(InvalidInput, match="another run"):
        Journal(tmp_path / "r.jsonl")


def test_summary_counts_by_rung() -> None:
    records = [certify_case(case([5, 5], name=str(k)), ONE) for k in range(3)]
    records.append({**records[0], "rows_status": "best-known", "rung": "", "rows": 3, "rows_lower_bound": 1})
    rungs = by_rung(records)
    assert [(r.status, r.num_cases) for r in rungs] == [("certified", 3), ("best-known", 1)]
    total = totals(records)
    assert (total["cases"], total["certified"], total["best_known"], total["open_rows_above_bound"]) == (4, 3, 1, 2)


# ---------------------------------------------------------------- workers that die


class Deadly(Case):
    """Kills the process that unpickles it: every time, or once where ``source`` is a file to be made."""

    def __reduce__(self) -> Any:
        return _die, (self.name, self.source, self.lengths, self.cap)


def _die(name: str, source: str, lengths: Any, cap: int) -> Case:
    if name == "sleeps":
        time.sleep(60)
    if name == "once" and os.path.exists(source):
        return Case(name, source, lengths, cap)
    if name == "once":
        Path(source).touch()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_killed_worker_costs_its_own_case_only(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    deadly = Deadly("always", "memory", np.array([5, 5]), 10)
    once = Deadly("once", str(flag), np.array([5, 5]), 10)
    with Journal(tmp_path / "r.jsonl") as journal:
        records = certify_all([deadly, once, case([5, 5], name="fine")], ONE, journal=journal, jobs=2)
    found = {record["name"]: record for record in records}
    assert found["always"]["rows_status"] == "failed"
    assert found["always"]["rows"] is None
    assert "signal 9" in found["always"]["error"]
    assert found["once"]["rows"] == 1
    assert "signal 9" in found["once"]["error"]
    assert found["fine"]["rows_status"] == "certified"
    assert "error" not in found["fine"]
    assert len(read(tmp_path / "r.jsonl")) == 3


def test_a_solver_that_raises_leaves_what_the_cheap_rungs_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from routepack_opt.certify import one
    from routepack_opt.certify.tasks import Task, work

    solve = one.solve_rows

    def fail(problem: Any, *, time_limit_s: float, seed: int) -> Any:
        if time_limit_s > 0:
            raise RuntimeError("kError")
        return solve(problem, time_limit_s=time_limit_s, seed=seed)

    monkeypatch.setattr(one, "solve_rows", fail)
    record = work(Task(case([5, 5]), ONE))
    assert record["rows"] == 1
    assert record["error"] == "RuntimeError: kError"
    monkeypatch.setattr(one, "solve_rows", None)
    record = work(Task(case([5, 5]), ONE))
    assert record["rows_status"] == "failed"
    assert record["rows"] is None


def test_a_hung_worker_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_GRACE_S", 0.3)
    (record,) = certify_all([Deadly("sleeps", "memory", np.array([5, 5]), 10)], Settings(1, 0.1))
    assert record["rows_status"] == "failed"
    assert "hung" in record["error"]


def test_workers_that_cannot_start_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_serve", _die_at_once)
    with pytest.raises(RoutePackError, match="exit code 3"):
        certify_all([case([5, 5])], ONE)


def _die_at_once(*_: object) -> None:
    os._exit(3)


# ---------------------------------------------------------------- the command


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "routepack_opt", "certify", *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )


def children(pid: int) -> list[int]:
    try:
        found = [int(k) for k in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return found + [grandchild for child in found for grandchild in children(child)]


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.002)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while left := [p for p in pids if Path(f"/proc/{p}").exists() and _state(p) != "Z"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_keeps_what_is_done_and_goes_on(tmp_path: Path, sign: signal.Signals) -> None:
    count = 700
    cases, out = instances(tmp_path / "b.jsonl", count), tmp_path / "r.jsonl"
    arguments = [cases, "--dp", 1, "--time-limit", 0, "-o", out]
    process = start(*arguments)
    wait_for_lines(out, 5, process)
    workers = children(process.pid)
    if sign == signal.SIGINT:  # as a terminal does: to every process of the group
        os.killpg(process.pid, sign)
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if sign == signal.SIGINT else -9), errors
    assert_gone(workers)
    if sign == signal.SIGINT:
        assert f"of {count} cases" in errors
        assert "Traceback" not in errors
    done = out.read_bytes()
    complete = done[: done.rfind(b"\n") + 1]
    num_done = complete.count(b"\n")
    assert 5 <= num_done < count
    process = start(*arguments, "--json")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"{num_done} of {count} cases already done" in errors
    assert out.read_bytes().startswith(complete)
    records = read(out)
    assert sorted(r["name"] for r in records) == sorted(f"i{k}" for k in range(count))
    assert json.loads(output)["cases"] == count


def test_command_prints_a_table_by_rung(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rp.Window([5, 6, 7, 5], np.ones((4, 1, 4), dtype=np.int32)).save(tmp_path / "w.npz")
    out = tmp_path / "r.jsonl"
    arguments = ["certify", tmp_path / "w.npz", "--dp", 2, "--token-cap", 12, "--ep", 2, "--time-limit", 1, "-o", out]
    assert main([str(a) for a in arguments]) == 0
    captured = capsys.readouterr()
    assert "closed by" in captured.out
    assert "1 case: 1 certified" in captured.out
    (record,) = read(out)
    assert record["rows"] == record["rows_lower_bound"] == 1
    assert record["name"] == "w"
    assert record["placement_gap"] == 0
    arguments[1] = tmp_path  # the folder holds the results too
    assert main([*map(str, arguments), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["certified"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["missing.npz", "--dp", "1", "-o", "r.jsonl"], 4, "missing.npz"),
        (["b.jsonl", "--dp", "0", "-o", "r.jsonl"], 2, "--dp"),
        (["b.jsonl", "-o", "r.jsonl"], 2, "--dp"),
        (["b.jsonl", "--dp", "1"], 2, "output"),
        (["b.jsonl", "--dp", "1", "-o", "no/r.jsonl"], 4, "no/r.jsonl"),
        (["b.jsonl", "--dp", "1", "-o", "b.jsonl"], 4, "input"),
        (["b.jsonl", "--dp", "1", "-o", "r.jsonl", "--jobs", "2", "--ray", "auto"], 2, "--ray"),
        (["w.npz", "--dp", "1", "-o", "r.jsonl"], 4, "token cap"),
    ],
)
def test_refusals_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    word: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    instances(tmp_path / "b.jsonl", 1)
    rp.Window([5], np.ones((1, 1, 4), dtype=np.int32)).save(tmp_path / "w.npz")
    assert main(["certify", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert word in captured.err
    assert not (tmp_path / "r.jsonl").exists()


def test_infeasible_cases_are_kept_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = instances(tmp_path / "b.jsonl", 1)
    with path.open("a") as stream:
        stream.write('{"name": "long", "capacity": 5, "weights": [3, 6]}\n')
    out = tmp_path / "r.jsonl"
    assert main(["certify", str(path), "--dp", "1", "--time-limit", "0.5", "-o", str(out)]) == 3
    assert "a cap of 6 would do" in capsys.readouterr().err
    assert {r["rows_status"] for r in read(out)} >= {"infeasible"}
    assert len(read(out)) == 2


# ---------------------------------------------------------------- Ray

_CLUSTER = """
import sys, ray
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, logging_level="ERROR",
         log_to_driver=False, _temp_dir=sys.argv[1])
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


def test_ray_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = instances(tmp_path / "b.jsonl", 1)
    assert main(["certify", str(path), "--dp", "1", "-o", str(tmp_path / "r.jsonl"), "--ray", "auto"]) == 2
    assert "routepack-opt[ray]" in capsys.readouterr().err


def test_no_ray_cluster_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    path = instances(tmp_path / "b.jsonl", 1)
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:x"):
        code = main(["certify", str(path), "--dp", "1", "-o", str(tmp_path / "r.jsonl"), "--ray", address])
        assert code == 4
        (line,) = capsys.readouterr().err.splitlines()
        assert address in line


@pytest.mark.distributed
def test_a_ray_cluster_gives_the_same_answers(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed (routepack-opt[ray])")
    # a token of our own: the cluster is closed to everyone else
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    short = Path("/tmp") / f"rp{os.getpid()}"  # socket paths must stay short
    head = subprocess.Popen(
        [sys.executable, "-c", _CLUSTER, str(short)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **token},
        start_new_session=True,
    )
    servants: list[int] = []
    try:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        if not address:
            pytest.skip("a local Ray cluster does not start here")
        servants = children(head.pid)
        path, out = instances(tmp_path / "b.jsonl", 6), tmp_path / "r.jsonl"
        process = start(path, "--dp", 1, "--time-limit", 0.5, "-o", out, "--ray", address, "--json", **token)
        try:
            output, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        assert process.returncode == 0, errors
        assert json.loads(output)["cases"] == 6
        local = {c.name: certify_case(c, ONE)["rows"] for c in read_cases([path], token_cap=None)}
        assert {r["name"]: r["rows"] for r in read(out)} == local
        servants = children(head.pid) or servants
    finally:
        try:
            head.communicate(timeout=30)  # end of input: the cluster goes
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
        for pid in servants:
            if _state(pid) != "Z":
                time.sleep(0.5)
        assert_gone(servants)
        subprocess.run(["rm", "-rf", str(short)], check=False)


@pytest.mark.parametrize(
    "change",
    [{"rows_status": 5}, {"name": ["a"]}, {"seed": None}, {"rows": "2"}, {"packing": "x"}, {"placement_gap": "0"}],
)
def test_a_damaged_line_is_named_and_the_file_left_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    good = certify_case(case([6, 5, 4]), ONE)
    path = tmp_path / "certs.jsonl"
    path.write_text(json.dumps({**good, **change}) + "\n" + json.dumps(good) + "\n")
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match="line 1 is not a result"):
        Journal(path)
    assert path.read_bytes() == before


def test_a_forged_line_is_not_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = case([6, 5, 4])
    forged = {**certify_case(one, ONE), "rows": 1, "rows_lower_bound": 1, "packing": [0, 0, 0]}
    path = tmp_path / "certs.jsonl"
    path.write_text(json.dumps(forged) + "\n")
    with Journal(path) as journal:
        assert journal.find(one, ONE) is None
    assert "refuted" in caplog.text


def test_a_solver_cannot_prove_more_cells_than_the_packing_has() -> None:
    record = certify_case(case([6, 5, 4]), ONE)
    solver = {"kind": "solver", "cap": 10, "solver": "x", "version": "1", "table": [], "max_cell": 0, "cells": 99}
    with pytest.raises(VerificationError, match="cells says 99"):
        check_record({**record, "rows_status": "solver-proved", "certificate": solver}, np.array([6, 5, 4]))


def test_an_instance_file_without_instances_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(FormatError, match="no instance"):
        read_cases([tmp_path / "empty.jsonl"], token_cap=None)


def test_items_over_half_of_a_huge_capacity_are_certified() -> None:
    cap = 2**31 - 1  # no table of that size
    record = certify_case(case([cap, 2**30, 2**30] * 5, cap), ONE)
    assert (record["rows"], record["rows_status"]) == (15, "certified")
