"""Feasibility of the cells: every sample once, no empty cell, token cap, and the framework's side constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routepack_opt.errors import VerificationError

if TYPE_CHECKING:
    from routepack_opt.verify.facts import Facts

Cells = list[list[list[int]]]


def check_layout(plan: dict[str, Any], facts: Facts) -> list[str]:
    """Check rows, cells, constraints and token counts; returns the claims in words."""
    cells: Cells = plan["cells"]
    _check_shape(plan["rows"], cells, facts)
    _check_coverage(cells, len(facts.lengths))
    _check_groups(cells, facts)
    _check_cap(cells, facts)
    _check_counts(cells, facts)
    _check_tokens(plan, cells, facts)
    checked = [
        f"cells: {plan['rows']} rows x {facts.dp} DP ranks, every sample exactly once, no empty cell,"
        f" at most {facts.cap} tokens in a cell"
    ]
    if plan["constraints"]:
        checked.append("constraints: kept")
    checked.append(f"cell_tokens: agree, {plan['total_tokens']} tokens in all")
    return checked


def _check_shape(num_rows: int, cells: Cells, facts: Facts) -> None:
    if len(cells) != num_rows:
        raise VerificationError("rows", f"the plan says {num_rows}, its cells have {len(cells)}")
    for r, row in enumerate(cells):
        if len(row) != facts.dp:
            raise VerificationError("cells.shape", f"row {r} has {len(row)} cells, expected one for each of {facts.dp}")
        for d, cell in enumerate(row):
            if not cell:
                raise VerificationError("cells.empty", f"row {r}, DP rank {d} has no sample")
    if num_rows < facts.rules.min_rows:
        raise VerificationError("constraints.min_rows", f"{num_rows} rows, at least {facts.rules.min_rows} wanted")
    if num_rows % facts.rules.row_multiple:
        raise VerificationError(
            "constraints.row_multiple", f"{num_rows} rows are not a multiple of {facts.rules.row_multiple}"
        )


def _check_coverage(cells: Cells, num_samples: int) -> None:
    place: dict[int, tuple[int, int]] = {}
    for r, row in enumerate(cells):
        for d, cell in enumerate(row):
            for sample in cell:
                if not 0 <= sample < num_samples:
                    raise VerificationError(
                        "cells.coverage", f"row {r}, DP rank {d} holds sample {sample} of {num_samples}"
                    )
                if sample in place:
                    first = "row {}, DP rank {}".format(*place[sample])
                    raise VerificationError("cells.coverage", f"sample {sample} is in {first} and row {r}, DP rank {d}")
                place[sample] = (r, d)
    if len(place) != num_samples:
        missing = next(i for i in range(num_samples) if i not in place)
        raise VerificationError(
            "cells.coverage", f"sample {missing} is in no cell ({num_samples - len(place)} missing in all)"
        )


def _check_groups(cells: Cells, facts: Facts) -> None:
    if facts.group is None:
        return
    whole_rank = facts.rules.groups == "rank"
    home: dict[int, tuple[int, int]] = {}
    for r, row in enumerate(cells):
        for d, cell in enumerate(row):
            place = (0, d) if whole_rank else (r, d)
            for sample in cell:
                group = facts.group[sample]
                if home.setdefault(group, place) != place:
                    unit = "DP rank" if whole_rank else "cell"
                    raise VerificationError(
                        "constraints.groups", f"group {group} is split: sample {sample} is in another {unit}"
                    )


def _check_cap(cells: Cells, facts: Facts) -> None:
    units = facts.group_per_cell
    for r, row in enumerate(cells):
        for d, cell in enumerate(row):
            tokens = sum(facts.padded[i] for i in cell)
            if tokens <= facts.cap:
                continue
            alone = len(cell) == 1 if units is None else len({units[i] for i in cell}) == 1
            if facts.rules.oversize_alone and alone:
                continue
            padded = "" if facts.rules.pad_multiple == 1 else "padded "
            raise VerificationError("cells.cap", f"row {r}, DP rank {d} holds {tokens} {padded}tokens, cap {facts.cap}")


def _check_counts(cells: Cells, facts: Facts) -> None:
    most = facts.rules.max_samples_per_cell
    if most is not None:
        for r, row in enumerate(cells):
            for d, cell in enumerate(row):
                if len(cell) > most:
                    raise VerificationError(
                        "constraints.max_samples_per_cell",
                        f"row {r}, DP rank {d} holds {len(cell)} samples, at most {most} allowed",
                    )
    if facts.rules.equal_samples_per_rank:
        counts = [sum(len(row[d]) for row in cells) for d in range(facts.dp)]
        for d, count in enumerate(counts):
            if count != counts[0]:
                raise VerificationError(
                    "constraints.equal_samples_per_rank", f"DP rank 0 has {counts[0]} samples, DP rank {d} has {count}"
                )


def _check_tokens(plan: dict[str, Any], cells: Cells, facts: Facts) -> None:
    claimed = plan["cell_tokens"]
    if len(claimed) != len(cells) or any(len(row) != facts.dp for row in claimed):
        raise VerificationError("cell_tokens", f"expected {len(cells)} rows of {facts.dp} numbers")
    for r, row in enumerate(cells):
        for d, cell in enumerate(row):
            tokens = sum(facts.lengths[i] for i in cell)
            if claimed[r][d] != tokens:
                raise VerificationError("cell_tokens", f"row {r}, DP rank {d} says {claimed[r][d]}, has {tokens}")
    total = sum(facts.lengths)
    if plan["total_tokens"] != total:
        raise VerificationError("total_tokens", f"the plan says {plan['total_tokens']}, the window has {total}")
