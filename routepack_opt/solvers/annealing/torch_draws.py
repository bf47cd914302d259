"""Proposals of the torch engine, drawn a block of rounds at a time (shape suffixes: :mod:`.torch_state`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from routepack_opt.solvers.annealing.torch_state import SAMPLES

if TYPE_CHECKING:
    from routepack_opt.solvers.annealing.torch_state import Sizes, State, Tables


class Draws(NamedTuple):
    """Proposals of a round, or with a leading axis Q of a block: all that does not depend on what is accepted."""

    homes_2MS: torch.Tensor  # int64, flat row that i leaves, and that it enters: another one or the same
    rows_2MS: torch.Tensor  # int64, the two rows of the slot: its homes, or one home and a row that is not touched
    atoms_2MSC: torch.Tensor  # int64, flat atom i of the first home and j of the second (null for relocations)
    target_2MSC: torch.Tensor  # int64, flat cell a relocation enters; -1 for the first side and for swaps
    leaving_2MSCF: torch.Tensor  # int64, features the cell of i loses (i - j), and the cell of j
    free_MSC: torch.Tensor  # bool, the move may change DP ranks
    limit_MSC: torch.Tensor  # float64, largest energy change to accept


def draw_block(
    sizes: Sizes,
    tables: Tables,
    state: State,
    generator: torch.Generator,
    num_rounds: int,
    temperature_M: torch.Tensor,
    relocate_share: float,
) -> Draws:
    """Draw the proposals of a block.

    Atoms are drawn from the rows they are in now; by the time of a later round of the block some have left, and that
    round finds them infeasible. Partners of similar length fit more often in full cells: the distance in the order of
    the row's lengths is drawn log-uniformly.
    """
    n, c = sizes.atoms, sizes.candidates
    device = tables.member_M.device
    x, y, z = _draw_rows(sizes, tables, generator, num_rounds)
    order = _rows_in_order(sizes, tables, state)
    u = torch.rand(6, *x.shape, c, generator=generator, device=device)
    x4, y4 = x[..., None], y[..., None]
    i = order.atoms_MN[order.start_MX[x4] + _pick(u[0], order.count_MX[x4])]
    count = order.count_MX[y4]
    nearest = order.upto_MXN[y4 * n + i]  # the next longer one, counted within the row
    reach = (n ** u[1] * count / n).to(torch.int64)
    k = torch.where(u[2] < 0.5, nearest + reach, nearest - 1 - reach - (x4 == y4).long())
    k = torch.where((k < 0) | (k >= count), _pick(u[3], count), k)
    j = order.atoms_MN[order.start_MX[y4] + k]
    relocate = u[4] < relocate_share
    j = j.masked_fill(relocate, n)
    target = (y4 * sizes.cells + _pick(u[3], tables.num_cells_MX[y4])).masked_fill(~relocate, -1)
    leaving = tables.features_NF[i] - tables.features_NF[j]
    tied = tables.pinned_N[i] | tables.pinned_N[j]
    if tables.equal_samples:
        tied = tied | (leaving[..., SAMPLES] != 0)
    return Draws(
        homes_2MS=torch.stack([x, y], dim=1),
        rows_2MS=torch.stack([x, z], dim=1),
        atoms_2MSC=torch.stack([i, j], dim=1) + (tables.member_M * (n + 1))[:, None, None],
        target_2MSC=torch.stack([torch.full_like(target, -1), target], dim=1),
        leaving_2MSCF=torch.stack([leaving, -leaving], dim=1),
        free_MSC=~tied,
        limit_MSC=-torch.log1p(-u[5].to(torch.float64)) * temperature_M[:, None, None],
    )


def _draw_rows(
    sizes: Sizes, tables: Tables, generator: torch.Generator, num_rounds: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Flat rows [Q, M, S]: the two homes of every slot, and the second row it owns; see :class:`Draws`."""
    shape, device = (num_rounds, sizes.members, sizes.slots), tables.member_M.device
    order = torch.rand(*shape[:2], 2 * sizes.slots, generator=generator, device=device).argsort(-1)
    unit1, unit2 = order.split(sizes.slots, dim=2)
    idle = unit1 >= sizes.num_units
    unit1, unit2 = torch.where(idle, unit2, unit1), torch.where(idle, unit1, unit2)
    u = torch.rand(3, *shape, generator=generator, device=device)
    inside = unit2 >= sizes.num_units
    if sizes.cells * sizes.unit > 1:  # a row of one cell has nothing to move inside
        inside = inside | (u[0] < 1.0 / sizes.num_units)
    x, y, z = unit1 * sizes.unit, torch.where(inside, unit1, unit2) * sizes.unit, unit2 * sizes.unit
    if sizes.unit > 1:
        x, y = x + _pick(u[1], sizes.unit), y + _pick(u[2], sizes.unit)
        z = torch.where(x == y, z, y)
    base = (tables.member_M * sizes.rows)[:, None]
    return x + base, y + base, z + base


def _pick(uniform: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """Integer in [0, count) from a uniform number in [0, 1); the product may round up to count."""
    return (uniform * count).to(torch.int64).clamp(max=count - 1)


class _Order(NamedTuple):
    """Atoms by row, then length."""

    atoms_MN: torch.Tensor  # int64 [M * N], local atoms
    start_MX: torch.Tensor  # int64 [M * X], where a row starts in it
    count_MX: torch.Tensor  # int64 [M * X]
    upto_MXN: torch.Tensor  # int32 [M * X * N], atoms of the row that are not longer than an atom


def _rows_in_order(sizes: Sizes, tables: Tables, state: State) -> _Order:
    m, n, num_rows = sizes.members, sizes.atoms, sizes.rows
    cell_MN = state.cell_of_MN.view(m, -1)[:, :n]
    row_MN = cell_MN // sizes.cells
    row_MX = torch.arange(m * num_rows, device=cell_MN.device).view(m, num_rows)
    upto = (row_MN[:, None] == row_MX[..., None]).cumsum(-1, dtype=torch.int32)
    count = upto[..., -1].to(torch.int64)
    start = (tables.member_M * n)[:, None] + count.cumsum(-1) - count
    atom_N = torch.arange(n, device=cell_MN.device).expand(m, -1)
    upto, start, count = upto.view(-1), start.view(-1), count.view(-1)
    place = start[row_MN] + upto[row_MN * n + atom_N] - 1
    atoms = torch.empty(m * n, dtype=torch.int64, device=cell_MN.device)
    return _Order(atoms.scatter_(0, place.view(-1), atom_N.reshape(-1)), start, count, upto)
