"""Samples to the ranks that train them: one all-to-all of flat bytes.

Planning needs lengths and expert counts only; tokens, fields and routes go straight from the rank that generated a
sample to the one whose cell it is in.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.step.samples import TrainSample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh

_DTYPES = {"i8": torch.int64, "i4": torch.int32, "i2": torch.int16, "f4": torch.float32}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def exchange_samples(
    mine: Mapping[int, TrainSample], owner_of: Sequence[int] | Any, mesh: ParallelMesh
) -> dict[int, TrainSample]:
    """Give every sample to its owner; every rank calls it.

    Parameters
    ----------
    mine
        Samples this rank holds, by index in the window; each is held by one rank.
    owner_of
        int [N], the DP rank that trains each sample (see :func:`owners`).

    Returns
    -------
    The samples this rank owns, by index, in index order, on the CPU.

    Raises
    ------
    InvalidInput
        An owner is no DP rank, or an index of any rank is outside the window; on every rank.
    """
    owners_N = np.asarray(owner_of)
    if owners_N.size and not (owners_N.min() >= 0 and owners_N.max() < mesh.num_ranks):
        raise InvalidInput(
            f"owner_of: expected DP ranks 0..{mesh.num_ranks - 1}, found {sorted(set(owners_N.tolist()))}"
        )
    outside = [index for index in mine if not 0 <= index < len(owners_N)]
    problem = f"sample {outside[0]}: outside the window of {len(owners_N)} samples" if outside else None
    if mesh.dp_group is None:
        if problem:
            raise InvalidInput(problem)
        return {index: mine[index] for index in sorted(mine)}
    parcels = None
    if not problem:
        by_rank = [[i for i in sorted(mine) if owners_N[i] == rank] for rank in range(mesh.num_ranks)]
        parcels = [_encode({index: mine[index] for index in indices}) for indices in by_rank]
    received = _all_to_all(parcels, mesh)
    if problem:
        raise InvalidInput(problem)
    result: dict[int, TrainSample] = {}
    for parcel in received:
        result.update(_decode(parcel))
    return dict(sorted(result.items()))


def owners(cells: Sequence[Sequence[Sequence[int]]], num_samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [N], the DP rank of each sample in ``cells[row][dp_rank]``."""
    result = np.full(num_samples, -1, dtype=np.int64)
    for row in cells:
        for rank, cell in enumerate(row):
            result[list(cell)] = rank
    return result


def _all_to_all(parcels: list[torch.Tensor] | None, mesh: ParallelMesh) -> list[torch.Tensor]:
    """What every rank sent here; None sends nothing but the news that this rank cannot, so that all stop."""
    sizes = [-1] * mesh.num_ranks if parcels is None else [len(parcel) for parcel in parcels]
    outgoing = torch.tensor(sizes, device=mesh.device)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=mesh.dp_group)
    receive = incoming.tolist()
    if parcels is None:
        return []
    if min(receive) < 0:
        raise InvalidInput(f"rank {receive.index(-1)} cannot send its samples; its own message says why")
    result = torch.empty(sum(receive), dtype=torch.uint8, device=mesh.device)
    dist.all_to_all_single(result, torch.cat(parcels).to(mesh.device), receive, sizes, group=mesh.dp_group)
    return list(result.cpu().split(receive))


def _encode(samples: dict[int, TrainSample]) -> torch.Tensor:
    """A uint8 tensor: length of the header (8 bytes), header (JSON), then every tensor."""
    entries, tensors = [], []
    for index, sample in samples.items():
        parts = {"tokens": sample.tokens, "routes": sample.routes}
        parts |= {f"fields.{name}": values for name, values in sample.fields.items()}
        for name, tensor in parts.items():
            if tensor is not None:
                entries.append([int(index), name, _CODES[tensor.dtype], list(tensor.shape)])
                tensors.append(tensor)
    header = json.dumps(entries).encode()
    chunks = [np.frombuffer(len(header).to_bytes(8, "little"), np.uint8), np.frombuffer(header, np.uint8)]
    chunks += [tensor.detach().cpu().contiguous().numpy().reshape(-1).view(np.uint8) for tensor in tensors]
    return torch.from_numpy(np.concatenate(chunks))


def _decode(parcel: torch.Tensor) -> dict[int, TrainSample]:
    data = parcel.numpy().tobytes()
    start = 8 + int.from_bytes(data[:8], "little")
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for index, name, code, shape in json.loads(data[8:start]):
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(data, dtype=f"<{code}", count=count, offset=start).reshape(shape)
        parts.setdefault(index, {})[name] = torch.from_numpy(array.copy())
        start += array.nbytes
    return {
        index: TrainSample(
            entry["tokens"],
            entry.get("routes"),
            {name.removeprefix("fields."): values for name, values in entry.items() if name.startswith("fields.")},
        )
        for index, entry in parts.items()
    }
