"""Hot-expert residency for MoE inference on packages with several memory tiers (residency.md).

Nothing is imported before it is used; kernels and readers load on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "RouteTrace": "route_trace",
    "read_route_csv": "route_trace",
    "read_trace": "token_trace",
    "trace_from_routes": "token_trace",
    "replay_cache": "cache_replay",
    "CacheResult": "cache_replay",
    "POLICIES": "cache_policies",
    "Workload": "windows",
    "trace_workload": "windows",
    "synthetic_workload": "windows",
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from routepack_opt.residency.cache_policies import POLICIES as POLICIES
    from routepack_opt.residency.cache_replay import CacheResult as CacheResult
    from routepack_opt.residency.cache_replay import replay_cache as replay_cache
    from routepack_opt.residency.route_trace import RouteTrace as RouteTrace
    from routepack_opt.residency.route_trace import read_route_csv as read_route_csv
    from routepack_opt.residency.token_trace import read_trace as read_trace
    from routepack_opt.residency.token_trace import trace_from_routes as trace_from_routes
    from routepack_opt.residency.windows import Workload as Workload
    from routepack_opt.residency.windows import synthetic_workload as synthetic_workload
    from routepack_opt.residency.windows import trace_workload as trace_workload


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"routepack_opt.residency.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
