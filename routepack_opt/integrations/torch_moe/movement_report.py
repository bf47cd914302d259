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
