"""Who comes next: order of arrival, and a share for everybody."""

from __future__ import annotations

from pathlib import Path

from lockkit import aio
from lockkit.testing.conformance.base import Cases, FaceDriver, case, needs
from lockkit.testing.face_driver import waiting_count
from lockkit.testing.timing import PATIENCE
from lockkit.testing.witness import Witness
from lockkit.units import Seconds


class Queueing(Cases):
    """Lines inside a client, and between clients."""

    backend_part = (
        "With `Capabilities.fair`, `try_acquire` grants in the order in which requests entered the queue, and "
        "`release` wakes the first of them."
    )

    @case()
    async def test_waiters_of_one_client_come_in_the_order_of_their_arrival(self, driver: FaceDriver) -> None:
        """Threads or tasks of a client wait in a line per lock, on every backend."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        lease = await other.lock(name, ttl=driver.timing.long).acquire(PATIENCE)

        order = await _line_up(driver, name, [client] * 8, [(client, count) for count in range(1, 9)], lease)

        assert order == list(range(8))

    @case(needs.fairness)
    async def test_clients_come_in_the_order_of_their_arrival(self, driver: FaceDriver) -> None:
        """The backend keeps a queue of contenders that know nothing of each other."""
        name = driver.name()
        clients = [await driver.connect() for _ in range(5)]
        lease = await (await driver.connect()).lock(name, ttl=driver.timing.long).acquire(PATIENCE)

        order = await _line_up(driver, name, clients, [(client, 1) for client in clients], lease)

        assert order == list(range(5))

    @case(needs.fairness)
    async def test_holder_that_comes_straight_back_starves_nobody(self, driver: FaceDriver) -> None:
        """A loop of acquire and release lets a waiter of another client in."""
        await _loop_beside_a_waiter(driver, pause=0)

    @case()
    async def test_lock_that_is_free_now_and_then_is_had_by_a_waiter(self, driver: FaceDriver) -> None:
        """A waiter of another client gets it without being first in a queue: it keeps looking."""
        await _loop_beside_a_waiter(driver, pause=0.05)

    @case(needs.fairness)
    async def test_every_contender_gets_its_share(self, driver: FaceDriver, tmp_path: Path) -> None:
        """While all contend, nobody gets less than half of what it would get in turn."""
        name = driver.name()
        witness = Witness(tmp_path)
        rounds, contenders = 15, 4
        own_names = [driver.name() for _ in range(contenders)]
        ready = [driver.signal() for _ in range(contenders)]
        go = driver.signal()
        clients = [await driver.connect() for _ in range(contenders)]
        left = [rounds] * contenders

        def others_wait(number: int) -> bool:
            others = [other for other in range(contenders) if other != number and left[other]]
            return all(waiting_count(clients[other], name) for other in others)

        async def contend(number: int) -> None:
            who, client = f"client{number}", clients[number]
            # What it needs to hold a lock is there, a connection of its own perhaps: nobody starts late.
            async with client.lock(own_names[number], ttl=driver.timing.long, timeout=3 * PATIENCE):
                ready[number].set()
            await go.wait()
            for _ in range(rounds):
                async with client.lock(name, ttl=driver.timing.long, timeout=3 * PATIENCE) as lease:
                    witness.enter(who, lease.token)
                    # Inside until the others are there again: one that comes late, by no fault of the backend, misses
                    # its turn.
                    await driver.eventually(lambda: others_wait(number), "the others wait")
                    left[number] -= 1
                    witness.leave(who, lease.token)

        actors = [driver.spawn(contend(number)) for number in range(contenders)]
        for one in ready:
            await one.wait()
        go.set()
        for actor in actors:
            await actor.result(90)

        report = witness.report()
        report.expect_exclusion(rounds * contenders)
        whos = [entry.who for entry in report.entries]
        # Until the first had all of its rounds.
        first_done = min(max(i for i, who in enumerate(whos) if who == name_) for name_ in set(whos))
        shares = report.shares(first_done + 1)
        assert len(shares) == contenders
        assert min(shares.values()) >= rounds // 2

    @case(needs.visible_waiters)
    async def test_waiters_of_one_client_cost_the_backend_one(self, driver: FaceDriver) -> None:
        """The others wait in the client: 1,000 threads are one contender."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        lease = await other.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        lock = client.lock(name, ttl=driver.timing.long)

        actors = [driver.spawn(_pass_through(lock)) for _ in range(10)]
        await driver.until_waiting(client, name, 10)
        await driver.eventually(lambda: _are_waiting(other, name, 1), "a waiter at the backend")
        await driver.sleep(0.05)  # for a second one, if there is one
        assert [holder.waiters for holder in await other.holders(name)] == [1]

        await lease.release()
        for actor in actors:
            await actor.result()

    @case(needs.visible_waiters)
    async def test_waiters_are_counted(self, driver: FaceDriver) -> None:
        """`holders` tells how many clients wait."""
        name = driver.name()
        client, *others = [await driver.connect() for _ in range(3)]
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        assert [holder.waiters for holder in await client.holders(name)] == [0]

        actors = []
        for other in others:
            actors.append(driver.spawn(_pass_through(other.lock(name, ttl=driver.timing.long))))
            await driver.until_waiting(other, name)
        await driver.eventually(lambda: _are_waiting(client, name, 2), "two waiters at the backend")

        await lease.release()
        for actor in actors:
            await actor.result()


async def _are_waiting(client: aio.Client, name: str, waiters_count: int) -> bool:
    """
    Tell whether so many wait at the backend.

    Later than `FaceDriver.until_waiting`: a first waiter may have to subscribe before it takes a place.
    """
    return [holder.waiters for holder in await client.holders(name)] == [waiters_count]


async def _pass_through(lock: aio.Lock) -> None:
    async with lock:
        pass


async def _loop_beside_a_waiter(driver: FaceDriver, pause: Seconds) -> None:
    """Acquire and release again and again until the waiter of another client had its turn."""
    name = driver.name()
    client, other = await driver.connect(), await driver.connect()
    lock = client.lock(name, ttl=driver.timing.long)
    lease = await lock.acquire(PATIENCE)
    actor = driver.spawn(_pass_through(other.lock(name, ttl=driver.timing.long)))
    await driver.until_waiting(other, name)

    await lease.release()

    deadline = driver.now() + PATIENCE
    while not actor.done:
        async with lock:
            await driver.sleep(0)
        await driver.sleep(pause)
        assert driver.now() < deadline
    await actor.result()


async def _line_up(
    driver: FaceDriver, name: str, clients: list[aio.Client], until: list[tuple[aio.Client, int]], lease: aio.Lease
) -> list[int]:
    """Have waiters arrive one after the other, free the lock, and tell in which order they came in."""
    order: list[int] = []

    async def wait(number: int, client: aio.Client) -> None:
        async with client.lock(name, ttl=driver.timing.long):
            order.append(number)

    actors = []
    for number, (client, arrived) in enumerate(zip(clients, until, strict=True)):
        actors.append(driver.spawn(wait(number, client)))
        await driver.until_waiting(*arrived[:1], name, arrived[1])
    await lease.release()
    for actor in actors:
        await actor.result()
    return order
