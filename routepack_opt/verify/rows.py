"""The row count: an integer certificate that no layout has fewer rows.

``table`` gives every distinct padded length a weight such that no feasible cell weighs more than ``max_cell``; then
``cells = ceil(sum of weights / max_cell)`` cells at least, one more for each unit that stands alone above the cap.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import VerificationError
from routepack_opt.verify.facts import is_int
from routepack_opt.verify.knapsack import Item, TooLarge, heaviest_cell

if TYPE_CHECKING:
    from routepack_opt.verify.facts import Facts

KINDS = ("volume", "l2", "dff", "dual", "count", "solver")
_CLAIM = "certificates.rows"
_LARGEST_SUM = 1 << 62


def check_rows(plan: dict[str, Any], facts: Facts) -> list[str]:
    """Check certificates.rows, rows_lower_bound and rows_status."""
    certificate = plan["certificates"].get("rows")
    if not isinstance(certificate, dict):
        raise VerificationError(_CLAIM, "missing")
    kind = certificate.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise VerificationError(_CLAIM, f"kind {kind!r} is unknown; expected one of {', '.join(KINDS)}")
    solver = _named_solver(certificate)
    if kind == "solver" and solver is None:
        raise VerificationError(_CLAIM, "a solver's bound must carry its 'solver' and 'version'")
    if certificate.get("cap") != facts.cap or not is_int(certificate["cap"]):
        raise VerificationError(_CLAIM, f"cap says {certificate.get('cap')!r}, the plan's is {facts.cap}")
    proved = _rows_of(_proved_cells(certificate, kind, facts), facts)
    if _rows_of(certificate["cells"], facts) > plan["rows"]:
        raise VerificationError(_CLAIM, f"cells says {certificate['cells']}, refuted by the plan's {plan['rows']} rows")
    proved = max(proved, _rows_of_rank_groups(facts))
    return _check_status(plan, kind, proved, solver)


def _check_status(plan: dict[str, Any], kind: str, proved: int, solver: str | None) -> list[str]:
    rows, claimed, status = plan["rows"], plan["rows_lower_bound"], plan["rows_status"]
    if claimed > rows:
        raise VerificationError("rows_lower_bound", f"{claimed} is refuted by the plan, which has {rows} rows")
    if claimed > proved and solver is None:
        raise VerificationError("rows_lower_bound", f"says {claimed}, the certificate proves {proved}")
    if status == "certified" and not claimed == proved == rows:
        raise VerificationError("rows_status", f"certified, but {rows} rows stand against {proved} proved by integers")
    if status == "solver-proved" and solver is None:
        raise VerificationError("rows_status", "solver-proved, but certificates.rows names no solver and version")
    if status == "solver-proved" and claimed != rows:
        raise VerificationError("rows_status", f"solver-proved, but the lower bound is {claimed} of {rows} rows")
    if status == "best-known" and claimed == rows:
        raise VerificationError("rows_status", f"best-known, but the lower bound meets the {rows} rows")
    if status == "certified":
        return [f"rows: {rows}, certified smallest ({kind} certificate, re-checked in integers)"]
    if status == "solver-proved":
        return [f"rows: {rows}, smallest according to {solver} (not re-checked; integers prove {proved})"]
    by = f" according to {solver} (not re-checked)" if claimed > proved else ""
    return [f"rows: {rows} best known, at least {claimed}{by}"]


def _named_solver(certificate: dict[str, Any]) -> str | None:
    names = [certificate.get("solver"), certificate.get("version")]
    return " ".join(str(n) for n in names) if all(isinstance(n, str) and n for n in names) else None


def _units(facts: Facts) -> list[tuple[int, int]]:
    """(padded tokens, samples) of everything that goes into one cell as a whole."""
    if facts.group_per_cell is None:
        return [(tokens, 1) for tokens in facts.padded]
    tokens: Counter[int] = Counter()
    samples: Counter[int] = Counter()
    for group, padded in zip(facts.group_per_cell, facts.padded, strict=True):
        tokens[group] += padded
        samples[group] += 1
    return [(tokens[group], samples[group]) for group in tokens]


def _proved_cells(certificate: dict[str, Any], kind: str, facts: Facts) -> int:
    """Cells at least, by integers alone; checks the table, max_cell and cells."""
    units = _units(facts)
    fitting = Counter(unit for unit in units if unit[0] <= facts.cap)
    num_alone = len(units) - sum(fitting.values())
    cells = certificate.get("cells")
    if not is_int(cells) or cells < 0:
        raise VerificationError(_CLAIM, "'cells' is not an integer >= 0")
    if kind == "solver" and not certificate.get("table"):
        return num_alone  # nothing to re-check: the number rests on the named solver
    weights = _read_table(certificate.get("table"), {size for size, _ in fitting})
    most = certificate.get("max_cell")
    if not is_int(most) or most < 0:
        raise VerificationError(_CLAIM, "'max_cell' is not an integer >= 0")
    total = sum(weights[size] * count for (size, _), count in fitting.items())
    if total > _LARGEST_SUM:
        raise VerificationError(_CLAIM, f"weights sum to {total}, above 2^62; scale them down")
    _check_kind(kind, weights)
    items = [Item(size, samples, weights[size], count) for (size, samples), count in fitting.items()]
    try:
        heaviest = heaviest_cell(items, facts.cap, facts.rules.max_samples_per_cell, most)
    except TooLarge:
        raise VerificationError(
            _CLAIM, "max_cell cannot be re-checked: the table is too large for exact arithmetic"
        ) from None
    if heaviest > most:
        raise VerificationError(_CLAIM, f"max_cell says {most}, but a cell of cap {facts.cap} can weigh {heaviest}")
    proved = (-(-total // max(most, 1)) if total else 0) + num_alone  # most is 0 only where nothing has weight
    if cells != proved and not (kind == "solver" and cells > proved):
        raise VerificationError(_CLAIM, f"cells says {cells}, the weights give {proved}")
    return proved


def _read_table(table: Any, sizes: set[int]) -> dict[int, int]:
    if not isinstance(table, list):
        raise VerificationError(_CLAIM, "'table' is not a list of [length, weight]")
    weights: dict[int, int] = {}
    for index, entry in enumerate(table):
        if not isinstance(entry, list) or len(entry) != 2 or not all(map(is_int, entry)):
            raise VerificationError(_CLAIM, f"table[{index}] is not a pair of integers")
        size, weight = entry
        if size in weights:
            raise VerificationError(_CLAIM, f"table[{index}]: length {size} appears twice")
        if size not in sizes:
            raise VerificationError(_CLAIM, f"table[{index}]: no sample that must share cells has padded length {size}")
        if weight < 0:
            raise VerificationError(_CLAIM, f"table[{index}]: weight {weight} is negative")
        weights[size] = weight
    missing = sizes - weights.keys()
    if missing:
        raise VerificationError(_CLAIM, f"table gives no weight to padded length {min(missing)}")
    return weights


def _check_kind(kind: str, weights: dict[int, int]) -> None:
    """The two kinds whose name fixes the weights."""
    if kind == "volume" and any(size != weight for size, weight in weights.items()):
        raise VerificationError(_CLAIM, "kind 'volume' means weight = padded length")
    if kind == "count" and any(weight != 1 for weight in weights.values()):
        raise VerificationError(_CLAIM, "kind 'count' means weight 1 for every length")


def _rows_of(num_cells: int, facts: Facts) -> int:
    rows = max(-(-num_cells // facts.dp), facts.rules.min_rows, 1)
    return -(-rows // facts.rules.row_multiple) * facts.rules.row_multiple


def _rows_of_rank_groups(facts: Facts) -> int:
    """Rows at least because a group keeps to one DP rank, one cell of which runs in each row."""
    if facts.rules.groups != "rank" or facts.group is None:
        return 0
    tokens: Counter[int] = Counter()
    alone: Counter[int] = Counter()
    for group, padded in zip(facts.group, facts.padded, strict=True):
        if padded > facts.cap:
            alone[group] += 1
        else:
            tokens[group] += padded
    rows = max(-(-tokens[group] // facts.cap) + alone[group] for group in set(facts.group))
    return _rows_of(rows * facts.dp, facts)
