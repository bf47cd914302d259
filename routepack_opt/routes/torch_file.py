"""``.pt`` dumps, opened only by ``torch.load(weights_only=True)``: verl batches and lists of samples."""

from __future__ import annotations

import pickle
import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput, MissingDependency
from routepack_opt.routes.records import GROUP_FIELDS, ID_FIELDS, ROUTE_FIELDS, Dialect, record_block
from routepack_opt.routes.samples import RouteBlock, checked_ids, refuse_huge, single_sample, to_numpy
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

_LENGTHS = ("seq_lens", "lengths", "length")


def read_torch_routes(path: Path, dialect: Dialect) -> Iterator[RouteBlock]:
    """Blocks of a ``.pt`` file.

    A dict with ``routed_experts`` [batch, tokens, L, K] dense, jagged or a list, plus ``attention_mask`` [batch,
    tokens] or ``seq_lens`` [batch]; or a list of dicts with the fields of the JSON-lines form. A dense batch without
    mask is left-padded.
    """
    data = _load(path)
    if isinstance(data, dict) and isinstance(data.get("batch"), dict):
        data = data["batch"]
    if isinstance(data, dict) and "samples" in data:
        data = data["samples"]
    if isinstance(data, (list, tuple)):
        for index, record in enumerate(data):
            yield record_block(_plain(record), dialect, source=str(path), index=index)
        return
    if not isinstance(data, dict) or not any(name in data for name in ROUTE_FIELDS):
        raise FormatError(f"{path}: expected a dict with 'routed_experts' or a list of such dicts")
    yield from _batch_blocks(path, data)


def _load(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependency(
            f"{path}: reading .pt files needs torch; install it with: pip install 'routepack-opt[torch]'"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FormatError(
            f"{path}: refused{_forbidden(error)}: only tensors, numbers, text, lists and dicts are read"
            " (torch.load with weights_only=True)"
        ) from None
    except MemoryError:
        raise FormatError(f"{path}: does not fit in the memory of this machine") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # torch raises RuntimeError, KeyError, EOFError, struct.error ... on damaged files
        raise FormatError(f"{path}: not a readable torch file ({_first_line(error)})") from None


def _batch_blocks(path: Path, data: dict[Any, Any]) -> Iterator[RouteBlock]:
    routes = next(data[name] for name in ROUTE_FIELDS if name in data)
    samples = _unbound(routes)
    mask = None if data.get("attention_mask") is None else _mask(data["attention_mask"], routes, len(samples))
    lengths = _lengths(data, mask, len(samples))
    names, groups = _column(data, ID_FIELDS, len(samples)), _column(data, GROUP_FIELDS, len(samples))
    starts = _column(data, ("start_len", "start_lens"), len(samples))
    for index, sample in enumerate(samples):
        field = f"{path}: sample {index}: field 'routed_experts'"
        ids = checked_ids(sample, field)
        length = int(lengths[index])
        if mask is not None:
            ids = ids[mask[index]]
        elif hasattr(routes, "ndim") and not getattr(routes, "is_nested", False) and ids.shape[0] > length:
            ids = ids[ids.shape[0] - length :]  # left-padded dense batch
        start = starts[index]
        yield single_sample(
            ids,
            length,
            source=str(path),
            index=index,
            start_len=None if start is None else int(start),
            sample_id=None if names[index] is None else str(names[index]),
            group=groups[index],
        )


def _unbound(routes: Any) -> list[Any]:
    """One array a sample, of a dense or jagged tensor or a list."""
    if isinstance(routes, (list, tuple)):
        return list(routes)
    if hasattr(routes, "unbind") and getattr(routes, "ndim", 0) == 4:
        refuse_huge(int(routes.shape[0]) << 8, "field 'routed_experts'")  # one tensor object a sample
        return list(routes.unbind())
    raise InvalidInput(
        f"field 'routed_experts': expected [batch, tokens, layers, top_k], found {type(routes).__name__}"
    )


def _mask(value: Any, routes: Any, num_samples: int) -> NDArray[np.bool_]:
    if getattr(routes, "is_nested", False) or isinstance(routes, (list, tuple)):
        raise InvalidInput("field 'attention_mask': jagged routes carry their own lengths; expected seq_lens instead")
    mask = to_numpy(value, "field 'attention_mask'")
    if mask.shape != tuple(routes.shape[:2]) or mask.dtype.kind not in "biu":
        raise InvalidInput(
            f"field 'attention_mask': found {mask.dtype} {mask.shape};"
            f" expected 0 or 1 of shape {tuple(routes.shape[:2])}"
        )
    refuse_huge(mask.size * 8, "field 'attention_mask'")
    chosen = mask != 0
    steps = np.diff(np.pad(chosen, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    broken = (steps == 1).sum(axis=1) != 1
    if broken.any():
        raise InvalidInput(f"field 'attention_mask'[{int(np.argmax(broken))}]: tokens are not one contiguous run")
    assert mask.shape[0] == num_samples
    return np.asarray(chosen)


def _lengths(data: dict[Any, Any], mask: NDArray[np.bool_] | None, num_samples: int) -> NDArray[np.int64]:
    for name in _LENGTHS:
        if data.get(name) is not None:
            lengths = integer_array(
                to_numpy(data[name], f"field {name!r}"), f"field {name!r}", 1, low=1, high=2**31 - 1
            )
            if lengths.size != num_samples:
                raise InvalidInput(f"field {name!r}: {lengths.size} lengths for {num_samples} samples")
            return lengths.astype(np.int64)
    if mask is None:
        raise InvalidInput("field 'attention_mask' or 'seq_lens' is missing; lengths are unknown")
    return np.asarray(mask.sum(axis=1, dtype=np.int64))


def _column(data: dict[Any, Any], names: tuple[str, ...], num_samples: int) -> list[Any]:
    for name in names:
        if data.get(name) is None:
            continue
        values = data[name].tolist() if hasattr(data[name], "tolist") else data[name]
        good = isinstance(values, (list, tuple)) and len(values) == num_samples
        if not good or any(isinstance(v, bool) or not isinstance(v, (str, int)) for v in values):
            raise InvalidInput(f"field {name!r}: expected {num_samples} integers or texts")
        return list(values)
    return [None] * num_samples


def _plain(record: Any) -> Any:
    """Scalars and token lists held as tensors -> plain values; routes stay tensors."""
    if not isinstance(record, dict):
        return record
    plain: dict[Any, Any] = {}
    for name, value in record.items():
        keep = name in ROUTE_FIELDS or not hasattr(value, "tolist")
        plain[name] = value if keep else value.tolist()
    return plain


def _forbidden(error: Exception) -> str:
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f" (it names {found[1]})" if found else ""


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
