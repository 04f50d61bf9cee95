"""Readers, writers and permits of one lock on Redis: what the scripts keep there, whom they let in, whom they wake."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

import lockkit
from lockkit.backend import Busy, Gone, Grant, Renewed, Request
from lockkit.backends.redis.backend import RedisBackend
from lockkit_tools.servers import RedisServer
from tests.backends.redis.support import Keyspace, backend_at, busy_at, queue_up, token_in, woken
from tests.backends.support import StubHost, granted

FREE = {"{lockkit:x}:fence"}

ROUNDED_MS = 1
"""A script computes with whole ms of TIME, and PEXPIRE counts from the beginning of the script: another ms, perhaps."""


@pytest.fixture(autouse=True)
def redis(server: RedisServer) -> Keyspace:
    """The server's keys, none at first."""
    keyspace = Keyspace(server)
    keyspace("FLUSHALL")
    return keyspace


def reader(host: StubHost, *, ttl: float = 30.0, queue: bool = True) -> Request:
    """Make a request of the read side."""
    request = host.request(ttl=ttl, queue=queue)
    request.mode = "shared"
    return request


def permit(host: StubHost, limit: int, *, ttl: float = 30.0, queue: bool = True) -> Request:
    """Make a request for a permit."""
    request = host.request(ttl=ttl, queue=queue)
    request.mode, request.limit = "permit", limit
    return request


async def held(backend: RedisBackend, request: Request) -> Grant:
    """Ask, and get it."""
    return granted(await backend.try_acquire(request))


