"""Starts what the targets need, once per run, and sees to it that both faces really ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from lockkit.testing.face_driver import FACES
from lockkit.testing.plugin import TALLY
from lockkit_tools.servers.errors import ServerMissing
from lockkit_tools.servers.provisioning import in_ci
from tests.conformance.targets import TARGETS, Entry

# Groups of cases are imported, not collected.
pytest.register_assert_rewrite(
    *(f"tests.conformance.{name}" for name in ("inputs", "leases", "loops", "usage", "reentrancy"))
)


@pytest.fixture(scope="session")
def service_url() -> Iterator[Callable[[Entry], str]]:
    """Gives the URL of a target; starts its service at the first call, ends it at another target's."""
    urls: dict[str, str] = {}
    missing: dict[str, str] = {}
    with ExitStack() as services:

        def url(entry: Entry) -> str:
            if entry.id not in urls and entry.id not in missing:
                # The tests of a target come one after the other (tests/conftest.py).
                services.close()
                urls.clear()
                try:
                    service = services.enter_context(entry.service())
                    urls[entry.id] = getattr(service, "url", service)
                except ServerMissing as error:
                    missing[entry.id] = str(error)
            if entry.id in missing:
                # A real backend that nobody tested must not look green.
                (pytest.fail if in_ci() else pytest.skip)(missing[entry.id])
            return urls[entry.id]

        yield url


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a whole run in which a target or a face did not run a single case (on a desk, a server may be missing)."""
    config = session.config
    selected = any(getattr(config.option, name, None) for name in ("keyword", "markexpr", "lf", "target"))
    if exitstatus != pytest.ExitCode.OK or selected or config.option.collectonly or hasattr(config, "workerinput"):
        return
    counts = config.stash[TALLY].counts
    if not counts:
        return  # a run of single tests beside the suite
    idle = [
        f"{entry.id} ({face})"
        for entry in TARGETS
        for face in FACES
        # The fault suite has nothing to do to a backend without a server.
        if (ended := counts.get((entry.id, face), Counter())).keys() <= {"skipped"} and (in_ci() or not ended)
    ]
    whole = all("::" not in argument for argument in config.args)
    if whole and idle:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"no conformance case ran on: {', '.join(idle)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
