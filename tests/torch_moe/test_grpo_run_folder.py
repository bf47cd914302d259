"""A run's folder: two runs never write to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from routepack_opt.errors import InvalidInput
from routepack_opt.integrations.torch_moe.grpo.run_folder import claimed_folder
from routepack_opt.integrations.torch_moe.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def mesh() -> ParallelMesh:
    return ParallelMesh.single()


def test_two_runs_that_start_together_get_folders_of_their_own(tmp_path: Path, mesh: ParallelMesh) -> None:
    out = str(tmp_path / "run")
    with claimed_folder(out, mesh, resume=False) as first:  # no metrics yet: it is still in its warm start
        with claimed_folder(out, mesh, resume=False) as second:
            assert (first.name, second.name) == ("run", "run-2")
        with pytest.raises(InvalidInput, match="run: another run writes there"), claimed_folder(out, mesh, resume=True):
            pass
    with claimed_folder(out, mesh, resume=True) as again:
        assert again == first


def test_resuming_makes_no_folder(tmp_path: Path, mesh: ParallelMesh) -> None:
    with claimed_folder(str(tmp_path / "none"), mesh, resume=True) as folder:
        assert not folder.exists()
