"""Timeouts, waking up, and giving up: cancelled, interrupted, timed out."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import threading
from contextlib import suppress
from types import FrameType

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import Busy, Grant, LockBackend, Request
from lockkit.testing.conformance.base import Cases, FaceDriver, case, needs
from lockkit.testing.face_driver import waiting_count
from lockkit.testing.interrupts import must_wait
from lockkit.testing.timing import PATIENCE
from lockkit.units import Instant, Seconds


class Timeouts(Cases):
    """How long a caller waits."""

    backend_part = (
        "`wait` returns at `until`, and as soon as `release` or `break_lock` frees the lock. A lock that is freed "
        "between `try_acquire` and `wait` must wake the waiter too: subscribe and return at once, or enter a queue in "
        "`try_acquire`. `abandon` cleans up after a wait that timed out."
    )

    @case()
    async def test_timeout_of_zero_tries_once(self, driver: FaceDriver) -> None:
        """It takes a free lock and does not wait for a busy one, not even one of the same client."""
        client, other = await driver.connect(), await driver.connect()
        # Another name for each try: one that was not answered may hold its lock for a moment.
        lease = await driver.answered(
            lambda: client.lock(driver.name(), ttl=driver.timing.long, timeout=0).acquire(),
        )
        name = lease.name

        for contender in (client, other):
            lock = contender.lock(name, ttl=driver.timing.long)
            assert await driver.answered(lock.try_acquire) is None
            assert await driver.answered(lock.try_acquire, 0.05) is None
            with pytest.raises(lockkit.LockTimeout) as caught:
                await driver.answered(lock.acquire, 0)
            assert (caught.value.name, caught.value.backend) == (name, contender.url)

        await lease.release()

    @case()
    async def test_timeout_is_over_neither_early_nor_only_with_the_ttl(self, driver: FaceDriver) -> None:
        """A timed wait lasts its timeout; the holder's ttl and the number of attempts have no say."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        async with client.lock(name, ttl=driver.timing.long):
            for contender in (client, other):
                began = driver.now()
                with pytest.raises(lockkit.LockTimeout):
                    await driver.answered(contender.lock(name, ttl=driver.timing.long).acquire, 0.3)
                assert 0.3 <= driver.now() - began < PATIENCE

    @case()
    async def test_waiter_that_timed_out_leaves_nothing_behind(self, driver: FaceDriver) -> None:
        """No place in the queue: the next one has the lock at once."""
        name = driver.name()
        client, other, third = [await driver.connect() for _ in range(3)]
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        for _ in range(3):
            assert await driver.answered(other.lock(name, ttl=driver.timing.long).try_acquire, 0.05) is None

        await _until_nobody_waits(driver, client, lease)
        await lease.release()
        await driver.pass_through(third, name)

    @case()
    async def test_waiter_is_woken_by_a_release(self, driver: FaceDriver) -> None:
        """Long before the ttl is over."""
        client, other = await driver.connect(), await driver.connect()
        lease, waiting = await driver.contended(client, other)
        assert not waiting.done

        await lease.release()

        after = await waiting.result()
        assert after.held
        await after.release()

    @case()
    async def test_waiter_is_woken_by_a_break(self, driver: FaceDriver) -> None:
        """Freeing by force wakes as a release does."""
        client, other = await driver.connect(), await driver.connect()
        lease, waiting = await driver.contended(client, other)

        assert await client.break_lock(lease.name)

        await (await waiting.result()).release()
        assert not await lease.confirm()

    @case(needs.wake_up)
    async def test_release_between_attempt_and_wait_is_not_missed(self, driver: FaceDriver) -> None:
        """A lock that was busy at an attempt, the first or a later one, and is freed before the client waits for it."""
        client, other = await driver.connect(), await driver.connect()
        await other.ping()
        assert other._engine.client.backend is not None
        backend = type(other._engine.client.backend)
        wait = backend.wait

        async def release_after(attempt: int) -> None:
            lease = await client.lock(driver.name(), ttl=driver.timing.long).acquire(PATIENCE)
            waits = 0

            async def release_first(self: LockBackend, request: Request, busy: Busy, until: Instant) -> None:
                nonlocal waits
                waits += request.name == lease.name
                if waits == attempt:
                    await lease.release()
                elif waits < attempt:
                    until = min(until, driver.now() + 0.05)
                await wait(self, request, busy, until)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend, "wait", release_first)
                # Without a timeout, whose end would bring another attempt.
                after = await driver.spawn(other.lock(lease.name, ttl=driver.timing.long).acquire()).result()
            assert waits >= attempt
            await after.release()

        await release_after(1)
        await release_after(2)

    @case()
    async def test_waiter_looks_again_when_the_ttl_is_over(self, driver: FaceDriver) -> None:
        """A holder that vanished wakes nobody."""
        _, other, lease = await driver.held(ttl=driver.timing.short, renew=False)
        waiting = driver.spawn(other.lock(lease.name, ttl=driver.timing.long).acquire())

        after = await waiting.result(driver.timing.beyond(lease.ttl))

        assert lease.lost
        await after.release()

    @case()
    async def test_wait_beyond_the_ttl_is_told_once(self, driver: FaceDriver, caplog: pytest.LogCaptureFixture) -> None:
        """One WARNING, with the holder's pid."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()

        def told() -> list[str]:
            messages = [record.getMessage() for record in tuple(caplog.records)]
            return [message for message in messages if name in message and "longer than its ttl" in message]

        async def wait() -> None:
            lease = await other.lock(name, ttl=driver.timing.short).acquire(2 * PATIENCE)
            with suppress(lockkit.LockLost):  # its ttl is short, but not the wait for it
                await lease.release()

        with caplog.at_level(logging.WARNING, "lockkit"):
            async with client.lock(name, ttl=driver.timing.long) as lease:
                waiting = driver.spawn(wait())
                await driver.eventually(lambda: bool(told()), "the message")
            await waiting.result()

        (message,) = told()
        assert f"pid={lease.metadata['pid']}" in message

    @case(needs.wake_up)
    async def test_idle_waiter_asks_nothing_of_the_backend(self, driver: FaceDriver) -> None:
        """It is woken; it does not poll."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        async with client.lock(name, ttl=driver.timing.long):
            assert other._engine.client.backend is not None
            backend = type(other._engine.client.backend)
            try_acquire = backend.try_acquire
            asked = 0

            async def counted(self: LockBackend, request: Request) -> Grant | Busy:
                nonlocal asked
                outcome = await try_acquire(self, request)
                asked += 1  # one without an answer is sent again
                return outcome

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend, "try_acquire", counted)

                async def wait() -> None:
                    nonlocal asked
                    asked = 0
                    await other.lock(name, ttl=driver.timing.long).acquire(0.5)

                with pytest.raises(lockkit.LockTimeout):
                    await driver.answered(wait)

        # The attempt, one more after subscribing, and one when the time was over.
        assert 1 <= asked <= 4


