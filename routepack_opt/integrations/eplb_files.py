"""Files of expert load balancers: load statistics in, physical-to-logical tables in and out.

| file | loads | tables |
| --- | --- | --- |
| SGLang ``.json`` / ``.pt`` | ``logical_count`` [L, E] or [steps, L, E] | ``physical_to_logical_map`` [L, S] |
| TensorRT-LLM | ``.safetensors`` keyed ``iteration_layer`` | ``.yaml`` with ``initial_global_assignments`` |
| Ascend ``.json`` | | ``layer_list`` of ``device_list`` of ``device_expert`` |
| Plain ``.csv`` | one row a layer, see :mod:`routepack_opt.integrations.load_csv` | |
| ours | ``.npz`` / ``.npy`` (``logical_count``, or the demand of a window) | plan.json, ``.npz`` |
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput, MissingDependency
from routepack_opt.files import atomic_writer, read_json, read_npz, read_text, write_json, write_npz
from routepack_opt.integrations.eplb import check_counts, load_limit, sum_steps
from routepack_opt.integrations.load_csv import read_csv_layers, read_csv_loads
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from numpy.typing import NDArray

LOAD_FIELDS = ("logical_count", "load", "loads", "counts")
TABLE_FIELDS = ("physical_to_logical_map", "slot_to_logical")
TABLE_FORMATS = ("sglang", "tensorrt-llm", "ascend", "pt", "npz")
TABLE_SUFFIXES = {".json": "sglang", ".yaml": "tensorrt-llm", ".yml": "tensorrt-llm", ".pt": "pt", ".npz": "npz"}
_SAFETENSORS_TYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "|u1", "F64": "<f8", "F32": "<f4", "F16": "<f2"}
_HEADER_LIMIT = 1 << 26


def read_load_windows(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """Recorded loads as int64 [windows, L, E]; a file without a step axis is one window.

    Raises
    ------
    FormatError
        A missing or unreadable file, an unknown format, NaN, negative or fractional counts; names file and field.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".json":
        data = read_json(path)
    elif suffix in (".pt", ".pth"):
        data = _read_torch(path)
    elif suffix == ".npz":
        data = read_npz(path)
        if "demand" in data:
            return _windows(data["demand"].sum(axis=0, dtype=np.int64)[None], f"{path}: demand")
    elif suffix == ".npy":
        data = _read_npy(path)
    elif suffix == ".safetensors":
        return _read_trtllm_statistics(path)
    elif suffix == ".csv":
        return _windows(read_csv_loads(path), str(path))
    else:
        raise FormatError(f"{path}: unknown load file; expected .json, .pt, .npz, .npy, .csv or .safetensors")
    where = str(path)
    if isinstance(data, dict):
        field = next((name for name in LOAD_FIELDS if name in data), None)
        if field is None:
            raise FormatError(f"{path}: no load field; expected one of {', '.join(LOAD_FIELDS)}, found {_names(data)}")
        data, where = data[field], f"{path}: {field}"
    return _windows(data, where)


