"""
Sessions: the etcd leases that the keys of a client hang on.

One session per client and ttl, kept alive while anything of it is held or waited for. A client that asks for the same
lock again while it holds it needs a second one for that: the id of the session is the last part of the key.

What a session must not do is keep something alive that nobody wants any more:

- The key of a lock that is not renewed (``renew=False``, ``max_hold``, a dropped lease) beside others that are. Each
  key has a time until which it is wanted (`Contender.until`), and whoever keeps the session alive removes what is
  overdue.
- A key that is created late. A sends "create", the member hangs, A gives up or asks another member; when the first
  one goes on, it creates the key, and nobody knows of it. So a session with such a request is *retired*: never kept
  alive again. It ends within one ttl, and takes the unknown key with it; a create that comes even later finds no
  lease. What is held in it is moved to another session by the next renewal: a ``put`` with another lease leaves the
  key and its ``create_revision``, and so the token, as they are.
"""

from __future__ import annotations

import logging
from math import ceil, inf
from typing import TYPE_CHECKING

from lockkit.backends import _etcd_rpc_pb2 as rpc
from lockkit.backends._etcd_cluster import CALL_SECONDS
from lockkit.backends._etcd_errors import LeaseEnded
from lockkit.backends._etcd_link import GRANT, KEEP_ALIVE, REVOKE
from lockkit.errors import LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lockkit.backend import Host
    from lockkit.backends._etcd_cluster import Cluster
    from lockkit.runtime import Event

__all__ = ["Contender", "Session", "Sessions", "whole_seconds"]

log = logging.getLogger("lockkit")

STALE_SHARE = 0.1
"""A session is kept alive before it takes a lock if this share of its ttl has passed since it last was. A new lease has
at least the rest; larger gives it less time, smaller asks more often (a round trip, without a write)."""

