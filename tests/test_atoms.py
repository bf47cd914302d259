"""Atoms: samples or groups with their sums, in an order that depends on content alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import Constraints, Window
from routepack_opt.errors import Infeasible, InvalidInput
from routepack_opt.models.atoms import AtomSet, build_atoms


def draw_window(rng: np.random.Generator) -> Window:
    num_samples = int(rng.integers(1, 20))
    return Window(
        rng.integers(1, 4, num_samples),  # many ties
        rng.integers(0, 2, (num_samples, 2, 3)),
        group_ids=rng.integers(0, 5, num_samples),
    )


def as_lists(atoms: AtomSet) -> list[list[object]]:
    demand = atoms.demand_of(np.arange(atoms.num_atoms))
    fields = (atoms.padded, atoms.tokens, atoms.squares, atoms.samples, demand)
    return [field.tolist() for field in fields]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_sums_of_members_whatever_the_grouping(seed: int) -> None:
    rng = np.random.default_rng(seed)
    window = draw_window(rng)
    for groups in (None, "cell", "rank"):
        rules = Constraints(groups=groups, pad_multiple=2)  # type: ignore[arg-type]
        atoms = build_atoms(window, rules, 1000)
        assert sorted(i for members in atoms.members for i in members) == list(range(window.num_samples))
        for k, members in enumerate(map(list, atoms.members)):
            lengths = window.lengths[members]
            assert atoms.padded[k] == (-(-lengths // 2) * 2).sum()
            assert (atoms.tokens[k], atoms.squares[k], atoms.samples[k]) == (
                lengths.sum(),
                (lengths**2).sum(),
                len(members),
            )
            np.testing.assert_array_equal(atoms.demand_of(k), window.demand[members].sum(axis=0))
            if groups == "rank":
                assert atoms.rank_groups is not None
                assert atoms.rank_groups[k] == window.group_ids[members[0]]
                assert atoms.pinned[k] == ((window.group_ids == atoms.rank_groups[k]).sum() > 1)
        assert atoms.demand.flags.c_contiguous
        if groups != "cell":
            assert atoms.demand is window.demand  # a sorted copy would double the memory of a plan
        if groups == "cell":
            assert atoms.num_atoms == len(set(window.group_ids.tolist()))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_arrival_is_forgotten(seed: int) -> None:
    rng = np.random.default_rng(seed)
    window = draw_window(rng)
    order = rng.permutation(window.num_samples)
    shuffled = Window(window.lengths[order], window.demand[order], group_ids=window.group_ids[order])
    for groups in (None, "cell", "rank"):
        rules = Constraints(groups=groups)  # type: ignore[arg-type]
        before, after = build_atoms(window, rules, 1000), build_atoms(shuffled, rules, 1000)
        assert as_lists(before) == as_lists(after)
        if before.rank_groups is not None and after.rank_groups is not None:
            np.testing.assert_array_equal(before.rank_groups, after.rank_groups)


def test_a_group_of_more_samples_than_a_cell_may_hold_is_named() -> None:
    window = Window([1] * 5, np.ones((5, 1, 2), dtype=int), group_ids=[8, 9, 9, 9, 8])
    with pytest.raises(Infeasible, match="group 9: holds 3 samples but a cell may hold 2; max_samples_per_cell = 3"):
        build_atoms(window, Constraints(groups="cell", max_samples_per_cell=2), 10)


def test_padding_counts_against_the_cap() -> None:
    window = Window([5, 9], np.ones((2, 1, 2), dtype=int))
    with pytest.raises(Infeasible, match=r"sample 1: length 16 \(padded to a multiple of 8\) exceeds the token cap 15"):
        build_atoms(window, Constraints(pad_multiple=8), 15)
    assert build_atoms(window, Constraints(pad_multiple=8), 16).padded.tolist() == [8, 16]


def test_sums_that_would_overflow_are_refused() -> None:
    with pytest.raises(InvalidInput, match="lengths: their squares"):
        build_atoms(Window([2**31 - 1] * 2, np.ones((2, 1, 2), dtype=int)), Constraints(), 2**40)
    heavy = Window([1, 1], np.full((2, 1, 2), 2**31 - 1), group_ids=[0, 0])
    with pytest.raises(InvalidInput, match="demand: an atomic group"):
        build_atoms(heavy, Constraints(groups="cell"), 10)
