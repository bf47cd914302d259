"""Windows the benchmarks run on, each with its topology, token cap and cost; made or read when asked for."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from routepack_opt import CostModel, Topology, Window, read_routes
from routepack_opt.compare.case import Case
from routepack_opt.files import read_npz
from routepack_opt.synth import PRESETS, synth

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_EXPERTS = 64  # DeepSeek-V2-Lite
NUM_PROMPTS = 64
SAMPLES_PER_PROMPT = 8


@dataclass(frozen=True)
class Workload:
    """A named window; ``make`` gets the data folder (None when there is none)."""

    name: str
    about: str
    make: Callable[[Path | None], Case]
    needs_data: bool = False


def data_folder() -> Path | None:
    """The data folder: ROUTEPACK_DATA, or shared/data beside the checkout."""
    named = os.environ.get("ROUTEPACK_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


def synthetic(preset: str, seed: int = 0) -> Case:
    """A preset's window with the settings the preset is meant for."""
    p = PRESETS[preset]
    name = preset if seed == 0 else f"{preset}/{seed}"
    return Case(name, synth(preset, seed=seed), p.topology, p.token_cap, p.cost)


def real_sequences(data: Path | None) -> Case:
    """173 real DeepSeek-V2-Lite sequences of three task domains."""
    assert data is not None
    window = read_routes(sorted((data / "routes").glob("*.npz")), num_experts=NUM_EXPERTS)
    cost = CostModel.default(window.num_layers, 2048)
    return Case("real-v2lite", window, Topology(dp=8, ep=8), 2048, cost)


def real_grpo(data: Path | None, seed: int = 0) -> Case:
    """64 prompts x 8 samples: real lengths of 8 answers to a MATH problem, real routes drawn token by token.

    Every prompt is given one real sequence, whose tokens (all layers together) are drawn with replacement for its
    samples: siblings share their routing as samples of one prompt do.
    """
    assert data is not None
    with open(data / "lengths" / "qwen2.5math_math_cot_samples.csv", encoding="utf-8") as stream:
        by_problem: dict[str, list[int]] = {}
        for row in csv.DictReader(stream):
            by_problem.setdefault(row["problem"], []).append(int(row["wordpunct_tokens"]))
    rng = np.random.default_rng([seed, 64])
    full = [lengths for lengths in by_problem.values() if len(lengths) >= SAMPLES_PER_PROMPT]
    problems = rng.choice(len(full), NUM_PROMPTS, replace=False)
    lengths = np.array([full[k][:SAMPLES_PER_PROMPT] for k in problems], dtype=np.int64).ravel()
    lengths = np.clip(lengths, 2, 4096)
    sources = _sequences(data)
    demand = np.empty((lengths.size, sources[0].shape[1], NUM_EXPERTS), dtype=np.int32)
    source_of_prompt = rng.integers(0, len(sources), NUM_PROMPTS)
    for i, length in enumerate(lengths.tolist()):
        source = sources[int(source_of_prompt[i // SAMPLES_PER_PROMPT])]
        demand[i] = _count(source[rng.integers(0, len(source), length - 1)])
    groups = np.arange(lengths.size) // SAMPLES_PER_PROMPT
    window = Window(lengths, demand, group_ids=groups, top_k=sources[0].shape[2])
    return Case("real-grpo", window, Topology(dp=8, ep=8), 4096, CostModel.default(window.num_layers, 4096))


def _sequences(data: Path) -> list[np.ndarray]:
    """[tokens, L, K] of every real sequence."""
    result = []
    for path in sorted((data / "routes").glob("*.npz")):
        arrays = read_npz(path, ("routed_experts", "seq_lens"))
        result += np.split(arrays["routed_experts"], np.cumsum(arrays["seq_lens"])[:-1])
    return result


def _count(routes: np.ndarray) -> np.ndarray:
    """int64 [L, E], how often each expert is named in [tokens, L, K]."""
    num_layers = routes.shape[1]
    flat = routes.astype(np.int64) + NUM_EXPERTS * np.arange(num_layers)[:, None]
    return np.bincount(flat.ravel(), minlength=num_layers * NUM_EXPERTS).reshape(num_layers, NUM_EXPERTS)


def _preset(name: str) -> Workload:
    return Workload(name, PRESETS[name].about, lambda _: synthetic(name))


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        *map(_preset, PRESETS),
        Workload("real-v2lite", "173 real DeepSeek-V2-Lite sequences, 26 x 64, cap 2048", real_sequences, True),
        Workload("real-grpo", "64 prompts x 8, real lengths, real routes resampled, cap 4096", real_grpo, True),
    )
}


def make_cases(names: list[str]) -> list[Case]:
    """Cases of the named workloads; those whose data is not here are left out, aloud."""
    data = data_folder()
    cases = []
    for name in names:
        if name not in WORKLOADS:
            raise SystemExit(f"workload {name!r} is unknown; expected some of {', '.join(WORKLOADS)}")
        if WORKLOADS[name].needs_data and data is None:
            print(f"{name}: left out, the data folder was not found (set ROUTEPACK_DATA)")
            continue
        cases.append(WORKLOADS[name].make(data))
    return cases
