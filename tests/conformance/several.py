"""Several locks at once: all of them or none, without deadlock."""

from __future__ import annotations

from functools import partial

import pytest

import lockkit
from lockkit.testing.conformance.base import NOT_GRANTED, Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE
from lockkit.units import Seconds

ROUNDS = 10


class Several(Cases):
    """``client.locks([...])``."""

    @case()
    async def test_set_holds_all_locks_and_releases_all(self, driver: FaceDriver) -> None:
        """Ordinary leases, each with its own token; in the order of the names' bytes, each name once."""
        client, other = await driver.connect(), await driver.connect()
        a, b = driver.name("a"), driver.name("b")

        async with client.locks([b, a, b], ttl=driver.timing.long, timeout=PATIENCE) as leases:
            assert [lease.name for lease in leases] == [a, b]
            assert leases.held
            assert await leases.confirm()
            for name in (a, b):
                assert [holder.owner for holder in await other.holders(name)] == [leases[name].owner]
                assert await driver.answered(other.lock(name).try_acquire) is None
            tokens = dict(leases.tokens)

        assert await other.holders(a) + await other.holders(b) == []
        async with other.locks([a, b], ttl=driver.timing.long, timeout=PATIENCE) as after:
            assert all(after.tokens[name] > tokens[name] for name in (a, b))

    @case()
    async def test_set_that_times_out_holds_nothing(self, driver: FaceDriver) -> None:
        """The error names the busy lock; what was acquired before it is free again."""
        client, other = await driver.connect(), await driver.connect()
        a, b, c = driver.name("a"), driver.name("b"), driver.name("c")
        locks = client.locks([a, b, c], ttl=driver.timing.long)

        async def refused_at_b(timeout: Seconds) -> bool:
            with pytest.raises(NOT_GRANTED) as caught:
                await locks.acquire(timeout)
            # A server that stalls does not answer, and what is to be undone goes on in the background.
            return isinstance(caught.value, lockkit.LockTimeout) and caught.value.name == b and b in str(caught.value)

        async def only_b_is_held() -> bool:
            return await other.holders(a) + await other.holders(c) == []

        async with other.lock(b, ttl=driver.timing.long, timeout=PATIENCE):
            for timeout in (0.1, 0):
                await driver.eventually(partial(refused_at_b, timeout), "the error names the busy lock")
                await driver.eventually(only_b_is_held, "the others are free")
            assert await driver.answered(locks.try_acquire) is None

        leases = await locks.acquire(PATIENCE)
        await leases.release()

    @case()
    async def test_sets_in_opposite_orders_do_not_deadlock(self, driver: FaceDriver) -> None:
        """Two clients want the same locks, each lists them its own way; both are served all the time."""
        names = [driver.name("a"), driver.name("b"), driver.name("c")]

        async def use(names: list[str]) -> int:
            client = await driver.connect()
            locks = client.locks(names, ttl=driver.timing.long, timeout=60)
            for _ in range(ROUNDS):
                async with locks as leases:
                    leases.check()
                    await driver.sleep(0)
            return ROUNDS

        calls = [driver.spawn(use(order)) for order in (names, names[::-1])]

        assert [await call.result(60) for call in calls] == [ROUNDS, ROUNDS]

    @case()
    async def test_loss_of_one_lock_is_loss_of_the_set(self, driver: FaceDriver) -> None:
        """Leaving the block raises it, and frees the others."""
        client, other = await driver.connect(), await driver.connect()
        a, b = driver.name("a"), driver.name("b")
        signal = driver.signal()
        lost: list[str] = []

        def on_lost(lease: lockkit.Lease, _: str) -> None:
            lost.append(lease.name)
            signal.set()

        locks = client.locks([a, b], ttl=driver.timing.long, timeout=PATIENCE, on_lost=on_lost)
        leases = await locks.acquire()
        assert await other.break_lock(a)
        assert not await leases.confirm()

        await signal.wait()
        assert lost == [a]
        assert leases.lost
        assert not leases.held
        assert leases.remaining() == 0.0
        with pytest.raises(lockkit.LockLost):
            leases.check()
        with pytest.raises(lockkit.LockLost):
            await leases.release()
        assert await other.holders(a) + await other.holders(b) == []
