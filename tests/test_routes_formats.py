"""Every container and framework form gives the counts of the same routes in memory."""

from __future__ import annotations

import base64
import io
import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import routepack_opt as rp
from routepack_opt.errors import FormatError, MissingDependency
from routepack_opt.routes import IngestReport, decode_routes, window_from_routes

if TYPE_CHECKING:
    from pathlib import Path

E, L, K = 16, 3, 2
LENGTHS = [4, 1, 7, 3]


def sample_rows(seed: int = 0, experts: int = E) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.random((n - 1, L, experts)).argsort(axis=2)[:, :, :K] for n in LENGTHS]


ROUTES = sample_rows()
WANT = window_from_routes(ROUTES, LENGTHS, E).demand


def with_filler(routes: np.ndarray, fill: int = 0) -> np.ndarray:
    return np.concatenate([routes, np.full((1, L, K), fill, dtype=routes.dtype)])


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy64(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return b64(stream.getvalue())


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def read(path: Path | list[Path], **kwargs: Any) -> rp.Window:
    return rp.read_routes(path, E, report=IngestReport(), **kwargs)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, ">i4"])
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("full", [False, True])
def test_npz(tmp_path: Path, dtype: Any, write: Any, full: bool) -> None:
    parts = [with_filler(r) for r in ROUTES] if full else ROUTES
    write(tmp_path / "a.npz", routed_experts=np.concatenate(parts).astype(dtype), seq_lens=np.array(LENGTHS))
    window = read(tmp_path / "a.npz")
    assert (window.demand == WANT).all()
    assert window.lengths.tolist() == LENGTHS
    assert window.sample_ids == ("a:0", "a:1", "a:2", "a:3")
    assert (window.top_k, window.group_ids, window.moe_layers) == (K, None, None)


def test_npz_streams_in_blocks_with_names_groups_and_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routepack_opt.routes.npz.BLOCK_BYTES", 20)
    np.savez(
        tmp_path / "a.npz",
        routed_experts=np.asfortranarray(np.concatenate(ROUTES)),
        seq_lens=np.array(LENGTHS) + 5,
        start_len=np.full(4, 5),
        sample_ids=np.array(list("abcd")),
        group_ids=np.array([1, 1, 0, 0]),
    )
    window = read(tmp_path / "a.npz", max_workers=1)
    assert (window.demand == WANT).all()
    assert window.sample_ids == ("a", "b", "c", "d")
    assert window.group_ids is not None
    assert window.group_ids.tolist() == [1, 1, 0, 0]


def payload_forms(routes: np.ndarray) -> dict[str, dict[str, Any]]:
    raw = routes.astype(np.int32)
    shape = list(routes.shape)
    nemo = f"nrlre1:int16:{shape[0]}x{L}x{K}:" + b64(routes.astype("<i2").tobytes())
    return {
        "nested": {"routed_experts": routes.tolist()},
        "npy": {"routed_experts": npy64(routes.astype(np.uint8))},
        "npy fortran": {"routed_experts": npy64(np.asfortranarray(routes.astype(np.uint16)))},
        "raw": {"routed_experts": b64(raw.tobytes()), "dtype": "int32", "shape": shape},
        "raw open": {"routed_experts": b64(raw.tobytes()), "dtype": "int32", "shape": [shape[0], L, -1]},
        "flat": {"routed_experts": raw.ravel().tolist(), "shape": shape},
        "nemo": {"routed_experts": nemo},
    }


@pytest.mark.parametrize("form", list(payload_forms(ROUTES[0])))
def test_jsonl_payloads(tmp_path: Path, form: str) -> None:
    records = [
        {"id": f"s{i}", "length": n, "group": f"g{i // 2}", **payload_forms(r)[form]}
        for i, (n, r) in enumerate(zip(LENGTHS, ROUTES, strict=True))
        if n > 1 or "open" not in form
    ]
    window = read(write_lines(tmp_path / "a.jsonl", records))
    assert (window.demand[window.lengths > 1] == WANT[np.array(LENGTHS) > 1]).all()
    assert window.sample_ids is not None
    assert window.sample_ids[0] == "s0"
    assert window.group_ids is not None
    assert set(window.group_ids.tolist()) == {0, 1}


def test_empty_list_is_a_sample_without_rows(tmp_path: Path) -> None:
    records = [{"length": n, "routed_experts": r.tolist()} for n, r in zip(LENGTHS, ROUTES, strict=True)]
    assert records[1]["routed_experts"] == []
    assert (read(write_lines(tmp_path / "a.jsonl", records)).demand == WANT).all()


