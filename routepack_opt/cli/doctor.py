"""``routepack doctor``: what is installed and usable here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import TYPE_CHECKING, Any

import routepack_opt
from routepack_opt.cli.output import print_json

if TYPE_CHECKING:
    import argparse

DESCRIPTION = """\
Say what is installed and usable on this machine, and compile the CPU kernels (once; later
runs load them from the cache on disk). Exit code 1 when something required is missing.
"""

EPILOG = ""

_PACKAGES = {
    "numpy": "required",
    "numba": "required: compiled CPU engine",
    "ortools": "required: CP-SAT proofs",
    "highspy": "required: LP and MIP proofs",
    "networkx": "required: transfer rounds",
    "scipy": "required: assignment",
    "tqdm": "required: progress",
    "torch": "optional, routepack-opt[torch]: .pt dumps",
    "pyarrow": "optional, routepack-opt[parquet]: parquet dumps",
    "ray": "optional, routepack-opt[ray]: certify --ray",
    "matplotlib": "optional, routepack-opt[report]: figures of report pages",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of doctor."""
    parser.usage = "routepack doctor [options]"
    parser.add_argument("--no-compile", action="store_true", help="do not compile the kernels")


def run(options: argparse.Namespace) -> int:
    """Exit 1 when a required package is missing."""
    facts: dict[str, Any] = {
        "routepack": routepack_opt.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {},
        "missing": [],
    }
    for name, role in _PACKAGES.items():
        try:
            facts["packages"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts["packages"][name] = None
            if role.startswith("required"):
                facts["missing"].append(name)
    facts["cuda"] = _cuda()
    facts["kernels_s"] = None
    if not facts["missing"] and not options.no_compile:
        from routepack_opt.planner import warmup

        facts["kernels_s"] = round(warmup(), 2)
    if options.json:
        print_json(facts)
    else:
        rows = [[name, str(facts[name])] for name in ("routepack", "python", "machine", "cpus")]
        for name, version in facts["packages"].items():
            rows.append([name, f"{version or 'missing'}  ({_PACKAGES[name]})"])
        rows.append(["cuda", facts["cuda"]])
        if facts["kernels_s"] is not None:
            rows.append(["kernels", f"ready in {facts['kernels_s']} s"])
        print("\n".join(line.rstrip() for line in _left_table(rows)))
    return 1 if facts["missing"] else 0


def _left_table(rows: list[list[str]]) -> list[str]:
    width = max(len(row[0]) for row in rows)
    return [f"{row[0]:<{width}}  {row[1]}" for row in rows]


def _cuda() -> str:
    if importlib.util.find_spec("torch") is None:
        return "not looked for: torch is missing"
    import torch

    if not torch.cuda.is_available():
        return "no device"
    return ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
