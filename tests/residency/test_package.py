"""Packages: presets read as the paper gives them, and every broken file is refused with one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import routepack_opt.residency.machine.package_file as package_file
from routepack_opt.errors import InvalidInput
from routepack_opt.residency.machine.package import Package

PAPER = Path(package_file.__file__).parent.joinpath("presets", "paper.toml").read_text()


def test_paper_preset_has_the_papers_figures() -> None:
    package = Package.load("paper")
    assert package.compute.num_chiplets == 16 and package.compute.mesh == (4, 4) and package.compute.cores == 16
    totals = {
        t.name: (t.capacity_bytes * len(t.regions) / 2**20, t.bandwidth * len(t.regions) / 1e9) for t in package.tiers
    }
    assert totals["hbm"] == (8192, 460) and totals["dram"] == pytest.approx((32768, 409.6))
    assert (package.tiers[0].capacity_bytes, package.tiers[0].bandwidth) == (64 << 20, 2e12)
    assert [t.energy_j_per_byte for t in package.tiers] == pytest.approx([1.25e-12, 31.8e-12, 160e-12])
    assert package.mesh_link is not None and package.mesh_link.bandwidth == 256e9
    assert package.rules.budget_copies == 1.3


@pytest.mark.parametrize("name", package_file.PRESETS)
def test_presets_describe_themselves(name: str) -> None:
    text = Package.load(name).describe()
    assert "budget_copies: 1.3" in text and "idle" in text and "min_residency_windows" in text


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("bandwidth_gbs = 2000.0", "bandwidth_gbs = 0", "tier[0].bandwidth_gbs"),
        ("bandwidth_gbs = 2000.0", "bandwidth_gbs = -3", "tier[0].bandwidth_gbs"),
        ("bandwidth_gbs = 2000.0", "bandwidth_gbs = nan", "tier[0].bandwidth_gbs"),
        ("bandwidth_gbs = 2000.0", "bandwidth_gbs = inf", "tier[0].bandwidth_gbs"),
        ("bandwidth_gbs = 2000.0", 'bandwidth_gbs = "fast"', "tier[0].bandwidth_gbs"),
        ("bandwidth_gbs = 2000.0", "bandwidth_gbs = true", "tier[0].bandwidth_gbs"),
        ("bandwidth_gbs = 2000.0", "bandwidth = 2000.0", "tier[0].bandwidth_gbs"),
        ("banks = 16", "banks = 16\nrows = 3", "tier[0].rows"),
        ("banks = 16", "banks = 0", "tier[0].banks"),
        ("capacity_mib = 64.0", "capacity_mib = -1", "tier[0].capacity_mib"),
        ("latency_ns = 5.0", "latency_ns = -1", "tier[0].latency_ns"),
        ("chiplets = 16", "chiplets = 15", "compute.mesh"),
        ("chiplets = 16", "chiplets = 0", "compute.chiplets"),
        ("chiplets = 16", "chiplets = 16.5", "compute.chiplets"),
        ("mesh = [4, 4]", "mesh = [4]", "compute.mesh"),
        ("mesh = [4, 4]", "", "mesh_link"),
        ("utilisation = 0.7", "utilisation = 1.1", "compute.utilisation"),
        ("cores = 16", "cores = 16\nspeed = 1", "compute.speed"),
        ('attach = ["c0", "c4"]', 'attach = ["c0", "c99"]', "router[0].attach[1]"),
        ('attach = ["c0", "c4"]', 'attach = ["c0", "c0"]', "router[0].attach[1]"),
        ('attach = ["c0", "c4"]', 'attach = ["io0"]', "router[0].attach[0]"),
        ('attach = ["c0", "c4"]', "attach = []", "router[0].attach"),
        ('attach = ["c0", "c4"]', "attach = [0]", "router[0].attach[0]"),
        ('name = "io1"', 'name = "io0"', "router[1].name"),
        ('name = "io1"', 'name = "c3"', "router[1].name"),
        ('name = "dram"', 'name = "hbm"', "tier[2].name"),
        (
            '{ node = "io0", chiplets = [0, 1, 4, 5] }',
            '{ node = "io9", chiplets = [0, 1, 4, 5] }',
            "tier[1].regions[0].node",
        ),
        ("{ chiplets = [0, 1, 4, 5] }", "{ chiplets = [0, 1, 4, 16] }", "tier[0].regions[0].chiplets"),
        ("{ chiplets = [0, 1, 4, 5] }", "{ chiplets = [0, 1, 4, 8] }", "tier[0].regions[1].chiplets"),
        ("{ chiplets = [0, 1, 4, 5] }", "{ chips = [0] }", "tier[0].regions[0].chiplets"),
        ("budget_copies = 1.3", "budget_copies = 0.9", "residency.budget_copies"),
        ("budget_copies = 1.3", "r_max = 0", "residency.r_max"),
        ('other_weights_tier = "hbm"', 'other_weights_tier = "flash"', "residency.other_weights_tier"),
        ("budget_w = 150.0", "budget_w = 10.0", "power.budget_w"),
        ("[power]", "[powers]", "powers"),
        ("[compute]", "[computer]", "compute"),
    ],
)
def test_broken_packages_are_refused_with_the_field(old: str, new: str, field: str, tmp_path: Path) -> None:
    assert old in PAPER
    path = tmp_path / "broken.toml"
    path.write_text(PAPER.replace(old, new, 1))
    with pytest.raises(InvalidInput) as caught:
        Package.load(path)
    message = str(caught.value)
    assert f"field {field!r}" in message and str(path) in message and "\n" not in message


def test_no_toml_no_file_and_no_preset(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("a = [")
    with pytest.raises(InvalidInput, match="not valid TOML"):
        Package.load(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        Package.load(tmp_path / "missing.toml")
    with pytest.raises(InvalidInput, match="paper, gpu-host-nvme, cxl"):
        Package.load("papyrus")
    path.write_text('name = "x"\ntier = 3\n[compute]\nchiplets = 1\ncores = 1\nclock_ghz = 1\n')
    with pytest.raises(InvalidInput, match=r"field 'tier': expected at least one"):
        Package.load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("bandwidth_gbs", "1e-308"), ("latency_ns", "1e308"), ("clock_ghz", "1e308"), ("mac_per_cycle", "1e-300")),
        *(("energy_pj_per_byte", "1e308"), ("budget_copies", "1e308"), ("mac_energy_pj", "1e308")),
    ],
)
def test_values_that_overflowed_in_the_simulator_are_refused(key: str, value: str) -> None:
    text = re.sub(rf"^{key} *=.*$", f"{key} = {value}", PAPER, flags=re.MULTILINE)
    assert text != PAPER
    with pytest.raises(InvalidInput, match=rf"{key}': {re.escape(repr(float(value)))} is (out of range|not)"):
        package_file.parse_package(text, "huge.toml")
