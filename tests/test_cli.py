"""Every command: results alone on stdout, exit codes, one-line refusals, nothing half-written."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import routepack_opt as rp
from routepack_opt.cli import COMMANDS, main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

N, L, E = 24, 2, 8
CAP = 64


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refused(self, code: int, *words: str) -> None:
        """One clear line on stderr that holds ``words``, nothing on stdout."""
        assert self.code == code, self.err
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("routepack")
        for word in words:
            assert word in lines[0]


@pytest.fixture
def routepack(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Result]]:
    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    yield run
    logger = logging.getLogger("routepack_opt")  # as before, for caplog in other test files
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def small_window(seed: int = 0, **fields: Any) -> rp.Window:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, CAP // 2, N)
    demand = rng.multinomial(2 * lengths[:, None].repeat(L, 1), rng.dirichlet(np.ones(E), (N, L)))
    return rp.Window(lengths, demand, **fields)


@pytest.fixture
def window(tmp_path: Path) -> Path:
    path = tmp_path / "window.npz"
    small_window(group_ids=np.arange(N) // 2).save(path)
    return path


@pytest.fixture
def plan_args(window: Path, tmp_path: Path) -> list[object]:
    return ["plan", window, "--ep", 2, "--token-cap", CAP, "--budget-steps", 500, "-o", tmp_path / "plan.json"]


@pytest.fixture
def plan_path(routepack: Callable[..., Result], plan_args: list[object], tmp_path: Path) -> Path:
    assert routepack(*plan_args, "-q").code == 0
    return tmp_path / "plan.json"


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "routepack_opt", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------- the command as a whole


def test_help_names_every_command(routepack: Callable[..., Result]) -> None:
    result = routepack("--help")
    assert result.code == 0
    assert result.err == ""
    for name in COMMANDS:
        assert f"  {name} " in result.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_names_each_option_once(routepack: Callable[..., Result], name: str) -> None:
    result = routepack(name, "--help")
    assert result.code == 0
    assert result.err == ""
    assert result.out.startswith(f"usage: routepack {name}")
    assert "--json" in result.out


def test_version(routepack: Callable[..., Result]) -> None:
    assert routepack("--version").out == f"routepack {rp.__version__}\n"


def test_no_command_shows_the_help_on_stderr(routepack: Callable[..., Result]) -> None:
    result = routepack()
    assert (result.code, result.out) == (2, "")
    assert "usage: routepack" in result.err


def test_unknown_command_and_options(routepack: Callable[..., Result], plan_args: list[object]) -> None:
    routepack("pack").refused(2, "'pack'", "ingest", "--help")
    routepack("--fast").refused(2, "--fast")
    routepack(*plan_args, "--fast").refused(2, "--fast", "routepack plan --help")
    routepack(*plan_args, "--budg", "1").refused(2, "--budg")  # no guessing of abbreviations
    routepack("plan").refused(2, "WINDOW.npz", "--ep", "--token-cap")
    routepack("verify", "plan.json").refused(2, "WINDOW.npz")


def test_python_dash_m_is_the_same_command() -> None:
    process = start("--version")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"routepack {rp.__version__}\n", "")


def test_a_closed_stdout_is_not_a_traceback(plan_path: Path, window: Path) -> None:
    process = start("verify", plan_path, window)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "routepack_opt", "doctor", "--no-compile"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert "No space left" in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- synth


def test_synth_writes_window_and_cost(routepack: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    result = routepack("synth", "tiny", "-n", 16, "--seed", 3, "-o", path, "--json")
    assert result.code == 0
    assert result.err == ""
    window = rp.Window.load(path)
    assert result.json["samples"] == window.num_samples == 16
    assert result.json["tokens"] == int(window.lengths.sum())
    assert rp.CostModel.load(result.json["cost"]).stages
    assert files_in(tmp_path) == {"w.npz", "w.cost.json"}
    text = routepack("synth", "tiny", "-n", 16, "--seed", 3, "-o", path)
    assert result.json["plan_command"] in text.out


def test_the_plan_command_that_synth_prints_works(routepack: Callable[..., Result], tmp_path: Path) -> None:
    result = routepack("synth", "tiny", "-n", 64, "-o", tmp_path / "it's.npz", "--json")
    import shlex

    words = shlex.split(result.json["plan_command"])[1:]
    words[words.index("plan.json")] = str(tmp_path / "plan.json")
    assert routepack(*words, "--budget", "0.05").code == 0


def test_synth_refuses(routepack: Callable[..., Result], tmp_path: Path) -> None:
    routepack("synth", "huge", "-o", tmp_path / "w.npz").refused(2, "huge", "flash")
    routepack("synth", "tiny", "-n", 0, "-o", tmp_path / "w.npz").refused(2, "'0'")
    routepack("synth", "tiny", "--seed", -1, "-o", tmp_path / "w.npz").refused(2, "'-1'")
    routepack("synth", "tiny", "-n", 8, "-o", tmp_path / "none" / "w.npz").refused(4, "none", "cannot be written")
    routepack("synth", "tiny", "-n", 8, "-o", tmp_path).refused(4, "folder")
    assert files_in(tmp_path) == set()


# ---------------------------------------------------------------- ingest


def write_routes(path: Path, lengths: list[int], *, layers: int = L, experts: int = E) -> None:
    rng = np.random.default_rng(0)
    tokens = sum(lengths)
    routes = rng.random((tokens, layers, experts)).argsort(axis=2)[:, :, :2].astype(np.uint8)
    np.savez(path, routed_experts=routes, seq_lens=np.array(lengths))


def test_ingest(routepack: Callable[..., Result], tmp_path: Path) -> None:
    write_routes(tmp_path / "a.npz", [3, 5])
    write_routes(tmp_path / "b.npz", [4])
    out = tmp_path / "w.npz"
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    result = routepack("ingest", *files, "--num-experts", E, "-o", out, "--json")
    assert result.code == 0
    assert rp.Window.load(out).lengths.tolist() == [3, 5, 4]
    assert result.json["window"] == str(out)
    assert result.json["num_samples"] == 3
    text = routepack("ingest", *files, "--num-experts", E, "-o", out, "--counts", "predicted")
    assert f"wrote {out}" in text.out
    assert rp.Window.load(out).counts == "predicted"


def test_ingest_refuses_and_keeps_what_was_there(routepack: Callable[..., Result], tmp_path: Path) -> None:
    write_routes(tmp_path / "a.npz", [3, 5])
    out = tmp_path / "w.npz"
    out.write_bytes(b"precious")
    arguments = ["ingest", tmp_path / "a.npz", "-o", out]
    routepack(*arguments).refused(2, "--num-experts")
    routepack(*arguments, "--num-experts", 0).refused(2, "'0'")
    routepack(*arguments, "--num-experts", E, "--counts", "old").refused(2, "old", "predicted")
    routepack(*arguments, "--num-experts", 3).refused(4, "a.npz")
    routepack(*arguments, "--num-experts", E, "--moe-layers", "5-1").refused(4, "moe")
    routepack(*arguments, "--num-experts", E, "--format", "csv").refused(4, "csv")
    routepack("ingest", tmp_path / "no.npz", "--num-experts", E, "-o", out).refused(4, "no.npz", "No such file")
    routepack("ingest", out, "--num-experts", E, "-o", tmp_path / "x.npz").refused(4, "w.npz")
    routepack("ingest", tmp_path / "a.npz", "--num-experts", E, "-o", tmp_path / "a.npz").refused(4, "input")
    assert out.read_bytes() == b"precious"
    assert files_in(tmp_path) == {"a.npz", "w.npz"}


@pytest.mark.data
def test_real_routes_become_a_verified_plan(routepack: Callable[..., Result], data_dir: Path, tmp_path: Path) -> None:
    """The main job on real input: three DeepSeek-V2-Lite dumps of 173 sequences."""
    files = sorted((data_dir / "routes").glob("*.npz"))
    window, plan = tmp_path / "w.npz", tmp_path / "plan.json"
    report = routepack("ingest", *files, "--num-experts", 64, "-o", window, "--json")
    assert (report.code, report.json["num_samples"], report.json["num_layers"]) == (0, 173, 26)
    result = routepack("plan", window, "--ep", 8, "--token-cap", 2048, "--budget", 0.5, "-o", plan, "--json")
    assert result.code == 0
    assert result.json["rows_status"] == "certified"
    base = result.json["figures"]["LPT + FFD"]["slowest_shard"]
    assert result.json["score"][0] < base
    assert routepack("verify", plan, window).code == 0


# ---------------------------------------------------------------- plan: results


def test_plan_prints_gains_and_proofs(routepack: Callable[..., Result], plan_args: list[object]) -> None:
    result = routepack(*plan_args)
    assert result.code == 0
    for text in (
        "standing + FFD",
        "LPT + FFD",
        "slowest shard",
        "EP efficiency eta",
        "\nrows ",
        "\nlayout ",
        "\nmoved ",
    ):
        assert text in result.out
    assert "note      cost: default" in result.out  # nobody gave a cost: the output says so
    assert f"wrote     {plan_args[-1]}" in result.out
    assert "rows" not in result.err


def test_plan_json_is_alone_on_stdout(routepack: Callable[..., Result], plan_args: list[object], window: Path) -> None:
    result = routepack(*plan_args, "--json")
    assert result.code == 0
    values = result.json
    plan = rp.Plan.load(values["plan"])
    plan.verify(rp.Window.load(window))
    assert values["rows"] == plan.rows
    assert values["score"] == list(plan.score)
    assert values["moved_experts"] == int(plan.moved_experts.sum())
    assert values["figures"]["plan"]["slowest_shard"] == pytest.approx(plan.score.slowest_shard)
    assert values["moved_bytes"] is None


def test_progress_goes_to_stderr_and_quiet_silences_it(
    routepack: Callable[..., Result], plan_args: list[object]
) -> None:
    assert "searching" in routepack(*plan_args, "--json").err
    assert routepack(*plan_args, "--json", "-q").err == ""


def test_steps_and_seed_repeat(routepack: Callable[..., Result], plan_args: list[object], plan_path: Path) -> None:
    first = rp.Plan.load(plan_path)
    assert routepack(*plan_args, "--seed", "0").code == 0
    assert rp.Plan.load(plan_path) == first


def test_options_are_in_the_plan_file(
    routepack: Callable[..., Result], window: Path, plan_args: list[object], tmp_path: Path
) -> None:
    result = routepack(
        *plan_args, "--dp", 4, "--shards", 2, "--seed", 7, "--min-rows", 3, "--row-multiple", 2, "--pad-multiple", 4,
        "--max-samples", 5, "--equal-samples", "--oversize", "alone", "--max-moved", 0.5, "--keep-groups", "rank",
    )  # fmt: skip
    assert result.code == 0, result.err
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["constraints"] == {
        "min_rows": 3,
        "row_multiple": 2,
        "pad_multiple": 4,
        "max_samples_per_cell": 5,
        "equal_samples_per_rank": True,
        "groups": "rank",
        "oversize": "alone",
        "max_moved": 0.5,
    }
    assert plan["topology"] == {"dp": 4, "ep": 2, "shards": [[0, 1], [2, 3]]}
    assert (plan["token_cap"], plan["seed"]) == (CAP, 7)
    assert plan["rows"] >= 4
    assert plan["rows"] % 2 == 0
    assert routepack("verify", tmp_path / "plan.json", window).code == 0


@pytest.mark.parametrize(("dp", "shards", "want"), [(None, None, (2, 1)), (8, None, (8, 4)), (None, 3, (6, 3))])
def test_topology_defaults(
    routepack: Callable[..., Result], plan_args: list[object], tmp_path: Path, dp: int, shards: int, want: Any
) -> None:
    extra = ([] if dp is None else ["--dp", dp]) + ([] if shards is None else ["--shards", shards])
    assert routepack(*plan_args, *extra).code == 0
    topology = json.loads((tmp_path / "plan.json").read_text())["topology"]
    assert (topology["dp"], len(topology["shards"])) == want


def test_bare_keep_groups_does_not_swallow_the_window(
    routepack: Callable[..., Result], window: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    base = ["--ep", 2, "--token-cap", CAP, "--budget-steps", 0, "-o", out]
    for words in (["--keep-groups", window], [window, "--keep-groups"], [window, "--keep-groups", "cell"]):
        assert routepack("plan", *base, *words).code == 0
        assert rp.Plan.load(out).constraints.groups == "cell"


def test_cost_file_and_model_preset(routepack: Callable[..., Result], plan_args: list[object], tmp_path: Path) -> None:
    cost = {"stages": [{"name": "full", "alpha": 104.0, "beta": 37.2}], "expert_weight": [1.0, 2.0], "sync": "row"}
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    assert routepack(*plan_args, "--cost", tmp_path / "cost.json").code == 0
    assert json.loads((tmp_path / "plan.json").read_text())["cost"] == cost
    result = routepack(*plan_args, "--model", "qwen3-30b-a3b", "--json")
    plan = rp.Plan.load(tmp_path / "plan.json")
    assert plan.cost == rp.CostModel.for_model("qwen3-30b-a3b", token_cap=CAP)
    assert any("48 MoE layers x 128 experts" in note for note in plan.notes)  # the window has 2 x 8
    assert result.json["moved_bytes"] == result.json["moved_experts"] * 3 * 2048 * 768 * 14
    assert routepack(*plan_args, "--model", "qwen3-30b-a3b", "--expert-bytes", 10, "--json").json["moved_bytes"] == (
        10 * int(plan.moved_experts.sum())
    )
    routepack(*plan_args, "--cost", "c.json", "--model", "olmoe").refused(2, "--model", "not allowed with")


def test_previous_plan_is_where_the_experts_stand(
    routepack: Callable[..., Result], plan_args: list[object], plan_path: Path
) -> None:
    first = rp.Plan.load(plan_path)
    assert first.moved_experts.sum() > 0
    result = routepack(*plan_args, "--previous", plan_path, "--max-moved", 0, "--json")  # replaces its own input
    assert result.code == 0, result.err
    again = rp.Plan.load(plan_path)
    assert again.moved_experts.sum() == 0
    assert (again.logical_to_slot // (E // 2) == first.logical_to_slot // (E // 2)).all()


def test_predicted_counts_are_said(routepack: Callable[..., Result], tmp_path: Path) -> None:
    small_window(counts="predicted").save(tmp_path / "p.npz")
    arguments = ["plan", tmp_path / "p.npz", "--ep", 2, "--token-cap", CAP, "--budget", 0, "-o", tmp_path / "p.json"]
    assert "predicted" in routepack(*arguments).out
    assert any("predicted" in note for note in routepack(*arguments, "--json").json["notes"])


# ---------------------------------------------------------------- plan: refusals


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        (["--budget", "-1"], 2, ["--budget", "'-1'", "seconds"]),
        (["--budget", "nan"], 2, ["--budget", "'nan'"]),
        (["--budget", "inf"], 2, ["--budget", "'inf'"]),
        (["--budget", "soon"], 2, ["--budget", "'soon'"]),
        (["--budget-steps", "-1"], 2, ["--budget-steps"]),
        (["--token-cap", "0"], 2, ["--token-cap", "'0'"]),
        (["--token-cap", "8k"], 2, ["--token-cap", "'8k'"]),
        (["--ep", "0"], 2, ["--ep", "'0'"]),
        (["--dp", "-2"], 2, ["--dp", "'-2'"]),
        (["--max-moved", "1.5"], 2, ["--max-moved", "between 0 and 1"]),
        (["--max-moved", "nan"], 2, ["--max-moved"]),
        (["--min-rows", "0"], 2, ["--min-rows"]),
        (["--keep-groups=all"], 2, ["--keep-groups", "'all'"]),
        (["--seed", "x"], 2, ["--seed"]),
        (["--seed", "-1"], 2, ["--seed", "'-1'"]),
        (["--ep", "3"], 4, ["E = 8", "P = 3", "4"]),
        (["--dp", "5", "--shards", "2"], 4, ["dp 5", "2 shards"]),
        (["--device", "abacus"], 4, ["device", "'abacus'"]),
        (["--model", "no-such-model"], 4, ["no-such-model"]),
        (["--cost", "no-such-cost.json"], 4, ["no-such-cost.json"]),
        (["--previous", "no-such-plan.json"], 4, ["no-such-plan.json"]),
        (["--token-cap", "20"], 3, ["sample", "token cap 20", "a cap of 31 would do"]),
        (["--dp", "32"], 3, ["needs 8 dummy samples"]),
        (["--dp", "5", "--shards", "1", "--equal-samples"], 3, ["needs 1 dummy sample"]),
        (["--max-samples", "1", "--keep-groups"], 3, ["group 0"]),
    ],
)
def test_plan_refuses_with_one_line(
    routepack: Callable[..., Result],
    plan_args: list[object],
    tmp_path: Path,
    extra: list[str],
    code: int,
    words: list[str],
) -> None:
    (tmp_path / "plan.json").write_text("precious")
    routepack(*plan_args, *extra, "-q").refused(code, *words)
    assert (tmp_path / "plan.json").read_text() == "precious"
    assert files_in(tmp_path) == {"window.npz", "plan.json"}


def test_plan_refuses_outputs_it_cannot_write(
    routepack: Callable[..., Result], plan_args: list[object], window: Path, tmp_path: Path
) -> None:
    base = plan_args[:-2]
    before = window.read_bytes()
    routepack(*base, "-o", tmp_path / "no" / "plan.json").refused(4, "cannot be written")
    routepack(*base, "-o", tmp_path).refused(4, "cannot be written", "folder")
    routepack(*base, "-o", window).refused(4, "cannot be written", "input")
    routepack(*base, "-o", os.devnull).refused(4, "cannot be written", "regular file")
    assert window.read_bytes() == before
    assert files_in(tmp_path) == {"window.npz"}


def test_plan_refuses_a_folder_without_permission(
    routepack: Callable[..., Result], plan_args: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # as root every folder is writable
    routepack(*plan_args).refused(4, "plan.json", "not writable")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b'{"format": "routepack.window/1"}'])
def test_plan_refuses_a_bad_window(
    routepack: Callable[..., Result], plan_args: list[object], window: Path, content: bytes
) -> None:
    window.write_bytes(content)
    routepack(*plan_args, "-q").refused(4, "window.npz")
    window.unlink()
    routepack(*plan_args, "-q").refused(4, "window.npz", "No such file")


def test_plan_refuses_bad_cost_and_previous(
    routepack: Callable[..., Result], plan_args: list[object], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"stages": [{"name": "full", "alpha": NaN, "beta": 1}]}')
    routepack(*plan_args, "--cost", bad, "-q").refused(4, "bad.json", "NaN")
    bad.write_text('{"stages": [{"name": "full", "alpha": 1, "beta": 1}], "expert_weight": [1, 1, 1]}')
    routepack(*plan_args, "--cost", bad, "-q").refused(4, "expert_weight", "3 weights for 2")
    routepack(*plan_args, "--previous", bad, "-q").refused(4, "bad.json", "format")


# ---------------------------------------------------------------- plan: Ctrl-C


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_interrupt_writes_the_incumbent(window: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    process = start("plan", window, "--ep", 2, "--dp", 4, "--token-cap", CAP, "--budget", 300, "-o", out)
    assert process.stderr is not None
    assert "Ctrl-C" in process.stderr.readline()
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "note      interrupted" in text
    rp.Plan.load(out).verify(rp.Window.load(window))
    assert files_in(tmp_path) == {"window.npz", "plan.json"}


def test_interrupt_outside_a_search_writes_nothing(
    routepack: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("routepack_opt.synth.synth", interrupted)
    routepack("synth", "tiny", "-o", tmp_path / "w.npz").refused(130, "interrupted")
    assert files_in(tmp_path) == set()


# ---------------------------------------------------------------- verify and doctor


def test_verify_lists_the_claims(routepack: Callable[..., Result], plan_path: Path, window: Path) -> None:
    text = routepack("verify", plan_path, window)
    assert (text.code, text.err) == (0, "")
    claims = [line for line in text.out.splitlines() if line.startswith("ok  ")]
    values = routepack("verify", plan_path, window, "--json")
    assert values.json == {"verified": True, "claims": [line[4:] for line in claims]}


def test_verify_names_the_broken_claim(routepack: Callable[..., Result], plan_path: Path, window: Path) -> None:
    plan = json.loads(plan_path.read_text())
    plan["score"][0] *= 0.99
    plan_path.write_text(json.dumps(plan))
    routepack("verify", plan_path, window).refused(1, "broken claim", "score")
    result = routepack("verify", plan_path, window, "--json")
    assert result.code == 1
    assert result.json["verified"] is False
    assert "score" in result.json["claim"]


def test_verify_refuses_what_is_no_plan(
    routepack: Callable[..., Result], plan_path: Path, window: Path, tmp_path: Path
) -> None:
    routepack("verify", window, plan_path).refused(4, "window.npz")  # the wrong way round
    routepack("verify", tmp_path / "no.json", window).refused(4, "no.json", "No such file")
    routepack("verify", plan_path, tmp_path / "no.npz").refused(4, "no.npz", "No such file")
    plan_path.write_text(plan_path.read_text()[:-20])
    routepack("verify", plan_path, window).refused(4, "plan.json", "JSON")


def test_verify_of_another_window(routepack: Callable[..., Result], plan_path: Path, tmp_path: Path) -> None:
    small_window(seed=1).save(tmp_path / "other.npz")
    routepack("verify", plan_path, tmp_path / "other.npz").refused(1, "sha256")


def test_doctor(routepack: Callable[..., Result]) -> None:
    values = routepack("doctor", "--no-compile", "--json").json
    assert values["missing"] == []
    assert values["packages"]["numpy"] == np.__version__
    assert values["kernels_s"] is None
    text = routepack("doctor")
    assert text.code == 0
    assert "numba" in text.out
    assert "ready in" in text.out


def test_doctor_names_what_is_missing(routepack: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "ortools":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = routepack("doctor", "--json")
    assert result.code == 1
    assert result.json["missing"] == ["ortools"]