def read_loads(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """Recorded loads summed over windows, int64 [L, E]."""
    try:
        return np.asarray(sum_steps(read_load_windows(path), str(path)), dtype=np.int64)
    except InvalidInput as error:
        raise FormatError(str(error)) from None


def read_layer_ids(path: str | os.PathLike[str]) -> list[int] | None:
    """Model layer of each row of the loads, where the file numbers its layers itself; else None."""
    path = Path(path)
    if path.suffix.lower() == ".safetensors":
        return sorted({int(name.split("_")[1]) for name in _read_safetensors(path)})
    if path.suffix.lower() == ".npz":
        ids = read_npz(path, ("moe_layers",)).get("moe_layers")
        return None if ids is None else [int(k) for k in ids.ravel()]
    return read_csv_layers(path) if path.suffix.lower() == ".csv" else None


def read_table(path: str | os.PathLike[str]) -> NDArray[np.int64]:
    """A placement file as int64 [L, S], the logical expert of every slot.

    Raises
    ------
    FormatError
        A missing or unreadable file, an unknown format, ragged or non-integer tables; names file and field.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return _read_trtllm_table(path)[0]
    if suffix == ".json":
        data = read_json(path)
    elif suffix in (".pt", ".pth"):
        data = _read_torch(path)
    elif suffix == ".npz":
        data = read_npz(path)
    else:
        raise FormatError(f"{path}: unknown placement file; expected .json, .yaml, .pt or .npz")
    if not isinstance(data, dict):
        return _table(data, str(path))
    if "layer_list" in data:
        return _read_ascend(data, path)
    if "logical_to_slot" in data:
        slots = _table(data["logical_to_slot"], f"{path}: logical_to_slot")
        if (np.sort(slots, axis=1) != np.arange(slots.shape[1])).any():
            raise FormatError(f"{path}: logical_to_slot: expected every slot once in each layer")
        return np.argsort(slots, axis=1, kind="stable").astype(np.int64)
    field = next((name for name in TABLE_FIELDS if name in data), None)
    if field is None:
        raise FormatError(
            f"{path}: no placement field; expected one of {', '.join(TABLE_FIELDS)}, found {_names(data)}"
        )
    return _table(data[field], f"{path}: {field}")


def write_table(
    path: str | os.PathLike[str],
    table: NDArray[np.int64],
    num_ranks: int,
    *,
    file_format: str | None = None,
    layer_ids: Sequence[int] | None = None,
) -> None:
    """Write a placement for an engine to start from, atomically.

    Parameters
    ----------
    table
        int64 [L, S], the logical expert of every slot.
    file_format
        One of ``TABLE_FORMATS``; None goes by the suffix (.json is SGLang's, .yaml TensorRT-LLM's).
    layer_ids
        Model layer of each row, for TensorRT-LLM (dense layers are left out there); default 0, 1, ...
    """
    path = Path(path)
    file_format = file_format or TABLE_SUFFIXES.get(path.suffix.lower())
    if file_format == "sglang":
        write_json(path, {"physical_to_logical_map": table.tolist()})
    elif file_format == "ascend":
        write_json(path, _ascend(table, num_ranks))
    elif file_format == "npz":
        write_npz(path, {"physical_to_logical_map": table})
    elif file_format == "pt":
        torch = _torch()
        with atomic_writer(path, "wb") as stream:
            torch.save({"physical_to_logical_map": torch.from_numpy(np.ascontiguousarray(table))}, stream)
    elif file_format == "tensorrt-llm":
        ids = range(len(table)) if layer_ids is None else layer_ids
        rows = [f"  {layer}: {row}\n" for layer, row in zip(ids, table.tolist(), strict=True)]
        text = f"num_slots: {table.shape[1]}\ninitial_global_assignments:\n{''.join(rows)}layer_updates_per_iter: 0\n"
        with atomic_writer(path, "w") as stream:
            stream.write(text)
    else:
        raise InvalidInput(
            f"{path}: unknown placement format {file_format!r}; expected one of {', '.join(TABLE_FORMATS)}"
        )


def _windows(data: Any, where: str) -> NDArray[np.int64]:
    try:
        if hasattr(data, "detach"):  # bfloat16 and float16 hold whole numbers that numpy has no type or range for
            data = data.detach().cpu()
            data = (data.double() if data.is_floating_point() else data).numpy()
        array = np.asarray(data)
        array = array.astype(np.float64) if array.dtype == np.float16 else array
    except (ValueError, TypeError) as error:
        raise FormatError(f"{where}: not a rectangular array of counts ({error})") from None
    if array.ndim < 2 or not array.size:
        raise FormatError(f"{where}: expected [layers, experts] or [steps, layers, experts], found shape {array.shape}")
    limit = load_limit(array.shape[-1])
    try:
        check_counts(array, where)
    except InvalidInput as error:
        raise FormatError(str(error)) from None
    for bad, why in ((array != np.floor(array), "is not a whole token count"), (array > limit, f"is above {limit}")):
        if bad.any():
            index = np.argwhere(bad)[0].tolist()
            raise FormatError(f"{where}{index}: {array[tuple(index)]} {why}")
    array = array.reshape(-1, *array.shape[-2:])  # SGLang dumps may carry a rank axis beside the step axis
    return array.astype(np.int64)


def _table(data: Any, where: str) -> NDArray[np.int64]:
    if hasattr(data, "detach"):
        data = data.detach().cpu().numpy()
    try:
        return integer_array(data, where, 2, low=0, high=1 << 31).astype(np.int64)
    except InvalidInput as error:
        raise FormatError(str(error)) from None


def _names(data: dict[Any, Any]) -> str:
    return ", ".join(map(str, list(data)[:8])) or "nothing"


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependency("reading and writing .pt files needs torch: pip install routepack-opt[torch]") from None
    return torch


def _read_torch(path: Path) -> Any:
    torch = _torch()
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # torch raises pickle, zip and runtime errors alike on foreign bytes
        raise FormatError(f"{path}: not a torch file of plain tensors ({str(error).splitlines()[0]})") from None


def _read_npy(path: Path) -> NDArray[Any]:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, EOFError) as error:
        raise FormatError(f"{path}: not a valid npy array ({error})") from None


def _read_trtllm_statistics(path: Path) -> NDArray[np.int64]:
    """Counts keyed "iteration_layer" as [iterations, L, E]; layers in rising order of their number."""
    counts: dict[tuple[int, int], NDArray[Any]] = {}
    for name, array in _read_safetensors(path).items():
        match = re.fullmatch(r"(\d+)_(\d+)", name)
        if match is None:
            raise FormatError(f'{path}: tensor {name!r}: expected names like "12_3" (iteration_layer)')
        counts[int(match[1]), int(match[2])] = array
    steps, layers = sorted({step for step, _ in counts}), sorted({layer for _, layer in counts})
    missing = [(step, layer) for step in steps for layer in layers if (step, layer) not in counts]
    if missing or not counts:
        where = "no tensor" if not counts else f"iteration {missing[0][0]} has no counts of layer {missing[0][1]}"
        raise FormatError(f"{path}: {where}; expected every layer in every iteration")
    shapes = {array.shape for array in counts.values()}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise FormatError(
            f"{path}: tensors of shapes {sorted(shapes)}; expected one count per expert, the same number everywhere"
        )
    return _windows(np.stack([[counts[step, layer] for layer in layers] for step in steps]), str(path))


def _read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Tensors of a safetensors file: an 8-byte length, a JSON header, raw little-endian data."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    size = struct.unpack("<Q", raw[:8])[0] if len(raw) >= 8 else 0
    if not 2 <= size <= min(len(raw) - 8, _HEADER_LIMIT):
        raise FormatError(f"{path}: not a safetensors file (header length {size}, file {len(raw)} bytes)")
    try:
        header = json.loads(raw[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: safetensors header is not JSON ({error})") from None
    data = memoryview(raw)[8 + size :]
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype = np.dtype(_SAFETENSORS_TYPES[entry["dtype"]])
            shape = tuple(int(n) for n in entry["shape"])
            start, end = (int(n) for n in entry["data_offsets"])
            if not 0 <= start <= end <= len(data) or min(shape, default=0) < 0:
                raise ValueError(f"bytes {start} to {end} of {len(data)}")
            tensors[name] = np.frombuffer(data[start:end], dtype=dtype).reshape(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{path}: tensor {name!r}: bad header entry ({error})") from None
    return tensors


def _read_trtllm_table(path: Path) -> tuple[NDArray[np.int64], list[int]]:
    """The assignments of a TensorRT-LLM YAML file, in flow or block style, and their layer numbers."""
    text = re.sub(r"(^|\s)#.*", r"\1", read_text(path))
    section = re.search(
        r"^(\s*)initial_global_assignments\s*:[ \t]*\n((?:\1[ \t]+.*\n?|[ \t]*\n)*)", text, re.MULTILINE
    )
    if section is None:
        raise FormatError(f"{path}: no initial_global_assignments; expected a mapping of layer to list of experts")
    rows: list[list[int]] = []
    layers: list[int] = []
    parts = re.split(r"(?:^|\n)[ \t]*(\d+)[ \t]*:", "\n" + section[2])
    for layer, body in zip(parts[1::2], parts[2::2], strict=True):
        if re.search(r"[^\d\s,\[\]-]", body) or re.search(r"-\d", body):
            raise FormatError(f"{path}: initial_global_assignments[{layer}]: expected a list of expert numbers")
        layers.append(int(layer))
        rows.append([int(n) for n in re.findall(r"\d+", body)])
    if len(set(layers)) < len(layers):
        twice = next(layer for layer in layers if layers.count(layer) > 1)
        raise FormatError(f"{path}: initial_global_assignments[{twice}]: the layer appears twice")
    order = np.argsort(layers, kind="stable").tolist()
    return _table([rows[k] for k in order], f"{path}: initial_global_assignments"), [layers[k] for k in order]


def _read_ascend(data: dict[str, Any], path: Path) -> NDArray[np.int64]:
    try:
        layers = sorted(data["layer_list"], key=lambda layer: layer["layer_id"])
        rows = []
        if len({layer["layer_id"] for layer in layers}) < len(layers):
            raise ValueError("a layer_id appears twice")
        for layer in layers:
            devices = sorted(layer["device_list"], key=lambda device: device["device_id"])
            if len({len(device["device_expert"]) for device in devices}) != 1:
                raise ValueError(f"layer {layer['layer_id']}: devices hold different numbers of experts")
            rows.append([expert for device in devices for expert in device["device_expert"]])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: layer_list: not an expert map ({error})") from None
    return _table(rows, f"{path}: layer_list")


def _ascend(table: NDArray[np.int64], num_ranks: int) -> dict[str, Any]:
    layers = []
    for layer, row in enumerate(table):
        devices = [
            {"device_id": rank, "device_expert": experts}
            for rank, experts in enumerate(row.reshape(num_ranks, -1).tolist())
        ]
        layers.append({"layer_id": layer, "device_count": num_ranks, "device_list": devices})
    return {"moe_layer_count": len(table), "layer_list": layers}
