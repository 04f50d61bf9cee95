"""A lease is lost because its own process did not run: stopped, or its event loop blocked. The holder is told so."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import lockkit
import lockkit.aio
from tests.engine.scripted import MovableClock, pass_time, scripted
from tests.simulation.support import Stage, sleep
from tests.tries import until, until_async

TTL = 0.5

HOLDER = f"""
import sys, threading, logging, lockkit
logging.basicConfig(stream=sys.stdout, format="log: %(message)s")
told = threading.Event()
def lost(lease, reason):
    sys.stdout.write(f"reason {{reason}}\\n")
    told.set()
with lockkit.connect("memory://paused") as client:
    lease = client.lock("x", ttl={TTL}, on_lost=lost).acquire()
    print("held", flush=True)
    told.wait(60)
    try:
        lease.check()
    except lockkit.LockLost as error:
        sys.stdout.write(f"error: {{error}}\\n")
"""


def test_stopped_process_is_told_that_it_did_not_run() -> None:
    """By callback, error and log, with the time: an operator would look for a dead server otherwise."""
    with subprocess.Popen([sys.executable, "-P", "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        time.sleep(2 * TTL)
        os.kill(holder.pid, signal.SIGCONT)
        said = holder.stdout.read()

    assert "reason paused\n" in said
    seconds = re.findall(r"(?m)^(?:log|error): lost lock 'x' .*: this process did not run for (\d+\.\d) s", said)
    assert len(seconds) == 2, said  # the log and the error
    assert float(seconds[0]) >= TTL


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
