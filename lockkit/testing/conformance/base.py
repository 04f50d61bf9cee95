"""
What a case is, what it needs, and the fixtures of the suite.

A case is a method of a class that derives from `Cases`::

    class Releasing(Cases):
        @case()
        async def test_release_frees_the_lock(self, driver: FaceDriver) -> None:
            client = await driver.connect()
            ...

It is written once and runs on the sync and the async API; see `lockkit.testing.face_driver`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import pytest

from lockkit.backend import Capabilities
from lockkit.errors import BackendUnavailable, LockTimeout
from lockkit.testing.face_driver import DRIVERS, FACES, FaceDriver
from lockkit.testing.plugin import CASE_MARK, NOT_PROMISED
from lockkit.testing.target import Face, Target

__all__ = ["NOT_GRANTED", "Cases", "FaceDriver", "Need", "Target", "case", "cases", "needs"]

S = TypeVar("S")
P = ParamSpec("P")

NOT_GRANTED = (LockTimeout, BackendUnavailable)
"""What a caller gets that waited for a held lock in vain: the second if the server stalled at its last try."""


@dataclass(frozen=True, slots=True)
class Need:
    """
    A promise that a case is about.

    Attributes:
        otherwise: What is said of a backend that does not make it: the reason why the case does not apply.
        met: Whether a backend makes it.
    """

    otherwise: str
    met: Callable[[Capabilities], bool]


class needs:  # noqa: N801 - a namespace, read as a word: needs.fairness
    """The promises that cases switch on. By capability, never by the name of a backend."""

    processes = Need("it excludes only within one process (scope 'process')", lambda can: can.scope != "process")
    metadata_update = Need(
        "it cannot replace the metadata of a held lock (not metadata_update)", lambda can: can.metadata_update
    )
    no_metadata_update = Need(
        "it can replace the metadata of a held lock (metadata_update)", lambda can: not can.metadata_update
    )
    transfer = Need("its locks belong to a session or to a majority (not transfer)", lambda can: can.transfer)
    kept_locks = Need(
        "its locks end with their holder's session or connection (crash_release)",
        lambda can: can.crash_release == "ttl" or can.transfer,
    )
    fairness = Need("it serves waiters in no particular order (not fair)", lambda can: can.fair)
    visible_waiters = Need("it cannot tell how many wait (not waiters_visible)", lambda can: can.waiters_visible)
    early_crash_release = Need(
        "it frees a dead holder's lock when the ttl is over, not before (crash_release 'ttl' or 'session')",
        lambda can: can.crash_release in {"process", "connection"},
    )
    survives_node_loss = Need(
        "a held lock may be lost with one of its servers (not survives_node_loss)", lambda can: can.survives_node_loss
    )
    own_ttl = Need(
        "its ttl is that of a session, which the server bounds and nobody extends (crash_release 'session')",
        lambda can: can.crash_release != "session",
    )
    listing = Need("it cannot list the locks that are held (not listing)", lambda can: can.listing)
    readers = Need("it has no read locks (not shared_mode)", lambda can: can.shared_mode)
    no_readers = Need("it has read locks (shared_mode)", lambda can: not can.shared_mode)
    fair_readers = Need(
        "it serves readers and writers in no particular order (not fair_shared)", lambda can: can.fair_shared
    )
    permits = Need("it has no semaphores (permits 'none')", lambda can: can.permits != "none")
    fair_permits = Need(
        "its permits go to waiters in no particular order (not fair, or permits not 'native')",
        lambda can: can.fair and can.permits == "native",
    )
    downgrade = Need("it cannot turn a write lease into a read lease (not downgrade)", lambda can: can.downgrade)
    caps = Need(
        "semaphores cannot be capped (not notes, or permits not 'native')",
        lambda can: can.notes and can.permits == "native",
    )
    no_caps = Need(
        "semaphores can be capped", lambda can: can.permits != "none" and not (can.notes and can.permits == "native")
    )
    notes = Need("it keeps no notes on locks (not notes)", lambda can: can.notes)
    no_notes = Need("it keeps notes on locks", lambda can: not can.notes)
    wake_up = Need("it wakes nobody, waiters look again (wakeup 'poll')", lambda can: can.wakeup == "push")


def case(
    *needed: Need, faces: Sequence[Face] = FACES, faults: Sequence[str] = ()
) -> Callable[[Callable[Concatenate[S, P], Coroutine[Any, Any, None]]], Callable[Concatenate[S, P], None]]:
    """
    Make a case of an ``async def`` method with a parameter ``driver``.

    Args:
        *needed: Promises without which the case does not apply.
        faces: On which faces it runs: both, unless it is about something that only one of them has.
        faults: Of a case of `lockkit.testing.faults`: what must be done to the server.
    """

    def decorate(body: Callable[Concatenate[S, P], Coroutine[Any, Any, None]]) -> Callable[Concatenate[S, P], None]:
        # A plain function for pytest: no plugin for asyncio shall take it for its own, whatever its mode.
        @wraps(body)
        def run(self: S, *arguments: P.args, **fixtures: P.kwargs) -> None:
            driver = fixtures["driver"]
            assert isinstance(driver, FaceDriver)
            driver.run(body(self, *arguments, **fixtures))

        marked: Callable[Concatenate[S, P], None] = pytest.mark.lockkit_case(
            needs=needed, faces=tuple(faces), faults=faults
        )(run)
        return marked

    return decorate


class Cases:
    """
    Base of all groups of cases: the fixtures that they are made of.

    Must be overridden: `lockkit_url`, or `lockkit_target`. All others are the suite's own.

    Attributes:
        backend_part: What a backend has to do for the promises of a group. Shown with a case that fails.
    """

    backend_part: ClassVar[str] = (
        "The engine does this with `try_acquire`, `release` and `holders`: look first at the other groups that fail."
    )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each case the faces on which it runs."""
        mark = metafunc.definition.get_closest_marker(CASE_MARK)
        if mark is not None:
            metafunc.parametrize("lockkit_face", mark.kwargs["faces"])

    @pytest.fixture
    def lockkit_url(self) -> str:
        """
        URL of the backend.

        Override this; it may use fixtures of any scope. The backend may hold other locks; cases use names of their own.
        """
        message = "say which backend to test: override the fixture lockkit_url, or give --lockkit-url to the suite"
        raise pytest.UsageError(message)

    @pytest.fixture
    def lockkit_target(self, lockkit_url: str) -> Target:
        """Override this in place of `lockkit_url` to give options, or a backend class that is not registered."""
        return Target(lockkit_url)

    @pytest.fixture
    def driver(self, request: pytest.FixtureRequest, lockkit_target: Target, lockkit_face: Face) -> FaceDriver:
        """Where the case plays; skips it if the backend does not promise what it is about."""
        return make_driver(request, lockkit_target, lockkit_face)


