"""Weights in Hugging Face folders: load under any placement and EP size, export in logical order.

Only safetensors are read: nothing is ever unpickled. A rank reads the dense tensors and its own experts.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import file_path, read_json, write_json
from routepack_opt.integrations.torch_moe.huggingface.config import Family, config_from_hf, config_to_hf, family_of
from routepack_opt.integrations.torch_moe.huggingface.names import (
    MATRICES,
    ExpertName,
    dense_tensors,
    fused_names,
    to_family,
    to_logical,
)
from routepack_opt.integrations.torch_moe.parallel.mesh import all_gather_equal, all_reduce_, barrier

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch import Tensor

    from routepack_opt.integrations.torch_moe.model.decoder import MoETransformer

__all__ = ["config_from_hf", "config_to_hf", "export_hf", "load_hf"]

INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class _Folder:
    """The tensors of a folder by logical name, opened lazily file by file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.where: dict[str, tuple[str, str]] = {}  # logical name -> (file, name in it)
        for file in self._files():
            for name in self._handle(file).keys():  # noqa: SIM118 - a safetensors handle is no mapping
                logical = to_logical(name)
                if logical in self.where:
                    raise FormatError(f"{folder / file}, {name}: also in {self.where[logical][0]} as another tensor")
                self.where[logical] = (file, name)

    def _files(self) -> list[str]:
        index = self.folder / INDEX
        if not index.exists():
            if (self.folder / "model.safetensors").exists():
                return ["model.safetensors"]
            raise FormatError(f"{self.folder}: neither {INDEX} nor model.safetensors in it; other formats are not read")
        table = read_json(index)
        names = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise FormatError(f"{index}, weight_map: expected a table from tensor to file")
        for name, file in names.items():
            if Path(file).name != file or file in ("", ".", ".."):
                raise FormatError(f"{index}, weight_map[{name!r}]: {file!r} is not a file name in this folder")
        files = sorted(set(names.values()))
        held = {file: set(self._handle(file).keys()) for file in files}
        for name, file in names.items():
            if name not in held[file]:
                raise FormatError(f"{self.folder / file}, {name}: the index says it is here, but it is missing")
        return files

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except FileNotFoundError:
                raise FormatError(f"{self.folder / file}: no such file, but {INDEX} names it") from None
            except (SafetensorError, OSError) as error:
                raise FormatError(f"{self.folder / file}: not a safetensors file ({error})") from None
        return self._open[file]

    def read(self, logical: str, shape: tuple[int, ...], part: tuple[int, slice] | None = None) -> Tensor:
        """One tensor, or rows ``part`` of it, after its type and full shape were checked."""
        if logical not in self.where:
            raise FormatError(f"{self.folder}, {logical}: missing")
        file, name = self.where[logical]
        source = self._handle(file).get_slice(name)
        if tuple(source.get_shape()) != shape:
            found = tuple(source.get_shape())
            raise FormatError(f"{self.folder / file}, {name}: shape {found}, expected {shape}")
        if source.get_dtype() not in _FLOATS:
            raise FormatError(f"{self.folder / file}, {name}: type {source.get_dtype()}, expected one of {_FLOATS}")
        value: Tensor = source[:] if part is None else source[part[0], part[1]]
        return value


@torch.no_grad()
def load_hf(model: MoETransformer, folder: str | os.PathLike[str]) -> None:
    """Fill every weight of this rank from a Hugging Face folder, under the model's committed placement.

    Experts are found fused (transformers 5) or one by one (hub), gate and router under any supported family's name.
    Make the optimizer afterwards: its masters copy the weights.

    Raises
    ------
    FormatError
        A tensor is missing, unknown, ill-shaped or no floating-point tensor; names file and tensor. The model is then
        partly filled and must not be used. Or a ``config.json`` in the folder describes another model; names the field.
    """
    source = _Folder(file_path(folder))
    _refuse_other_model(model, source.folder)
    _refuse_unknown(model, source)
    for name, tensor in dense_tensors(model):
        tensor.copy_(source.read(name, tuple(tensor.shape)))
    config = model.config
    for block, layer in zip(model.moe_blocks, config.moe_layers, strict=True):
        experts, (fused_gate_up, fused_down) = block.experts, fused_names(layer)
        for slot, expert in enumerate(model.local_experts(block.moe_layer)):
            if fused_gate_up in source.where:
                shape = (config.num_experts, 2 * config.expert_size, config.hidden_size)
                experts.gate_up[slot].copy_(source.read(fused_gate_up, shape, (expert, slice(None))))
                shape = (config.num_experts, config.hidden_size, config.expert_size)
                experts.down[slot].copy_(source.read(fused_down, shape, (expert, slice(None))))
                continue
            for matrix, target in zip(MATRICES, (*experts.gate_up[slot].chunk(2), experts.down[slot]), strict=True):
                name_of = ExpertName(layer, expert, matrix)
                target.copy_(source.read(str(name_of), name_of.shape(model)))


