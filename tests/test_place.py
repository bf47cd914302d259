"""``routepack place``: every kind of placement, peers' files in and out, and what is said of the result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routepack_opt as rp
from routepack_opt.cli import main
from routepack_opt.errors import FormatError, InvalidInput, RoutePackError
from routepack_opt.integrations.eplb_files import read_table
from routepack_opt.integrations.place import Request, fit_table, mean_imbalance, num_loaded, place, trivial_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

L, E, P = 3, 16, 4
KEYS = {"max_over_mean", "bound_over_mean", "gap", "moved", "seconds", "layers"}


def some_load(seed: int = 0, num_layers: int = L, num_experts: int = E) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, (num_layers, num_experts))


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    path = tmp_path / "loads.json"
    load = some_load()
    load[0] = 0  # a dense layer
    path.write_text(json.dumps({"logical_count": load.tolist()}))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run_place(*arguments: object) -> tuple[int, str, str]:
        code = main(["place", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_place


def peaks(load: np.ndarray, table: np.ndarray, num_ranks: int) -> np.ndarray:
    """Largest rank load of each layer, slot by slot."""
    result = []
    for counts, row in zip(load, table, strict=True):
        copies = np.bincount(row, minlength=len(counts))
        result.append(max(sum(counts[e] / copies[e] for e in part) for part in row.reshape(num_ranks, -1)))
    return np.array(result)


# ---------------------------------------------------------------- the function


REQUESTS = {
    "one level": Request(P),
    "replicas": Request(P, num_slots=20),
    "nodes": Request(P, num_nodes=2),
    "groups on nodes": Request(P, num_nodes=2, num_groups=4),
    "replicas, groups on nodes": Request(P, num_slots=20, num_nodes=2, num_groups=4),
    "groups in blocks": Request(P, num_groups=2),
    "few moves": Request(P, within=0.05),
    "capped moves": Request(P, max_moved=0.25),
    "proved": Request(P, prove_s=0.5),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_summaries_agree_with_the_table(name: str) -> None:
    load = some_load(1)
    load[1] = 0
    request = REQUESTS[name]
    placed = place(load, request)
    summary, num_slots = placed.summary, request.num_slots or E
    assert placed.table.shape == (L, num_slots)
    for row in placed.table:
        assert set(row.tolist()) == set(range(E))
    reached = peaks(load, placed.table, P)
    layers = summary["layers"]
    assert [layer["reached"] for layer in layers] == pytest.approx(reached.tolist())
    assert all(layer["bound"] <= layer["reached"] * (1 + 1e-12) for layer in layers)
    loaded = load.any(axis=1)
    ratio = reached[loaded] / (load.sum(axis=1)[loaded] / P)
    assert summary["max_over_mean"] == pytest.approx(ratio.mean())
    assert 1 <= summary["bound_over_mean"] <= summary["max_over_mean"] * (1 + 1e-12)
    assert summary["gap"] == pytest.approx(np.mean([layers[k]["gap"] for k in np.flatnonzero(loaded)]))
    moved = num_loaded(placed.table, trivial_table(L, E, num_slots), E, P)
    assert [layer["moved"] for layer in layers] == moved.tolist()
    assert summary["moved"] == pytest.approx(moved[loaded].sum() / (loaded.sum() * num_slots))
    assert mean_imbalance(load, placed.table, P) == pytest.approx(summary["max_over_mean"])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(set(REQUESTS) - {"proved"})))
def test_placing_again_from_the_result_is_never_worse(seed: int, name: str) -> None:
    load = some_load(seed, 2)
    first = place(load, REQUESTS[name])
    request = Request(**{**vars(REQUESTS[name]), "previous": first.table})
    again = place(load, request)
    if not name.startswith("replicas"):  # replicas are planned afresh, then matched to what stands
        assert again.summary["max_over_mean"] <= first.summary["max_over_mean"] * (1 + 1e-4)
    assert again.summary["previous_over_mean"] == pytest.approx(first.summary["max_over_mean"])


def test_nodes_do_not_cost_balance_where_groups_may_be_torn() -> None:
    load = np.random.default_rng(3).geometric(0.003, (4, 64))
    free, nodes = place(load, Request(8)), place(load, Request(8, num_nodes=2))
    assert nodes.summary["max_over_mean"] <= free.summary["max_over_mean"] * (1 + 1e-4)
    node_load = np.take_along_axis(load, nodes.table, axis=1).reshape(4, 2, -1).sum(axis=2)
    assert (node_load.max(axis=1) <= 1.1 * node_load.mean(axis=1)).all()


def test_groups_stay_on_their_node_and_the_bound_knows() -> None:
    load = np.zeros((1, 16), dtype=np.int64)
    load[0, :4] = 100  # one hot group: it must stay on one of two nodes
    placed = place(load, Request(4, num_nodes=2, num_groups=4))
    assert placed.summary["layers"][0]["bound"] == placed.summary["layers"][0]["reached"] == 200
    assert placed.summary["layers"][0]["kind"] == "node"
    node_of = np.argsort(placed.table[0]) // 8
    assert len(set(node_of[:4].tolist())) == 1


def test_proof_leaves_capped_moves_alone() -> None:
    load = some_load(5)
    capped = place(load, Request(P, max_moved=0.1))
    proved = place(load, Request(P, max_moved=0.1, prove_s=1.0))
    assert (proved.table == capped.table).all()
    assert proved.summary["bound_over_mean"] >= capped.summary["bound_over_mean"]


def test_nothing_to_balance_moves_nothing() -> None:
    for load in (np.zeros((2, 8), dtype=np.int64), np.full((2, 8), 7)):
        placed = place(load, Request(4))
        assert placed.summary["moved"] == 0
        assert placed.summary["max_over_mean"] == 1


def test_a_previous_table_with_doubles_on_a_rank_is_a_fact_not_an_error() -> None:
    load = some_load(2, 1, 4)
    previous = np.array([[0, 0, 1, 2, 3, 3]])
    placed = place(load, Request(3, num_slots=6, previous=previous))
    assert placed.table.shape == (1, 6)
    assert fit_table(previous, load, 3) is previous


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(3), "E = 16 experts do not divide over P = 3"),
        (Request(P, num_slots=15), "cannot hold 16"),
        (Request(P, num_slots=18), "next valid number is 20"),
        (Request(P, num_nodes=3), "3 does not divide 4 ranks"),
        (Request(P, num_nodes=2, num_groups=3), "3 does not divide 16 experts"),
        (Request(P, num_nodes=4, num_groups=2), "4 does not divide 2 groups"),
        (Request(P, num_slots=20, num_groups=4), "number of nodes"),
        (Request(P, num_slots=20, within=0.1), "within"),
        (Request(P, max_moved=0.1, within=0.1), "exclude"),
        (Request(P, num_groups=3), "num_groups: 3"),
        (Request(P, previous=np.zeros((2, E), dtype=np.int64)), "2 layers"),
        (Request(P, previous=np.zeros((L, E), dtype=np.int64)), "expert 1 has no slot"),
        (Request(P, previous=np.full((L, E), E)), "expert 16"),
        (Request(P, previous=np.zeros((L, 17), dtype=np.int64)), "17 slots"),
    ],
)
def test_what_does_not_fit_is_refused(request_: Request, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        place(some_load(), request_)


def test_bad_loads_are_refused() -> None:
    for load in (np.array([[1, -1]]), np.array([[1.0, np.nan]]), np.array([[0.5, 1.0]]), np.zeros((0, 4), dtype=int)):
        with pytest.raises(RoutePackError):
            place(load, Request(1))
    with pytest.raises(InvalidInput, match="the table has"):
        mean_imbalance(some_load(), trivial_table(2, E, E), P)
    with pytest.raises(FormatError, match="layers"):
        fit_table(trivial_table(2, E, E), some_load(), P)


# ---------------------------------------------------------------- the command


def test_json_has_the_keys_of_the_contract(run: Any, loads: Path) -> None:
    code, out, err = run(loads, "--ranks", P, "--json")
    result = json.loads(out)
    assert code == 0
    assert err == ""
    assert result.keys() >= KEYS
    assert len(result["layers"]) == L
    assert result["layers"][0]["moved"] == 0


def test_text_says_what_was_reached_and_proved(run: Any, loads: Path, tmp_path: Path) -> None:
    code, out, _ = run(loads, "--ranks", P, "-o", tmp_path / "t.json", "--next", loads)
    assert code == 0
    for words in ("2 layers of 16 experts on 4 ranks, 1 more without load", "proved optimal", "moved", "wrote"):
        assert words in out


@pytest.mark.parametrize("name", ["t.json", "t.yaml", "t.pt", "t.npz", "t.map"])
def test_every_format_comes_back_as_previous(run: Any, loads: Path, tmp_path: Path, name: str) -> None:
    if name.endswith(".pt"):
        pytest.importorskip("torch")
    path = tmp_path / name
    form = ["--output-format", "ascend"] if name == "t.map" else []
    assert run(loads, "--ranks", P, "-o", path, *form)[0] == 0
    if form:
        path = path.rename(tmp_path / "map.json")
    table = read_table(path)
    assert table.shape == ((L - 1, E) if name == "t.yaml" else (L, E))  # TensorRT-LLM leaves dense layers out
    if name == "t.yaml":
        assert "\n  1: [" in path.read_text()
        assert "\n  0: [" not in path.read_text()
    code, out, _ = run(loads, "--ranks", P, "--previous", path, "--json")
    assert code == 0
    assert json.loads(out)["moved"] == 0


def test_a_window_is_a_load_file(run: Any, tmp_path: Path) -> None:
    demand = np.random.default_rng(0).integers(0, 9, (5, 2, 8))
    rp.Window([9] * 5, demand, moe_layers=[3, 7]).save(tmp_path / "w.npz")
    code, _, _ = run(tmp_path / "w.npz", "--ranks", 4, "-o", tmp_path / "t.yaml")
    assert code == 0
    assert "\n  3: [" in (tmp_path / "t.yaml").read_text()
    assert "\n  7: [" in (tmp_path / "t.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--ranks", 3], 4, "E = 16"),
        (["--ranks", 0], 2, "--ranks"),
        ([], 2, "--ranks"),
        (["--ranks", 4, "--slots", 18], 4, "20"),
        (["--ranks", 4, "--nodes", 2, "--within", 0.1], 2, "--within"),
        (["--ranks", 4, "--groups", 2, "--prove", 1], 2, "--prove"),
        (["--ranks", 4, "--max-moved", 0.1, "--within", 0.1], 2, "--within"),
        (["--ranks", 4, "-o", "t.txt"], 4, "suffix"),
        (["--ranks", 4, "-o", "no/t.json"], 4, "no/t.json"),
        (["--ranks", 4, "-o", "loads.json"], 4, "input"),
        (["--ranks", 4, "--previous", "none.json"], 4, "none.json"),
        (["--ranks", 4, "--next", "short.json"], 4, "short.json"),
    ],
)
def test_refusals_are_one_line(
    run: Any, loads: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], code: int, word: str
) -> None:
    monkeypatch.chdir(loads.parent)
    (loads.parent / "short.json").write_text('{"logical_count": [[1, 2]]}')
    before = loads.read_bytes()
    found, out, err = run("loads.json", *arguments)
    assert found == code, err
    assert out == ""
    assert len(err.splitlines()) == 1
    assert word in err
    assert loads.read_bytes() == before


@pytest.mark.parametrize("text", ["[[1, NaN]]", '{"logical_count": [[1, -2]]}', '{"logical_count": [[1, 2.5]]}', "{}"])
def test_bad_load_files_are_one_line(run: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    code, out, err = run(path, "--ranks", 1)
    assert code == 4
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "bad.json" in err


@pytest.mark.data
def test_real_decode_counts_come_within_a_thousandth_of_the_bound(run: Any, data_dir: Path) -> None:
    path = data_dir / "loads" / "decode_in2000out100.json"
    _, out, _ = run(path, "--ranks", 32, "--json")
    result = json.loads(out)
    assert result["max_over_mean"] < 1.0581  # LPT and best swaps
    assert result["gap"] < 1e-3
    _, out, _ = run(path, "--ranks", 32, "--slots", 288, "--nodes", 4, "--groups", 8, "--json")
    assert json.loads(out)["gap"] < 1e-3
    _, out, _ = run(path, "--ranks", 32, "--within", 0.01, "--json")
    result = json.loads(out)
    assert result["gap"] <= 0.01
    assert result["moved"] < 0.25


@pytest.mark.parametrize("wish", [("--max-moved", 0.1), ("--within", 0.01)])
def test_a_cap_on_moves_is_never_silently_dropped(
    run: Any, loads: Path, tmp_path: Path, wish: tuple[str, float]
) -> None:
    previous = tmp_path / "previous.json"
    assert run(loads, "--ranks", P, "--slots", E + P, "-o", previous)[0] == 0
    code, _, err = run(loads, "--ranks", P, "--previous", previous, *wish)
    assert code == 4 and f"{E + P} slots for {E} experts" in err


@pytest.mark.parametrize(
    ("counts", "words"), [([[1e300] * 4], "1e+300 is above"), ([[[1 << 56] * 4]] * 200, "the steps sum to")]
)
def test_huge_counts_are_named_and_never_wrap(run: Any, tmp_path: Path, counts: list[Any], words: str) -> None:
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(counts))
    code, _, err = run(path, "--ranks", 2)
    assert code == 4 and "huge.json" in err and words in err


def test_groups_with_more_slots_than_their_node_can_keep_apart(run: Any, loads: Path) -> None:
    code, _, _ = run(loads, "--ranks", P, "--slots", 2 * E, "--nodes", P, "--groups", P)
    assert code == 0  # a node is one rank of 4 experts and 8 slots: doubles are forced
