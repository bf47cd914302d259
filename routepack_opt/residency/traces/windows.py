"""Workloads: the demand of one decision window after the other, from a trace or from the generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.traces.generator import (
    CALIBRATIONS,
    DEFAULT_CONFIG,
    Calibration,
    Generator,
    GeneratorConfig,
    block_edges,
)
from routepack_opt.residency.traces.route_trace import RouteTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray


Phase = Literal["prefill", "decode"]
WINDOW_TOKENS: dict[str, int] = {"prefill": 2048, "decode": 512}
_MAX_WINDOWS = 100_000  # hours of simulation; a mistyped number must not run for days
NUM_WINDOWS = 256
PROFILE_SHARE = 0.1


@dataclass(frozen=True, eq=False)
class Workload:
    """Decision windows in order, made when asked for; the same window is always the same.

    Parameters
    ----------
    name, phase
        Of the workload; "prefill" or "decode".
    num_windows, num_layers, num_experts, num_chiplets
        W, L, E, C.
    window_tokens, top_k
        Tokens of a window (prompt tokens, or active sequences), experts a token uses.
    synthetic
        Drawn, not recorded.
    note
        What results must say about it.
    make
        Window number -> int32 [L, E, C]: token assignments of expert e in layer l from source chiplet c.
    """

    name: str
    phase: Phase
    num_windows: int
    num_layers: int
    num_experts: int
    num_chiplets: int
    window_tokens: int
    top_k: int
    synthetic: bool
    note: str
    make: Callable[[int], NDArray[np.int32]]

    def __len__(self) -> int:
        """W."""
        return self.num_windows

    def __getitem__(self, window: int) -> NDArray[np.int32]:
        """int32 [L, E, C] of one window."""
        if not 0 <= window < self.num_windows:
            raise IndexError(f"window {window} is not in 0..{self.num_windows - 1}")
        return self.make(int(window))

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """All windows in order."""
        return (self.make(window) for window in range(self.num_windows))

    @property
    def profile_windows(self) -> int:
        """How many windows the starting layout may be built on: the first tenth, at least one."""
        return max(1, int(PROFILE_SHARE * self.num_windows))

    def profile(self) -> NDArray[np.int64]:
        """int64 [L, E, C], summed demand of the first tenth: what the common starting layout is built on."""
        total = np.zeros((self.num_layers, self.num_experts, self.num_chiplets), dtype=np.int64)
        for window in range(self.profile_windows):
            total += self.make(window)
        return total

    def array(self, first: int = 0, last: int | None = None) -> NDArray[np.int32]:
        """int32 [n, L, E, C], windows [first, last) in memory."""
        return np.stack([self[window] for window in range(first, self.num_windows if last is None else last)])


def trace_workload(
    traces: RouteTrace | Sequence[RouteTrace],
    phase: Phase,
    num_chiplets: int,
    *,
    num_windows: int = NUM_WINDOWS,
    window_tokens: int | None = None,
    layers: Sequence[int] | None = None,
    seed: int = 0,
) -> Workload:
    """Windows of real routes.

    Prefill takes consecutive tokens of the stream of all sequences. Decode advances ``window_tokens`` positions by one
    token a window: where there are as many sequences, position i runs through sequences i, i + n, ...; with fewer, the
    positions are spread evenly over the stream. A trace that is too short is replayed: in prefill every lap after the
    first takes the sequences in an order drawn from ``seed``. ``note`` says how often a token is used.

    Parameters
    ----------
    traces
        One trace or several of one model, taken one after the other.
    phase, num_chiplets, num_windows, window_tokens
        "prefill" (2048 tokens a window by default) or "decode" (512 active tokens); C; W; tokens of a window. Tokens
        are dealt to source chiplets in contiguous blocks.
    layers
        Positions of the layers to keep; None keeps all.
    seed
        Of the order of later laps.
    """
    parts = [traces] if isinstance(traces, RouteTrace) else list(traces)
    tokens = _check(phase, num_chiplets, num_windows, window_tokens)
    if not parts:
        raise InvalidInput("traces: empty; expected at least one trace")
    first = parts[0]
    for at, part in enumerate(parts):
        if part.experts.shape[1:] != first.experts.shape[1:] or part.num_experts != first.num_experts:
            raise InvalidInput(f"traces[{at}]: {part.source} is of another model than {first.source}")
    experts, sequences = _stream(parts, phase)
    if layers is not None:
        if not len(layers) or min(layers) < 0 or max(layers) >= first.num_layers:
            raise InvalidInput(f"layers: {list(layers)[:8]}; expected positions 0 to {first.num_layers - 1}")
        experts = np.ascontiguousarray(experts[:, np.asarray(layers, dtype=np.int64)])
    if phase == "prefill":
        rows = _prefill_rows(sequences, tokens, seed)
    else:
        rows = _decode_rows(sequences, tokens)
    num_experts = first.num_experts
    uses = num_windows * tokens / experts.shape[0]
    note = f"{experts.shape[0]} recorded tokens of {sequences.size - 1} sequences"
    if uses > 1:
        note += f", replayed: a token is used {uses:.1f} times on average"
    return Workload(
        name=", ".join(part.source for part in parts),
        phase=phase,
        num_windows=num_windows,
        num_layers=int(experts.shape[1]),
        num_experts=num_experts,
        num_chiplets=num_chiplets,
        window_tokens=tokens,
        top_k=first.top_k,
        synthetic=False,
        note=note,
        make=lambda window: count_window(experts[rows(window)], num_experts, num_chiplets),
    )


def synthetic_workload(
    model: str | Calibration,
    phase: Phase,
    num_chiplets: int,
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
    num_windows: int = NUM_WINDOWS,
    window_tokens: int | None = None,
    seed: int = 0,
    config: GeneratorConfig = DEFAULT_CONFIG,
) -> Workload:
    """Windows of the generator, for models without a trace.

    Parameters
    ----------
    model
        A name in :data:`routepack_opt.residency.traces.generator.CALIBRATIONS`, or a calibration.
    phase, num_chiplets, num_windows, window_tokens
        As in :func:`trace_workload`.
    num_layers, num_experts, top_k
        Of the model, or of the layers in scope.
    seed, config
        Of all draws; how domains and sequences change.
    """
    tokens = _check(phase, num_chiplets, num_windows, window_tokens)
    if isinstance(model, str):
        if model not in CALIBRATIONS:
            raise InvalidInput(f"model: {model!r} is unknown; expected one of {', '.join(CALIBRATIONS)}")
        name, calibration = model, CALIBRATIONS[model]
    else:
        name, calibration = "synthetic", model
    generator = Generator(
        calibration, num_layers=num_layers, num_experts=num_experts, top_k=top_k, num_chiplets=num_chiplets, seed=seed,
        config=config,
    )  # fmt: skip
    counts = generator.prefill_counts if phase == "prefill" else generator.decode_counts
    return Workload(
        name=name,
        phase=phase,
        num_windows=num_windows,
        num_layers=num_layers,
        num_experts=num_experts,
        num_chiplets=num_chiplets,
        window_tokens=tokens,
        top_k=top_k,
        synthetic=True,
        note=f"synthetic, calibrated to {calibration.source}",
        make=lambda window: counts(window, tokens),
    )


def count_window(experts: NDArray[np.int32], num_experts: int, num_chiplets: int) -> NDArray[np.int32]:
    """int32 [L, E, C] of tokens [n, L, K], dealt to chiplets in contiguous blocks; -1 counts nothing."""
    num_tokens, num_layers, _ = experts.shape
    edges = block_edges(num_tokens, num_chiplets)
    chiplet = np.repeat(np.arange(num_chiplets), np.diff(edges))
    cells = (np.arange(num_layers)[None, :, None] * num_experts + experts) * num_chiplets + chiplet[:, None, None]
    counts = np.bincount(cells[experts >= 0], minlength=num_layers * num_experts * num_chiplets)
    return counts.astype(np.int32).reshape(num_layers, num_experts, num_chiplets)


def _check(phase: str, num_chiplets: int, num_windows: int, window_tokens: int | None) -> int:
    if phase not in WINDOW_TOKENS:
        raise InvalidInput(f"phase: {phase!r} is unknown; expected prefill or decode")
    tokens = WINDOW_TOKENS[phase] if window_tokens is None else window_tokens
    for name, value in (("num_chiplets", num_chiplets), ("num_windows", num_windows), ("window_tokens", tokens)):
        if value < 1:
            raise InvalidInput(f"{name}: {value} is below 1")
    if num_windows > _MAX_WINDOWS:
        raise InvalidInput(f"num_windows: {num_windows} with the profile; expected at most {_MAX_WINDOWS}")
    return tokens


def _stream(parts: list[RouteTrace], phase: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Tokens of all sequences [T, L, K] and where each sequence starts (one more entry: the end).

    Decode takes decoded tokens only, unless the traces have none.
    """
    decoded_only = phase == "decode" and any(not part.prefill.all() for part in parts)
    experts, starts, length = [], [np.zeros(1, dtype=np.int64)], 0
    for part in parts:
        keep = ~part.prefill if decoded_only else np.ones(part.num_tokens, dtype=np.bool_)
        turns = part.turns[keep]
        experts.append(part.experts[keep])
        starts.append(length + np.flatnonzero(np.diff(turns)) + 1)
        length += turns.size
        starts.append(np.full(1, length, dtype=np.int64))
    return np.concatenate(experts), np.unique(np.concatenate(starts))


