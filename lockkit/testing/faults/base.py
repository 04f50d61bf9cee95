"""What a server can be made to suffer (`Faults`), and the fixtures of the cases about it."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import Cases, make_driver
from lockkit.testing.face_driver import BackgroundCall, FaceDriver
from lockkit.testing.plugin import CASE_MARK, NOT_PROMISED
from lockkit.testing.target import Face, Target
from lockkit.testing.timing import PATIENCE

__all__ = ["ABILITIES", "FaultCases", "Faults", "Step"]

Step = Literal["acquire", "renew", "downgrade", "release"]

ABILITIES = {
    "stop": "it has no server that can be stopped",
    "erase": "it has no server whose data can be erased",
    "stop_one": "it has no server of several that can be stopped alone",
    "freeze": "it has no server that can be frozen",
    "cut": "its connections cannot be cut",
    "partition": "its clients cannot be cut off from it",
    "drop_answer": "the answer to a request cannot be dropped",
    "delay": "its answers cannot be delayed",
    "wrong_password": "it has no login",
    "without_rights": "it has no users with different rights",
    "fill": "its server cannot be filled",
}
"""What a backend may lack: the method of `Faults`, and the reason why a case does not apply."""


class Faults:
    """
    A server that can be ill-treated.

    Derive from it and override what your server can do; cases that need another method are skipped. A method returns
    when the fault is there. `heal` is called after each case, whatever has happened.

    Args:
        target: What the clients under test connect to, through a proxy if there is one.
        calm: The same server past that proxy. None: `target`.

    Attributes:
        secret: A password in the URLs, which no error may show.
    """

    secret = ""

    def __init__(self, target: Target, calm: Target | None = None) -> None:
        self.target = target
        self.calm = target if calm is None else calm

    def can(self, ability: str) -> bool:
        """Whether a fault can be provoked: whether its method is overridden."""
        return getattr(type(self), ability) is not getattr(Faults, ability)

    def heal(self) -> None:
        """End every fault, and return when the server answers."""

    def stop(self) -> None:
        """Kill the server, as a crash does. `start` must bring it back with all that it had confirmed."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it again at the same address, and return when it answers."""
        raise NotImplementedError

    def erase(self) -> None:
        """Remove the data of the stopped server."""
        raise NotImplementedError

    def stop_one(self) -> None:
        """Kill so many servers of several as may be lost, the leader among them. `start` brings them back."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Stop the server from answering (SIGSTOP): connections stay open, and requests wait."""
        raise NotImplementedError

    def thaw(self) -> None:
        """Let it go on."""
        raise NotImplementedError

    def cut(self) -> None:
        """Close all connections of `target`; new ones are accepted."""
        raise NotImplementedError

    def partition(self) -> None:
        """Let nothing through between the server and the clients of `target`; connections stay open."""
        raise NotImplementedError

    def drop_answer(self, step: Step, name: str) -> threading.Event:
        """
        Forward the next request that belongs to a step of this lock, swallow its answer, and cut that connection.

        Returns:
            An event that is set when it has happened.
        """
        raise NotImplementedError

    def delay(self, seconds: float) -> None:
        """Have each answer of `target` arrive so much later."""
        raise NotImplementedError

    def wrong_password(self) -> Target:
        """The server, by a URL with a password (`secret`) that it does not accept."""
        raise NotImplementedError

    def without_rights(self) -> Target:
        """The server, by the URL of a user (with the password `secret`) who may not lock."""
        raise NotImplementedError

    def fill(self) -> None:
        """Have the server run out of memory or disk, so that it stores nothing new."""
        raise NotImplementedError


class FaultCases(Cases):
    """
    Base of the groups of cases about faults.

    Must be overridden: `lockkit_faults`.
    """

    backend_part = (
        "Raise `BackendUnavailable` whenever it is unknown what the server did, by `answer_by` at latest, and "
        "`ConfigurationError` for what a retry cannot fix. `abandon` removes what a request may have left."
    )

    @pytest.fixture
    def lockkit_faults(self) -> Faults:
        """Override this to say how your server can be ill-treated; it may use fixtures of any scope."""
        raise pytest.UsageError("say how the server can be ill-treated: override the fixture lockkit_faults")

    @pytest.fixture
    def faults(self, lockkit_faults: Faults) -> Iterator[Faults]:
        """The server; in good order again after the case."""
        yield lockkit_faults
        lockkit_faults.heal()

    @pytest.fixture
    def lockkit_target(self, lockkit_faults: Faults) -> Target:
        """The target that suffers."""
        return lockkit_faults.target

    @pytest.fixture
    def driver(self, request: pytest.FixtureRequest, faults: Faults, lockkit_face: Face) -> FaceDriver:
        """Where the case plays; skips it if the fault cannot be provoked."""
        mark = request.node.get_closest_marker(CASE_MARK)
        for ability in mark.kwargs["faults"]:
            if not faults.can(ability):
                pytest.skip(f"{NOT_PROMISED}{ABILITIES[ability]} (no Faults.{ability})")
        return make_driver(request, faults.target, lockkit_face)


async def connect_calm(driver: FaceDriver, faults: Faults) -> aio.Client:
    """Make a client that no fault of connections reaches, and let it connect: a first login may take long."""
    client = await driver.connect(faults.calm)
    await client.ping()
    return client


@asynccontextmanager
async def during_fault(driver: FaceDriver, begin: Callable[[], None], end: Callable[[], None]) -> AsyncIterator[None]:
    """Hold a fault for a block, and end it even if the case fails: its clients are closed at a server that answers."""
    await driver.call(begin)
    try:
        yield
    finally:
        await driver.call(end)


async def survives(driver: FaceDriver, lease: aio.Lease) -> bool:
    """
    Ask whether a lease goes on, and renew it.

    Returns:
        False: it was lost, and the holder is notified. That may be where the end of a connection frees the lock.
    """
    if await driver.answered(lease.confirm):
        await driver.answered(lease.extend)
        return True
    assert driver.capabilities.crash_release == "connection"
    assert await lease.wait_lost(PATIENCE)
    return False


async def expect_hand_over(driver: FaceDriver, lease: aio.Lease, waiting: BackgroundCall[aio.Lease]) -> None:
    """Check that a waiter gets a lock when its holder has released it, or has lost it and knows."""
    if await survives(driver, lease):
        assert not waiting.done
        await driver.answered(lease.release)
    second = await waiting.result(2 * PATIENCE)
    assert not lease.held
    assert second.token > lease.token
    await second.release()


async def expect_no_second_holder(driver: FaceDriver, lease: aio.Lease, other: aio.Client) -> None:
    """
    Try to acquire a lock: it is granted only after its holder has lost it, and knows.

    Where the end of a connection frees the lock, the server may see it a moment before the client does.
    """
    second = await driver.answered(other.lock(lease.name, ttl=driver.timing.long).try_acquire)
    if second is None:
        return
    if driver.capabilities.crash_release == "connection":
        await driver.eventually(lambda: not lease.held, "the holder notices that its connection has ended")
    assert not lease.held, "two hold the lock"
    await second.release()


def expect_message(error: lockkit.LockError, secret: str) -> None:
    """Check that an error names the backend, and shows no password."""
    assert isinstance(error, lockkit.BackendUnavailable | lockkit.ConfigurationError)
    shown = f"{error} {error!r} {error.__cause__!r}"
    assert (error.backend or "") in str(error), shown
    assert re.search(r":\d+", str(error)), f"no address in {shown}"
    assert not secret or secret not in shown
