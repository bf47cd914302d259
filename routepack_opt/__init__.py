"""RoutePack: places experts, packs samples, and proves it, before each MoE RL optimizer step.

Names are imported on first use, so that ``import routepack_opt`` and ``routepack --help`` stay fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Window": "window",
    "Topology": "topology",
    "Constraints": "constraints",
    "CostModel": "cost",
    "Stage": "cost",
    "Score": "cost",
    "score": "cost",
    "dense_block": "cost",
    "Plan": "plan",
    "plan_window": "planner",
    "warmup": "planner",
    "read_routes": "routes",
    "count_experts": "routes",
    "pad_routes": "routes",
    "remap_routes": "routes",
    "verify_plan": "verify",
    "RoutePackError": "errors",
}
_MODULES = ("errors",)

__all__ = [*sorted(_EXPORTS), "__version__", "errors"]

if TYPE_CHECKING:
    from routepack_opt import errors as errors
    from routepack_opt.constraints import Constraints as Constraints
    from routepack_opt.cost import CostModel as CostModel
    from routepack_opt.cost import Score as Score
    from routepack_opt.cost import Stage as Stage
    from routepack_opt.cost import dense_block as dense_block
    from routepack_opt.cost import score as score
    from routepack_opt.errors import RoutePackError as RoutePackError
    from routepack_opt.plan import Plan as Plan
    from routepack_opt.planner import plan_window as plan_window
    from routepack_opt.planner import warmup as warmup
    from routepack_opt.routes import count_experts as count_experts
    from routepack_opt.routes import pad_routes as pad_routes
    from routepack_opt.routes import read_routes as read_routes
    from routepack_opt.routes import remap_routes as remap_routes
    from routepack_opt.topology import Topology as Topology
    from routepack_opt.verify import verify_plan as verify_plan
    from routepack_opt.window import Window as Window


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"routepack_opt.{name}")
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"routepack_opt.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
