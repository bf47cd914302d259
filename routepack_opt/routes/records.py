"""One sample a record (JSON line, parquet row, element of a saved list): field names -> RouteBlock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import InvalidInput
from routepack_opt.routes.payloads import decode_routes
from routepack_opt.routes.samples import RouteBlock, checked_ids, single_sample

if TYPE_CHECKING:
    from collections.abc import Mapping

ROUTE_FIELDS = ("routed_experts", "rollout_routed_experts")
ID_FIELDS = ("id", "sample_id", "index")
GROUP_FIELDS = ("group", "group_id", "group_index")
LENGTH_FIELDS = ("length", "seq_len", "total_length")
START_FIELDS = ("start_len", "routed_experts_start_len")
# (prompt, response) pairs: a count or a list of tokens each
TOKEN_PAIRS = (
    ("prompt_tokens", "completion_tokens"),
    ("prompt_length", "response_length"),
    ("prompt_token_ids", "token_ids"),
    ("prompt_token_ids", "generation_token_ids"),
)
NESTED = ("meta_info", "sglext", "usage")  # where SGLang and OpenAI-style answers keep these fields


@dataclass(frozen=True)
class Dialect:
    """What a framework leaves unsaid.

    ``dtype`` is the id type of raw bytes, ``rows_short`` how many rows fewer than tokens it records (None: unknown,
    so a record must tell its length).
    """

    name: str
    dtype: str | None = None
    rows_short: int | None = None
    top_k: int | None = None
    num_layers: int | None = None


DIALECTS = {
    "vllm": Dialect("vllm", rows_short=1),
    "sglang": Dialect("sglang", dtype="int32", rows_short=1),
    "verl": Dialect("verl"),
    "nemo-rl": Dialect("nemo-rl", rows_short=0),
    "slime": Dialect("slime", dtype="int32", rows_short=1),
    "trtllm": Dialect("trtllm", rows_short=1),
}


def record_block(record: Any, dialect: Dialect, *, source: str, index: int) -> RouteBlock:
    """The routes of one record.

    Raises
    ------
    InvalidInput
        Naming source, sample and field.
    """
    where = f"{source}: sample {index}"
    if not isinstance(record, dict):
        raise InvalidInput(
            f"{where}: expected an object with the field 'routed_experts', found {type(record).__name__}"
        )
    flat = _with_nested(record)
    sample_id = _first(flat, ID_FIELDS)
    if sample_id is not None:
        if isinstance(sample_id, bool) or not isinstance(sample_id, (str, int)):
            raise InvalidInput(f"{where}: field 'id': expected text or an integer, found {type(sample_id).__name__}")
        sample_id = str(sample_id)
        where += f" ({sample_id!r})"
    group = _first(flat, GROUP_FIELDS)
    if group is not None and (isinstance(group, bool) or not isinstance(group, (str, int))):
        raise InvalidInput(f"{where}: field 'group': expected text or an integer, found {type(group).__name__}")
    if isinstance(group, int) and not -(2**62) <= group <= 2**62:
        raise InvalidInput(f"{where}: field 'group': {group} does not fit 63 bits")
    start_len = _whole(_first(flat, START_FIELDS), "start_len", where)
    length = _length(flat, where)
    payload = _first(flat, ROUTE_FIELDS)
    if payload is None:
        raise InvalidInput(f"{where}: field 'routed_experts' is missing")
    rows = None
    if length is not None and dialect.rows_short is not None:
        rows = max(length - max(start_len or 0, 0) - dialect.rows_short, 0)
    field = f"{where}: field 'routed_experts'"
    routes = None
    if not (isinstance(payload, list) and not payload):
        array = decode_routes(
            payload,
            dtype=_first(flat, ("dtype",)) or dialect.dtype,
            shape=_first(flat, ("shape",)),
            rows=rows,
            num_layers=_whole(flat.get("num_layers"), "num_layers", where) or dialect.num_layers,
            top_k=_whole(flat.get("top_k"), "top_k", where) or dialect.top_k,
            where=field,
        )
        routes = checked_ids(array, field)
    if length is None:
        if dialect.rows_short is None or routes is None:
            raise InvalidInput(f"{where}: field 'length' is missing; expected the tokens of prompt and response")
        length = routes.shape[0] + dialect.rows_short + max(start_len or 0, 0)
    return single_sample(
        routes, length, source=source, index=index, start_len=start_len, sample_id=sample_id, group=group
    )


def _with_nested(record: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name in NESTED:
        inner = record.get(name)
        if isinstance(inner, dict):
            flat.update(inner)
    flat.update(record)
    return flat


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if record.get(name) is not None:
            return record[name]
    return None


def _whole(value: Any, name: str, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise InvalidInput(f"{where}: field {name!r}: {value!r} is not an integer from 0 to {2**31 - 1}")
    return value


def _length(record: Mapping[str, Any], where: str) -> int | None:
    for name in LENGTH_FIELDS:
        if record.get(name) is not None:
            return _whole(record[name], name, where)
    for prompt, response in TOKEN_PAIRS:
        sizes = [_size(record.get(name), name, where) for name in (prompt, response)]
        if sizes[0] is not None and sizes[1] is not None:
            return sizes[0] + sizes[1]
    tokens = record.get("tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _size(value: Any, name: str, where: str) -> int | None:
    return len(value) if isinstance(value, list) else _whole(value, name, where)
