"""What is decided by one rank, or by every rank alike, reaches all ranks: as bytes with a hash, never unpickled.

A failure to decide is shared too, so that no rank waits in vain.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from routepack_opt.errors import RoutePackError
from routepack_opt.integrations.torch_moe.movement.agreement import (
    PlacementDisagreement,
    broadcast_bytes,
    gather_records,
)
from routepack_opt.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh

_WHY = 200  # bytes of a reason in a record


class PlanningFailed(RoutePackError):
    """A rank that plans could not; the message says why. The placement in force is whole."""


@dataclass(frozen=True)
class Decision:
    """What the planning rank knows once the layout stands.

    Attributes
    ----------
    gains
        Score units that the first and the late wave save.
    dropped
        Experts that co-refinement wanted to move and that stay.
    """

    plan: Plan
    pack_s: float
    gains: tuple[float, float]
    dropped: int

    def to_bytes(self) -> bytes:
        """JSON text."""
        value = {"plan": self.plan.to_json(), "pack_s": self.pack_s, "gains": self.gains, "dropped": self.dropped}
        return json.dumps(value, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Decision:
        """Inverse of :meth:`to_bytes`."""
        value = json.loads(payload)
        first, late = map(float, value["gains"])
        return cls(Plan.from_json(value["plan"]), float(value["pack_s"]), (first, late), int(value["dropped"]))

    @staticmethod
    def without_times(payload: bytes) -> bytes:
        """What ranks that plan alike must agree on: everything but the seconds."""
        value = json.loads(payload)
        del value["pack_s"], value["plan"]["timings"]
        return json.dumps(value).encode()


class Background:
    """A plan made in a thread of its own; :meth:`result` waits for it and re-raises its error."""

    def __init__(self, make: Callable[[], Plan]) -> None:
        """Start at once."""
        self.seconds = 0.0
        self._made: list[Plan | BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], Plan]) -> None:
        start = time.perf_counter()
        try:
            self._made.append(make())
        except BaseException as error:
            self._made.append(error)
        self.seconds = time.perf_counter() - start

    def result(self) -> Plan:
        """The plan, once it is there."""
        self._thread.join()
        made = self._made[0]
        if isinstance(made, BaseException):
            raise made
        return made


def share(
    make: Callable[[], bytes],
    mesh: ParallelMesh,
    *,
    every: bool,
    key: Callable[[bytes], bytes],
    timeout_s: float,
    what: str,
) -> bytes:
    """What ``make`` returns on rank 0, on every rank.

    Parameters
    ----------
    every
        All ranks make it themselves; ``key`` of it, compared by hash, must be the same on all.

    Raises
    ------
    PlanningFailed
        On the other ranks, when it could not be made; the rank itself raises its own error.
    PlacementDisagreement
        The ranks made different things.
    """
    payload, error = b"", None
    if every or mesh.rank == 0:
        try:
            payload = make()
        except Exception as failure:
            error = failure
    why = " ".join(str(error).splitlines()).encode(errors="replace")[:_WHY]
    if every:
        record = bytes([error is None]) + hashlib.sha256(b"" if error else key(payload)).digest() + why.ljust(_WHY)
        records = gather_records(record, mesh, timeout_s=timeout_s, doing=f"comparing {what}")
    else:
        sent = (b"-" + why if error else b"+" + payload) if mesh.rank == 0 else None
        answer = broadcast_bytes(sent, mesh, source=0, timeout_s=timeout_s, doing=f"sharing {what}")
        payload = answer[1:]
        records = [bytes([answer[:1] == b"+"]) + bytes(32) + payload[:_WHY]]
    if error is not None:
        raise error
    for rank, record in enumerate(records):
        if not record[0]:
            raise PlanningFailed(f"rank {rank} could not make {what}: {record[33:].decode(errors='replace').strip()}")
        if record[1:33] != records[0][1:33]:
            raise PlacementDisagreement(f"ranks 0 and {rank} made different versions of {what}")
    return payload