def test_sglang_raw_int32_with_start_len(tmp_path: Path) -> None:
    records = [
        {"meta_info": {"routed_experts": b64(r[1:].astype("<i4").tobytes()), "prompt_tokens": 2,
                       "completion_tokens": n - 2, "id": f"r{n}"}, "start_len": 1}
        for n, r in zip(LENGTHS, ROUTES, strict=True) if n > 2
    ]  # fmt: skip
    path = write_lines(tmp_path / "a.jsonl", records)
    report = IngestReport()
    window = rp.read_routes(path, E, format="sglang", top_k=K, report=report)
    want = window_from_routes([r[1:] for r in ROUTES if len(r) > 1], [len(r) for r in ROUTES if len(r) > 1], E).demand
    assert (window.demand == want).all()
    assert window.lengths.tolist() == [4, 7, 3]
    assert window.sample_ids == ("r4", "r7", "r3")
    assert report.num_unrecorded_tokens == 3
    with pytest.raises(FormatError, match="shape"):
        rp.read_routes(path, E, format="sglang")


def test_vllm_answers_without_length(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"routed_experts": npy64(r.astype(np.uint8))} for r in ROUTES])
    window = read(path, format="vllm")
    assert window.lengths.tolist() == LENGTHS
    assert (window.demand == WANT).all()
    with pytest.raises(FormatError, match="sample 0: field 'length' is missing"):
        read(path)


