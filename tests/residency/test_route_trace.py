"""Readers of routing traces: what they accept, and the one line that refuses the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from trace_files import HEADER, NAMES, ROWS, write

from routepack_opt.errors import FormatError, InvalidInput
from routepack_opt.residency import read_route_csv, read_trace, trace_from_routes

if TYPE_CHECKING:
    from pathlib import Path

GOOD = HEADER + NAMES + ROWS


def test_reads_tokens_layers_and_sizes(tmp_path: Path) -> None:
    trace = read_route_csv(write(tmp_path, GOOD))
    assert trace.experts.tolist() == [[[3, 1], [0, 1]], [[1, 2], [0, 1]], [[3, 0], [0, 3]]]
    assert trace.prefill.tolist() == [True, True, False]
    assert trace.expert_bytes.tolist() == [10, 20]
    assert (trace.num_experts, trace.top_k, trace.cycle_bytes) == (4, 2, 60)


def test_a_layer_may_miss_tokens(tmp_path: Path) -> None:
    text = GOOD.replace("0,0,0,1,0,0,0.6,0,20\n0,0,0,1,1,1,0.4,0,20\n", "")
    assert read_route_csv(write(tmp_path, text)).experts[0].tolist() == [[3, 1], [-1, -1]]


def test_without_model_line_the_largest_id_counts(tmp_path: Path) -> None:
    text = GOOD.replace("# model=tiny n_layer=2 n_expert=4 n_expert_used=2\n", "")
    assert read_route_csv(write(tmp_path, text)).num_experts == 4


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0,1,2,0,0,3,", "0,1,2,0,0,4,", "line 14: field 'expert': 4 is out of range; expected 0 to 3"),
        ("0,1,2,0,0,3,", "0,1,2,0,0,-1,", "line 14: field 'expert': -1 is out of range"),
        ("0,1,2,0,0,3,", "0,1,2,7,0,3,", "line 14: field 'layer': layer 7 has no '# layer=7' header"),
        ("0,1,2,0,0,3,0.6", "0,1,2,0,0,3", "line 14: 8 columns; expected 9"),
        ("0,1,2,0,0,3,", "0,1,2,0,0,three,", "line 14: field 'expert': 'three' is not an integer"),
        ("0,1,2,0,0,3,", "0,1,2.5,0,0,3,", "line 14: field 'step': '2.5' is not an integer"),
        ("0,1,2,0,0,3,", f"0,1,2,0,0,{10**30},", "line 14: field 'expert'"),
        ("0,0,1,1,0,0,", "0,0,1,1,0,1,", "line 12: field 'expert': 1: a token names an expert of this layer twice"),
        ("0,1,2,0,0,3,0.6", "0,1,2,0,0,3,nan", "line 14: field 'weight': 'nan' is not a finite number"),
        ("0,1,2,0,0,3,0.6,1", "0,1,2,0,0,3,0.6,2", "line 14: field 'residency': 2 is out of range"),
        ("0,1,2,0,0,3,", "0,2,2,0,0,3,", "line 14: field 'phase': 2 is out of range"),
        ("0,1,2,0,1,0,", "0,1,2,0,0,0,", "line 15: field 'slot': 0: expected 1: slots count up from 0"),
        ("0,0,1,1,0,0,0.6,0,20\n0,0,1,1,1,1", "0,0,0,1,0,0,0.6,0,20\n0,0,0,1,1,1", "field 'slot'"),
        ("0,1,2,1,0,0,0.6,1,0\n0,1,2,1,1,3", "0,1,1,1,0,0,0.6,1,0\n0,1,1,1,1,3", "line 16: field 'step': 1"),
        ("0,0,0,1,0,0,0.6,0,20\n0,0,0,1,1,1", "0,0,9,1,0,0,0.6,0,20\n0,0,9,1,1,1", "line 12: field 'step': 1: decr"),
        ("0,0,1,0,0,1,0.6,0,10\n0,0,1,0,1,2", "0,1,1,0,0,1,0.6,0,10\n0,1,1,0,1,2", "line 10: field 'phase': 0"),
        ("# layer=1 expert_bytes=20", "# layer=1 expert_bytes=0", "line 4: field 'expert_bytes': '0' is not a whole"),
        ("# layer=1 expert_bytes=20", "# layer=0 expert_bytes=20", "line 4: field 'layer': 0 has a header already"),
        ("# layer=1 expert_bytes=20", "# layer=1", "line 4: field 'expert_bytes' is missing"),
        ("route_trace v1", "route_trace v9", "line 1: field 'route_trace'"),
        ("turn,phase", "phase,turn", "line 5: expected the column names"),
        (ROWS, "", "no rows after the column names"),
        (NAMES + ROWS, "", "no column names"),
        (GOOD, "", "empty"),
    ],
)  # fmt: skip
def test_refusals_name_file_line_and_field(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(FormatError) as refusal:
        read_route_csv(path)
    assert path in str(refusal.value) and expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_turns_do_not_fall(tmp_path: Path) -> None:
    later = ROWS.replace("0,1,2", "1,1,2") + ROWS[:21]
    with pytest.raises(FormatError, match="field 'turn': 0: falls"):
        read_route_csv(write(tmp_path, HEADER + NAMES + later))


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    path = tmp_path / "bad.csv"
    path.write_bytes(b"# route_trace v1\n\xff\xfe")
    with pytest.raises(FormatError, match="not text"):
        read_trace(path)


def test_dumps_of_the_routes_room_are_traces_too(tmp_path: Path) -> None:
    routes = np.array([[[0, 1]], [[2, 3]], [[1, 2]], [[3, 0]], [[0, 2]]], dtype=np.uint8)
    path = tmp_path / "dump.npz"
    np.savez(path, routed_experts=routes, seq_lens=np.array([3, 2]))
    trace = read_trace(path, num_experts=4, expert_bytes=100, prompt_tokens=1)
    assert trace.experts.tolist() == routes.tolist()
    assert trace.turns.tolist() == [0, 0, 0, 1, 1]
    assert trace.prefill.tolist() == [True, False, False, True, False]
    with pytest.raises(InvalidInput, match="num_experts: missing"):
        read_trace(path)
    with pytest.raises(FormatError, match=r"dump\.npz.*3"):
        read_trace(path, num_experts=3, expert_bytes=100)


def test_arrays_in_memory_keep_missing_rows() -> None:
    trace = trace_from_routes([np.array([[[0, 1]], [[-1, -1]]])], 4, np.array([7]))
    assert trace.experts.tolist() == [[[0, 1]], [[-1, -1]]]
    with pytest.raises(InvalidInput, match="expert_bytes"):
        trace_from_routes([np.zeros((1, 1, 1), dtype=int)], 4, np.array([7, 8]))


@pytest.mark.data
def test_recorded_traces_and_dumps_are_read(data_dir: Path) -> None:
    qwen = read_trace(data_dir / "traces" / "qwen.route.csv")
    assert (qwen.num_tokens, qwen.num_layers, qwen.num_experts, qwen.top_k) == (156, 48, 128, 6)
    assert int((qwen.experts < 0).sum()) == 27 * 6  # the last layer saw only the last prompt token
    law = read_trace(data_dir / "routes" / "dsv2lite_law.npz", num_experts=64, expert_bytes=1)
    assert law.experts.shape == (8327, 26, 6) and int(law.turns[-1]) == 32


def test_a_short_file_whose_header_filled_the_memory_is_refused(tmp_path: Path) -> None:
    header = "".join(f"# layer={layer} expert_bytes=10\n" for layer in range(100))
    text = f"# route_trace v1\n# n_expert=65536 n_expert_used=1\n{header}{NAMES}0,1,0,0,0,1,0.2,0,1\n"
    with pytest.raises(FormatError, match="100 layers x 65536 experts; expected at most 4194304 in all"):
        read_route_csv(write(tmp_path, text))
