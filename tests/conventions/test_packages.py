"""The distributions in packages/ are in step with lockkit, and use only what any backend may."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conventions.sources import ROOT

PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def settings(folder: Path) -> dict[str, Any]:
    """Read a pyproject.toml."""
    return tomllib.loads((folder / "pyproject.toml").read_text())


def test_there_are_packages() -> None:
    """Else nothing is tested here."""
    assert [folder.name for folder in PACKAGES] == ["lockkit-dynamodb", "lockkit-nats"]


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_package_is_in_step_with_lockkit(folder: Path) -> None:
    """The same version, license and Pythons; type checkers read its annotations."""
    ours, its = settings(ROOT), settings(folder)
    (package,) = its["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    assert its["tool"]["hatch"]["version"] == {**ours["tool"]["hatch"]["version"], "raw-options": {"root": "../.."}}
    for key in ("license", "license-files", "authors", "requires-python"):
        assert its["project"][key] == ours["project"][key]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / package / "py.typed").exists()


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_package_uses_public_modules_alone(folder: Path) -> None:
    """What a stranger may rely on: the modules that the tutorial and the reference describe."""
    imported = {
        module
        for source in folder.glob("src/**/*.py")
        for module in re.findall(r"from (lockkit\.[\w.]+) import", source.read_text())
    }

    assert imported
    assert imported <= {f"lockkit.{name}" for name in ("backend", "drivers", "errors", "expiry", "runtime", "url")}
