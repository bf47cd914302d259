"""Whether the GRPO example learns, and whether planning changes what it learns: seeds with and without RoutePack.

Each run is the command a user types, in a folder that is removed afterwards; one run at a time.

    python benchmarks/grpo_reward.py [--config examples/grpo_cpu.toml] [--seeds 0,1,2] [--steps N] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def train(config: str, seed: int, steps: int | None, with_routepack: bool, out: Path) -> dict[str, Any]:
    """One run's summary; ``wall_s`` includes starting the processes."""
    command = [sys.executable, "-m", "routepack_opt", "train", "--config", config, "--seed", str(seed)]
    command += ["--out", str(out), "--json", "-q"]
    command += [] if steps is None else ["--steps", str(steps)]
    command += [] if with_routepack else ["--no-routepack"]
    start = time.monotonic()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return {"seed": seed, "routepack": with_routepack, **summary, "wall_s": time.monotonic() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(ROOT / "examples" / "grpo_cpu.toml"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = []
    for seed in map(int, options.seeds.split(",")):
        for with_routepack in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                run = train(options.config, seed, options.steps, with_routepack, Path(folder) / "run")
            runs.append(run)
            print(
                f"seed {seed}, {'with' if with_routepack else 'without'} RoutePack: reward of step 1"
                f" {run['start_reward']:.3f}, first ten {run['first_reward']:.3f}, last ten {run['last_reward']:.3f};"
                f" experts moved in {run['placements_changed']} of {run['steps']} steps ({run['moved_experts']} moves),"
                f" exposed {run['exposed_s']:.2f} s, {run['seconds']:.0f} s ({run['wall_s']:.0f} s with the start)",
                file=sys.stderr if options.json else sys.stdout,
                flush=True,
            )
    means = {}
    for name, kind in (("with", True), ("without", False)):
        chosen = [run for run in runs if run["routepack"] == kind]
        means[name] = {end: mean(run[end] for run in chosen) for end in ("first_reward", "last_reward")}
    if options.json:
        print(json.dumps({"runs": runs, "means": means}))
        return
    apart = abs(means["with"]["last_reward"] - means["without"]["last_reward"])
    for name, value in means.items():
        print(f"mean {name}: first ten {value['first_reward']:.3f}, last ten {value['last_reward']:.3f}")
    print(f"last rewards are {apart:.3f} apart")


if __name__ == "__main__":
    main()
