"""A self-contained HTML page: styles inline, no script that loads anything, no reference to another file."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_STYLE = """
:root { color-scheme: light; --ink: #1d2329; --soft: #59636e; --line: #d8dee4; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 88rem; background: #fff; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { max-width: 60rem; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .75rem 0; font-size: .87rem; }
th, td { padding: .2rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; border-bottom: 2px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr.best td { font-weight: 600; }
td.note { text-align: left; white-space: normal; color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1.5rem; margin-top: 1rem; }
figure { margin: 0; min-width: 0; }
figure svg { width: 100%; height: auto; display: block; }
code { font-size: .92em; overflow-wrap: anywhere; }
@media (max-width: 32rem) { .figures { grid-template-columns: 1fr; } }
"""


def page(title: str, body: str, data: Any = None) -> str:
    """A whole document; ``data`` is kept inside as JSON (element id ``data``), for programs that read the page."""
    stored = "" if data is None else f'<script type="application/json" id="data">{_script_json(data)}</script>\n'
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{text(title)}</h1>\n"
        f"{body}\n{stored}</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Escaped for HTML."""
    return html.escape(str(value))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], best: int | None = None) -> str:
    """Numbers to the right, the first column to the left; row number ``best`` stands out."""
    head = "".join(f"<th>{text(name)}</th>" for name in header)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{text(value)}</td>" for value in row)
        lines.append(f'<tr class="best">{cells}</tr>' if number == best else f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def figure(svg: str, caption: str) -> str:
    """An inline picture with a caption."""
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>"


def _script_json(data: Any) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
