"""RouteBlock: the routes of a few consecutive samples, as every reader hands them to the counter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.files import _available_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_LAYERS = 4096  # far above any model; a bound so that a hostile header cannot ask for terabytes of counts
MAX_LENGTH = np.iinfo(np.int32).max
_HUGE_BYTES = 1 << 28  # below this no check is needed


@dataclass(frozen=True, eq=False)
class RouteBlock:
    """Consecutive samples of one source, rows concatenated.

    Parameters
    ----------
    routes
        Integer ids [R, dump layers, K], or None when no sample of the block has a row and the shape is unknown.
    num_rows
        int64 [n], rows of each sample; they add up to R.
    lengths
        int64 [n], tokens of each sample.
    start_lens
        int64 [n], first token that has a row; -1 where the source does not say.
    ids
        n names; None where the source has none.
    groups
        n prompt groups; None where the source has none.
    first_index
        Position of the first sample in its source, for messages.
    source
        What messages call the source: a file path, or "routes" for arrays in memory.
    layer_numbers
        Model layer of every dump layer, when the source says (Megatron traces).
    """

    routes: NDArray[Any] | None
    num_rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    start_lens: NDArray[np.int64]
    ids: tuple[str | None, ...]
    groups: tuple[int | str | None, ...]
    first_index: int
    source: str
    layer_numbers: tuple[int, ...] | None = None

    @property
    def num_samples(self) -> int:
        """Samples in this block."""
        return int(self.lengths.shape[0])

    def label(self, sample: int) -> str:
        """How messages name one sample: source, index and id."""
        name = self.ids[sample]
        return f"{self.source}: sample {self.first_index + sample}" + ("" if name is None else f" ({name!r})")


def single_sample(
    routes: NDArray[Any] | None,
    length: int,
    *,
    source: str,
    index: int,
    start_len: int | None = None,
    sample_id: str | None = None,
    group: int | str | None = None,
    layer_numbers: tuple[int, ...] | None = None,
) -> RouteBlock:
    """A block of one sample."""
    return RouteBlock(
        routes=routes,
        num_rows=np.array([0 if routes is None else routes.shape[0]], dtype=np.int64),
        lengths=np.array([length], dtype=np.int64),
        start_lens=np.array([-1 if start_len is None else start_len], dtype=np.int64),
        ids=(sample_id,),
        groups=(group,),
        first_index=index,
        source=source,
        layer_numbers=layer_numbers,
    )


def checked_ids(routes: Any, where: str) -> NDArray[Any]:
    """``routes`` (numpy, torch by its ``numpy()``, or nested lists) as a numpy integer array [rows, layers, K].

    Raises
    ------
    InvalidInput
        Not integers, not three dimensions, or more layers than any model has.
    """
    array = to_numpy(routes, where)
    if array.dtype.kind not in "iu":
        raise InvalidInput(f"{where}: expected integer expert ids, found dtype {array.dtype}")
    if array.ndim != 3:
        raise InvalidInput(f"{where}: expected shape [rows, layers, top_k], found {tuple(array.shape)}")
    if not 1 <= array.shape[1] <= MAX_LAYERS or array.shape[2] < 1:
        raise InvalidInput(
            f"{where}: shape {tuple(array.shape)} has {array.shape[1]} layers and top_k {array.shape[2]};"
            f" expected 1 to {MAX_LAYERS} layers and top_k of at least 1"
        )
    refuse_huge(array.nbytes, where)
    return array


def refuse_huge(num_bytes: int, where: str) -> None:
    """Refuse what cannot fit: a few stored bytes can declare terabytes (zip bombs, strides of zero)."""
    if num_bytes > _HUGE_BYTES and num_bytes > _available_memory_bytes():
        raise InvalidInput(f"{where}: {num_bytes} bytes do not fit in the memory of this machine")


def to_numpy(value: Any, where: str) -> NDArray[Any]:
    """A numpy view of arrays and torch tensors, or a copy of nested lists; torch itself is never imported."""
    try:
        if hasattr(value, "detach"):
            value = value.detach()
            if getattr(value, "is_cuda", False):
                value = value.cpu()
            return np.asarray(value.numpy())
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidInput(f"{where}: not a rectangular array of integers ({error})") from None


def checked_moe_layers(moe_layers: Sequence[int] | None) -> NDArray[np.int64] | None:
    """``moe_layers`` as strictly increasing int64, or InvalidInput."""
    if moe_layers is None:
        return None
    from routepack_opt.window import integer_array

    layers = integer_array(moe_layers, "moe_layers", 1, low=0, high=2**31)
    if layers.size == 0:
        raise InvalidInput("moe_layers: empty; expected at least one layer, or None")
    rising = np.diff(layers.astype(np.int64)) > 0
    if not rising.all():
        at = int(np.argmin(rising)) + 1
        raise InvalidInput(
            f"moe_layers[{at}]: {layers[at]} does not rise above {layers[at - 1]}; expected rising order"
        )
    return layers.astype(np.int64)


def checked_num_experts(num_experts: Any) -> int:
    """``num_experts`` as a positive int, or InvalidInput."""
    if isinstance(num_experts, bool) or not isinstance(num_experts, (int, np.integer)) or num_experts < 1:
        raise InvalidInput(f"num_experts: {num_experts!r} is not a positive integer")
    if num_experts > 1 << 20:
        raise InvalidInput(f"num_experts: {num_experts} is above {1 << 20}")
    return int(num_experts)


def layer_ranges(layers: Sequence[int]) -> str:
    """Layers as text: [0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = int(layer)
        else:
            parts.append([int(layer), int(layer)])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def parse_layer_ranges(text: str) -> list[int]:
    """The layers of a text such as "3-60" or "1,3,5-7"; raises InvalidInput."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.strip().isdecimal()) or len(part) > 24:
            raise InvalidInput(
                f"moe_layers: {part.strip()!r} is not a layer or a range; expected text such as 3-60 or 1,3,5-7"
            )
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high >= 1 << 16:
            raise InvalidInput(f"moe_layers: range {part.strip()!r} is empty or above {1 << 16}")
        layers.extend(range(low, high + 1))
    checked_moe_layers(layers)
    return layers
