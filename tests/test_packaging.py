"""What is shipped: wheels hold the whole package and only it, links and pins stand, imports stay light."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "routepack_opt"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")


def python(code: str) -> str:
    """Output of ``code`` in a fresh interpreter; pytest's own imports must not hide anything."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules_in_tree() -> set[str]:
    return {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel, an sdist, and the wheel built from that sdist; made from a copy with the links at the root."""
    pytest.importorskip("setuptools", minversion="77")
    work = tmp_path_factory.mktemp("build")
    tree = work / "tree"
    tree.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, tree)
    shutil.copytree(PACKAGE, tree / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for link in ("models", "solvers", "integrations"):
        (tree / link).symlink_to(f"{PACKAGE.name}/{link}")
    make_sdist = "from setuptools.build_meta import build_sdist as b; print(b({!r}))".format(str(work))
    subprocess.run([sys.executable, "-c", make_sdist], cwd=tree, check=True, capture_output=True, timeout=300)
    (sdist,) = work.glob("*.tar.gz")
    result = {"sdist": sdist}
    for name, source in (("wheel", tree), ("wheel from sdist", sdist)):
        out = work / name.replace(" ", "-")
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        (result[name],) = out.glob("*.whl")
    return result


@pytest.mark.parametrize("name", ["wheel", "wheel from sdist"])
def test_wheels_hold_every_module_and_one_top_level_name(built: dict[str, Path], name: str) -> None:
    names = zipfile.ZipFile(built[name]).namelist()
    assert {n for n in names if n.endswith(".py")} == modules_in_tree()
    assert "routepack_opt/py.typed" in names
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"routepack_opt"}
    assert any(n.endswith("licenses/LICENSE") for n in names)
    entry = next(n for n in names if n.endswith("entry_points.txt"))
    assert b"routepack = routepack_opt.cli:main" in zipfile.ZipFile(built[name]).read(entry)


def test_sdist_holds_the_package(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert modules_in_tree() <= names
    assert not any(name.split("/")[0] in ("models", "solvers", "integrations") for name in names)


def test_every_folder_with_modules_is_a_package() -> None:
    for path in modules_in_tree():
        assert (ROOT / path).parent.joinpath("__init__.py").exists(), path


@pytest.mark.parametrize("name", ["models", "solvers", "integrations"])
def test_links_at_the_root_show_the_design(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"routepack_opt/{name}"
    assert link.resolve() == PACKAGE / name


# ---------------------------------------------------------------- dependencies


def requirements() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match is not None
    return match.group().lower()


def test_every_dependency_has_a_bound_with_its_reason() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    for requirement in (r for group in requirements().values() for r in group):
        assert re.search(r"[<>=]=?\d", requirement), f"{requirement}: no bound"
        found = [text for text in lines if text.strip().startswith(f'"{requirement}"')]
        assert found  # one line for each extra that needs it
        assert all(re.search(r'",\s*# \w+', line) for line in found), f"{requirement}: no reason beside its bound"


def test_constraints_pin_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for requirement in (r for group in requirements().values() for r in group):
        assert name_of(requirement) in pins
    assert pins["torch"] == "2.13.0"  # resolved freely, torch is several gigabytes
    assert "extra-index-url" not in "".join(lines)


def test_make_and_ci_install_with_the_constraints() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "pip install --disable-pip-version-check -q -c constraints.txt" in makefile
    assert len(re.findall(r"\bpip install\b", makefile)) == 1
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# ---------------------------------------------------------------- light imports

HEAVY = ("numpy", "scipy", "numba", "torch", "ortools", "highspy", "networkx", "pyarrow")
LOADED = f"import sys; print(sorted(set({HEAVY}) & set(sys.modules)))"


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert python(f"import routepack_opt; {LOADED}") == "[]"


def test_every_public_name_resolves_without_torch() -> None:
    code = "import routepack_opt as rp; [getattr(rp, n) for n in rp.__all__]; import sys; print('torch' in sys.modules)"
    assert python(code) == "False"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["pack"], ["plan", "--help"], ["verify", "--help"]])
def test_help_is_light(arguments: list[str]) -> None:
    quiet = "import io, contextlib, routepack_opt.cli as c\nwith contextlib.redirect_stdout(io.StringIO()):"
    code = f"{quiet} c.main({arguments})\n"
    assert python(code + LOADED) == "[]"


def test_planning_and_verifying_import_no_torch(tmp_path: Path) -> None:
    window, plan = str(tmp_path / "w.npz"), str(tmp_path / "p.json")
    code = f"""
import io, contextlib, routepack_opt.cli as c
with contextlib.redirect_stdout(io.StringIO()):
    assert c.main(["synth", "tiny", "-n", "16", "-o", {window!r}]) == 0
    assert c.main(["plan", {window!r}, "--ep", "8", "--token-cap", "8192", "--budget", "0.1", "-o", {plan!r}]) == 0
    assert c.main(["verify", {plan!r}, {window!r}]) == 0
import sys; print("torch" in sys.modules)
"""
    assert python(code) == "False"


def test_verify_imports_no_solver(tmp_path: Path) -> None:
    code = "import routepack_opt.verify, sys; print([m for m in sys.modules if m.startswith('routepack_opt.solvers')])"
    assert python(code) == "[]"
