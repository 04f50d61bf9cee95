"""The programs of examples/ do what they say on every backend, and the URL is all that differs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.targets import TARGETS, Entry
from tests.conventions.sources import ROOT
from tests.forked import forking, modules_of
from tests.programs import LIMIT, run_python

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
IN_ONE_PROCESS = {"duplicate_payment", "first_come_coupons"}
NEED_NOTES = {"duplicate_payment"}
# To processes that may have ended: until it looks, they are there for their parent alone.
SENDS_SIGNALS = "leader_with_standby"
# Ids of the conformance suite's targets. All programs run on these ...
THOROUGH = ["memory", "file", "redis", "redlock-3"]
# ... and one on the first target of every further scheme and mode, so a new backend joins by itself.
SWAPPED = EXAMPLES / "seat_booking.py"
_forms = {(scheme, entry.mode): entry for entry in reversed(TARGETS) for scheme in entry.schemes}
# The modes of a server share it.
FURTHER: dict[str, list[Entry]] = {}
for _entry in TARGETS:
    if _entry in _forms.values() and _entry.id not in THOROUGH:
        FURTHER.setdefault(_entry.id.partition("-")[0] if _entry.options else _entry.id, []).append(_entry)


@contextmanager
def urls_of(*targets: Entry) -> Iterator[list[str]]:
    """Start what they all need, and give the URL of each."""
    assert len({target.service for target in targets}) == 1
    with targets[0].service() as service:
        base = getattr(service, "url", service)
        queries = ["&".join(f"{name}={value}" for name, value in target.options.items()) for target in targets]
        yield [f"{base}{'&' if '?' in base else '?'}{query}" if query else base for query in queries]


def run(program: Path, url: str, directory: Path) -> tuple[int, str]:
    """Run a program as a user does; give its status and what it printed. What it spawns is forked, with exceptions."""
    spawns = program.stem == SENDS_SIGNALS or url.startswith("file:")
    settings = {} if spawns else forking(*modules_of(url), path=str(ROOT))
    done = run_python(program, cwd=directory, **settings, LOCKKIT_URL=url)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(LIMIT * 3)
@pytest.mark.parametrize("backend", THOROUGH)
def test_programs_do_what_they_say(backend: str, tmp_path: Path) -> None:
    """Swapped by ``LOCKKIT_URL`` alone. On memory:// those that are one process."""
    (target,) = [entry for entry in TARGETS if entry.id == backend]
    left_out = NEED_NOTES if backend == "redlock-3" else set()
    programs = [path for path in PROGRAMS if path.stem not in left_out]
    if backend == "memory":
        programs = [path for path in programs if path.stem in IN_ONE_PROCESS]
    # Two at a time: one of them mostly waits for a ttl.
    with urls_of(target) as (url,), ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda program: run(program, url, tmp_path), programs))

    assert len(outcomes) == len(programs) >= len(IN_ONE_PROCESS)
    wrong = [f"{path.stem}: {status}\n{out}" for path, (status, out) in zip(programs, outcomes, strict=True) if status]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(LIMIT * 3)
@pytest.mark.parametrize("backend", FURTHER)
def test_every_further_backend_is_swapped_in_by_its_url(backend: str, tmp_path: Path) -> None:
    """Three seats are sold once, whatever keeps the lock."""
    with urls_of(*FURTHER[backend]) as urls:
        outcomes = [run(SWAPPED, url, tmp_path) for url in urls]

    for status, out in outcomes:
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
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }

    assert connects
    assert all(not call.args and not call.keywords for call in connects)
    assert not any(name.startswith("lockkit.backends") for name in imported)
    assert {name.partition(".")[0] for name in imported} - {"lockkit"} <= sys.stdlib_module_names


def test_readme_tells_of_every_program() -> None:
    """A program that nobody finds is no example."""
    readme = (EXAMPLES / "README.md").read_text()

    assert PROGRAMS
    assert [path.name for path in PROGRAMS if f"]({path.name})" not in readme] == []
