"""The programs of examples/ do what they say on every backend, and the URL is all that differs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.conformance.targets import TARGETS
from tests.conventions.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
IN_ONE_PROCESS = {"duplicate_payment", "first_come_coupons"}
# Ids of the conformance suite's targets. All programs run on these ...
THOROUGH = ["memory", "file", "redis", "redlock-3"]
# ... and one on the first target of every further scheme and mode, so a new backend joins by itself.
SWAPPED = EXAMPLES / "seat_booking.py"
_forms = {(scheme, entry.mode): entry.id for entry in reversed(TARGETS) for scheme in entry.schemes}
FURTHER = [entry.id for entry in TARGETS if entry.id in _forms.values() and entry.id not in THOROUGH]
PATIENCE = 180.0


@contextmanager
def url_of(backend: str) -> Iterator[str]:
    """Start what the backend needs."""
    (target,) = [entry for entry in TARGETS if entry.id == backend]
    with target.service() as service:
        url = getattr(service, "url", service)
        options = "&".join(f"{name}={value}" for name, value in target.options.items())
        yield f"{url}{'&' if '?' in url else '?'}{options}" if options else url


def run(program: Path, url: str, directory: Path) -> tuple[int, str]:
    """Run a program as a user does; give its status and what it printed."""
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "LOCKKIT_URL": url, "PYTHONPATH": str(ROOT)},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE * 3)
@pytest.mark.parametrize("backend", THOROUGH)
def test_programs_do_what_they_say(backend: str, tmp_path: Path) -> None:
    """Swapped by ``LOCKKIT_URL`` alone. On memory:// those that are one process."""
    programs = [path for path in PROGRAMS if backend != "memory" or path.stem in IN_ONE_PROCESS]
    # Two at a time: one of them mostly waits for a ttl.
    with url_of(backend) as url, ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda program: run(program, url, tmp_path), programs))

    assert len(outcomes) == len(programs) >= len(IN_ONE_PROCESS)
    wrong = [f"{path.stem}: {status}\n{out}" for path, (status, out) in zip(programs, outcomes, strict=True) if status]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE * 2)
@pytest.mark.parametrize("backend", FURTHER)
def test_every_further_backend_is_swapped_in_by_its_url(backend: str, tmp_path: Path) -> None:
    """Three seats are sold once, whatever keeps the lock."""
    with url_of(backend) as url:
        status, out = run(SWAPPED, url, tmp_path)

    assert status == 0, out
    assert out.count(" has ") == 3
    assert "3 of 3 seats sold" in out


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_names_no_backend(program: Path) -> None:
    """It connects to whatever the environment says, and imports no backend or driver."""
    tree = ast.parse(program.read_text())
    connects = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "connect"
        if ast.unparse(node.func) in {"lockkit.connect", "lockkit.aio.connect"}
    ]
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }

    assert connects
    assert all(not call.args and not call.keywords for call in connects)
    assert imported - {"lockkit"} <= sys.stdlib_module_names


def test_readme_tells_of_every_program() -> None:
    """A program that nobody finds is no example."""
    readme = (EXAMPLES / "README.md").read_text()

    assert PROGRAMS
    assert [path.name for path in PROGRAMS if f"]({path.name})" not in readme] == []
