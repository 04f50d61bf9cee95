"""Who holds it: metadata, holders, locked, break_lock, ping; and the arguments of a lock."""

from __future__ import annotations

import math
import os
import platform
import time
from contextlib import suppress
from datetime import timedelta

import pytest

import lockkit
from lockkit.backend import Capabilities
from lockkit.testing.conformance.base import Cases, FaceDriver, case, needs
from lockkit.testing.timing import PATIENCE

WAITED_SECONDS = 1.2
"""For how long a request waits behind a holder, so that its time is no longer that of its grant."""


class Inspection(Cases):
    """Asking the backend."""

    backend_part = (
        "`holders` returns owner, token, seconds left and metadata as `try_acquire` stored them; `break_lock` frees "
        "the lock for any holder; `update` replaces the metadata if the owner is unchanged; `url` contains no "
        "password."
    )

    @case()
    async def test_holder_is_described(self, driver: FaceDriver) -> None:
        """Owner, token, seconds left, and the metadata: host, pid, start, and what the application added."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        given = {"text": "order 7, é\U0001f512", "shelf": [1, 2.5, None, True], "deep": {"a": {"b": "c"}}}
        async with client.lock(name, ttl=driver.timing.long, metadata=given) as lease:
            (holder,) = await other.holders(name)

            assert (holder.owner, holder.token) == (lease.owner, lease.token)
            assert holder.remaining is None or 0 < holder.remaining <= lease.ttl + 1
            metadata = dict(holder.metadata)
            assert metadata == dict(lease.metadata)
            assert (metadata["host"], metadata["pid"]) == (platform.node(), os.getpid())
            assert abs(metadata["started"] - time.time()) < 24 * 3600
            assert {key: metadata[key] for key in given} == given

    @case()
    async def test_holder_says_since_when(self, driver: FaceDriver) -> None:
        """The grant's time, not that of the request: renewal and re-entry leave it, the next grant has a later one."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        lock = client.lock(name, ttl=driver.timing.long, reentrant=True)
        lease = await lock.acquire(PATIENCE)
        (first,) = await other.holders(name)
        waiting = driver.spawn(other.lock(name, ttl=driver.timing.long).acquire())
        await driver.until_waiting(other, name)

        await lease.extend()
        async with lock:
            (renewed,) = await other.holders(name)
        await driver.sleep(WAITED_SECONDS)
        await lease.release()
        after = await waiting.result()

        assert renewed.since == first.since
        if first.since is not None:
            least = first.since + WAITED_SECONDS * 0.9

            async def says_so() -> bool:
                (second,) = await client.holders(name)
                return second.since is not None and second.since >= least

            await driver.eventually(says_so, "the holder is shown as one since its grant", PATIENCE)
        await after.release()

    @case()
    async def test_text_as_metadata(self, driver: FaceDriver) -> None:
        """A plain text stands under "text"."""
        client = await driver.connect()
        name = driver.name()
        async with client.lock(name, ttl=driver.timing.long, metadata="nightly 'report' \\ \n %s {}"):
            (holder,) = await client.holders(name)
            assert holder.metadata.get("text") == "nightly 'report' \\ \n %s {}"

    @case()
    async def test_long_metadata_is_kept_whole(self, driver: FaceDriver) -> None:
        """Up to its limit; above it, and where JSON cannot hold it, it is refused."""
        client = await driver.connect()
        name = driver.name()
        text = "x" * 3500
        async with client.lock(name, ttl=driver.timing.long, metadata=text):
            (holder,) = await client.holders(name)
            assert holder.metadata.get("text") == text

        for wrong in ("x" * 5000, 5, ["a"], {"a": object()}, {1: "a"}, {"pid": 1}, {"a": math.nan}, "\ud800"):
            with pytest.raises(lockkit.ConfigurationError, match="metadata"):
                client.lock(name, metadata=wrong)  # type: ignore[arg-type]

    @case(needs.metadata_update)
    async def test_update_replaces_the_metadata_of_a_held_lease(self, driver: FaceDriver) -> None:
        """Another client sees it at once; host and pid stay, the old keys go, and a renewal keeps the new ones."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        async with client.lock(name, ttl=driver.timing.long, metadata={"step": 1, "old": True}) as lease:
            for given in ({"step": 2, "text": "caf\u00e9 'x' %s"}, {"step": 2, "text": "caf\u00e9 'x' %s"}, None):
                await lease.update(given)
                await lease.extend()
                (holder,) = await other.holders(name)
                assert {**holder.metadata} == {**lease.metadata}
                assert {key: holder.metadata[key] for key in given or {}} == (given or {})
                assert "old" not in holder.metadata
                assert (holder.owner, holder.token, holder.metadata["pid"]) == (lease.owner, lease.token, os.getpid())
            with pytest.raises(lockkit.ConfigurationError, match="pid"):
                await lease.update({"pid": 1})
            assert await lease.confirm()

    @case(needs.metadata_update)
    async def test_update_of_a_lost_lease_changes_nothing(self, driver: FaceDriver) -> None:
        """The next holder's metadata stay, and the former holder notices its loss."""
        _, other, lease = await driver.held(renew=False)
        await other.break_lock(lease.name)
        async with other.lock(lease.name, ttl=driver.timing.long, metadata="mine"):
            with pytest.raises(lockkit.LockLost):
                await lease.update("yours")
            assert lease.lost
            (holder,) = await other.holders(lease.name)
            assert holder.metadata["text"] == "mine"
        with pytest.raises(lockkit.LockLost):
            await lease.release()

    @case(needs.no_metadata_update)
    async def test_update_is_refused_where_metadata_cannot_be_replaced(self, driver: FaceDriver) -> None:
        """The error says what to do, and the lease goes on with what it has."""
        client = await driver.connect()
        name = driver.name()
        async with client.lock(name, ttl=driver.timing.long, metadata="first") as lease:
            with pytest.raises(lockkit.Unsupported, match="metadata"):
                await lease.update("second")
            assert lease.held
            assert lease.metadata["text"] == "first"

    @case()
    async def test_free_lock_has_no_holder(self, driver: FaceDriver) -> None:
        """Never held, released, or run out."""
        client = await driver.connect()
        name = driver.name()
        assert await client.holders(name) == []
        async with client.lock(name, ttl=driver.timing.long):
            pass
        assert await client.holders(name) == []

        lease = await client.lock(name, ttl=driver.timing.short, renew=False).acquire(20)
        assert await lease.wait_lost(driver.timing.beyond(lease.ttl))

        async def is_free() -> bool:
            return await client.holders(name) == []

        # The deadline at the client comes a little before the end at the backend.
        await driver.eventually(is_free, "the lease ends at the backend", driver.timing.beyond(lease.ttl))

    @case()
    async def test_locked_asks_the_backend(self, driver: FaceDriver) -> None:
        """Held by anybody, not only by this client or object."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        lock, theirs = client.lock(name, ttl=driver.timing.long), other.lock(name)
        assert not await theirs.locked()

        async with lock:
            assert await lock.locked()
            assert await theirs.locked()

        assert not await lock.locked()
        assert not await theirs.locked()

    @case()
    async def test_break_lock_frees_by_force(self, driver: FaceDriver) -> None:
        """True if somebody held it; the holder is notified, and its release frees nobody else's lock."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()
        assert not await other.break_lock(name)
        lease = await client.lock(name, ttl=driver.timing.long, renew=False).acquire(PATIENCE)

        assert await other.break_lock(name)

        assert await other.holders(name) == []
        assert not await other.break_lock(name)
        async with other.lock(name, ttl=driver.timing.long, timeout=20) as after:
            assert after.token > lease.token
            with pytest.raises(lockkit.LockLost):
                await lease.release()
            assert await after.confirm()

    @case()
    async def test_ping_answers(self, driver: FaceDriver) -> None:
        """Nothing comes of it."""
        client = await driver.connect()
        await client.ping()

    @case()
    async def test_capabilities_are_sound(self, driver: FaceDriver) -> None:
        """Data that the rest can rely on, and the known limits."""
        client = await driver.connect()
        await client.ping()
        capabilities = client.capabilities

        assert isinstance(capabilities, Capabilities)
        assert 0 < capabilities.min_ttl < math.inf
        assert 0 <= capabilities.ttl_granularity <= max(1.0, capabilities.min_ttl)
        for sentence in (capabilities.caveat, capabilities.token_source, capabilities.clock_assumption):
            assert len(sentence.split()) > 1

    @case()
    async def test_url_is_told_without_password(self, driver: FaceDriver) -> None:
        """In the client, its locks, and its errors."""
        client = await driver.connect()
        name = driver.name()

        assert client.url in repr(client)
        assert client.url in repr(client.lock(name))
        async with client.lock(name, ttl=driver.timing.long) as lease:
            assert name in repr(lease)
            with pytest.raises(lockkit.LockTimeout, match="busy") as caught:
                await driver.answered(client.lock(name).acquire, 0)
        assert client.url in str(caught.value)


