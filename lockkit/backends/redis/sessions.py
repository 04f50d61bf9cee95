"""
Sessions: all leases of a client with the same ttl live by one key, the session, which one command renews.

A lease begins as any other, by itself. Its first renewal takes it into the session of its ttl; from then on a renewal
is one heartbeat for all of them, whatever their number (``scripts/session.lua``). What is released before its first
renewal, or is never renewed, costs what it did before, and ends by itself as it did before.

What a heartbeat does not show, and how the client finds out all the same:

- *A lease was ended by force.* ``break.lua`` writes its owner into the session.
- *The server has lost leases and still has the session*, after a restart or a failover. Each heartbeat returns an
  identity of the server's data. A lease counts as renewed only if the server confirmed it under the same identity;
  otherwise the client asks for each one.
- *Somebody removed the lock's key by hand, or the server evicted it.* The key of the lock has a life of its own,
  `KEY_TTLS` ttls. Before half of it is over, the client asks for the lease itself, and extends that life.
- *The engine does not want a lease any more*, though it has not been released: ``max_hold`` is over, it was dropped, or
  nobody answered the release. The heartbeats for others must not keep it. Once it has not been renewed for
  `LEAVE_SHARE` of its ttl, the next one takes it out of the session, and it ends a ttl after the engine last asked.

The same requirement as for any lease holds throughout: the server ends a lease no earlier than a ttl after the moment
before the renewal was sent that its client believes in. A heartbeat never creates a session; one that has ended never
returns, because the next has another id. And each request that moves a lease has a number, which the server keeps: a
request that was not answered and arrives late changes nothing after a later one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from lockkit.backend import Gone, Renewed, Unknown
from lockkit.backends.redis.keys import SESSION_SPACE, LockKeys, fence_milliseconds, ttl_milliseconds
from lockkit.backends.redis.resp import bulk
from lockkit.backends.redis.script import Script
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from lockkit.backend import Grant, Renewal
    from lockkit.backends.redis.resp import Reply
    from lockkit.backends.redis.topology import Topology
    from lockkit.runtime import Runtime
    from lockkit.units import Instant, Seconds

__all__ = ["SessionLease", "Sessions"]

KEY_TTLS = 10
"""Life of the key of a lock in a session, as a multiple of the ttl. Longer keeps out clients of other kinds for longer
after the holder's death; shorter asks for each lease more often."""

LEAVE_SHARE = 0.45
"""Share of its ttl after which a lease that was not renewed leaves its session. The engine renews after a third. Larger
keeps a lease that nobody wants for longer; smaller takes out one whose renewal is late."""

LOOK_SHARE = 1 / 6
"""Share of the ttl between two looks for such leases. Longer finds them later; shorter looks at each lease oftener."""

BATCH = 100
"""Leases that one script takes in. More blocks the server for longer (a hundred: 0.2 ms), fewer sends more scripts."""

CALLS_MAX = 50
"""Scripts that are sent together. With more, a renewal that asks for very many leases takes longer than one call may;
fewer takes more round trips."""

ROUNDS = 3
"""How often one renewal asks the server: for all; for those whose session or server is a new one; and once more."""

_SESSION = Script("session", keys=["session"], arguments=8)

_DONE, _SHARED = 1, 2
_GONE: Mapping[object, Gone] = {0: Gone("gone"), -1: Gone("taken"), -2: Gone("broken"), -4: Gone("session")}

_ENDED = _GONE[-4]
_UNDECIDED = Unknown(BackendUnavailable("another request for the lease came between, or sessions end at once"))
_ALONE = Renewed()  # a value of its own: to be renewed by itself

Ordinary: TypeAlias = "Callable[[Sequence[Grant]], Awaitable[Sequence[Renewal]]]"
CleanUp: TypeAlias = "Callable[[Sequence[Grant]], Awaitable[None]]"


