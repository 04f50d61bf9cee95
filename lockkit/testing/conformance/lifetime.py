"""The end of a client, of a lease that nobody points to, and what must be gone afterwards."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import warnings
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.face_driver import open_fds
from lockkit.testing.timing import PATIENCE


class Closing(Cases):
    """``close()``."""

    backend_part = (
        "`release_all` frees what is held by its deadline; `close` ends the connections and threads of this backend "
        "alone. Both can be called while other calls wait."
    )

    @case()
    async def test_close_releases_what_is_held(self, driver: FaceDriver) -> None:
        """All of it; the leases are not held any more."""
        client, other = driver.make_client(), await driver.connect()
        names = [driver.name() for _ in range(3)]
        leases = [await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE) for name in names]

        await client.close()

        assert [lease.held for lease in leases] == [False] * 3
        for name in names:
            assert await other.holders(name) == []

    @case()
    async def test_close_can_be_called_twice(self, driver: FaceDriver) -> None:
        """Also on a client that was never used."""
        used, unused = driver.make_client(), driver.make_client()
        await used.ping()

        for _ in range(2):
            await used.close()
            await unused.close()

    @case()
    async def test_every_call_after_close_raises_at_once(self, driver: FaceDriver) -> None:
        """A LockError, and no other; what is local still answers."""
        client = driver.make_client()
        name = driver.name()
        lock = client.lock(name, ttl=driver.timing.long)
        lease = await lock.acquire(PATIENCE)

        await client.close()

        calls: list[Callable[[], Awaitable[object]]] = [
            lock.acquire,
            partial(lock.acquire, 0),
            lock.try_acquire,
            lock.locked,
            partial(client.holders, name),
            partial(client.break_lock, name),
            client.ping,
        ]
        for call in calls:
            with pytest.raises(lockkit.LockError, match="closed"):
                await call()
        with pytest.raises(lockkit.LockError, match="closed"):
            client.lock(name)
        with pytest.raises(lockkit.LockError, match="closed"):
            async with lock:
                raise AssertionError("entered without the lock")
        assert not lease.held
        assert not lease.lost
        assert lease.token > 0
        await lease.release()

    @case()
    async def test_close_wakes_waiters_with_an_error(self, driver: FaceDriver) -> None:
        """Those at the backend and those in line, with and without a timeout; none gets the lock."""
        name = driver.name()
        client, holder = driver.make_client(), await driver.connect()
        lease = await holder.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        lock = client.lock(name, ttl=driver.timing.long)
        waiters = [driver.spawn(lock.acquire(timeout)) for timeout in (None, driver.timing.long, None, None)]
        await driver.until_waiting(client, name, len(waiters))

        await client.close()

        for waiter in waiters:
            with pytest.raises(lockkit.LockError, match="closed") as caught:
                await waiter.result()
            assert not isinstance(caught.value, lockkit.LockTimeout)

        async def nobody_waits() -> bool:
            (seen,) = await holder.holders(name)
            return seen.waiters in {0, None}

        # A server that learns it from the end of a connection learns it a little later.
        await driver.eventually(nobody_waits, "nobody waits at the backend")
        await lease.release()
        assert await holder.holders(name) == []

    @case()
    async def test_close_leaves_other_clients_alone(self, driver: FaceDriver) -> None:
        """Also those of the same backend in the same process, and one that has a lock that the client has lost."""
        client, other = driver.make_client(), await driver.connect()
        name = driver.name()
        lost = await client.lock(name, ttl=driver.timing.long, renew=False).acquire(PATIENCE)
        await other.break_lock(name)
        lease = await other.lock(name, ttl=driver.timing.long).acquire(PATIENCE)

        await client.close()

        assert not lost.held
        await lease.extend()
        assert await lease.confirm()
        await lease.release()


class Leftovers(Cases):
    """Nothing stays behind."""

    backend_part = (
        "`close` ends every thread, task, connection and file that the backend opened. What it keeps for a request "
        "goes with `release` or `abandon`."
    )

    @case()
    async def test_dropped_lease_warns_and_is_free_after_its_ttl(self, driver: FaceDriver) -> None:
        """A lease that nobody points to is not renewed for ever."""
        client, other = await driver.connect(), await driver.connect()
        ttl = driver.timing.short
        warned = False
        name = ""
        while not warned:
            name = driver.name()
            lease: aio.Lease | None = await client.lock(name, ttl=ttl).acquire(PATIENCE)
            assert lease is not None
            record = lease._record

            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ResourceWarning)
                lease = None
                gc.collect()

            warned = any(name in str(warning.message) for warning in caught)
            # One that was lost before it was dropped, where the machine stood still, is dropped in silence.
            assert warned or record.lost_reason in {"expired", "paused"}

        async with other.lock(name, ttl=driver.timing.long, timeout=driver.timing.beyond(ttl)):
            pass

    @case()
    async def test_lease_of_a_task_that_ended_is_dropped_with_it(self, driver: FaceDriver) -> None:
        """A thread or task that has ended with the lease in its result is no reason to renew it for ever."""
        client, other = await driver.connect(), await driver.connect()
        name, ttl = driver.name(), driver.timing.short

        async def leave_it() -> object:
            lease = await client.lock(name, ttl=ttl).acquire(PATIENCE)
            if driver.face == "blocking":
                vars(threading.current_thread())["result"] = lease
            return lease

        call = driver.spawn(leave_it())
        await call.result()
        driver.forget(call)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del call
            gc.collect()

        async with other.lock(name, ttl=driver.timing.long, timeout=driver.timing.beyond(ttl)):
            pass

    @case()
    async def test_released_or_lost_lease_is_dropped_in_silence(
        self, driver: FaceDriver, recwarn: pytest.WarningsRecorder
    ) -> None:
        """A warning would be wrong."""
        client, names = await driver.connect(), (driver.name(), driver.name())
        lease: aio.Lease | None = await client.lock(names[0], ttl=driver.timing.long).acquire(PATIENCE)
        assert lease is not None
        await lease.release()
        lost: aio.Lease | None = await client.lock(names[1], ttl=driver.timing.short, renew=False).acquire(PATIENCE)
        assert lost is not None
        assert await lost.wait_lost(driver.timing.beyond(lost.ttl))

        lease = lost = None
        gc.collect()

        assert lease is lost is None
        # Of these: what another test has left may be collected here, too.
        assert [
            str(warning.message) for warning in recwarn if any(name in str(warning.message) for name in names)
        ] == []

    @case()
    async def test_errors_can_be_pickled(self, driver: FaceDriver) -> None:
        """With their message, lock and backend."""
        client = await driver.connect()
        name = driver.name()
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        with pytest.raises(lockkit.LockTimeout) as busy:
            await driver.answered(client.lock(name).acquire, 0)
        with pytest.raises(lockkit.ConfigurationError) as wrong:
            client.lock("")
        await lease.release()
        with pytest.raises(lockkit.LockLost) as lost:
            lease.check()

        for error in (busy.value, wrong.value, lost.value):
            copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
            assert type(copy) is type(error)
            assert (str(copy), copy.name, copy.backend) == (str(error), error.name, error.backend)

    @case()
    async def test_threads_and_descriptors_go_with_the_client(self, driver: FaceDriver) -> None:
        """Connecting, holding, waiting and closing again and again costs nothing that stays."""

        async def use() -> None:
            client, other = driver.make_client(), driver.make_client()
            name = driver.name()
            lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
            assert await driver.answered(other.lock(name, ttl=driver.timing.long).try_acquire, 0.02) is None
            await lease.release()
            await client.close()
            await other.close()

        # The first round may load modules and start what all clients of the process share.
        await use()
        gc.collect()
        threads, descriptors = threading.active_count(), open_fds()

        for _ in range(5):
            await use()

        gc.collect()
        await driver.eventually(lambda: threading.active_count() <= threads, "the threads of the clients end")
        await driver.eventually(lambda: open_fds() <= descriptors, "the descriptors of the clients are closed")

    @case(faces=["asyncio"])
    async def test_asyncio_client_belongs_to_one_event_loop(self, driver: FaceDriver) -> None:
        """From another loop it raises a clear error, and goes on working in its own."""
        client = await driver.connect()
        await client.ping()

        async def elsewhere() -> None:
            with pytest.raises(lockkit.LockError, match="event loop"):
                await client.ping()
            with pytest.raises(lockkit.LockError, match="event loop"):
                await client.lock(driver.name()).acquire(0)

        await asyncio.wait_for(asyncio.to_thread(asyncio.run, elsewhere()), PATIENCE)

        async with client.lock(driver.name(), ttl=driver.timing.long):
            pass
