"""What the commands write: text tables and JSON on stdout, and the check that an output file can be written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
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


def check_output(path: str, *inputs: str | None) -> None:
    """Find out before the work, not after it, that ``path`` cannot be written or would replace an input.

    Raises
    ------
    InvalidInput
        No such folder, no permission, not a regular file, or one of ``inputs``.
    """
    from routepack_opt.errors import InvalidInput

    target = Path(path)
    folder = target.parent
    reason = None
    if not folder.is_dir():
        reason = f"no folder {folder}"
    elif target.is_dir():
        reason = "it is a folder"
    elif target.exists() and not target.is_file():
        reason = "it is not a regular file"
    elif not os.access(folder, os.W_OK):
        reason = f"folder {folder} is not writable"
    elif target.exists() and any(name is not None and _same_file(target, name) for name in inputs):
        reason = "it is an input of this command"
    if reason is not None:
        raise InvalidInput(f"{path}: cannot be written ({reason})")


def _same_file(path: Path, other: str) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False
