"""Load statistics and placement files of the engines: round trips and refusals."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.integrations.eplb_files import read_load_windows, read_loads, read_table, write_table

TABLE = np.array([[0, 1, 2, 3, 4, 0], [5, 4, 3, 2, 1, 0]])


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array, dtype="<i4").tobytes()
        header[name] = {
            "dtype": "I32",
            "shape": list(np.shape(array)),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("name", "file_format"),
    [("t.json", None), ("t.json", "ascend"), ("t.yaml", None), ("t.npz", None), ("t.pt", None)],
)
def test_tables_survive_a_round_trip(tmp_path, name, file_format):
    if name.endswith(".pt"):
        pytest.importorskip("torch")
    write_table(tmp_path / name, TABLE, 3, file_format=file_format)
    assert (read_table(tmp_path / name) == TABLE).all()


def test_ascend_expert_map_has_the_fields_the_engine_reads(tmp_path):
    write_table(tmp_path / "t.json", TABLE, 3, file_format="ascend")
    data = json.loads((tmp_path / "t.json").read_text())
    assert data["moe_layer_count"] == 2
    assert data["layer_list"][1]["device_count"] == 3
    assert data["layer_list"][1]["device_list"][2] == {"device_id": 2, "device_expert": [1, 0]}


def test_tensorrt_yaml_is_read_in_flow_block_and_wrapped_style(tmp_path):
    path = tmp_path / "t.yaml"
    write_table(path, TABLE, 3, layer_ids=[3, 4])
    assert "\n  3: [0, 1, 2, 3, 4, 0]\n" in path.read_text()
    path.write_text(
        "# made by hand\nnum_slots: 3\ninitial_global_assignments:\n  10:\n  - 2\n  - 0  # why not\n  - 1\n"
        "  9: [0, 1,\n    2]\nlayer_updates_per_iter: 0\n"
    )
    assert read_table(path).tolist() == [[0, 1, 2], [2, 0, 1]]
    yaml = pytest.importorskip("yaml")
    path.write_text(yaml.safe_dump({"num_slots": 6, "initial_global_assignments": dict(enumerate(TABLE.tolist()))}))
    assert (read_table(path) == TABLE).all()


def test_sglang_counts_with_and_without_steps(tmp_path):
    counts = np.arange(12).reshape(2, 2, 3)
    (tmp_path / "a.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    (tmp_path / "b.json").write_text(json.dumps({"logical_count": counts[0].astype(float).tolist()}))
    assert read_load_windows(tmp_path / "a.json").shape == (2, 2, 3)
    assert (read_loads(tmp_path / "a.json") == counts.sum(axis=0)).all()
    assert (read_loads(tmp_path / "b.json") == counts[0]).all()
    torch = pytest.importorskip("torch")
    torch.save({"logical_count": torch.tensor(counts, dtype=torch.int32)}, tmp_path / "c.pt")
    assert (read_loads(tmp_path / "c.pt") == counts.sum(axis=0)).all()


def test_tensorrt_statistics_are_summed_over_iterations(tmp_path):
    path = tmp_path / "rank0.safetensors"
    write_safetensors(path, {"0_3": [1, 2], "0_4": [3, 4], "1_3": [10, 20], "1_4": [30, 40]})
    assert read_loads(path).tolist() == [[11, 22], [33, 44]]
    write_safetensors(path, {"0_3": [1, 2], "0_4": [3, 4], "1_3": [10, 20]})
    with pytest.raises(FormatError, match="iteration 1 has no counts of layer 4"):
        read_loads(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FormatError, match="bad header entry"):
        read_loads(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"logical_count": [[1, -2]]}', r"\[0, 1\]: -2 is negative"),
        ('{"logical_count": [[1, 2.5]]}', "2.5 is not a whole token count"),
        ('{"logical_count": [[1, NaN]]}', "not valid JSON"),
        ('{"logical_count": [[1], [1, 2]]}', "not a rectangular array"),
        ('{"other": 1}', "no load field.*found other"),
        ('{"logical_count": []}', "found shape"),
        ("[1, 2]", "found shape"),
    ],
)
def test_broken_load_files_are_refused(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        read_loads(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "num_slots: 3\n", "no initial_global_assignments"),
        ("a.yaml", "initial_global_assignments:\n  0: [1, x]\n", r"initial_global_assignments\[0\]"),
        ("a.yaml", "initial_global_assignments:\n  0: [1, 2]\n  1: [1]\n", "not a rectangular"),
        ("a.json", '{"layer_list": [{"layer_id": 0}]}', "not an expert map"),
        ("a.json", '{"physical_to_logical_map": [[0, 1.5]]}', "not an exact integer"),
        ("a.json", "{}", "no placement field"),
        ("a.txt", "", "unknown placement file"),
    ],
)
def test_broken_placement_files_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=message):
        read_table(tmp_path / name)


def test_missing_files_and_unknown_formats_are_refused(tmp_path):
    for name in ("no.json", "no.npz", "no.npy", "no.safetensors"):
        with pytest.raises(FormatError, match="cannot be read"):
            read_loads(tmp_path / name)
    with pytest.raises(InvalidInput, match="unknown placement format"):
        write_table(tmp_path / "t.txt", TABLE, 3)


def test_pickles_are_never_executed(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"logical_count": [print]}, tmp_path / "evil.pt")
    with pytest.raises(FormatError, match="not a torch file of plain tensors"):
        read_loads(tmp_path / "evil.pt")
    np.save(tmp_path / "evil.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(FormatError, match="not a valid npy array"):
        read_loads(tmp_path / "evil.npy")


@pytest.mark.data
def test_published_sglang_statistics_are_read(data_dir):
    load = read_loads(data_dir / "loads" / "decode_in2000out100.json")
    assert load.shape == (61, 256)
    assert (load[:3] == 0).all() and (load[3:].sum(axis=1) == 23760000).all()


def test_bfloat16_counts_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float16):
        torch.save({"logical_count": torch.full((2, 4), 2048, dtype=dtype)}, tmp_path / "l.pt")
        assert (read_loads(tmp_path / "l.pt") == 2048).all()


def test_a_layer_that_appears_twice_is_refused(tmp_path):
    (tmp_path / "t.yaml").write_text("initial_global_assignments:\n  0: [0, 1]\n  0: [1, 0]\n")
    device = [{"device_id": 0, "device_expert": [0, 1]}]
    layers = [{"layer_id": 7, "device_list": device}] * 2
    (tmp_path / "t.json").write_text(json.dumps({"layer_list": layers}))
    for name in ("t.yaml", "t.json"):
        with pytest.raises(FormatError, match="twice"):
            read_table(tmp_path / name)
