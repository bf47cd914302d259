"""Constraints: what a framework demands of a layout beyond the token cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.window import integer_array, positive_int

if TYPE_CHECKING:
    from collections.abc import Sequence


_MAX_SIZE = 2**31 - 1  # as for lengths: rounded-up lengths still sum in 64 bits


@dataclass(frozen=True)
class Constraints:
    """Side constraints of a plan; stored in plan.json and re-checked by verify.

    Parameters
    ----------
    min_rows
        Least number of rows (pipeline depth).
    row_multiple
        The number of rows is a multiple of this.
    pad_multiple
        The token cap counts each length rounded up to this multiple; cost counts true lengths.
    max_samples_per_cell
        Most samples in a cell.
    equal_samples_per_rank
        Every DP rank gets the same number of samples over all rows.
    groups
        Atomic sample groups: None, "cell" (True) or "rank" (samples of one ``window.group_ids`` value share a cell or
        a DP rank), or N group numbers (each kept in one cell).
    oversize
        "error" refuses a sample longer than the cap, "alone" gives it a cell of its own.
    max_moved
        Largest share (0..1) of experts whose EP rank may differ from the previous placement.
    """

    min_rows: int = 1
    row_multiple: int = 1
    pad_multiple: int = 1
    max_samples_per_cell: int | None = None
    equal_samples_per_rank: bool = False
    groups: Literal["cell", "rank"] | tuple[int, ...] | None = None
    oversize: Literal["error", "alone"] = "error"
    max_moved: float | None = None

    def __post_init__(self) -> None:
        """Validate every field."""
        for name in ("min_rows", "row_multiple", "pad_multiple", "max_samples_per_cell"):
            value = getattr(self, name)
            if value is None and name == "max_samples_per_cell":
                continue
            object.__setattr__(self, name, positive_int(f"constraints.{name}", value, high=_MAX_SIZE))
        if not isinstance(self.equal_samples_per_rank, (bool, np.bool_)):
            raise InvalidInput(f"constraints.equal_samples_per_rank: {self.equal_samples_per_rank!r} is not a boolean")
        if not isinstance(self.oversize, str) or self.oversize not in ("error", "alone"):
            raise InvalidInput(f"constraints.oversize: {self.oversize!r} is unknown; expected 'error' or 'alone'")
        if self.max_moved is not None:
            value = self.max_moved
            is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= 1:
                raise InvalidInput(f"constraints.max_moved: {value!r} is not a share between 0 and 1")
            object.__setattr__(self, "max_moved", float(value))
        object.__setattr__(self, "groups", _normalise_groups(self.groups))

    def group_numbers(self, window_group_ids: Any, num_samples: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """int64 [N] group of each sample, or None when no group is atomic."""
        if self.groups is None:
            return None
        if isinstance(self.groups, tuple):
            if len(self.groups) != num_samples:
                raise InvalidInput(f"constraints.groups: {len(self.groups)} group numbers for {num_samples} samples")
            return np.asarray(self.groups, dtype=np.int64)
        if window_group_ids is None:
            raise InvalidInput("constraints.groups: the window has no group_ids; store them or pass N group numbers")
        return np.asarray(window_group_ids, dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        """The ``constraints`` object of plan.json."""
        return {
            "min_rows": self.min_rows,
            "row_multiple": self.row_multiple,
            "pad_multiple": self.pad_multiple,
            "max_samples_per_cell": self.max_samples_per_cell,
            "equal_samples_per_rank": bool(self.equal_samples_per_rank),
            "groups": list(self.groups) if isinstance(self.groups, tuple) else self.groups,
            "oversize": self.oversize,
            "max_moved": self.max_moved,
        }

    @classmethod
    def from_json(cls, value: Any) -> Constraints:
        """Inverse of :meth:`to_json`; unknown keys are refused."""
        if not isinstance(value, dict):
            raise InvalidInput(f"constraints: expected an object, found {type(value).__name__}")
        unknown = set(value) - set(cls.__dataclass_fields__)
        if unknown:
            raise InvalidInput(f"constraints: unknown key {sorted(unknown)[0]!r}")
        return cls(**value)


def _normalise_groups(groups: Any) -> Any:
    if groups is None or (isinstance(groups, (bool, np.bool_)) and not groups):
        return None
    if isinstance(groups, (bool, np.bool_)):
        return "cell"
    if isinstance(groups, str):
        if groups not in ("cell", "rank"):
            raise InvalidInput(f"constraints.groups: {groups!r} is unknown; expected 'cell', 'rank' or N group numbers")
        return groups
    numbers: Sequence[int] = integer_array(groups, "constraints.groups", 1, low=-(2**62), high=2**62).tolist()
    return tuple(numbers)
