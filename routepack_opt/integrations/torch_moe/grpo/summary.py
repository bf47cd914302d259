"""A run in a few numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from routepack_opt.errors import InvalidInput

_ENDS = 10  # steps at each end of a run that the summary averages


@dataclass(frozen=True)
class RunSummary:
    """A whole run, from its metrics.

    Attributes
    ----------
    steps
        Optimizer steps, those before a restart included.
    first_reward, last_reward
        Mean over the first and last ten steps (fewer in a shorter run).
    start_reward
        Of the first step: the policy after the warm start, before any reinforcement.
    moved_experts, moved_bytes, exposed_s, seconds
        Sums over all steps; bytes of one EDP shard, ``exposed_s`` the time steps waited for experts to move.
    placements_changed
        Steps in which at least one expert changed rank.
    predicted_gain
        Mean over steps.
    out
        Folder of the run.
    interrupted
        A Ctrl-C ended it early, with a checkpoint.
    """

    steps: int
    start_reward: float
    first_reward: float
    last_reward: float
    moved_experts: int
    moved_bytes: int
    placements_changed: int
    exposed_s: float
    predicted_gain: float
    seconds: float
    out: str
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def summarise(lines: list[dict[str, Any]], out: str) -> RunSummary:
    """What the metrics of a run say; at least one line."""
    if not lines:
        raise InvalidInput(f"{out}: no step was run; nothing to summarise")

    def mean(name: str, part: list[dict[str, Any]]) -> float:
        values = [float(line[name]) for line in part if line.get(name) is not None]
        return sum(values) / len(values) if values else 0.0

    def total(name: str) -> float:
        return sum(line.get(name) or 0 for line in lines)

    return RunSummary(
        steps=len(lines),
        start_reward=float(lines[0]["reward"]),
        first_reward=mean("reward", lines[:_ENDS]),
        last_reward=mean("reward", lines[-_ENDS:]),
        moved_experts=int(total("moved_experts")),
        moved_bytes=int(total("moved_bytes")),
        placements_changed=sum(line.get("moved_experts", 0) > 0 for line in lines),
        exposed_s=total("exposed_s"),
        predicted_gain=mean("predicted_gain", lines),
        seconds=total("seconds"),
        out=out,
    )
