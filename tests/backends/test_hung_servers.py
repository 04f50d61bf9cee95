"""
A server that hangs (SIGSTOP: connections stay open, nothing answers) delays no `close` beyond what was promised.

That is 5 s for everything together. What other calls do meanwhile is a case of the fault suite
(`lockkit.testing.faults.outages`). The machine that runs the tests is busy with others: 1 s more is allowed.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Barrier

import pytest

import lockkit
from lockkit import aio
from lockkit.testing.face_driver import FACES, FaceDriver
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers.base import Service
from tests.backends.support import play
from tests.conformance.targets import TARGETS, Entry
from tests.tries import UNTIL_SECONDS, beside

CLOSE_SECONDS = 5.0 + 1.0
TTL = 60.0

# RESP3 is the code of redis, which tells a hang by the same deadline whatever the protocol is.
SERVERS = [
    entry
    for entry in TARGETS
    if (isinstance(entry.service, type) or entry.id == "redlock-5") and entry.id != "redis-resp3"
]


async def close(client: aio.Client) -> None:
    """Close a client in time."""
    watch = Stopwatch()
    await client.close()
    assert watch.stop() < CLOSE_SECONDS, f"{type(client)}: {watch.stop():.2f} s"


async def wait(client: aio.Client, name: str) -> None:
    """Wait for a lock until the client is closed."""
    with suppress(lockkit.LockError):
        await client.lock(name, ttl=TTL).acquire()


@pytest.mark.slow
@pytest.mark.parametrize("entry", SERVERS, ids=lambda entry: entry.id)
@pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")
def test_hung_server_delays_no_close(entry: Entry) -> None:
    """Of a client with five leases, of one that waits, and of one that has asked nothing; in each API."""
    with entry.service() as service:
        hung: Service = service
        begin, end = Barrier(len(FACES), hung.pause), Barrier(len(FACES), hung.resume)

        async def body(driver: FaceDriver) -> None:
            holder, waiter, idle = [await driver.connect() for _ in range(3)]
            names = [driver.name() for _ in range(5)]
            leases = [await holder.lock(name, ttl=TTL).acquire(PATIENCE) for name in names]
            waiting = driver.spawn(wait(waiter, names[0]))
            await driver.until_waiting(waiter, names[0])
            await driver.call(begin.wait, UNTIL_SECONDS)
            try:
                for call in [driver.spawn(close(client)) for client in (holder, waiter, idle)]:
                    await call.result(4 * CLOSE_SECONDS)
                await waiting.result(PATIENCE)
            finally:
                await driver.call(end.wait, UNTIL_SECONDS)
            assert not any(lease.held for lease in leases), driver.face

        for played in [beside(play, face, service.url, body, entry.options) for face in FACES]:
            played.result(4 * UNTIL_SECONDS)
