"""Routing-replay dumps -> windows, and routes under a placement.

Readers and kernels are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "read_routes": "reader",
    "detect_container": "reader",
    "FORMATS": "reader",
    "window_from_routes": "memory",
    "count_experts": "counting",
    "decode_routes": "payloads",
    "pad_routes": "placement",
    "remap_routes": "placement",
    "IngestReport": "report",
    "RouteWarning": "report",
    "parse_layer_ranges": "samples",
    "warmup": "kernels",
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from routepack_opt.routes.counting import count_experts as count_experts
    from routepack_opt.routes.kernels import warmup as warmup
    from routepack_opt.routes.memory import window_from_routes as window_from_routes
    from routepack_opt.routes.payloads import decode_routes as decode_routes
    from routepack_opt.routes.placement import pad_routes as pad_routes
    from routepack_opt.routes.placement import remap_routes as remap_routes
    from routepack_opt.routes.reader import FORMATS as FORMATS
    from routepack_opt.routes.reader import detect_container as detect_container
    from routepack_opt.routes.reader import read_routes as read_routes
    from routepack_opt.routes.report import IngestReport as IngestReport
    from routepack_opt.routes.report import RouteWarning as RouteWarning
    from routepack_opt.routes.samples import parse_layer_ranges as parse_layer_ranges


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"routepack_opt.routes.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
