"""Scene: one model on one machine, what simulator, policies and bounds share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt.errors import InvalidInput
from routepack_opt.residency.machine.hardware import Hardware
from routepack_opt.residency.machine.moe_models import MoeModel, moe_model
from routepack_opt.residency.machine.package import Package
from routepack_opt.residency.machine.scope import ScopeRule, choose_scope, expert_size, region_room

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Scene:
    """One model in scope on one machine.

    Parameters
    ----------
    hardware, model
        The machine and the model.
    num_layers, num_experts, top_k
        L (MoE layers in scope), E, k.
    expert_bytes
        [L] S, bytes of one expert, whole numbers.
    expert_ops
        Multiply-adds of one token in one expert.
    token_bytes
        Of one token's activations on a link.
    gate_ops
        Multiply-adds of the gate for one token: E * d.
    combine_ops
        Adds that combine one expert's result into its token: d.
    other_ops, other_pair_ops, other_bytes
        Non-routed events of the layers in scope: multiply-adds a token, a (token, key) pair, bytes of weights read.
    region_room
        [G] bytes experts may take.
    budget_bytes
        B_res: most bytes of all replicas together.
    r_max
        Most replicas of an expert.
    scope
        The sentence that results print.
    """

    hardware: Hardware
    model: MoeModel
    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: NDArray[np.float64]
    expert_ops: float
    token_bytes: float
    gate_ops: float
    combine_ops: float
    other_ops: float
    other_pair_ops: float
    other_bytes: float
    region_room: NDArray[np.float64]
    budget_bytes: float
    r_max: int
    scope: str

    def __post_init__(self) -> None:
        """Budget and capacity must hold one copy of every expert, each in some region."""
        package = self.hardware.package
        one_copy = float(self.expert_bytes.sum()) * self.num_experts
        if self.budget_bytes < one_copy:
            raise package.error(
                "residency.budget_copies",
                f"a budget of {self.budget_bytes / 2**20:.6g} MiB is under one copy of every expert; "
                f"expected at least {one_copy / 2**20:.6g} MiB",
            )
        for layer, size in enumerate(self.expert_bytes):
            if size > self.region_room.max():
                raise package.error(
                    "tier",
                    f"experts of layer {layer} take {size / 2**20:.4g} MiB and fit no tier (largest region: "
                    f"{self.region_room.max() / 2**20:.4g} MiB after reserves); expected a region that holds one",
                )
        if one_copy > self.region_room.sum():
            raise package.error(
                "tier.capacity_mib",
                f"the regions hold {self.region_room.sum() / 2**20:.6g} MiB after reserves, one copy of every expert "
                f"takes {one_copy / 2**20:.6g} MiB; expected room for one copy: fewer layers, or scope 'capacity'",
            )
        size = float(self.expert_bytes.min())
        held, wanted = int(np.floor(self.region_room / size).sum()), self.num_layers * self.num_experts
        if held < wanted:  # an expert lies whole in one region; with several sizes this is what is certain
            raise package.error(
                "tier.capacity_mib",
                f"the regions hold {held} whole experts of {size / 2**20:.4g} MiB after reserves, one copy of every "
                f"expert is {wanted}; expected room for one copy: fewer layers, or scope 'capacity'",
            )

    @property
    def num_chiplets(self) -> int:
        """C."""
        return self.hardware.num_chiplets

    @property
    def num_tiers(self) -> int:
        """Of memory."""
        return self.hardware.num_tiers

    def tier_holds(self, layer: int) -> NDArray[np.bool_]:
        """[num_tiers, C] whether an expert of ``layer`` may live in that tier, executed by that chiplet."""
        region_of = self.hardware.region_of
        room = np.where(region_of >= 0, self.region_room[region_of], -1.0)
        return np.asarray(room >= self.expert_bytes[layer])


def build_scene(
    package: Package | str | os.PathLike[str],
    model: MoeModel | str | os.PathLike[str],
    *,
    scope: ScopeRule = "layers",
    num_layers: int | None = None,
    budget_copies: float | None = None,
    r_max: int | None = None,
) -> Scene:
    """A scene from a package and a model.

    Parameters
    ----------
    package
        Package, preset name or TOML file.
    model
        MoeModel, name or ``config.json``.
    scope, num_layers, budget_copies
        See :func:`~routepack_opt.residency.machine.scope.choose_scope`; a budget above what the regions hold is
        legal, the regions then bind.
    r_max
        Default: the package's.

    Raises
    ------
    InvalidInput
        See there; also a model or package that cannot be read.
    """
    if not isinstance(package, Package):
        package = Package.load(package)
    hardware = Hardware.from_package(package)
    rules = package.rules
    if not isinstance(model, MoeModel):
        model = moe_model(model)
    copies = rules.budget_copies if budget_copies is None else budget_copies
    chosen = choose_scope(hardware, model, rule=scope, num_layers=num_layers, budget_copies=copies)
    layers, size = chosen.num_layers, expert_size(hardware, model)
    most = rules.r_max if r_max is None else r_max
    if most < 1:
        raise InvalidInput(f"r_max: {most} is under one replica; expected at least 1")
    share = layers / model.num_layers
    return Scene(
        hardware=hardware,
        model=model,
        num_layers=layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        expert_bytes=np.full(layers, size),
        expert_ops=float(model.expert_weights),
        token_bytes=float(np.ceil(model.hidden * rules.bytes_per_activation)),
        gate_ops=float(model.num_experts * model.hidden),
        combine_ops=float(model.hidden),
        other_ops=model.other_macs * share,
        other_pair_ops=model.other_pair_macs * share,
        other_bytes=model.other_weights * rules.bytes_per_weight * share,
        region_room=chosen.region_room,
        budget_bytes=float(np.floor(copies * size * layers * model.num_experts + 1e-6)),
        r_max=most,
        scope=chosen.sentence,
    )


def scene_of(
    package: Package,
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
    expert_bytes: float | NDArray[np.float64],
    hidden: int = 2048,
    expert_width: int = 1408,
    budget_copies: float | None = None,
) -> Scene:
    """A scene from bare sizes, for traces without a model and for tests: no scope rule, no non-routed events.

    Parameters
    ----------
    package
        The machine.
    num_layers, num_experts, top_k
        L, E, k.
    expert_bytes
        S, one for all layers or [L].
    hidden, expert_width
        d and d_ff, three matrices.
    budget_copies
        Default: the package's.
    """
    hardware = Hardware.from_package(package)
    sizes = np.broadcast_to(np.asarray(expert_bytes, dtype=np.float64), (num_layers,)).copy()
    if not (np.isfinite(sizes) & (sizes >= 1)).all():
        layer = int(np.argmin(np.isfinite(sizes) & (sizes >= 1)))
        raise InvalidInput(f"expert_bytes[{layer}]: {sizes[layer]!r} is not a size; expected at least 1 byte")
    copies = package.rules.budget_copies if budget_copies is None else budget_copies
    model = MoeModel("sizes", hidden, expert_width, num_layers, num_experts, top_k, 0, 0, 0)
    sentence = f"Scope: {num_layers} MoE layers of {num_experts} experts on {package.name}, budget {copies:g} copies."
    return Scene(
        hardware=hardware,
        model=model,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_bytes=np.floor(sizes),
        expert_ops=float(model.expert_weights),
        token_bytes=float(np.ceil(hidden * package.rules.bytes_per_activation)),
        gate_ops=float(num_experts * hidden),
        combine_ops=float(hidden),
        other_ops=0.0,
        other_pair_ops=0.0,
        other_bytes=0.0,
        region_room=region_room(hardware),
        budget_bytes=float(np.floor(copies * np.floor(sizes).sum() * num_experts + 1e-6)),
        r_max=package.rules.r_max,
        scope=sentence,
    )
