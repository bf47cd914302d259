"""What is certified: the sample lengths of a window, or a bin-packing instance of a JSONL file."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import parse_json
from routepack_opt.topology import Topology
from routepack_opt.window import Window, integer_array

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

INSTANCE_SUFFIXES = (".jsonl", ".jsonl.gz")
SUFFIXES = (".npz", *INSTANCE_SUFFIXES)
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Case:
    """One problem: pack samples into cells of a cap, rows of D cells.

    Attributes
    ----------
    name, source
        Unique name, and the file it comes from.
    lengths
        int64 [N], tokens of each sample.
    cap
        Most tokens in a cell.
    load
        int64 [L, E], demand of the whole window; None for bin-packing instances and where no placement is asked for.
    """

    name: str
    source: str
    lengths: NDArray[np.int64]
    cap: int
    load: NDArray[np.int64] | None = None

    @cached_property
    def sha256(self) -> str:
        """Hex digest over cap, lengths and load, little-endian int64."""
        digest = hashlib.sha256(np.array([self.cap, self.lengths.size], dtype="<i8").tobytes())
        digest.update(self.lengths.astype("<i8").tobytes())
        if self.load is not None:
            digest.update(np.array(self.load.shape, dtype="<i8").tobytes() + self.load.astype("<i8").tobytes())
        return digest.hexdigest()


def read_cases(
    paths: Sequence[str | os.PathLike[str]],
    *,
    token_cap: int | None,
    ep: int | None = None,
    skip: str | os.PathLike[str] | None = None,
) -> list[Case]:
    """Read everything before anything is solved, so that a bad file costs no hours.

    Parameters
    ----------
    paths
        Windows (.npz), instance files (.jsonl, .jsonl.gz: one ``{"name", "capacity", "weights"}`` a line), or folders
        of these.
    token_cap
        Of windows; instances bring their own capacity.
    ep
        EP ranks, where the placement of windows is wanted too.
    skip
        A file that is passed over in folders: the results may lie beside the windows.

    Raises
    ------
    InvalidInput
        Names file, line, field and index.
    """
    cases: list[Case] = []
    for path in _files(paths, skip):
        cases += [_window(path, token_cap, ep)] if path.suffix == ".npz" else _instances(path)
    return _name_apart(cases)


def _files(paths: Sequence[str | os.PathLike[str]], skip: str | os.PathLike[str] | None) -> list[Path]:
    files: list[Path] = []
    passed_over = None if skip is None else Path(skip).resolve()
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES) and p.resolve() != passed_over)
            if not inside:
                raise InvalidInput(f"{path}: the folder holds no window and no instance file ({', '.join(SUFFIXES)})")
            files += inside
        elif not path.name.endswith(SUFFIXES):
            raise FormatError(f"{path}: unknown kind of file; expected {', '.join(SUFFIXES)}")
        else:
            files.append(path)
    return list(dict.fromkeys(files))


def _window(path: Path, token_cap: int | None, ep: int | None) -> Case:
    window = Window.load(path)
    if token_cap is None:
        raise InvalidInput(f"{path}: a window has no cap of its own; give a token cap")
    if ep is not None:
        try:
            Topology(ep=ep).experts_per_rank(window.num_experts)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from None
    return Case(path.stem, str(path), window.lengths, token_cap, None if ep is None else window.total_load)


def _instances(path: Path) -> Iterator[Case]:
    number = 0
    for number, line in _lines(path):
        where = f"{path}: line {number}"
        data = parse_json(line, where)
        if not isinstance(data, dict):
            raise FormatError(f'{where}: expected {{"name", "capacity", "weights"}}, found {type(data).__name__}')
        for field in ("name", "capacity", "weights"):
            if field not in data:
                raise FormatError(f"{where}: field {field!r} is missing")
        name, cap = data["name"], data["capacity"]
        if not isinstance(name, str) or not name:
            raise FormatError(f"{where}: field 'name': {name!r} is not a name")
        if isinstance(cap, bool) or not isinstance(cap, int) or not 1 <= cap <= _INT32_MAX:
            raise FormatError(f"{where}: field 'capacity': {cap!r} is not an integer from 1 to {_INT32_MAX}")
        yield Case(name, str(path), _weights(data["weights"], cap, where), cap)
    if not number:
        raise FormatError(f'{path}: no instance; expected one {{"name", "capacity", "weights"}} a line')


def _weights(value: Any, cap: int, where: str) -> NDArray[np.int64]:
    if not isinstance(value, list) or not value:
        raise FormatError(f"{where}: field 'weights': expected a list of at least one integer")
    if any(type(weight) is not int for weight in value):
        index = next(k for k, weight in enumerate(value) if type(weight) is not int)
        raise FormatError(f"{where}: field 'weights[{index}]': {value[index]!r} is not an integer")
    try:
        return integer_array(value, "weights", 1, low=1, high=_INT32_MAX).astype(np.int64)
    except InvalidInput as error:
        raise FormatError(f"{where}: field {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank, of a plain or gzipped text file."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as stream:
            yield from ((number, line) for number, line in enumerate(stream, 1) if line.strip())
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (EOFError, zlib.error) as error:
        raise FormatError(f"{path}: not a whole gzip file ({error})") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from None


def _name_apart(cases: list[Case]) -> list[Case]:
    """Names that occur twice get their file in front, and a number where that is not enough."""
    count = Counter(case.name for case in cases)
    named = [c if count[c.name] == 1 else replace(c, name=f"{c.source}:{c.name}") for c in cases]
    seen: Counter[str] = Counter()
    result = []
    for case in named:
        seen[case.name] += 1
        again = seen[case.name]
        result.append(case if again == 1 else replace(case, name=f"{case.name}#{again}"))
    return result
