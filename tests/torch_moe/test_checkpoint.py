"""Checkpoints read under any EP size, EDP size and placement; damaged ones are refused with file and tensor."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from checkpoint_jobs import Job, named_values, random_placement, small_config  # noqa: E402
from harness import RankFailure, run_ranks  # noqa: E402

from routepack_opt.errors import FormatError, InvalidInput  # noqa: E402
from routepack_opt.integrations.torch_moe.checkpoint import save_load as checkpoint  # noqa: E402
from routepack_opt.integrations.torch_moe.checkpoint.manifest import put_in_place, read_manifest  # noqa: E402
from routepack_opt.integrations.torch_moe.checkpoint.save_load import (  # noqa: E402
    CheckpointError,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from routepack_opt.integrations.torch_moe.checkpoint.tensor_file import read_header, read_range, write_tensors  # noqa: E402
from routepack_opt.integrations.torch_moe.parallel.slot_map import PlacementBroken  # noqa: E402


def _save(job: Job, folder: Path, step: int = 7, **options: Any) -> Path:
    return save_checkpoint(folder, step, job.model, job.optimizer, job.slot_map, job.mesh, **options)


def _load(job: Job, folder: Path, **options: Any) -> dict[str, Any]:
    return load_checkpoint(folder, job.model, job.optimizer, job.slot_map, job.mesh, **options)


# ---- round trips on four ranks ----


def _write_all(folder: str) -> dict[str, Any]:
    config = small_config()
    written = {}
    for name, ep, sharded, dtype in (
        ("ep4", 4, False, torch.float32),
        ("ep2", 2, False, torch.float32),
        ("ep2-sharded", 2, True, torch.float32),
        ("ep1-sharded", 1, True, torch.float32),
        ("ep2-bf16", 2, True, torch.bfloat16),
    ):
        job = Job(ep, placement=random_placement(config, 5 + ep), sharded=sharded, dtype=dtype, version=3)
        job.fill_by_name()
        torch.manual_seed(100 + job.mesh.rank)
        written[name] = str(_save(job, Path(folder) / name, extra={"cursor": 12, "name": name}))
    return written


def _read_all(written: dict[str, str]) -> list[str]:
    problems = []
    for name, path in written.items():
        for ep, sharded, placement in (
            (4, False, None),
            (2, True, None),
            (2, False, 1),
            (1, True, 2),
            (1, False, None),
        ):
            dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
            job = Job(ep, sharded=sharded, dtype=dtype, seed=1)
            torch.manual_seed(0)
            wanted = None if placement is None else random_placement(job.config, placement)
            extra = _load(job, Path(path), placement=wanted)
            stored = read_manifest(path).logical_to_slot
            case = f"{name} read at EP {ep}, sharded {sharded}, placement {placement}: "
            problems += [case + wrong for wrong in job.wrong_names()]
            in_force = job.slot_map.logical_to_slot.numpy()
            if not np.array_equal(in_force, stored if wanted is None else wanted):
                problems.append(case + "placement")
            state = (job.slot_map.version, job.optimizer.steps, extra)
            if state != (3 if wanted is None else 4, 7, {"cursor": 12, "name": name}):
                problems.append(case + str(state))
            if not torch.equal(
                torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(100 + job.mesh.rank))
            ):
                problems.append(case + "seed")
    return problems


def _round_trip(folder: str) -> dict[str, Any]:
    written = _write_all(folder)
    return {"written": written, "problems": _read_all(written)}


@pytest.mark.distributed
def test_round_trip_across_ep_edp_and_placement(tmp_path: Path) -> None:
    results = run_ranks(_round_trip, 4, {"folder": str(tmp_path)}, timeout_s=120)
    assert [result["problems"] for result in results] == [[], [], [], []]
    for name, path in results[0]["written"].items():
        job = Job(1, dtype=torch.bfloat16 if name.endswith("bf16") else torch.float32, seed=2)
        _load(job, Path(path))
        assert job.wrong_names() == [], name


def test_stored_tensors_carry_hugging_face_names_and_rows(tmp_path: Path) -> None:
    job = Job(1, placement=random_placement(small_config(), 3))
    weights = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    path = _save(job, tmp_path)
    safetensors = pytest.importorskip("safetensors.torch")
    stored = safetensors.load_file(path / "rank-00000.safetensors")
    for layer, moe_layer in ((0, 0), (2, 1)):
        slot = int(job.slot_map.logical_to_slot[moe_layer][5])
        gate_up = weights[f"model.layers.{layer}.mlp.experts.gate_up"][slot]
        prefix = f"model.layers.{layer}.mlp.experts.5."
        assert torch.equal(stored[prefix + "gate_proj.weight"], gate_up[:9])
        assert torch.equal(stored[prefix + "up_proj.weight"], gate_up[9:])
        down = weights[f"model.layers.{layer}.mlp.experts.down"][slot]
        assert torch.equal(stored[prefix + "down_proj.weight"], down)
        assert stored["exp_avg." + prefix + "up_proj.weight"].shape == (9, 16)
    assert torch.equal(
        stored["model.layers.0.mlp.gate.selection_bias"], weights["model.layers.0.mlp.gate.selection_bias"]
    )


def test_checkpoint_exports_to_hugging_face_names(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from routepack_opt.integrations.torch_moe.huggingface.weights import export_hf, load_hf

    config = small_config(router="softmax", shared_size=0, qk_norm=True)
    trained = Job(1, config=config, placement=random_placement(config, 3))
    trained.fill_by_name()
    loaded = Job(1, config=config, seed=4)
    _load(loaded, _save(trained, tmp_path / "run"), placement=random_placement(config, 8))
    export_hf(loaded.model, tmp_path / "hf")
    back = Job(1, config=config, seed=5)
    load_hf(back.model, tmp_path / "hf")
    assert [name for name in back.wrong_names() if "exp_avg" not in name] == []


# ---- which checkpoints exist ----


def test_only_the_last_complete_checkpoints_are_kept(tmp_path: Path) -> None:
    job = Job(1)
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for step in (1, 2, 3, 4):
        _save(job, tmp_path, step, keep_last=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]
    _save(job, tmp_path, 3, keep_last=1, extra={"again": True})  # a run resumed at 2: what it did not write stays
    assert read_manifest(tmp_path / "step-00000003").extra == {"again": True}
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000004"


def test_a_failed_write_leaves_the_former_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(1)
    _save(job, tmp_path, 1)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("write_tensors", "write_manifest", "put_in_place"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, broken, full)
            with pytest.raises(CheckpointError, match="No space left"):
                _save(job, tmp_path, 2)
        assert os.listdir(tmp_path) == ["step-00000001"]
    job.slot_map.poison("half moved")
    with pytest.raises(PlacementBroken):
        _save(job, tmp_path, 2)
    _load(job, latest_checkpoint(tmp_path))
    assert not job.slot_map.is_broken


def test_folder_that_cannot_get_its_name_gives_the_old_one_back(tmp_path: Path) -> None:
    """A step saved again lost its first, complete checkpoint when the second rename failed."""
    old, new = tmp_path / "step-00000001", tmp_path / ".tmp-step-00000001-0123abcd"
    old.mkdir()
    (old / "whole").touch()
    with pytest.raises(InvalidInput, match="cannot be written"):
        put_in_place(new, old, "0123abcd")  # there is nothing to be renamed
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"] and (old / "whole").exists()


def test_what_a_crash_left_is_not_seen_and_goes_with_the_next_save(tmp_path: Path) -> None:
    job = Job(1)
    path = _save(job, tmp_path, 1)
    shutil.copytree(path, tmp_path / ".tmp-step-00000002-0123abcd")
    (tmp_path / "step-00000003").mkdir()  # no manifest
    shutil.copytree(path, tmp_path / "step-00000004")
    os.truncate(tmp_path / "step-00000004" / "rank-00000.safetensors", 100)
    assert latest_checkpoint(tmp_path) == path
    _save(job, tmp_path, 5)
    assert not (tmp_path / ".tmp-step-00000002-0123abcd").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra": {"x": float("nan")}}, "extra: not plain JSON"),
        ({"extra": {"x": object()}}, "extra: not plain JSON"),
        ({"extra": [1]}, "extra: expected a dict"),
        ({"keep_last": 0}, "keep_last: 0 is not a count"),
    ],
)
def test_wrong_arguments_are_refused_and_leave_nothing(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        _save(Job(1), tmp_path, 1, **options)
    assert os.listdir(tmp_path) == []
    with pytest.raises(InvalidInput, match="step: -1"):
        _save(Job(1), tmp_path, -1)


# ---- damaged checkpoints ----


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    job = Job(1)
    job.fill_by_name()
    return _save(job, tmp_path / "good")


def _rewrite(path: Path, change: Any) -> None:
    """Write a rank's file again with changed tensors, and make the manifest agree with it."""
    old = read_header(path)
    tensors = {}
    for key, stored in old.tensors.items():
        tensors[key] = torch.empty(stored.shape, dtype=stored.dtype)
        read_range(stored, 0, stored.numel, tensors[key])
    change(tensors)
    new = write_tensors(path, tensors.items(), old.metadata)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["files"][0] |= {"bytes": new.num_bytes, "tensors": len(tensors), "header_sha256": new.header_sha256}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))