class GivingUp(Cases):
    """Waiters that end before they have the lock leave nothing behind, and a grant that came too late is undone."""

    backend_part = (
        "`abandon` removes what a request left at the server: its place in the queue and, with `request.uncertain`, a "
        "grant whose answer never came. A method can be cancelled or interrupted at any `await`, also after the "
        "server has granted."
    )

    @case(faces=["asyncio"])
    async def test_cancelled_waiters_leave_nothing_behind(self, driver: FaceDriver) -> None:
        """Many tasks of several clients, cancelled at random moments."""
        name = driver.name()
        chance = random.Random(name)
        holder, *clients = [await driver.connect() for _ in range(5)]
        lease = await holder.lock(name, ttl=driver.timing.long).acquire(PATIENCE)

        async def wait(client: aio.Client) -> None:
            async with client.lock(name, ttl=driver.timing.long):
                raise AssertionError("the lock was never free")

        for _ in range(4):
            tasks = [asyncio.create_task(wait(client)) for client in clients for _ in range(15)]
            for task in tasks:
                asyncio.get_running_loop().call_later(chance.uniform(0, 0.05), task.cancel)
            await _end(*tasks)
            assert all(task.cancelled() for task in tasks)

        assert [waiting_count(client, name) for client in clients] == [0] * len(clients)
        await _until_nobody_waits(driver, holder, lease)
        await lease.release()
        await driver.pass_through(clients[0], name)

    @case(faces=["asyncio"])
    async def test_cancelled_acquisitions_of_a_free_lock_leave_nothing_behind(self, driver: FaceDriver) -> None:
        """Cancelled while the grant is on its way: the lock is free again, and not only at its ttl."""
        name = driver.name()
        chance = random.Random(name)
        client, other = await driver.connect(), await driver.connect()
        lock = client.lock(name, ttl=driver.timing.long)

        async def acquire_and_release() -> None:
            async with lock:
                await asyncio.sleep(0)

        began = driver.now()
        async with lock:
            pass
        pair = driver.now() - began
        for _ in range(100):
            task = asyncio.create_task(acquire_and_release())
            await asyncio.sleep(chance.uniform(0, pair * 1.5))
            task.cancel()
            await _end(task)

        await driver.pass_through(other, name)
        await driver.eventually(lambda: _is_free(other, name), "the lock is free")

    @case(faces=["asyncio"])
    async def test_cancelled_waiter_is_passed_by(self, driver: FaceDriver) -> None:
        """Who stood behind it gets the lock."""
        name = driver.name()
        client, first, second = [await driver.connect() for _ in range(3)]
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        actors = []
        for contender in (first, second):
            actors.append(driver.spawn(contender.lock(name, ttl=60).acquire()))
            await driver.until_waiting(contender, name)

        actors[0].future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await actors[0].result()
        await lease.release()

        await (await actors[1].result()).release()

    @case(faces=["asyncio"])
    async def test_cancellation_and_grant_in_one_instant(self, driver: FaceDriver) -> None:
        """A waiter that is granted the lock while being cancelled hands it on: nobody waits for the ttl."""
        name = driver.name()
        client, first, second = [await driver.connect() for _ in range(3)]
        for number in range(20):
            lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
            cancelled = asyncio.create_task(_hold(first, name, driver.timing.long))
            await driver.until_waiting(first, name)
            behind = asyncio.create_task(_hold(second, name, driver.timing.long))
            await driver.until_waiting(second, name)

            releasing = asyncio.create_task(lease.release())
            await asyncio.sleep(0.0005 * (number % 5))
            cancelled.cancel()

            await _end(behind, releasing, cancelled)
            await behind
            await releasing

    @case(faces=["blocking"])
    async def test_interrupted_waiters_leave_nothing_behind(self, driver: FaceDriver) -> None:
        """KeyboardInterrupt in the main thread, at many moments of a wait."""
        name = driver.name()
        client, other, third = [await driver.connect() for _ in range(3)]
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)

        # The first wait may import modules: an interrupt there leaves their files to the garbage collector.
        assert await driver.answered(other.lock(name, ttl=driver.timing.long).try_acquire, 0.05) is None
        for number in range(30):
            assert await _interrupted(other.lock(name, ttl=driver.timing.long), after=0.0005 * number)

        assert waiting_count(other, name) == 0

        await _until_nobody_waits(driver, client, lease)
        await lease.release()
        for contender in (third, other):
            await driver.pass_through(contender, name)


