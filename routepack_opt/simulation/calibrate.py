"""Fit the cost model, and the step-time model behind ``simulate``, to measured kernels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routepack_opt.cost import CostModel, Stage
from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routepack_opt.simulation.measurements import Measurements


@dataclass(frozen=True)
class LinearFit:
    """Seconds as a sum of non-negative terms.

    Attributes
    ----------
    terms
        Name -> seconds a unit: "constant", then "token" and "square", or "active" and "token".
    r2
        Share of the variance explained; 1 when all times are equal and met.
    worst_share, mean_share
        Largest and mean |error| / time over measurements.
    num_measurements
        How many.
    dropped
        Terms that the measurements cannot tell from the constant, held at 0.
    """

    terms: dict[str, float]
    r2: float
    worst_share: float
    mean_share: float
    num_measurements: int
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """Fits of one device.

    Attributes
    ----------
    experts
        None without expert times.
    attention
        Block name -> fit, one layer.
    block_layers
        Block name -> layers.
    """

    experts: LinearFit | None
    attention: dict[str, LinearFit]
    block_layers: dict[str, float]
    token_cap: int | None
    hidden: int | None
    expert_width: int | None
    backward: bool
    sources: tuple[str, ...]
    notes: tuple[str, ...] = ()


def fit_terms(
    features: NDArray[np.float64], seconds: NDArray[np.float64], names: Sequence[str], what: str
) -> LinearFit:
    """Non-negative least squares of ``seconds`` on a constant and the columns of ``features``.

    Raises
    ------
    InvalidInput
        Negative or missing values, or fewer distinct measurements than terms.
    """
    from scipy.optimize import nnls

    if not (np.isfinite(features).all() and np.isfinite(seconds).all()):
        raise InvalidInput(f"{what}: a measurement is not a finite number")
    if (features < 0).any() or (seconds < 0).any():
        raise InvalidInput(f"{what}: a measurement is negative")
    distinct = len(np.unique(features, axis=0)) if len(features) else 0
    if distinct <= len(names):
        raise InvalidInput(
            f"{what}: {distinct} distinct measurements for {len(names) + 1} terms; at least {len(names) + 1} are needed"
        )
    kept = [k for k in range(len(names)) if np.ptp(features[:, k]) > 0]
    columns = np.column_stack([np.ones(len(seconds)), *(features[:, k] for k in kept)])
    scale = columns.max(axis=0)
    if np.linalg.matrix_rank(columns / scale) < columns.shape[1]:
        raise InvalidInput(f"{what}: the measurements are too alike to tell {', '.join(names)} apart")
    coefficients = nnls(columns / scale, seconds)[0] / scale
    error = columns @ coefficients - seconds
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    share = np.abs(error)[seconds > 0] / seconds[seconds > 0]
    terms = dict.fromkeys(("constant", *names), 0.0)
    terms |= {name: float(c) for name, c in zip(["constant", *(names[k] for k in kept)], coefficients, strict=True)}
    return LinearFit(
        terms,
        r2=1.0 - float((error**2).sum()) / spread if spread > 0 else 1.0,
        worst_share=float(share.max(initial=0.0)),
        mean_share=float(share.mean()) if share.size else 0.0,
        num_measurements=len(seconds),
        dropped=tuple(name for k, name in enumerate(names) if k not in kept),
    )


def calibrate(measurements: Sequence[Measurements]) -> Calibration:
    """Fit all measurements of one device together.

    Raises
    ------
    InvalidInput
        Files of different sizes or passes, or what :func:`fit_terms` refuses.
    """
    if not measurements:
        raise InvalidInput("measurements: none given")
    first = measurements[0]
    for name in ("hidden", "expert_width", "backward"):
        values = {getattr(m, name) for m in measurements if getattr(m, name) is not None}
        if len(values) > 1:
            raise InvalidInput(f"{measurements[-1].source}: {name} differs from that of {first.source}: {values}")
    experts = np.concatenate([m.experts for m in measurements])
    fit = None
    if len(experts):
        fit = fit_terms(experts[:, [1, 0]], experts[:, 2], ("active", "token"), "experts")
    attention, layers = {}, {}
    for name in dict.fromkeys(name for m in measurements for name in m.attention):
        rows = np.concatenate([m.attention[name] for m in measurements if name in m.attention])
        counts = {m.block_layers[name] for m in measurements if name in m.block_layers}
        if len(counts) > 1:
            raise InvalidInput(f"block {name!r}: {sorted(counts)} layers in different files; expected one model")
        if len(rows):
            attention[name] = fit_terms(rows[:, :2], rows[:, 2], ("token", "square"), f"attention block {name!r}")
            layers[name] = counts.pop()
    if fit is None and not attention:
        raise InvalidInput(f"{first.source}: holds no measurement")
    caps = {m.token_cap for m in measurements if m.token_cap is not None}
    notes = [note for m in measurements for note in m.notes]
    if fit is not None and "active" in fit.dropped:
        notes.append("every measurement has as many active experts: their term is part of the constant")
    return Calibration(
        fit,
        attention,
        layers,
        caps.pop() if len(caps) == 1 else None,
        next((m.hidden for m in measurements if m.hidden is not None), None),
        next((m.expert_width for m in measurements if m.expert_width is not None), None),
        any(m.backward for m in measurements),
        tuple(m.source for m in measurements),
        tuple(notes),
    )


def cost_model(
    calibration: Calibration, token_cap: int, *, stages: Sequence[Stage] = (), sync: Literal["shard", "row"] = "shard"
) -> CostModel:
    """The score's weights in the unit of C token-expert assignments, so that expert_weight is 1.

    alpha = C a n / (C g) and beta = C^2 b n / (C g) for a block of n layers that takes a seconds a token and b a
    squared token, g seconds an assignment. Constants and the per-active-expert term have no place in the score: they
    are the same in most layouts, and belong to the step-time model.

    Parameters
    ----------
    stages
        Attention stages to use where there are no attention times, in that unit already
        (:meth:`CostModel.for_model`).

    Raises
    ------
    InvalidInput
        No expert times, an assignment that costs nothing, or neither attention times nor stages.
    """
    if calibration.experts is None:
        raise InvalidInput("cost: no expert times were given, so expert_weight cannot be fitted")
    unit = calibration.experts.terms["token"]
    if unit <= 0:
        raise InvalidInput("cost: the fitted time of an assignment is 0; measure larger expert kernels")
    made: dict[str, tuple[float, float]] = {}
    for name, fit in calibration.attention.items():
        kind, layers = name.split("-")[0], calibration.block_layers[name]
        alpha, beta = made.get(kind, (0.0, 0.0))
        made[kind] = (
            alpha + layers * fit.terms["token"] / unit,
            beta + layers * fit.terms["square"] * token_cap / unit,
        )
    fitted = tuple(Stage(kind, alpha, beta) for kind, (alpha, beta) in made.items())
    if not fitted and not stages:
        raise InvalidInput("cost: no attention times; give replay measurements, or --model for alpha and beta")
    return CostModel(fitted or tuple(stages), expert_weight=1.0, sync=sync)


def fits_json(calibration: Calibration) -> dict[str, Any]:
    """Both kinds of fits as plain values."""
    return {
        "experts": None if calibration.experts is None else asdict(calibration.experts),
        "attention": {name: asdict(fit) for name, fit in calibration.attention.items()},
    }
