"""A window with the settings all methods share, and what a method answers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.constraints import Constraints

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from routepack_opt.cost import CostModel
    from routepack_opt.plan import Plan
    from routepack_opt.topology import Topology
    from routepack_opt.window import Window

PLAIN = Constraints()  # what other packers know: a cap, no empty cell


@dataclass(frozen=True, eq=False)
class Case:
    """One window to plan, by every method alike.

    Attributes
    ----------
    name
        Shown in tables.
    token_cap
        C, most tokens of a cell.
    """

    name: str
    window: Window
    topology: Topology
    token_cap: int
    cost: CostModel

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the window, as JSON values."""
        return {
            "dp": self.topology.dp,
            "ep": self.topology.ep,
            "shards": [list(ranks) for ranks in self.topology.shards],
            "token_cap": self.token_cap,
            "cost": self.cost.to_json(),
        }

    def key(self, method: str, budget_s: float, seed: int) -> str:
        """Hex digest of all that decides a result on one machine: a record with this key need not be made again."""
        from routepack_opt import __version__

        parts = [self.name, self.window.sha256, self.settings, method, float(budget_s), int(seed), __version__]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, eq=False)
class Answer:
    """A layout with its placement.

    Attributes
    ----------
    cells
        ``cells[row][dp_rank]`` -> sample indices.
    logical_to_slot
        int64 [L, E].
    fixed_bound
        What the method proved for this placement and this number of rows alone.
    plan
        Where the method makes a whole plan: its own claims are verified instead of derived ones.
    proposals
        Moves scored on the way.
    """

    cells: Sequence[Sequence[Sequence[int]]]
    logical_to_slot: NDArray[np.int64]
    fixed_bound: float | None = None
    plan: Plan | None = None
    proposals: int = 0
    notes: tuple[str, ...] = ()
