"""Settings of a training run: every default here, read from TOML or changed on the command line."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.files import read_text
from routepack_opt.residency.machine.moe_models import PAPER_MODELS

if TYPE_CHECKING:
    import os

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class WorkloadSettings:
    """One workload to train on.

    Parameters
    ----------
    model
        One of ``moe_models.PAPER_MODELS``.
    phase
        "prefill" or "decode".
    trace
        A ``route.csv`` or routing dump of that model; empty: generated.
    num_windows
        Windows of the workload; episodes are stretches of it.
    """

    model: str
    phase: str
    trace: str = ""
    num_windows: int = 72


@dataclass(frozen=True)
class Settings:
    """Of one training run.

    Parameters
    ----------
    seed, steps
        Of all draws; windows decided on (and network updates) in all.
    package
        Preset or TOML file.
    workload
        What to train on, in turn.
    episode_windows
        Windows of an episode.
    discount
        Of the next window's value. The reward counts an edit's gain once, so this is what an eviction is worth for
        the copy it makes room for, not the length of an edit's life.
    mu1, mu2
        Weights of exposed migration and churn. An edit's gain lasts, its copy is paid once: mu1 is one over the
        windows in which it must repay.
    reward_windows
        Windows that the counterfactual is averaged over (1: the paper's).
    gains
        Whether the network sees the stage model's predicted gains.
    hidden, learning_rate, batch, memory, updates, warmup_steps, target_steps
        Width; of Adam; transitions of an update, held; updates a step; transitions before the first update; updates
        between copies to the target network. The learning rate falls to a twentieth, evenly.
    side
        Legal copies not taken whose reward is measured too, each window; the memory gets them with the next window of
        the one taken. The offline simulator makes them nearly free.
    epsilon_first, epsilon_last, epsilon_share
        Exploration falls from first to last over this share of the steps.
    margin
        Least advantage over no-op (tenths of a layer's time) at which the frozen policy edits: the hysteresis.
    """

    seed: int = 0
    steps: int = 6000
    package: str = "paper"
    workload: tuple[WorkloadSettings, ...] = field(
        default_factory=lambda: tuple(WorkloadSettings(m, p) for m in PAPER_MODELS for p in PHASES)
    )
    episode_windows: int = 24
    discount: float = 0.5
    mu1: float = 0.125
    mu2: float = 0.003
    reward_windows: int = 4
    gains: bool = True
    hidden: int = 64
    learning_rate: float = 1e-3
    batch: int = 32
    memory: int = 8192
    side: int = 3
    updates: int = 2
    warmup_steps: int = 200
    target_steps: int = 200
    epsilon_first: float = 1.0
    epsilon_last: float = 0.05
    epsilon_share: float = 0.6
    margin: float = 0.03

    def __post_init__(self) -> None:
        """Every value in its range.

        Raises
        ------
        InvalidInput
            Naming the setting.
        """
        for name, low in _INTEGERS.items():
            if getattr(self, name) < low:
                raise InvalidInput(f"{name}: {getattr(self, name)} is not a whole number >= {low}")
        for name, (least, most) in _NUMBERS.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and least <= value <= most):
                raise InvalidInput(f"{name}: {value!r} is not a number in [{least:g}, {most:g}]")
        if not self.workload:
            raise InvalidInput("workload: empty; expected at least one")
        for at, work in enumerate(self.workload):
            if work.model not in PAPER_MODELS:
                raise InvalidInput(
                    f"workload[{at}].model: {work.model!r} is unknown; expected one of {', '.join(PAPER_MODELS)}"
                )
            if work.phase not in PHASES:
                raise InvalidInput(f"workload[{at}].phase: {work.phase!r}; expected prefill or decode")
            least_windows = self.episode_windows + self.reward_windows
            if work.num_windows < least_windows:
                raise InvalidInput(
                    f"workload[{at}].num_windows: {work.num_windows} is below episode_windows + reward_windows = "
                    f"{least_windows}"
                )

    def override(self, *, models: tuple[str, ...] | None = None, **values: Any) -> Settings:
        """A copy with the values that are not None; ``models``: their generated windows in both phases."""
        changed = {name: value for name, value in values.items() if value is not None}
        if models is not None:
            changed["workload"] = tuple(WorkloadSettings(m, p) for m in models for p in PHASES)
        return dataclasses.replace(self, **changed)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Settings:
        """Read a TOML file: the settings at the top level, ``[[workload]]`` tables.

        Raises
        ------
        FormatError
            Not TOML, an unknown setting, one of the wrong type or out of range.
        """
        try:
            values = tomllib.loads(read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise FormatError(f"{path}: not valid TOML ({error})") from None
        return cls.from_dict(values, str(path))

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> Settings:
        """From plain values; ``where`` names their source in messages."""
        values = dict(values)
        if "workload" in values:
            rows = values["workload"]
            if not isinstance(rows, list):
                raise FormatError(f"{where}: workload: expected tables, found {type(rows).__name__}")
            values["workload"] = tuple(
                WorkloadSettings(**_checked(WorkloadSettings, row, f"{where}: workload[{at}]"))
                for at, row in enumerate(rows)
            )
        checked = _checked(cls, values, where)
        try:
            return cls(**checked)
        except InvalidInput as error:
            raise FormatError(f"{where}: {error}") from None


_INTEGERS = {
    "seed": 0, "steps": 1, "episode_windows": 2, "reward_windows": 1, "hidden": 1, "batch": 1, "memory": 1,
    "warmup_steps": 1, "target_steps": 1,
    "side": 0,
}  # fmt: skip
_NUMBERS = {
    "discount": (0.0, 0.999), "mu1": (0.0, 1e6), "mu2": (0.0, 1e6), "learning_rate": (0.0, 1.0),
    "epsilon_first": (0.0, 1.0), "epsilon_last": (0.0, 1.0), "epsilon_share": (0.0, 1.0), "margin": (0.0, 1e6),
}  # fmt: skip
_TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "bool": bool}


def _checked(kind: type, values: Any, where: str) -> dict[str, Any]:
    """Names and types of a table's values against a dataclass."""
    if not isinstance(values, dict):
        raise FormatError(f"{where}: expected a table, found {type(values).__name__}")
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    for name, value in values.items():
        if name not in fields:
            raise FormatError(f"{where}: {name!r} is unknown; expected {', '.join(fields)}")
        wanted = str(fields[name].type)
        if wanted in _TYPES and (
            not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted != "bool")
        ):
            raise FormatError(f"{where}: {name}: expected {wanted}, found {type(value).__name__}")
    missing = [
        name
        for name, entry in fields.items()
        if name not in values and entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise FormatError(f"{where}: {missing[0]!r} is missing")
    return {name: float(v) if str(fields[name].type) == "float" else v for name, v in values.items()}
