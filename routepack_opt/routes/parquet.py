"""Parquet dumps: one sample a row, the columns of the JSON-lines form (needs the extra ``routepack-opt[parquet]``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt.errors import FormatError, InvalidInput, MissingDependency
from routepack_opt.routes.records import (
    GROUP_FIELDS,
    ID_FIELDS,
    LENGTH_FIELDS,
    ROUTE_FIELDS,
    START_FIELDS,
    TOKEN_PAIRS,
    Dialect,
    record_block,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from routepack_opt.routes.samples import RouteBlock

ROWS_PER_READ = 16
_COLUMNS = {
    *ROUTE_FIELDS, *ID_FIELDS, *GROUP_FIELDS, *LENGTH_FIELDS, *START_FIELDS, "dtype", "shape", "num_layers", "top_k",
    "tokens", *(name for pair in TOKEN_PAIRS for name in pair),
}  # fmt: skip


def read_parquet_routes(path: Path, dialect: Dialect) -> Iterator[RouteBlock]:
    """Blocks of a parquet file, read a few rows at a time."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependency(
            f"{path}: reading parquet needs pyarrow; install it with: pip install 'routepack-opt[parquet]'"
        ) from None
    index = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            columns = [name for name in table.schema_arrow.names if name in _COLUMNS]
            if not set(columns) & set(ROUTE_FIELDS):
                raise InvalidInput("column 'routed_experts' is missing")
            for batch in table.iter_batches(batch_size=ROWS_PER_READ, columns=columns, use_threads=False):
                for row in range(batch.num_rows):
                    record = {name: _value(batch.column(at)[row]) for at, name in enumerate(batch.schema.names)}
                    yield record_block(record, dialect, source=str(path), index=index)
                    index += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: not a readable parquet file ({_first_line(error)})") from None
    except MemoryError:
        raise FormatError(f"{path}: does not fit in the memory of this machine") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({_first_line(error)})") from None


def _value(scalar: Any) -> Any:
    """A parquet cell as a plain value; nested lists become arrays without passing through Python integers."""
    import pyarrow

    if isinstance(scalar, pyarrow.ListScalar):
        return None if scalar.values is None else _nested_array(scalar.values)
    return scalar.as_py()


def _nested_array(values: Any) -> NDArray[Any] | list[Any]:
    """An arrow list column as one rectangular array, or an InvalidInput saying that it is not."""
    import pyarrow

    sizes = [len(values)]
    while pyarrow.types.is_list(values.type) or pyarrow.types.is_large_list(values.type):
        lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
        if values.null_count or lengths.size > 1:
            raise InvalidInput(
                "column 'routed_experts': lists are null or of different lengths; expected [rows, layers, top_k]"
            )
        sizes.append(int(lengths[0]) if lengths.size else 0)
        values = values.flatten()
    if values.null_count:
        raise InvalidInput("column 'routed_experts': null values; expected integers")
    if len(values) == 0:
        return []
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array.reshape(sizes)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
