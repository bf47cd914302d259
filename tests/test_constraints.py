"""Constraints: defaults, validation, JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack_opt import Constraints
from routepack_opt.errors import InvalidInput


def test_defaults_constrain_nothing() -> None:
    rules = Constraints()
    assert rules == Constraints(1, 1, 1, None, False, None, "error", None)
    assert rules.group_numbers(np.array([1, 1]), 2) is None


@pytest.mark.parametrize("field", ["min_rows", "row_multiple", "pad_multiple", "max_samples_per_cell"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, float("nan")])
def test_counts_are_positive_integers(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"constraints\.{field}: .* is not a positive integer"):
        Constraints(**{field: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"equal_samples_per_rank": 1}, "equal_samples_per_rank: 1 is not a boolean"),
        ({"oversize": "drop"}, "oversize: 'drop' is unknown"),
        ({"max_moved": 1.5}, "max_moved: 1.5 is not a share"),
        ({"max_moved": -0.1}, "max_moved"),
        ({"max_moved": float("nan")}, "max_moved"),
        ({"max_moved": True}, "max_moved"),
        ({"groups": "prompt"}, "groups: 'prompt' is unknown"),
        ({"groups": [1.5]}, r"groups\[0\]"),
        ({"groups": [[1]]}, "groups"),
        ({"min_rows": None}, "min_rows"),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        Constraints(**change)
    assert "\n" not in str(caught.value)


def test_groups_in_every_spelling() -> None:
    ids = np.array([4, 4, 7])
    for groups in (True, "cell"):
        assert Constraints(groups=groups).groups == "cell"  # type: ignore[arg-type]
    assert Constraints(groups=False).groups is None  # type: ignore[arg-type]
    assert Constraints(groups=np.array([1, 2, 1])).groups == (1, 2, 1)  # type: ignore[arg-type]
    assert Constraints(groups="rank").group_numbers(ids, 3).tolist() == [4, 4, 7]  # type: ignore[union-attr]
    assert Constraints(groups=[5, 5, 6]).group_numbers(None, 3).tolist() == [5, 5, 6]  # type: ignore[arg-type,union-attr]
    with pytest.raises(InvalidInput, match="2 group numbers for 3 samples"):
        Constraints(groups=[5, 5]).group_numbers(ids, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="the window has no group_ids"):
        Constraints(groups="cell").group_numbers(None, 3)


@given(
    st.builds(
        Constraints,
        min_rows=st.integers(1, 9),
        row_multiple=st.integers(1, 9),
        pad_multiple=st.integers(1, 9),
        max_samples_per_cell=st.none() | st.integers(1, 9),
        equal_samples_per_rank=st.booleans(),
        groups=st.none() | st.sampled_from(["cell", "rank"]) | st.lists(st.integers(-(2**62), 2**62)),
        oversize=st.sampled_from(["error", "alone"]),
        max_moved=st.none() | st.floats(0, 1),
    )
)
def test_json_round_trip(rules: Constraints) -> None:
    again = Constraints.from_json(rules.to_json())
    assert again == rules
    assert hash(again) == hash(rules)


@pytest.mark.parametrize("value", [None, [], {"min_row": 1}, {"min_rows": "1"}])
def test_wrong_json_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="constraints"):
        Constraints.from_json(value)
