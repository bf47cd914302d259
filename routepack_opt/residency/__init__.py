"""Hot-expert residency for MoE inference on packages with several memory tiers (residency.md).

| room | holds |
| --- | --- |
| ``machine`` | package description, hardware graph, models, scope |
| ``traces`` | recorded routes, synthetic windows |
| ``cache`` | expert caches replayed on traces |
| ``simulator`` | one decision window at stage or event level |
| ``mapping`` | which replica serves a token group |
| ``control`` | the loop around a policy, look-ahead |
| ``policies`` | one policy a file |
| ``dqn`` | the learned controller |
| ``comparison`` | all policies on equal terms |

Nothing is imported before it is used; kernels and readers load on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "RouteTrace": "traces.route_trace",
    "read_route_csv": "traces.route_trace",
    "read_trace": "traces.token_trace",
    "trace_from_routes": "traces.token_trace",
    "replay_cache": "cache.replay",
    "CacheResult": "cache.replay",
    "POLICIES": "cache.policies",
    "Workload": "traces.windows",
    "trace_workload": "traces.windows",
    "synthetic_workload": "traces.windows",
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from routepack_opt.residency.cache.policies import POLICIES as POLICIES
    from routepack_opt.residency.cache.replay import CacheResult as CacheResult
    from routepack_opt.residency.cache.replay import replay_cache as replay_cache
    from routepack_opt.residency.traces.route_trace import RouteTrace as RouteTrace
    from routepack_opt.residency.traces.route_trace import read_route_csv as read_route_csv
    from routepack_opt.residency.traces.token_trace import read_trace as read_trace
    from routepack_opt.residency.traces.token_trace import trace_from_routes as trace_from_routes
    from routepack_opt.residency.traces.windows import Workload as Workload
    from routepack_opt.residency.traces.windows import synthetic_workload as synthetic_workload
    from routepack_opt.residency.traces.windows import trace_workload as trace_workload


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"routepack_opt.residency.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