async def _until_nobody_waits(driver: FaceDriver, client: aio.Client, lease: aio.Lease) -> None:
    """Return once the backend knows of no waiter: one that learns it from the end of a connection learns it later."""

    async def nobody_waits() -> bool:
        (seen,) = await client.holders(lease.name)
        assert seen.owner == lease.owner
        return seen.waiters in {0, None}

    await driver.eventually(nobody_waits, "nobody waits at the backend")


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Wait until all have ended, however."""
    _, pending = await asyncio.wait(tasks, timeout=PATIENCE)
    assert not pending, f"not ended within {PATIENCE:g} s: {pending}"


async def _is_free(client: aio.Client, name: str) -> bool:
    return await client.holders(name) == []


async def _hold(client: aio.Client, name: str, ttl: Seconds) -> None:
    async with client.lock(name, ttl=ttl):
        await asyncio.sleep(0)


async def _interrupted(lock: aio.Lock, after: Seconds) -> bool:
    """
    Acquire, and raise KeyboardInterrupt in the main thread `after` seconds later; tell whether that ended it.

    As Ctrl-C does it, but by a signal that nobody else uses, and once: outside of the ``try`` it would end pytest.
    """
    assert threading.current_thread() is threading.main_thread(), "only the main thread is interrupted"
    over = threading.Event()

    def interrupt(_: int, frame: FrameType | None) -> None:
        if not (over.is_set() or must_wait(frame)):
            over.set()
            raise KeyboardInterrupt

    def shoot() -> None:
        pause = after
        # Again and again: a signal that comes just before the interpreter begins to wait does not end that wait.
        while not over.wait(pause):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            pause = 0.05

    before = signal.signal(signal.SIGUSR2, interrupt)
    shooter = threading.Thread(target=shoot)
    try:
        shooter.start()
        await lock.acquire(PATIENCE)
    except KeyboardInterrupt:
        return True
    finally:
        over.set()
        shooter.join()
        signal.signal(signal.SIGUSR2, before)
    return False
