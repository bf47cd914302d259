"""Text tables and JSON on stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def print_json(value: Any) -> None:
    """One JSON document; NaN and Infinity are a programming error."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by width; the first column left, the others right."""
    widths = [max(len(row[k]) for row in rows if k < len(row)) for k in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[k]) if k == 0 else cell.rjust(widths[k]) for k, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def plural(count: int, word: str) -> str:
    """Text such as "1 row" or "2 rows"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
