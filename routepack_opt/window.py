"""Window: lengths and expert demand of all samples of one optimizer step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import parse_json, read_npz, scalar_text, write_npz

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

FORMAT = "routepack.window/1"
_INT32_MAX = np.iinfo(np.int32).max


def integer_array(value: ArrayLike, name: str, ndim: int, *, low: int, high: int) -> NDArray[Any]:
    """``value`` as an integer array with every entry in [low, high], or InvalidInput naming field and index."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"{name}: not a rectangular array of integers ({error})") from None
    if array.ndim != ndim:
        raise InvalidInput(f"{name}: expected {ndim} dimension{'' if ndim == 1 else 's'}, found shape {array.shape}")
    if array.dtype.kind not in "iu":
        if array.size == 0:
            array = array.astype(np.int64)
        elif array.dtype.kind == "f":
            finite = np.isfinite(array)
            if not finite.all():
                raise InvalidInput(f"{name}{_index_of(~finite)}: not a finite number; expected an integer")
            whole = array == np.floor(array)
            if not whole.all() or np.abs(array).max() >= 2**53:
                bad = ~whole if not whole.all() else np.abs(array) >= 2**53
                raise InvalidInput(f"{name}{_index_of(bad)}: {array[bad][0]} is not an exact integer")
            array = array.astype(np.int64)
        else:
            raise InvalidInput(f"{name}: expected integers, found dtype {array.dtype}")
    if array.size:
        if int(array.min()) < low:
            bad = array < low
            raise InvalidInput(f"{name}{_index_of(bad)}: {array[bad][0]} is below {low}")
        if int(array.max()) > high:
            bad = array > high
            raise InvalidInput(f"{name}{_index_of(bad)}: {array[bad][0]} is above {high}")
    return array