class SessionLease(LockKeys):
    """
    The keys of a lock, and what is known about one lease of it. Times are the client's monotonic clock.

    Attributes:
        owner: Of the lease.
        session: Of which it is; None if it is in none.
        number: Of the last request for it.
        settled: That request has been answered.
        may_read: It may be a reader's lease by now, so the client asks for it at each renewal.
        identity: The server's data of which the server said that it has the lease.
        ask_at: When to ask for the lease itself.
        asked_at: When the engine last wanted it renewed.
    """

    __slots__ = ("ask_at", "asked_at", "identity", "may_read", "number", "owner", "session", "settled")

    def __init__(self, keys: LockKeys, owner: str) -> None:
        """Be in no session."""
        self.lock, self._prefix, self._packed = keys.lock, keys._prefix, keys._packed  # noqa: SLF001 - of the same class
        self.owner = owner
        self.session: Session | None = None
        self.number = 0
        self.settled = True
        self.may_read = False
        self.identity = b""
        self.ask_at = self.asked_at = -inf

    def relies_on(self, session: Session) -> bool:
        """Tell whether a heartbeat of a session is enough to renew it."""
        return self.session is session and self.settled and not self.may_read


@dataclass(slots=True, eq=False)
class Session:
    """
    One session. Times are the client's monotonic clock.

    Attributes:
        key: At the server.
        ttl: Seconds.
        anchor: Just before the last heartbeat that was answered.
        ended: The server says so, or a ttl has passed since.
        members: The leases in it, and those that may be: the answer is missing.
        looked_at: When lockkit last looked for those that nobody wants.
        read: How many bytes of its value have been read.
        identity: Of the server's data then.
        broken: The owners in them: of leases that were ended by force.
    """

    key: str
    ttl: Seconds
    anchor: Instant
    ended: bool = False
    members: set[SessionLease] = field(default_factory=set)
    looked_at: Instant = -inf
    read: int = 0
    identity: bytes = b""
    broken: set[bytes] = field(default_factory=set)

    def is_over(self, now: Instant) -> bool:
        """Tell whether it may have ended at the server."""
        self.ended = self.ended or now >= self.anchor + self.ttl
        return self.ended

    def heard(self, sent: Instant, call: _Call, identity: bytes, news: bytes) -> None:
        """Take the answer to a heartbeat."""
        self.anchor = max(self.anchor, sent)
        # Other data may have a shorter value.
        self.read = max(self.read, call.read + len(news)) if identity == self.identity else 0
        self.identity = identity
        self.broken.update(news.split())

    def unwanted(self, now: Instant) -> list[SessionLease]:
        """Find the leases that are to leave, from time to time."""
        if now < self.looked_at + self.ttl * LOOK_SHARE:
            return []
        self.looked_at = now
        until = now - self.ttl * LEAVE_SHARE
        return [lease for lease in self.members if lease.asked_at < until]


@dataclass(slots=True)
class _Call:
    """
    One script: a heartbeat, and leases that come into the session or leave it, each with the number of the request.

    Attributes:
        session: Whose.
        packed: Its keys and arguments.
        read: How many bytes of the session's value had been read.
        is_new: It makes the session.
        staying: Leases that are in it already, so that the heartbeat is enough.
        coming: Leases that come in.
        going: Leases that go out.
    """

    session: Session
    packed: bytes
    read: int
    is_new: bool
    staying: list[SessionLease]
    coming: list[tuple[SessionLease, int]]
    going: list[tuple[SessionLease, int]]


