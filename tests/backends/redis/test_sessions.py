"""Leases that one heartbeat keeps (``leases=session``): what is at the server, and who may take what when."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import lockkit
from lockkit.backend import Busy, Gone, Grant, Renewed, Unknown
from lockkit.backends.redis import sessions as sessions_module
from lockkit.errors import BackendUnavailable
from lockkit.runtime import BlockingRuntime, monotonic
from lockkit.testing.servers import RedisServer, wait_until
from tests.backends.redis.support import Face, Keyspace, backend_at, calls
from tests.backends.support import StubHost, granted
from tests.tries import busy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from lockkit.backend import Renewal
    from lockkit.backends.redis.backend import RedisBackend
    from tests.backends.redis.support import Connect

pytestmark = pytest.mark.timeout(120)

LOCK = "lockkit:x"
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def redis(server: RedisServer) -> Keyspace:
    """The server's keys, none at first."""
    keyspace = Keyspace(server)
    keyspace("FLUSHALL")
    return keyspace


@pytest.fixture(params=["sync", "asyncio"])
def face(request: pytest.FixtureRequest) -> Face:
    """Each face in turn."""
    return Face(request.param)


class AheadClock(BlockingRuntime):
    """
    A blocking runtime whose clock the test can set forward; the server's clock does not follow.

    Attributes:
        ahead: By how many seconds it is.
    """

    def __init__(self) -> None:
        """Be right."""
        super().__init__()
        self.ahead = 0.0
        self.now = self._now

    def _now(self) -> float:
        return monotonic() + self.ahead


@pytest.fixture
def clock() -> AheadClock:
    """Time of a client."""
    return AheadClock()


def sessions(redis: Keyspace) -> list[str]:
    """Find the sessions that the server has."""
    found = redis.keys()
    return sorted(key for key in found if key.startswith("lockkit+session:"))


def end_sessions(redis: Keyspace) -> None:
    """Let all sessions end as if their ttl had passed without a heartbeat."""
    redis("DEL", *sessions(redis))


async def held(backend: RedisBackend, host: StubHost, name: str = "x", ttl: float = 30.0) -> Grant:
    """Acquire a free lock, and renew the lease once: from then on it is in the session."""
    grant = granted(await backend.try_acquire(host.request(name, ttl=ttl)))
    assert await renewed(backend, grant) == Renewed()
    return grant


async def renewed(backend: RedisBackend, grant: Grant) -> Renewal:
    """Renew one lease."""
    (outcome,) = await backend.renew([grant])
    return outcome


async def is_busy(backend: RedisBackend, host: StubHost, name: str = "x") -> bool:
    """Tell whether somebody else finds a lock held."""
    return isinstance(await backend.try_acquire(host.request(name, queue=False)), Busy)


