"""The simulated lock service with readers and permits, and its client."""

from __future__ import annotations

import pytest

from lockkit.aio import Client
from lockkit.backend import Busy, Gone, Grant, Renewed, Request
from lockkit_tools.simulation import Conditions, History, Network, Node, Process, SimulatedRuntime, World
from lockkit_tools.simulation.backend import client_of
from lockkit_tools.simulation.claims import ClaimBackend, ClaimServer
from lockkit_tools.simulation.history import Granted
from tests.simulation.support import sleep


class Service:
    """A server, and processes that use it."""

    def __init__(self, *, notices_death: bool = False, conditions: Conditions | None = None) -> None:
        """Start without processes."""
        self.world = World(1)
        self.network = Network(self.world, conditions or Conditions())
        self.history: History = []
        self.server = ClaimServer(Node(self.world, "server"), self.network, self.history, notices_death=notices_death)

    def client(self, name: str) -> tuple[Process, Client]:
        """Start a process with a client."""
        process = self.world.process(name)
        return process, client_of(process, lambda _: self.backend(process), ttl=10.0)

    def backend(self, process: Process) -> ClaimBackend:
        """Connect a process."""
        return ClaimBackend(process, self.server, self.network, 0.5)


def test_backend_answers_as_the_contract_says() -> None:
    """Grants beside one another, busy, downgraded, renewed, gone, holders, broken."""
    service = Service()
    process = service.world.process("alice")
    backend, runtime = service.backend(process), SimulatedRuntime(process)

    async def story() -> None:
        writer = Request("x", "A", 10.0, '{"pid": 1}', queue=True, runtime=runtime)
        grant = await backend.try_acquire(writer)
        assert isinstance(grant, Grant)
        reader = Request("x", "B", 10.0, "", queue=True, runtime=runtime, mode="shared")
        busy = await backend.try_acquire(reader)
        assert isinstance(busy, Busy)
        assert busy.owner == "A"
        assert await backend.downgrade(grant)
        beside = await backend.try_acquire(reader)
        assert isinstance(beside, Grant)
        assert beside.token > grant.token
        assert [holder.mode for holder in await backend.holders("x")] == ["shared", "shared"]
        waiting = Request("x", "C", 10.0, "", queue=True, runtime=runtime)
        assert isinstance(await backend.try_acquire(waiting), Busy)
        await backend.abandon(waiting)
        assert await backend.renew([grant, beside]) == [Renewed(), Renewed()]
        assert await backend.release(grant)
        assert await backend.break_lock("x")
        assert not await backend.break_lock("x")
        assert await backend.renew([beside]) == [Gone("broken")]
        await backend.ping()
        await backend.close()

    task = process.start(story(), "story", awaited=True)
    service.world.run(task=task)
    task.result()
    assert [event.token for event in service.history if isinstance(event, Granted)] == sorted(
        event.token for event in service.history if isinstance(event, Granted)
    )


@pytest.mark.parametrize(("notices_death", "expected"), [(True, 1.0), (False, 10.0)])
def test_lease_of_a_crashed_process(*, notices_death: bool, expected: float) -> None:
    """It stays until its end, unless the service notices who has ended: then the next that asks is served."""
    service = Service(notices_death=notices_death)
    alice, first = service.client("alice")
    bob, second = service.client("bob")
    times = []

    async def hold() -> None:
        lease = await first.semaphore("x", limit=1, renew=False).acquire()
        await sleep(alice, 100.0)
        await lease.release()

    async def wait() -> None:
        await sleep(bob, 1.0)
        lease = await second.semaphore("x", limit=1).acquire()
        times.append(bob.now())
        await lease.release()

    alice.start(hold(), "hold")
    service.world.call_at(0.5, alice.crash)
    task = bob.start(wait(), "wait", awaited=True)
    service.world.run(task=task)
    task.result()
    service.world.end()

    assert times == pytest.approx([expected], abs=0.1)
