"""A lease is lost because its own process did not run: stopped, or its event loop blocked. The holder is told so."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

import lockkit
import lockkit.aio
from tests.engine.scripted import MovableClock, pass_time, scripted
from tests.simulation.support import Stage, sleep
from tests.tries import until, until_async

TTL = 0.5


def test_blocked_event_loop_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """The watch and the renewer are tasks of that loop."""
    told: list[str] = []

    async def run() -> None:
        async with lockkit.aio.connect("memory://blocked") as client:
            lease = await client.lock("x", ttl=TTL, on_lost=lambda _, reason: told.append(reason)).acquire()
            await asyncio.sleep(0.05)
            time.sleep(2 * TTL)  # noqa: ASYNC251 - the point
            with pytest.raises(lockkit.LockLost, match=r"did not run for \d+\.\d s.*event loop"):
                lease.check()
            await until_async(lambda: bool(told))

    with caplog.at_level(logging.WARNING, "lockkit"):
        asyncio.run(run())

    assert told == ["paused"]
    assert "did not run for" in caplog.text


@pytest.mark.parametrize(("seconds", "reason"), [(60.0, "paused"), (0.0, "expired")])
def test_pause_and_dead_server_in_the_simulation(seconds: float, reason: str) -> None:
    """The same rule on simulated time: without a pause it is the server that is dead."""
    stage = Stage()
    alice = stage.process("alice")
    client = stage.client(alice)
    told: list[str] = []

    async def story() -> None:
        lease = await client.lock("x", ttl=10.0, on_lost=lambda _, reason: told.append(reason)).acquire()
        if seconds:
            stage.world.call_at(alice.now() + 1.0, alice.pause)
            stage.world.call_at(alice.now() + 1.0 + seconds, alice.resume)
        else:
            stage.node.pause()
        await sleep(alice, 80.0)
        assert lease.lost

    stage.play(alice, story())
    assert told == [reason]


def test_lease_without_renewals_expires() -> None:
    """It would have ended at that time whether the process ran or not."""
    client, _ = scripted(MovableClock())
    told: list[str] = []
    lease = client.lock("x", ttl=10, renew=False, on_lost=lambda _, reason: told.append(reason)).acquire()
    pass_time(client, 20.0)
    until(lambda: lease.lost and bool(told))
    assert told == ["expired"]
    client.close()
