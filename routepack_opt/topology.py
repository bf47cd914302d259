"""Topology: data-parallel ranks, expert-parallel ranks and the EDP shards their tokens meet in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from routepack_opt.errors import TopologyError

_MAX_RANKS = 1 << 20  # every rank is an entry in lists and tables: a mistyped size must not fill the memory


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise TopologyError(f"{name}: {value!r} is not a positive integer")
    if value > _MAX_RANKS:
        raise TopologyError(f"{name}: {value} is above {_MAX_RANKS}, the most ranks a topology may have")
    return int(value)


@dataclass(frozen=True, init=False)
class Topology:
    """Where samples and experts can go.

    Parameters
    ----------
    dp
        D, data-parallel ranks (TP and CP inside a rank are invisible). Default ep x shards.
    ep
        P, expert-parallel ranks of one EDP shard.
    shards
        The count G (shard k owns DP ranks [k*m, (k+1)*m), m = dp / G), or the lists of DP ranks.
        Default 1, or max(1, dp // ep) when only ``dp`` is given.

    Raises
    ------
    TopologyError
        Sizes that do not fit; the message names them.
    """

    dp: int
    ep: int
    shards: tuple[tuple[int, ...], ...]

    def __init__(  # noqa: D107 - the class docstring describes the parameters
        self, dp: int | None = None, ep: int = 1, shards: int | Sequence[Sequence[int]] | None = None
    ) -> None:
        ep = _positive("ep", ep)
        if shards is None:
            shards = 1 if dp is None else max(1, _positive("dp", dp) // ep)
        if isinstance(shards, (int, np.integer)):
            count = _positive("shards", shards)
            dp = _positive("dp", ep * count if dp is None else dp)
            if dp % count:
                raise TopologyError(
                    f"shards: dp {dp} over {count} shards is {dp / count:g} DP ranks a shard; expected a divisor of dp"
                )
            size = dp // count
            lists = tuple(tuple(range(k * size, (k + 1) * size)) for k in range(count))
        else:
            lists = _rank_lists(shards)
            dp = sum(map(len, lists)) if dp is None else _positive("dp", dp)
            seen = sorted(rank for ranks in lists for rank in ranks)
            if len(seen) != dp or seen != list(range(dp)):  # the count first: a file may claim 10^12 ranks
                raise TopologyError(f"shards: the lists must hold each DP rank 0..{dp - 1} exactly once, found {seen}")
        object.__setattr__(self, "dp", dp)
        object.__setattr__(self, "ep", ep)
        object.__setattr__(self, "shards", lists)

    @classmethod
    def from_sizes(cls, world: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> Topology:
        """From parallel sizes in Megatron's rank order tp-cp-ep-dp-pp.

        A shard holds m = ep*etp / (tp*cp) consecutive DP ranks: an EDP shard is ep*etp consecutive ranks of a
        pipeline stage, a DP rank is tp*cp of them.

        Raises
        ------
        TopologyError
            When world is not a multiple of tp*cp*pp or etp*ep*pp, or m is not an integer.
        """
        sizes = {"world": world, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
        for name, value in sizes.items():
            _positive(name, value)
        if world % (tp * cp * pp):
            raise TopologyError(f"world: {world} is not a multiple of tp*cp*pp = {tp}*{cp}*{pp} = {tp * cp * pp}")
        if world % (etp * ep * pp):
            raise TopologyError(f"world: {world} is not a multiple of etp*ep*pp = {etp}*{ep}*{pp} = {etp * ep * pp}")
        if (ep * etp) % (tp * cp):
            raise TopologyError(
                f"ep*etp / (tp*cp) = {ep}*{etp} / ({tp}*{cp}) = {ep * etp / (tp * cp):g} DP ranks a shard"
                " is not an integer; raise ep or etp, or lower tp or cp"
            )
        return cls(dp=world // (tp * cp * pp), ep=ep, shards=world // (etp * ep * pp))

    @property
    def num_shards(self) -> int:
        """G."""
        return len(self.shards)

    @property
    def shard_of_rank(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 [D], the EDP shard of each DP rank."""
        result = np.empty(self.dp, dtype=np.int64)
        for shard, ranks in enumerate(self.shards):
            result[list(ranks)] = shard
        return result

    def experts_per_rank(self, num_experts: int) -> int:
        """H = E / P.

        Raises
        ------
        TopologyError
            When P does not divide E; names E, P and the next P that does.
        """
        if num_experts % self.ep:
            larger = next((p for p in range(self.ep + 1, num_experts + 1) if num_experts % p == 0), None)
            smaller = next(p for p in range(min(self.ep, num_experts), 0, -1) if num_experts % p == 0)
            hint = f"the next valid P is {larger}" if larger else f"the largest valid P is {smaller}"
            raise TopologyError(f"ep: E = {num_experts} experts do not divide over P = {self.ep} EP ranks; {hint}")
        return num_experts // self.ep


def _rank_lists(shards: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    if isinstance(shards, np.ndarray):
        shards = shards.tolist()
    if not isinstance(shards, Iterable) or isinstance(shards, (str, bytes)):
        raise TopologyError(f"shards: expected a count or lists of DP ranks, found {shards!r}")
    lists = []
    for index, ranks in enumerate(shards):
        if not isinstance(ranks, Iterable) or isinstance(ranks, (str, bytes)):
            raise TopologyError(f"shards[{index}]: expected a list of DP ranks, found {ranks!r}")
        row = tuple(ranks)
        if not row:
            raise TopologyError(f"shards[{index}]: holds no DP rank")
        if any(isinstance(r, bool) or not isinstance(r, (int, np.integer)) or r < 0 for r in row):
            raise TopologyError(f"shards[{index}]: {list(row)!r} are not DP rank numbers")
        lists.append(tuple(int(r) for r in row))
    if not lists:
        raise TopologyError("shards: holds no shard")
    return tuple(lists)