def test_slime_samples(tmp_path: Path) -> None:
    records = [
        {"tokens": [0] * n, "index": i, "group_index": i // 2, "rollout_routed_experts": payload}
        for i, (n, r) in enumerate(zip(LENGTHS, ROUTES, strict=True))
        for payload in [r.tolist() if i % 2 else b64(r.astype("<i4").tobytes())]
    ]
    for i in (0, 2):
        records[i]["shape"] = list(ROUTES[i].shape)
    window = read(write_lines(tmp_path / "a.jsonl", records), format="slime")
    assert (window.demand == WANT).all()
    assert window.group_ids is not None
    assert window.group_ids.tolist() == [0, 0, 1, 1]


def test_nemo_rl_missing_last_row(tmp_path: Path) -> None:
    records = [
        {"routed_experts": f"nrlre1:int8:{n}x{L}x{K}:" + b64(with_filler(r, -1).astype(np.int8).tobytes())}
        for n, r in zip(LENGTHS, ROUTES, strict=True)
    ]
    window = read(write_lines(tmp_path / "a.jsonl", records), format="nemo_rl")
    assert window.lengths.tolist() == LENGTHS
    assert (window.demand == WANT).all()


def test_trtllm_bare_arrays(tmp_path: Path) -> None:
    paths = []
    for i in (0, 2):
        np.save(tmp_path / f"{i}.npy", ROUTES[i].astype(np.int16))
        paths.append(tmp_path / f"{i}.npy")
    window = read(paths, format="trtllm")
    assert window.lengths.tolist() == [4, 7]
    assert (window.demand == WANT[[0, 2]]).all()
    assert window.sample_ids == ("0:0", "2:0")


def trace_records(step: int, routes: np.ndarray, rank: int = 0, block: str = "decoder") -> list[dict[str, Any]]:
    return [
        {"step": step, "stage": "pre_dispatch", "block": block, "layer": 2 + 2 * layer, "rank": rank,
         "num_tokens": len(routes), "topk": K, "top_indices": routes[:, layer].tolist()}
        for layer in range(L)
    ]  # fmt: skip


def test_megatron_trace_is_one_sample_a_micro_batch(tmp_path: Path) -> None:
    a, b, c = ROUTES[0], ROUTES[2], ROUTES[3]
    records = [*trace_records(0, a), *trace_records(0, b), *trace_records(0, a, block="mtp"), *trace_records(1, c)]
    path = write_lines(tmp_path / "trace.jsonl", records)
    report = IngestReport()
    window = rp.read_routes(path, E, report=report)
    assert window.lengths.tolist() == [3, 6, 2]
    assert (window.demand == WANT[[0, 2, 3]]).all()
    assert window.moe_layers is not None
    assert window.moe_layers.tolist() == [2, 4, 6]
    assert window.sample_ids == ("step0.rank0.decoder.0", "step0.rank0.decoder.1", "step1.rank0.decoder.0")
    assert any("prediction layers skipped" in note for note in report.notes)
    some = rp.read_routes(path, E, moe_layers=[4, 6], format="megatron", report=IngestReport())
    assert (some.demand == WANT[[0, 2, 3], 1:]).all()
    with pytest.raises(FormatError, match="layer 3 of moe_layers is not in the trace"):
        read(path, moe_layers=[3])
    with pytest.raises(FormatError, match="2 layers but"):
        read(write_lines(tmp_path / "cut.jsonl", records[:-1]))


def test_parquet_lists_text_and_bytes(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    common = {"id": list("abcd"), "length": LENGTHS, "group": [3, 3, 4, 4]}
    raw = [r.astype("<i2").tobytes() for r in ROUTES]
    shapes = [list(r.shape) for r in ROUTES]
    tables = {
        "lists": {"routed_experts": pa.array([r.tolist() for r in ROUTES], pa.list_(pa.list_(pa.list_(pa.int16()))))},
        "text": {"routed_experts": [b64(data) for data in raw], "dtype": ["int16"] * 4, "shape": shapes},
        "bytes": {"routed_experts": raw, "dtype": ["int16"] * 4, "shape": shapes},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table({**common, **columns}), tmp_path / f"{name}.parquet")
        window = read(tmp_path / f"{name}.parquet")
        assert (window.demand == WANT).all()
        assert window.sample_ids == ("a", "b", "c", "d")
        assert window.group_ids is not None
        assert window.group_ids.tolist() == [3, 3, 4, 4]


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingDependency, match=r"routepack-opt\[parquet\]"):
        read(tmp_path / "a.parquet")


def test_verl_batches(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    full = [torch.from_numpy(with_filler(r).astype(np.int16)) for r in ROUTES]
    width = 10
    dense, padded = torch.zeros(2, 4, width, L, K, dtype=torch.int16)
    mask = torch.zeros(4, width, dtype=torch.int64)
    for i, routes in enumerate(full):
        dense[i, 2 : 2 + len(routes)] = routes
        mask[i, 2 : 2 + len(routes)] = 1
        padded[i, width - len(routes) :] = routes
    jagged = torch.nested.nested_tensor(full, layout=torch.jagged)
    lengths = torch.tensor(LENGTHS)
    for name, batch in {
        "mask": {"routed_experts": dense, "attention_mask": mask},
        "left": {"routed_experts": padded, "seq_lens": lengths, "group": torch.tensor([0, 0, 1, 1])},
        "jagged": {"routed_experts": jagged, "seq_lens": lengths},
        "list": {"batch": {"rollout_routed_experts": full, "lengths": lengths, "id": list("abcd")}},
        "samples": [{"routed_experts": r, "length": torch.tensor(n)} for r, n in zip(full, LENGTHS, strict=True)],
    }.items():
        torch.save(batch, tmp_path / f"{name}.pt")
        window = read(tmp_path / f"{name}.pt", format="verl")
        assert window.lengths.tolist() == LENGTHS
        assert (window.demand == WANT).all(), name


def test_files_keep_their_order_and_detection_ignores_wrong_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "z.bin", routed_experts=np.concatenate(ROUTES), seq_lens=np.array(LENGTHS))
    (tmp_path / "z.bin.npz").rename(tmp_path / "z.bin")
    write_lines(tmp_path / "a.log", [{"length": 7, "routed_experts": ROUTES[2].tolist()}])
    document = [{"length": 3, "routed_experts": ROUTES[3].tolist(), "id": 5}]
    (tmp_path / "b.json").write_text(json.dumps(document, indent=1))
    (tmp_path / "c.json").write_text(json.dumps(document[0], indent=1))
    window = read([tmp_path / name for name in ("z.bin", "a.log", "b.json", "c.json")])
    assert (window.demand == WANT[[0, 1, 2, 3, 2, 3, 3]]).all()
    assert window.sample_ids == ("z:0", "z:1", "z:2", "z:3", "a:0", "5", "5")


def test_dense_layers_are_decided_across_all_files(tmp_path: Path) -> None:
    quiet, loud = ROUTES[0].copy(), ROUTES[2]
    quiet[:, 0] = 0
    write_lines(tmp_path / "a.jsonl", [{"length": 4, "routed_experts": quiet.tolist()}])
    write_lines(tmp_path / "b.jsonl", [{"length": 7, "routed_experts": loud.tolist()}])
    assert read(tmp_path / "a.jsonl").num_layers == 2
    with pytest.raises(FormatError, match=r"a\.jsonl: sample 0 .*layer 0 is all zero here but not in .*b\.jsonl"):
        read([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def test_predicted_counts_are_marked(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", routed_experts=np.concatenate(ROUTES), seq_lens=np.array(LENGTHS))
    window = read(tmp_path / "a.npz", counts="predicted")
    assert window.counts == "predicted"
    window.save(tmp_path / "w.npz")
    assert rp.Window.load(tmp_path / "w.npz").counts == "predicted"
    with pytest.raises(FormatError, match="already a window"):
        read(tmp_path / "w.npz")


def test_decode_routes_of_one_payload() -> None:
    for form in payload_forms(ROUTES[0]).values():
        kwargs = {name: form[name] for name in ("dtype", "shape") if name in form}
        assert (decode_routes(form["routed_experts"], **kwargs) == ROUTES[0]).all()


@pytest.mark.data
def test_real_dumps_match_their_counts(data_dir: Path) -> None:
    paths = sorted((data_dir / "routes").glob("*.npz"))
    report = IngestReport()
    window = rp.read_routes(paths, 64, report=report)
    assert window.num_samples == 173
    assert (window.num_layers, window.top_k) == (26, 6)
    assert report.warnings == []
    start = 0
    for path in paths:
        with np.load(path) as dump:
            stop = start + dump["seq_lens"].size
            assert (window.lengths[start:stop] == dump["seq_lens"]).all()
            assert (window.demand[start:stop].sum(axis=0) == dump["counts"]).all()
        start = stop
    assert start == 173
