"""Connections that are cut, and answers that are lost or come late: the server did it, and the client cannot know."""

from __future__ import annotations

from contextlib import suppress

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import NOT_GRANTED, FaceDriver, case, needs
from lockkit.testing.face_driver import STALL_SECONDS
from lockkit.testing.faults.base import (
    FaultCases,
    Faults,
    connect_calm,
    during_fault,
    expect_hand_over,
    expect_message,
    expect_no_second_holder,
    survives,
)
from lockkit.testing.faults.outages import NOTICE_SECONDS, outage_ttl, told
from lockkit.testing.timing import PATIENCE
from lockkit.units import Seconds

IDLE_SECONDS = 0.1
"""For how long a connection was not used. Backends may use one that answered a few milliseconds ago unchecked."""

SENT_MAX = 6
"""More often than a backend sends a request before its call fails: then all answers are lost."""


class Cuts(FaultCases):
    """All connections are closed at once; new ones are accepted."""

    @case(faults=["cut"])
    async def test_connections_cut_while_held_and_while_waiting(self, driver: FaceDriver, faults: Faults) -> None:
        """The lease goes on, or its holder is notified at once; the waiter gets the lock after that."""
        holder, waiter, calm = await driver.connect(), await driver.connect(), await connect_calm(driver, faults)
        lease, waiting = await driver.contended(holder, waiter)

        # Where the end of a connection frees the lock, the waiter has it after one, and loses it to another.
        for _ in range(1 if driver.capabilities.crash_release == "connection" else 2):
            await driver.call(faults.cut)
            await expect_no_second_holder(driver, lease, calm)

        await expect_hand_over(driver, lease, waiting)

    @case(faults=["cut"])
    async def test_idle_connections_that_were_cut_are_replaced(self, driver: FaceDriver, faults: Faults) -> None:
        """That is no error, not even for a single try."""
        client = await driver.connect()
        name = driver.name()
        lock, lease = client.lock(name, ttl=driver.timing.long), None
        for rounds_left in (2, 1, 0):
            await driver.pass_through(client, name)
            await driver.sleep(IDLE_SECONDS)
            await driver.call(faults.cut)
            began = driver.now()
            try:
                lease = await lock.try_acquire()
                break
            except lockkit.BackendUnavailable:
                # A cut is told at once. What takes longer may be a busy server, but not each time.
                if driver.now() - began < STALL_SECONDS or not rounds_left:
                    raise

        assert lease is not None
        await lease.release()


