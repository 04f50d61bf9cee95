"""At most one holder, whoever contends; the witness stands outside of the backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockkit import aio
from lockkit.testing.conformance.base import Cases, FaceDriver, case, needs
from lockkit.testing.history import recorded
from lockkit.testing.timing import CONTENTION_SECONDS, PATIENCE
from lockkit.testing.witness import Witness

ACTORS = 4
ROUNDS = 20

PROCESSES = int(os.environ.get("LOCKKIT_TEST_PROCESSES", "3"))
"""How many processes contend."""


class Exclusion(Cases):
    """Mutual exclusion between actors, clients and processes."""

    backend_part = (
        "`try_acquire`: in one atomic step, the server checks that the lock is free and stores the new owner. A "
        "client must not decide on its own."
    )

    @case()
    async def test_actors_of_one_client_exclude_each_other(self, driver: FaceDriver, tmp_path: Path) -> None:
        """Threads or tasks that share a client, and even the lock object, are never inside together."""
        client = await driver.connect()
        lock = client.lock(driver.name(), ttl=driver.timing.long, timeout=3 * PATIENCE)

        await _contend(driver, tmp_path, [lock] * ACTORS)

    @case()
    async def test_clients_exclude_each_other(self, driver: FaceDriver, tmp_path: Path) -> None:
        """Clients of their own, which meet only at the backend, are never inside together, and each gets its share."""
        name = driver.name()
        clients = [await driver.connect() for _ in range(ACTORS)]

        await _contend(
            driver, tmp_path, [client.lock(name, ttl=driver.timing.long, timeout=3 * PATIENCE) for client in clients]
        )

    @case(needs.processes)
    async def test_processes_exclude_each_other(self, driver: FaceDriver, tmp_path: Path) -> None:
        """Processes, of either face, are never inside together, and their tokens grow in the order of their stays."""
        name = driver.name()
        witness, patience = Witness(tmp_path), CONTENTION_SECONDS + 3 * PATIENCE
        faces = [("blocking", "asyncio", driver.face)[number % 3] for number in range(PROCESSES)]
        workers = {f"process{number}": await driver.process(face) for number, face in enumerate(faces)}

        for who, worker in workers.items():
            worker.send(
                "hammer",
                name=name,
                rounds=ROUNDS * 2,
                seconds=CONTENTION_SECONDS,
                directory=str(tmp_path),
                who=who,
                lock={"ttl": driver.timing.long, "timeout": patience},
            )
        counts = {who: await driver.call(worker.receive, patience) for who, worker in workers.items()}

        report = witness.report()
        report.expect_exclusion(sum(counts.values()))
        assert report.shares() == counts

    @case(faces=["asyncio"])
    async def test_faces_exclude_and_wake_each_other(self, driver: FaceDriver) -> None:
        """A blocking and an asyncio client of one process are two clients like any others."""
        name = driver.name()
        client = await driver.connect()
        blocking = driver.target.connect()
        try:
            lease = await driver.call(blocking.lock(name, ttl=driver.timing.long).acquire, PATIENCE)
            assert await driver.answered(client.lock(name, ttl=driver.timing.long).try_acquire) is None
            waiting = driver.spawn(client.lock(name, ttl=driver.timing.long).acquire())
            await driver.until_waiting(client, name)

            await driver.call(lease.release)
            after = await waiting.result()
            theirs = driver.spawn(driver.call(blocking.lock(name, ttl=driver.timing.long).acquire))
            await driver.eventually(lambda: bool(blocking._engine.acquisitions.waiting), "the blocking client waits")

            await after.release()
            last = await theirs.result()
            assert lease.token < after.token < last.token
        finally:
            await driver.call(blocking.close)


async def _contend(driver: FaceDriver, directory: Path, locks: Sequence[aio.Lock]) -> None:
    """Have an actor for each lock object enter it again and again, and check that they excluded each other."""
    witness = Witness(directory)

    async def enter(process: int, lock: aio.Lock) -> None:
        who = f"actor{process}"
        for number in range(ROUNDS):
            async with recorded(process, lock) as lease:
                witness.enter(who, lease.token)
                # Sometimes long enough for the others to run into it.
                await driver.sleep(0.001 if number % 4 == 0 else 0)
                witness.leave(who, lease.token)

    actors = [driver.spawn(enter(number, lock)) for number, lock in enumerate(locks)]
    for actor in actors:
        await actor.result(3 * PATIENCE)

    witness.report().expect_exclusion(len(locks) * ROUNDS)
