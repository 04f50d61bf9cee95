"""Where mutants are made, and which tests judge them. What is missing is left out: files may move and be merged."""

from __future__ import annotations

KINDS = ("world", "schedules", "regressions", "cancel_on_lost", "sharing", "claims")
SIMULATED = " ".join(f"tests/simulation/test_{kind}.py" for kind in KINDS)
SIMULATION = f"{SIMULATED} --seed=0-9 -k 'not rich and not history'"
EMBEDDED = "-k 'not redis and not postgresql and not mariadb and not etcd and not zookeeper and not s3'"
SERVERS = {"sqlite": "sqlite", "maria": "mariadb", "mysql": "mariadb", "postgresql": "postgresql", "pg": "postgresql"}


def faces(*targets: str) -> tuple[str, ...]:
    """Give the conformance suite on these targets. Its cases wait rather than compute: a run for each face."""
    suite = "tests/conformance/test_suite.py --target="
    return tuple(f"{suite}{target} -k {face}" for target in targets for face in ("asyncio", "'not asyncio'"))


BESIDE = "tests/test_lock.py tests/test_background.py tests/test_observers.py tests/test_sync_in_event_loop.py"
ENGINE = (f"tests/engine tests/primitives {BESIDE} {EMBEDDED}", *faces("memory"), SIMULATION)
STATE = ("tests/backends/test_lock_state*.py tests/backends/memory tests/backends/file", *faces("memory", "file"))
LUA = (*faces("redis"), "tests/backends/redis/test_backend*.py tests/backends/redis/test_[irs]*.py")
# The files, what is changed in them, of 300 mutants the least share, and arguments for pytest.
AREAS: dict[str, tuple[tuple[str, ...], str, int, tuple[str, ...]]] = {
    "engine": (("lockkit/engine/**/*.py", "lockkit/engine.py"), "python", 0, ENGINE),
    "lock_state": (("lockkit/backends/**/lock_state*.py",), "python", 40, (*STATE, SIMULATION)),
    "lua": (("lockkit/backends/redis/**/*.lua", "lockkit/backends/redis/**/*.py"), "lua", 40, LUA),
    "sql": (("lockkit/backends/sql_*/**/*.py", "lockkit/backends/sql_*.py"), "sql", 40, ()),
}


def sql_commands(path: str, place: str) -> tuple[str, ...]:
    """Choose tests by what the class or constant is named after, or the file: its database, and mode of sessions."""
    server, *_ = [kind for name in (place, path) for word, kind in SERVERS.items() if word in name.lower()] or [""]
    if "session" in path:
        modes = [mode for mode in ("row", "advisory") if mode in f"{path} {place}".lower()] or ["row", "advisory"]
        return (*faces(*(f"{server or 'postgresql'}-{mode}" for mode in modes)), "tests/backends/sql_session")
    return faces(server) if server not in {"", "sqlite"} else ("tests/backends/sql_table -k sqlite", *faces("sqlite"))
