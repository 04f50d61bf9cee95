"""Read/write locks: many readers at the same time, or one writer."""

from __future__ import annotations

import pytest

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import NOT_GRANTED, Cases, FaceDriver, case, needs
from lockkit.testing.face_driver import BackgroundCall
from lockkit.testing.timing import PATIENCE

REFUSED_SECONDS = 0.5
"""How long a reader asks that must not get in. Shorter gives a defect less time to show; longer only takes longer."""


class ReadWrite(Cases):
    """Both sides of a lock, and what a thread or task may nest."""

    backend_part = (
        "`Request.mode`: shared grants hold the lock together, an exclusive grant holds it alone; each has its own "
        "ttl. With `Capabilities.fair_shared`, a waiting writer goes before later readers. `downgrade` is one atomic "
        "step."
    )

    @case(needs.readers)
    async def test_readers_of_several_clients_hold_it_together(self, driver: FaceDriver) -> None:
        """Each has a token and a lease of its own; all are listed."""
        name = driver.name()
        clients = [await driver.connect() for _ in range(3)]

        leases = [await client.rwlock(name, ttl=driver.timing.long).read().acquire(PATIENCE) for client in clients]
        holders = await clients[0].holders(name)

        tokens = [lease.token for lease in leases]
        assert tokens == sorted(set(tokens))
        assert {(holder.owner, holder.token, holder.mode) for holder in holders} == {
            (lease.owner, lease.token, "shared") for lease in leases
        }
        for lease in leases:
            assert lease.mode == "shared"
            assert await lease.confirm()
            await lease.extend()
            await lease.release()
        assert await clients[0].holders(name) == []

    @case(needs.readers)
    async def test_readers_and_writers_exclude_one_another(self, driver: FaceDriver) -> None:
        """A writer waits for all readers, a reader for the writer; `Client.lock` is the write side."""
        name, long = driver.name(), driver.timing.long
        client, other = await driver.connect(), await driver.connect()
        first = await client.rwlock(name, ttl=long).read().acquire(PATIENCE)
        second = await other.rwlock(name, ttl=long).read().acquire(PATIENCE)

        for writer in (other.lock(name, ttl=long), client.lock(name, ttl=long)):
            assert await driver.spawn(driver.answered(writer.try_acquire)).result() is None
        await first.release()
        assert await driver.spawn(driver.answered(client.rwlock(name, ttl=long).write().try_acquire)).result() is None
        await second.release()

        async with client.rwlock(name, ttl=long, timeout=PATIENCE).write() as lease:
            assert lease.mode == "exclusive"
            assert lease.token > max(first.token, second.token)
            assert await driver.answered(other.rwlock(name, ttl=long).read().try_acquire) is None
        async with client.lock(name, ttl=long, timeout=PATIENCE):
            assert await driver.answered(other.rwlock(name, ttl=long).read().try_acquire) is None

    @case(needs.readers)
    async def test_release_of_the_last_reader_lets_the_writer_in(self, driver: FaceDriver) -> None:
        """And that of the writer lets all waiting readers in, of other clients and of the same."""
        name, long = driver.name(), driver.timing.long
        client, other = await driver.connect(), await driver.connect()
        reads = [await each.rwlock(name, ttl=long).read().acquire(PATIENCE) for each in (client, other)]

        writing = driver.spawn(client.rwlock(name, ttl=long).write().acquire(PATIENCE))
        await driver.until_waiting(client, name)
        for lease in reads:
            assert not writing.done
            await lease.release()
        written = await writing.result()

        reading = [
            driver.spawn(each.rwlock(name, ttl=long).read().acquire(PATIENCE)) for each in (client, client, other)
        ]
        await driver.until_waiting(client, name, 2)
        await driver.until_waiting(other, name)
        await written.release()
        leases = [await call.result() for call in reading]
        assert all(lease.held for lease in leases)
        for lease in leases:
            await lease.release()

    @case(needs.readers, needs.fair_readers)
    async def test_waiting_writer_stops_new_readers(self, driver: FaceDriver) -> None:
        """Readers that come and go do not starve it."""
        name, long = driver.name(), driver.timing.long
        client = await driver.connect()
        lease = await client.rwlock(name, ttl=long).read().acquire(PATIENCE)
        order, calls = await _writer_then_reader(driver, name)
        await lease.release()

        for call in calls:
            await call.result()
        assert order == ["writer", "reader"]

    @case(needs.readers)
    async def test_living_reader_does_not_keep_a_dead_one(self, driver: FaceDriver) -> None:
        """Each has its own expiry."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        living = await client.rwlock(name, ttl=driver.timing.long).read().acquire(PATIENCE)
        dead = await other.rwlock(name, ttl=driver.timing.short, renew=False).read().acquire(PATIENCE)

        async def only_one() -> bool:
            return [holder.owner for holder in await client.holders(name)] == [living.owner]

        await driver.eventually(only_one, "the lease that nobody renews ends")
        assert not dead.held
        living.check()
        with pytest.raises(lockkit.LockLost):
            await dead.release()
        await living.release()

    @case(needs.readers)
    async def test_broken_lock_is_lost_by_all_readers(self, driver: FaceDriver) -> None:
        """And is free for a writer."""
        name, long = driver.name(), driver.timing.long
        client, other = await driver.connect(), await driver.connect()
        leases = [await each.rwlock(name, ttl=long).read().acquire(PATIENCE) for each in (client, other)]

        assert await client.break_lock(name)

        for lease in leases:
            assert not await lease.confirm()
            assert lease.lost
        async with client.lock(name, ttl=long, timeout=PATIENCE) as lease:
            assert lease.token > max(lost.token for lost in leases)

    @case(needs.readers)
    async def test_nested_read_is_the_same_lease(self, driver: FaceDriver) -> None:
        """Inside reading and inside writing, counted: a waiting writer would stop a reader that it waits for."""
        name, long = driver.name(), driver.timing.long
        client, other = await driver.connect(), await driver.connect()
        lock = client.rwlock(name, ttl=long, timeout=PATIENCE)

        for outer in (lock.read(), lock.write()):
            async with outer as lease:
                waiting = driver.spawn(other.rwlock(name, ttl=long).write().acquire(PATIENCE))
                await driver.until_waiting(other, name)
                async with lock.read() as inner:
                    assert inner == lease
                lease.check()
            assert not lease.held
            await (await waiting.result()).release()

    @case(needs.readers)
    async def test_write_inside_read_raises_at_once(self, driver: FaceDriver) -> None:
        """It would wait for itself; another thread or task of the client waits as usual."""
        name, long = driver.name(), driver.timing.long
        client = await driver.connect()
        lock = client.rwlock(name, ttl=long)

        async with lock.read() as lease:
            with pytest.raises(lockkit.LockError, match="for itself") as refused:
                await lock.write().acquire()
            assert not isinstance(refused.value, (lockkit.LockTimeout, lockkit.LockLost))
            assert await driver.spawn(driver.answered(lock.write().try_acquire)).result() is None
            assert lease.held
        async with lock.write():
            pass

    @case(needs.readers)
    async def test_read_lease_that_was_handed_over_does_not_count(self, driver: FaceDriver) -> None:
        """Whoever has it now may release it: writing waits for that."""
        client = await driver.connect()
        lock = client.rwlock(driver.name(), ttl=driver.timing.long)

        async def enter(lease: aio.Lease) -> None:
            async with lease:
                await driver.sleep(0.1)

        async def release(lease: aio.Lease) -> None:
            await driver.sleep(0.01)
            await lease.release()

        for use in (enter, release):
            actor = driver.spawn(use(await lock.read().acquire(PATIENCE)))
            async with await lock.write().acquire(PATIENCE) as writing:
                assert writing.mode == "exclusive"
            await actor.result()

    @case(needs.readers, needs.downgrade)
    async def test_downgrade_lets_readers_in_and_no_writer(self, driver: FaceDriver) -> None:
        """The lease goes on, for reading."""
        name, long = driver.name(), driver.timing.long
        client, other = await driver.connect(), await driver.connect()
        lease = await client.rwlock(name, ttl=long).write().acquire(PATIENCE)
        token = lease.token
        writing = driver.spawn(other.lock(name, ttl=long).acquire(PATIENCE))
        await driver.until_waiting(other, name)

        await lease.downgrade()

        assert lease.mode == "shared"
        assert lease.token >= token
        assert await lease.confirm()
        assert [holder.mode for holder in await client.holders(name)] == ["shared"]
        assert not writing.done
        with pytest.raises(lockkit.LockError, match="no write lease"):
            await lease.downgrade()
        await lease.release()
        await (await writing.result()).release()
        with pytest.raises(lockkit.LockLost):
            await lease.downgrade()

    @case(needs.readers, needs.downgrade, needs.fair_readers)
    async def test_downgrade_keeps_the_order_of_those_that_wait(self, driver: FaceDriver) -> None:
        """The reader that came behind a waiting writer stays behind it."""
        name, long = driver.name(), driver.timing.long
        client = await driver.connect()
        lease = await client.rwlock(name, ttl=long).write().acquire(PATIENCE)
        order, calls = await _writer_then_reader(driver, name)
        await lease.downgrade()

        # As long as that takes, and as often as it looks, the other reader could have got in, too.
        with pytest.raises(NOT_GRANTED):
            await (await driver.connect()).rwlock(name, ttl=long).read().acquire(REFUSED_SECONDS)
        assert not order
        await lease.release()
        for call in calls:
            await call.result()
        assert order == ["writer", "reader"]

    @case(needs.no_readers)
    async def test_read_side_is_refused_where_there_is_none(self, driver: FaceDriver) -> None:
        """Before anything is sent; the write side works."""
        client = await driver.connect()
        lock = client.rwlock(driver.name(), ttl=driver.timing.long, timeout=PATIENCE)

        with pytest.raises(lockkit.Unsupported, match="shared_mode"):
            lock.read()
        async with lock.write() as lease:
            assert lease.mode == "exclusive"


async def _writer_then_reader(driver: FaceDriver, name: str) -> tuple[list[str], list[BackgroundCall[None]]]:
    """Have a writer wait for a held lock, and a reader behind it; return who has got in so far, and their calls."""
    writer, late, long = await driver.connect(), await driver.connect(), driver.timing.long
    order: list[str] = []

    async def pass_through(lock: aio.Lock, who: str) -> None:
        async with lock:
            order.append(who)

    writing = driver.spawn(pass_through(writer.rwlock(name, ttl=long, timeout=PATIENCE).write(), "writer"))
    await driver.until_waiting(writer, name)
    assert await driver.answered(late.rwlock(name, ttl=long).read().try_acquire) is None
    reading = driver.spawn(pass_through(late.rwlock(name, ttl=long, timeout=PATIENCE).read(), "reader"))
    await driver.until_waiting(late, name)
    return order, [writing, reading]
