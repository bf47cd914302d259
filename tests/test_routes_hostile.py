"""Damaged and hostile dumps: one clear FormatError naming the file, never a crash, never code run."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import routepack_opt as rp
from routepack_opt.errors import FormatError, InvalidInput, RoutePackError
from routepack_opt.routes import IngestReport

GOOD = np.random.default_rng(0).random((5, 2, 8)).argsort(axis=2)[:, :, :2].astype(np.uint8)


def refuse(path: Path, match: str | None = None, **kwargs: Any) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        rp.read_routes(path, 8, report=IngestReport(), **kwargs)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert len(text) < 1000
    assert caught.value.exit_code == 4


def npz_with(path: Path, member: bytes, lengths: Any = (3, 4)) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        stream = io.BytesIO()
        np.save(stream, np.array(lengths))
        archive.writestr("seq_lens.npy", stream.getvalue())
        archive.writestr("routed_experts.npy", member)
    return path


def npy_claiming(shape: str, descr: str = "|u1", data: bytes = b"") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
    ("member", "match"),
    [
        (npy_claiming("(5, 2, 2)", data=bytes(19)), "19 bytes are stored"),
        (npy_claiming("(1099511627776, 2, 1099511627776)"), "bytes are stored|expected 1 to"),
        (npy_claiming("(5, 0, 2)"), "0 layers"),
        (npy_claiming("(5, 1099511627776, 0)"), "layers"),
        (npy_claiming("(5, 4)", data=bytes(20)), "expected integers"),
        (npy_claiming("(6, 2, 2)", data=bytes(24)), "6 rows for 2 samples; expected sum"),
        (npy_claiming("(5, 2, 2)", "<f4", bytes(80)), "float32"),
        (npy_claiming("(5, 2, 2)", "|O", bytes(20)), "object"),
        (npy_claiming("((((((", data=bytes(20)), "not a valid npy"),
        (b"\x80\x04.", "not a valid npy"),
        (b"", "not a valid npy"),
    ],
)
def test_npz_members(tmp_path: Path, member: bytes, match: str) -> None:
    refuse(npz_with(tmp_path / "a.npz", member), match)


@pytest.mark.parametrize("lengths", [[0, 7], [-1, 8], [2.5], [[3]], ["3"], [], [2**40]])
def test_npz_lengths(tmp_path: Path, lengths: Any) -> None:
    refuse(npz_with(tmp_path / "a.npz", npy_claiming("(5, 2, 2)", data=GOOD.tobytes()), lengths), "seq_lens")


def test_npz_truncated_corrupt_missing(tmp_path: Path) -> None:
    path = npz_with(tmp_path / "a.npz", npy_claiming("(5, 2, 2)", data=GOOD.tobytes()))
    whole = path.read_bytes()
    for size in (10, len(whole) // 2, len(whole) - 5):
        (tmp_path / "cut.npz").write_bytes(whole[:size])
        refuse(tmp_path / "cut.npz")
    at = whole.index(GOOD.tobytes())
    (tmp_path / "flip.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    refuse(tmp_path / "flip.npz")
    refuse(tmp_path / "absent.npz", "cannot be read")
    refuse(tmp_path, "cannot be read")
    np.savez(tmp_path / "other.npz", lengths=[1])
    refuse(tmp_path / "other.npz", "'seq_lens' is missing")
    np.savez(tmp_path / "half.npz", seq_lens=[1])
    refuse(tmp_path / "half.npz", "'routed_experts' is missing")
    (tmp_path / "empty.npz").write_bytes(b"")
    refuse(tmp_path / "empty.npz")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({}, "'routed_experts' is missing"),
        ([1], "expected an object"),
        ({"length": 6}, "'routed_experts' is missing"),
        ({"routed_experts": GOOD.tolist()}, "'length' is missing"),
        ({"length": "6", "routed_experts": GOOD.tolist()}, "'length'"),
        ({"length": True, "routed_experts": GOOD.tolist()}, "'length'"),
        ({"length": 2**70, "routed_experts": GOOD.tolist()}, "'length'"),
        ({"length": 6, "routed_experts": "***"}, "base64"),
        ({"length": 6, "routed_experts": "é"}, "base64"),
        ({"length": 6, "routed_experts": b64(bytes(20))}, "dtype"),
        ({"length": 6, "routed_experts": b64(bytes(20)), "dtype": "uint8"}, "shape"),
        (
            {"length": 6, "routed_experts": b64(bytes(20)), "dtype": "float32", "shape": [5, 2, 2]},
            "'float32' is unknown",
        ),
        ({"length": 6, "routed_experts": b64(bytes(20)), "dtype": "object", "shape": [5, 2, 2]}, "unknown"),
        (
            {"length": 6, "routed_experts": b64(bytes(20)), "dtype": "int64", "shape": [5, 2, 2]},
            "whole number|needs 20",
        ),
        ({"length": 6, "routed_experts": b64(bytes(20)), "dtype": "uint8", "shape": [6, 2, 2]}, "needs 24 ids but 20"),
        ({"length": 6, "routed_experts": b64(bytes(20)), "dtype": "uint8", "shape": [2**39, 2**39, 2]}, "needs"),
        ({"length": 6, "routed_experts": b64(bytes(20)), "dtype": "uint8", "shape": [-1, -1, 2]}, "more than one"),
        ({"length": 6, "routed_experts": b64(bytes(20)), "dtype": "uint8", "shape": [-1, 0, 2]}, "do not fill"),
        ({"length": 6, "routed_experts": b64(bytes(20)), "dtype": "uint8", "shape": "5x2x2"}, "shape"),
        ({"length": 6, "routed_experts": b64(npy_claiming("(9, 2, 2)", data=bytes(20)))}, "npy header declares"),
        ({"length": 6, "routed_experts": b64(npy_claiming("(5, 2, 2)", "|O", bytes(20)))}, "object"),
        ({"length": 6, "routed_experts": b64(b"\x80\x04."), "dtype": "uint8"}, "shape"),
        ({"length": 6, "routed_experts": "nrlre1:int16:5x2:AAAA"}, "nrlre1"),
        ({"length": 6, "routed_experts": "nrlre1:float16:5x2x2:AAAA"}, "dtype"),
        ({"length": 6, "routed_experts": "nrlre1:int16:99999999999x2x2:AAAA"}, "needs|whole"),
        ({"length": 6, "routed_experts": [[[0, 1]], [[1]]]}, "rectangular"),
        ({"length": 6, "routed_experts": [[[0.5, 1]]]}, "float"),
        ({"length": 6, "routed_experts": [[["a", "b"]]]}, "dtype"),
        ({"length": 6, "routed_experts": [[[2**80, 1]]]}, "integer|object"),
        ({"length": 6, "routed_experts": {"a": 1}}, "dict"),
        ({"length": 2, "routed_experts": [[[300, 1]]], "dtype": "uint8"}, "id 300 does not fit the dtype uint8"),
        ({"length": 2, "routed_experts": [[[300, 1], [0, 1]]]}, r"physical ids\?"),
        ({"length": 6, "routed_experts": GOOD.tolist(), "start_len": -1}, "start_len"),
        ({"length": 6, "routed_experts": GOOD.tolist(), "id": [1]}, "'id'"),
        ({"length": 6, "routed_experts": GOOD.tolist(), "group": 1.5}, "'group'"),
        ({"length": 6, "routed_experts": GOOD.tolist(), "group": 2**80}, "'group'"),
    ],
)
def test_json_records(tmp_path: Path, record: Any, match: str) -> None:
    path = tmp_path / "a.jsonl"
    good = {"id": "good", "length": 6, "group": 1, "routed_experts": GOOD.tolist()}
    path.write_text(json.dumps(good) + "\n" + json.dumps(record) + "\n")
    refuse(path, match)


@pytest.mark.parametrize(
    "text",
    [
        "", "\n\n", "{", '{"a": NaN}', '{"length": 1, "length": 2}', "[" * 100_000, '{"a":' * 100_000, "[1, 2]", "{}",
        '{"length": ' + "9" * 10_000 + "}", "\x00\x01", '{"id": "\ud800"}',
    ],
)  # fmt: skip
def test_json_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
    refuse(tmp_path / "a.jsonl")


def test_some_samples_with_groups_only(tmp_path: Path) -> None:
    records = [
        {"length": 6, "routed_experts": GOOD.tolist()},
        {"length": 6, "group": 1, "routed_experts": GOOD.tolist()},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(FormatError, match="no group"):
        rp.read_routes(tmp_path / "a.jsonl", 8)


@pytest.mark.parametrize(
    "change",
    [
        {"layer": -1}, {"layer": "3"}, {"num_tokens": 4}, {"num_tokens": 2**40}, {"topk": 0}, {"top_indices": [[0.5]]},
        {"top_indices": None}, {"rank": None}, {"block": None}, {"top_indices": [[2**40, 1]] * 3},
        {"top_indices": [[9, 1]] * 3},
    ],
)  # fmt: skip
def test_megatron_records(tmp_path: Path, change: dict[str, Any]) -> None:
    record = {"step": 0, "block": "decoder", "layer": 1, "rank": 0, "num_tokens": 3, "topk": 2,
              "top_indices": [[0, 1], [2, 3], [4, 5]]}  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert rp.read_routes(path, 8, report=IngestReport()).demand.sum() == 6
    path.write_text(json.dumps(record) + "\n" + json.dumps(record | {"layer": 2} | change) + "\n")
    refuse(path)


class Bomb:
    def __reduce__(self) -> Any:
        return (open, (str(Path(__file__).parent / "pwned"), "w"))


def test_pickled_pt_is_refused_and_never_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"routed_experts": Bomb()}, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", "refused")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Bomb()))
    refuse(tmp_path / "raw.pt", "refused|not a readable")
    np.savez(tmp_path / "a.npz", routed_experts=np.array([Bomb()], dtype=object), seq_lens=np.array([2]))
    refuse(tmp_path / "a.npz", "object")
    assert not (Path(__file__).parent / "pwned").exists()


def test_pt_of_the_wrong_kind(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ids = torch.from_numpy(GOOD)[None]
    mask = torch.ones(1, 5, dtype=torch.int64)
    gap = torch.tensor([[1, 0, 1, 1, 1]])
    for data in (
        torch.ones(3), {}, 5, [3], {"routed_experts": 5}, {"routed_experts": ids},
        {"routed_experts": ids[0], "seq_lens": [6]},
        {"routed_experts": ids.float(), "attention_mask": mask}, {"routed_experts": ids, "attention_mask": mask[:, :4]},
        {"routed_experts": ids, "attention_mask": gap}, {"routed_experts": ids, "seq_lens": torch.tensor([6, 6])},
        {"routed_experts": ids, "seq_lens": torch.tensor([0])},
        {"routed_experts": ids, "attention_mask": mask, "id": [1.5]},
        {"routed_experts": torch.zeros(1, dtype=torch.uint8).expand(1, 2**40, 2, 2), "seq_lens": torch.tensor([2**30])},
    ):  # fmt: skip
        torch.save(data, tmp_path / "a.pt")
        refuse(tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    refuse(tmp_path / "cut.pt")


def test_parquet_damaged_or_of_the_wrong_kind(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    ragged = [[[[0, 1]], [[1]]]]
    for columns in (
        {"length": [6]}, {"routed_experts": ragged, "length": [3]}, {"routed_experts": [[[[0, None]]]], "length": [2]},
        {"routed_experts": [None], "length": [2]}, {"routed_experts": [1.5], "length": [2]},
        {"routed_experts": [[[[0.5, 1]]]], "length": [2]}, {"routed_experts": [[[[1, 2]]]], "length": [None]},
    ):  # fmt: skip
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        refuse(tmp_path / "a.parquet")
    pq.write_table(pa.table({"routed_experts": [GOOD.tolist()], "length": [6]}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for size in (4, len(whole) // 2, len(whole) - 3):
        (tmp_path / "a.parquet").write_bytes(whole[:size])
        refuse(tmp_path / "a.parquet")


def test_unknown_kinds_and_formats(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"hello")
    refuse(tmp_path / "a.bin", "unknown kind of file")
    (tmp_path / "a.npy").write_bytes(npy_claiming("(5, 2, 2)", data=bytes(19)))
    refuse(tmp_path / "a.npy", "19 bytes")
    for container in ("npz", "npy", "jsonl", "parquet", "pt", "megatron"):
        refuse(tmp_path / "a.bin", format=container)
    with pytest.raises(InvalidInput, match="format: 'csv' is unknown"):
        rp.read_routes(tmp_path / "a.bin", 8, format="csv")
    with pytest.raises(InvalidInput, match="no files"):
        rp.read_routes([], 8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["npz", "jsonl"]))
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        np.savez_compressed(path, routed_experts=GOOD, seq_lens=np.array([3, 4]))
    else:
        path.write_text(json.dumps({"length": 6, "routed_experts": GOOD.tolist()}) + "\n")
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))])
    try:
        rp.read_routes(path, 8, report=IngestReport())
    except RoutePackError as error:
        assert error.exit_code == 4