def test_first_renewal_takes_the_lease_into_the_session(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """Before it the lease is like any other; after it, its key names the session, and lives for ten ttls."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grant = granted(await backend.try_acquire(host.request()))
            assert redis("GET", LOCK) == grant.owner
            assert not sessions(redis)

            assert await renewed(backend, grant) == Renewed()

            (session,) = sessions(redis)
            assert redis("GET", LOCK) == f"lockkit:session 1 {grant.owner} {session}"
            assert 0 < redis("PTTL", session) <= 30_000
            assert 290_000 < redis("PTTL", LOCK) <= 300_000
            assert redis("PTTL", "{lockkit:x}:fence") > redis("PTTL", LOCK)
            (holder,) = await backend.holders("x")
            assert (holder.owner, holder.token, holder.metadata) == (grant.owner, grant.token, {"pid": 1})
            assert holder.remaining is not None
            assert holder.remaining <= 30.0

            assert await backend.release(grant)
            assert not await backend.release(grant)
            assert redis.keys() == {"{lockkit:x}:fence", session}

    face.run(scenario)


def test_thousand_leases_are_renewed_by_one_command(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """Whatever their number: the heartbeat, which looks whether the session is there and reads its value."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grants = [granted(await backend.try_acquire(host.request(f"n{index}"))) for index in range(1000)]
            assert set(await backend.renew(grants)) == {Renewed()}
            calls(redis)

            for _ in range(5):
                assert set(await backend.renew(grants)) == {Renewed()}

            assert calls(redis) == {"evalsha": 5, "pexpire": 5, "get": 5}

    face.run(scenario)


def test_very_many_leases_are_asked_for_bit_by_bit(
    server: RedisServer, redis: Keyspace, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part has the time of a call; after one that is not answered, the rest is for the next renewal."""
    monkeypatch.setattr(sessions_module, "BATCH", 3)
    monkeypatch.setattr(sessions_module, "CALLS_MAX", 2)

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            network = Unreliable(backend)
            grants = [granted(await backend.try_acquire(host.request(f"n{index}"))) for index in range(20)]

            async def fail() -> None:
                network.lose = "request"

            network.meanwhile = fail
            outcomes = await backend.renew(grants)
            assert outcomes[:6] == [Renewed()] * 6
            assert all(isinstance(outcome, Unknown) for outcome in outcomes[6:])
            assert len(network.late) == 1
            network.lose = ""
            assert set(await backend.renew(grants)) == {Renewed()}
            assert len(sessions(redis)) == 1
            calls(redis)
            assert set(await backend.renew(grants)) == {Renewed()}
            assert calls(redis)["evalsha"] == 1

    face.run(scenario)


def test_each_lease_is_asked_for_before_half_of_its_key_s_life_is_over(
    server: RedisServer, redis: Keyspace, clock: AheadClock
) -> None:
    """In a hundred renewals of a hundred leases, a tenth of the commands; none of the keys is ever near its end."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grants = [granted(await backend.try_acquire(host.request(f"n{index}"))) for index in range(100)]
            await backend.renew(grants)
            removed = grants[7].owner
            redis("DEL", "lockkit:n7")
            calls(redis)
            noticed = 0.0
            for _ in range(100):
                clock.ahead += 10.0
                outcomes = await backend.renew(grants)
                for grant, outcome in zip(grants, outcomes, strict=True):
                    assert outcome == (Gone("gone") if grant.owner == removed and noticed else Renewed()) or not noticed
                    if outcome == Gone("gone"):
                        noticed = noticed or clock.ahead
                grants = [grant for grant, outcome in zip(grants, outcomes, strict=True) if outcome == Renewed()]
            assert 0.0 < noticed <= 150.0 + 10.0
            assert len(grants) == 99
            assert calls(redis)["set"] < 100 * 100 / 8

    Face("sync").run(lambda _: scenario(StubHost(clock)))


@pytest.mark.parametrize("kinds", ["session session", "session lease", "lease session"])
def test_leases_of_both_kinds_exclude_each_other(server: RedisServer, redis: Keyspace, face: Face, kinds: str) -> None:
    """While the session is there nobody else gets the lock; then the next one does, with a higher token."""
    first, second = kinds.split()

    async def scenario(host: StubHost) -> None:
        async with (
            backend_at(server.url, host, leases=first) as one,
            backend_at(server.url, host, leases=second) as other,
        ):
            grant = await held(one, host)
            assert await is_busy(other, host)
            assert redis("SET", LOCK, "foreign", "NX", "PX", 1000) is None
            assert not await other.release(Grant("x", host.request().owner, 1, 30.0, state=grant.state))

            end_sessions(redis) if first == "session" else redis("DEL", LOCK)

            later = granted(await other.try_acquire(host.request()))
            assert later.token > grant.token
            assert isinstance(await renewed(one, grant), Gone)
            assert not await one.release(grant)
            assert await renewed(other, later) == Renewed()

    face.run(scenario)


def test_client_of_another_kind_waits_until_a_key_ends_or_somebody_cleans_up(
    server: RedisServer, redis: Keyspace, face: Face
) -> None:
    """It knows no sessions: a dead holder's lock is taken until its key ends, or a client of lockkit asks for it."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grants = [await held(backend, host, name) for name in ("x", "y", "z")]
            end_sessions(redis)

            assert redis("SET", LOCK, "foreign", "NX", "PX", 1000) is None
            assert 0 < redis("PTTL", LOCK) <= 300_000

            # The holder that comes back, its client's next attempt, and a break.
            assert await backend.renew([grants[0]]) == [Gone("session")]
            later = granted(await backend.try_acquire(host.request("y")))
            assert await backend.release(later)
            assert not await backend.break_lock("z")
            assert [redis("SET", f"lockkit:{name}", "foreign", "NX", "PX", 1000) for name in "xyz"] == ["OK"] * 3

    face.run(scenario)


def test_session_that_has_ended_never_returns(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """All of its leases are lost together; what the client takes then is in a session with another id."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grants = [await held(backend, host, name) for name in ("x", "y")]
            (before,) = sessions(redis)
            end_sessions(redis)
            fresh = granted(await backend.try_acquire(host.request("z")))

            assert await backend.renew([*grants, fresh]) == [Gone("session"), Gone("session"), Renewed()]

            (after,) = sessions(redis)
            assert after != before
            assert await backend.renew([*grants, fresh]) == [Gone("session"), Gone("session"), Renewed()]
            assert await backend.holders("x") == []
            assert sorted((await backend.names("")).names) == ["z"]

    face.run(scenario)


def test_client_that_was_paused_believes_its_own_clock(server: RedisServer, redis: Keyspace, clock: AheadClock) -> None:
    """A ttl after its last heartbeat the session is over for it, though the server may still have it."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grant = await held(backend, host)
            (before,) = sessions(redis)
            clock.ahead += 30.0
            assert await renewed(backend, grant) == Gone("session")
            other = await held(backend, host, "y")
            assert sessions(redis) != [before]
            assert await renewed(backend, other) == Renewed()

    Face("sync").run(lambda _: scenario(StubHost(clock)))


def test_lease_that_is_not_renewed_any_more_leaves_the_session(
    server: RedisServer, redis: Keyspace, clock: AheadClock
) -> None:
    """Dropped, ``max_hold`` over, release not answered: heartbeats for others do not keep it beyond its ttl."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            wanted, dropped = await held(backend, host, "y"), await held(backend, host)
            for _ in range(3):
                clock.ahead += 10.0
                assert await renewed(backend, wanted) == Renewed()

            assert redis("GET", LOCK) == f"lockkit:session 2 {dropped.owner} "
            assert 0 < redis("PTTL", LOCK) <= 10_000
            assert await is_busy(backend, host)
            (holder,) = await backend.holders("x")
            assert holder.owner == dropped.owner

            # It was wanted after all.
            assert await renewed(backend, dropped) == Renewed()
            assert redis("GET", LOCK) == f"lockkit:session 3 {dropped.owner} {sessions(redis)[0]}"

            clock.ahead += 10.0
            assert await renewed(backend, wanted) == Renewed()
            clock.ahead += 10.0
            assert await renewed(backend, wanted) == Renewed()
            redis("PEXPIRE", LOCK, 1)
            wait_until(lambda: "still there" if redis("EXISTS", LOCK) else None)
            assert granted(await backend.try_acquire(host.request())).token > dropped.token

    Face("sync").run(lambda _: scenario(StubHost(clock)))


def test_other_ttl_is_another_session(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """``extend(ttl)`` moves a lease; what the former session comes to does not matter then."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grant, other = await held(backend, host), await held(backend, host, "y")
            (before,) = sessions(redis)
            grant.ttl = 60.0
            assert await renewed(backend, grant) == Renewed()
            (after,) = set(sessions(redis)) - {before}
            assert 30_000 < redis("PTTL", after) <= 60_000

            redis("DEL", before)

            assert await backend.renew([grant, other]) == [Renewed(), Gone("session")]
            assert await is_busy(backend, host)

    face.run(scenario)


class Unreliable:
    """
    Stands before a backend's `run_many`: the answers of some calls get lost, or their requests.

    Attributes:
        late: The requests that got lost.
        lose: ``request`` or ``answer``; else nothing.
        meanwhile: What happens once between the server's answer and its arrival.
    """

    def __init__(self, backend: RedisBackend) -> None:
        """Pass on everything at first."""
        self._run_many = backend._topology.run_many
        self.late: list[tuple[Any, Sequence[tuple[str, bytes]]]] = []
        self.lose = ""
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        backend._topology.run_many = self._run  # type: ignore[method-assign]

    async def _run(self, script: Any, calls: Sequence[tuple[str, bytes]], **more: Any) -> Any:  # noqa: ANN401
        if self.lose == "request":
            self.late.append((script, calls))
        elif self.lose == "answer":
            await self._run_many(script, calls, **more)
        else:
            replies = await self._run_many(script, calls, **more)
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile is not None:
                await meanwhile()
            return replies
        return [BackendUnavailable("lost")] * len(calls)

    async def arrive(self) -> None:
        """Let the server run what was under way all the time."""
        for script, bodies in self.late:
            await self._run_many(script, bodies)


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_request_that_was_not_answered_is_overtaken(
    server: RedisServer, redis: Keyspace, face: Face, lost: str
) -> None:
    """The next one moves the lease into a session of its own choice; a late one neither moves nor revives it."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            network = Unreliable(backend)
            grant = granted(await backend.try_acquire(host.request()))
            network.lose = lost
            assert isinstance(await renewed(backend, grant), Unknown)
            network.lose = ""
            assert await renewed(backend, grant) == Renewed()
            value = redis("GET", LOCK)
            assert value.startswith("lockkit:session 2 ")

            await network.arrive()

            assert redis("GET", LOCK) == value
            assert await renewed(backend, grant) == Renewed()
            # The session of the first request has no heartbeats.
            redis("DEL", *(key for key in sessions(redis) if not value.endswith(key)))
            assert await is_busy(backend, host)
            assert await backend.release(grant)

            await network.arrive()
            assert not redis("EXISTS", LOCK)

    face.run(scenario)


def test_lease_whose_entry_was_not_answered_leaves_the_session_too(
    server: RedisServer, redis: Keyspace, clock: AheadClock
) -> None:
    """The server has it in the session, so the heartbeats for others would keep it for ten ttls."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            network = Unreliable(backend)
            wanted, dropped = await held(backend, host, "y"), granted(await backend.try_acquire(host.request()))
            network.lose = "answer"
            assert isinstance(await renewed(backend, dropped), Unknown)
            network.lose = ""
            assert redis("GET", LOCK) == f"lockkit:session 1 {dropped.owner} {sessions(redis)[0]}"

            for _ in range(3):
                clock.ahead += 10.0
                assert await renewed(backend, wanted) == Renewed()

            assert redis("GET", LOCK) == f"lockkit:session 2 {dropped.owner} "
            assert 0 < redis("PTTL", LOCK) <= 10_000

    Face("sync").run(lambda _: scenario(StubHost(clock)))


def test_sessions_that_are_over_are_forgotten(server: RedisServer, clock: AheadClock) -> None:
    """A client may use ever new ttls."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            assert backend._sessions is not None
            for ttl in (10.0, 11.0, 12.0):
                await held(backend, host, f"n{ttl}", ttl=ttl)
                clock.ahead += 11.0

            assert list(backend._sessions._current) == [12_000]

    Face("sync").run(lambda _: scenario(StubHost(clock)))


def test_move_that_was_not_answered_is_made_again(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """After a lost ``extend`` the lease may be in either session, so the next renewal does not rely on the former."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            network = Unreliable(backend)
            grant = await held(backend, host)
            (first,) = sessions(redis)
            network.lose, grant.ttl = "answer", 60.0
            assert isinstance(await renewed(backend, grant), Unknown)
            network.lose, grant.ttl = "", 30.0
            assert not redis("GET", LOCK).endswith(first)

            assert await renewed(backend, grant) == Renewed()

            assert redis("GET", LOCK) == f"lockkit:session 3 {grant.owner} {first}"

    face.run(scenario)


def test_late_answer_does_not_renew_what_has_left_the_session(
    server: RedisServer, redis: Keyspace, clock: AheadClock
) -> None:
    """While the answer to A's heartbeat is under way, B's takes A's lease out: A asks again."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            network = Unreliable(backend)
            one, other = await held(backend, host), await held(backend, host, "y")

            async def renew_the_other() -> None:
                clock.ahead += 20.0
                assert await renewed(backend, other) == Renewed()
                assert redis("GET", LOCK) == f"lockkit:session 2 {one.owner} "

            network.meanwhile = renew_the_other
            assert await renewed(backend, one) == Renewed()

            assert redis("GET", LOCK).startswith(f"lockkit:session 3 {one.owner} lockkit+session:")

    Face("sync").run(lambda _: scenario(StubHost(clock)))


def test_late_answer_brings_nothing_into_a_session_that_is_over(
    server: RedisServer, redis: Keyspace, clock: AheadClock
) -> None:
    """By then its other leases count as lost, so the next renewal would give this one up while it is held."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            network = Unreliable(backend)
            one = await held(backend, host)
            clock.ahead += 12.0
            other = granted(await backend.try_acquire(host.request("y")))

            async def lose_the_first() -> None:
                clock.ahead += 18.0
                assert await renewed(backend, one) == Gone("session")

            network.meanwhile = lose_the_first
            assert await renewed(backend, other) == Renewed()
            assert await renewed(backend, other) == Renewed()
            assert await is_busy(backend, host, "y")
            assert len(sessions(redis)) == 2

    Face("sync").run(lambda _: scenario(StubHost(clock)))


def test_broken_lease_is_known_by_the_next_heartbeat(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """The other leases of the session stay, and the list of broken ones is read on from where it ended."""

    async def scenario(host: StubHost) -> None:
        async with (
            backend_at(server.url, host, leases="session") as backend,
            backend_at(server.url, host) as other,
        ):
            grants = [await held(backend, host, name) for name in ("x", "y", "z")]
            for index in (0, 1):
                assert await other.break_lock("xyz"[index])
                later = granted(await other.try_acquire(host.request("xyz"[index])))
                assert later.token > grants[index].token
                expected = [Gone("broken") if at <= index else Renewed() for at in range(3)]
                assert await backend.renew(grants) == expected
                assert not await backend.release(grants[index])
            (session,) = sessions(redis)
            assert redis("GET", session) == f"{grants[0].owner} {grants[1].owner} "
            assert backend._sessions is not None
            assert backend._sessions._current[30_000].read == redis("STRLEN", session)

    face.run(scenario)


def test_lease_broken_before_it_was_in_a_session(server: RedisServer, face: Face) -> None:
    """The lock says so, as for any other lease."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grant = granted(await backend.try_acquire(host.request()))
            assert await backend.break_lock("x")
            assert await renewed(backend, grant) == Gone("broken")
            flushed = granted(await backend.try_acquire(host.request("y")))
            assert await backend.release(flushed)
            assert await renewed(backend, flushed) == Gone("gone")
            taken = granted(await backend.try_acquire(host.request("z")))
            await backend.release(taken)
            await backend.try_acquire(host.request("z"))
            assert await renewed(backend, taken) == Gone("taken")

    face.run(scenario)


def test_waiter_looks_again_when_the_session_may_have_ended(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """Not when the key ends, which is much later; and the first in the queue comes first."""

    async def scenario(host: StubHost) -> None:
        async with (
            backend_at(server.url, host, leases="session") as holder,
            backend_at(server.url, host, leases="session") as first,
            backend_at(server.url, host) as second,
        ):
            grant = await held(holder, host)
            one, two = host.request(), host.request()
            for backend, request in ((first, one), (second, two)):
                outcome = await backend.try_acquire(request)
                assert isinstance(outcome, Busy)
                assert outcome.owner == grant.owner
                assert not outcome.poll
                assert outcome.retry_after is not None
                assert outcome.retry_after <= 30.0
            end_sessions(redis)

            # The second looks first: the lock is offered to the first one, who is told.
            assert isinstance(await second.try_acquire(two), Busy)
            assert await one.wake.wait(PATIENCE)
            later = granted(await first.try_acquire(one))
            assert later.token > grant.token
            assert await first.release(later)
            granted(await second.try_acquire(two))

    face.run(scenario)


def test_flushed_session_wakes_its_waiters(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """The holder finds the session gone and tells those who wait, as for any other lock that has vanished."""

    async def scenario(host: StubHost) -> None:
        async with (
            backend_at(server.url, host, leases="session") as holder,
            backend_at(server.url, host) as waiter,
        ):
            grant = await held(holder, host)
            request = host.request()
            assert isinstance(await waiter.try_acquire(request), Busy)
            redis("FLUSHALL")
            assert await renewed(holder, grant) == Gone("session")
            assert await request.wake.wait(PATIENCE)
            assert granted(await waiter.try_acquire(request)).token > grant.token

    face.run(scenario)


def test_readers_and_permits_are_renewed_by_themselves(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """Also a lease that becomes a reader's, even if the answer was lost."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            reading, permit = host.request("reader"), host.request("permit")
            reading.mode, permit.mode, permit.limit = "shared", "permit", 2
            grants = [granted(await backend.try_acquire(request)) for request in (reading, permit)]
            grants.append(await held(backend, host))
            assert await backend.downgrade(grants[2])
            (session,) = sessions(redis)
            redis("DEL", session)

            assert await backend.renew(grants) == [Renewed()] * 3

            assert {redis("GET", f"lockkit:{name}") for name in ("reader", "permit", "x")} == {"lockkit:shared"}
            assert 0 < redis("PTTL", LOCK) <= 30_000
            assert all([await backend.release(grant) for grant in grants])

    face.run(scenario)


@pytest.mark.parametrize("first", ["heartbeat", "request"])
def test_lease_that_becomes_a_reader_s_during_its_renewal(
    server: RedisServer, redis: Keyspace, face: Face, first: str
) -> None:
    """Neither the answer that is under way nor a later heartbeat counts for it."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            network = Unreliable(backend)
            grant = granted(await backend.try_acquire(host.request()))
            if first == "heartbeat":
                assert await renewed(backend, grant) == Renewed()

            async def downgrade() -> None:
                assert await backend.downgrade(grant)

            network.meanwhile = downgrade
            assert await renewed(backend, grant) == Renewed()
            redis("PEXPIRE", LOCK, 20_000)

            assert await renewed(backend, grant) == Renewed()

            assert redis("GET", LOCK) == "lockkit:shared"
            assert redis("PTTL", LOCK) > 20_000
            redis("DEL", LOCK)
            assert isinstance(await renewed(backend, grant), Gone)

    face.run(scenario)


def test_notes_and_metadata_need_a_living_session(server: RedisServer, redis: Keyspace, face: Face) -> None:
    """They are written for the holder, and for nobody whose session has ended."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grant = await held(backend, host)
            assert await backend.update(grant, '{"pid":2}') is None
            assert await backend.write_note(grant, "note", 60.0)
            assert [holder.metadata for holder in await backend.holders("x")] == [{"pid": 2}]
            assert await backend.confirm(grant) is None
            end_sessions(redis)
            assert await backend.update(grant, '{"pid":3}') == Gone("gone")
            assert not await backend.write_note(grant, "other", 60.0)
            assert not await backend.downgrade(grant)
            assert await backend.confirm(grant) == Gone("gone")
            note = await backend.read_note("x")
            assert note is not None
            assert note.text == "note"

    face.run(scenario)


def test_list_of_broken_leases_is_read_anew_from_older_data(server: RedisServer, redis: Keyspace) -> None:
    """A server that was set back has a shorter one, which grows again."""

    async def scenario(host: StubHost) -> None:
        async with backend_at(server.url, host, leases="session") as backend:
            grants = [await held(backend, host, name) for name in ("x", "y")]
            (session,) = sessions(redis)
            assert await backend.break_lock("x")
            assert await backend.renew(grants) == [Gone("broken"), Renewed()]
            redis("SET", session, "", "KEEPTTL")
            backend._sessions._current[30_000].identity = b"before"  # type: ignore[union-attr]
            grants[1].state.identity = b"before"
            assert await renewed(backend, grants[1]) == Renewed()
            assert await backend.break_lock("y")
            assert await renewed(backend, grants[1]) == Gone("broken")

    Face("sync").run(scenario)


@pytest.mark.parametrize("scheme", ["redis+sentinel://localhost/mymaster", "redis+cluster://localhost"])
def test_several_nodes_are_refused(scheme: str) -> None:
    """At the call that asks for it, with nothing sent."""
    with pytest.raises(lockkit.ConfigurationError, match=r"leases=session is for one node.*leave the option out"):
        lockkit.connect(f"{scheme}?leases=session")


def test_what_else_is_refused() -> None:
    """Replicas that must acknowledge, and words that mean nothing."""
    with pytest.raises(lockkit.ConfigurationError, match="leases=session with replicas=1"):
        lockkit.connect("redis://localhost?leases=session&replicas=1")
    with pytest.raises(lockkit.ConfigurationError, match="one of lease, session"):
        lockkit.connect("redis://localhost?leases=sessions")


class TestServerThatComesBack:
    """Another run of the server may have the session and not its newest leases."""

    def test_each_lease_is_asked_for(self, connect: Connect) -> None:
        """With its data, nothing is lost, and nobody gets a lock meanwhile; one lease that is missing is noticed."""
        with RedisServer(appendonly=True, appendfsync="always") as server:
            client, other = connect(server.url, leases="session", ttl=20.0), connect(server.url)
            kept, missing = client.lock("kept").acquire(), client.lock("missing").acquire()
            kept.extend()
            missing.extend()
            server.restart(crash=True)
            with server.connect() as connection:
                assert connection.call("DEL", "lockkit:missing") == 1

            client.ping()  # the first connection to the new run

            assert missing.wait_lost(PATIENCE)
            kept.extend()
            assert busy(other.lock("kept"))
            kept.release()

    def test_without_its_data_all_are_lost(self, connect: Connect) -> None:
        """The session is gone with them; the client goes on with another."""
        with RedisServer() as server:
            client = connect(server.url, leases="session", ttl=20.0)
            leases = [client.lock(name).acquire() for name in ("x", "y")]
            for lease in leases:
                lease.extend()
            server.restart(crash=True)
            client.ping()
            assert all(lease.wait_lost(PATIENCE) for lease in leases)
            again = client.lock("x").acquire(timeout=PATIENCE)
            again.extend()
            assert again.token > leases[0].token
            again.release()

    def test_full_memory_does_not_end_leases(self, connect: Connect) -> None:
        """A session is made and leases come into it although the server takes no new data."""
        with RedisServer() as server:
            client = connect(server.url, leases="session", ttl=20.0)
            lease = client.lock("x").acquire()
            with server.connect() as connection:
                connection.call("CONFIG", "SET", "maxmemory", "1")
                lease.extend()
                lease.extend()
                assert lease.held
                assert str(connection.call("GET", LOCK)).startswith("lockkit:session 1 ")
                connection.call("CONFIG", "SET", "maxmemory", "0")
            lease.release()

    def test_without_the_right_to_info_each_lease_is_asked_for(self, connect: Connect) -> None:
        """The client cannot tell whether the server is the same: it stays safe, and saves nothing."""
        with RedisServer() as server:
            with server.connect() as connection:
                connection.call(
                    "ACL", "SETUSER", "u", "on", ">pw", "~*", "&*", "+@all", "-info",
                )  # fmt: skip
            client = connect(f"redis://u:pw@{server.address}/0", leases="session", ttl=20.0)
            lease = client.lock("x").acquire()
            lease.extend()
            with server.connect() as connection:
                connection.call("DEL", LOCK)
            with pytest.raises(lockkit.LockLost):
                lease.extend()


_HOLDER = r"""
import os, sys, lockkit
client = lockkit.connect(sys.argv[1], leases="session", ttl=3.0)
leases = [client.lock(name).acquire() for name in ("x", "y")]
lost = [lease.on_lost(lambda lease, reason: os.write(1, b"lost\n")) for lease in leases]
for lease in leases:
    lease.extend()
print("held", flush=True)
sys.stdin.readline()
print([lease.held for lease in leases], flush=True)
again = client.lock("z").acquire(timeout=60)
again.extend()
print("again", flush=True)
sys.stdin.readline()
"""


class TestHolderThatGoesAway:
    """The locks of a client whose heartbeats end are free after its ttl."""

    @pytest.mark.parametrize("fault", ["kill", "stop"])
    def test_next_client_gets_all_its_locks(
        self, server: RedisServer, redis: Keyspace, connect: Connect, fault: str
    ) -> None:
        """Killed or stopped; one that goes on finds its leases lost, and begins another session."""
        other = connect(server.url)
        with subprocess.Popen(
            [sys.executable, "-c", _HOLDER, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            try:
                assert holder.stdout is not None
                assert holder.stdin is not None
                assert holder.stdout.readline() == "held\n"
                before = max(holder.token or 0 for name in "xy" for holder in other.holders(name))
                (session,) = sessions(redis)
                assert busy(other.lock("x"))
                holder.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

                later = [other.lock(name).acquire(timeout=PATIENCE) for name in "xy"]

                assert all(lease.token > before for lease in later)
                assert session not in sessions(redis)
                if fault == "stop":
                    holder.send_signal(signal.SIGCONT)
                    print(file=holder.stdin, flush=True)
                    said = [holder.stdout.readline() for _ in range(4)]
                    assert sorted(said) == ["[False, False]\n", "again\n", "lost\n", "lost\n"]
                    assert session not in sessions(redis)
                for lease in later:
                    lease.release()
            finally:
                holder.kill()
