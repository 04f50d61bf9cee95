"""The noxfile finds the Pythons of a machine. nox itself is not needed for that, and not installed with the tests."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from tests.conventions.sources import ROOT

CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"


def load(monkeypatch: pytest.MonkeyPatch, *versions: str) -> ModuleType:
    """Import the noxfile of a project that supports some versions."""
    nox = MagicMock()
    nox.project.python_versions.return_value = [*versions]
    monkeypatch.setitem(sys.modules, "nox", nox)
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpreter(path: Path, status: int) -> str:
    """Make something that runs, and answers a question with its status."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_pythons_of_the_path_and_of_pyenv_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each version but the current one, newest first; a shim of pyenv's on the PATH is passed over."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    on_path = interpreter(tmp_path / "bin" / "python3.96", 0)
    interpreter(tmp_path / "pyenv/versions/3.96.4/bin/python3.96", 0)
    interpreter(tmp_path / "bin" / "python3.97", 127)
    kept = interpreter(tmp_path / "pyenv/versions/3.97.1/bin/python3.97", 0)
    interpreter(tmp_path / "pyenv/versions/3.98.0/bin/python3.98", 1)

    assert [kept, on_path] == load(monkeypatch, CURRENT, "3.96", "3.97", "3.98", "3.99").OTHER_PYTHONS


def test_newest_and_oldest_python_run_each_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one runs everything; those between two that pass are left to the night."""
    noxfile = load(monkeypatch, CURRENT)
    older, newer = ["/b/python3.2", "/b/python3.1"], ["/b/python3.99", "/b/python3.98", "/b/python3.97"]

    assert noxfile.outermost([*newer, *older]) == [newer[0], older[-1]]
    assert noxfile.outermost(newer) == newer[:1]
    assert noxfile.outermost(older) == older[-1:]
    assert noxfile.outermost([]) == []


def test_interpreter_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may promise another one."""
    noxfile = load(monkeypatch, CURRENT)

    assert noxfile.is_python(sys.executable, CURRENT)
    assert not noxfile.is_python(sys.executable, "3.99")


def test_byte_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment that says otherwise, too: each of the processes of a run would compile everything anew."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    load(monkeypatch, CURRENT)

    assert "PYTHONDONTWRITEBYTECODE" not in os.environ


def test_every_session_is_listed_for_contributors() -> None:
    """With what it does, in the table of CONTRIBUTING.md; and no other."""
    session = re.compile(r'^@nox\.session(?:\((?:name="(.*?)"|.*)\))?\ndef (\w+)', re.MULTILINE)
    sessions = [given or function for given, function in session.findall((ROOT / "noxfile.py").read_text())]
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| session |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(.*?)`", row.split("|")[1])]

    assert sorted(listed) == sorted(sessions)


def test_core_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was renamed would not run on the other Pythons any more."""
    assert [path for path in load(monkeypatch, CURRENT).CORE if not (ROOT / path).exists()] == []
