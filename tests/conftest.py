"""What holds for every test: a state directory of its own, and no setting of the machine that runs it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from lockkit_tools.servers._template import VARIABLE as TEMPLATES
from lockkit_tools.servers.temporary import TemporaryDirectory
from tests.comparison.conformance import record
from tests.engine.scripted import close_clients
from tests.storage.sql.support import Bases

# A busy machine is no failure: the time of one example says nothing about the code, nor does that of making it.
settings.register_profile("lockkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lockkit")


# Thousands of processes import the same modules in a run: each would compile them anew where byte code is not kept.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# A shell without job control starts what runs in the background with SIGINT and SIGQUIT ignored, nohup with SIGHUP.
# That is inherited, and programs under test would not end by signals that they are sent.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _signum in (signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.SIG_DFL)


def end_in_order(signum: int, frame: FrameType | None) -> None:
    """End the run as Ctrl-C does, with its servers and their directories; a second signal ends it at once."""
    signal.signal(signum, signal.SIG_DFL)
    signal.default_int_handler(signum, frame)


# SIGHUP comes when the terminal is closed. pytest handles neither of the two, so that servers' directories would stay.
# A process of pytest-xdist that hangs is sent SIGTERM, which it shall not survive.
signal.signal(signal.SIGHUP, end_in_order)
if "PYTEST_XDIST_WORKER" not in os.environ:
    signal.signal(signal.SIGTERM, end_in_order)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which conformance cases are collected, on which targets."""
    parser.addoption(
        "--nightly", action="store_true", help="run every conformance case on every target (nox -s conformance does)"
    )
    parser.addoption(
        "--conformance-report", type=Path, metavar="FILE", help="write what the conformance cases found as JSON"
    )
    parser.addoption("--target", action="append", metavar="NAME", help="run conformance cases on this target only")


def pytest_configure(config: pytest.Config) -> None:
    """Let the servers of a run share what is made before their first start; pytest-xdist's processes inherit it."""
    if TEMPLATES in os.environ:
        return
    patch = pytest.MonkeyPatch()
    templates = TemporaryDirectory("templates")
    patch.setenv(TEMPLATES, str(templates.path))
    config.add_cleanup(templates.close)
    config.add_cleanup(patch.undo)
    trust_one_authority(patch, templates.path / "authority.pem")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep what the conformance cases found; here, since with pytest-xdist the main process collects no test folder."""
    option, reporter = session.config.option, session.config.pluginmanager.get_plugin("terminalreporter")
    if option.conformance_report is None or option.collectonly or hasattr(session.config, "workerinput"):
        return
    assert reporter is not None
    outcomes = ("passed", "failed", "error", "skipped")
    record([report for outcome in outcomes for report in reporter.stats.get(outcome, [])], option.conformance_report)


def trust_one_authority(patch: pytest.MonkeyPatch, path: Path) -> None:
    """
    Trust one of the authorities that the machine trusts, by a file of it alone.

    PyMySQL reads all of them for each connection, which takes 20 ms. Nothing here speaks to other machines, and tests
    with TLS name authorities of their own.
    """
    everything = ssl.get_default_verify_paths().cafile
    if everything is not None:
        first, end, _ = Path(everything).read_text("utf-8").partition("-----END CERTIFICATE-----")
        path.write_text(f"{first}{end}\n", "utf-8")
        patch.setenv("SSL_CERT_FILE", str(path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what stays to the end: ten thousand items and their modules, at each collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        # Not collected first: that would look at a million objects to find next to nothing.
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


SUITE = ("tests/conformance/test_suite.py", "tests/conformance/test_faults.py")
# Their tests share nothing: no server, no fixture that takes long.
SINGLE = ("tests/simulation/", "tests/docs/", "tests/examples/", "tests/backends/test_hung_servers.py")
EMBEDDED = {"memory", "file", "sqlite"}
WITH_SERVERS = ("tests/backends/", "tests/storage/", "tests/cli/", "tests/integrations/", "tests/bench/")


def group_of(nodeid: str) -> str:
    """Name what a test runs together with, by its id."""
    file = nodeid.partition("::")[0]
    if file.startswith("packages/") and "::Test" in nodeid:
        # The two suites of a file, and the two APIs, share no more than a server, which starts in a second.
        suite, _, case = nodeid.rpartition("::")
        return f"{suite}[{case.partition('[')[2]}"
    if file in SUITE and nodeid.endswith("]"):
        target = nodeid.rpartition("[")[2].removesuffix("]").removesuffix("-blocking").removesuffix("-asyncio")
        return nodeid if target in EMBEDDED else target
    return nodeid if file.startswith(SINGLE) else file


def _rank(members: list[pytest.Item]) -> tuple[int, int]:
    slow = any(item.get_closest_marker("slow") for item in members)
    return rank_of(members[0].nodeid, slow=slow), -len(members)


def rank_of(nodeid: str, *, slow: bool) -> int:
    """
    Order groups by how long they may take: while the last one runs, all other processes are idle.

    First what has slow tests, then the targets of the conformance suite, then files that start servers and processes;
    last what is a single test. (Of each kind first those with many tests.)
    """
    if slow:
        return 0
    if nodeid.startswith("packages/"):
        return 1
    if nodeid.startswith(SUITE):
        return 5 if group_of(nodeid) == nodeid else 1
    if nodeid.startswith(SINGLE):
        return 4
    return 2 if nodeid.startswith(WITH_SERVERS) else 3


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the embedded default out of the user's home, and the user's settings out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKKIT_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        for name in ("LOCKKIT_URL", "LOCKKIT_ENV"):
            patch.delenv(name, raising=False)
        yield


class FailedAssertions(logging.Handler):
    """Collects the assertions whose failure is logged."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        if record.exc_info and isinstance(record.exc_info[1], AssertionError):
            self.found.append(self.format(record))


@pytest.fixture(autouse=True)
def _no_assertion_fails_unseen() -> Iterator[None]:
    """Background work logs whatever it raises and is run again: the test would pass."""
    log, handler = logging.getLogger("lockkit"), FailedAssertions()
    log.addHandler(handler)
    yield
    close_clients()
    log.removeHandler(handler)
    assert not handler.found, "\n".join(handler.found)


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bases]:
    """Databases by kind, for what works on an application's data."""
    from tests.storage.sql.support import Bases  # noqa: PLC0415 - most tests need no SQLAlchemy

    with ExitStack() as stack:
        yield Bases(tmp_path_factory.mktemp("bases"), stack)
