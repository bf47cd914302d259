"""Plan: placement, layout and certificates of one optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.constraints import Constraints
from routepack_opt.cost import CostModel, Score
from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import read_json, write_json
from routepack_opt.topology import Topology

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from routepack_opt.window import Window

FORMAT = "routepack.plan/1"
ROWS_STATUS = ("certified", "solver-proved", "best-known")
_REQUIRED = (
    "format",
    "window",
    "constraints",
    "cell_tokens",
    "total_tokens",
    "topology",
    "token_cap",
    "cost",
    "rows",
    "rows_lower_bound",
    "rows_status",
    "cells",
    "logical_to_slot",
    "score",
    "seed_score",
    "bound",
    "gap",
    "certificates",
    "timings",
    "seed",
    "version",
)


@dataclass(frozen=True, eq=False)
class Plan:
    """What one optimizer step should run, and what is proved of it.

    Attributes
    ----------
    cells
        ``cells[row][dp_rank]`` -> sample indices, sorted.
    logical_to_slot
        int64 [L, E]; slot s of a layer lives on EP rank s // (E / P).
    score, seed_score, seed_rows
        Of this plan, and of LPT placement + first-fit-decreasing rows with the row count FFD needs (None when FFD finds
        no layout at all).
    bound
        Lower bound on ``score.slowest_shard`` for every placement and layout with ``rows`` rows.
    gap
        (score.slowest_shard - bound) / bound, a fraction; 0 when both are 0.
    moved_experts
        int64 [L], experts whose EP rank differs from the previous placement (identity when there was none).
    certificates
        ``rows``, ``placement`` and ``layout`` proofs, see docs/certificates.md.
    timings
        Seconds by stage; two plans are equal when all but this agrees.
    """

    window: dict[str, Any]
    topology: Topology
    token_cap: int
    cost: CostModel
    constraints: Constraints
    rows: int
    rows_lower_bound: int
    rows_status: str
    cells: tuple[tuple[tuple[int, ...], ...], ...]
    cell_tokens: tuple[tuple[int, ...], ...]
    total_tokens: int
    logical_to_slot: NDArray[np.int64]
    score: Score
    seed_score: Score | None
    seed_rows: int | None
    bound: float
    gap: float
    moved_experts: NDArray[np.int64]
    certificates: dict[str, Any]
    seed: int
    version: str
    timings: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def slot_to_logical(self) -> NDArray[np.int64]:
        """int64 [L, E], the inverse of ``logical_to_slot``."""
        return np.argsort(self.logical_to_slot, axis=1, kind="stable").astype(np.int64)

    def __eq__(self, other: object) -> bool:
        """Equal apart from timings."""
        if not isinstance(other, Plan):
            return NotImplemented
        mine, theirs = self.to_json(), other.to_json()
        mine.pop("timings")
        theirs.pop("timings")
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def verify(self, window: Window) -> None:
        """Re-derive every claim with code that shares nothing with the planner; raises VerificationError."""
        from routepack_opt.verify import verify_plan

        verify_plan(self.to_json(), window)

    def to_json(self) -> dict[str, Any]:
        """The object of plan.json (format routepack.plan/1)."""
        return {
            "format": FORMAT,
            "version": self.version,
            "window": dict(self.window),
            "topology": {
                "dp": self.topology.dp,
                "ep": self.topology.ep,
                "shards": [list(s) for s in self.topology.shards],
            },
            "token_cap": self.token_cap,
            "cost": self.cost.to_json(),
            "constraints": self.constraints.to_json(),
            "rows": self.rows,
            "rows_lower_bound": self.rows_lower_bound,
            "rows_status": self.rows_status,
            "cells": [[list(cell) for cell in row] for row in self.cells],
            "cell_tokens": [list(row) for row in self.cell_tokens],
            "total_tokens": self.total_tokens,
            "logical_to_slot": self.logical_to_slot.tolist(),
            "score": list(self.score),
            "seed_score": None if self.seed_score is None else list(self.seed_score),
            "seed_rows": self.seed_rows,
            "bound": self.bound,
            "gap": self.gap,
            "moved_experts": self.moved_experts.tolist(),
            "certificates": self.certificates,
            "notes": list(self.notes),
            "seed": self.seed,
            "timings": self.timings,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plan.json atomically."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read plan.json; raises FormatError naming file and field. Claims are checked by :meth:`verify` only."""
        return cls.from_json(read_json(path), str(path))

    @classmethod
    def from_json(cls, value: Any, where: str = "plan") -> Plan:
        """Inverse of :meth:`to_json`; checks types and shapes, not claims."""
        check_plan_object(value, where)
        try:
            topology = value["topology"]
            return cls(
                window=dict(value["window"]),
                topology=Topology(topology["dp"], topology["ep"], topology["shards"]),
                token_cap=value["token_cap"],
                cost=CostModel.from_json(value["cost"]),
                constraints=Constraints.from_json(value["constraints"]),
                rows=value["rows"],
                rows_lower_bound=value["rows_lower_bound"],
                rows_status=value["rows_status"],
                cells=tuple(tuple(tuple(cell) for cell in row) for row in value["cells"]),
                cell_tokens=tuple(tuple(row) for row in value["cell_tokens"]),
                total_tokens=value["total_tokens"],
                logical_to_slot=np.array(value["logical_to_slot"], dtype=np.int64),
                score=Score(*map(float, value["score"])),
                seed_score=None if value["seed_score"] is None else Score(*map(float, value["seed_score"])),
                seed_rows=value.get("seed_rows"),
                bound=float(value["bound"]),
                gap=float(value["gap"]),
                moved_experts=np.array(value.get("moved_experts", []), dtype=np.int64),
                certificates=value["certificates"],
                seed=value["seed"],
                version=value["version"],
                timings=value["timings"],
                notes=tuple(value.get("notes", ())),
            )
        except FormatError:
            raise
        except InvalidInput as error:
            raise FormatError(f"{where}: {error}") from None


