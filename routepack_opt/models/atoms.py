"""Atoms: the units a layout moves. A sample is one, or an atomic group of samples that shares a cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import Infeasible, InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.constraints import Constraints
    from routepack_opt.window import Window


_FINGERPRINT_ROWS = 32  # copied at a time


@dataclass(frozen=True)
class AtomSet:
    """n atoms of a window, in an order that depends on their content alone (see :func:`build_atoms`).

    Attributes
    ----------
    members
        Sample indices of each atom, ascending.
    padded, tokens, squares, samples
        int64 [n]: tokens the cap counts, true tokens, sum of squared true lengths, number of samples.
    demand, source
        int32 [n, L, E] in storage order, and int64 [n], the storage row of each atom. The window's own array is used
        as it lies: a sorted copy would double the memory of a plan.
    rank_groups
        int64 [n] when atoms with equal value must share a DP rank, else None.
    """

    members: tuple[tuple[int, ...], ...]
    padded: NDArray[np.int64]
    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]
    samples: NDArray[np.int64]
    demand: NDArray[np.int32]
    source: NDArray[np.int64]
    rank_groups: NDArray[np.int64] | None

    def demand_of(self, atoms: int | NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 [k, L, E], a copy of the demand of some atoms ([L, E] of one)."""
        return np.asarray(self.demand[self.source[atoms]])

    @property
    def num_atoms(self) -> int:
        """n."""
        return len(self.members)

    @property
    def pinned(self) -> NDArray[np.bool_]:
        """bool [n], atoms whose rank group holds more than themselves."""
        if self.rank_groups is None:
            return np.zeros(self.num_atoms, dtype=np.bool_)
        _, inverse, counts = np.unique(self.rank_groups, return_inverse=True, return_counts=True)
        return np.asarray(counts[inverse] > 1)


def padded_lengths(lengths: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    """Lengths rounded up to a multiple, as the cap counts them."""
    return -(-lengths // multiple) * multiple


def build_atoms(window: Window, constraints: Constraints, token_cap: int) -> AtomSet:
    """Group the samples of a window as its constraints ask.

    Atoms are sorted by length, then content, so that the order in which samples arrive changes nothing the solvers
    see: a shuffled window gets the same score.

    Raises
    ------
    Infeasible
        A sample or atomic group over the cap with ``oversize="error"``, or a group of more samples than a cell may
        hold: names it, its size and the limit that would do.
    InvalidInput
        Numbers too large to be summed exactly.
    """
    if float((window.lengths.astype(np.float64) ** 2).sum()) >= 2.0**62:
        raise InvalidInput("lengths: their squares sum to over 2^62; expected the tokens of each sample")
    padded = padded_lengths(window.lengths, constraints.pad_multiple)
    groups = constraints.group_numbers(window.group_ids, window.num_samples)
    in_cells = groups is not None and constraints.groups != "rank"
    if groups is not None and in_cells:
        names, inverse = np.unique(groups, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        starts = np.searchsorted(inverse[order], np.arange(names.size))
        members = tuple(tuple(part.tolist()) for part in np.split(order, starts[1:]))
        atoms = AtomSet(
            members,
            np.add.reduceat(padded[order], starts),
            np.add.reduceat(window.lengths[order], starts),
            np.add.reduceat(window.lengths[order] ** 2, starts),
            np.diff(np.append(starts, order.size)).astype(np.int64),
            _grouped_demand(window, order, starts),
            np.arange(starts.size),
            None,
        )
    else:
        names = None
        atoms = AtomSet(
            tuple((i,) for i in range(window.num_samples)),
            padded,
            window.lengths,
            window.lengths**2,
            np.ones(window.num_samples, dtype=np.int64),
            window.demand,
            np.arange(window.num_samples),
            groups,
        )
    _check_sizes(window, atoms, constraints, token_cap, names)
    return _sorted_by_content(atoms)


def _sorted_by_content(atoms: AtomSet) -> AtomSet:
    """Sort; atoms that agree in all that is compared are interchangeable, whatever their order."""
    sizes = (atoms.samples, atoms.squares, atoms.tokens, atoms.padded)  # lexsort: the last is compared first
    order = np.lexsort(sizes)
    same = np.ones(max(atoms.num_atoms - 1, 0), dtype=np.bool_)
    for values in sizes:
        same &= np.diff(values[order]) == 0
    if same.any():
        tied = order[np.append(same, False) | np.append(False, same)]
        content = np.zeros(atoms.num_atoms, dtype=np.int64)
        content[tied] = _fingerprints(atoms.demand, tied)
        groups = () if atoms.rank_groups is None else (atoms.rank_groups,)
        order = np.lexsort((*groups, content, *sizes))
    return AtomSet(
        tuple(atoms.members[i] for i in order.tolist()),
        atoms.padded[order],
        atoms.tokens[order],
        atoms.squares[order],
        atoms.samples[order],
        atoms.demand,
        order,
        None if atoms.rank_groups is None else atoms.rank_groups[order],
    )


def _fingerprints(demand: NDArray[np.int32], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [k], one number for some rows of demand [n, L, E]: a fixed random projection modulo 2^64."""
    flat = demand.reshape(demand.shape[0], -1)
    z = np.arange(1, flat.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the mixer of SplitMix64
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    weights = ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)
    result = np.empty(rows.size, dtype=np.int64)
    for start in range(0, rows.size, _FINGERPRINT_ROWS):
        some = flat[rows[start : start + _FINGERPRINT_ROWS]]
        result[start : start + some.shape[0]] = np.einsum("ij,j->i", some, weights, dtype=np.int64, casting="safe")
    return result


def _grouped_demand(window: Window, order: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int32]:
    sums = np.add.reduceat(window.demand[order], starts, axis=0, dtype=np.int64)
    if int(sums.max()) > np.iinfo(np.int32).max:
        raise InvalidInput("demand: an atomic group holds more than 2^31 - 1 assignments to one expert of a layer")
    return sums.astype(np.int32)


def _check_sizes(
    window: Window,
    atoms: AtomSet,
    constraints: Constraints,
    token_cap: int,
    names: NDArray[np.int64] | None,
) -> None:
    over = np.flatnonzero(atoms.padded > token_cap)
    if over.size and constraints.oversize == "error":
        first = int(over[0])
        need = int(atoms.padded.max())
        size = int(atoms.padded[first])
        padding = f" (padded to a multiple of {constraints.pad_multiple})" if constraints.pad_multiple > 1 else ""
        if names is None:
            name = f"sample {first}" + (f" ({window.sample_ids[first]})" if window.sample_ids else "")
        else:
            name = f"group {int(names[first])} (samples {', '.join(map(str, atoms.members[first][:8]))})"
        more = f", {over.size - 1} more like it" if over.size > 1 else ""
        raise Infeasible(
            f"{name}: length {size}{padding} exceeds the token cap {token_cap}{more};"
            f" a cap of {need} would do, or oversize='alone'"
        )
    limit = constraints.max_samples_per_cell
    if limit is not None and int(atoms.samples.max()) > limit:
        first = int(np.argmax(atoms.samples))
        name = f"group {int(names[first])}" if names is not None else f"sample {first}"
        raise Infeasible(
            f"{name}: holds {int(atoms.samples[first])} samples but a cell may hold {limit};"
            f" max_samples_per_cell = {int(atoms.samples.max())} would do"
        )