def _refuse_other_model(model: MoETransformer, folder: Path) -> None:
    """Shapes alone do not tell whether top-k is normalised or which base the rotary embedding has."""
    if not (folder / "config.json").exists():
        return
    stored, own = config_from_hf(folder).to_dict(), model.config.to_dict()
    for name in own:
        if stored[name] != own[name] and name != "max_positions":
            raise FormatError(f"{folder / 'config.json'}: {name} is {stored[name]!r}, the model has {own[name]!r}")


def _refuse_unknown(model: MoETransformer, source: _Folder) -> None:
    known = {name for name, _ in dense_tensors(model)}
    for layer in model.config.moe_layers:
        known.update(fused_names(layer))
        experts = range(model.config.num_experts)
        known.update(str(ExpertName(layer, expert, matrix)) for expert in experts for matrix in MATRICES)
    if model.config.tie_embeddings:
        known.add("lm_head.weight")  # some writers repeat the embedding; the tie wins, as in transformers
    for name, (file, stored) in source.where.items():
        if name not in known and not name.endswith(".rotary_emb.inv_freq"):
            raise FormatError(f"{source.folder / file}, {stored}: no such tensor in this model")


@torch.no_grad()
def export_hf(
    model: MoETransformer,
    folder: str | os.PathLike[str],
    family: Family | None = None,
    *,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write the model under the hub's names, one tensor per expert in logical order; every rank calls it.

    Layers are gathered over the EP group of rank 0 one at a time; rank 0 writes. The folder appears whole or not at
    all, and loads in transformers, vLLM and SGLang.

    Parameters
    ----------
    family
        "qwen3_moe", "mixtral" or "dots1"; None takes the one that fits the configuration.
    max_file_bytes
        A file is closed once it would grow beyond this.

    Raises
    ------
    InvalidInput
        When the family lacks a feature of the model, or the folder exists and is not empty.
    """
    target = file_path(folder)
    family = family_of(model.config) if family is None else family
    values = config_to_hf(model.config, family, dtype=str(next(model.parameters()).dtype).removeprefix("torch."))
    mesh = model.mesh
    writes = mesh is None or mesh.rank == 0
    full = writes and target.exists() and (not target.is_dir() or any(target.iterdir()))
    if mesh is not None:  # together: a rank that refused alone would leave the others waiting in a gather
        full = bool(all_reduce_(torch.tensor(float(full), device=mesh.device), mesh.dp_group))
    if full:
        raise InvalidInput(f"{target}: exists already; expected a new or an empty folder")
    if writes:
        _write_folder(logical_tensors(model), target, family, values, max_file_bytes)
    elif mesh is not None and mesh.rank in mesh.topology.shards[int(mesh.topology.shard_of_rank[0])]:
        for _ in logical_tensors(model):  # takes part in the gathers
            pass
    if mesh is not None:
        barrier(mesh.dp_group)


def logical_tensors(model: MoETransformer) -> Iterator[tuple[str, Tensor]]:
    """(logical name, CPU tensor) of the whole model, gathered over the EP group, whose ranks all call it alike."""
    for name, tensor in dense_tensors(model):
        yield name, tensor.detach().cpu()
    mesh = model.mesh
    for block, layer in zip(model.moe_blocks, model.config.moe_layers, strict=True):
        slot_of = model.slot_map.logical_to_slot[block.moe_layer].tolist()
        for weight, names in ((block.experts.gate_up, MATRICES[:2]), (block.experts.down, MATRICES[2:])):
            parts = [weight.detach()]
            if mesh is not None:
                gathered = all_gather_equal(weight.detach(), mesh.ep_group)
                parts = [gathered[position] for position in mesh.ep_wire_order] if len(gathered) > 1 else gathered
            num_slots = weight.shape[0]
            for expert, slot in enumerate(slot_of):
                matrices = parts[slot // num_slots][slot % num_slots].cpu().chunk(len(names))
                for matrix, value in zip(names, matrices, strict=True):
                    yield str(ExpertName(layer, expert, matrix)), value


def _write_folder(
    tensors: Iterator[tuple[str, Tensor]], target: Path, family: Family, values: dict[str, Any], max_file_bytes: int
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(target.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        files: list[list[str]] = []
        held: dict[str, Tensor] = {}
        num_bytes = total_bytes = 0

        def flush() -> None:
            nonlocal held, num_bytes
            files.append(list(held))
            save_file(held, scratch / f"part-{len(files)}", metadata={"format": "pt"})
            held, num_bytes = {}, 0

        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if held and num_bytes + size > max_file_bytes:
                flush()
            held[to_family(name, family)] = tensor.contiguous()
            num_bytes, total_bytes = num_bytes + size, total_bytes + size
        flush()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(files, start=1):
            final = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            (scratch / f"part-{number}").rename(scratch / final)
            weight_map |= dict.fromkeys(names, final)
        if len(files) > 1:
            write_json(scratch / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
        write_json(scratch / "config.json", values, indent=2)
        if target.exists():
            target.rmdir()  # empty, as checked
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
