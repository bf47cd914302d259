"""Rank balancing with copies: every item has one or more copies, each carrying an even share of its weight.

Knows arrays only. ``slot_item[l, p, k]`` is the item in slot k of rank p of instance l; no rank holds two copies of one
item. The search chooses the numbers of copies and the ranks together. Loads are float64: callers re-score exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from routepack_opt.solvers.local_search import run_in_threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAIR_WINDOW = 16
_LESS = 1.0 - 1e-12


@njit(cache=True, nogil=True)
def _worst(rank_load):  # type: ignore[no-untyped-def]
    full = 0
    for rank in range(1, len(rank_load)):
        if rank_load[rank] > rank_load[full]:
            full = rank
    return full


@njit(cache=True, nogil=True)
def _put(weight, slots, held, copies, rank_load, rank, k, new):  # type: ignore[no-untyped-def]
    """Slot k of ``rank`` changes its item to ``new``; the shares of both items are re-cut over their copies."""
    old = slots[rank, k]
    for item, change in ((old, -1), (new, 1)):
        before = weight[item] / copies[item] if copies[item] > 0 else 0.0
        copies[item] += change
        after = weight[item] / copies[item] if copies[item] > 0 else 0.0
        for p in range(len(rank_load)):
            if held[p, item]:
                rank_load[p] += after - before
        if change < 0:
            held[rank, item] = False
            rank_load[rank] -= after
        else:
            held[rank, item] = True
            rank_load[rank] += after
    slots[rank, k] = new


@njit(cache=True, nogil=True)
def _swap(weight, slots, held, copies, rank_load, a, i, b, j):  # type: ignore[no-untyped-def]
    x, y = slots[a, i], slots[b, j]
    shift = weight[x] / copies[x] - weight[y] / copies[y]
    held[a, x] = held[b, y] = False
    held[a, y] = held[b, x] = True
    slots[a, i], slots[b, j] = y, x
    rank_load[a] -= shift
    rank_load[b] += shift


@njit(cache=True, nogil=True)
def _recut_value(weight, held, copies, rank_load, rank, old, new, limit):  # type: ignore[no-untyped-def]
    """Largest load of the ranks touched when ``rank`` changes ``old`` for ``new``; inf above ``limit``."""
    share_old = weight[old] / copies[old]
    more = weight[old] / (copies[old] - 1) - share_old
    share_new = weight[new] / (copies[new] + 1)
    less = weight[new] / copies[new] - share_new
    value = rank_load[rank] - share_old + share_new
    if value >= limit:
        return np.inf
    for p in range(len(rank_load)):
        if p != rank:
            load = rank_load[p]
            if held[p, old]:
                load += more
            if held[p, new]:
                load -= less
                value = max(value, load)
            elif held[p, old]:
                value = max(value, load)
            if value >= limit:
                return np.inf
    return value


@njit(cache=True, nogil=True)
def _descend(weight, slots, held, copies, rank_load, stop, share):  # type: ignore[no-untyped-def]
    """Lower the fullest rank by one swap, one re-cut or one swap of two for two, while any of them helps."""
    num_ranks, capacity = slots.shape
    num_items = len(weight)
    window = min(capacity, PAIR_WINDOW)
    while True:
        full = _worst(rank_load)
        top = rank_load[full]
        if top <= stop:
            return top
        for item in range(num_items):
            share[item] = weight[item] / copies[item]
        best, other, best_i, best_j = top * _LESS, -1, 0, 0
        for rank in range(num_ranks):
            if 0.5 * (top + rank_load[rank]) >= best:
                continue
            for i in range(capacity):
                x = slots[full, i]
                if held[rank, x]:
                    continue
                for j in range(capacity):
                    y = slots[rank, j]
                    shift = share[x] - share[y]
                    if shift > 0 and max(top - shift, rank_load[rank] + shift) < best and not held[full, y]:
                        best = max(top - shift, rank_load[rank] + shift)
                        other, best_i, best_j = rank, i, j
        if other >= 0:
            _swap(weight, slots, held, copies, rank_load, full, best_i, other, best_j)
            continue
        new = -1
        for i in range(capacity):
            x = slots[full, i]
            if copies[x] > 1:  # a copy of x gives way to another item
                for y in range(num_items):
                    if not held[full, y]:
                        value = _recut_value(weight, held, copies, rank_load, full, x, y, best)
                        if value < best:
                            best, other, best_i, new = value, full, i, y
            for rank in range(num_ranks):  # or x gets one more copy elsewhere
                if held[rank, x]:
                    continue
                for j in range(capacity):
                    if copies[slots[rank, j]] > 1:
                        value = _recut_value(weight, held, copies, rank_load, rank, slots[rank, j], x, best)
                        if value < best:
                            best, other, best_i, new = value, rank, j, x
        if other >= 0:
            _put(weight, slots, held, copies, rank_load, other, best_i, new)
            continue
        i2, j2 = 0, 0
        for rank in range(num_ranks):
            if 0.5 * (top + rank_load[rank]) >= best:
                continue
            for i in range(1, window):
                if held[rank, slots[full, i]]:
                    continue
                for k in range(i):
                    if held[rank, slots[full, k]]:
                        continue
                    out = share[slots[full, i]] + share[slots[full, k]]
                    for j in range(1, window):
                        for m in range(j):
                            y, z = slots[rank, j], slots[rank, m]
                            shift = out - share[y] - share[z]
                            if (
                                shift > 0
                                and max(top - shift, rank_load[rank] + shift) < best
                                and not held[full, y]
                                and not held[full, z]
                            ):
                                best = max(top - shift, rank_load[rank] + shift)
                                other, best_i, i2, best_j, j2 = rank, i, k, j, m
        if other < 0:
            return top
        _swap(weight, slots, held, copies, rank_load, full, best_i, other, best_j)
        _swap(weight, slots, held, copies, rank_load, full, i2, other, j2)


@njit(cache=True, nogil=True)
def _seed(weight, slots, held, copies, rank_load):  # type: ignore[no-untyped-def]
    """Spare slots to the largest shares, then largest share first to the emptiest rank that lacks the item."""
    num_ranks, capacity = slots.shape
    num_items = len(weight)
    for item in range(num_items):
        copies[item] = 1
    for _ in range(num_ranks * capacity - num_items):
        largest = -1
        for item in range(num_items):
            if copies[item] < num_ranks and (
                largest < 0 or weight[item] * copies[largest] > weight[largest] * copies[item]
            ):
                largest = item
        copies[largest] += 1
    for rank in range(num_ranks):
        rank_load[rank] = 0.0
        for item in range(num_items):
            held[rank, item] = False
    used = np.zeros(num_ranks, np.int64)
    doubled = False
    for item in np.argsort(-weight / copies, kind="mergesort"):
        share = weight[item] / copies[item]
        for _ in range(copies[item]):
            best = -1
            for allow_double in range(2):
                for rank in range(num_ranks):
                    open_here = used[rank] < capacity and (allow_double == 1 or not held[rank, item])
                    if open_here and (best < 0 or rank_load[rank] < rank_load[best]):
                        best = rank
                if best >= 0:
                    break
            doubled |= held[best, item]
            slots[best, used[best]] = item
            used[best] += 1
            held[best, item] = True
            rank_load[best] += share
    while doubled:  # swap one of two equal copies for an item of a rank that lacks it
        doubled = False
        for rank in range(num_ranks):
            for i in range(capacity):
                x = slots[rank, i]
                twice = False
                for k in range(i):
                    twice |= slots[rank, k] == x
                if not twice:
                    continue
                doubled = True
                done = False
                for p in range(num_ranks):
                    if held[p, x] or done:
                        continue
                    for j in range(capacity):
                        y = slots[p, j]
                        if not held[rank, y]:
                            _swap(weight, slots, held, copies, rank_load, rank, i, p, j)
                            held[rank, x] = True
                            done = True
                            break


@njit(cache=True, nogil=True)
def _save(slots, copies, rank_load, to_slots, to_copies, to_load):  # type: ignore[no-untyped-def]
    for item in range(len(copies)):
        to_copies[item] = copies[item]
    for rank in range(len(rank_load)):
        to_load[rank] = rank_load[rank]
        for k in range(slots.shape[1]):
            to_slots[rank, k] = slots[rank, k]


@njit(cache=True, nogil=True)
def replicate_instances(weight, chosen, stop, kicks, seed, slot_item):  # type: ignore[no-untyped-def]
    """Seed, descend and kick the instances ``chosen``; fills ``slot_item`` [L, P, K]."""
    num_ranks, capacity = slot_item.shape[1], slot_item.shape[2]
    num_items = weight.shape[1]
    slots = np.empty((num_ranks, capacity), np.int64)
    copies = np.empty(num_items, np.int64)
    rank_load = np.empty(num_ranks, np.float64)
    best_slots = np.empty((num_ranks, capacity), np.int64)
    best_copies = np.empty(num_items, np.int64)
    best_load = np.empty(num_ranks, np.float64)
    held = np.empty((num_ranks, num_items), np.bool_)
    share = np.empty(num_items, np.float64)
    for inst in chosen:
        w = weight[inst]
        _seed(w, slots, held, copies, rank_load)
        best = _descend(w, slots, held, copies, rank_load, stop[inst], share)
        _save(slots, copies, rank_load, best_slots, best_copies, best_load)
        state = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(inst + 1) * np.uint64(0xD1B54A32D192ED03)
        state |= np.uint64(1)
        for _ in range(kicks):
            if best <= stop[inst]:
                break
            a = _worst(rank_load)
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            for _step in range(1 + (state >> np.uint64(33)) % np.uint64(3)):
                state ^= state << np.uint64(13)
                state ^= state >> np.uint64(7)
                state ^= state << np.uint64(17)
                b = np.int64((state >> np.uint64(11)) % np.uint64(num_ranks))
                i = np.int64((state >> np.uint64(30)) % np.uint64(capacity))
                j = np.int64((state >> np.uint64(45)) % np.uint64(capacity))
                x, y = slots[a, i], slots[b, j]
                if (state >> np.uint64(58)) % np.uint64(3) == 0:
                    if copies[y] > 1 and not held[b, x]:
                        _put(w, slots, held, copies, rank_load, b, j, x)
                elif a != b and not held[b, x] and not held[a, y]:
                    _swap(w, slots, held, copies, rank_load, a, i, b, j)
                a = b
            value = _descend(w, slots, held, copies, rank_load, stop[inst], share)
            if value <= best:
                best = value
                _save(slots, copies, rank_load, best_slots, best_copies, best_load)
            else:
                _save(best_slots, best_copies, best_load, slots, copies, rank_load)
                for rank in range(num_ranks):
                    for item in range(num_items):
                        held[rank, item] = False
                    for k in range(capacity):
                        held[rank, slots[rank, k]] = True
        for rank in range(num_ranks):
            for k in range(capacity):
                slot_item[inst, rank, k] = best_slots[rank, k]


def replicate(
    weight: NDArray[np.int64], num_ranks: int, num_slots: int, stop: NDArray[np.float64], *, kicks: int, seed: int = 0
) -> NDArray[np.int64]:
    """Copies and ranks of every item, int64 [L, P, S / P]; needs E <= S <= E * P.

    Parameters
    ----------
    weight
        int64 [L, E].
    stop
        float64 [L], no more kicks below this largest load.
    kicks
        Most random restarts an instance.
    """
    slot_item = np.zeros((len(weight), num_ranks, num_slots // num_ranks), dtype=np.int64)
    floats = weight.astype(np.float64)

    def work(part: NDArray[np.int64]) -> None:
        replicate_instances(floats, part, stop, kicks, seed % (1 << 62), slot_item)

    run_in_threads(work, np.arange(len(weight), dtype=np.int64))
    return slot_item


def warmup() -> None:
    """Compile every kernel of this module on tiny arrays."""
    replicate(np.array([[5, 4, 3, 1]], dtype=np.int64), 3, 6, np.zeros(1), kicks=1)
