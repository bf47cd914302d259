"""window_from_routes: arrays already in memory -> window, by the same rules as files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from routepack_opt.errors import InvalidInput
from routepack_opt.routes.assemble import WindowBuilder, announce, build_window
from routepack_opt.routes.report import IngestReport
from routepack_opt.routes.samples import MAX_LENGTH, RouteBlock, checked_ids, single_sample
from routepack_opt.window import integer_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from routepack_opt.window import Window


def window_from_routes(
    routes: Sequence[Any],
    lengths: ArrayLike,
    num_experts: int,
    moe_layers: Sequence[int] | None = None,
    *,
    start_lens: ArrayLike | None = None,
    report: IngestReport | None = None,
    max_workers: int | None = None,
) -> Window:
    """Count the routes of samples in memory.

    Parameters
    ----------
    routes
        One [rows, L, K] integer array or tensor per sample.
    lengths
        int [N], tokens of each sample.
    num_experts
        E.
    moe_layers
        The MoE layers among the dump's layers; None drops layers that are zero in every sample.
    start_lens
        int [N], first token that has a row, where not 0.
    report
        Collects totals, notes and warnings; None raises warnings as :class:`RouteWarning`.
    max_workers
        Counting threads.

    Raises
    ------
    InvalidInput
        Naming sample, row and layer of the first wrong value.
    """
    sizes = integer_array(lengths, "lengths", 1, low=1, high=MAX_LENGTH)
    if not hasattr(routes, "__len__") or isinstance(routes, (str, bytes)) or getattr(routes, "ndim", 1) == 0:
        raise InvalidInput(f"routes: expected one array [rows, L, K] per sample, found {type(routes).__name__}")
    if len(routes) != sizes.size:
        raise InvalidInput(f"routes: {len(routes)} samples but lengths has {sizes.size}; they must agree")
    starts = None
    if start_lens is not None:
        starts = integer_array(start_lens, "start_lens", 1, low=0, high=MAX_LENGTH)
        if starts.size != sizes.size:
            raise InvalidInput(f"start_lens: {starts.size} entries but lengths has {sizes.size}; they must agree")
    own = IngestReport() if report is None else report
    builder = WindowBuilder(num_experts, moe_layers, own)
    window = build_window(_blocks(routes, sizes, starts), builder, max_workers=max_workers)
    if report is None:
        announce(own)
    return window


def _blocks(
    routes: Sequence[Any], lengths: NDArray[np.int64], starts: NDArray[np.int64] | None
) -> Iterator[RouteBlock]:
    for index, sample in enumerate(routes):
        yield single_sample(
            checked_ids(sample, f"routes[{index}]"),
            int(lengths[index]),
            source="routes",
            index=index,
            start_len=None if starts is None else int(starts[index]),
        )
