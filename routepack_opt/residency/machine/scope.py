"""Scope: which MoE layers of a model the residency problem covers, when the package cannot hold all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from routepack_opt.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routepack_opt.residency.machine.hardware import Hardware
    from routepack_opt.residency.machine.moe_models import MoeModel

ScopeRule = Literal["layers", "capacity"]


@dataclass(frozen=True)
class Scope:
    """What is simulated of a model on a package.

    Parameters
    ----------
    num_layers
        L, MoE layers in scope: the first ones.
    capacity_scale
        Factor on the capacity of every region (1 with the rule "layers").
    region_room
        [G] bytes experts may take in each region: scaled capacity less the reserves.
    sentence
        What every result must print.
    """

    num_layers: int
    capacity_scale: float
    region_room: NDArray[np.float64]
    sentence: str


def region_room(hardware: Hardware, scale: float = 1.0) -> NDArray[np.float64]:
    """[G] whole bytes for experts: capacity x scale, less activation and metadata reserves."""
    rules = hardware.package.rules
    room = hardware.region_capacity * scale * (1.0 - rules.activation_reserve) - rules.metadata_reserve_kib * 1024
    return np.maximum(np.floor(room), 0.0)


def experts_held(room: NDArray[np.float64], expert_bytes: float) -> int:
    """How many experts of one size the regions hold: each lies in one region whole."""
    return int(np.floor(room / expert_bytes).sum())


def choose_scope(
    hardware: Hardware,
    model: MoeModel,
    *,
    rule: ScopeRule = "layers",
    num_layers: int | None = None,
    budget_copies: float | None = None,
) -> Scope:
    """Layers in scope, or the capacities that hold all of them.

    With the rule "layers" (the default) as many MoE layers as the regions hold at ``budget_copies`` copies of every
    expert; if that is none, one layer with as many copies as fit. With "capacity" every region grows by one factor
    until all layers fit.

    Parameters
    ----------
    hardware, model
        The machine and the model.
    rule
        "layers" or "capacity".
    num_layers
        Consider only the first so many MoE layers; None: all.
    budget_copies
        Default: the package's.

    Raises
    ------
    InvalidInput
        An expert that fits no region, or one layer that does not fit with a single copy (names the way out).
    """
    package = hardware.package
    wanted = model.num_layers if num_layers is None else num_layers
    if not 1 <= wanted <= model.num_layers:
        raise InvalidInput(f"num_layers: {wanted} is not 1..{model.num_layers}, the MoE layers of {model.name}")
    copies = package.rules.budget_copies if budget_copies is None else budget_copies
    if not copies >= 1.0:
        raise InvalidInput(f"budget_copies: {copies:g} holds no copy of every expert; expected at least 1")
    expert_bytes = expert_size(hardware, model)
    room = region_room(hardware)
    if rule == "capacity":
        scale = _scale_for(hardware, expert_bytes, _replicas(copies, wanted, model))
        room = region_room(hardware, scale)
        text = f"capacities scaled x{scale:.4g}: " if scale > 1.0 else "capacities as given: "
        text += f"{wanted} of {model.num_layers} MoE layers"
        return Scope(wanted, scale, room, _sentence(text, model, package.name, expert_bytes, copies))
    if rule != "layers":
        raise InvalidInput(f"scope: {rule!r} is no rule; expected 'layers' or 'capacity'")
    if expert_bytes > room.max():
        raise package.error(
            "tier",
            f"an expert of {model.name} takes {expert_bytes / 2**20:.4g} MiB and fits no tier (largest region: "
            f"{room.max() / 2**20:.4g} MiB after reserves); expected a region that holds it, or scope 'capacity'",
        )
    held = experts_held(room, expert_bytes)
    if held < model.num_experts:
        raise package.error(
            "tier.capacity_mib",
            f"the regions hold {held} experts of {expert_bytes / 2**20:.4g} MiB, one layer of {model.name} has "
            f"{model.num_experts}; expected room for one copy, or scope 'capacity'",
        )
    layers = next((n for n in range(wanted, 0, -1) if _replicas(copies, n, model) <= held), 1)
    text = f"layer window: the first {layers} of {model.num_layers} MoE layers"
    if _replicas(copies, layers, model) > held:
        text += f" (room for {held / model.num_experts:.3g} copies only)"
    return Scope(layers, 1.0, room, _sentence(text, model, package.name, expert_bytes, copies))


def expert_size(hardware: Hardware, model: MoeModel) -> float:
    """S, whole bytes of one expert at the package's bytes per weight."""
    return float(np.ceil(model.expert_weights * hardware.package.rules.bytes_per_weight))


def _replicas(copies: float, layers: int, model: MoeModel) -> int:
    """Replicas that a budget of ``copies`` makes of ``layers`` layers."""
    return int(np.ceil(copies * layers * model.num_experts - 1e-9))


def _scale_for(hardware: Hardware, expert_bytes: float, needed: int) -> float:
    """The least factor >= 1, to a part in a thousand, with room for ``needed`` experts."""
    low, high = 1.0, 1.0
    while experts_held(region_room(hardware, high), expert_bytes) < needed:
        low, high = high, 2.0 * high
    while high - low > 1e-3 * low:
        middle = 0.5 * (low + high)
        if experts_held(region_room(hardware, middle), expert_bytes) < needed:
            low = middle
        else:
            high = middle
    return high


def _sentence(text: str, model: MoeModel, package: str, expert_bytes: float, copies: float) -> str:
    return (
        f"Scope: {model.name} on {package}, {text}, {model.num_experts} experts of {expert_bytes / 2**20:.4g} MiB, "
        f"budget {copies:g} copies."
    )
