"""Every refusal of a configuration names file and key; the example and the documentation are complete."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from routepack_opt.errors import FormatError
from routepack_opt.integrations.torch_moe.grpo.run_config import SECTIONS, RunConfig

ROOT = Path(__file__).resolve().parents[2]


def load(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return RunConfig.load(path)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert config == RunConfig()
    assert config.num_processes == 4 and config.num_samples == 256 and config.max_new_tokens == 3


def test_values_are_read_and_written_back(tmp_path: Path) -> None:
    text = "[model]\ndense_layers = [0]\ndense_size = 32\n[plan]\nlate_moves = 0.5\n[optim]\nlr = 1\n[run]\nseed = 9"
    config = load(tmp_path, text)
    assert config.model.dense_layers == (0,) and config.plan.late_moves == 0.5 and config.run.seed == 9
    assert isinstance(config.optim.lr, float)
    assert RunConfig.from_table(config.to_table()) == config
    assert config.override(run__seed=None, run__steps=3).run.steps == 3
    assert isinstance(load(tmp_path, "[plan]\nlate_moves = 3").plan.late_moves, int)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[modle]", r"section \[modle\] is unknown"),
        ("model = 3", r"model: expected a section"),
        ("[model]\nlayers = 3", r"model\.layers: no such key"),
        ("[model]\nnum_layers = 0", r"model\.num_layers: expected a whole number of at least 1, found 0"),
        ("[model]\nnum_layers = 2.0", r"model\.num_layers: expected a whole number"),
        ("[model]\nnum_layers = true", r"model\.num_layers: expected a whole number"),
        ('[model]\nrouter = "hash"', r"model\.router: expected 'softmax' or 'sigmoid'"),
        ("[model]\nqk_norm = 1", r"model\.qk_norm: expected true or false"),
        ("[model]\ndense_layers = 1", r"model\.dense_layers: expected a list"),
        ("[model]\ndense_layers = [0, -1]", r"model\.dense_layers\[1\]: expected a whole number of at least 0"),
        ("[model]\nnum_kv_heads = 3", r"model: num_heads: 4 is no multiple of 3"),
        ("[model]\nnum_experts = 9", r"parallel\.ep: 2 does not divide model\.num_experts = 9"),
        ("[parallel]\nprocesses = 3", r"parallel\.processes: 3 does not equal ep x shards = 2 x 2 = 4"),
        ('[parallel]\nbackend = "mpi"', r"parallel\.backend: expected 'auto' or 'gloo' or 'nccl'"),
        ("[parallel]\ntimeout_s = 0", r"parallel\.timeout_s: expected a number above 0"),
        ("[task]\nmin_terms = 5", r"task\.max_terms: 3 is below task\.min_terms = 5"),
        ("[sampling]\nprompts = 2", r"sampling\.prompts: 2 leave some of 4 ranks"),
        ("[sampling]\ngroup_size = 1", r"sampling\.group_size: expected a whole number of at least 2"),
        ("[sampling]\ntemperature = nan", r"sampling\.temperature: expected a number above 0"),
        ('[optim]\nlr = "fast"', r"optim\.lr: expected a number"),
        ("[plan]\ntoken_cap = 5", r"plan\.token_cap: 5 is below the longest sample"),
        ("[plan]\nmax_moved = 1.5", r"plan\.max_moved: expected a number of at least 0 and at most 1"),
        ("[plan]\nlate_moves = 1.5", r"plan\.late_moves: expected a number of at least 0 and at most 1"),
        ('[plan]\nplanner = "every-rank"', r"plan\.budget_steps: planner = 'every-rank' needs it"),
        ('[run]\nout = ""', r"run\.out: is empty"),
        ("[run", r"not valid TOML"),
    ],
)
def test_refusals_name_file_and_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(FormatError, match=r"job\.toml: " + named) as refusal:
        load(tmp_path, text)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none\.toml"):
        RunConfig.load(tmp_path / "none.toml")


def test_the_example_is_four_processes() -> None:
    config = RunConfig.load(ROOT / "examples" / "grpo_cpu.toml")
    assert config.num_processes == 4 and config.parallel.backend == "gloo" and config.plan.routepack


def test_the_documentation_names_every_key() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    for name, kind in SECTIONS.items():
        part = text.split(f"\n### [{name}]\n")[1].split("\n### ")[0].split("\n## ")[0]
        for entry in fields(kind):
            assert f"| `{entry.name}` |" in part, f"{name}.{entry.name}"


def test_a_model_without_an_expert_layer_names_the_key() -> None:
    with pytest.raises(FormatError, match=r"model\.dense_layers: leave no layer with experts"):
        RunConfig.from_table({"model": {"dense_layers": [0, 1], "dense_size": 8}})


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(FormatError, match=r"optim\.lr: expected a number of at least 0"):
        RunConfig.from_table({"optim": {"lr": 10**400}})
