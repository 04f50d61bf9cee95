"""What importing lockkit costs and does."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.conventions.sources import imported, modules

MODULES = modules()

# What decides and waits through the runtime only, so that a run can be repeated from its seed.
CORE = [
    name
    for name in MODULES
    if name.startswith(("lockkit.configuration.", "lockkit.engine."))
    or name
    in {"lockkit.backend", "lockkit.background", "lockkit.errors", "lockkit.units", "lockkit.url", "lockkit.validation"}
]
REAL_WORLD = {"asyncio", "random", "secrets", "threading", "time"}


def is_executable(node: ast.AST) -> bool:
    """Tell ``sys.executable``."""
    return isinstance(node, ast.Attribute) and node.attr == "executable" and ast.unparse(node) == "sys.executable"


def test_every_python_that_is_started_ignores_the_working_directory() -> None:
    """With -P or -I: a module that anybody put there would run as this user. `elect` repeats its own command line."""
    started = [
        (name, ast.unparse(node))
        for name, module in MODULES.items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.List) and node.elts and is_executable(node.elts[0])
    ]
    named = [name for name, module in MODULES.items() for node in ast.walk(module.tree) if is_executable(node)]

    assert len(started) >= 4
    assert sorted(named) == sorted(
        [
            *(name for name, _ in started),
            *("lockkit.cli.run", "lockkit.integrations.django.management.commands.locked"),  # of os.exec…
        ]
    )
    assert [where for where in started if not re.match(r"\[sys\.executable, '-[PI]'", where[1])] == [
        ("lockkit.cli.run", "[sys.executable, *sys.orig_argv[1:]]")
    ]


def after(statements: str) -> dict[str, Any]:
    """Modules and threads that a fresh interpreter has after some statements."""
    script = (
        f"import sys\nbefore = set(sys.modules)\n{statements}\n"
        "new = sorted(set(sys.modules) - before)\nimport json, threading\n"
        "print(json.dumps({'modules': new, 'threads': threading.active_count()}))"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=60)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    "statements",
    [
        "import lockkit",
        "import lockkit.aio",
        "import lockkit; lockkit.connect('memory://').close()",
        "import lockkit; lockkit.connect('file:').close()",
    ],
)
def test_import_and_connect_load_no_third_party_module_and_start_no_thread(statements: str) -> None:
    """The core needs the standard library alone, and nothing runs before it is used."""
    state = after(statements)

    roots = {name.partition(".")[0] for name in state["modules"]}
    # A module of an editable installation is there before lockkit is: site starts it.
    assert roots - {"lockkit"} <= sys.stdlib_module_names
    assert "lockkit" in roots
    assert state["threads"] == 1


def test_bare_import_loads_neither_asyncio_nor_a_backend() -> None:
    """`import lockkit` is for those who only catch its errors, too."""
    loaded = set(after("import lockkit")["modules"])

    assert loaded.isdisjoint({"asyncio", "threading", "importlib.metadata", "lockkit.engine.engine"})
    assert not any(name.startswith("lockkit.backends") for name in loaded)


# What drivers the extra of a backend brings; all other drivers may be missing.
OWN = {
    "redis": {"redis"},
    "redlock": {"redis"},
    "zookeeper": {"kazoo"},
    "etcd": {"grpc", "google"},
    "s3": {"obstore"},
    "postgresql": {"psycopg", "psycopg_binary"},
    "mysql": {"pymysql"},
    "sqlite": set[str](),
}
DRIVERS = {"sqlalchemy"}.union(*OWN.values())


@pytest.mark.parametrize("scheme", ["memory", "file", *OWN])
def test_backend_needs_no_driver_of_another_one(scheme: str) -> None:
    """It loads where its own extra alone is installed."""
    missing = sorted(DRIVERS - OWN.get(scheme, set()))

    state = after(
        f"sys.modules.update(dict.fromkeys({missing}))\n"
        f"from lockkit.configuration import registry\nregistry.find({scheme!r})"
    )

    assert any(name.startswith("lockkit.backends.") for name in state["modules"])


def test_core_takes_time_and_chance_from_the_runtime() -> None:
    """Core modules import neither clocks nor threads nor an event loop, not even inside functions."""
    roots = {(name, full.partition(".")[0]) for name in CORE for full in imported(MODULES[name], also_later=True)}

    assert [pair for pair in roots if pair[1] in REAL_WORLD] == []
