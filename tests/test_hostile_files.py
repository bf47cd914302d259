"""Files nobody meant to write: each ends in one clear line and exit code 4, never in another exception."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_plan import naive_plan, small_window

from routepack_opt import CostModel, Plan, Topology, Window
from routepack_opt.errors import FormatError, RoutePackError
from routepack_opt.files import read_json, read_npz
from routepack_opt.verify import verify_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def refused(read: Callable[[], Any]) -> str:
    """The message of a refusal, after checking that it is one."""
    with pytest.raises(FormatError) as caught:
        read()
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert message
    assert "\n" not in message
    assert len(message) < 2000
    return message


def member(header: str, body: bytes = b"", *, magic: bytes = b"\x93NUMPY\x01\x00") -> bytes:
    text = header.encode("latin1") + b"\n"
    return magic + struct.pack("<H", len(text)) + text + body


def described(descr: str, shape: str, body: bytes = b"", fortran: bool = False) -> bytes:
    return member(f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}", body)


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), **options)
    return stream.getvalue()


def zipped(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name + ".npy", data)
    return path


def parts(**changes: Any) -> dict[str, bytes]:
    """The members of a good window.npz with some replaced (bytes are raw members, None drops one)."""
    arrays: dict[str, Any] = {
        "format": "routepack.window/1",
        "lengths": np.array([3, 4]),
        "demand": np.ones((2, 1, 2), dtype=np.int32),
        "meta": "{}",
    }
    arrays.update(changes)
    return {k: v if isinstance(v, bytes) else npy(v) for k, v in arrays.items() if v is not None}


def test_the_good_window_is_read(tmp_path: Path) -> None:
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        window = Window.load(zipped(tmp_path / "w.npz", parts(), compression))
        assert window.lengths.tolist() == [3, 4]
    fortran = np.asfortranarray(np.arange(8, dtype=np.int32).reshape(2, 2, 2))
    window = Window.load(zipped(tmp_path / "w.npz", parts(demand=fortran)))
    assert window.demand.tolist() == fortran.tolist()
    window.demand[0] = 0  # its own, writable memory


HOSTILE_MEMBERS: list[tuple[str, dict[str, Any], str]] = [
    ("no format", {"format": None}, "format"),
    ("other format", {"format": "routepack.window/9"}, "routepack.window/9"),
    ("number as format", {"format": 7}, "format"),
    ("no lengths", {"lengths": None}, "lengths"),
    ("no demand", {"demand": None}, "demand"),
    ("float lengths", {"lengths": [3.0, 4.0]}, "lengths"),
    ("bool lengths", {"lengths": [True, True]}, "lengths"),
    ("text lengths", {"lengths": ["3", "4"]}, "lengths"),
    ("complex lengths", {"lengths": [3j, 4j]}, "lengths"),
    ("zero length", {"lengths": [3, 0]}, "lengths[1]"),
    ("negative length", {"lengths": [-3, 4]}, "lengths[0]"),
    ("length beyond int32", {"lengths": [3, 2**31]}, "lengths[1]"),
    ("length wraps in int64", {"lengths": np.array([3, 2**64 - 1], dtype=np.uint64)}, "lengths[1]"),
    ("no samples", {"lengths": np.zeros(0, int), "demand": np.zeros((0, 1, 2), np.int32)}, "lengths"),
    ("matrix of lengths", {"lengths": [[3, 4]]}, "lengths"),
    ("scalar length", {"lengths": 3}, "lengths"),
    ("NaN loads", {"demand": np.full((2, 1, 2), np.nan)}, "demand"),
    ("negative load", {"demand": np.array([[[1, -1]], [[1, 1]]], dtype=np.int32)}, "demand[0,0,1]"),
    ("load beyond int32", {"demand": np.full((2, 1, 2), 2**31)}, "demand[0,0,0]"),
    ("sample short", {"demand": np.ones((1, 1, 2), np.int32)}, "demand"),
    ("no layers", {"demand": np.ones((2, 0, 2), np.int32)}, "demand"),
    ("no experts", {"demand": np.ones((2, 1, 0), np.int32)}, "demand"),
    ("flat demand", {"demand": np.ones((2, 2), np.int32)}, "demand"),
    ("pickled objects", {"lengths": npy(np.array([3, 4], dtype=object), allow_pickle=True)}, "lengths"),
    ("structured", {"lengths": np.zeros(2, dtype=[("a", "<i8")])}, "lengths"),
    ("dates", {"lengths": np.array(["2026-01-01", "2026-01-02"], dtype="datetime64[D]")}, "lengths"),
    ("10^9 elements declared", {"lengths": described("'<i8'", "(1000000000,)", b"\0" * 16)}, "1000000000"),
    ("10^30 elements declared", {"lengths": described("'<i8'", f"({10**30},)", b"\0" * 16)}, "lengths"),
    ("0 x 10^30 elements", {"lengths": described("'<i8'", f"(0, {10**30})")}, "lengths"),
    ("0 x 2^61 x 2^61 elements", {"lengths": described("'<i8'", f"(0, {2**61}, {2**61})")}, "lengths"),
    ("100 dimensions", {"lengths": described("'<i8'", "(" + "1, " * 100 + ")", b"\0" * 8)}, "lengths"),
    ("negative size", {"lengths": described("'<i8'", "(-2,)", b"\0" * 16)}, "lengths"),
    ("two negative sizes", {"lengths": described("'<i8'", "(-1, -2)", b"\0" * 16)}, "lengths"),
    ("size True", {"lengths": described("'<i8'", "(True,)", b"\0" * 8)}, "lengths"),
    ("body short", {"lengths": described("'<i8'", "(2,)", b"\0" * 15)}, "lengths"),
    ("body long", {"lengths": described("'<i8'", "(2,)", b"\0" * 17)}, "lengths"),
    ("unknown dtype", {"lengths": described("'<q9'", "(2,)", b"\0" * 16)}, "lengths"),
    ("dtype is a call", {"lengths": described("__import__('os').getpid()", "(2,)", b"\0" * 16)}, "lengths"),
    ("array dtype", {"lengths": described("('<i8', (2,))", "(1,)", b"\1" * 16)}, "lengths"),
    ("header unbalanced", {"lengths": member("{'descr': '<i8', (((")}, "lengths"),
    ("header of text", {"lengths": member("'''")}, "lengths"),
    ("header nested", {"lengths": member("[" * 3000 + "]" * 3000)}, "lengths"),
    ("header long", {"lengths": member("{" + " " * 60000 + "}")}, "lengths"),
    ("header missing", {"lengths": b"\x93NUMPY\x01\x00"}, "lengths"),
    ("magic only", {"lengths": b"\x93NUM"}, "lengths"),
    ("npy 3.0", {"lengths": member("{}", magic=b"\x93NUMPY\x03\x00")}, "lengths"),
    ("empty member", {"lengths": b""}, "lengths"),
    ("broken code point", {"format": described("'<U1'", "()", b"\xff\xff\xff\x7f")}, "format"),
    ("broken sample id", {"sample_ids": described("'<U1'", "(2,)", b"\xff\xff\xff\x7f" * 2)}, "sample_ids"),
    ("numbers as sample ids", {"sample_ids": [1, 2]}, "sample_ids"),
    ("one sample id", {"sample_ids": ["a"]}, "sample_ids"),
    ("one group id", {"group_ids": [1]}, "group_ids"),
    ("fractional group id", {"group_ids": [0.5, 1.0]}, "group_ids"),
    ("two moe layers", {"moe_layers": [0, 1]}, "moe_layers"),
    ("top_k zero", {"top_k": np.int64(0)}, "top_k"),
    ("top_k list", {"top_k": [1, 2]}, "top_k"),
    ("top_k float", {"top_k": 2.0}, "top_k"),
    ("meta list", {"meta": "[]"}, "meta"),
    ("meta NaN", {"meta": '{"a": NaN}'}, "meta"),
    ("meta twice", {"meta": '{"a": 1, "a": 2}'}, "meta"),
    ("meta nested", {"meta": "[" * 100_000}, "meta"),
    ("meta number", {"meta": 3}, "meta"),
    ("counts unknown", {"meta": '{"counts": ["recorded"]}'}, "counts"),
]


@pytest.mark.parametrize(("changes", "named"), [m[1:] for m in HOSTILE_MEMBERS], ids=[m[0] for m in HOSTILE_MEMBERS])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hostile_window_members(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    path = zipped(tmp_path / "w.npz", parts(**changes))
    message = refused(lambda: Window.load(path))
    assert str(path) in message
    assert named in message


def test_a_field_stored_twice(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "w") as archive:
        for name in ("lengths.npy", "lengths.npy"):
            archive.writestr(name, npy([1]))
    assert "twice" in refused(lambda: Window.load(path))


def test_truncated_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    small_window(num_samples=2).save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        refused(lambda: Window.load(path))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_byte_changed(tmp_path: Path, at: int, value: int, deflated: bool) -> None:
    path = zipped(tmp_path / "w.npz", parts(), zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = value
    path.write_bytes(data)
    try:
        Window.load(path)
    except RoutePackError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("read", [Window.load, Plan.load, CostModel.load, read_json, read_npz])
def test_what_is_not_a_file_of_ours(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    refused(lambda: read(tmp_path / "missing"))
    refused(lambda: read(tmp_path))
    refused(lambda: read(tmp_path / "nul\0byte"))
    for data in (
        b"",
        b"\xff\xfe\x00",
        b"PK\x03\x04",
        b"PK\x05\x06" + b"\xff" * 18,
        b"{",
        b"\0" * 100,
        b"\xef\xbb\xbf{}",
    ):
        path = tmp_path / "file"
        path.write_bytes(data)
        refused(lambda path=path: read(path))


HOSTILE_JSON = {
    "empty": "",
    "NaN": '{"a": NaN}',
    "Infinity": '{"a": -Infinity}',
    "1e400": '{"a": 1e400}',
    "5000 digits": '{"a": ' + "9" * 5000 + "}",
    "key twice": '{"a": 1, "a": 1}',
    "key twice inside": '{"b": [{"a\\n": 1, "a\\n": 1}]}',
    "nested": "[" * 200_000,
    "nested objects": '{"a":' * 200_000,
    "tail": "{} {}",
    "comment": "{} // x",
    "single quotes": "{'a': 1}",
}


@pytest.mark.parametrize("text", HOSTILE_JSON.values(), ids=HOSTILE_JSON.keys())
def test_hostile_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    for read in (read_json, Plan.load, CostModel.load):
        assert str(path) in refused(lambda read=read: read(path))


HOSTILE_COSTS: list[Any] = [
    [],
    {},
    {"stages": {}},
    {"stages": [1]},
    {"stages": [{"name": "a"}]},
    {"stages": [{"name": "a", "alpha": "1", "beta": 0}]},
    {"stages": [{"name": "a", "alpha": True, "beta": 0}]},
    {"stages": [{"name": "a", "alpha": -1, "beta": 0}]},
    {"stages": [{"name": "a", "alpha": None, "beta": 0}]},
    {"stages": [{"name": "a", "alpha": 10**400, "beta": 0}]},
    {"stages": [{"name": "a", "alpha": 1, "beta": 0, "gamma": 0}]},
    {"stages": [], "expert_weight": "1"},
    {"stages": [], "expert_weight": True},
    {"stages": [], "expert_weight": [1, [2]]},
    {"stages": [], "expert_weight": [1, True]},
    {"stages": [], "expert_weight": -(10**400)},
    {"stages": [], "expert_weight": None},
    {"stages": [], "sync": "never"},
    {"stages": [], "sync": ["row"]},
    {"stages": [], "stage": []},
]


@pytest.mark.parametrize("value", HOSTILE_COSTS, ids=range(len(HOSTILE_COSTS)))
def test_hostile_cost(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    assert str(path) in refused(lambda: CostModel.load(path))


WINDOW = small_window()
PLAN = naive_plan(WINDOW, Topology(dp=4, ep=2, shards=2), 120, num_rows=2)


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value; of long lists only the ends."""
    found = [prefix] if prefix else []
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = sorted({0, len(value) - 1}) if isinstance(value, list) and value else []
    for key in keys:
        found += paths_of(value[key], (*prefix, key))
    return found


