"""The truncation bound on one attention stage, re-derived in whole numbers from a list of prices.

Units are what goes into a cell as a whole: samples, or atomic groups. v_1 >= v_2 >= ... are the costs of the
row-shards, each that of its costliest cell. The certificate gives a price to some padded lengths and a level k.

1. A unit's price is its own cost, or the listed price of its length where that is less. No cell's prices sum to more
   than k: checked by filling a knapsack over the cap (units above the cap stand alone). So a cell's price is at most
   min(its cost, k), and a row-shard of m cells carries at most m min(v, k).
2. If the units that cost at least u need more cells than the j - 1 largest row-shards have, then v_j >= u; u_j is the
   largest such u. Cells needed: padded tokens over the cap, one for each unit above half the cap, samples over the
   most of a cell, one for each unit above the cap.
3. v = min(v, k) + max(0, v - k). For weights c_g of the shards, with rho = min c_g / m_g:
   ``sum c_g v >= rho * (sum of prices) + min c_g * sum_j max(0, u_j - k)``.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import VerificationError
from routepack_opt.verify.facts import is_int, is_number
from routepack_opt.verify.knapsack import Item, TooLarge, heaviest_cell

if TYPE_CHECKING:
    from routepack_opt.verify.facts import Facts

_CLAIM = "certificates.layout"
_LARGEST_SUM = 1 << 62


@dataclass(frozen=True)
class Unit:
    """A sample or atomic group: padded tokens, samples, true tokens and sum of squared true lengths."""

    padded: int
    samples: int
    tokens: int
    squares: int


@dataclass(frozen=True)
class StageProof:
    """What one stage pays: ``work``, shared by the DP ranks of all shards, and ``excess``, paid by row-shards."""

    work: Fraction
    excess: Fraction


def cell_units(facts: Facts) -> list[Unit]:
    """What goes into a cell as a whole."""
    names = facts.group_per_cell
    if names is None:
        return [Unit(p, 1, t, t * t) for p, t in zip(facts.padded, facts.lengths, strict=True)]
    sums: dict[int, list[int]] = {}
    for name, padded, tokens in zip(names, facts.padded, facts.lengths, strict=True):
        entry = sums.setdefault(name, [0, 0, 0, 0])
        for field, value in enumerate((padded, 1, tokens, tokens * tokens)):
            entry[field] += value
    return [Unit(*entry) for entry in sums.values()]


def check_stage(facts: Facts, certificate: dict[str, Any]) -> tuple[int, StageProof]:
    """Check one entry of ``certificates.layout.stages``; the stage's number and what is proved of it."""
    stage, unit, most = certificate.get("stage"), certificate.get("unit"), certificate.get("max_cell")
    if not is_int(stage) or not 0 <= stage < len(facts.stages):
        raise VerificationError(_CLAIM, f"stage {stage!r} is not one of {len(facts.stages)}")
    where = f"stage {stage}"
    if not is_number(unit) or not unit > 0:
        raise VerificationError(_CLAIM, f"{where}: 'unit' is not a number > 0")
    if not is_int(most) or most < 0:
        raise VerificationError(_CLAIM, f"{where}: 'max_cell' is not an integer >= 0")
    units = cell_units(facts)
    listed = _read_prices(certificate.get("table"), {u.padded for u in units}, where)
    alpha, beta = facts.stages[stage]
    scale = Fraction(unit) * facts.cap**2
    costs = [(alpha * facts.cap * u.tokens + beta * u.squares) / scale for u in units]
    own = [math.floor(cost) for cost in costs]
    prices = [min(listed.get(u.padded, cost), cost) for u, cost in zip(units, own, strict=True)]
    if sum(prices) > _LARGEST_SUM:
        raise VerificationError(_CLAIM, f"{where}: prices sum to more than 2^62 units; use a larger unit")
    _check_level(facts, units, prices, most, where)
    excess = sum((max(Fraction(), u - most) for u in forced_costs(facts, units, costs)), Fraction())
    return stage, StageProof(sum(prices) * Fraction(unit), excess * Fraction(unit))


def _read_prices(table: Any, sizes: set[int], where: str) -> dict[int, int]:
    if not isinstance(table, list):
        raise VerificationError(_CLAIM, f"{where}: 'table' is not a list of [length, price]")
    prices: dict[int, int] = {}
    for index, entry in enumerate(table):
        if not isinstance(entry, list) or len(entry) != 2 or not all(map(is_int, entry)):
            raise VerificationError(_CLAIM, f"{where}: table[{index}] is not a pair of integers")
        size, price = entry
        if size in prices:
            raise VerificationError(_CLAIM, f"{where}: table[{index}]: length {size} appears twice")
        if size not in sizes:
            raise VerificationError(_CLAIM, f"{where}: table[{index}]: nothing has padded length {size}")
        if price < 0:
            raise VerificationError(_CLAIM, f"{where}: table[{index}]: price {price} is negative")
        prices[size] = price
    return prices


def _check_level(facts: Facts, units: list[Unit], prices: list[int], most: int, where: str) -> None:
    """No cell's prices sum to more than ``most``."""
    fitting: Counter[tuple[int, int, int]] = Counter()
    heaviest = 0
    for unit, price in zip(units, prices, strict=True):
        if unit.padded > facts.cap:
            heaviest = max(heaviest, price)
        else:
            fitting[unit.padded, unit.samples, price] += 1
    items = [Item(size, samples, price, count) for (size, samples, price), count in fitting.items()]
    try:
        heaviest = max(heaviest, heaviest_cell(items, facts.cap, facts.rules.max_samples_per_cell, most))
    except TooLarge:
        raise VerificationError(
            _CLAIM, f"{where}: max_cell cannot be re-checked: the table is too large for exact arithmetic"
        ) from None
    if heaviest > most:
        raise VerificationError(_CLAIM, f"{where}: max_cell says {most}, but a cell's prices can sum to {heaviest}")


def forced_costs(facts: Facts, units: list[Unit], costs: list[Fraction]) -> list[Fraction]:
    """u_1 >= u_2 >= ..., one for each row-shard that the costliest units reach."""
    largest_first = sorted((len(ranks) for ranks in facts.shards for _ in range(facts.num_rows)), reverse=True)
    room = [0, *accumulate(largest_first)][:-1]  # cells of the j - 1 largest row-shards
    forced: list[Fraction] = []
    tokens = samples = halves = alone = 0
    for unit, cost in sorted(zip(units, costs, strict=True), key=lambda pair: pair[1], reverse=True):
        if unit.padded > facts.cap:
            alone += 1
        else:
            tokens += unit.padded
            samples += unit.samples
            halves += 2 * unit.padded > facts.cap
        needed = max(-(-tokens // facts.cap), halves)
        if facts.rules.max_samples_per_cell is not None:
            needed = max(needed, -(-samples // facts.rules.max_samples_per_cell))
        while len(forced) < len(room) and needed + alone > room[len(forced)]:
            forced.append(cost)
    return forced