_NAME = "model.layers.2.mlp.experts.3.up_proj.weight"
_FILE = "rank-00000.safetensors"


def _edit(folder: Path, **fields: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | fields))


def _swap(folder: Path) -> None:
    job = Job(1)
    other = _save(job, folder.parent / "other")
    shutil.copyfile(other / _FILE, folder / _FILE)


def _huge_header(folder: Path) -> None:
    with (folder / _FILE).open("r+b") as stream:
        stream.write((1 << 62).to_bytes(8, "little"))


def _flip_header(folder: Path) -> None:
    data = (folder / _FILE).read_bytes()
    (folder / _FILE).write_bytes(data.replace(b"experts.3.up_proj", b"experts.3.qp_proj"))


_DAMAGE = {
    "truncated": (
        lambda f: os.truncate(f / _FILE, os.path.getsize(f / _FILE) - 1),
        f"{_FILE}: .* bytes, .* were written",
    ),
    "missing file": (lambda f: (f / _FILE).unlink(), f"{_FILE}: cannot be read"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json: not found"),
    "swapped file": (_swap, f"{_FILE}: belongs to another checkpoint"),
    "huge header": (_huge_header, f"{_FILE}: .* no safetensors file"),
    "renamed tensor": (_flip_header, f"{_FILE}: is not the file that was written"),
    "missing key": (lambda f: _rewrite(f / _FILE, lambda t: t.pop(_NAME)), f"tensor '{_NAME}' is missing"),
    "extra key": (lambda f: _rewrite(f / _FILE, lambda t: t.update(x=t[_NAME])), "tensor 'x' has no place"),
    "wrong shape": (
        lambda f: _rewrite(f / _FILE, lambda t: t.update({_NAME: t[_NAME].T.contiguous()})),
        rf"{_FILE}: tensor '{_NAME}': shape \(16, 9\), expected \(9, 16\)",
    ),
    "wrong dtype": (
        lambda f: _rewrite(f / _FILE, lambda t: t.update({_NAME: t[_NAME].double()})),
        f"{_FILE}: tensor '{_NAME}': dtype torch.float64, expected torch.float32",
    ),
    "gap in parts": (
        lambda f: _rewrite(f / _FILE, lambda t: t.update({f"{_NAME}@4": t.pop(_NAME).flatten()[4:]})),
        f"tensor '{_NAME}@4': begins at entry 4 where 0",
    ),
    "short parts": (
        lambda f: _rewrite(f / _FILE, lambda t: t.update({f"{_NAME}@0": t.pop(_NAME).flatten()[:-4]})),
        f"tensor '{_NAME}@0': ends at entry 140 of 144",
    ),
    "stored twice": (
        lambda f: _rewrite(f / _FILE, lambda t: t.update({f"{_NAME}@0": t[_NAME].flatten()})),
        f"{_NAME}@?0?'",
    ),
    "another format": (lambda f: _edit(f, format="x/2"), "field 'format': expected 'routepack.checkpoint/1'"),
    "another model": (
        lambda f: _edit(f, model=small_config(top_k=3).to_dict()),
        "manifest.json: field 'model.top_k': the checkpoint has 3, this model 2",
    ),
    "no permutation": (
        lambda f: _edit(f, placement={"version": 0, "logical_to_slot": [[0] * 8] * 2}),
        r"logical_to_slot'\[0\]: not a permutation of slots 0..7",
    ),
    "another size": (
        lambda f: _edit(f, placement={"version": 0, "logical_to_slot": [[0, 1]] * 2}),
        r"placement: is for \(2, 2\)",
    ),
    "path in name": (
        lambda f: _edit(f, files=[{"name": "../x", "bytes": 1, "tensors": 0, "header_sha256": "0" * 64}]),
        r"field 'files\[0\].name': '../x'",
    ),
    "weights only": (lambda f: _edit(f, optimizer=None), "holds weights only"),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_damage_is_named_and_changes_nothing(saved: Path, damage: str) -> None:
    spoil, words = _DAMAGE[damage]
    spoil(saved)  # type: ignore[no-untyped-call]
    job = Job(1, seed=4)
    before = [piece.entries.clone() for piece in job.pieces()]
    with pytest.raises(FormatError, match=words):
        _load(job, saved)
    assert all(torch.equal(old, piece.entries) for old, piece in zip(before, job.pieces(), strict=True))
    assert job.slot_map.version == 0 and job.optimizer.steps == 0


@pytest.mark.parametrize("name", ["manifest.json", _FILE])
def test_random_damage_ends_in_one_line_or_is_harmless(saved: Path, name: str) -> None:
    """Bytes of manifest or header flipped, cut, doubled: refused as FormatError, never another error."""
    rng = np.random.default_rng(0)
    whole = (saved / name).read_bytes()
    end = len(whole) if name == "manifest.json" else 8 + int.from_bytes(whole[:8], "little")
    job, refused = Job(1), 0
    for _ in range(100):
        at, length = int(rng.integers(end)), int(rng.integers(1, 9))
        kind = int(rng.integers(3))
        middle = (bytes(rng.integers(0, 256, length, dtype=np.uint8)), b"", whole[at : at + length] * 2)[kind]
        (saved / name).write_bytes(whole[:at] + middle + whole[at + length :])
        try:
            _load(job, saved)
        except FormatError as error:
            refused += 1
            assert str(saved) in str(error) and "\n" not in str(error) and len(str(error)) < 1000
    assert refused > 80
    (saved / name).write_bytes(whole)
    _load(job, saved)
    assert job.wrong_names() == []


def test_damage_found_while_reading_poisons(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    job = Job(1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_range", fail)
        with pytest.raises(FormatError, match="Input/output error"):
            _load(job, saved)
    with pytest.raises(PlacementBroken, match="read in part"):
        _ = job.slot_map.version
    _load(job, saved)
    assert job.wrong_names() == []


def test_bf16_model_refuses_a_float32_checkpoint(saved: Path) -> None:
    with pytest.raises(FormatError, match=r"dtype|is missing"):
        _load(Job(1, dtype=torch.bfloat16), saved)


def test_model_without_moe_layers_reads_its_own_checkpoint(tmp_path: Path) -> None:
    """Its empty placement came back as (0, 0) MoE layers and experts."""
    config = small_config(num_layers=2, dense_layers=(0, 1))
    job, other = (Job(1, config=config, placement=np.zeros((0, 8), dtype=np.int64), seed=seed) for seed in (0, 1))
    job.fill_by_name()
    _load(other, save_checkpoint(tmp_path, 1, job.model, job.optimizer, job.slot_map, job.mesh))
    assert other.wrong_names() == [] and other.slot_map.num_experts == 8


def test_weights_can_be_read_without_optimizer(saved: Path) -> None:
    job = Job(1, seed=4)
    load_checkpoint(saved, job.model, None, job.slot_map, job.mesh)
    name = "model.layers.2.self_attn.q_proj.weight"
    weight = job.model.state_dict()[name]
    assert torch.equal(weight, named_values(name, tuple(weight.shape), torch.float32))
    assert job.optimizer.steps == 0


def test_random_state_comes_back(tmp_path: Path) -> None:
    job = Job(1)
    torch.manual_seed(3)
    torch.rand(5)
    path = _save(job, tmp_path)
    expected = torch.rand(5)
    torch.manual_seed(9)
    _load(job, path)
    assert torch.equal(torch.rand(5), expected)


def _load_damaged(folder: str) -> str:
    job = Job(2)
    job.fill_by_name()
    path = _save(job, Path(folder))
    if job.mesh.rank == 0:
        # rank 3's own share only: the others find nothing wrong in what they read, and must refuse all the same
        _edit(path, model=small_config(norm_eps=1e-5).to_dict())
    torch.distributed.barrier()
    if job.mesh.rank != 3:
        job.config = small_config(norm_eps=1e-5)
        job.model.config = job.config
    with pytest.raises(FormatError) as caught:
        _load(job, path)
    assert job.wrong_names() == [] and not job.slot_map.is_broken
    return str(caught.value)


@pytest.mark.distributed
def test_one_rank_that_refuses_stops_all(tmp_path: Path) -> None:
    messages = run_ranks(_load_damaged, 4, {"folder": str(tmp_path)}, timeout_s=120)
    assert all("field 'model.norm_eps': the checkpoint has 1e-05, this model 1e-06" in message for message in messages)
    assert messages[0].startswith("rank 3: ")


def _die_while_saving(folder: str) -> None:
    job = Job(2)
    job.fill_by_name()
    _save(job, Path(folder), 1)
    if job.mesh.rank == 2:
        checkpoint.write_tensors = lambda *args: os.kill(os.getpid(), 9)
    _save(job, Path(folder), 2, timeout_s=20)


@pytest.mark.distributed
def test_rank_killed_while_saving_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 2 was killed by SIGKILL"):
        run_ranks(_die_while_saving, 4, {"folder": str(tmp_path)}, timeout_s=120)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    job = Job(1)
    _load(job, tmp_path / "step-00000001")
    assert job.wrong_names() == []
