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


async def share(client: lockkit.aio.Client) -> None:
    """Readers, permits and several locks."""
    async with client.rwlock("a").read() as reader:
        assert_type(reader, lockkit.aio.Lease)
    semaphore = client.semaphore("a", limit=5)
    async with semaphore as permit:
        assert_type(permit.slot, int | None)
    assert_type(await semaphore.available(), int)
    async with client.locks(["a", "b"]) as leases:
        assert_type(leases, lockkit.aio.LeaseSet)
        assert_type(leases["a"], lockkit.aio.Lease)


async def work_once(client: lockkit.aio.Client) -> None:
    """The decorator keeps the signature of a coroutine function."""

    @client.once("charge:{order}", keep=60)
    async def charge(order: int) -> str:
        return str(order)

    assert_type(await charge(1), str)
    await charge("1")  # type: ignore[arg-type]
    async with client.once("charge:1", keep=60) as attempt:
        assert_type(attempt.first, bool)
        await attempt.done({"id": 1})


async def decorate(client: lockkit.aio.Client) -> None:
    """The decorator keeps the signature of a coroutine function."""

    @client.lock("stock:{product_id}")
    async def sell(product_id: int) -> str:
        return str(product_id)

    assert_type(await sell(1), str)
    await sell("tea")  # type: ignore[arg-type]

    @client.lock("report:{day}", on_busy="skip", cancel_on_lost=True, ttl=10)
    async def report(day: str) -> int:
        return len(day)

    assert_type(await report("monday"), int | None)
    await report(1)  # type: ignore[arg-type]
    assert_type(client.lock("a", on_busy="raise"), lockkit.aio.Lock)
