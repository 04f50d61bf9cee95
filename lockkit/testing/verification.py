"""
The conformance suite as a function: on a server that others use, in a place of its own, with a result that can be read.

It runs pytest in this process, so that a password in the URL stands on no command line. Only the plugins that it needs
are loaded, and nobody's configuration.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

import pytest

import lockkit
from lockkit import url as urls
from lockkit.configuration import profiles, registry
from lockkit.configuration.registry import DetachedHost
from lockkit.runtime import drive, monotonic
from lockkit.testing.history import FILE_VARIABLE
from lockkit.testing.plugin import (
    CASE_MARK,
    NOT_PROMISED,
    OUTCOMES,
    Outcome,
    backend_part,
    outcome_of,
    promise,
    skip_reason,
)
from lockkit.testing.timing import CONTENTION_SECONDS, PATIENCE

__all__ = ["CaseResult", "Outcome", "Verification", "verify"]

log = logging.getLogger("lockkit")

CASE_SECONDS = max(120, int(6 * PATIENCE), int(CONTENTION_SECONDS + 4 * PATIENCE))
"""What a case may take before it counts as failed. They wait for what must happen several times."""

_FACES: Final = {"sync": "blocking", "async": "asyncio"}
"""The APIs, as people call them, and in the ids of the cases."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one case ended on one of the two APIs."""

    name: str  # of the case
    group: str  # what it is about: ``Exclusion``, ``Tokens``, …
    face: str  # ``sync`` or ``async``
    promise: str  # what must be true, in a sentence
    backend_part: str  # what a backend has to do for it
    outcome: Outcome  # see `Outcome`
    reason: str  # why it failed or does not apply; empty if it passed
    seconds: float  # what it took


@dataclass(slots=True)
class Verification:
    """What the suite found."""

    backend: str  # URL without a password
    # The key prefix, table or directory that the suite had for itself; None if there was no such thing.
    place: str | None
    removed: bool = False  # what the suite stored there was removed; if not, the log says why
    cases: list[CaseResult] = field(default_factory=list)  # in the order in which they ended
    seconds: float = 0.0  # what all of it took
    complete: bool = False  # every case was run: nobody interrupted it

    def count(self, outcome: Outcome) -> int:
        """How many cases ended so."""
        return sum(case.outcome == outcome for case in self.cases)

    @property
    def passed(self) -> bool:
        """All that the backend promises holds; a case that could not be run says nothing."""
        return self.complete and self.count("failed") == 0 and self.count("passed") > 0

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        counts = {outcome.replace(" ", "_"): self.count(outcome) for outcome in OUTCOMES}
        return {"backend": self.backend, "conforms": self.passed, "complete": self.complete, **counts,
                "seconds": round(self.seconds, 1), "cases": [asdict(case) for case in self.cases]}  # fmt: skip


class _Watcher:
    """A plugin of pytest that takes down how each case ends."""

    def __init__(self, verification: Verification, told: Callable[[CaseResult, int], None]) -> None:
        self._verification = verification
        self._told = told
        self._known: dict[str, tuple[str, str, str, str, str]] = {}
        self._total = 0

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker(CASE_MARK) is not None and isinstance(item, pytest.Function):
                group, _, name = item.function.__qualname__.rpartition(".")
                (face,) = (api for api, name in _FACES.items() if name == item.callspec.params["lockkit_face"])
                self._known[item.nodeid] = (name, group, face, promise(item), backend_part(item))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self._known.get(report.nodeid)
        outcome = outcome_of(report)
        if known is None or outcome is None:
            return
        reason = _reason(report) if report.failed else skip_reason(report).removeprefix(NOT_PROMISED)
        result = CaseResult(*known, outcome, reason, round(report.duration, 3))
        self._verification.cases.append(result)
        self._told(result, self._total)


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message) if crash is not None else report.longreprtext
    return " ".join(message.splitlines()[:3]).strip()


