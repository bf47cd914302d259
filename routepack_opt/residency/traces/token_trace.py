"""Routing-replay dumps of every format as a RouteTrace, and the choice of reader by content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import file_path
from routepack_opt.residency.traces.route_trace import COLUMNS, RouteTrace, checked_expert_bytes, read_route_csv
from routepack_opt.routes.samples import checked_num_experts, single_sample

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from routepack_opt.routes.samples import RouteBlock

PROMPT_TOKENS = 32  # dumps do not say where the prompt ends


def read_trace(
    path: str | os.PathLike[str],
    *,
    num_experts: int | None = None,
    expert_bytes: int | NDArray[np.int64] | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    moe_layers: Sequence[int] | None = None,
) -> RouteTrace:
    """A ``route.csv``, or any dump that :func:`routepack_opt.read_routes` reads.

    Parameters
    ----------
    path
        The file.
    num_experts, expert_bytes
        E, and bytes of one expert (one number, or int64 [L]): needed for dumps, which carry neither. A ``route.csv``
        has both in its header.
    prompt_tokens
        Dumps only: each sample is one turn, its first tokens (at most this many) the prompt.
    moe_layers
        Dumps only: the MoE layers among the dump's layers; None takes all.

    Raises
    ------
    FormatError
        Naming file, line or sample, and field.
    """
    file = file_path(path)
    if _is_route_csv(file):
        return read_route_csv(file)
    for name, value in (("num_experts", num_experts), ("expert_bytes", expert_bytes)):
        if value is None:
            raise InvalidInput(f"{name}: missing; {file} is a routing dump, which does not carry it")
    from routepack_opt.routes.reader import _checked_format, _file_blocks
    from routepack_opt.routes.report import IngestReport

    container, dialect = _checked_format(None, None, None)
    try:
        return _from_blocks(
            _file_blocks(file, container, dialect, IngestReport()), str(file), num_experts, expert_bytes, prompt_tokens,
            moe_layers,
        )  # fmt: skip
    except FormatError:
        raise
    except InvalidInput as error:
        text = str(error)
        raise FormatError(text if text.startswith(str(file)) else f"{file}: {text}") from None


def trace_from_routes(
    routes: Sequence[Any],
    num_experts: int,
    expert_bytes: int | NDArray[np.int64],
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    source: str = "routes",
) -> RouteTrace:
    """Arrays in memory, one integer [tokens, L, K] a sequence, as a trace; a row of K times -1 has no route."""
    from routepack_opt.routes.samples import checked_ids

    arrays = [checked_ids(array, f"routes[{at}]") for at, array in enumerate(routes)]
    blocks = (single_sample(array, array.shape[0] + 1, source=source, index=at) for at, array in enumerate(arrays))
    return _from_blocks(blocks, source, num_experts, expert_bytes, prompt_tokens, None)


def _is_route_csv(file: Path) -> bool:
    """By content: a comment or the column names; by suffix where the file is empty."""
    try:
        with open(file, "rb") as stream:
            head = stream.read(64)
    except OSError as error:
        raise FormatError(f"{file}: cannot be read ({error.strerror or error})") from None
    return head.startswith((b"#", ",".join(COLUMNS[:3]).encode())) or file.suffix.lower() == ".csv"


def _from_blocks(
    blocks: Iterable[RouteBlock],
    source: str,
    num_experts: Any,
    expert_bytes: Any,
    prompt_tokens: int,
    moe_layers: Sequence[int] | None,
) -> RouteTrace:
    from routepack_opt.routes.counting import count_block, select_layers
    from routepack_opt.routes.samples import checked_moe_layers

    num_experts = checked_num_experts(num_experts)
    if isinstance(prompt_tokens, bool) or not isinstance(prompt_tokens, (int, np.integer)) or prompt_tokens < 0:
        raise InvalidInput(f"prompt_tokens: {prompt_tokens!r} is not a whole number >= 0")
    chosen = checked_moe_layers(moe_layers)
    parts: list[NDArray[np.int32]] = []
    lengths: list[int] = []
    layers: NDArray[np.int64] | None = None
    for block in blocks:
        if block.routes is None:
            continue
        layers = select_layers(block.routes.shape[1], chosen, block.layer_numbers, block.label(0))
        counts = count_block(block, num_experts, layers)  # refuses ids, lengths and rows that are wrong
        if parts and (layers.size, block.routes.shape[2]) != parts[0].shape[1:]:
            raise InvalidInput(
                f"{block.label(0)}: {layers.size} layers and top_k {block.routes.shape[2]}; expected"
                f" {parts[0].shape[1]} and {parts[0].shape[2]} as in the samples before"
            )
        first = 0
        for rows, counted in zip(block.num_rows.tolist(), counts.counted_rows.tolist(), strict=True):
            parts.append(_signed(block.routes[first : first + counted][:, layers], num_experts))
            lengths.append(counted)
            first += rows
    if layers is None or not any(lengths):
        raise InvalidInput(f"{source}: no routes; expected at least one token")
    experts = np.concatenate(parts)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return RouteTrace(
        source=source,
        num_experts=num_experts,
        layers=np.arange(layers.size, dtype=np.int64) if chosen is None else chosen,
        expert_bytes=checked_expert_bytes(expert_bytes, int(layers.size)),
        experts=experts,
        prefill=np.arange(experts.shape[0]) - starts < prompt_tokens,
        turns=np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
    )


def _signed(ids: NDArray[Any], num_experts: int) -> NDArray[np.int32]:
    """int32, with whatever stands for "no route" (-1, or the largest value of an unsigned type) as -1."""
    return np.where((ids < 0) | (ids >= num_experts), -1, ids).astype(np.int32)
