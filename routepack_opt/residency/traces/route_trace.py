"""RouteTrace: token-ordered expert ids in memory, and the strict reader of ``route.csv``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import file_path

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from numpy.typing import NDArray

COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes")
_TURN, _PHASE, _STEP, _LAYER, _SLOT, _EXPERT, _WEIGHT, _RESIDENCY, _BYTES = range(len(COLUMNS))
_HEADER_FIELD = re.compile(r"([A-Za-z_]+)=(\S+)")
_MAX_EXPERTS = 1 << 16
_MAX_VALUE = 1 << 40  # keeps steps and turns far from wrapping; a file cannot make them matter
_MAX_LINES = 1 << 26
_MAX_KEYS = 1 << 22  # experts of all layers: a cache keeps several numbers for each


@dataclass(frozen=True, eq=False)
class RouteTrace:
    """Which experts each token used, in the order the tokens were computed.

    Parameters
    ----------
    source
        File or name for messages and results.
    num_experts
        E, routed experts of a layer.
    layers
        int64 [L], model layer number of each MoE layer.
    expert_bytes
        int64 [L], bytes of one expert's weights.
    experts
        int32 [T, L, K] expert ids; -1 where no route was recorded.
    prefill
        bool [T], the token belongs to the prompt of its turn. Prompt tokens come before the others of their turn.
    turns
        int64 [T], turn (sequence) of each token, not falling.
    """

    source: str
    num_experts: int
    layers: NDArray[np.int64]
    expert_bytes: NDArray[np.int64]
    experts: NDArray[np.int32]
    prefill: NDArray[np.bool_]
    turns: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """T, tokens of all turns."""
        return int(self.experts.shape[0])

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        """K, experts a token uses in a layer."""
        return int(self.experts.shape[2])

    @property
    def cycle_bytes(self) -> int:
        """One token cycle: what a single token reads when nothing is resident, sum over layers of K experts."""
        return int(self.expert_bytes.sum()) * self.top_k


def read_route_csv(path: str | os.PathLike[str]) -> RouteTrace:
    """Read one ``route.csv``; docs/residency-traces.md has the format.

    Raises
    ------
    FormatError
        Naming file, line and field of the first wrong value.
    """
    file = file_path(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{file}: not text (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise FormatError(f"{file}: cannot be read ({error.strerror or error})") from None
    lines = text.splitlines()
    if len(lines) > _MAX_LINES:
        raise FormatError(f"{file}: {len(lines)} lines; expected at most {_MAX_LINES}")
    header, first = _read_header(file, lines)
    columns = _read_columns(file, lines, first)
    _check_values(file, columns, header, first)
    return _assemble(file, columns, header, first)


@dataclass(frozen=True)
class _Header:
    expert_bytes: dict[int, int]  # by layer number
    num_experts: int | None
    top_k: int | None


def _read_header(file: Path, lines: list[str]) -> tuple[_Header, int]:
    """The comments, and the index of the first row of data."""
    sizes: dict[int, int] = {}
    declared: dict[str, int] = {}
    for at, line in enumerate(lines):
        where = f"{file}: line {at + 1}"
        if not line.startswith("#"):
            if line != ",".join(COLUMNS):
                raise FormatError(f"{where}: expected the column names {','.join(COLUMNS)}, found {_short(line)}")
            if not sizes:
                raise FormatError(f"{where}: no '# layer=.. expert_bytes=..' header above; expected one a MoE layer")
            return _Header(sizes, declared.get("n_expert"), declared.get("n_expert_used")), at + 1
        if "route_trace" in line and line.split() != ["#", "route_trace", "v1"]:
            raise FormatError(f"{where}: field 'route_trace': {_short(line)}; this reader knows 'v1'")
        fields = dict(_HEADER_FIELD.findall(line))
        for name in ("n_expert", "n_expert_used"):
            if name in fields:
                declared[name] = _header_number(where, name, fields[name], 1, _MAX_EXPERTS)
        if "layer" in fields:
            layer = _header_number(where, "layer", fields["layer"], 0, 4095)
            if layer in sizes:
                raise FormatError(f"{where}: field 'layer': {layer} has a header already; expected one a layer")
            if "expert_bytes" not in fields:
                raise FormatError(f"{where}: field 'expert_bytes' is missing; expected the bytes of one expert")
            sizes[layer] = _header_number(where, "expert_bytes", fields["expert_bytes"], 1, _MAX_VALUE)
            if "dense_bytes" in fields:
                _header_number(where, "dense_bytes", fields["dense_bytes"], 0, 1 << 50)
    raise FormatError(f"{file}: {'empty' if not lines else 'no column names'}; expected the line {','.join(COLUMNS)}")


def _header_number(where: str, name: str, text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18 or not low <= int(text) <= high:
        raise FormatError(f"{where}: field {name!r}: {_short(text)} is not a whole number from {low} to {high}")
    return int(text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _read_columns(file: Path, lines: list[str], first: int) -> NDArray[np.int64]:
    """int64 [9, rows]; the weight column is checked and left 0."""
    rows = lines[first:]
    if not rows:
        raise FormatError(f"{file}: line {first + 1}: no rows after the column names; expected at least one")
    num_columns = len(COLUMNS)
    commas = [row.count(",") for row in rows]
    if commas.count(num_columns - 1) != len(rows):
        at = next(k for k, count in enumerate(commas) if count != num_columns - 1)
        raise FormatError(f"{file}: line {first + at + 1}: {commas[at] + 1} columns; expected {num_columns}")
    cells = ",".join(rows).split(",")
    values = np.zeros((num_columns, len(rows)), dtype=np.int64)
    for column in range(num_columns):
        texts = cells[column::num_columns]
        if column == _WEIGHT:
            _check_weights(file, texts, first)
            continue
        try:
            values[column] = np.fromiter(map(int, texts), dtype=np.int64, count=len(rows))
        except (ValueError, OverflowError):
            at = next(k for k, text in enumerate(texts) if not _is_whole(text))
            raise FormatError(
                f"{file}: line {first + at + 1}: field {COLUMNS[column]!r}: {_short(texts[at])} is not an integer"
            ) from None
    return values


def _is_whole(text: str) -> bool:
    try:
        return abs(int(text)) < 1 << 62
    except ValueError:
        return False


def _check_weights(file: Path, texts: list[str], first: int) -> None:
    """Routing weights are not used by the replay, but a file with text in their place is not a route trace."""
    try:
        good = bool(np.isfinite(np.fromiter(map(float, texts), dtype=np.float64, count=len(texts))).all())
    except ValueError:
        good = False
    if good:
        return
    for at, text in enumerate(texts):
        try:
            good = bool(np.isfinite(float(text)))
        except ValueError:
            good = False
        if not good:
            raise FormatError(f"{file}: line {first + at + 1}: field 'weight': {_short(text)} is not a finite number")


def _check_values(file: Path, columns: NDArray[np.int64], header: _Header, first: int) -> None:
    """Ranges of each column, and layers that the header does not know."""
    num_experts = header.num_experts or _MAX_EXPERTS
    top_k = header.top_k or num_experts
    highs = {_TURN: _MAX_VALUE, _PHASE: 1, _STEP: _MAX_VALUE, _SLOT: top_k - 1, _EXPERT: num_experts - 1,
             _RESIDENCY: 1, _BYTES: _MAX_VALUE}  # fmt: skip
    known = np.isin(columns[_LAYER], np.fromiter(header.expert_bytes, dtype=np.int64))
    bad = np.flatnonzero(~known)
    problems = []
    if bad.size:
        layer = int(columns[_LAYER, bad[0]])
        problems.append((int(bad[0]), f"field 'layer': layer {layer} has no '# layer={layer}' header"))
    for column, high in highs.items():
        bad = np.flatnonzero((columns[column] < 0) | (columns[column] > high))
        if bad.size:
            value = int(columns[column, bad[0]])
            problems.append((int(bad[0]), f"field {COLUMNS[column]!r}: {value} is out of range; expected 0 to {high}"))
    if problems:
        at, problem = min(problems)
        raise FormatError(f"{file}: line {first + at + 1}: {problem}")


def _assemble(file: Path, columns: NDArray[np.int64], header: _Header, first: int) -> RouteTrace:
    """Rows -> [T, L, K], checking order and slots on the way."""
    turn, phase, step, layer, slot, expert = columns[[_TURN, _PHASE, _STEP, _LAYER, _SLOT, _EXPERT]]
    layers = np.array(sorted(header.expert_bytes), dtype=np.int64)
    position = np.searchsorted(layers, layer)
    _check_order(file, turn, phase, step, position, first)
    same = np.ones(turn.size, dtype=np.bool_)  # row continues the token and layer of the row above
    same[0] = False
    for column in (turn, phase, step, layer):
        same[1:] &= column[1:] == column[:-1]
    expected = np.where(same, np.concatenate(([-1], slot[:-1])) + 1, 0)
    _refuse_first(file, first, slot != expected, "slot", slot, "expected {}: slots count up from 0", expected)
    tokens, row_token = np.unique(np.stack((turn, phase, step)), axis=1, return_inverse=True)
    num_slots = header.top_k or int(slot.max()) + 1
    _refuse_size(file, tokens.shape[1], layers.size, num_slots)
    experts = np.full((tokens.shape[1], layers.size, num_slots), -1, dtype=np.int32)
    where = (row_token.reshape(-1), position, slot)
    experts[where] = expert
    written = np.zeros(experts.shape, dtype=np.int64)
    np.add.at(written, where, 1)
    _refuse_first(file, first, written[where] > 1, "slot", slot, "token, layer and slot are given twice", slot)
    _check_distinct(file, experts, where, expert, first)
    num_experts = header.num_experts or int(expert.max()) + 1
    if num_experts * layers.size > _MAX_KEYS:
        raise FormatError(f"{file}: {layers.size} layers x {num_experts} experts; expected at most {_MAX_KEYS} in all")
    sizes = np.array([header.expert_bytes[int(number)] for number in layers], dtype=np.int64)
    return RouteTrace(str(file), num_experts, layers, sizes, experts, tokens[1] == 0, tokens[0].copy())


def _refuse_size(file: Path, *shape: int) -> None:
    if np.prod([float(size) for size in shape]) > 1 << 30:
        raise FormatError(f"{file}: {shape[0]} tokens x {shape[1]} layers x {shape[2]} slots are too many for memory")


def _check_order(file: Path, turn: NDArray[np.int64], phase: NDArray[np.int64], step: NDArray[np.int64],
                 position: NDArray[np.int64], first: int) -> None:  # fmt: skip
    """Turns rise, prefill before decode, steps never fall: over all layers in decode, inside a layer in prefill."""
    falls = np.zeros(turn.size, dtype=np.bool_)
    falls[1:] = turn[1:] < turn[:-1]
    _refuse_first(file, first, falls, "turn", turn, "falls; rows are in the order of use", turn)
    falls[1:] = (turn[1:] == turn[:-1]) & (phase[1:] < phase[:-1])
    _refuse_first(file, first, falls, "phase", phase, "after decode rows of its turn; prefill comes first", phase)
    decode = phase == 1
    together = (turn[1:] == turn[:-1]) & decode[1:] & decode[:-1]
    falls[1:] = together & (step[1:] < step[:-1])
    _refuse_first(file, first, falls, "step", step, "decreases; decode steps never fall inside a turn", step)
    falls[1:] = together & (step[1:] == step[:-1]) & (position[1:] < position[:-1])
    _refuse_first(file, first, falls, "layer", position, "falls inside a decode step; layers rise", position)
    by_layer = np.lexsort((np.arange(turn.size), position, phase, turn))
    next_to = (np.diff(turn[by_layer]) == 0) & (np.diff(phase[by_layer]) == 0) & (np.diff(position[by_layer]) == 0)
    falls[:] = False
    falls[by_layer[1:]] = next_to & (np.diff(step[by_layer]) < 0)
    _refuse_first(file, first, falls, "step", step, "decreases; the steps of one layer never fall inside a turn", step)


def _refuse_first(file: Path, first: int, bad: NDArray[np.bool_], field: str, values: NDArray[np.int64],
                  problem: str, expected: NDArray[np.int64]) -> None:  # fmt: skip
    at = int(np.argmax(bad))
    if bad[at]:
        reason = problem.format(int(expected[at]))
        raise FormatError(f"{file}: line {first + at + 1}: field {field!r}: {int(values[at])}: {reason}")


def _check_distinct(file: Path, experts: NDArray[np.int32], where: tuple[NDArray[np.int64], ...],
                    expert: NDArray[np.int64], first: int) -> None:  # fmt: skip
    ordered = np.sort(experts, axis=2)
    twice = ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(axis=2)
    bad = twice[where[0], where[1]]
    _refuse_first(file, first, bad, "expert", expert, "a token names an expert of this layer twice", expert)


def checked_expert_bytes(expert_bytes: int | NDArray[np.int64], num_layers: int) -> NDArray[np.int64]:
    """int64 [L] from one size or one a layer; raises InvalidInput."""
    sizes = np.broadcast_to(np.asarray(expert_bytes), (num_layers,)) if np.ndim(expert_bytes) == 0 else expert_bytes
    sizes = np.asarray(sizes)
    if sizes.shape != (num_layers,) or sizes.dtype.kind not in "iu":
        raise InvalidInput(
            f"expert_bytes: found {sizes.dtype} {sizes.shape}; expected integers of shape ({num_layers},)"
        )
    if sizes.size and (int(sizes.min()) < 1 or int(sizes.max()) > _MAX_VALUE):
        raise InvalidInput(f"expert_bytes: sizes {int(sizes.min())} to {int(sizes.max())}; expected 1 to {_MAX_VALUE}")
    return sizes.astype(np.int64)
