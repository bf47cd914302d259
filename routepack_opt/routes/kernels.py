"""Compiled counting of route ids, with every per-id check fused into the one pass over the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)
ROWS_PER_BLOCK = 64  # rows read again for every layer: 64 rows of 58 layers x 8 ids of a byte are 29 KB, inside L1/L2


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def count_rows(
    ids: NDArray[Any],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    dump_layers: int,
    top_k: int,
    layers: NDArray[np.int64],
    limit: np.uint64,
    has_missing: bool,
    missing: np.uint64,
    counts: NDArray[np.int32],
    missing_rows: NDArray[np.int64],
    duplicate_rows: NDArray[np.int64],
    first_duplicate: NDArray[np.int64],
    stamps: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Count ids [R * dump_layers * top_k] (unsigned, read-only, C order) of samples s = rows [starts[s], stops[s]).

    ``layers`` picks the dump layers to count. A row whose top_k ids all equal ``missing`` counts nothing. ``counts``
    [n, len(layers), E] and the three [n, len(layers)] tallies are added to; ``first_duplicate`` starts at -1.
    ``stamps`` [E] (zeros) remembers the last row that used an expert, which finds duplicates at one load and one store
    an id. Returns (sample, row, layer position) of the first bad row, or (-1, -1, -1).
    """
    stamp = np.int64(0)
    for s in range(starts.size):
        for block in range(starts[s], stops[s], ROWS_PER_BLOCK):
            end = min(block + ROWS_PER_BLOCK, stops[s])
            for j in range(layers.size):
                load = counts[s, j]
                for row in range(block, end):
                    first = (row * dump_layers + layers[j]) * top_k
                    stamp += 1
                    duplicate = False
                    for k in range(first, first + top_k):
                        expert = ids[k]
                        if np.uint64(expert) >= limit:
                            all_missing = has_missing
                            for q in range(first, first + top_k):
                                all_missing = all_missing and np.uint64(ids[q]) == missing
                            if not all_missing:
                                return s, row, j
                            missing_rows[s, j] += 1
                            break
                        load[expert] += 1
                        duplicate |= stamps[expert] == stamp
                        stamps[expert] = stamp
                    if duplicate:
                        if duplicate_rows[s, j] == 0:
                            first_duplicate[s, j] = row - starts[s]
                        duplicate_rows[s, j] += 1
    return -1, -1, -1


def warmup() -> None:
    """Compile (or load from the cache) the kernel for every id width."""
    for dtype in UNSIGNED:
        ids = np.zeros(2, dtype=dtype)
        ids.flags.writeable = False
        bounds = np.array([0, 1], dtype=np.int64)
        tally = np.zeros((1, 1), dtype=np.int64)
        counts = np.zeros((1, 1, 2), dtype=np.int32)
        one = np.uint64(2)
        count_rows(
            ids, bounds[:1], bounds[1:], 1, 2, bounds[:1], one, False, one, counts,
            tally, tally.copy(), tally.copy(), np.zeros(2, dtype=np.int64),
        )  # fmt: skip
