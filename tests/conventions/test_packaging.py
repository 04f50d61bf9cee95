"""pyproject.toml says the same as the code."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from typing import Any

import pytest
import trove_classifiers

import lockkit
import lockkit.errors
from lockkit.configuration import registry
from tests.conventions.sources import ROOT

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def test_core_depends_on_nothing() -> None:
    """Drivers are extras."""
    assert PROJECT["dependencies"] == []


FRAMEWORKS = {"alembic", "apscheduler", "celery", "django", "dramatiq", "fastapi", "rq"}


def test_extras_that_backends_ask_for_exist() -> None:
    """The message of a missing driver names an extra that can be installed."""
    assert {builtin.extra for builtin in registry.BUILTIN.values()} - {None} <= EXTRAS.keys()


def test_all_extra_is_all_extras() -> None:
    """Nothing is left out of `all` but the frameworks, which their users have."""
    (everything,) = EXTRAS["all"]

    named = re.fullmatch(r"lockkit\[([\w,]+)\]", everything)
    assert named is not None
    assert set(named[1].split(",")) == EXTRAS.keys() - {"all"} - FRAMEWORKS


def test_version_is_that_of_the_tag() -> None:
    """No file of the project has a version to forget."""
    assert "version" in PROJECT["dynamic"]
    assert PYPROJECT["tool"]["hatch"]["version"]["source"] == "vcs"
    assert lockkit.__version__ == importlib.metadata.version("lockkit")

    assigned = [path for path in (ROOT / "lockkit").rglob("*.py") if re.search(r"__version__ *= ", path.read_text())]
    assert assigned == []


def test_classifiers_exist() -> None:
    """An index refuses others."""
    assert set(PROJECT["classifiers"]) <= trove_classifiers.classifiers


def test_documentation_is_where_errors_lead() -> None:
    """The address stands in lockkit.errors."""
    assert PROJECT["urls"]["Documentation"] == lockkit.errors.DOCUMENTATION


def test_site_links_the_repository() -> None:
    """The site and an index lead to the same place; an expected failure says that it is still the placeholder."""
    repository = PROJECT["urls"]["Repository"]

    assert f"repo_url: {repository}\n" in (ROOT / "mkdocs.yml").read_text()
    if repository == "https://example.org/lockkit":
        pytest.xfail("the project's address is the placeholder: set it in pyproject.toml and mkdocs.yml")


def test_readme_of_an_index_has_no_link_into_the_repository() -> None:
    """There are no files beside it there."""
    text = (ROOT / "README.md").read_text()
    for change in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)

    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert f"{lockkit.errors.DOCUMENTATION}databases/postgresql/" in targets
    assert f"{lockkit.errors.DOCUMENTATION}choose/" in targets
    assert [target for target in targets if not target.startswith(lockkit.errors.DOCUMENTATION)] == []


def test_typing_marker_is_shipped() -> None:
    """Type checkers read the annotations of an installed lockkit."""
    assert (ROOT / "lockkit" / "py.typed").exists()


def test_hooks_pin_nothing_of_their_own() -> None:
    """pre-commit runs the tools in the versions of pyproject.toml."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()

    assert "rev:" not in hooks
    assert "==" not in hooks