def _prefill_rows(sequences: NDArray[np.int64], tokens: int, seed: int) -> Callable[[int], NDArray[np.int64]]:
    total = int(sequences[-1])

    def lap_rows(lap: int) -> NDArray[np.int64]:
        if lap == 0:
            return np.arange(total)
        order = np.random.default_rng([seed, lap]).permutation(sequences.size - 1)
        return np.concatenate([np.arange(sequences[s], sequences[s + 1]) for s in order])

    def rows(window: int) -> NDArray[np.int64]:
        begun, ended = window * tokens, (window + 1) * tokens
        laps = range(begun // total, (ended - 1) // total + 1)
        stream = np.concatenate([lap_rows(lap) for lap in laps])
        return stream[begun - laps[0] * total : ended - laps[0] * total]

    return rows


def _decode_rows(sequences: NDArray[np.int64], active: int) -> Callable[[int], NDArray[np.int64]]:
    total, num_sequences = int(sequences[-1]), sequences.size - 1
    if num_sequences < active:
        spread = np.arange(active) * total // active
        return lambda window: (spread + window) % total
    lengths = np.diff(sequences)
    streams = [
        np.concatenate([np.arange(sequences[s], sequences[s] + lengths[s]) for s in range(i, num_sequences, active)])
        for i in range(active)
    ]
    return lambda window: np.array([stream[window % stream.size] for stream in streams])
