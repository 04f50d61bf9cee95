"""
The pytest plugin of the conformance suite: its options, its marker, and the table at the end of a run.

It comes with every lockkit that pytest finds, so it imports nothing but pytest and does nothing in runs without cases.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Literal, get_args

import pytest

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

CASE_MARK = "lockkit_case"
NOT_PROMISED = "not promised: "
"""How the reason starts when a case does not apply; other reasons mean that something is missing here."""

PROPERTY = "lockkit"
"""Of the reports of cases: target and API."""

Outcome = Literal["passed", "failed", "not promised", "skipped"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# The cases' assertions are in modules that are imported, not collected.
pytest.register_assert_rewrite(
    "lockkit.testing.conformance",
    "lockkit.testing.faults",
    "lockkit.testing.face_driver",
    "lockkit.testing.witness",
    "lockkit.testing.processes",
)


def outcome_of(report: pytest.TestReport) -> Outcome | None:
    """Tell how a case ended, once: by the report of its call, or of the setup that ended it."""
    if report.when != "call" and report.passed:
        return None
    if report.skipped:
        return "not promised" if skip_reason(report).startswith(NOT_PROMISED) else "skipped"
    return "passed" if report.passed else "failed"


class Tally:
    """Counts what really ran, from the reports (which also come from the processes of pytest-xdist)."""

    def __init__(self) -> None:
        # By target and face, as they stand in the ids of the cases.
        self.counts: dict[tuple[str, str], Counter[Outcome]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a case."""
        key = dict(report.user_properties).get(PROPERTY)
        if key is not None and (outcome := outcome_of(report)) is not None:
            target, face = str(key).rsplit("-", 1)
            self.counts.setdefault((target, face), Counter())[outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Show the counts, and what was not promised."""
        if not self.counts:
            return
        terminalreporter.section("lockkit conformance")
        for (target, face), count in sorted(self.counts.items()):
            parts = ", ".join(f"{count[outcome]} {outcome}" for outcome in OUTCOMES)
            terminalreporter.write_line(f"{target} ({face}): {parts}")
        for line in _not_promised_lines(terminalreporter):
            terminalreporter.write_line(line)


def skip_reason(report: pytest.TestReport) -> str:
    """Give the reason of a skip."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return reason.removeprefix("Skipped: ")


def _not_promised_lines(terminalreporter: TerminalReporter) -> list[str]:
    cases: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        key = dict(report.user_properties).get(PROPERTY)
        reason = skip_reason(report)
        if key is not None and reason.startswith(NOT_PROMISED):
            cases[str(key).rsplit("-", 1)[0], reason] += 1
    return [f"{target}: {reason} ({count} cases)" for (target, reason), count in sorted(cases.items())]


TALLY = pytest.StashKey[Tally]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say which backend to run the suite on."""
    group = parser.getgroup("lockkit", "conformance of lock backends (lockkit)")
    group.addoption(
        "--lockkit-url",
        action="append",
        default=[],
        metavar="URL",
        help="backend to run lockkit.testing.conformance on; may be given several times",
    )
    group.addoption(
        "--lockkit-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option for connect() of --lockkit-url, besides those in the URL; may be given several times",
    )
    group.addoption(
        "--lockkit-backend",
        metavar="MODULE:CLASS",
        help="backend class of --lockkit-url, if no entry point registers its scheme",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register marker and tally."""
    config.addinivalue_line("markers", f"{CASE_MARK}: a case of the conformance suite of lockkit (set by the suite).")
    tally = config.stash[TALLY] = Tally()
    config.pluginmanager.register(tally, "lockkit-tally")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say below a case that failed what was promised, and what a backend has to do for it."""
    report = yield
    if report.failed and item.get_closest_marker(CASE_MARK) is not None and isinstance(item, pytest.Function):
        lines = (
            f"must hold: {promise(item)}",
            f"the backend: {backend_part(item)}",
            "the contract: lockkit.backend.LockBackend",
        )
        report.sections.append(("lockkit conformance", "\n".join(lines)))
    return report


def promise(case: pytest.Function) -> str:
    """Give what a case checks, in a sentence."""
    return " ".join((case.function.__doc__ or "").split())


def backend_part(case: pytest.Function) -> str:
    """Give what a backend has to do for it, as the group of the case says it."""
    function = case.function
    # Not of the class of the item: that one is derived from all groups.
    group = getattr(sys.modules[function.__module__], function.__qualname__.partition(".")[0])
    return str(group.backend_part)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note on the report of a case which target and face it belongs to; also when its setup skips it."""
    if item.get_closest_marker(CASE_MARK) is None or not isinstance(item, pytest.Function):
        return
    params: Mapping[str, object] = item.callspec.params if hasattr(item, "callspec") else {}
    face = str(params.get("lockkit_face"))
    identifier = item.callspec.id if hasattr(item, "callspec") else ""
    # The id is made of the parameters' in no order that we decide.
    target = "-".join(part for part in identifier.split("-") if part != face)
    if not target and item.cls is not None:
        target = item.cls.__name__
    item.user_properties.append((PROPERTY, f"{target}-{face}"))
