"""What holds for every test: a state directory of its own, and no setting of the machine that runs it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from tests.storage.sql.support import Bases


# A busy machine is no failure: the time of one example says nothing about the code.
settings.register_profile("lockkit", deadline=None)
settings.load_profile("lockkit")


# Thousands of processes import the same modules in a run: each would compile them anew where byte code is not kept.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# A shell without job control starts what runs in the background with SIGINT and SIGQUIT ignored, nohup with SIGHUP.
# That is inherited, and programs under test would not end by signals that they are sent.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _signum in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what stays to the end: ten thousand items and their modules, at each collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:  # noqa: ANN401 - of pytest-xdist
    """
    Keep together, in one process of pytest-xdist, what shares servers: a file, or a target of the conformance suite.

    So each server starts once in a run and ends with its tests. (The marker ``xdist_group`` says the same, but
    pytest-xdist 3.8 does not see it with pytest 9.2, and then each process starts all servers.)
    """
    if config.getoption("dist") not in {"load", "loadgroup"}:
        return None
    # Only there where several processes run the tests.
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # noqa: PLC0415

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group_of
    return scheduler


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long groups first, so that none is left alone at the end."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    items[:] = [item for members in sorted(groups.values(), key=_rank) for item in members]


SUITE = "tests/conformance/test_suite.py"
# Their tests share nothing: no server, no fixture that takes long.
SINGLE = ("tests/simulation/", "tests/docs/", "tests/examples/", "tests/backends/test_hung_servers.py")
EMBEDDED = {"memory", "file", "sqlite"}


def group_of(nodeid: str) -> str:
    """Name what a test runs together with, by its id."""
    file = nodeid.partition("::")[0]
    if file == SUITE and nodeid.endswith("]"):
        target = nodeid.rpartition("[")[2].removesuffix("]").removesuffix("-blocking").removesuffix("-asyncio")
        return nodeid if target in EMBEDDED else target
    return nodeid if file.startswith(SINGLE) else file


def _rank(members: list[pytest.Item]) -> int:
    """Order groups: files with slow tests, targets of the conformance suite, then the rest."""
    if any(item.get_closest_marker("slow") for item in members):
        return 0
    return 1 if members[0].nodeid.startswith(SUITE) else 2


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the embedded default out of the user's home, and the user's settings out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKKIT_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        for name in ("LOCKKIT_URL", "LOCKKIT_ENV"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bases]:
    """Databases by kind, for what works on an application's data."""
    from tests.storage.sql.support import Bases  # noqa: PLC0415 - most tests need no SQLAlchemy

    with ExitStack() as stack:
        yield Bases(tmp_path_factory.mktemp("bases"), stack)
