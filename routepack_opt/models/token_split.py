"""Token split: what each copy of an expert serves. Evenly, or by the linear program that levels the ranks best."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def count_copies(slot_expert: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """int64 [L, E], slots that hold each expert."""
    copies = np.zeros((len(slot_expert), num_experts), dtype=np.int64)
    np.add.at(copies, (np.arange(len(slot_expert))[:, None], slot_expert), 1)
    return copies


def even_split(load: NDArray[np.int64], slot_expert: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 [L, S], the load of each slot when every copy of an expert takes the same share."""
    copies = count_copies(slot_expert, load.shape[1])
    share = load / np.maximum(copies, 1)
    return np.take_along_axis(share, slot_expert, axis=1)


def free_split(load: NDArray[np.int64], slot_expert: NDArray[np.int64], num_ranks: int) -> NDArray[np.float64]:
    """float64 [L, S], tokens of each slot that minimise the largest rank load for the given copies (a linear program).

    For every layer: minimise t with sum over an expert's slots = its load, and sum over a rank's slots <= t.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    num_layers, num_slots = slot_expert.shape
    num_experts = load.shape[1]
    slots = np.arange(num_slots)
    rank = slots // (num_slots // num_ranks)
    ones = np.ones(num_slots)
    per_rank = coo_array(
        (
            np.concatenate([ones, -np.ones(num_ranks)]),
            (
                np.concatenate([rank, np.arange(num_ranks)]),
                np.concatenate([slots, np.full(num_ranks, num_slots)]),
            ),
        ),
        shape=(num_ranks, num_slots + 1),
    ).tocsr()
    cost = np.zeros(num_slots + 1)
    cost[-1] = 1
    tokens = np.zeros((num_layers, num_slots))
    for layer in range(num_layers):
        scale = max(1.0, float(load[layer].max()))
        per_expert = coo_array((ones, (slot_expert[layer], slots)), shape=(num_experts, num_slots + 1)).tocsr()
        answer = linprog(
            cost, A_ub=per_rank, b_ub=np.zeros(num_ranks), A_eq=per_expert, b_eq=load[layer] / scale, method="highs-ds"
        )
        if answer.x is None:  # cannot happen: every expert has a slot
            raise RuntimeError(f"token split of layer {layer}: {answer.message}")
        tokens[layer] = answer.x[:-1] * scale
    return tokens


def whole_tokens(
    load: NDArray[np.int64], tokens: NDArray[np.float64], slot_expert: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64 [L, S], ``tokens`` rounded so that the slots of every expert add up to its load exactly.

    Each slot is rounded down, then an expert's slots with the largest remainders get one token more: no slot is off by
    a whole token.
    """
    result = np.floor(tokens + 1e-9).astype(np.int64)
    for layer in range(len(load)):
        missing = load[layer].copy()
        np.subtract.at(missing, slot_expert[layer], result[layer])
        rest = tokens[layer] - result[layer]
        order = np.lexsort((-rest, slot_expert[layer]))
        position = np.zeros(len(order), dtype=np.int64)
        starts = np.searchsorted(slot_expert[layer][order], np.arange(len(missing)))
        position[order] = np.arange(len(order)) - starts[slot_expert[layer][order]]
        result[layer] += position < missing[slot_expert[layer]]
    return result


def wrap_around(load: NDArray[np.int64], num_ranks: int, num_slots: int, level: float) -> NDArray[np.int64]:
    """int64 [S], copies for one layer cut so that a free split can fill every rank to ``level``.

    Rank after rank takes K - 1 small experts (the smallest that suffice) and tops itself up with a piece of the largest
    one left, as in bin packing with splittable items and K = S / P items a bin. What fits nowhere goes to open slots.
    """
    capacity = num_slots // num_ranks
    left = load.astype(np.float64)
    waiting = list(np.argsort(load, kind="stable"))
    table: list[list[int]] = []
    for _ in range(num_ranks):
        waiting.sort(key=lambda expert: (left[expert], expert))
        row: list[int] = []
        if waiting:
            largest, others = waiting[-1], waiting[:-1]
            width = min(capacity - 1, len(others))
            start = 0
            while start + width < len(others) and left[others[start : start + width]].sum() + left[largest] < level:
                start += 1
            room = level
            for expert in [*others[start : start + width], largest]:
                piece = min(room, left[expert])
                if room <= 0:
                    break
                row.append(int(expert))
                left[expert] -= piece
                room -= piece
                if left[expert] <= 1e-9 * level:
                    waiting.remove(expert)
        table.append(row)
    missing = [int(e) for e in waiting if not any(e in row for row in table)]
    for row in sorted(table, key=len):
        while len(row) < capacity and missing:
            row.append(missing.pop())
    for row in table:
        spare = (int(e) for e in np.argsort(-load, kind="stable") if e not in row)
        row.extend(next(spare) for _ in range(capacity - len(row)))
    if missing:  # every slot is taken: give way where an expert has more than one
        copies = np.bincount(np.concatenate(table), minlength=len(load))
        for row in table:
            for k, expert in enumerate(row):
                if missing and copies[expert] > 1:
                    copies[expert] -= 1
                    row[k] = missing.pop()
    return np.array(table, dtype=np.int64).reshape(-1)