class LostAnswers(FaultCases):
    """A request is executed, its answer is lost, and the connection ends."""

    async def _lease(self, driver: FaceDriver, name: str) -> tuple[aio.Client, aio.Lease]:
        """Connect, and acquire; the server has seen each kind of request, and executes the next one."""
        client = await driver.connect()
        async with client.lock(name, ttl=driver.timing.long, timeout=PATIENCE) as lease:
            await lease.extend()
            if driver.capabilities.downgrade:
                await lease.downgrade()
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        return client, lease

    @case(faults=["drop_answer"])
    async def test_lost_answer_to_acquire(self, driver: FaceDriver, faults: Faults) -> None:
        """The grant is found by asking again, or undone: nobody waits for its ttl."""
        name, ttl = driver.name(), driver.timing.long
        client, lease = await self._lease(driver, name)
        await lease.release()
        calm = await connect_calm(driver, faults)
        dropped = await driver.call(faults.drop_answer, "acquire", name)

        try:
            second = await client.lock(name, ttl=ttl).acquire(PATIENCE)
        except lockkit.BackendUnavailable as error:
            expect_message(error, faults.secret)
        else:
            await expect_no_second_holder(driver, second, calm)
            assert second.token > lease.token
            assert await driver.answered(second.confirm)
            await second.release()

        assert dropped.wait(PATIENCE)
        await driver.pass_through(calm, name)

    @case(faults=["drop_answer"])
    async def test_lost_answer_to_renew(self, driver: FaceDriver, faults: Faults) -> None:
        """The lease goes on, or its holder is notified; nobody else holds the lock before."""
        name = driver.name()
        _, lease = await self._lease(driver, name)
        calm = await connect_calm(driver, faults)
        dropped = await driver.call(faults.drop_answer, "renew", name)

        with suppress(lockkit.BackendUnavailable, lockkit.LockLost):
            await lease.extend()

        assert dropped.wait(PATIENCE)
        await expect_no_second_holder(driver, lease, calm)
        if await survives(driver, lease):
            await driver.answered(lease.release)
        async with calm.lock(name, ttl=driver.timing.long, timeout=PATIENCE) as second:
            assert second.token > lease.token

    @case(needs.readers, needs.downgrade, faults=["drop_answer"])
    async def test_lost_answer_to_downgrade(self, driver: FaceDriver, faults: Faults) -> None:
        """The lease goes on, and lets readers in, or its holder is notified; asked again, it is the same."""
        name, ttl = driver.name(), driver.timing.long
        _, lease = await self._lease(driver, name)
        calm = await connect_calm(driver, faults)
        dropped = [await driver.call(faults.drop_answer, "downgrade", name) for _ in range(SENT_MAX)]

        with suppress(lockkit.BackendUnavailable, lockkit.LockLost):
            await lease.downgrade()

        assert dropped[0].wait(PATIENCE)
        await driver.call(faults.heal)
        if await survives(driver, lease):
            if driver.capabilities.metadata_update:
                await driver.answered(lease.update, {"step": 2})
            async with calm.rwlock(name, ttl=ttl, timeout=PATIENCE).read():
                if lease.mode == "exclusive":  # as far as the client knows
                    await driver.answered(lease.downgrade)
                assert lease.mode == "shared"
                assert await driver.answered(lease.confirm)
            await driver.answered(lease.release)
        await driver.pass_through(calm, name)

    @case(faults=["drop_answer"])
    async def test_lost_answer_to_release(self, driver: FaceDriver, faults: Faults) -> None:
        """It is sent once, and neither success nor loss; calling again touches nobody else's lock."""
        name = driver.name()
        _, lease = await self._lease(driver, name)
        calm = await connect_calm(driver, faults)
        dropped = await driver.call(faults.drop_answer, "release", name)

        try:
            await lease.release()
        except lockkit.BackendUnavailable as error:
            expect_message(error, faults.secret)

        assert dropped.wait(PATIENCE)
        second = await calm.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        await driver.answered(lease.release)
        assert await second.confirm()
        await second.release()


class LateAnswers(FaultCases):
    """The network keeps answers for longer than they are worth."""

    @case(faults=["delay"])
    async def test_late_answer_to_acquire(self, driver: FaceDriver, faults: Faults) -> None:
        """A grant that comes after the call was given up is undone: nobody waits for its ttl."""
        client, calm = await driver.connect(), await connect_calm(driver, faults)
        name, ttl = driver.name(), driver.timing.long
        await driver.pass_through(client, name)

        async with during_fault(driver, lambda: faults.delay(0.9), faults.heal):
            try:
                lease = await client.lock(name, ttl=ttl).try_acquire(0.2)
            except lockkit.BackendUnavailable as error:
                expect_message(error, faults.secret)
            else:
                assert lease is not None
                await lease.release()

        await driver.pass_through(calm, name)

    @case(faults=["delay"])
    async def test_answers_that_come_after_the_ttl(self, driver: FaceDriver, faults: Faults) -> None:
        """
        Neither a grant nor a renewal is believed then: the deadline counts from before the request.

        The holder is notified by its deadline, before another client is granted the lock.
        """
        client, calm = await driver.connect(), await connect_calm(driver, faults)
        held, wanted, ttl = driver.name("held"), driver.name("wanted"), outage_ttl(driver)
        await driver.pass_through(client, wanted)
        reasons: list[str] = []
        lease = await client.lock(held, ttl=ttl, on_lost=lambda _, reason: reasons.append(reason)).acquire(PATIENCE)

        async with during_fault(driver, lambda: faults.delay(ttl + 0.2), faults.heal):
            acquiring = driver.spawn(self._believed(client, wanted, ttl))
            await told(lease, reasons, ttl + NOTICE_SECONDS)
            assert not await acquiring.result()

        for name in (held, wanted):
            async with calm.lock(name, ttl=driver.timing.long, timeout=PATIENCE) as second:
                assert name == wanted or second.token > lease.token

    @staticmethod
    async def _believed(client: aio.Client, name: str, ttl: Seconds) -> bool:
        try:
            lease = await client.lock(name, ttl=ttl).acquire(ttl + 0.7)
        except NOT_GRANTED:
            return False
        return lease.held
