"""The first lines of a step-time table, the same for measured and simulated steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def step_lines(
    title: str, names: Sequence[str], num_rows: Sequence[int], steps_s: Sequence[float], num_tokens: int
) -> list[list[str]]:
    """Rows, step time, tokens a second, and throughput against the first column, one cell a layout."""
    lines = [[title, *names], ["rows", *map(str, num_rows)]]
    lines.append(["step, seconds", *(f"{step_s:.4f}" for step_s in steps_s)])
    lines.append(["tokens a second", *(f"{num_tokens / step_s:,.0f}" if step_s > 0 else "" for step_s in steps_s)])
    if len(names) > 1:
        changes = [f"{100 * (steps_s[0] / step_s - 1):+.2f}%" if step_s > 0 else "" for step_s in steps_s[1:]]
        lines.append([f"throughput vs {names[0]}", "", *changes])
    return lines