def verify(
    url: str | None = None,
    *,
    profile: str | None = None,
    face: str | None = None,
    only: str | None = None,
    history: Path | None = None,
    told: Callable[[CaseResult, int], None] = lambda _case, _total: None,
) -> Verification:
    """
    Run the conformance suite on a backend, in a place of its own, and remove what is left there. Blocks for minutes.

    Args:
        url: Which backend; None: as for `lockkit.connect`.
        profile: A profile, as for `lockkit.connect`.
        face: ``sync`` or ``async``; None: both.
        only: Part of the names of the cases to run, or an expression as for ``pytest -k``; None: all.
        history: File for what contending callers did, in Jepsen's format (see `lockkit.testing.history`).
        told: Called after each case, with the number of all cases. What it prints to `sys.stdout` is not shown.

    Raises:
        ConfigurationError: The URL, the profile, a credential or the file for the history is wrong; or no case has such
            a name.
        BackendUnavailable: The backend does not answer.
    """
    if history is not None:
        try:
            history.write_text("")
        except OSError as error:
            raise lockkit.ConfigurationError(f"the history cannot be written to {history}: {error.strerror}") from error
    settings = profiles.resolve(url, profile, {})
    place = scratch_space(settings.url, settings.options)
    with lockkit.connect(place.url.text, **place.options) as client:
        client.ping()
    verification = Verification(settings.url.safe_text, place.name)
    wanted = " and ".join(f"({part})" for part in (only, _FACES.get(face or "")) if part is not None)
    arguments = ["--pyargs", "lockkit.testing.conformance", f"--lockkit-url={place.url.text}"]
    arguments += [f"--lockkit-option={name}={value}" for name, value in place.options.items()]
    arguments += ["-k", wanted] if wanted else []
    started = monotonic()
    try:
        with _quiet(history) as directory:
            ended = _run(arguments, _Watcher(verification, told), directory)
    finally:
        verification.removed = _erase(place)
    verification.seconds = monotonic() - started
    verification.complete = ended in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
    if ended == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if ended not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        hint = "" if only is None else f": see whether one has {only!r} in its name"
        message = f"no case was run, pytest ended with {ended}{hint}"
        raise lockkit.ConfigurationError(message, backend=verification.backend)
    return verification


def _erase(place: ScratchSpace) -> bool:
    """Empty it, if the server is still there and allows it: what was found counts all the same."""
    try:
        place.erase()
    except lockkit.LockError as error:
        log.warning("what the suite stored in %s could not be removed: %s", place.name, error)
        return False
    return True


def _run(arguments: list[str], watcher: _Watcher, directory: Path) -> int:
    configuration = directory / "pytest.ini"
    configuration.write_text("[pytest]\n")
    plugins = ["-p", "no:cacheprovider", "-p", "lockkit.testing.plugin", "-p", "pytest_timeout"]
    places = ["-c", str(configuration), f"--rootdir={directory}", f"--basetemp={directory / 'temporary'}"]
    fixed = [*places, f"--timeout={CASE_SECONDS}", "-q"]
    return int(pytest.main([*plugins, *fixed, *arguments], plugins=[watcher]))


@contextlib.contextmanager
def _quiet(history: Path | None) -> Iterator[Path]:
    """Keep pytest from talking, and from anybody's plugins and options; give a directory for it."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="lockkit-verify-") as directory,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        if history is not None:
            patch.setenv(FILE_VARIABLE, str(history.absolute()))
        yield Path(directory)


@dataclass(frozen=True, slots=True)
class ScratchSpace:
    """Where the suite may do what it likes."""

    url: urls.Url = field(repr=False)  # for `lockkit.connect`. **Its text holds the password.**
    # For `lockkit.connect`, too: those given, and those that make the space its own. **May hold passwords.**
    options: Mapping[str, Any] = field(repr=False)
    name: str | None  # what marks everything in it; None if the backend has no way to keep clients apart
    above: Path | None = None  # a directory above it that was not there before

    def erase(self) -> None:
        """Remove whatever is in it. Blocks."""
        if self.name is not None:
            drive(self._erase())

    async def _erase(self) -> None:
        host = DetachedHost()
        backend, _ = registry.open_backend(self.url, self.options, host)
        try:
            await backend.erase()
        finally:
            await backend.close()
        if self.above is not None:
            with contextlib.suppress(OSError):  # somebody else uses it by now
                self.above.rmdir()


def scratch_space(given: urls.Url, options: Mapping[str, Any]) -> ScratchSpace:
    """Find a space of one's own at a backend: a key prefix, a table, or a directory. No I/O."""
    name = f"lockkit_verify_{secrets.token_hex(6)}"
    backend_class = registry.find(given.scheme, options.get("mode", dict(given.query).get("mode")))
    for option in ("prefix", "table"):
        if option in backend_class.options:
            return ScratchSpace(given, {**options, option: name}, name)
    if given.base == "file":
        backend, _ = registry.open_backend(given, options, DetachedHost())
        above = Path(cast("Any", backend).url.removeprefix("file://"))
        made = None if above.exists() else above
        _, question, query = given.text.partition("?")
        return ScratchSpace(urls.parse(f"file://{quote(f'{above}/{name}')}{question}{query}"), options, name, made)
    return ScratchSpace(given, options, None)
