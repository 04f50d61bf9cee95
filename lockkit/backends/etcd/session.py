"""
Sessions: the etcd leases that the keys of a client hang on.

One session per client and ttl, kept alive while anything of it is held or waited for. A client that asks for the same
lock again while it holds it needs a second one for that: the id of the session is the last part of the key.

What a session must not do is keep something alive that nobody wants any more:

- The key of a lock that is not renewed (``renew=False``, ``max_hold``, a dropped lease) beside others that are. Each
  key has a time until which it is wanted (`Contender.until`), and every heartbeat first deletes what is overdue.
- A key that is created late. A sends "create", the member hangs, A gives up or asks another member; when the first
  one goes on, it creates the key, and nobody knows of it. So a session with such a request is *retired*: it takes no
  new key. If nothing else is in it, the client revokes it; a create that comes later finds no lease. If something is,
  that stays where it is, and every heartbeat of the session first deletes the key that may have come late, for as long
  as the session lives (`Session.ghosts`). What is held never depends on what became of a request of another lock.

Rule: a session that has a member is never revoked, and whoever relies on a session is a member before anything is
sent. Both are decided under one mutex (`Sessions.close_if_unused`).
"""

from __future__ import annotations

import logging
from math import ceil, inf
from typing import TYPE_CHECKING

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import settled
from lockkit.backends.etcd.connection import GRANT, KEEP_ALIVE, REVOKE
from lockkit.backends.etcd.errors import LeaseEnded
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from lockkit.backend import Host
    from lockkit.backends.etcd.cluster import Cluster
    from lockkit.runtime import Event

__all__ = ["Contender", "Session", "Sessions", "whole_seconds"]

log = logging.getLogger("lockkit")

STALE_SHARE = 0.1
"""A session is kept alive before it takes a lock if this share of its ttl has passed since it last was. A new lease has
at least the rest; larger gives it less time, smaller asks more often (a round trip, without a write)."""

CLOSE_SECONDS = 0.2
"""For each session that is left when a client is closed; the first that is not answered ends it. Longer delays the end
when the cluster hangs; shorter leaves sessions of a slow one to their ttl."""


def whole_seconds(ttl: float) -> int:
    """Round a ttl up to etcd's unit."""
    return max(1, ceil(ttl - 1e-6))  # 0.1 * 30 is a little above 3


class Session:
    """
    One lease at the cluster. Times are the client's monotonic clock.

    Attributes:
        id: At the cluster.
        seconds: The ttl that was asked for.
        ttl: The ttl that it has, seconds: the cluster may have raised it.
        anchor: Before the last request that started its ttl anew, of those that were answered.
        keep_at: When whoever waits should keep it alive.
        retired: It takes no new key: one may be created late in it.
        closing: Nobody is in it; it is being revoked.
        ended: It is gone, and all its keys with it.
        names: Whose key has this session's id in it, by lock name.
        members: Whose key hangs on it, or may.
        ghosts: Given up, but their keys may be created late.
    """

    __slots__ = (
        "anchor", "closing", "ended", "ghosts", "id", "keep_at", "members", "names", "retired", "seconds", "ttl",
    )  # fmt: skip

    def __init__(self, lease_id: int, seconds: int, ttl: float, anchor: float) -> None:
        """Begin, with nothing in it."""
        self.id = lease_id
        self.seconds = seconds
        self.ttl = ttl
        self.retired = False
        self.closing = False
        self.ended = False
        self.names: dict[str, Contender] = {}
        self.members: set[Contender] = set()
        self.ghosts: set[Contender] = set()
        self.anchor = anchor
        self.keep_at = anchor + ttl / 3

    def is_wanted(self, now: float) -> bool:
        """Tell whether anybody in it holds or waits."""
        return any(one.until > now for one in self.members)

    def put_off(self, now: float) -> None:
        """Have nobody else keep it alive meanwhile, nor at once if this fails."""
        self.keep_at = now + self.ttl / 10

    def started_anew(self, anchor: float) -> None:
        """Count its ttl from `anchor` on."""
        self.anchor = max(self.anchor, anchor)
        self.keep_at = self.anchor + self.ttl / 3

    @property
    def ends_at(self) -> float:
        """When the cluster may end it, if it is not kept alive before."""
        return self.anchor + self.ttl

    @property
    def is_over(self) -> bool:
        """Whether nothing may rely on it any more."""
        return self.closing or self.ended

    def is_usable(self, now: float) -> bool:
        """Tell whether it may take a key."""
        return not self.retired and not self.is_over and now < self.ends_at

    def is_stale(self, now: float) -> bool:
        """Tell whether it should be kept alive before a lease of it is given out."""
        return now >= self.anchor + self.ttl * STALE_SHARE

    def fits(self, seconds: int) -> bool:
        """Tell whether it is one for this ttl."""
        return seconds in {self.seconds, int(self.ttl)}


