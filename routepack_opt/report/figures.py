"""Figures with matplotlib (extra ``report``), never shown and without its global state; as SVG to put into a page."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from routepack_opt.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, SOFT, LINE = "#1d2329", "#59636e", "#d8dee4"
# Okabe and Ito's eight colours (told apart by every kind of eyesight), then darker and lighter ones
PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000",
    "#5b3a8c", "#8c564b", "#2f6b4f", "#b2182b", "#17becf", "#bcbd22", "#9edae5", "#f7b6d2",
)  # fmt: skip
MARKERS = "osD^vPX*<>hp8dH1"


def new_axes(width: float = 6.2, height: float = 3.4) -> Axes:
    """Axes of a new figure, ``width`` x ``height`` inches.

    Raises
    ------
    MissingDependency
        matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("figures need matplotlib: install routepack-opt[report]") from None
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def finish(ax: Axes, title: str, x: str = "", y: str = "", grid: str = "both") -> Axes:
    """Title, labels and a quiet look; ``grid`` is "x", "y" or "both"."""
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    ax.set_xlabel(x, fontsize=9, color=SOFT)
    ax.set_ylabel(y, fontsize=9, color=SOFT)
    ax.tick_params(labelsize=8.5, colors=INK, length=0)
    ax.grid(True, axis=grid, color=LINE, linewidth=0.7)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        ax.spines[side].set_visible(side == "bottom")
        ax.spines[side].set_color(LINE)
    return ax


def plain_numbers(axis: Axis, steps: tuple[float, ...] = (1.0, 3.0), base: float = 10.0) -> None:
    """Plain numbers at ``steps`` of every power of ``base`` on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base, subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, the same in every figure of a page that passes the same names."""
    return {name: PALETTE[k % len(PALETTE)] for k, name in enumerate(dict.fromkeys(names))}


def markers(names: Iterable[str]) -> dict[str, str]:
    """A marker for each name, so that colour alone need not tell them apart."""
    return {name: MARKERS[k % len(MARKERS)] for k, name in enumerate(dict.fromkeys(names))}


def _figure_of(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None, "the axes were removed from their figure"
    return figure


def to_svg(ax: Axes, name: str, label: str) -> str:
    """The figure of ``ax`` as an SVG element for HTML: no namespaces, no links, ids that start with ``name``."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        _figure_of(ax).savefig(stream, format="svg", metadata=nothing)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg, count=4)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def to_png(ax: Axes, dpi: int = 150) -> bytes:
    """The figure of ``ax`` as a PNG file."""
    stream = io.BytesIO()
    _figure_of(ax).savefig(stream, format="png", dpi=dpi)
    return stream.getvalue()
