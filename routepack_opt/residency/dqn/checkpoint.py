"""Checkpoints: weights as safetensors, beside them a JSON record of the training; nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import routepack_opt
from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import atomic_writer, file_path, read_json
from routepack_opt.integrations.torch_moe.checkpoint.tensor_file import read_header, read_range, write_tensors
from routepack_opt.residency.dqn.candidates import FEATURES
from routepack_opt.residency.dqn.network import QNetwork
from routepack_opt.residency.dqn.settings import Settings

if TYPE_CHECKING:
    from routepack_opt.residency.dqn.training import TrainingResult

FORMAT = "routepack-residency-dqn/1"
SUFFIX = ".safetensors"
SHIPPED = Path(__file__).with_name(f"shipped{SUFFIX}")


@dataclass(frozen=True)
class Checkpoint:
    """A network with its settings and the record of its training."""

    network: QNetwork
    settings: Settings
    record: dict[str, Any]


def save_checkpoint(result: TrainingResult, path: str | os.PathLike[str]) -> Path:
    """Write ``path`` (ends in .safetensors) and the record beside it (.json); returns the record's path.

    Raises
    ------
    InvalidInput
        Another suffix, or a file that cannot be written.
    """
    weights = _weights_path(path)
    draft = weights.with_name(f".{weights.name}.{os.getpid()}")
    tensors = [(name, value.detach()) for name, value in result.network.state_dict().items()]
    try:
        write_tensors(draft, tensors, {"format": FORMAT})
        digest = hashlib.sha256(draft.read_bytes()).hexdigest()
        os.replace(draft, weights)
    except OSError as error:
        raise InvalidInput(f"{weights}: cannot be written ({error.strerror or error})") from None
    finally:
        draft.unlink(missing_ok=True)
    record = weights.with_suffix(".json")
    with atomic_writer(record, "w") as stream:
        json.dump(_record(result, digest), stream, indent=1)
        stream.write("\n")
    return record


def _record(result: TrainingResult, digest: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "weights_sha256": digest,
        "seed": result.settings.seed,
        "steps": result.steps,
        "seconds": round(result.seconds, 1),
        "settings": result.settings.to_json(),
        "features": list(FEATURES[: result.network.num_features]),
        "workloads": result.workloads,
        "choices": result.kinds,
        "curve": [{name: round(value, 5) for name, value in point.items()} for point in result.curve],
        "versions": {
            "routepack-opt": routepack_opt.__version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
    }


def load_checkpoint(path: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Read a checkpoint; None: the one shipped with the package.

    Raises
    ------
    FormatError
        A missing or damaged file, weights that are not the record's, features that this version does not make.
    """
    weights = SHIPPED if path is None else _weights_path(path)
    where = weights.with_suffix(".json")
    if not weights.exists():
        raise FormatError(f"{weights}: no such checkpoint; train one with: routepack residency train -o {weights}")
    record = read_json(where)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise FormatError(f"{where}: not the record of a {FORMAT} checkpoint")
    for name, kind in (("weights_sha256", str), ("settings", dict), ("features", list)):
        if not isinstance(record.get(name), kind):
            raise FormatError(f"{where}: {name}: missing or not {kind.__name__}")
    settings = Settings.from_dict(record["settings"], f"{where}: settings")
    network = QNetwork(hidden=settings.hidden, gains=settings.gains)
    if record["features"] != list(FEATURES[: network.num_features]):
        raise FormatError(f"{where}: features: not those of this version; train again")
    _read_weights(network, weights, record["weights_sha256"], where)
    return Checkpoint(network.requires_grad_(False).eval(), settings, record)


def _read_weights(network: QNetwork, path: Path, digest: str, where: Path) -> None:
    stored = read_header(path)
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise FormatError(f"{path}: not the weights that {where} describes (sha256 differs)")
    state = network.state_dict()
    if set(stored.tensors) != set(state):
        odd = sorted(set(stored.tensors) ^ set(state))[0]
        raise FormatError(f"{path}: tensor {odd!r}: missing or not of this network")
    for name, target in state.items():
        tensor = stored.tensors[name]
        if tensor.dtype != target.dtype or tensor.shape != tuple(target.shape):
            raise FormatError(f"{tensor.where}: {tensor.dtype} {tensor.shape}; expected float32 {tuple(target.shape)}")
        read_range(tensor, 0, tensor.numel, target)
        if not bool(torch.isfinite(target).all()):
            raise FormatError(f"{tensor.where}: holds values that are not finite")


def checked_output(path: str | os.PathLike[str]) -> Path:
    """Where weights shall go, refused before a run begins rather than after it.

    Raises
    ------
    InvalidInput
        Another suffix, or no such folder.
    """
    weights = _weights_path(path)
    if not weights.parent.is_dir():
        raise InvalidInput(f"{weights}: cannot be written (no folder {weights.parent})")
    return weights


def _weights_path(path: str | os.PathLike[str]) -> Path:
    weights = file_path(path)
    if weights.suffix != SUFFIX:
        raise InvalidInput(f"{weights}: a checkpoint's name ends in {SUFFIX}")
    return weights


__all__ = ["FORMAT", "SHIPPED", "Checkpoint", "checked_output", "load_checkpoint", "save_checkpoint"]
