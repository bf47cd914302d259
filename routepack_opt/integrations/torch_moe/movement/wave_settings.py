"""How the steps of a job are planned and their experts moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from routepack_opt.constraints import Constraints
from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.movement.materialise import DEFAULT_CHUNK_BYTES
from routepack_opt.models.late_moves import late_move_count

if TYPE_CHECKING:
    from routepack_opt.cost import CostModel


@dataclass(frozen=True)
class WaveSettings:
    """Of every step.

    Parameters
    ----------
    token_cap, cost, constraints, budget_s, budget_steps, device
        As in :func:`routepack_opt.plan_window`.
    overlap
        False: one wave, after the plan.
    planner
        "first": rank 0 plans and broadcasts. "every": all ranks plan the same and compare hashes (needs
        ``budget_steps`` and the window on every rank).
    late_moves
        Cap of the second wave: a share of all experts (float) or a count (int).
    seconds_per_cost_unit, seconds_per_expert
        What the late moves are weighed with: step time of a unit of the score, and time the step waits for one moved
        expert. None: measured, see :class:`~routepack_opt.integrations.torch_moe.movement.waves.PlacementWaves`; until
        both are known, every late change that lowers the score is kept.
    chunk_bytes, timeout_s
        Of :func:`~routepack_opt.integrations.torch_moe.movement.materialise.materialise`.
    plan_timeout_s
        The longest wait for a plan of another rank.
    """

    token_cap: int
    cost: CostModel | None = None
    constraints: Constraints = field(default_factory=Constraints)
    budget_s: float = 1.0
    budget_steps: int | None = None
    device: str = "auto"
    overlap: bool = True
    planner: Literal["first", "every"] = "first"
    late_moves: float | None = None
    seconds_per_cost_unit: float | None = None
    seconds_per_expert: float | None = None
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = 60.0
    plan_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Validate what :func:`routepack_opt.plan_window` does not see."""
        if self.planner not in ("first", "every"):
            raise InvalidInput(f"planner: {self.planner!r} is unknown; expected 'first' or 'every'")
        if self.planner == "every" and self.budget_steps is None:
            raise InvalidInput("planner: 'every' needs budget_steps; plans under a time budget differ between ranks")
        late_move_count(self.late_moves, 1)
        for name in ("seconds_per_cost_unit", "seconds_per_expert", "timeout_s", "plan_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidInput(f"{name}: {value!r} is not a number of seconds >= 0")
