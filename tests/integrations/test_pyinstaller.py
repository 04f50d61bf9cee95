"""The hook for PyInstaller names what lockkit imports by name. A bundle is too slow to make here."""

from __future__ import annotations

import pkgutil
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType

import pytest

import lockkit
from lockkit.configuration.registry import BUILTIN
from lockkit.integrations.pyinstaller import hook_directories


def collect_submodules(package: str, filter: Callable[[str], bool]) -> list[str]:  # noqa: A002 - PyInstaller's name
    """As PyInstaller's."""
    found = pkgutil.walk_packages(lockkit.__path__, f"{package}.", onerror=print)
    return [name for name in (package, *(module.name for module in found)) if filter(name)]


def test_hook_names_every_backend_and_what_loads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no tool: they would make each bundle larger."""
    for name in ("PyInstaller", "PyInstaller.utils", "PyInstaller.utils.hooks"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    hooks = sys.modules["PyInstaller.utils.hooks"]
    vars(hooks).update(
        collect_submodules=collect_submodules,
        collect_data_files=lambda package, includes: [(package, *includes)],
        copy_metadata=lambda package: [(package, "metadata")],
    )
    (directory,) = hook_directories()

    made = runpy.run_path(f"{directory}/hook-lockkit.py")

    targets = {target for one in BUILTIN.values() for target in (one.target, *one.modes.values())}
    assert {target.partition(":")[0] for target in targets} <= set(made["hiddenimports"])
    assert set(lockkit._LAZY.values()) <= set(made["hiddenimports"])
    assert [name for name in made["hiddenimports"] if name.startswith(("lockkit_tools.bench", "lockkit.testing"))] == []
    assert made["datas"] == [("lockkit", "**/*.lua"), ("lockkit", "metadata")]


def test_pyinstaller_finds_the_hook() -> None:
    """By its entry point, which a wheel has; an older installation of a checkout may lack it."""
    found = [entry for entry in entry_points(group="pyinstaller40") if entry.value.startswith("lockkit.")]

    assert all(entry.load()() == hook_directories() for entry in found)
