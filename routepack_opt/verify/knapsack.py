"""Most weight a cell can hold: exact integer dynamic programming."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST_TABLE = 1 << 26
_MOST_WORK = 1 << 34


class TooLarge(Exception):
    """The table would not fit in memory or take minutes."""


@dataclass(frozen=True)
class Item:
    """``count`` interchangeable units of ``size`` padded tokens and ``samples`` samples, each of ``weight``."""

    size: int
    samples: int
    weight: int
    count: int


def heaviest_cell(items: list[Item], cap: int, max_samples: int | None, enough: int) -> int:
    """Upper bound on the weight of a cell; exact unless a cheap bound is already at most ``enough``.

    Parameters
    ----------
    items
        Sizes at least 1 and at most ``cap``; the sum of all weights stays below 2^62.
    cap
        Padded tokens a cell holds.
    max_samples
        Samples a cell holds, None without limit.
    enough
        The claim to be checked.

    Raises
    ------
    TooLarge
        When only an exact table would tell and it is too large to fill.
    """
    items = [item for item in items if item.weight]
    if not items:
        return 0
    step = math.gcd(*(item.size for item in items))
    room = cap // step  # every sum of sizes is a multiple of the step
    bounds = [
        sum(item.weight * item.count for item in items),
        max(item.weight * room * step // item.size for item in items),  # no token weighs more than the densest item's
    ]
    if max_samples is not None:
        bounds.append(max(item.weight * max_samples // item.samples for item in items))
    if min(bounds) <= enough:
        return min(bounds)
    scaled = [Item(item.size // step, item.samples, item.weight, item.count) for item in items]
    heaviest = _by_size(scaled, min(room, sum(item.size * item.count for item in scaled)))
    if max_samples is None or heaviest <= enough:
        return heaviest
    return _by_size_and_samples(scaled, room, max_samples)


def _bundles(item: Item, most: int) -> Iterator[int]:
    """Numbers of units (1, 2, 4, ... and a rest) whose partial sums give every count up to ``most``."""
    left = min(item.count, most)
    take = 1
    while left > 0:
        take = min(take, left)
        yield take
        left -= take
        take *= 2


def _by_size(items: list[Item], room: int) -> int:
    small = [item for item in items if 2 * item.size <= room]
    _refuse_large(room + 1, sum(item.count.bit_length() for item in small))
    best = np.zeros(room + 1, dtype=np.int64)  # best[s] = most weight in s size units
    for item in small:
        for units in _bundles(item, room // item.size):
            size, weight = units * item.size, units * item.weight
            np.maximum(best[size:], best[:-size] + weight, out=best[size:])
    heaviest = int(best[room])
    for item in items:  # of those above half the room at most one fits: no table pass needed
        if 2 * item.size > room:
            heaviest = max(heaviest, int(best[room - item.size]) + item.weight)
    return heaviest


def _by_size_and_samples(items: list[Item], room: int, max_samples: int) -> int:
    items = [item for item in items if item.samples <= max_samples]
    max_samples = min(max_samples, sum(item.samples * item.count for item in items))
    _refuse_large((room + 1) * (max_samples + 1), sum(item.count.bit_length() for item in items))
    best = np.zeros((max_samples + 1, room + 1), dtype=np.int64)
    for item in items:
        for units in _bundles(item, min(room // item.size, max_samples // item.samples)):
            size, samples, weight = units * item.size, units * item.samples, units * item.weight
            target = best[samples:, size:]
            np.maximum(target, best[:-samples, :-size] + weight, out=target)
    return int(best[-1, -1])


def _refuse_large(table: int, passes: int) -> None:
    if table > _LARGEST_TABLE or table * passes > _MOST_WORK:
        raise TooLarge
