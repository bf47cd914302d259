"""The documentation agrees with the code: links lead somewhere, commands and options are described."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import routepack_opt as rp
from routepack_opt.cli import COMMANDS, command_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index, page.name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described(name: str) -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert f"\n## {name}\n" in text
    own = ROOT / "docs" / f"{name}.md"
    section = text.split(f"\n## {name}\n")[1].split("\n## ")[0] + (own.read_text() if own.exists() else "")
    for option in (o for action in command_parser(name)._actions for o in action.option_strings):
        if option.startswith("--") and option not in ("--help", "--json", "--quiet", "--output"):
            assert option in section, option


def test_plan_page_names_every_key(tmp_path: Path) -> None:
    window = rp.Window([3, 4], [[[3, 0]], [[1, 3]]])
    plan = rp.plan_window(window, rp.Topology(dp=2, ep=2), token_cap=8, budget_steps=0)
    plan.save(tmp_path / "plan.json")
    text = (ROOT / "docs" / "plan.md").read_text()
    value = json.loads((tmp_path / "plan.json").read_text())
    for key in [*value, *value["constraints"]]:
        assert f"`{key}" in text, key


def test_the_changelog_speaks_of_this_version() -> None:
    assert rp.__version__ in (ROOT / "CHANGELOG.md").read_text()
