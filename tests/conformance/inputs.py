"""What is refused or accepted before a backend sees it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import lockkit
from lockkit import aio
from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE

ACCEPTED: list[float | timedelta | None] = [0, 0.0, 0.01, 1, timedelta(0), timedelta(milliseconds=10), 10**9, None]


class Inputs(Cases):
    """Names, ttls and timeouts; which values are refused, ``tests/test_validation.py`` shows."""

    @case()
    async def test_refused_ttls(self, driver: FaceDriver) -> None:
        """No lock is kept for ever, or for less than the backend can do."""
        client = await driver.connect()
        name = driver.name()
        below = driver.capabilities.min_ttl / 2
        for ttl in (0, 1e12, below):
            with pytest.raises(lockkit.ConfigurationError, match="ttl"):
                client.lock(name, ttl=ttl)
        lease = await client.lock(name, ttl=driver.timing.long).acquire(PATIENCE)
        for ttl in (0, 1e12, below):
            with pytest.raises(lockkit.ConfigurationError, match="ttl"):
                await lease.extend(ttl)

        assert lease.held
        await lease.release()

    @case()
    async def test_unknown_kind_is_refused(self, driver: FaceDriver) -> None:
        """At the call, before anything is read."""
        client = await driver.connect()
        for kind in ("locks", "", None, 5):
            with pytest.raises(lockkit.ConfigurationError, match="kind"):
                client.names("", kind)  # type: ignore[arg-type]

    @case()
    async def test_what_cannot_begin_a_name_is_refused(self, driver: FaceDriver) -> None:
        """At the call, before anything is read: no str, NUL, not UTF-8, longer than a name may be."""
        client = await driver.connect()
        for prefix in ("\0", "a\0b", "\ud800", "x" * 256, "é" * 128, None, 5, b"x", ["x"]):
            with pytest.raises(lockkit.ConfigurationError, match="prefix"):
                client.names(prefix)  # type: ignore[arg-type]

    @case()
    async def test_accepted_timeouts_are_accepted_everywhere(self, driver: FaceDriver) -> None:
        """Seconds as int or float from 0 on, timedelta, and None: one table for lock, acquire and try_acquire."""
        client = await driver.connect()

        def lock(**options: Any) -> aio.Lock:
            # Another name for each try: one that was not answered may hold its lock for a moment.
            made: aio.Lock = client.lock(driver.name(), ttl=driver.timing.long, **options)
            return made

        for timeout in ACCEPTED:
            async with await driver.answered(lambda timeout=timeout: lock(timeout=timeout).acquire()):
                pass
            await (await driver.answered(lambda timeout=timeout: lock().acquire(timeout))).release()
            lease = await driver.answered(lambda timeout=timeout: lock().try_acquire(timeout))
            assert lease is not None
            await lease.release()

    @case()
    async def test_timeout_counts_while_standing_in_line(self, driver: FaceDriver) -> None:
        """One deadline for the whole call, also behind other waiters of the client."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        async with other.lock(name, ttl=driver.timing.long):
            lock = client.lock(name, ttl=driver.timing.long)
            first = driver.spawn(lock.acquire())
            await driver.until_waiting(client, name)

            assert await driver.answered(lock.try_acquire, 0.1) is None
            assert await driver.answered(lock.try_acquire, 0) is None

        await (await first.result()).release()