VALUES = [
    None,
    True,
    -1,
    0,
    10**18,
    10**400,
    -(10**400),
    0.5,
    1e308,
    "x",
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"a": 1},
    "1e400",
]


@pytest.mark.parametrize("path", paths_of(PLAN), ids=lambda p: "/".join(map(str, p)))
def test_any_value_anywhere_in_a_plan_is_refused_or_read(tmp_path: Path, path: tuple[Any, ...]) -> None:
    """Whatever stands in a field: accepted, or a one-line RoutePackError from the reader or the checker."""
    file = tmp_path / "plan.json"
    for value in VALUES:
        plan = json.loads(json.dumps(PLAN))
        target = plan
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        text = json.dumps(plan).replace('"1e400"', "1e400")
        file.write_text(text, encoding="utf-8")
        for read in (lambda: verify_plan(read_json(file), WINDOW), lambda: Plan.load(file).verify(WINDOW)):
            try:
                read()
            except RoutePackError as error:
                assert "\n" not in str(error)
                assert error.exit_code in (1, 4)
                str(error).encode("utf-8")


@pytest.mark.parametrize("path", paths_of(PLAN), ids=lambda p: "/".join(map(str, p)))
def test_any_field_may_be_missing(path: tuple[Any, ...]) -> None:
    plan = json.loads(json.dumps(PLAN))
    target = plan
    for key in path[:-1]:
        target = target[key]
    del target[path[-1]]
    try:
        verify_plan(plan, WINDOW)
    except RoutePackError as error:
        assert "\n" not in str(error)