class Arguments(Cases):
    """What a lock is asked for is checked before anything is sent."""

    backend_part = (
        "`capabilities` (`min_ttl`, `ttl_granularity`) and `options`: by them the engine refuses wrong arguments "
        "before it calls the backend."
    )

    @case()
    async def test_accepted_ttls(self, driver: FaceDriver) -> None:
        """From the shortest that the backend promises on; the lease never claims less than asked."""
        client = await driver.connect()
        for ttl in (driver.capabilities.min_ttl, driver.timing.short, 61, timedelta(minutes=1)):
            lease = await client.lock(driver.name(), ttl=ttl, renew=False).acquire(20)
            assert lease.ttl >= (ttl.total_seconds() if isinstance(ttl, timedelta) else ttl)
            with suppress(lockkit.LockLost):  # the shortest may be over already
                await lease.release()

    @case(needs.own_ttl)
    async def test_accepted_long_ttls(self, driver: FaceDriver) -> None:
        """Minutes and years, and no less."""
        client = await driver.connect()
        for ttl in (300.0, 86400.0 * 365):
            async with client.lock(driver.name(), ttl=ttl, renew=False) as lease:
                assert lease.ttl >= ttl

    @case()
    async def test_client_has_a_default_ttl(self, driver: FaceDriver) -> None:
        """Given to connect; else 30 seconds."""
        given = await driver.connect(ttl=driver.timing.long)
        default = await driver.connect()
        async with given.lock(driver.name()) as lease:
            assert driver.timing.long <= lease.ttl <= driver.timing.long + driver.capabilities.ttl_granularity
        if "ttl" not in driver.target.options and "ttl=" not in driver.target.url:
            async with default.lock(driver.name()) as lease:
                assert lease.ttl >= 30

    @case()
    async def test_unknown_option_is_refused(self, driver: FaceDriver) -> None:
        """At connect, with the nearest name; a misspelt option is not ignored."""
        with pytest.raises(lockkit.ConfigurationError, match=r"unavailable_aftr.*unavailable_after"):
            driver.make_client(unavailable_aftr=5)
