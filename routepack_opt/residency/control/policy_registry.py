"""The residency policies by name, for commands and comparisons; a policy is imported when it is made."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from routepack_opt.residency.control.observation import Policy

Group = Literal["static", "naive", "fixed", "cache", "peer", "ours", "ablation", "reference"]
_HOME = "routepack_opt.residency.policies"


@dataclass(frozen=True)
class Entry:
    """How to make one policy.

    Parameters
    ----------
    name
        As commands take it and results print it.
    group
        "static" (single copy, the denominator), "fixed" (replicas that never change), "naive" (fixed with an untuned
        map, no baseline: shows what the map is worth), "cache" (LRU, LFU), "peer" (systems of other papers), "ours",
        "ablation" (ours with something taken away), "reference" (knows the future).
    about
        One line.
    module, maker
        Module, and the class or function in it.
    options
        Keyword arguments of ``maker``.
    needs_windows
        It takes the demand of all windows as ``windows``.
    attributes
        Set on the policy once it is made.
    lacks
        What else it needs and this machine has not, or None.
    """

    name: str
    group: Group
    about: str
    module: str
    maker: str
    options: dict[str, Any] = field(default_factory=dict)
    needs_windows: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    lacks: Callable[[], str | None] = lambda: None

    def missing(self) -> str | None:
        """Why it cannot run here; None when it can."""
        package = self.module.rpartition(".")[0]
        found = importlib.util.find_spec(package) and importlib.util.find_spec(self.module)
        return self.lacks() if found else f"module {self.module} is not there"

    def make(self, windows: object = None) -> Policy:
        """A fresh policy; ``windows`` only for those that need them."""
        maker = getattr(importlib.import_module(self.module), self.maker)
        options = {name: value() if callable(value) else value for name, value in self.options.items()}
        if self.needs_windows:
            options["windows"] = windows
        policy = maker(**options)
        for name, value in {**self.attributes, "name": self.name}.items():
            setattr(policy, name, value)
        return cast("Policy", policy)


def _signals(*without: str) -> Any:
    """Signals of the look-ahead with some taken away; made late, so that nothing is imported here."""

    def make() -> Any:
        signals = importlib.import_module(f"{_HOME}.look_ahead").Signals
        return signals(**dict.fromkeys(without, False))

    return make


def _dqn_lacks() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "it needs torch: install routepack-opt[torch]"
    shipped = Path(__file__).resolve().parents[1] / "dqn" / "shipped.safetensors"
    return None if shipped.is_file() else "no trained network is shipped; see 'routepack residency train'"


def _tuned_map() -> Any:
    return importlib.import_module(f"{_HOME}.tuned_maps").BALANCED


def _fixed(name: str, location: str, mapping: Any, about: str) -> Entry:
    options = {"location": location, "mapping": mapping}
    return Entry(name, "fixed", about, f"{_HOME}.fixed_replicas", "FixedReplicas", options)


def _ours(name: str, group: Group, about: str, **options: Any) -> Entry:
    return Entry(name, group, about, f"{_HOME}.look_ahead", "LookAhead", options)


OURS = "look-ahead"
STATIC = "static"
PEERS = ("hydra", "moentwine", "pimoe")
SIGNALS = ("load", "link", "bank", "migration")
NO_MAP = "look-ahead-no-map"

_ENTRIES = (
    Entry(STATIC, "static", "one copy of every expert where the start layout puts it", f"{_HOME}.static", "Static"),
    Entry(
        "fixed-nearest-map", "naive", "replicas by popularity near their token sources, each group to the nearest",
        f"{_HOME}.fixed_replicas", "FixedReplicas", {"location": "near", "mapping": "nearest"},
    ),
    _fixed("fixed-near", "near", _tuned_map, "replicas by popularity near their token sources, the paper's map"),
    _fixed("fixed-spread", "spread", _tuned_map, "replicas by popularity in other quadrants, the paper's map"),
    _fixed("fixed-balanced", "balanced", _tuned_map, "replicas by popularity where load is least, the paper's map"),
    _fixed("fixed-our-map", "balanced", "balance", "replicas by popularity where load is least, our balancing map"),
    Entry("lru", "cache", "replicas of the experts used last", f"{_HOME}.lru", "Lru"),
    Entry("lfu", "cache", "replicas of the experts used most", f"{_HOME}.lfu", "Lfu"),
    Entry("hydra", "peer", "one copy, popular experts near their dominant sources", f"{_HOME}.hydra", "Hydra"),
    Entry(
        "moentwine", "peer", "balanced mapping, shadow replicas that move over cold links",
        f"{_HOME}.moentwine", "MoEntwine",
    ),
    Entry(
        "pimoe", "peer", "hot experts on the compute side, memory-bound ones on the memory side",
        f"{_HOME}.pimoe", "Pimoe",
    ),
    Entry(
        "lfu-our-map", "cache", "replicas of the experts used most, our balancing map", f"{_HOME}.lfu", "Lfu",
        options={"mapping": "balance"},
    ),
    Entry(
        "moentwine-our-map", "peer", "shadow replicas that move over cold links, our balancing map",
        f"{_HOME}.moentwine", "MoEntwine", options={"mapping": "balance"},
    ),
    _ours(OURS, "ours", "the model-based controller, at most one edit a window"),
    _ours("look-ahead-8", "ours", "the model-based controller, at most eight edits a window", max_edits=8, layers=8),
    Entry(
        "dqn", "ours", "the learned controller, at most one edit a window", f"{_HOME}.dqn", "Dqn", lacks=_dqn_lacks
    ),
    Entry(
        NO_MAP, "ablation", "our controller, each group to the nearest replica", f"{_HOME}.look_ahead", "LookAhead",
        attributes={"serve": None, "mapping": "nearest"},
    ),
    *(
        _ours(f"look-ahead-no-{name}", "ablation", f"our controller without the {name} signal", signals=_signals(name))
        for name in SIGNALS
    ),
    Entry(
        "clairvoyant", "reference", "our planner with the next window's demand in hand",
        f"{_HOME}.clairvoyant", "Clairvoyant", needs_windows=True,
    ),
)  # fmt: skip

REGISTRY: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def default_policies() -> tuple[str, ...]:
    """What `compare` runs when nothing is said: all that can run here but ablations, which have their own table."""
    chosen = (entry for entry in _ENTRIES if entry.group not in ("ablation", "reference"))
    return tuple(entry.name for entry in chosen if entry.missing() is None)


def find_policies(names: list[str] | tuple[str, ...]) -> list[Entry]:
    """Entries by name.

    Raises
    ------
    InvalidInput
        A name that is unknown.
    """
    for name in names:
        if name not in REGISTRY:
            raise InvalidInput(f"policy: {name!r} is unknown; expected one of {', '.join(REGISTRY)}")
    return [REGISTRY[name] for name in names]


def group_of(name: str) -> str:
    """Group of a policy, "" when the registry does not have it."""
    return REGISTRY[name].group if name in REGISTRY else ""
