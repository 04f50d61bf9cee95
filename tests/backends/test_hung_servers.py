"""
A server that hangs (SIGSTOP: connections stay open, nothing answers) holds nobody up beyond what was promised.

Acquiring is back 0.5 s after its timeout, leaving a block and closing a client after 5 s for everything together.
The machine that runs the tests is busy with others: what is asserted is that much more than promised.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.errors import BackendUnavailable, LockTimeout
from lockkit.testing.stopwatch import Stopwatch
from lockkit_tools.servers.base import Service
from tests.conformance.targets import TARGETS, Entry

BUSY = 1.0
ACQUIRE = 0.5 + BUSY
END = 5.0 + BUSY
TTL = 60.0

SERVERS = [entry for entry in TARGETS if isinstance(entry.service, type) or entry.id == "redlock-5"]


class Times:
    """How long each call took, and what it raised."""

    def __init__(self) -> None:
        self.taken: dict[str, tuple[float, BaseException | None]] = {}

    def call(self, what: str, function: Callable[[], object]) -> None:
        """Measure a blocking call."""
        watch, error = Stopwatch(), None
        try:
            function()
        except Exception as raised:  # noqa: BLE001 - looked at later
            error = raised
        self.taken[what] = watch.stop(), error

    async def wait(self, what: str, awaitable: Awaitable[object]) -> None:
        """Measure a coroutine."""
        watch, error = Stopwatch(), None
        try:
            await awaitable
        except Exception as raised:  # noqa: BLE001 - looked at later
            error = raised
        self.taken[what] = watch.stop(), error

    def check(self) -> None:
        """Compare with what is promised, once the server answers again: a failure must not leave it stopped."""
        for what, (seconds, error) in self.taken.items():
            kind, _, timeout = what.partition(" ")
            if kind == "acquire":
                assert isinstance(error, BackendUnavailable), f"{what}: {error!r}"
                assert seconds < float(timeout) + ACQUIRE, f"{what} took {seconds:.2f} s"
            elif kind == "waiter":
                # It may or may not have noticed that it waits for a server that is away.
                assert isinstance(error, BackendUnavailable | LockTimeout), f"{what}: {error!r}"
                assert seconds < float(timeout) + ACQUIRE, f"{what} took {seconds:.2f} s"
            else:
                assert error is None, f"{what}: {error!r}"
                assert seconds < END, f"{what} took {seconds:.2f} s"


def blocking(entry: Entry, url: str, paused: threading.Barrier) -> Times:
    """Call each thing in a thread of its own, when the server hangs."""
    times = Times()

    def connect() -> lockkit.Client:
        return lockkit.connect(url, **entry.options)

    warm, cold, other, closing = connect(), connect(), connect(), connect()
    leases = [closing.lock(f"b-{number}", ttl=TTL, timeout=20).acquire() for number in range(5)]
    held = other.lock("b-held", ttl=TTL, timeout=20).acquire()
    waiting = threading.Thread(target=times.call, args=("waiter 4", lambda: warm.lock("b-held", ttl=TTL).acquire(4)))

    def leave() -> None:
        with warm.lock("b-left", ttl=TTL, timeout=20):
            inside.set()
            paused.wait(60)
            watch = Stopwatch()
        times.taken["leave"] = watch.stop(), None

    inside = threading.Event()
    leaving = threading.Thread(target=leave)
    waiting.start()
    leaving.start()
    assert inside.wait(30)
    paused.wait(60)
    with ThreadPoolExecutor(8) as pool:
        pool.submit(times.call, "acquire 1", lambda: warm.lock("b-1", ttl=TTL).acquire(1))
        pool.submit(times.call, "acquire 0", lambda: warm.lock("b-2", ttl=TTL).acquire(0))
        pool.submit(times.call, "acquire 0.5", lambda: warm.lock("b-3", ttl=TTL).try_acquire(0.5))
        pool.submit(times.call, "acquire 0.3", lambda: cold.lock("b-4", ttl=TTL).acquire(0.3))
        pool.submit(times.call, "close", closing.close)
    waiting.join(60)
    leaving.join(60)
    times.taken.setdefault("leave", (60.0, None))
    closers = [
        threading.Thread(target=times.call, args=(f"close{number}", client.close))
        for number, client in enumerate((warm, cold, other))
    ]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(60)
    del leases, held
    return times


async def on_asyncio(entry: Entry, url: str, paused: threading.Barrier) -> Times:
    """The same with tasks."""
    times = Times()

    async def connect() -> lockkit.aio.Client:
        return await lockkit.aio.connect(url, **entry.options)

    warm, cold, other, closing = [await connect() for _ in range(4)]
    leases = [await closing.lock(f"a-{number}", ttl=TTL, timeout=20).acquire() for number in range(5)]
    held = await other.lock("a-held", ttl=TTL, timeout=20).acquire()
    waiting = asyncio.create_task(times.wait("waiter 4", warm.lock("a-held", ttl=TTL).acquire(4)))
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def leave() -> None:
        async with warm.lock("a-left", ttl=TTL, timeout=20):
            inside.set()
            await go_on.wait()
            watch = Stopwatch()
        times.taken["leave"] = watch.stop(), None

    leaving = asyncio.create_task(leave())
    await inside.wait()
    await asyncio.to_thread(paused.wait, 60)
    go_on.set()
    await asyncio.gather(
        times.wait("acquire 1", warm.lock("a-1", ttl=TTL).acquire(1)),
        times.wait("acquire 0", warm.lock("a-2", ttl=TTL).acquire(0)),
        times.wait("acquire 0.5", warm.lock("a-3", ttl=TTL).try_acquire(0.5)),
        times.wait("acquire 0.3", cold.lock("a-4", ttl=TTL).acquire(0.3)),
        times.wait("close", closing.close()),
        waiting,
        leaving,
    )
    await asyncio.gather(
        *(times.wait(f"close{number}", client.close()) for number, client in enumerate((warm, cold, other)))
    )
    del leases, held
    return times


@pytest.mark.slow
@pytest.mark.parametrize("entry", SERVERS, ids=lambda entry: entry.id)
@pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")
def test_hung_server_holds_nobody_up(entry: Entry) -> None:
    """Both APIs; free and held locks, clients that were connected and one that was not."""
    with entry.service() as service:
        frozen: Service = service
        url: str = service.url
        # The two APIs (the blocking one with the thread that leaves its block) and the one who stops the server.
        paused = threading.Barrier(4, action=frozen.pause)

        def run_asyncio() -> Any:  # noqa: ANN401 - of a future
            return asyncio.run(on_asyncio(entry, url, paused))

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(blocking, entry, url, paused), pool.submit(run_asyncio)]
            try:
                with suppress(threading.BrokenBarrierError):
                    paused.wait(60)
                errors = [error for future in futures if (error := future.exception(80)) is not None]
                # What kept one of them from coming, rather than that the others waited in vain.
                for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
                    raise error
                results = [future.result() for future in futures]
            finally:
                frozen.resume()
    for times in results:
        times.check()
