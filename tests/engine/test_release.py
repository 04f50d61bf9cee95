"""A stack that is used up while a lock is released."""

from __future__ import annotations

import asyncio

import pytest

import lockkit
import lockkit.aio


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