class Sessions:
    """The sessions of one client: one for each ttl in use."""

    def __init__(self, topology: Topology, prefix: str, runtime: Runtime, gone_channel: bytes, idle_ms: int) -> None:
        """
        Send nothing yet.

        Args:
            topology: Of one server.
            prefix: Of all keys.
            runtime: Of the API in use.
            gone_channel: Of all clients, packed.
            idle_ms: The option ``idle_ttl``, in milliseconds.
        """
        self._topology = topology
        self._prefix = prefix
        self._runtime = runtime
        self._gone_channel = gone_channel
        self._idle_ms = idle_ms
        self._mutex = runtime.mutex()
        self._current: dict[int, Session] = {}

    async def renew(self, grants: Sequence[Grant], ordinary: Ordinary, clean_up: CleanUp) -> list[Renewal]:
        """
        Renew leases, as `LockBackend.renew`.

        Args:
            grants: With a `SessionLease` as their state; or without, of leases that are renewed by themselves.
            ordinary: Renews leases by themselves.
            clean_up: Removes the locks of leases that have ended with their session.
        """
        sent = self._runtime.now()
        outcomes: dict[str, Renewal] = {}
        left = [grant for grant in grants if isinstance(grant.state, SessionLease)]
        for _ in range(ROUNDS):
            if left:
                await self._round(left, sent, outcomes)
                left = [grant for grant in left if grant.owner not in outcomes]
        alone = [
            grant for grant in grants
            if outcomes.get(grant.owner) is _ALONE or not isinstance(grant.state, SessionLease)
        ]  # fmt: skip
        if alone:
            for grant, outcome in zip(alone, await ordinary(alone), strict=True):
                outcomes[grant.owner] = outcome
        ended = [grant for grant in grants if outcomes.get(grant.owner) is _ENDED]
        if ended:
            await clean_up(ended)
        return [outcomes.get(grant.owner, _UNDECIDED) for grant in grants]

    def forget(self, keys: LockKeys) -> None:
        """Note that the server has no lease with these keys any more."""
        if isinstance(keys, SessionLease):
            with self._mutex:
                self._drop(keys)

    def becomes_reader(self, lease: SessionLease) -> None:
        """Note that a request is about to be sent after which the lease may be a reader's, and so in no session."""
        with self._mutex:
            lease.may_read = True

    def _drop(self, lease: SessionLease) -> None:
        for session in self._current.values():
            session.members.discard(lease)
        lease.session = None

    # -- what is sent ------------------------------------------------------------------------------------------------

    async def _round(self, grants: Sequence[Grant], sent: Instant, outcomes: dict[str, Renewal]) -> None:
        """Ask for some leases; those that must be asked for again have no outcome after it."""
        with self._mutex:
            calls = list(self._plan(grants, self._runtime.now(), outcomes))
        replies: list[Reply | LockError] = []
        for start in range(0, len(calls), CALLS_MAX):
            batch = [(call.session.key, call.packed) for call in calls[start : start + CALLS_MAX]]
            answered = await self._topology.run_many(_SESSION, batch)
            replies += answered
            if isinstance(answered[-1], LockError):
                # The server does not answer: do not wait for that as often as there are batches.
                replies += [answered[-1]] * (len(calls) - len(replies))
                break
        with self._mutex:
            for call, reply in zip(calls, replies, strict=True):
                self._apply(call, reply, sent, outcomes)

    def _plan(self, grants: Sequence[Grant], now: Instant, outcomes: dict[str, Renewal]) -> Iterator[_Call]:
        """Decide what to send. Under the mutex."""
        by_ttl: dict[int, list[SessionLease]] = {}
        for grant in grants:
            lease: SessionLease = grant.state
            lease.asked_at = now
            if lease.session is not None and lease.settled and lease.session.is_over(now):
                outcomes[lease.owner] = _ENDED
            else:
                by_ttl.setdefault(ttl_milliseconds(grant.ttl), []).append(lease)
        for ttl_ms, leases in by_ttl.items():
            session = self._current.get(ttl_ms)
            is_new = session is None or session.is_over(now)
            if session is None or is_new:
                session = Session(f"{self._prefix}+{SESSION_SPACE}:{self._runtime.owner()}", ttl_ms / 1000, now)
            staying: list[SessionLease] = []
            coming: list[SessionLease] = []
            for lease in leases:
                stays = lease.relies_on(session) and now < lease.ask_at
                (staying if stays else coming).append(lease)
            going = [] if is_new else session.unwanted(now)
            for start in range(0, max(1, len(coming)), BATCH):
                yield self._call(session, staying, coming[start : start + BATCH], going, now, is_new=is_new)
                # The first heartbeat is enough for these.
                staying, going, is_new = [], [], False

    def _call(
        self,
        session: Session,
        staying: list[SessionLease],
        coming: list[SessionLease],
        going: list[SessionLease],
        now: Instant,
        *,
        is_new: bool,
    ) -> _Call:
        ttl_ms = ttl_milliseconds(session.ttl)
        keep_ms = ttl_ms * KEY_TTLS
        entering: list[object] = []
        for lease in coming:
            lease.number += 1
            lease.settled = False
            entering += (lease.lock, lease.owner, lease.number)
            session.members.add(lease)
        leaving: list[object] = []
        for lease in going:
            lease.number += 1
            lease.settled = False
            left_ms = math.ceil((lease.asked_at + session.ttl - now) * 1000)
            leaving += (lease.lock, lease.owner, lease.number, max(1, left_ms))
        arguments = ttl_ms, int(is_new), session.read, keep_ms, fence_milliseconds(keep_ms, self._idle_ms)
        packed = bulk(session.key) + b"".join(map(bulk, arguments)) + self._gone_channel
        packed += bulk(json.dumps(entering)) + bulk(json.dumps(leaving))
        numbered = [[(lease, lease.number) for lease in leases] for leases in (coming, going)]
        return _Call(session, packed, session.read, is_new, staying, *numbered)

    # -- what is answered --------------------------------------------------------------------------------------------

    def _apply(self, call: _Call, reply: Reply | LockError, sent: Instant, outcomes: dict[str, Renewal]) -> None:
        """Take the answer to one call. A lease without an outcome is asked for again. Under the mutex."""
        session = call.session
        if isinstance(reply, LockError):
            outcomes.update({lease.owner: Unknown(reply) for lease in call.staying})
            outcomes.update({lease.owner: Unknown(reply) for lease, _ in call.coming})
            return
        answer, *found = cast("list[Any]", reply)
        if answer == 0 or session.ended:
            # Also if it has ended for the client, by its clock, while this was under way: its leases count as lost, so
            # no other may come to rely on it. Those that come in are asked for again, with another session.
            session.ended = True
            outcomes.update({lease.owner: _ENDED for lease in call.staying})
            return
        identity, news, *results = found
        session.heard(sent, call, identity, news)
        if call.is_new:
            self._begin(session)
        self._keep(session, call.staying, identity, outcomes)
        for (lease, number), result in zip(call.coming, results, strict=False):
            if lease.number == number:
                self._came(session, lease, result, outcomes)
                lease.identity = identity
        for lease, number in call.going:
            if lease.number == number:
                lease.settled = True
                self._drop(lease)

    def _begin(self, session: Session) -> None:
        """Use a session that the server has, and forget those that are over."""
        now = self._runtime.now()
        self._current = {ttl_ms: one for ttl_ms, one in self._current.items() if not one.is_over(now)}
        self._current[ttl_milliseconds(session.ttl)] = session

    def _keep(
        self, session: Session, staying: Sequence[SessionLease], identity: bytes, outcomes: dict[str, Renewal]
    ) -> None:
        """Apply a heartbeat to leases that were in the session when it was sent."""
        for lease in staying:
            if session.broken and lease.owner.encode() in session.broken:
                outcomes[lease.owner] = _GONE[-2]
                self._drop(lease)
            elif not identity or lease.identity != identity:
                lease.ask_at = -inf
            elif lease.relies_on(session):  # else another request for it has been sent meanwhile
                outcomes[lease.owner] = Renewed()

    def _came(self, session: Session, lease: SessionLease, result: object, outcomes: dict[str, Renewal]) -> None:
        """Apply the answer to the last request for a lease, before which no later one can have come."""
        self._drop(lease)
        if result == _DONE:
            lease.session, lease.settled = session, True
            session.members.add(lease)
            share = self._runtime.random.uniform(0.25, 0.5)  # so that those that came together are not asked for so
            lease.ask_at = self._runtime.now() + session.ttl * KEY_TTLS * share
            outcomes[lease.owner] = Renewed()
        else:
            outcomes[lease.owner] = _ALONE if result == _SHARED else _GONE[result]
