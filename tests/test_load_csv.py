"""Loads as CSV: windows apart, layers in order, refusals that name line and column."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from routepack_opt.cli import main
from routepack_opt.errors import FormatError
from routepack_opt.integrations.eplb_files import read_layer_ids, read_load_windows

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "dataset,iteration,layer_idx,0,1\na,0,5,1,2\na,0,3,3,4\n\na,1,3,5,6\na,1,5,7,8.0\n"


def test_windows_and_layers_are_sorted_out(tmp_path: Path) -> None:
    path = tmp_path / "l.csv"
    path.write_text(TEXT)
    assert read_load_windows(path).tolist() == [[[3, 4], [1, 2]], [[5, 6], [7, 8]]]
    assert read_layer_ids(path) == [3, 5]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1"),
        ("layer,0,2\n0,1,1\n", "one for each expert"),
        ("step,0,1\n0,1,1\n", "layer_idx"),
        ("layer,0,1\n", "no rows"),
        ("layer,0,1\n0,1\n", "line 2: 2 columns"),
        ("layer,0,1\n0,1,-1\n", "line 2, column 1: '-1'"),
        ("layer,0,1\n0,1,nan\n", "line 2, column 1: 'nan'"),
        ("layer,0,1\n0,1,1.5\n", "not a whole number"),
        ("layer,0,1\n0,1,1\n0,1,1\n", "line 3: a second row"),
        ("s,layer,0,1\n0,0,1,1\n0,1,1,1\n1,0,1,1\n", "window 1 has no row of layer 1"),
        ("layer,0,1\n0,1," + "9" * 30 + "\n", "not a whole number"),
    ],
)
def test_bad_files_name_line_and_column(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "l.csv"
    path.write_text(text)
    with pytest.raises(FormatError, match=words):
        read_load_windows(path)


@pytest.mark.data
@pytest.mark.parametrize("name", ["qwen_policy_datasets", "switch128_skew"])
def test_published_frequencies_are_placed(data_dir: Path, name: str, capsys: Any) -> None:
    path = data_dir / "loads" / f"expert_freq_{name}.csv"
    assert main(["place", str(path), "--ranks", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] < 3e-4
    assert np.array(read_load_windows(path)).shape[1] == 12