def test_fields_of_a_plan_that_are_of_the_wrong_type(tmp_path: Path) -> None:
    cases: list[tuple[str, Any]] = [
        ("format", "routepack.plan/2"), ("rows", 2.0), ("rows", True), ("rows", 0), ("token_cap", 0),
        ("token_cap", "120"), ("total_tokens", 10**400), ("cells", [[[0.0]]]), ("cells", [[[True]]]), ("cells", {}),
        ("cell_tokens", [[1.0]]), ("logical_to_slot", [[0, 1]]), ("logical_to_slot", [[0.0] * 8] * 2),
        ("logical_to_slot", [[True] * 8] * 2), ("moved_experts", [1]), ("moved_experts", [-1, 0]), ("score", [1, 2]),
        ("score", [1, 2, "3"]), ("seed_score", []), ("seed_rows", 1.5), ("rows_status", "proved"), ("seed", "0"),
        ("version", 1), ("timings", {"plan": "1"}), ("notes", [1]), ("window", []),
    ]  # fmt: skip
    file = tmp_path / "plan.json"
    for name, value in cases:
        file.write_text(json.dumps(PLAN | {name: value}), encoding="utf-8")
        message = refused(lambda: Plan.load(file))
        assert str(file) in message
        assert name in message, message


def test_a_cap_or_rank_count_in_the_billions_allocates_nothing(tmp_path: Path) -> None:
    plan = json.loads(json.dumps(PLAN))
    plan["token_cap"] = plan["certificates"]["rows"]["cap"] = plan["certificates"]["rows"]["max_cell"] = 10**18
    plan["certificates"]["rows"]["cells"] = plan["rows_lower_bound"] = 1
    with pytest.raises(RoutePackError):
        verify_plan(plan, WINDOW)
    plan = json.loads(json.dumps(PLAN))
    plan["topology"]["dp"] = 10**15
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    assert "the most ranks" in refused(lambda: Plan.load(file))
