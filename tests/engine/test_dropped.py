"""A lease that nothing refers to any more: noticed, also when the thread or task that acquired it has ended with it."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.errors import BackendUnavailable
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import scripted
from tests.tries import until, until_async

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


class Failed(Exception):
    """Of the code under test."""


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What lockkit warns of."""
    caplog.set_level(logging.WARNING, "lockkit")
    return caplog


def dropped(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages about leases that were dropped."""
    gc.collect()
    return [message for message in caplog.messages if "dropped without release" in message]


async def acquire(
    client: lockkit.Client | lockkit.aio.Client, *, reentrant: bool = False
) -> lockkit.Lease | lockkit.aio.Lease:
    """Acquire with a client of either API."""
    if isinstance(client, lockkit.aio.Client):
        return await client.lock("x", reentrant=reentrant).acquire(PATIENCE)
    return client.lock("x", reentrant=reentrant).acquire(PATIENCE)


# -- tasks that have ended -------------------------------------------------------------------------------------------

Client = lockkit.Client | lockkit.aio.Client


async def gather_with_a_failure(client: Client) -> None:
    """The lease is the result of the task that ended well, which `gather` takes no more."""

    async def other() -> None:
        raise Failed

    with pytest.raises(Failed):
        await asyncio.gather(acquire(client), other())


async def forgotten_task(client: Client) -> None:
    """Nobody takes the result."""
    await asyncio.wait([asyncio.create_task(acquire(client))])


async def failed_task(client: Client) -> None:
    """The lease is in the traceback."""

    async def work() -> None:
        lease = await acquire(client)
        assert lease.held
        raise Failed

    await asyncio.wait([asyncio.create_task(work())])


async def failed_task_with_reentry(client: Client) -> None:
    """The key by which it is entered again refers to the task, too."""

    async def work() -> None:
        lease = await acquire(client, reentrant=True)
        assert lease.held
        raise Failed

    await asyncio.wait([asyncio.create_task(work())])


WAYS: list[Callable[[Client], Awaitable[None]]] = [
    gather_with_a_failure, forgotten_task, failed_task, failed_task_with_reentry,
]  # fmt: skip


@pytest.mark.parametrize("api", [lockkit, lockkit.aio], ids=["sync", "aio"])
@pytest.mark.parametrize("way", WAYS)
def test_lease_of_a_task_that_has_ended_is_dropped(
    api: ModuleType, way: Callable[[Client], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its lock is not renewed until the process ends, and a failure that nobody awaited is reported by asyncio."""
    reported: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
        client = api.connect(f"memory://{secrets.token_hex(6)}")
        await way(client)
        await asyncio.sleep(0)  # a task that wakes up refers to what it has waited for
        assert len(dropped(caplog)) == 1
        assert "lock 'x'" in caplog.text
        assert not client._engine.leases.records
        if isinstance(client, lockkit.Client):
            client.close()
        else:
            await client.close()

    asyncio.run(main())
    assert reported == (["Task exception was never retrieved"] if "failed_task" in way.__name__ else [])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the coroutine that awaits in vain
def test_task_that_was_destroyed_inside_its_block_drops_the_lease() -> None:
    """`cancel_on_lost` and `cancel_on_stop` refer to the task, not for longer than it lives."""

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with lockkit.aio.connect("memory://destroyed") as client:

            async def hold(block: AbstractAsyncContextManager[object]) -> None:
                async with block:
                    await asyncio.get_running_loop().create_future()

            blocks: list[AbstractAsyncContextManager[object]] = [
                client.lock("x", cancel_on_lost=True),
                client.locks(["y"], cancel_on_lost=True),
                client.election("z").campaign(cancel_on_stop=True),
            ]
            tasks = [asyncio.create_task(hold(blocks.pop())) for _ in range(3)]
            await until_async(lambda: len(client._engine.leases.records) == 3)
            del tasks
            gc.collect()
            await asyncio.sleep(0)
            assert not client._engine.leases.records

    asyncio.run(main())


# -- threads -----------------------------------------------------------------------------------------------------------


def test_lease_in_the_traceback_of_a_thread_is_dropped_with_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """As a thread keeps it whose result is asked for later."""
    with lockkit.connect(f"memory://{secrets.token_hex(6)}") as client:

        class Worker(threading.Thread):
            error: BaseException | None = None

            def run(self) -> None:
                lease = client.lock("x", reentrant=True, ttl=300).acquire()
                try:
                    lease.extend(-1)
                except lockkit.ConfigurationError as error:
                    self.error = error

        worker: Worker | None = Worker()
        assert worker is not None
        worker.start()
        worker.join(PATIENCE)
        assert len(client._engine.leases.records) == 1

        worker = None

        assert len(dropped(caplog)) == 1
        assert not client._engine.leases.records


def test_error_of_an_acquisition_keeps_no_lease_of_its_callers(caplog: pytest.LogCaptureFixture) -> None:
    """The frames of a traceback refer to those of all callers, and so to what they hold."""
    client, backend = scripted()

    def down() -> None:
        raise BackendUnavailable("down")

    def work() -> None:
        lease = client.lock("x", ttl=300).acquire()
        backend.before["try_acquire"] = down
        assert lease.held
        with pytest.raises(BackendUnavailable):
            client.lock("y").acquire(0)

    work()
    assert len(dropped(caplog)) == 1
    assert not client._engine.leases.records


# -- what is said ------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Client], Any]] = {
    "lock": lambda client: client.lock("x"),
    "semaphore": lambda client: client.semaphore("x", limit=2),
    "read": lambda client: client.rwlock("x").read(),
    "write": lambda client: client.rwlock("x").write(),
    "locks": lambda client: client.locks(["x"]),
}


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A sync client."""
    with lockkit.connect(f"memory://{secrets.token_hex(6)}") as client:
        yield client


@pytest.mark.parametrize("kind", MAKERS)
def test_lease_that_is_only_asked_for_is_logged_once_by_its_name(
    kind: str, client: lockkit.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """``if lock.try_acquire():`` is what other libraries want."""
    entered = False
    if MAKERS[kind](client).try_acquire():
        entered = True

    assert entered
    (message,) = dropped(caplog)
    assert "lock 'x'" in message
    assert client.url in message
    assert "if lease := lock.try_acquire():" in message

    async def main() -> None:
        async with lockkit.aio.connect(f"memory://{secrets.token_hex(6)}") as other:
            assert await MAKERS[kind](other).try_acquire()

    caplog.clear()
    asyncio.run(main())
    assert len(dropped(caplog)) == 1


def test_nothing_is_logged_under_the_mutex(client: lockkit.Client, caplog: pytest.LogCaptureFixture) -> None:
    """A handler may use the same client, and the garbage collector runs anywhere. The watch logs it."""
    lease: lockkit.Lease | None = client.lock("x", ttl=30).acquire()
    with client._engine.client.mutex:
        lease = None
        assert not dropped(caplog)

    assert lease is None
    with client.lock("y", ttl=30):
        client._engine.confirm_soon()  # wakes the watch
        until(lambda: dropped(caplog))
    assert len(dropped(caplog)) == 1


@pytest.mark.parametrize("api", [lockkit, lockkit.aio], ids=["sync", "aio"])
@pytest.mark.parametrize(
    ("make", "name", "advice"),
    [
        (MAKERS["lock"], "release", "lock.acquire()"),
        (MAKERS["lock"], "extend", "lock.acquire()"),
        (MAKERS["semaphore"], "release", "lock.acquire()"),
        (MAKERS["read"], "release", "lock.acquire()"),
        (MAKERS["locks"], "release", "locks.acquire()"),
        (lambda client: client.rwlock("x"), "release", "rwlock.write().acquire()"),
        (lambda client: client.election("x"), "resign", "election.campaign()"),
    ],
)
def test_release_of_a_lock_says_that_the_lease_releases(
    api: ModuleType, make: Callable[[Client], Any], name: str, advice: str
) -> None:
    """An attribute that lockkit's locks do not have, for programs that look for it too."""

    async def main() -> None:
        made = make(api.connect("memory://said"))
        with pytest.raises(AttributeError, match="belongs to the lease") as caught:
            getattr(made, name)()
        assert advice in str(caught.value)
        assert f".{name}`" in str(caught.value)
        assert not hasattr(made, name)
        with pytest.raises(AttributeError, match=r"object has no attribute 'unknown'$"):
            _ = made.unknown

    asyncio.run(main())


def test_all_leases_are_copied_while_garbage_is_collected() -> None:
    """On Python 3.11 that happens within calls of C that allocate, and drops leases: from what is being copied, too."""
    client, _ = scripted()
    leases = [client.lock(f"x{number}", ttl=600).acquire() for number in range(1500)]

    def drop_one(phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start" and leases:
            leases.pop()

    threshold = gc.get_threshold()
    gc.callbacks.append(drop_one)
    gc.set_threshold(1)
    try:
        counts = [len(client._engine.leases.all()) for _ in range(400)]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(drop_one)
    assert counts == sorted(counts, reverse=True)
    assert len(client._engine.leases.all()) == len(leases) < counts[0]
    for lease in leases:
        lease.release()
    client.close()
