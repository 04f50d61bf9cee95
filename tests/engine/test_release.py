"""Ctrl-C, and a stack that is used up, while a lock is given back."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

import lockkit
import lockkit.aio
from lockkit.engine.lease_record import HELD
from lockkit.engine.release import Releases
from tests.interrupts import CallStrike, elsewhere
from tests.tries import until

FUNCTIONS = [Releases.release, Releases._begin, Releases._end]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("count", [1, 2])
def test_interrupted_release_can_be_called_again(count: int) -> None:
    """At each instant, also by another thread; and a set, which calls again itself, comes to an end."""
    number = 0
    while True:
        with lockkit.connect(f"memory://release{count}-{number}") as client:
            leases = client.locks([f"x{each}" for each in range(count)]).acquire()
            release = leases.release if count > 1 else leases["x0"].release
            strike = CallStrike(number, *(function.__code__ for function in FUNCTIONS))
            strike.during(release)

            assert elsewhere(release), f"instant {number}"
            assert [*client.names()] == []
        if not strike.struck:
            break
        number += 1
    assert number > 1


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")
def test_interrupted_end_of_a_block_frees_the_lock() -> None:
    """Nobody calls it again; where the release has begun, nobody would wait for the ttl either."""
    functions = [*FUNCTIONS, Releases.leave]
    number = begun = 0
    while True:
        with lockkit.connect(f"memory://leave-{number}") as client:
            lock = client.lock("x", ttl=3600)
            lease = lock.__enter__()
            strike = CallStrike(number, *(function.__code__ for function in functions))
            strike.during(partial(lock.__exit__, None, None, None))

            if lease._record.state is not HELD:
                begun += strike.struck
                until(partial(is_free, lock))
        if not strike.struck:
            break
        number += 1
    assert begun > 1


def is_free(lock: lockkit.Lock) -> bool:
    """Look at the backend."""
    return not lock.locked()


# -- RecursionError ----------------------------------------------------------------------------------------------------


def test_body_that_uses_up_the_stack_leaves_no_lock_held() -> None:
    """Each block that was entered again can be left again; one that could not kept the lock for its ttl."""
    with lockkit.connect("memory://recursion") as client:
        lock, reading = client.lock("x", reentrant=True), client.rwlock("y").read()

        def nest(which: lockkit.Lock) -> None:
            with which:
                nest(which)

        for which in (lock, reading):
            with pytest.raises(RecursionError):
                nest(which)

        assert [*client.names()] == []


def test_coroutine_that_uses_up_the_stack_leaves_no_lock_held() -> None:
    """As above, with asyncio."""

    async def run() -> list[str]:
        async with lockkit.aio.connect("memory://recursion") as client:
            lock, reading = client.lock("x", reentrant=True), client.rwlock("y").read()

            async def nest(which: lockkit.aio.Lock) -> None:
                async with which:
                    await nest(which)

            for which in (lock, reading):
                with pytest.raises(RecursionError):
                    await nest(which)
            return [name async for name in client.names()]

    assert asyncio.run(run()) == []
