"""Which locks are held: `Client.names`."""

from __future__ import annotations

import secrets
from contextlib import suppress

import pytest

import lockkit
from lockkit import aio
from lockkit.engine.lookup import SPACE_OF, Kind
from lockkit.testing.conformance.base import Cases, FaceDriver, case, needs
from lockkit.testing.conformance.names import unusual
from lockkit.testing.timing import PATIENCE

MANY = 60
"""Locks that are held at once. More than a page would need thousands, which not every backend holds in short time."""


class Listing(Cases):
    """Names of locks that are held, each once, and of no others."""

    backend_part = (
        "`names` returns each held lock exactly once, under the name that clients use, and no free one; what is in a "
        "space apart (`in_space`) for a prefix in that space, and only for that."
    )

    @case(needs.listing)
    async def test_names_are_those_of_held_locks(self, driver: FaceDriver) -> None:
        """Of any client; not of a lock that was released, broken, or never held."""
        client, other = await driver.connect(), await driver.connect()
        mark = driver.name()
        leases = {}
        for number in range(4):
            holder = (client, other)[number % 2]
            name = f"{mark}:{number}"
            leases[name] = await holder.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        assert await _names(client, f"{mark}:") == sorted(leases)

        await leases[f"{mark}:0"].release()
        await leases[f"{mark}:1"].release()
        assert await client.break_lock(f"{mark}:2")

        assert await _names(client, f"{mark}:") == [f"{mark}:3"]
        await leases[f"{mark}:3"].release()
        with suppress(lockkit.LockLost):
            await leases[f"{mark}:2"].release()
        assert await _names(client, f"{mark}:") == []

    @case(needs.listing)
    async def test_expired_lock_is_not_listed(self, driver: FaceDriver) -> None:
        """A lease that ran out frees the lock; what is left of it at the backend is no held lock."""
        client = await driver.connect()
        name = driver.name()
        lease = await client.lock(name, ttl=driver.timing.short, renew=False).acquire(PATIENCE)
        assert await lease.wait_lost(driver.timing.beyond(lease.ttl))

        async def is_gone() -> bool:
            return await _names(client, name) == []

        # The deadline at the client comes a little before the end at the backend.
        await driver.eventually(is_gone, "the lease ends at the backend", driver.timing.beyond(lease.ttl))

    @case(needs.listing)
    async def test_waiting_for_a_lock_lists_it_once(self, driver: FaceDriver) -> None:
        """Also after it was handed over."""
        client, other = await driver.connect(), await driver.connect()
        lease, waiting = await driver.contended(client, other)
        name = lease.name
        assert await _names(client, name) == [name]

        await lease.release()

        after = await waiting.result()
        assert await _names(client, name) == [name]
        await after.release()

    @case(needs.listing)
    async def test_unusual_names_are_listed_as_they_are(self, driver: FaceDriver) -> None:
        """Also those that a store escapes, cuts off, or keeps under their hash."""
        client = await driver.connect()
        names = unusual(f"n{secrets.token_hex(4)}")
        leases = [await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE) for name in names]

        listed = [name async for name in client.names()]

        assert len(listed) == len(set(listed)), "a name was listed twice"
        assert set(names) <= set(listed)
        for lease in leases:
            await lease.release()

    @case(needs.listing)
    async def test_prefix_has_no_wildcards(self, driver: FaceDriver) -> None:
        """Every character of a prefix stands for itself, in upper or lower case, in the form in which it came."""
        client = await driver.connect()
        mark = f"p{secrets.token_hex(4)}"
        ends = ["*", "?", "[ab]", "]", "%", "_", "\\", "\\\\", "a", "b", "A", "/", "/x", "{", "}", "é", "e\u0301",
                "\U0001f512", "'", "a" * 240]  # fmt: skip
        names = sorted(mark + end for end in ends)
        leases = [await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE) for name in names]

        for prefix in [mark, *names]:
            expected = [name for name in names if name.startswith(prefix)]
            assert await _names(client, prefix) == expected, prefix
        for prefix in (mark.upper(), f"{mark}?a", f"%{mark}", f"*{mark}", f"{mark}a" + "a" * 245):
            assert await _names(client, prefix) == [], prefix
        for lease in leases:
            await lease.release()

    @case(needs.listing)
    async def test_locks_that_stay_held_are_listed_while_others_come_and_go(self, driver: FaceDriver) -> None:
        """What is held from the first page to the last is listed once, however much changes meanwhile."""
        client, other = await driver.connect(), await driver.connect()
        mark = driver.name()
        held = [f"{mark}:held:{number:03}" for number in range(MANY)]
        leases = [await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE) for name in held]
        listed = []

        async for name in client.names(mark):
            listed.append(name)
            if len(listed) <= 3:
                async with other.lock(f"{mark}:passing:{len(listed)}", ttl=driver.timing.long, timeout=PATIENCE):
                    await leases.pop().release()

        assert len(listed) == len(set(listed)), "a name was listed twice"
        assert {lease.name for lease in leases} <= set(listed)
        for lease in leases:
            await lease.release()

    @case(needs.listing, needs.permits)
    async def test_semaphores_are_listed_apart_from_locks(self, driver: FaceDriver) -> None:
        """Each once, however many permits are held; the lock and the key of once of the same name are others."""
        client, other = await driver.connect(), await driver.connect()
        mark = driver.name()
        names = [f"{mark}:{end}" for end in ("a", "a/b", "*", "é", "a#1")]
        permits = [client.semaphore(name, limit=3, ttl=driver.timing.long) for name in names]
        leases = [await semaphore.acquire(PATIENCE) for semaphore in permits for _ in range(2)]
        async with other.lock(f"{mark}:lock", ttl=driver.timing.long, timeout=PATIENCE):
            assert await _names(other, mark, "semaphore") == sorted(names)
            assert await _names(other, f"{mark}:a", "semaphore") == sorted(names[:2] + names[4:])
            assert await _names(other, f"{mark}:lock", "semaphore") == []
            assert await _names(other, mark) == [f"{mark}:lock"]
            assert await _names(other, mark, "once") == []

        for lease in leases:
            await lease.release()

        assert await _names(other, mark, "semaphore") == []

    @case(needs.listing, needs.notes)
    async def test_keys_whose_run_is_under_way_are_listed(self, driver: FaceDriver) -> None:
        """Not those that are done."""
        client, other = await driver.connect(), await driver.connect()
        mark = driver.name()
        async with client.once(f"{mark}:1", keep=600.0, ttl=driver.timing.long) as attempt:
            assert await _names(other, mark, "once") == [f"{mark}:1"]
            assert await _names(other, mark) == []
            await attempt.done()
        assert await _names(other, mark, "once") == []

    @case()
    async def test_listing_that_is_not_promised_is_refused(self, driver: FaceDriver) -> None:
        """`Unsupported` says what to do instead; never a list that leaves out what is held."""
        client = await driver.connect()
        if driver.capabilities.listing:
            assert await _names(client, driver.name()) == []
        else:
            for kind in SPACE_OF:
                with pytest.raises(lockkit.Unsupported, match="holders"):
                    await _names(client, "", kind)


async def _names(client: aio.Client, prefix: str, kind: Kind = "lock") -> list[str]:
    return sorted([name async for name in client.names(prefix, kind)])
