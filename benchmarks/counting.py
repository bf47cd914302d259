"""Counting routes against reading the same bytes once: assignments per second of one core, all checks included.

Every repeat times all cases in turn, so that a busy machine disturbs them alike; the best of the repeats counts.

    python benchmarks/counting.py [--repeats 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from routepack_opt.routes import IngestReport, read_routes, warmup
from routepack_opt.routes.counting import count_block
from routepack_opt.routes.samples import RouteBlock

# name, dtype, MoE layers, experts, top-k, tokens a sample, samples
CASES = (
    ("qwen3-30b uint8", np.uint8, 48, 128, 8, 1024, 16),
    ("deepseek-v3 uint8", np.uint8, 58, 256, 8, 1024, 16),
    ("deepseek-v3 uint8, short", np.uint8, 58, 256, 8, 64, 256),
    ("deepseek-v3 int16", np.int16, 58, 256, 8, 1024, 16),
    ("kimi-k2 uint16", np.uint16, 60, 384, 8, 1024, 16),
    ("deepseek-v3 int32", np.int32, 58, 256, 8, 1024, 8),
    ("deepseek-v3 int64", np.int64, 58, 256, 8, 1024, 8),
    ("dense-like int16, top-1", np.int16, 24, 128, 1, 4096, 16),
)


def skewed_routes(rng: np.random.Generator, rows: int, layers: int, experts: int, top_k: int) -> np.ndarray:
    """Distinct ids per token with a skew like that of real routers (coefficient of variation near 0.8)."""
    weight = rng.gamma(1.5, size=(layers, experts))
    score = rng.exponential(size=(rows, layers, experts)) / weight
    return np.argpartition(score, top_k - 1, axis=2)[:, :, :top_k]


def make_block(rng: np.random.Generator, case: tuple[Any, ...]) -> RouteBlock:
    _, dtype, layers, experts, top_k, tokens, samples = case
    pool = skewed_routes(rng, min(tokens, 512), layers, experts, top_k).astype(dtype)
    picks = rng.integers(0, len(pool), tokens * samples)
    rows = np.full(samples, tokens, dtype=np.int64)
    none = (None,) * samples
    return RouteBlock(pool[picks], rows, rows + 1, np.full(samples, -1), none, none, 0, "benchmark")


def best_times(repeats: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    blocks = [make_block(rng, case) for case in CASES]
    results: list[dict[str, Any]] = []
    for case, block in zip(CASES, blocks, strict=True):
        assert block.routes is not None
        results.append({"case": case[0], "assignments": block.routes.size, "bytes": block.routes.nbytes})
    for _ in range(repeats):
        for case, block, result in zip(CASES, blocks, results, strict=True):
            layers, routes = np.arange(case[2]), block.routes
            assert routes is not None
            start = time.perf_counter()
            routes.reshape(-1).view(np.uint64).max()  # reads every byte once
            read_s = time.perf_counter() - start
            start = time.perf_counter()
            count_block(block, case[3], layers)
            count_s = time.perf_counter() - start
            start = time.perf_counter()
            np.bincount(routes[:, 0].reshape(-1), minlength=case[3])  # the usual way, one layer, no checks
            numpy_s = (time.perf_counter() - start) * case[2]
            for name, seconds in (("read_s", read_s), ("count_s", count_s), ("bincount_s", numpy_s)):
                result[name] = min(result.get(name, seconds), seconds)
    for result in results:
        result["assignments_per_s"] = result["assignments"] / result["count_s"]
        result["count_over_read"] = result["count_s"] / result["read_s"]
        result["bincount_over_count"] = result["bincount_s"] / result["count_s"]
    return results


def file_times(repeats: int) -> dict[str, Any]:
    """read_routes of an uncompressed npz on one thread, against reading the file's bytes."""
    rng = np.random.default_rng(1)
    block = make_block(rng, CASES[1])
    assert block.routes is not None
    result: dict[str, Any] = {"case": "npz file, read_routes, 1 thread", "assignments": block.routes.size}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.npz"
        np.savez(path, routed_experts=block.routes, seq_lens=block.lengths)
        result["bytes"] = path.stat().st_size
        for _ in range(repeats):
            start = time.perf_counter()
            path.read_bytes()
            read_s = time.perf_counter() - start
            start = time.perf_counter()
            read_routes(path, 256, report=IngestReport(), max_workers=1)
            count_s = time.perf_counter() - start
            for name, seconds in (("read_s", read_s), ("count_s", count_s)):
                result[name] = min(result.get(name, seconds), seconds)
    result["assignments_per_s"] = result["assignments"] / result["count_s"]
    result["count_over_read"] = result["count_s"] / result["read_s"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warmup()
    results = [*best_times(arguments.repeats), file_times(arguments.repeats)]
    if arguments.json:
        print(json.dumps(results, indent=1))
        return
    print(f"{'case':34} {'M assignments/s':>16} {'count / read':>13} {'bincount / count':>17}")
    for result in results:
        slower = f"{result['bincount_over_count']:17.1f}" if "bincount_over_count" in result else f"{'':17}"
        print(
            f"{result['case']:34} {result['assignments_per_s'] / 1e6:16.0f} {result['count_over_read']:13.1f} {slower}"
        )


if __name__ == "__main__":
    main()
