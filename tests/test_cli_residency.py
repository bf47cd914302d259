"""``routepack residency`` as users call it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "residency"))
from trace_files import HEADER, NAMES, ROWS, write

from routepack_opt.cli import command_parser, main
from routepack_opt.cli.residency import SUB_COMMANDS


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write(tmp_path, HEADER + NAMES + ROWS)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["residency", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_has_the_contract_keys(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "run", "--trace", trace, "--policy", "lru", "--capacity-mib", "1", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert {k: document[k] for k in ("accesses", "hits", "bytes_streamed")} == {
        "accesses": 9, "hits": 2, "bytes_streamed": 100,
    }  # fmt: skip
    assert document["hit_rate"] == pytest.approx(2 / 9)
    assert document["prefill"]["accesses"] + document["decode"]["accesses"] == 9
    assert document["capacity_bytes"] == 1 << 20


def test_capacity_in_token_cycles_and_all_policies(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "run", "--trace", trace, "--policy", "all", "--capacity-cycles", "0.9", "--json")
    documents = json.loads(out)
    assert code == 0 and all(d["capacity_bytes"] == 54 for d in documents)
    assert [d["policy"] for d in documents] == ["lru", "lfu", "pinned", "static", "ours", "belady"]
    code, out, _ = run(capsys, "run", "--trace", trace, "--policy", "all", "--capacity-cycles", "0.9")
    assert code == 0 and "belady (bound)" in out and "0.9 token cycles" in out


def test_text_table(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "run", "--trace", trace, "--policy", "ours", "--capacity-mib", "1", "-q")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[-3:]] == ["prefill", "decode", "total"]


def test_dumps_need_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "dump.npz")
    np.savez(path, routed_experts=np.array([[[0]], [[1]], [[0]]], dtype=np.uint8), seq_lens=np.array([3]))
    wanted = ("run", "--trace", path, "--policy", "lru", "--capacity-mib", "1")
    code, out, err = run(capsys, *wanted)
    assert (code, out) == (4, "") and "num_experts: missing" in err and err.count("\n") == 1
    code, out, _ = run(capsys, *wanted, "--num-experts", "2", "--expert-bytes", "8", "--prompt-tokens", "1", "--json")
    assert code == 0 and json.loads(out)["hits"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "SUB-COMMAND"),
        (("nonsense",), 2, "invalid choice: 'nonsense'"),
        (("run", "--trace", "T", "--policy", "lru"), 2, "--capacity-mib"),
        (("run", "--trace", "T", "--policy", "fifo", "--capacity-mib", "1"), 2, "'fifo'"),
        (("run", "--trace", "T", "--policy", "lru", "--capacity-mib", "-1"), 2, "is not a number > 0"),
        (("run", "--trace", "none.csv", "--policy", "lru", "--capacity-mib", "1"), 4, "none.csv: cannot be read"),
        (("run", "--trace", "T", "--policy", "lru", "--capacity-mib", "0.00001"), 4, "capacity: 10 bytes"),
    ],
)
def test_refusals_are_one_line(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = run(capsys, *(trace if argument == "T" else argument for argument in arguments))
    assert (found, out) == (code, "") and message in err and err.count("\n") == 1


def test_sub_commands_are_listed_and_described() -> None:
    text = (Path(__file__).parents[1] / "docs" / "cli.md").read_text().split("\n## residency\n")[1].split("\n## ")[0]
    parser = command_parser("residency")
    choices = next(a.choices for a in parser._actions if a.dest == "sub_command")
    assert list(choices) == list(SUB_COMMANDS)
    for name, sub in choices.items():
        assert f"routepack residency {name}" in text and name in parser.epilog
        for option in (o for action in sub._actions for o in action.option_strings if o.startswith("--")):
            assert option in ("--help", "--json", "--quiet") or option in text, option


@pytest.mark.data
def test_recorded_hits_on_the_command_line(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(data_dir / "traces" / "qwen.route.csv")
    _, out, _ = run(capsys, "run", "--trace", path, "--policy", "lru", "--capacity-mib", "4000", "--json")
    assert (json.loads(out)["hits"], json.loads(out)["accesses"]) == (29600, 39526)
