"""Locks that stay held although their lease has ended: handed over with a ticket, or kept for ``min_hold``."""

from __future__ import annotations

import pytest

import lockkit
from lockkit.testing.conformance.base import NOT_GRANTED, Cases, FaceDriver, case, needs
from lockkit.testing.timing import PATIENCE


class Tickets(Cases):
    """`Lease.ticket`, `Client.take`, and ``min_hold=``."""

    backend_part = (
        "`take_over`: in one atomic step, the server compares the owner and puts another one in its place, with a "
        "larger token. `detach`, which renews by default, keeps the lock also if its holder's process ends."
    )

    @case(needs.transfer)
    async def test_ticket_gives_the_lock_to_one_taker(self, driver: FaceDriver) -> None:
        """With a larger token; the giver's lease has ended, and its close frees nothing."""
        giver, first, second = await driver.connect(), await driver.connect(), await driver.connect()
        name = driver.name()
        lease = await giver.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        ticket = await lease.ticket()
        assert not lease.held
        await lease.release()
        await giver.close()

        taken = await first.take(ticket, ttl=driver.timing.long, metadata="the taker")
        with pytest.raises(lockkit.LockLost):
            await second.take(ticket, ttl=driver.timing.long)

        assert taken.token > lease.token
        (holder,) = await second.holders(name)
        assert (holder.owner, holder.token) == (taken.owner, taken.token)
        assert holder.metadata["text"] == "the taker"
        assert await taken.confirm()
        await taken.extend()
        assert await driver.answered(second.lock(name, ttl=driver.timing.long).try_acquire) is None
        await taken.release()
        async with second.lock(name, ttl=driver.timing.long, timeout=PATIENCE) as after:
            assert after.token > taken.token
            with pytest.raises(lockkit.LockLost):
                await first.take(ticket, ttl=driver.timing.long)
            assert await after.confirm()

    @case(needs.transfer)
    async def test_waiter_waits_on_while_the_lock_is_handed_over(self, driver: FaceDriver) -> None:
        """And is woken when the taker releases."""
        giver, taker, other = await driver.connect(), await driver.connect(), await driver.connect()
        name = driver.name()
        lease = await giver.lock(name, ttl=driver.timing.long).acquire(PATIENCE)

        async def wait() -> int:
            async with other.lock(name, ttl=driver.timing.long, timeout=PATIENCE) as after:
                return after.token

        actor = driver.spawn(wait())
        await driver.until_waiting(other, name)
        taken = await taker.take(await lease.ticket(), ttl=driver.timing.long)
        await driver.sleep(0.05)
        assert await taken.confirm()
        await taken.release()

        assert await actor.result() > taken.token

    @case(needs.transfer)
    async def test_lock_is_free_when_nobody_takes_it_in_time(self, driver: FaceDriver) -> None:
        """The ticket is worth nothing then."""
        giver, other = await driver.connect(), await driver.connect()
        name = driver.name()
        lease = await giver.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        ticket = await lease.ticket(ttl=driver.timing.short)

        async with other.lock(name, ttl=driver.timing.long, timeout=driver.timing.beyond(driver.timing.short)) as after:
            assert after.token > lease.token
            with pytest.raises(lockkit.LockLost):
                await giver.take(ticket, ttl=driver.timing.long)
            assert await after.confirm()

    @case(needs.transfer)
    async def test_ticket_of_a_broken_lock_is_worth_nothing(self, driver: FaceDriver) -> None:
        """Nor is that of a lock that somebody else holds since."""
        giver, other = await driver.connect(), await driver.connect()
        name = driver.name()
        lease = await giver.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        ticket = await lease.ticket()
        assert await other.break_lock(name)

        with pytest.raises(lockkit.LockLost):
            await other.take(ticket, ttl=driver.timing.long)

        assert await other.holders(name) == []

    @case(needs.kept_locks)
    async def test_lock_stays_held_for_min_hold(self, driver: FaceDriver) -> None:
        """Also when its client is closed; then it is free."""
        client, other = await driver.connect(), await driver.connect()
        name, min_hold = driver.name(), driver.timing.short * 2
        async with client.lock(name, ttl=driver.timing.long, timeout=PATIENCE, min_hold=min_hold) as lease:
            pass
        assert not lease.held
        await client.close()

        if lease._record.min_hold_left > driver.timing.short:
            with pytest.raises(NOT_GRANTED):
                await other.lock(name, ttl=driver.timing.long).acquire(0)
        async with other.lock(name, ttl=driver.timing.long, timeout=driver.timing.beyond(min_hold)) as after:
            assert after.token > lease.token
