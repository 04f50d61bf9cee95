"""The simulated lock service and its client."""

from __future__ import annotations

import pytest

import lockkit
from lockkit.backend import Busy, Gone, Grant, Renewed, Request
from lockkit.errors import BackendUnavailable
from lockkit_tools.simulation import Conditions, SimulatedBackend, SimulatedRuntime
from tests.simulation.support import Stage, sleep


def test_backend_answers_as_the_contract_says() -> None:
    """Grant, busy, renewed, gone, holders, broken."""
    stage = Stage()
    alice = stage.process()
    backend = SimulatedBackend(alice, stage.server, stage.network, 1.0)
    runtime = SimulatedRuntime(alice)

    def request(owner: str) -> Request:
        return Request("x", owner, 10.0, '{"pid": 1}', queue=True, runtime=runtime)

    async def story() -> None:
        grant = await backend.try_acquire(request("A"))
        assert isinstance(grant, Grant)
        waiting = request("B")
        busy = await backend.try_acquire(waiting)
        assert isinstance(busy, Busy)
        assert busy.owner == "A"
        assert await backend.renew([grant]) == [Renewed()]
        (holder,) = await backend.holders("x")
        assert (holder.owner, holder.token, holder.metadata, holder.waiters) == ("A", grant.token, {"pid": 1}, 1)
        await backend.abandon(waiting)
        assert await backend.break_lock("x")
        assert not await backend.break_lock("x")
        assert await backend.renew([grant]) == [Gone()]
        assert await backend.release(grant) is False
        await backend.ping()
        await backend.close()

    stage.play(alice, story())


def test_no_answer_is_backend_unavailable() -> None:
    """After the time that a call may take."""
    stage = Stage(conditions=Conditions(requests_lost=1.0))
    alice = stage.process()
    backend = SimulatedBackend(alice, stage.server, stage.network, 0.5)

    async def story() -> None:
        with pytest.raises(BackendUnavailable, match=r"no answer from server within 0\.5 s"):
            await backend.ping()
        assert alice.now() == pytest.approx(0.5)

    stage.play(alice, story())


def test_client_is_the_asyncio_face_on_virtual_time() -> None:
    """The engine is the real one: renewed for an hour, waited for by another, given back."""
    stage = Stage()
    alice, bob = stage.process("alice", rate=1.001, offset=50.0), stage.process("bob")
    first, second = stage.client(alice), stage.client(bob, ttl=5.0)
    times = []

    async def hold() -> None:
        lease = await first.lock("seat", ttl=10.0).acquire()
        await sleep(alice, 3600.0)
        lease.check()
        await lease.release()
        await first.close()

    async def wait() -> None:
        await sleep(bob, 1.0)
        with pytest.raises(lockkit.LockTimeout):
            await second.lock("seat").acquire(timeout=60.0)
        times.append(bob.now())
        lease = await second.lock("seat").acquire()
        times.append(bob.now())
        assert lease.ttl == 5.0
        await lease.release()
        await second.close()

    alice.start(hold(), "hold")
    stage.play(bob, wait())
    stage.end()

    assert times == pytest.approx([61.0, 3596.4], abs=0.1)
