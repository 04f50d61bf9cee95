"""``async with lock(cancel_on_lost=True)`` on simulated time: losses and cancellations at every instant."""

from __future__ import annotations

import random

import pytest

from lockkit import LockLost
from lockkit_tools.simulation import Process
from lockkit_tools.simulation.world import Cancelled
from tests.simulation.support import Stage, apart, sleep

TTL = 2.0


async def body(stage: Stage, alice: Process, ended: list[str], clean_up: float = 0.0) -> None:
    """Hold a lock for much longer than it can be held, and note how that ended; cleaning up takes so many seconds."""
    try:
        async with stage.client(alice, ttl=TTL).lock("x", cancel_on_lost=True) as lease:
            try:
                await sleep(alice, 60.0)
            finally:
                ended.append("held" if lease.held else "not held")
                await sleep(alice, clean_up)
    except LockLost:
        ended.append("LockLost")
    except Cancelled:
        ended.append("Cancelled")
    else:
        ended.append("well")


@pytest.mark.parametrize("renew_until", [0.3, 1.0, 5.0])
def test_body_is_cancelled_at_the_deadline(renew_until: float) -> None:
    """The server cannot be reached any more: the body ends when the lease does, with LockLost."""
    stage = Stage()
    alice = stage.process("alice")
    ended: list[str] = []
    task = alice.start(body(stage, alice, ended), "body", awaited=True)
    stage.world.call_at(renew_until, stage.network.cut, alice, stage.node)
    stage.world.run(task=task)

    assert ended == ["not held", "LockLost"]
    assert renew_until < stage.world.now < renew_until + TTL
    stage.end()


def test_cancellation_by_others_is_never_turned_into_a_loss() -> None:
    """Whatever comes first, and in the same instant too: who cancelled the task sees it cancelled."""
    seen = set()
    for seed in apart(range(400)):
        chance = random.Random(seed)
        stage = Stage(seed)
        alice, bob = stage.process("alice"), stage.process("bob")
        ended: list[str] = []
        task = alice.start(body(stage, alice, ended, chance.choice((0.0, 0.3))), "body", awaited=True)
        broken_at = chance.uniform(0.5, 1.5)
        # Often within the few milliseconds that the news of the loss takes.
        cancelled_at = broken_at + chance.choice((chance.uniform(-0.5, 0.5), chance.uniform(0.0, 0.8)))
        other = stage.client(bob)
        stage.world.call_at(broken_at, lambda bob=bob, other=other: bob.start(other.break_lock("x"), "break"))
        stage.world.call_at(cancelled_at, task.cancel)
        stage.world.run(task=task)

        cancelled = stage.world.now >= cancelled_at
        assert ended[-1] == ("Cancelled" if cancelled else "LockLost"), f"seed {seed}: {ended}"
        seen.add(ended[-1])
        stage.end()
    assert seen == {"Cancelled", "LockLost"}
