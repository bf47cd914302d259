"""What moving experts took: bytes, seconds, memory; of one change of placement, and of the waves of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MovementReport:
    """One change of placement. Bytes are of this EDP shard; every shard moves the same experts.

    Attributes
    ----------
    version
        Of the placement now in force.
    planned_bytes, moved_bytes
        The least that must travel between EP ranks, and what was handed to the sockets, counted message by message.
    sent_bytes, rank_planned_bytes
        What this rank sent, and was planned to send.
    rounds, chunks
        Of the transfers; every chunk is staged at once, a round is one expert a rank.
    seconds
        Of the slowest rank of the job, agreement included.
    peak_extra_bytes
        The largest staging buffer of any rank of the job.
    moved_experts
        [L], experts of each MoE layer that changed EP rank.
    """

    version: int
    planned_bytes: int
    moved_bytes: int
    rank_planned_bytes: int
    sent_bytes: int
    rounds: int
    chunks: int
    seconds: float
    peak_extra_bytes: int
    moved_experts: tuple[int, ...]

    @property
    def num_moved(self) -> int:
        """Experts that changed EP rank, over all layers."""
        return sum(self.moved_experts)

    def to_json(self) -> dict[str, Any]:
        """For metrics files."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "moved_experts": list(self.moved_experts)
        }


@dataclass(frozen=True)
class WaveReport:
    """One wave of a step.

    Attributes
    ----------
    name
        "first" (placement of the window totals), "late" (what co-refinement changed) or "all" (no overlap).
    exposed_s, overlapped_s
        Seconds for which the step waited for this wave only, and seconds hidden behind packing.
    predicted_gain, predicted_gain_s
        What the wave takes off the first component of the score, given the plan's layout; in seconds None while
        nobody knows how long a unit of the score takes.
    """

    name: str
    movement: MovementReport
    exposed_s: float
    overlapped_s: float
    predicted_gain: float
    predicted_gain_s: float | None

    def to_json(self) -> dict[str, Any]:
        """For metrics files."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "movement"}
        return own | self.movement.to_json()


@dataclass(frozen=True)
class StepMovement:
    """Planning and movement of one step; equal on all ranks apart from ``sent_bytes`` of the waves.

    Attributes
    ----------
    place_s, pack_s
        Placement of the window totals; rows, layout and co-refinement (behind which the first wave moves).
    total_s
        From the sealed window to admission, on the rank that reports.
    dropped_moves
        Experts that co-refinement wanted to move and that were not worth the wait.
    """

    waves: tuple[WaveReport, ...]
    place_s: float
    pack_s: float
    total_s: float
    dropped_moves: int

    @property
    def planned_bytes(self) -> int:
        """Of one EDP shard, all waves."""
        return sum(wave.movement.planned_bytes for wave in self.waves)

    @property
    def moved_bytes(self) -> int:
        """Of one EDP shard, all waves."""
        return sum(wave.movement.moved_bytes for wave in self.waves)

    @property
    def num_moved(self) -> int:
        """Expert moves, all waves; an expert that moves twice counts twice."""
        return sum(wave.movement.num_moved for wave in self.waves)

    @property
    def exposed_s(self) -> float:
        """Seconds for which the step waited for moving experts."""
        return sum(wave.exposed_s for wave in self.waves)

    @property
    def overlapped_s(self) -> float:
        """Seconds of movement hidden behind packing."""
        return sum(wave.overlapped_s for wave in self.waves)

    @property
    def predicted_gain(self) -> float:
        """What moving takes off the first component of the score, given the plan's layout."""
        return sum(wave.predicted_gain for wave in self.waves)

    def to_json(self) -> dict[str, Any]:
        """For metrics files."""
        sums = ("planned_bytes", "moved_bytes", "num_moved", "exposed_s", "overlapped_s", "predicted_gain")
        own = {name: getattr(self, name) for name in (*self.__dataclass_fields__, *sums) if name != "waves"}
        return own | {"waves": [wave.to_json() for wave in self.waves]}