def make_driver(request: pytest.FixtureRequest, target: Target, face: Face) -> FaceDriver:
    """Make the driver of a case; skip the case if the backend does not promise what it is about."""
    capabilities = _capabilities(request.config, target)
    mark = request.node.get_closest_marker(CASE_MARK)
    for need in mark.kwargs["needs"]:
        if not need.met(capabilities):
            pytest.skip(f"{NOT_PROMISED}{need.otherwise}")
    return DRIVERS[face](target, capabilities)


_ASKED = pytest.StashKey[dict[str, "Capabilities"]]()


def _capabilities(config: pytest.Config, target: Target) -> Capabilities:
    """Ask the backend once, after it has seen its server: only then it knows all."""
    asked = config.stash.setdefault(_ASKED, {})
    key = repr((target.url, target.options, target.backend))
    if key not in asked:
        with target.connect() as client:
            client.ping()
            asked[key] = client.capabilities
    return asked[key]


def cases(suite: type[Cases]) -> dict[str, tuple[Face, ...]]:
    """All cases of a suite by name, with the faces on which each runs."""
    found = {}
    for name in dir(suite):
        for mark in getattr(getattr(suite, name), "pytestmark", ()):
            if mark.name == CASE_MARK:
                found[name] = mark.kwargs["faces"]
    return found
