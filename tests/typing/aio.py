"""The asyncio face as a user's program has it. Only type-checked, never run."""

from __future__ import annotations

import asyncio
from typing import assert_type

import lockkit
import lockkit.aio


async def on_lost(lease: lockkit.aio.Lease, reason: str) -> None:
    """A callback may be a coroutine function."""
    del lease, reason


async def connect() -> None:
    """A client can be awaited, or entered."""
    client = await lockkit.aio.connect("memory://")
    assert_type(client, lockkit.aio.Client)
    await client.close()
    async with lockkit.aio.connect("memory://", ttl=5) as entered:
        assert_type(entered, lockkit.aio.Client)


async def lease(client: lockkit.aio.Client) -> None:
    """What does I/O is awaited; what is local is not."""
    async with client.lock("a", timeout=5, cancel_on_lost=True, on_lost=on_lost) as held:
        assert_type(held, lockkit.aio.Lease)
        assert_type(held.token, int)
        assert_type(held.held, bool)
        assert_type(held.remaining(), float)
        held.check()
        assert_type(await held.confirm(), bool)
        assert_type(await held.wait_lost(1), bool)
        await held.extend(5)
        held.release()  # type: ignore[unused-coroutine]
    with client.lock("a"):  # type: ignore[attr-defined]
        pass


async def wait(client: lockkit.aio.Client) -> None:
    """The same outcomes as in the blocking face."""
    lock = client.lock("a")
    assert_type(await lock.acquire(), lockkit.aio.Lease)
    assert_type(await lock.try_acquire(), lockkit.aio.Lease | None)
    assert_type(await lock.locked(), bool)
    assert_type(await client.holders("a"), list[lockkit.Holder])
    assert_type([name async for name in client.names("a")], list[str])
    assert_type(await client.break_lock("a"), bool)


async def elect(client: lockkit.aio.Client, stop: asyncio.Event) -> str | None:
    """A campaign can be awaited, or entered."""
    election = client.election("a", ttl=10, grace=2, value={"port": 80})
    assert_type(await election.campaign(), lockkit.aio.Term)
    assert_type(await election.leader(), lockkit.Leader | None)
    async for leader in election.observe():
        assert_type(leader, lockkit.Leader | None)

    async def work(term: lockkit.aio.Term) -> str:
        assert_type(await term.must_stop(1), bool)
        await term.resign()
        return "done"

    assert_type(await election.run(work, stop), str | None)
    async with election.campaign(timeout=5, cancel_on_stop=True) as term:
        return str(term.token)


async def decorate(client: lockkit.aio.Client) -> None:
    """The decorator keeps the signature of a coroutine function."""

    @client.lock("stock:{product_id}")
    async def sell(product_id: int) -> str:
        return str(product_id)

    assert_type(await sell(1), str)
    await sell("tea")  # type: ignore[arg-type]