class Contender:
    """
    One key of ours: a place in the queue of a lock, or the lock itself.

    Attributes:
        name: Of the lock.
        owner: Of the acquisition.
        prefix: Of the keys of all contenders for the lock.
        value: Of the key: owner and metadata.
        key: Its name, known once it has a session.
        home: The session whose id is in the key.
        session: The session that the key hangs on.
        target: The session that the key is being moved to. Not None after a move that was not answered: it hangs on the
            one or on the other.
        revision: Its ``create_revision``, the token; 0 as long as that is not known.
        modified: Its ``mod_revision``, which each move changes.
        until: Until when the key is wanted, client monotonic clock; ``-inf`` when it was given up.
        doubted: The request that creates the key may be carried out late.
        before: Key of the contender in front of it.
        entering: The request that creates the key is under way until `entered` is set.
        entered: Set when that has been answered or given up.
        wake: Of the request that waits with it.
        watch_id: Of the watch on `before`; 0 if there is none.
        watched: The key that is watched.
    """

    __slots__ = (
        "before", "doubted", "entered", "entering", "home", "key", "modified", "name", "owner", "prefix", "revision",
        "session", "target", "until", "value", "wake", "watch_id", "watched",
    )  # fmt: skip

    def __init__(self, name: str, owner: str, prefix: bytes, value: bytes, entered: Event) -> None:
        """Have no key yet."""
        self.name = name
        self.owner = owner
        self.prefix = prefix
        self.value = value
        self.key = b""
        self.home: Session | None = None
        self.session: Session | None = None
        self.target: Session | None = None
        self.revision = 0
        self.modified = 0
        self.until = inf
        self.doubted = False
        self.before = b""
        self.entering = False
        self.entered = entered
        self.wake: Event | None = None
        self.watch_id = 0
        self.watched = b""

    def doubt(self) -> None:
        """Take note that the request that creates the key may be carried out late."""
        self.doubted = True
        if self.home is not None:
            self.home.retired = True

    def created(self, revision: int) -> None:
        """Take note of the revision at which the key was created."""
        self.revision = self.modified = revision

    @property
    def guard(self) -> rpc.Compare:
        """What is true only while the key is the one that was granted."""
        return rpc.Compare(target=rpc.Compare.CREATE, key=self.key, create_revision=self.revision)

    @property
    def mark(self) -> rpc.Compare:
        """What is true while the key is this contender's, whenever it was created."""
        return rpc.Compare(target=rpc.Compare.VALUE, key=self.key, value=self.value)