def positive_int(name: str, value: Any, low: int = 1, high: int = 1 << 62) -> int:
    """``value`` as an int in [low, high]; anything else, booleans and floats included, is an InvalidInput."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        wanted = "a positive integer" if low == 1 else f"an integer >= {low}"
        raise InvalidInput(f"{name}: {value!r} is not {wanted}")
    if value > high:
        raise InvalidInput(f"{name}: {value} is above {high}")
    return int(value)


def _index_of(mask: NDArray[Any]) -> str:
    if mask.ndim == 0:
        return ""
    first = np.unravel_index(int(np.argmax(mask)), mask.shape)
    return "[" + ",".join(str(int(i)) for i in first) + "]"


def _names(value: Any, num_samples: int) -> tuple[str, ...]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidInput(f"sample_ids: expected one name per sample, found {type(value).__name__}")
    names = tuple(str(name) for name in value)
    if len(names) != num_samples:
        raise InvalidInput(f"sample_ids: {len(names)} names for {num_samples} samples")
    return names


@dataclass(frozen=True, eq=False)
class Window:
    """All samples of one optimizer step, sealed before planning starts.

    Parameters
    ----------
    lengths
        int [N], tokens of each sample (prompt + response), at least 1.
    demand
        int [N, L, E], token-to-expert assignments of sample i at MoE layer l to logical expert e (top-k counted).
        Stored as int32. Samples or layers without demand are legal.
    sample_ids
        N names, optional.
    group_ids
        int [N], samples of one prompt share a value, optional.
    moe_layers
        int [L], the model's layer number of each MoE layer, optional.
    top_k
        Experts a token uses, optional.
    counts
        "recorded" when the demand is what training will replay, "predicted" when it comes from an older policy.
    meta
        Free JSON-compatible notes.

    Raises
    ------
    InvalidInput
        Naming the field and the index of the first wrong value.
    """

    lengths: NDArray[np.int64]
    demand: NDArray[np.int32]
    sample_ids: tuple[str, ...] | None = None
    group_ids: NDArray[np.int64] | None = None
    moe_layers: NDArray[np.int64] | None = None
    top_k: int | None = None
    counts: Literal["recorded", "predicted"] = "recorded"
    meta: dict[str, Any] = field(default_factory=dict)

    def __init__(  # noqa: D107 - the class docstring describes the parameters
        self,
        lengths: ArrayLike,
        demand: ArrayLike,
        *,
        sample_ids: Sequence[str] | None = None,
        group_ids: ArrayLike | None = None,
        moe_layers: ArrayLike | None = None,
        top_k: int | None = None,
        counts: Literal["recorded", "predicted"] = "recorded",
        meta: dict[str, Any] | None = None,
    ) -> None:
        put = object.__setattr__
        lengths_array = integer_array(lengths, "lengths", 1, low=1, high=_INT32_MAX)
        if lengths_array.size == 0:
            raise InvalidInput("lengths: the window has no samples; expected at least one")
        demand_array = integer_array(demand, "demand", 3, low=0, high=_INT32_MAX)
        if demand_array.shape[0] != lengths_array.shape[0]:
            raise InvalidInput(
                f"demand: has {demand_array.shape[0]} samples but lengths has {lengths_array.shape[0]}; they must agree"
            )
        if demand_array.shape[1] == 0 or demand_array.shape[2] == 0:
            raise InvalidInput(f"demand: shape {demand_array.shape} has no layers or no experts; expected [N, L, E]")
        put(self, "lengths", np.ascontiguousarray(lengths_array, dtype=np.int64))
        put(self, "demand", np.ascontiguousarray(demand_array, dtype=np.int32))
        put(self, "sample_ids", None if sample_ids is None else _names(sample_ids, self.num_samples))
        for name, values, size in (
            ("group_ids", group_ids, self.num_samples),
            ("moe_layers", moe_layers, self.num_layers),
        ):
            if values is None:
                put(self, name, None)
                continue
            array = integer_array(values, name, 1, low=-(2**62), high=2**62)
            if array.shape[0] != size:
                raise InvalidInput(f"{name}: {array.shape[0]} entries, expected {size}")
            put(self, name, np.ascontiguousarray(array, dtype=np.int64))
        put(self, "top_k", None if top_k is None else int(integer_array(top_k, "top_k", 0, low=1, high=_INT32_MAX)))
        if not isinstance(counts, str) or counts not in ("recorded", "predicted"):
            raise InvalidInput(f"counts: {counts!r} is unknown; expected 'recorded' or 'predicted'")
        put(self, "counts", counts)
        if meta is not None and not isinstance(meta, Mapping):
            raise InvalidInput(f"meta: expected a dict of notes, found {type(meta).__name__}")
        put(self, "meta", dict(meta or {}))

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.lengths.shape[0])

    @property
    def num_layers(self) -> int:
        """L, MoE layers only."""
        return int(self.demand.shape[1])

    @property
    def num_experts(self) -> int:
        """E, logical experts of a layer."""
        return int(self.demand.shape[2])

    @cached_property
    def total_load(self) -> NDArray[np.int64]:
        """int64 [L, E], assignments of the whole window."""
        return np.asarray(self.demand.sum(axis=0, dtype=np.int64))

    @cached_property
    def max_demand(self) -> int:
        """Largest entry of ``demand``."""
        return int(self.demand.max())

    @cached_property
    def sha256(self) -> str:
        """Hex digest over lengths (little-endian int64) then demand (little-endian int32), C order."""
        digest = hashlib.sha256(self.lengths.astype("<i8", copy=False).tobytes())
        for start in range(0, self.num_samples, 256):  # slices keep big-endian hosts from copying the whole array
            digest.update(self.demand[start : start + 256].astype("<i4", copy=False).data)
        return digest.hexdigest()

    @classmethod
    def from_routes(
        cls,
        routes: Sequence[NDArray[Any]],
        lengths: ArrayLike,
        num_experts: int,
        moe_layers: Sequence[int] | None = None,
    ) -> Window:
        """Count recorded routes into a window.

        Parameters
        ----------
        routes
            One integer array [rows, L, K] per sample; rows is the sample's length or one less.
        lengths
            int [N].
        num_experts
            E; an id of E or more is refused.
        moe_layers
            The MoE layers among the dump's layers; None drops layers that are zero in every sample.
        """
        from routepack_opt.routes import window_from_routes

        return window_from_routes(routes, lengths, num_experts, moe_layers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``window.npz`` (format routepack.window/1) atomically."""
        arrays: dict[str, Any] = {"format": np.array(FORMAT), "lengths": self.lengths, "demand": self.demand}
        if self.sample_ids is not None:
            arrays["sample_ids"] = np.array(self.sample_ids, dtype=np.str_)
        if self.group_ids is not None:
            arrays["group_ids"] = self.group_ids
        if self.moe_layers is not None:
            arrays["moe_layers"] = self.moe_layers
        if self.top_k is not None:
            arrays["top_k"] = np.int64(self.top_k)
        meta = dict(self.meta)
        if self.counts != "recorded":
            meta["counts"] = self.counts
        arrays["meta"] = np.array(json.dumps(meta, allow_nan=False))
        write_npz(path, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Window:
        """Read ``window.npz``; raises FormatError naming file, field and index."""
        known = ("format", "lengths", "demand", "sample_ids", "group_ids", "moe_layers", "top_k", "meta")
        arrays = read_npz(path, known)
        found = scalar_text(arrays, "format", path)
        if found != FORMAT:
            raise FormatError(f"{path}: field 'format': found {found!r}, expected {FORMAT!r}")
        for name in ("lengths", "demand"):
            if name not in arrays:
                raise FormatError(f"{path}: field {name!r} is missing")
            if arrays[name].dtype.kind not in "iu":
                raise FormatError(f"{path}: field {name!r}: dtype {arrays[name].dtype} is not an integer type")
        meta = parse_json(scalar_text(arrays, "meta", path) or "{}", f"{path}: field 'meta'")
        if not isinstance(meta, dict):
            raise FormatError(f"{path}: field 'meta': expected a JSON object")
        counts = meta.pop("counts", "recorded")
        top_k = arrays.get("top_k")
        if top_k is not None and (top_k.ndim != 0 or top_k.dtype.kind not in "iu"):
            raise FormatError(f"{path}: field 'top_k': expected one integer")
        ids = arrays.get("sample_ids")
        if ids is not None and (ids.ndim != 1 or ids.dtype.kind != "U"):
            raise FormatError(f"{path}: field 'sample_ids': expected text of shape [N], found {ids.dtype} {ids.shape}")
        try:
            return cls(
                arrays["lengths"],
                arrays["demand"],
                sample_ids=None if ids is None else ids.tolist(),
                group_ids=arrays.get("group_ids"),
                moe_layers=arrays.get("moe_layers"),
                top_k=None if top_k is None else int(top_k),
                counts=counts,
                meta=meta,
            )
        except FormatError:
            raise
        except InvalidInput as error:
            raise FormatError(f"{path}: field {error}") from None
