"""What may import what, read from the folders: the rules of ``docs/decisions/0010-layout.md``."""

from __future__ import annotations

import graphlib
import sys
from functools import cache

import pytest

from tests.conventions.sources import imported, modules

MODULES = modules()
PACKAGES = {name for name, module in MODULES.items() if module.path.name == "__init__.py"}

# Single files at the top; every other name there is a folder, and a room of its own.
GROUND = {
    "backend",
    "background",
    "drivers",
    "errors",
    "expiry",
    "file_systems",
    "observers",
    "runtime",
    "units",
    "url",
    "validation",
}
FACES = {"aio", "lease", "sync"}
DOORS = {"fencing", "optimistic", "sql"}
# A tool imports anything but the tools after it; those from `servers` on are in lockkit_tools.
TOOLS = ("doctor", "testing", "cli", "servers", "history", "simulation", "lab", "bench")

ROOMS_BELOW = {
    "ground": set[str](),
    "configuration": {"ground"},
    "engine": {"ground", "configuration"},
    "primitives": {"ground", "configuration", "engine"},
    "faces": {"ground", "configuration", "engine", "primitives"},
    "backends": {"ground", "configuration", "backends"},  # `lock_state` and `tls` stand outside of all packages
    "storage": {"ground", "storage"},
    "doors": {"ground", "storage"},
    "integrations": {
        "ground",
        "configuration",
        "faces",
    },  # join lockkit to libraries of the application; nothing imports them
    "lockkit": {"ground", "faces", "doors"},
    "lockkit_tools": set[str](),
}
# Backends that are built on another one, or on what they share.
BACKENDS_BELOW = {
    "redlock": {"backends.redis"},
    "sql_table": {"backends.sql"},
    "sql_session": {"backends.sql"},
}


def room(name: str) -> str:
    """Name the room of a module, such as ``ground``, ``engine`` or ``backends.redis``."""
    parts = name.split(".")[1:]
    if not parts:
        return name
    for title, members in (("ground", GROUND), ("faces", FACES), ("doors", DOORS)):
        if parts[0] in members:
            return title
    package = ".".join(parts[:2])
    is_room = f"lockkit.{package}" in (MODULES if parts[0] == "storage" else PACKAGES)
    return package if parts[0] in {"backends", "storage"} and is_room else parts[0]


def may_import(name: str, target: str) -> bool:
    """Tell whether the rules let a module import another one."""
    here, there = room(name), room(target)
    if here == there:
        return True
    wing, _, package = here.partition(".")
    if wing in TOOLS:
        # The doctor's examinations are beside the backends, and import it.
        below_backends = wing == "doctor" and there.startswith("backends")
        return not below_backends and (there not in TOOLS or TOOLS.index(there) < TOOLS.index(wing))
    if wing == "backends":
        if there == "doctor" or ".examine" in target:
            return ".examine" in name
        return there in ROOMS_BELOW[wing] | BACKENDS_BELOW.get(package, set())
    if wing == "storage" and there == f"backends.{package}":
        return not target.endswith((".backend", ".examine"))
    return there in ROOMS_BELOW[wing] or there.partition(".")[0] in ROOMS_BELOW[wing]


@cache
def targets(name: str) -> set[str]:
    """Modules of lockkit that a module imports: at once, later inside a function, or for type checkers only."""
    found = {full if full in MODULES else full.rpartition(".")[0] for full in imported(MODULES[name], everything=True)}
    # A package says what is in it; its own name among the imports of that is no arrow.
    return {target for target in found if target in MODULES and target != name}


def test_modules_import_only_what_lies_below() -> None:
    """Nothing imports upwards, not even lazily or for types only; tools stand above all, and in an order."""
    upwards = [(name, target) for name in MODULES for target in targets(name) if not may_import(name, target)]

    assert upwards == []


def packages(name: str) -> set[str]:
    """Packages that a module is in, which are loaded before it."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def test_no_circular_import() -> None:
    """
    No chain of imports leads back to where it began: not of those at load time, nor of lazy or type-only ones.

    So each module can be the first one that a program imports.
    """
    graph = {}
    for name in MODULES:
        loaded = set().union(*(packages(target) | {target} for target in targets(name)))
        graph[name] = loaded - packages(name) - {name}

    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names them


def test_every_module_belongs_to_an_area() -> None:
    """And ``pytest -s`` prints how many files and lines each has."""
    table: dict[str, list[int]] = {}
    for name, module in MODULES.items():
        area = ".".join(["tools" if name.startswith("lockkit_tools") else "lockkit", room(name)])
        table.setdefault(area, []).append(len(module.path.read_text().splitlines()))

    for area, lines in sorted(table.items()):
        sys.stdout.write(f"{area:<32}{len(lines):>6}{sum(lines):>9,}\n")
    known = {*ROOMS_BELOW, *TOOLS}
    assert {area.split(".")[1] for area in table} <= known


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("lockkit.errors", "lockkit.engine.engine"),
        ("lockkit.engine.renewal", "lockkit.sync"),
        ("lockkit.engine.engine", "lockkit.backends.redis.backend"),
        ("lockkit.backends.redis.node", "lockkit.doctor.findings"),
        ("lockkit.backends.etcd.backend", "lockkit.backends.redis.node"),
        ("lockkit.backends.sql.database", "lockkit.backends.sql_table.backend"),
        ("lockkit.storage.redis", "lockkit.backends.redis.backend"),
        ("lockkit.storage.redis", "lockkit.fencing"),
        ("lockkit.sync", "lockkit.testing.timing"),
        ("lockkit.sync", "lockkit.integrations.logging"),
        ("lockkit.integrations.prometheus", "lockkit.engine.engine"),
        ("lockkit.cli.app", "lockkit_tools.bench.run"),
        ("lockkit.doctor.timing", "lockkit.backends.file.directory"),
    ],
)
def test_rule_refuses(name: str, target: str) -> None:
    """Each rule can fail."""
    assert not may_import(name, target)


def test_new_folder_needs_a_rule() -> None:
    """A folder that the rules do not know is an error, not a free pass."""
    with pytest.raises(KeyError, match="nowhere"):
        may_import("lockkit.nowhere.module", "lockkit.errors")