class Sessions:
    """The sessions of one client. Threads may share it."""

    def __init__(self, host: Host, cluster: Cluster) -> None:
        """
        Open none yet.

        Args:
            host: The engine's side.
            cluster: To ask.
        """
        self._host = host
        self._runtime = host.runtime
        self._cluster = cluster
        self._mutex = host.runtime.mutex()
        self._all: list[Session] = []
        self._opening: dict[int, Event] = {}
        self._warned: set[int] = set()

    async def join(self, contender: Contender, seconds: int, answer_by: float) -> None:
        """
        Give a contender its session, in which nobody else of this client contends for the lock.

        Raises:
            LockError: No session could be opened.
        """

        def take(session: Session) -> bool:
            if contender.name in session.names:
                return False
            contender.home = contender.session = session
            contender.key = b"%b%x" % (contender.prefix, session.id)
            session.names[contender.name] = contender
            session.members.add(contender)
            return True

        await self._find(seconds, take, answer_by)

    async def join_moving(self, contenders: Collection[Contender], seconds: int, answer_by: float) -> Session:
        """
        Give a session for keys that are to be moved to it. They are members of both until `moved`.

        Raises:
            LockError: None could be opened.
        """

        def take(session: Session) -> bool:
            session.members.update(contenders)
            for contender in contenders:
                contender.target = session
            return True

        return await self._find(seconds, take, answer_by)

    async def _find(self, seconds: int, take: Callable[[Session], bool], answer_by: float) -> Session:
        while True:
            with self._mutex:
                now = self._runtime.now()
                for session in self._all:
                    if session.fits(seconds) and session.is_usable(now) and take(session):
                        return session
                opening = self._opening.get(seconds)
                mine = opening is None
                if opening is None:
                    opening = self._opening[seconds] = self._runtime.event()
                    # Those that have ended unnoticed.
                    self._all = [one for one in self._all if now < one.ends_at or one.is_wanted(now)]
            if mine:
                # A caller that is cancelled leaves it running: else a lease would be at the cluster that nobody knows.
                await settled(self._runtime, self._open(seconds, opening, answer_by), answer_by)
            # One caller opens it, the others wait for that; if it fails they try themselves.
            elif not await opening.wait(max(0.0, answer_by - now)):
                self._opened(seconds, opening)  # should an interrupt have kept its opener from saying so
                raise BackendUnavailable("etcd did not grant a lease in time")

    async def _open(self, seconds: int, opening: Event, answer_by: float) -> None:
        """Open a session, and let those go on who wait for that."""
        try:
            session = await self._grant(seconds, answer_by)
            with self._mutex:
                self._all.append(session)
        finally:
            self._opened(seconds, opening)
            opening.set()

    def _opened(self, seconds: int, opening: Event) -> None:
        with self._mutex:
            if self._opening.get(seconds) is opening:
                del self._opening[seconds]

    async def _grant(self, seconds: int, answer_by: float) -> Session:
        started = self._runtime.now()
        # A second one, should the first answer be lost: with nothing in it, it ends by itself.
        request = rpc.LeaseGrantRequest(TTL=seconds)
        answer = await self._cluster.call(GRANT, request, resend=True, answer_by=answer_by)
        if seconds < answer.TTL and seconds not in self._warned:
            self._warned.add(seconds)
            log.warning(
                "etcd keeps locks for %d s instead of the ttl of %d s that was asked for: its shortest lease is "
                "one and a half of its election timeout",
                answer.TTL,
                seconds,
            )
        return Session(answer.ID, seconds, float(answer.TTL), started)

    async def keep_alive(self, session: Session, answer_by: float) -> bool:
        """
        Start the ttl of a session anew; False if it has ended.

        Raises:
            LockError: No answer.
        """
        started = self._runtime.now()
        request = rpc.LeaseKeepAliveRequest(ID=session.id)
        answer = await self._cluster.call(KEEP_ALIVE, request, resend=True, answer_by=answer_by)
        if answer.TTL <= 0:
            self.end(session)
        else:
            session.started_anew(started)
        return not session.ended

    def end(self, session: Session) -> None:
        """Take note that a session is gone: whoever holds in it has lost, whoever waits looks again."""
        with self._mutex:
            session.ended = True
            members = [*session.members]
            session.members.clear()
            session.ghosts.clear()
            session.names.clear()
            if session in self._all:
                self._all.remove(session)
        for contender in members:
            if contender.wake is not None:
                contender.wake.set()
            if contender.until < inf:
                self._host.lost(contender.owner, "session")

    def overdue(self, session: Session) -> list[Contender]:
        """List whose key is not wanted any more, or must not come."""
        now = self._runtime.now()
        with self._mutex:
            return [*session.ghosts, *(contender for contender in session.members if contender.until <= now)]

    def moved(self, contender: Contender, target: Session) -> None:
        """Take note that a key surely hangs on this session now, and on no other."""
        with self._mutex:
            self._forget(contender)
            contender.session, contender.target = target, None
            target.members.add(contender)

    def leave(self, contenders: Iterable[Contender]) -> None:
        """Forget contenders whose keys are gone, but not what may be created late."""
        with self._mutex:
            for contender in contenders:
                self._forget(contender)
                home = contender.home
                if home is None:
                    continue
                if home.names.get(contender.name) is contender:
                    del home.names[contender.name]
                if contender.doubted and not home.ended:
                    home.ghosts.add(contender)

    def _forget(self, contender: Contender) -> None:
        for session in self._all:
            session.members.discard(contender)

    def close_if_unused(self, session: Session) -> bool:
        """Take a session out of use if nobody in it holds or waits any more; tell whether."""
        with self._mutex:
            session.closing = session.closing or not session.is_wanted(self._runtime.now())
            return session.closing

    async def revoke(self, session: Session, answer_by: float) -> None:
        """
        End a session, and all its keys with it. Whatever is created in it late is refused.

        Raises:
            LockError: No answer.
        """
        try:
            request = rpc.LeaseRevokeRequest(ID=session.id)
            await self._cluster.call(REVOKE, request, resend=True, answer_by=answer_by)
        except LeaseEnded as ended:
            log.debug("session %x: %s", session.id, ended)
        self.end(session)

    async def close(self) -> None:
        """End all sessions, best effort: what is left ends by its ttl."""
        with self._mutex:
            now = self._runtime.now()
            sessions = [one for one in self._all if now < one.ends_at]
        for session in sessions:
            try:
                await self.revoke(session, self._runtime.now() + CLOSE_SECONDS)
            except LockError as error:
                log.debug("session %x is left to its ttl: %s", session.id, error)
                return