async def test_commands_of_an_uncontended_pair(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """Without waiters, five besides the two scripts, of whichever kind it is."""
    async with backend_at(server.url, host) as backend:
        kinds: list[Callable[[], Request]] = [host.request, lambda: reader(host), lambda: permit(host, 3)]
        for make in kinds:
            await backend.release(await held(backend, make()))
            redis("CONFIG", "RESETSTAT")
            await backend.release(await held(backend, make()))
            found = re.findall(
                r"cmdstat_(evalsha|set|time|mget|exists|del|[hz]\w+):calls=(\d+)", redis("INFO", "commandstats")
            )
            assert dict(found) == {"evalsha": "2", "set": "2", "time": "1", "mget": "1", "del": "1"}


async def test_writer_whose_lock_was_broken_becomes_no_reader(server: RedisServer, host: StubHost) -> None:
    """Nor when others read by now."""
    async with backend_at(server.url, host) as backend:
        writer = await held(backend, host.request())
        assert await backend.break_lock("x")
        assert not await backend.downgrade(writer)
        other = await held(backend, reader(host))
        assert not await backend.downgrade(writer)
        assert [holder.owner for holder in await backend.holders("x")] == [other.owner]


async def test_keys_while_readers_hold(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """The lock's key is there for other clients until the last reader ends; nothing is left at the end."""
    async with backend_at(server.url, host) as backend:
        first = await held(backend, reader(host, ttl=30.0))
        assert redis("GET", "lockkit:x") == "lockkit:shared"
        assert redis.keys() == {"lockkit:x", *FREE}
        second = await held(backend, reader(host, ttl=60.0))
        assert first.token < second.token == int(token_in(redis("GET", "{lockkit:x}:fence")))
        assert redis.keys() == {"lockkit:x", "{lockkit:x}:shares", "{lockkit:x}:leases", *FREE}
        for key in redis.keys() - FREE:
            assert 55_000 < redis("PTTL", key) <= 60_000 + ROUNDED_MS

        assert await backend.release(second)
        assert 25_000 < redis("PTTL", "lockkit:x") <= 30_000 + ROUNDED_MS
        assert not await backend.release(second)
        assert await backend.release(first)

        assert redis.keys() == FREE
        assert not await backend.release(first)


async def test_grant_by_an_entry_of_an_ended_subscription_leaves_no_other_entry(
    server: RedisServer, redis: Keyspace, host: StubHost
) -> None:
    """What is still in the queue would be offered the lock: that cut a reader's lease to the time of the offer."""
    async with backend_at(server.url, host) as backend, backend_at(server.url, host) as other:
        kinds: list[Callable[[], Request]] = [host.request, lambda: reader(host), lambda: permit(host, 3)]
        for make in kinds:
            granted(await other.try_acquire(host.request()))
            waiter, behind = make(), host.request()
            await busy_at(backend, waiter)
            await busy_at(other, behind)
            waiter.state.listener.drop()
            await busy_at(backend, waiter)
            assert redis("LLEN", "{lockkit:x}:queue") == 3
            redis("DEL", "lockkit:x")  # as if the holder's ttl had ended

            grant = await held(backend, waiter)
            await other.abandon(behind)

            assert 25_000 < redis("PTTL", "lockkit:x") <= 30_000 + ROUNDED_MS
            assert await backend.release(grant)
            assert redis.keys() == FREE


async def test_permits_have_the_lowest_free_numbers(server: RedisServer, host: StubHost) -> None:
    """The limit is each request's own."""
    async with backend_at(server.url, host) as backend:
        grants = [await held(backend, permit(host, 5)) for _ in range(5)]
        assert [grant.slot for grant in grants] == [0, 1, 2, 3, 4]
        assert await backend.release(grants[3])
        assert await backend.release(grants[1])
        later, earlier = [await held(backend, permit(host, 5)) for _ in range(2)]
        assert (later.slot, earlier.slot) == (1, 3)
        assert {holder.slot for holder in await backend.holders("x")} == {0, 1, 2, 3, 4}

        sixth = await held(backend, permit(host, 6, queue=False))
        assert sixth.slot == 5
        for grant in (grants[0], grants[2], grants[4], later, earlier):
            assert await backend.release(grant)
        await busy_at(backend, permit(host, 1, queue=False))
        assert (await held(backend, permit(host, 2))).slot == 0


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
async def test_waiter_with_another_limit_keeps_its_place(
    server: RedisServer, redis: Keyspace, host: StubHost, before: int, after: int
) -> None:
    """As when an operator changed the cap: those behind it and each release see the limit that it asked with last."""
    async with backend_at(server.url, host) as backend, backend_at(server.url, host) as other:
        grants = [await held(backend, permit(host, 3)) for _ in range(3)]
        requests = [permit(host, limit) for limit in (3, before, 3)]
        for request in requests:
            await queue_up(other, request)
        _, waiter, _ = requests
        waiter.limit = after
        await busy_at(other, waiter)

        def queue() -> list[str]:
            return [entry.split()[0] for entry in redis("LRANGE", "{lockkit:x}:queue", 0, -1)]

        assert queue() == [request.owner for request in requests]
        assert redis("PTTL", "{lockkit:x}:queue") > 30_000
        for grant in grants[:2]:
            assert await backend.release(grant)
        assert (waiter.owner in queue()) == (after == 1)
        for request in requests:
            await other.abandon(request)
        assert not redis("EXISTS", "{lockkit:x}:queue")


async def test_abandoned_request_whose_new_limit_did_not_arrive_leaves_no_entry(
    server: RedisServer, redis: Keyspace, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which of its two texts is in the queue."""
    async with backend_at(server.url, host) as backend:
        await held(backend, permit(host, 1))
        waiter = permit(host, 1)
        await queue_up(backend, waiter)
        waiter.limit = 2

        async def lose(*_: object, **__: object) -> None:
            raise lockkit.BackendUnavailable("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(backend, "_run", lose)
            with pytest.raises(lockkit.BackendUnavailable):
                await backend.try_acquire(waiter)
        await backend.abandon(waiter)

        assert not redis("EXISTS", "{lockkit:x}:queue")


@pytest.mark.parametrize("how", ["renew", "release", "update", "write_note"])
async def test_expired_share_is_no_lease_whichever_call_looks_first(
    server: RedisServer, host: StubHost, how: str
) -> None:
    """Beside a living one, whose end keeps the keys."""
    async with backend_at(server.url, host) as backend:
        await held(backend, reader(host))
        dead = await held(backend, reader(host, ttl=0.1))
        await host.runtime.sleep(0.15)
        if how == "renew":
            assert await backend.renew([dead]) == [Gone("gone")]
        elif how == "release":
            assert not await backend.release(dead)
        elif how == "update":
            assert await backend.update(dead, "{}") == Gone("gone")
        else:
            assert not await backend.write_note(dead, "late", 60.0)


async def test_waiting_writer_learns_that_the_last_reader_ends_earlier(server: RedisServer, host: StubHost) -> None:
    """The reader with the longest lease releases; the others are dead."""
    async with backend_at(server.url, host) as backend:
        await held(backend, reader(host, ttl=0.3))
        living = await held(backend, reader(host, ttl=60.0))
        writer = host.request()
        assert ((await busy_at(backend, writer)).retry_after or 0.0) > 50.0

        assert await backend.release(living)

        assert await woken(writer)
        await held(backend, writer)


async def test_renewal_update_and_note_of_shares(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """As of locks; exclusive leases and shares are renewed and released together."""
    async with backend_at(server.url, host) as backend:
        locked = granted(await backend.try_acquire(host.request("y")))
        for together in (False, True):
            grants = [await held(backend, reader(host, ttl=10.0))]
            if together:
                grants.append(await held(backend, reader(host, ttl=10.0)))
            for grant in grants:
                assert await backend.update(grant, '{"step": 2}') is None
                assert await backend.write_note(grant, f"by {grant.token}", 60.0)
                grant.ttl = 60.0
            note = await backend.read_note("x")
            assert note is not None
            assert note.text == f"by {grants[-1].token}"

            assert await backend.renew([*grants, locked]) == [Renewed()] * (len(grants) + 1)

            assert 55_000 < redis("PTTL", "lockkit:x") <= 60_000 + ROUNDED_MS
            holders = await backend.holders("x")
            assert [(holder.owner, holder.token) for holder in holders] == [(g.owner, g.token) for g in grants]
            assert all(holder.metadata == {"step": 2} and holder.slot is None for holder in holders)
            assert all(holder.mode == "shared" and (holder.remaining or 0.0) > 55.0 for holder in holders)
            await backend.release_all(grants, host.runtime.now() + 20.0)
            assert await backend.update(grants[0], "{}") == Gone("gone")
            assert not await backend.write_note(grants[0], "late", 60.0)
            assert await backend.renew(grants) == [Gone("gone")] * len(grants)


async def test_grant_of_a_share_without_an_answer_is_undone_or_repeated(
    server: RedisServer, redis: Keyspace, host: StubHost
) -> None:
    """Sent again it is the same share, with a new token; abandoned, nothing of it is left."""
    async with backend_at(server.url, host) as backend:
        for others in (0, 1):
            beside = [await held(backend, permit(host, 4)) for _ in range(others)]
            request = permit(host, 4)
            lost = await held(backend, request)
            again = await held(backend, request)
            assert again.token > lost.token
            assert again.slot == lost.slot
            assert len(await backend.holders("x")) == others + 1

            request.uncertain = True
            await backend.abandon(request)

            assert [holder.owner for holder in await backend.holders("x")] == [one.owner for one in beside]
            for grant in beside:
                assert await backend.release(grant)
            assert redis.keys() == FREE


async def test_abandoned_request_leaves_the_only_reader(server: RedisServer, host: StubHost) -> None:
    """Whose lease is in the lock's record, where nobody else has a share."""
    async with backend_at(server.url, host) as backend:
        grant = await held(backend, reader(host))
        request = reader(host)
        request.uncertain = True
        await backend.abandon(request)
        assert [holder.owner for holder in await backend.holders("x")] == [grant.owner]
        assert await backend.renew([grant]) == [Renewed()]
        assert await backend.release(grant)


async def test_stopped_waiter_keeps_its_place_no_longer_than_its_offer(server: RedisServer, host: StubHost) -> None:
    """Then the next waiter, which was told that time, takes it."""
    async with backend_at(server.url, host) as backend:
        grants = [await held(backend, permit(host, 2)) for _ in range(2)]
        stopped, other = permit(host, 2, ttl=1.5), permit(host, 2)
        await busy_at(backend, stopped)
        await busy_at(backend, other)

        assert await backend.release(grants[0])

        assert await woken(stopped)
        assert await woken(other)
        await held(backend, other)
        await busy_at(backend, stopped)


async def test_removed_lock_is_lost_by_its_readers(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """A client of another kind removed the key. Later readers do not bring the leases of before back."""
    async with backend_at(server.url, host) as backend, backend_at(server.url, host) as other:
        for count in (1, 2):
            lost = [await held(backend, reader(host)) for _ in range(count)]
            redis("DEL", "lockkit:x")
            writer, waiting = await held(other, host.request()), reader(host)
            if count == 1:  # else nobody waits, and the next reader finds the lock free
                await busy_at(other, waiting)
            assert await backend.renew(lost) == [Gone("taken")] * count
            assert await other.release(writer)
            new = await held(other, waiting)

            assert await backend.renew(lost) == [Gone("gone")] * count
            assert not await backend.release(lost[0])
            assert [holder.owner for holder in await backend.holders("x")] == [new.owner]
            assert await other.release(new)


async def test_reader_whose_lock_another_kind_of_client_took_stays_out(
    server: RedisServer, redis: Keyspace, host: StubHost
) -> None:
    """Also when that client is gone, and the readers who waited for it are let in."""
    async with backend_at(server.url, host) as backend:
        await held(backend, host.request("y"))
        await busy_at(backend, host.request("y"))  # subscribes, so that the readers below enter the queue
        lost = await held(backend, reader(host))
        redis("SET", "lockkit:x", "theirs", "PX", "20000")
        requests = [reader(host), reader(host)]
        for request in requests:
            await busy_at(backend, request)
        assert redis("LLEN", "{lockkit:x}:queue") == 2
        redis("DEL", "lockkit:x")

        grants = [await held(backend, request) for request in requests]

        assert await backend.renew([lost]) == [Gone("gone")]
        assert {holder.owner for holder in await backend.holders("x")} == {grant.owner for grant in grants}


async def test_expired_lock_goes_to_the_readers_at_the_head_of_the_queue(
    server: RedisServer, redis: Keyspace, host: StubHost
) -> None:
    """The client that looks first hands it to them, also to itself."""
    async with backend_at(server.url, host) as backend:
        await held(backend, host.request())
        first, second, writer = reader(host), reader(host), host.request()
        for request in (first, second, writer):
            await busy_at(backend, request)
        redis("DEL", "lockkit:x")

        grants = [await held(backend, second)]

        assert await woken(first)
        grants.append(await held(backend, first))
        await busy_at(backend, writer)
        assert {holder.owner for holder in await backend.holders("x")} == {grant.owner for grant in grants}


async def test_full_server_still_renews_and_releases_shares(
    server: RedisServer, redis: Keyspace, host: StubHost
) -> None:
    """And hands over to waiters, and breaks locks: only new grants take memory."""
    async with backend_at(server.url, host) as backend:
        grants = [await held(backend, reader(host)) for _ in range(2)]
        writer = host.request()
        await busy_at(backend, writer)
        await held(backend, host.request("y"))
        redis("CONFIG", "SET", "maxmemory", "1")
        try:
            with pytest.raises(lockkit.BackendUnavailable, match="maxmemory"):
                await backend.try_acquire(host.request("z"))
            assert await backend.break_lock("y")
            assert await backend.renew(grants) == [Renewed()] * 2
            for grant in grants:
                assert await backend.release(grant)
            assert await woken(writer)
        finally:
            redis("CONFIG", "SET", "maxmemory", "0")


class History:
    """
    What two clients do at random, and what they may believe.

    Attributes:
        beliefs: The grants that were not released: through which client, and their limit (0: reader, -1: writer).
        waiting: The requests that wait, and through which client.
    """

    def __init__(self, host: StubHost, backends: list[RedisBackend], seed: int) -> None:
        """Draw from a seed: readers and writers, or permits."""
        self.host = host
        self.backends = backends
        self.draw = random.Random(seed)
        self.permits = seed % 2 == 1
        self.beliefs: dict[str, tuple[RedisBackend, Grant, int]] = {}
        self.waiting: list[tuple[RedisBackend, Request]] = []
        self.token = 0

    async def step(self) -> None:
        """Do something."""
        act = self.draw.choice([self.ask, self.ask, self.ask_again, self.give_up, self.end, self.end, self.look])
        await act()

    async def ask(self) -> None:
        """A new request."""
        if self.permits:
            request = permit(self.host, self.draw.choice((2, 3)))
        else:
            request = self.draw.choice((reader(self.host), reader(self.host), self.host.request()))
        await self._ask(self.draw.choice(self.backends), request)

    async def ask_again(self) -> None:
        """One that waits, woken or not."""
        if self.waiting:
            backend, request = self.waiting.pop(self.draw.randrange(len(self.waiting)))
            if self.permits:
                request.limit = self.draw.choice((2, 3))  # as after a change of the cap
            await self._ask(backend, request)

    async def _ask(self, backend: RedisBackend, request: Request) -> None:
        outcome = await backend.try_acquire(request)
        if isinstance(outcome, Busy):
            self.waiting.append((backend, request))
            return
        limit = {"exclusive": -1, "shared": 0, "permit": request.limit}[request.mode]
        self.beliefs[outcome.owner] = backend, outcome, limit
        assert outcome.token > self.token
        self.token = outcome.token
        limits = [each for _, _, each in self.beliefs.values()]
        assert limits == [-1] or -1 not in limits
        assert len(limits) <= limit or limit <= 0
        slots = [grant.slot for _, grant, _ in self.beliefs.values() if grant.slot is not None]
        assert len(set(slots)) == len(slots) == (len(limits) if self.permits else 0)

    async def give_up(self) -> None:
        """One that waits."""
        if self.waiting:
            backend, request = self.waiting.pop(self.draw.randrange(len(self.waiting)))
            await backend.abandon(request)

    async def end(self) -> None:
        """Release, downgrade or break."""
        if self.draw.random() < 0.05:
            assert await self.backends[0].break_lock("x") == bool(self.beliefs)
            for backend, grant, _ in self.beliefs.values():
                assert await backend.renew([grant]) == [Gone("broken")]
            self.beliefs.clear()
        elif self.beliefs:
            owner = self.draw.choice(list(self.beliefs))
            backend, grant, limit = self.beliefs.pop(owner)
            if limit == -1 and self.draw.random() < 0.5:
                for _ in range(2):  # as after a lost answer
                    assert await backend.downgrade(grant)
                self.beliefs[owner] = backend, grant, 0
            else:
                assert await backend.release(grant)

    async def look(self) -> None:
        """All that believe are listed, and renewed."""
        holders = await self.draw.choice(self.backends).holders("x")
        assert {holder.owner for holder in holders} == set(self.beliefs)
        for backend, grant, _ in self.beliefs.values():
            assert await backend.renew([grant]) == [Renewed()]

    async def finish(self) -> None:
        """Leave."""
        for backend, grant, _ in self.beliefs.values():
            assert await backend.release(grant)
        for backend, request in self.waiting:
            await backend.abandon(request)


@pytest.mark.parametrize("seed", range(6))
async def test_random_histories_let_nobody_in_who_does_not_fit(
    server: RedisServer, redis: Keyspace, host: StubHost, seed: int
) -> None:
    """Readers and a writer, or permits of two limits; nothing is left at the end."""
    async with backend_at(server.url, host) as one, backend_at(server.url, host) as two:
        history = History(host, [one, two], seed)
        for _ in range(150):
            await history.step()
        await history.finish()
        assert redis.keys() - {"{lockkit:x}:broken"} <= FREE
