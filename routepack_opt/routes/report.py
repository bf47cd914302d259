"""IngestReport: what reading routes found, for people and for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class RouteWarning(UserWarning):
    """Routes are usable but something about them is unusual."""


@dataclass
class IngestReport:
    """Totals and anomalies of one reading; filled by :func:`routepack_opt.read_routes`.

    ``notes`` say what was decided (dense layers dropped, filler rows dropped); ``warnings`` say what looks wrong
    although it could be counted. Errors are raised, not reported.
    """

    num_files: int = 0
    num_samples: int = 0
    num_tokens: int = 0  # sum of lengths
    num_rows: int = 0  # token rows counted
    num_assignments: int = 0  # token-to-expert assignments counted, all layers
    num_filler_rows: int = 0  # last rows of len that were all zero or all -1, dropped
    num_missing_rows: int = 0  # token rows that are -1 in at least one counted layer
    num_unrecorded_tokens: int = 0  # tokens before start_len
    num_duplicate_rows: int = 0  # (token, layer) pairs that name one expert twice
    num_layers: int = 0  # MoE layers kept
    dense_layers: list[int] = field(default_factory=list)  # dump layers dropped because zero in every sample
    moe_layers: list[int] | None = None
    top_k: int | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, text: str) -> None:
        """Add a warning, once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        files = f"{plural(self.num_files, 'file')}, " if self.num_files else ""
        return [
            f"{files}{plural(self.num_samples, 'sample')}, {self.num_tokens} tokens,"
            f" {plural(self.num_rows, 'route row')}, {plural(self.num_layers, 'MoE layer')}, top-{self.top_k}:"
            f" {self.num_assignments} assignments",
            *(f"note: {text}" for text in self.notes),
            *(f"warning: {text}" for text in self.warnings),
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return asdict(self)


def plural(count: int, word: str) -> str:
    """Text such as "1 row" or "2 rows"."""
    return f"{count} {word}{'' if count == 1 else 's'}"