CLOSE_SECONDS = 1.0
"""For each session when a client is closed. Longer delays the end when the cluster is gone; then the ttl does it."""


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
        retired: It takes no new key and is not kept alive.
        ended: It is gone, and all its keys with it.
        names: Whose key has this session's id in it, by lock name.
        members: Whose key hangs on it.
    """

    __slots__ = ("anchor", "ended", "id", "keep_at", "members", "names", "retired", "seconds", "ttl")

    def __init__(self, lease_id: int, seconds: int, ttl: float, anchor: float) -> None:
        """Begin, with nothing in it."""
        self.id = lease_id
        self.seconds = seconds
        self.ttl = ttl
        self.retired = False
        self.ended = False
        self.names: dict[str, Contender] = {}
        self.members: set[Contender] = set()
        self.anchor = anchor
        self.keep_at = anchor + ttl / 3

    def started_anew(self, anchor: float) -> None:
        """Count its ttl from `anchor` on."""
        self.anchor = max(self.anchor, anchor)
        self.keep_at = self.anchor + self.ttl / 3

    def is_usable(self, now: float) -> bool:
        """Tell whether it may take a key."""
        return not self.retired and not self.ended and now < self.anchor + self.ttl

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
        revision: Its ``create_revision``, the token; 0 as long as that is not known.
        until: Until when the key is wanted, client monotonic clock.
        adrift: Nobody knows which session the key hangs on: its move was not answered.
        before: Key of the contender in front of it.
        entered: Set when the request that creates the key has been answered or given up.
        wake: Of the request that waits with it.
        watch_id: Of the watch on `before`; 0 if there is none.
        watched: The key that is watched.
    """

    __slots__ = (
        "adrift", "before", "entered", "home", "key", "name", "owner", "prefix", "revision", "session", "until",
        "value", "wake", "watch_id", "watched",
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
        self.revision = 0
        self.until = inf
        self.adrift = False
        self.before = b""
        self.entered = entered
        self.wake: Event | None = None
        self.watch_id = 0
        self.watched = b""

    def doubt(self) -> None:
        """Have the session retired: a request of this contender may be carried out late."""
        if self.session is not None:
            self.session.retired = True

    @property
    def guard(self) -> rpc.Compare:
        """What is true only while the key is this contender's."""
        if self.revision:
            return rpc.Compare(target=rpc.Compare.CREATE, key=self.key, create_revision=self.revision)
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

    async def join(self, contender: Contender, seconds: int) -> Session:
        """
        Give a contender its session, in which nobody else of this client contends for the lock.

        Raises:
            LockError: No session could be opened.
        """

        def take(session: Session) -> bool:
            if contender.name in session.names:
                return False
            session.names[contender.name] = contender
            session.members.add(contender)
            contender.home = contender.session = session
            contender.key = b"%b%x" % (contender.prefix, session.id)
            return True

        return await self._find(seconds, take)

    async def fresh(self, seconds: int) -> Session:
        """
        Give a session for keys that are moved to it.

        Raises:
            LockError: None could be opened.
        """
        return await self._find(seconds, lambda _: True)

    async def _find(self, seconds: int, take: Callable[[Session], bool]) -> Session:
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
                    self._all = [one for one in self._all if one.members or one.is_usable(now)]
            if not mine:
                # One caller opens it, the others wait for that; if it fails they try themselves.
                await opening.wait(CALL_SECONDS)
                continue
            # A caller that is cancelled leaves it running: else a lease would be at the cluster that nobody knows.
            await self._runtime.settle(self._open(seconds, opening), 2 * CALL_SECONDS)

    async def _open(self, seconds: int, opening: Event) -> None:
        """Open a session, and let those go on who wait for that."""
        try:
            session = await self._grant(seconds)
            with self._mutex:
                self._all.append(session)
        finally:
            with self._mutex:
                self._opening.pop(seconds, None)
            opening.set()

    async def _grant(self, seconds: int) -> Session:
        started = self._runtime.now()
        # A second one, should the first answer be lost: with nothing in it, it ends by itself.
        answer = await self._cluster.call(GRANT, rpc.LeaseGrantRequest(TTL=seconds), resend=True)
        if seconds < answer.TTL and seconds not in self._warned:
            self._warned.add(seconds)
            log.warning(
                "etcd keeps locks for %d s instead of the ttl of %d s that was asked for: its shortest lease is "
                "one and a half of its election timeout",
                answer.TTL,
                seconds,
            )
        return Session(answer.ID, seconds, float(answer.TTL), started)

    async def keep_alive(self, session: Session) -> bool:
        """
        Start the ttl of a session anew; False if it has ended.

        Raises:
            LockError: No answer.
        """
        started = self._runtime.now()
        # The others need not ask meanwhile, nor at once if this fails.
        session.keep_at = started + session.ttl / 10
        answer = await self._cluster.call(KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=session.id), resend=True)
        if answer.TTL <= 0:
            self.end(session)
            return False
        session.started_anew(started)
        return True

    def end(self, session: Session) -> None:
        """Take note that a session is gone: whoever holds in it has lost, whoever waits looks again."""
        with self._mutex:
            session.ended = True
            members = [*session.members]
            session.members.clear()
            session.names.clear()
            if session in self._all:
                self._all.remove(session)
        for contender in members:
            if contender.wake is not None:
                contender.wake.set()
            if contender.until < inf:
                self._host.lost(contender.owner, "session")

    def overdue(self, session: Session) -> list[Contender]:
        """List whose key is not wanted any more."""
        now = self._runtime.now()
        with self._mutex:
            return [contender for contender in session.members if contender.until <= now]

    def move(self, contender: Contender, session: Session) -> None:
        """Take note that a key hangs on another session now."""
        with self._mutex:
            if contender.session is not None:
                contender.session.members.discard(contender)
            contender.session = session
            contender.adrift = False
            session.members.add(contender)

    def leave(self, contenders: Iterable[Contender]) -> None:
        """Forget contenders whose keys are gone."""
        with self._mutex:
            for contender in contenders:
                if contender.home is not None and contender.home.names.get(contender.name) is contender:
                    del contender.home.names[contender.name]
                if contender.session is not None:
                    contender.session.members.discard(contender)

    def is_last(self, contender: Contender) -> bool:
        """Tell whether nothing else hangs on its session, which is retired."""
        with self._mutex:
            session = contender.session
            return session is not None and session.retired and session.members <= {contender}

    async def revoke(self, session: Session, *, seconds: float = CALL_SECONDS) -> None:
        """
        End a session, and all its keys with it. Whatever is created in it late is refused.

        Raises:
            LockError: No answer.
        """
        try:
            await self._cluster.call(REVOKE, rpc.LeaseRevokeRequest(ID=session.id), resend=True, seconds=seconds)
        except LeaseEnded as ended:
            log.debug("session %x: %s", session.id, ended)
        self.end(session)

    async def close(self) -> None:
        """End all sessions, best effort: what is left ends by its ttl."""
        with self._mutex:
            now = self._runtime.now()
            sessions = [one for one in self._all if not one.ended and now < one.anchor + one.ttl]
        for session in sessions:
            try:
                await self.revoke(session, seconds=CLOSE_SECONDS)
            except LockError as error:
                log.debug("session %x is left to its ttl: %s", session.id, error)
                return
