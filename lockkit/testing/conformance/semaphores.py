"""Semaphores: at most so many permits at the same time."""

from __future__ import annotations

from typing import Any

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import apart
from lockkit.testing.conformance.base import NOT_GRANTED, Cases, FaceDriver, case, needs
from lockkit.testing.history import recorded
from lockkit.testing.timing import PATIENCE


class Semaphores(Cases):
    """``client.semaphore(name, limit=…)``, by permits of the backend's own or by a lock for each slot."""

    backend_part = (
        "`Request.mode` is `permit`: in one atomic step, the server grants the lowest free `Grant.slot` while fewer "
        "than `Request.limit` are held. Each permit has its own ttl."
    )

    @case(needs.permits)
    async def test_no_more_permits_than_the_limit(self, driver: FaceDriver) -> None:
        """Of all clients together; slots are different, and 0 to limit - 1."""
        name, long = driver.name(), driver.timing.long
        clients = [await driver.connect() for _ in range(3)]
        semaphores = [client.semaphore(name, limit=3, ttl=long) for client in clients]

        permits = [await semaphore.acquire(PATIENCE) for semaphore in semaphores]

        assert {permit.slot for permit in permits} == {0, 1, 2}
        assert {(permit.mode, permit.name) for permit in permits} == {("permit", name)}
        assert await semaphores[0].available() == 0
        assert await driver.answered(semaphores[1].try_acquire) is None
        with pytest.raises(NOT_GRANTED):
            await semaphores[1].acquire(0.05)
        await permits[1].release()
        with pytest.raises(lockkit.LockLost, match=f"'{name}' .semaphore.") as released:
            permits[1].check()
        assert released.value.name == name
        assert await semaphores[0].available() == 1
        async with clients[2].semaphore(name, limit=3, ttl=long, timeout=PATIENCE) as again:
            assert again.slot == permits[1].slot
            assert again.token > 0
        for permit in (permits[0], permits[2]):
            assert await permit.confirm()
            await permit.release()
        assert await semaphores[0].available() == 3

    @case(needs.permits)
    async def test_released_permit_goes_to_a_waiter(self, driver: FaceDriver) -> None:
        """Whichever of them is released."""
        name, long = driver.name(), driver.timing.long
        client, other = await driver.connect(), await driver.connect()
        held = [await client.semaphore(name, limit=2, ttl=long).acquire(PATIENCE) for _ in range(2)]
        waiting = driver.spawn(other.semaphore(name, limit=2, ttl=long).acquire(PATIENCE))
        await driver.sleep(0.05)
        assert not waiting.done

        await held[1].release()

        permit = await waiting.result()
        assert permit.slot == held[1].slot
        await permit.release()
        await held[0].release()

    @case(needs.permits)
    async def test_critical_section_holds_no_more_than_the_limit(self, driver: FaceDriver) -> None:
        """Threads or tasks of several clients, all at once."""
        name, limit, inside, most = driver.name(), 2, 0, 0
        clients = [await driver.connect() for _ in range(2)]

        async def work(number: int) -> None:
            nonlocal inside, most
            semaphore = clients[number % 2].semaphore(name, limit=limit, ttl=driver.timing.long, timeout=3 * PATIENCE)
            for _ in range(3):
                async with recorded(number, semaphore, limit):
                    inside += 1
                    most = max(most, inside)
                    await driver.sleep(0.002)
                    inside -= 1

        calls = [driver.spawn(work(number)) for number in range(6)]
        for call in calls:
            await call.result(90)

        assert 1 <= most <= limit
        assert await clients[0].semaphore(name, limit=limit).available() == limit

    @case(needs.permits)
    async def test_clients_with_different_limits_share_permits(self, driver: FaceDriver) -> None:
        """As during a rolling deploy: the larger one gets what the smaller one may not have."""
        name, long = driver.name(), driver.timing.long
        client, other = await driver.connect(), await driver.connect()
        small, large = client.semaphore(name, limit=1, ttl=long), other.semaphore(name, limit=2, ttl=long)

        first = await small.acquire(PATIENCE)
        second = await large.acquire(PATIENCE)
        assert {first.slot, second.slot} == {0, 1}
        assert await driver.answered(small.try_acquire) is None
        assert await driver.answered(large.try_acquire) is None

        await first.release()
        await second.release()

    @case(needs.fair_permits)
    async def test_waiter_with_a_smaller_limit_is_not_overtaken(self, driver: FaceDriver) -> None:
        """Others, whose limit is larger, would come and go while it waits for ever."""
        name, long = driver.name(), driver.timing.long
        clients = [await driver.connect() for _ in range(3)]
        holder, small, large = (
            client.semaphore(name, limit=limit, ttl=long) for client, limit in zip(clients, (3, 1, 3), strict=True)
        )
        held = await holder.acquire(PATIENCE)
        first = driver.spawn(_acquire_and_release(small))
        await driver.until_waiting(clients[1], apart("sem", name))
        second = driver.spawn(_acquire_and_release(large))
        await driver.until_waiting(clients[2], apart("sem", name))
        await driver.sleep(0.1)
        assert not first.done
        assert not second.done, "it fits beside the holder, but came after the one that does not"

        await held.release()

        await first.result()
        await second.result()

    @case(needs.permits)
    async def test_permit_that_nobody_renews_is_free_again(self, driver: FaceDriver) -> None:
        """A living holder does not keep a dead one's permit."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        living = await client.semaphore(name, limit=2, ttl=driver.timing.long).acquire(PATIENCE)
        dead = await other.semaphore(name, limit=2, ttl=driver.timing.short, renew=False).acquire(PATIENCE)

        again = await client.semaphore(name, limit=2, ttl=driver.timing.long).acquire(PATIENCE)

        assert not dead.held
        assert again.slot == dead.slot
        assert again.token > 0
        living.check()
        await again.release()
        await living.release()

    @case(needs.permits)
    async def test_semaphore_is_apart_from_the_lock_of_that_name(self, driver: FaceDriver) -> None:
        """And is not listed among the locks."""
        name, long = driver.name(), driver.timing.long
        client = await driver.connect()

        async with client.semaphore(name, limit=1, ttl=long, timeout=PATIENCE) as permit:
            async with client.lock(name, ttl=long, timeout=PATIENCE) as lease:
                assert (permit.mode, lease.mode) == ("permit", "exclusive")
                assert lease.slot is None
            assert await client.holders(name) == []
            if client.capabilities.listing:
                assert [found async for found in client.names(name)] == []

    @case(needs.permits)
    async def test_holders_of_permits_are_seen_and_one_is_freed(self, driver: FaceDriver) -> None:
        """By any client, each with its slot; the other permits stay held, and a waiter gets the freed one."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        held = client.semaphore(name, limit=3, ttl=driver.timing.long, metadata="ours", raise_on_lost=False)
        seen = other.semaphore(name, limit=1)
        assert await seen.holders() == []
        assert not await seen.break_permit(0)
        leases = [await held.acquire(PATIENCE) for _ in range(3)]

        holders = await seen.holders()

        assert [(holder.slot, holder.owner) for holder in holders] == [(one.slot, one.owner) for one in leases]
        assert {(holder.mode, holder.metadata["text"]) for holder in holders} == {("permit", "ours")}
        waiting = driver.spawn(other.semaphore(name, limit=3, ttl=driver.timing.long).acquire(PATIENCE))
        assert await seen.break_permit(1)
        after = await waiting.result()
        assert after.slot == 1
        assert after.token > leases[1].token
        assert not await leases[1].confirm()
        assert [holder.owner for holder in await seen.holders()] == [leases[0].owner, after.owner, leases[2].owner]
        assert await leases[0].confirm()
        for lease in (leases[0], after, leases[2]):
            await lease.release()
        for slot in (-1, 1000, "0", None, True):
            with pytest.raises(lockkit.ConfigurationError, match="slot"):
                await seen.break_permit(slot)  # type: ignore[arg-type]

    @case(needs.permits)
    async def test_reentrant_permit_and_wrong_limits(self, driver: FaceDriver) -> None:
        """The same permit, counted, unless a call wants another; a wrong limit is refused before anything is sent."""
        name, long = driver.name(), driver.timing.long
        client = await driver.connect()
        semaphore = client.semaphore(name, limit=2, ttl=long, timeout=PATIENCE, reentrant=True)

        async with semaphore as first, semaphore as second:
            assert first == second
            assert await semaphore.available() == 1
            async with client.semaphore(name, limit=2, ttl=long, timeout=PATIENCE) as third:
                assert third.owner != first.owner

        wrong: list[Any] = [0, -1, 1.5, True, None, 10**6]
        for limit in wrong:
            with pytest.raises(lockkit.ConfigurationError, match="limit must be"):
                client.semaphore(name, limit=limit)

    @case(needs.permits, needs.caps)
    async def test_cap_bounds_all_clients(self, driver: FaceDriver) -> None:
        """Whatever their own limits; 0 pauses, and permits that are held stay held."""
        name, long = driver.name(), driver.timing.long
        client = await driver.connect()
        semaphore = client.semaphore(name, limit=3, ttl=long)
        assert await semaphore.cap() is None

        await semaphore.set_cap(1)

        held = await semaphore.acquire(PATIENCE)
        other = (await driver.connect()).semaphore(name, limit=2, ttl=long)
        assert await semaphore.cap() == await other.cap() == 1
        await _until_full(driver, other)
        assert await driver.answered(other.try_acquire) is None
        await semaphore.set_cap(0)
        assert held.held
        await held.release()
        paused = (await driver.connect()).semaphore(name, limit=3, ttl=long)
        await _until_full(driver, paused)
        with pytest.raises(NOT_GRANTED, match=r"set its limit to 0|answer"):
            await paused.acquire(0.05)
        await semaphore.set_cap(None)
        assert await semaphore.cap() is None
        async with (await driver.connect()).semaphore(name, limit=3, ttl=long, timeout=PATIENCE):
            pass
        await driver.pass_through(client, name)
        wrong: list[Any] = [-1, 1.5, True, 10**6, "1"]
        for cap in wrong:
            with pytest.raises(lockkit.ConfigurationError, match="cap of a semaphore must be"):
                await semaphore.set_cap(cap)

    @case(needs.permits, needs.caps)
    async def test_raised_cap_reaches_a_waiter(self, driver: FaceDriver) -> None:
        """Who has waited since before, though the permit that was held then still is."""
        name, long = driver.name(), driver.timing.long
        client, other = await driver.connect(), await driver.connect()
        semaphore = other.semaphore(name, limit=2, ttl=long)
        await semaphore.set_cap(1)
        held = await client.semaphore(name, limit=2, ttl=long).acquire(PATIENCE)
        waiting = driver.spawn(semaphore.acquire(2 * PATIENCE))
        await driver.until_waiting(other, apart("sem", name))

        await semaphore.set_cap(2)
        other._engine.acquisitions.wake(apart("sem", name))  # as if its next look had come, which takes seconds

        permit = await waiting.result()
        assert {held.slot, permit.slot} == {0, 1}
        await permit.release()
        await held.release()

    @case(needs.permits, needs.no_caps)
    async def test_cap_is_refused_where_there_is_none(self, driver: FaceDriver) -> None:
        """Before anything is sent."""
        client = await driver.connect()
        semaphore = client.semaphore(driver.name(), limit=2, ttl=driver.timing.long)

        with pytest.raises(lockkit.Unsupported, match="cap"):
            await semaphore.set_cap(1)
        with pytest.raises(lockkit.Unsupported, match="cap"):
            await semaphore.cap()


async def _until_full(driver: FaceDriver, semaphore: aio.Semaphore) -> None:
    """Return once the client knows the cap: a try counts without one if the server stalls when it is asked."""

    async def is_full() -> bool:
        return await semaphore.available() == 0

    await driver.eventually(is_full, "no permit is free")


async def _acquire_and_release(semaphore: aio.Semaphore) -> None:
    permit = await semaphore.acquire(PATIENCE)
    await permit.release()