def _is_int(value: Any) -> bool:
    """64 bits: what every array of the package holds."""
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def check_plan_object(value: Any, where: str) -> None:
    """Check the types and shapes of a plan.json object; a wrong one is a FormatError naming the field."""

    def refuse(field_name: str, expected: str) -> None:
        raise FormatError(f"{where}: field {field_name!r}: expected {expected}")

    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object")
    if value.get("format") != FORMAT:
        raise FormatError(f"{where}: field 'format': found {value.get('format')!r}, expected {FORMAT!r}")
    for name in _REQUIRED:
        if name not in value:
            raise FormatError(f"{where}: field {name!r} is missing")
    for name in ("window", "topology", "cost", "constraints", "certificates", "timings"):
        if not isinstance(value[name], dict):
            refuse(name, "an object")
    for name in ("token_cap", "rows", "rows_lower_bound", "total_tokens", "seed"):
        if not _is_int(value[name]) or (name != "seed" and value[name] < 1):
            refuse(name, "an integer" if name == "seed" else "an integer >= 1")
    if value.get("seed_rows") is not None and (not _is_int(value["seed_rows"]) or value["seed_rows"] < 1):
        refuse("seed_rows", "null or an integer >= 1")
    for name in ("bound", "gap"):
        if not _is_number(value[name]):
            refuse(name, "a finite number")
    for name in ("score", "seed_score"):
        entry = value[name]
        if name == "seed_score" and entry is None:
            continue
        if not isinstance(entry, list) or len(entry) != 3 or not all(map(_is_number, entry)):
            refuse(name, "three numbers")
    for name, keys in (("window", ("samples", "layers", "experts")), ("topology", ("dp", "ep"))):
        for key in keys:
            if not _is_int(value[name].get(key)):
                refuse(f"{name}.{key}", "an integer")
    if not isinstance(value["window"].get("sha256"), str):
        refuse("window.sha256", "a hex digest")
    if not isinstance(value["topology"].get("shards"), list):
        refuse("topology.shards", "lists of DP ranks")
    if not isinstance(value["version"], str):
        refuse("version", "text")
    if value["rows_status"] not in ROWS_STATUS:
        refuse("rows_status", "one of " + ", ".join(ROWS_STATUS))
    cells = value["cells"]
    if not isinstance(cells, list) or not all(isinstance(row, list) for row in cells):
        refuse("cells", "rows of cells of sample indices")
    for r, row in enumerate(cells):
        for d, cell in enumerate(row):
            if not isinstance(cell, list) or not all(map(_is_int, cell)):
                refuse(f"cells[{r}][{d}]", "a list of sample indices")
    tokens = value["cell_tokens"]
    if not isinstance(tokens, list) or not all(isinstance(row, list) and all(map(_is_int, row)) for row in tokens):
        refuse("cell_tokens", "rows of integers")
    num_layers, num_experts = value["window"]["layers"], value["window"]["experts"]
    slots, moved = value["logical_to_slot"], value.get("moved_experts", [])
    if not isinstance(slots, list) or len(slots) != num_layers:
        refuse("logical_to_slot", f"one list of slots for each of {num_layers} layers")
    for layer, entry in enumerate(slots):
        if not isinstance(entry, list) or len(entry) != num_experts or not all(map(_is_int, entry)):
            refuse(f"logical_to_slot[{layer}]", f"{num_experts} slot numbers")
    if (
        not isinstance(moved, list)
        or len(moved) not in (0, num_layers)
        or not all(_is_int(m) and m >= 0 for m in moved)
    ):
        refuse("moved_experts", f"{num_layers} counts")
    if not all(map(_is_number, value["timings"].values())):
        refuse("timings", "finite numbers")
    if not isinstance(value.get("notes", []), list) or not all(isinstance(n, str) for n in value.get("notes", [])):
        refuse("notes", "a list of texts")
