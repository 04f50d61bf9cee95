"""
Sessions: the etcd leases that a client's keys are attached to.

One session per client and ttl, kept alive while anything in it is held or waited for. A client that asks for a lock
that it holds or waits for already needs a second one: the id of the session is the last part of the key. The keys of
readers and permits have the owner in them, too, so all of them share one.

A session must not keep alive what nobody wants any more:

- The key of a lock that is not renewed (``renew=False``, ``max_hold``, a dropped lease) beside others that are. Each
  key has a time until which it is wanted (`Contender.wanted_until`), and every heartbeat first deletes what is past it.
- A key that is created late. A sends "create", the member hangs, A gives up or asks another member; when the first one
  goes on, it creates the key, and nobody knows. So a session with such a request is *retired*: it takes no new key, and
  the contender stays in it, unwanted. If the session has nothing else, the client revokes it; a create that comes later
  finds no lease. If it has, that stays where it is, and every heartbeat deletes the key that may have come late, for as
  long as the session lives. What is held never depends on a request for another lock.

Rule: the client never revokes a session that has a wanted contender, and every contender that relies on a session is in
it before anything is sent. Both are decided under one mutex (`Sessions.revoke_if_unused`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import ceil, inf
from typing import TYPE_CHECKING

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd import transactions, values
from lockkit.backends.etcd.cluster import settle_by
from lockkit.backends.etcd.connection import GRANT, KEEP_ALIVE, REVOKE, TXN
from lockkit.backends.etcd.errors import LeaseEnded
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from lockkit.backend import Host, Mode
    from lockkit.backends.etcd.cluster import Cluster
    from lockkit.runtime import Event
    from lockkit.units import Instant

__all__ = ["Contender", "Session", "Sessions", "round_up"]

log = logging.getLogger("lockkit")

STALE_SHARE = 0.1
"""Share of a session's ttl since its last heartbeat from which on it gets another one before it grants a lock. A new
lease has at least the rest; larger gives it less time, smaller costs more round trips (without a write)."""

CLOSE_SECONDS = 0.2
"""Longest time to revoke one session when a client is closed; after the first without an answer, the others are left.
Longer delays the close when the cluster hangs; shorter leaves sessions of a slow cluster to their ttl."""


def round_up(ttl: float) -> int:
    """Round a ttl up to etcd's unit, whole seconds."""
    return max(1, ceil(ttl - 1e-6))  # 0.1 * 30 is a little above 3


@dataclass(slots=True, eq=False)
class Session:
    """
    One etcd lease. Times are the client's monotonic clock.

    Attributes:
        id: Of the lease.
        requested_ttl: Seconds.
        ttl: Seconds; the cluster may have raised it.
        anchor: Just before the last request that started its ttl anew, of those that were answered.
        keep_alive_at: When a waiter should send a heartbeat.
        retired: It takes no new key: one may be created late in it.
        closing: Nothing in it is wanted; it is being revoked.
        ended: It is gone, and all its keys with it.
        by_name: The writer whose key has this session's id in it, by lock name.
        contenders: Those whose key is attached to it, or may be, or may still be created.
    """

    id: int
    requested_ttl: int
    ttl: float
    anchor: float
    keep_alive_at: float = field(init=False)
    retired: bool = False
    closing: bool = False
    ended: bool = False
    by_name: dict[str, Contender] = field(default_factory=dict)
    contenders: set[Contender] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Plan the first heartbeat."""
        self.keep_alive_at = self.anchor + self.ttl / 3

    def was_kept_alive(self, anchor: Instant) -> None:
        """Count its ttl from `anchor` on."""
        self.anchor = max(self.anchor, anchor)
        self.keep_alive_at = self.anchor + self.ttl / 3

    def delay_heartbeat(self, now: float) -> None:
        """Have no other waiter send a heartbeat meanwhile, nor at once if this one fails."""
        self.keep_alive_at = now + self.ttl / 10

    @property
    def ends_at(self) -> float:
        """When the cluster may end it, unless it gets a heartbeat before."""
        return self.anchor + self.ttl

    @property
    def is_over(self) -> bool:
        """Whether nothing may rely on it any more."""
        return self.closing or self.ended

    def takes_keys(self, ttl: int, now: float) -> bool:
        """Tell whether keys of this ttl may be attached to it."""
        return self.has_ttl(ttl) and not self.retired and not self.is_over and now < self.ends_at

    def has_ttl(self, ttl: int) -> bool:
        """Tell whether it is one for this ttl."""
        return ttl in {self.requested_ttl, int(self.ttl)}

    def is_stale(self, now: float) -> bool:
        """Tell whether it needs a heartbeat before it grants a lock."""
        return now >= self.anchor + self.ttl * STALE_SHARE

    def is_wanted(self, now: float) -> bool:
        """Tell whether anything in it is held or waited for."""
        return any(one.wanted_until > now for one in self.contenders)


@dataclass(slots=True, eq=False)
class Contender:
    """
    One key of this client: a place in the queue of a lock, or the lock itself.

    Attributes:
        name: Of the lock.
        owner: Of the acquisition.
        prefix: Of the keys of all contenders for the lock.
        value: With which the key is created: owner and metadata.
        wake: Event of the request that waits with it, if it does.
        mode: Beside whom it is to hold the lock.
        key: Its name, known once it has a session. A permit's is another one than that with which it has waited.
        slot_keys: Of a permit that is not granted yet: the keys of which a request that was sent may create one.
        slot: Of a permit that is granted; else None.
        value_now: Of the key, as far as known: `value` until it is updated or downgraded.
        is_rewritten: A request was sent that changes the value.
        home: The session whose id is in the key.
        session: The session that the key is attached to.
        moving_to: The session that the key is being moved to. Not None after a move that was not answered: the key is
            attached to the one or to the other.
        create_revision: The token; 0 until it is known.
        mod_revision: Changes with each move and each change of the value.
        wanted_until: When the key is not wanted any more, client monotonic clock; ``-inf`` once it was given up.
        may_come_late: The request that creates the key was not answered, and may be executed late.
        created: Set when the request that creates the key has been answered or has failed; None before it is sent.
        key_in_front: The one that it waits for; the first of them if there are several.
        behind_front: With several, the first key behind them; else empty.
        seen_at: The revision at which they were there.
        watch_id: Of the watch on that; 0 if there is none.
        watched_key: What is watched.
        note_leases: Ids of the etcd leases, by ttl, of an attempt to write a note that was not answered: the next one
            uses them again.
    """

    name: str
    owner: str
    prefix: bytes
    value: bytes
    wake: Event | None
    mode: Mode = "exclusive"
    key: bytes = b""
    slot_keys: tuple[bytes, ...] = ()
    slot: int | None = None
    value_now: bytes = field(init=False)
    is_rewritten: bool = False
    home: Session | None = None
    session: Session | None = None
    moving_to: Session | None = None
    create_revision: int = 0
    mod_revision: int = 0
    wanted_until: float = inf
    may_come_late: bool = False
    created: Event | None = None
    key_in_front: bytes = b""
    behind_front: bytes = b""
    seen_at: int = 0
    watch_id: int = 0
    watched_key: bytes = b""
    note_leases: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with the value of the creation."""
        self.value_now = self.value

    def set_may_come_late(self) -> None:
        """Note that the request that creates the key may be executed late."""
        self.may_come_late = True
        if self.home is not None:
            self.home.retired = True

    def waits_for(self, seen_at: int, key: bytes, behind: bytes = b"") -> None:
        """Note the key that it waits for, or the range of keys, and a revision at which they were there."""
        self.key_in_front, self.behind_front, self.seen_at = key, behind, seen_at

    def takes_slot(self, slot: int, revision: int) -> None:
        """Note that a permit was granted, with the revision at which its key was created."""
        self.key, self.slot_keys, self.slot = values.slot_key(self.prefix, slot), (), slot
        self.set_revision(revision)

    def set_revision(self, revision: int) -> None:
        """Note the revision at which the key was created."""
        assert revision > 0
        self.create_revision = self.mod_revision = revision

    @property
    def compare_revision(self) -> rpc.Compare:
        """True while the key is the one that was created."""
        return rpc.Compare(target=rpc.Compare.CREATE, key=self.key, create_revision=self.create_revision)

    @property
    def compare_modification(self) -> rpc.Compare:
        """True until the key is moved."""
        return rpc.Compare(target=rpc.Compare.MOD, key=self.key, mod_revision=self.mod_revision)

    @property
    def compare_value(self) -> rpc.Compare:
        """True while the key is this contender's, whenever it was created."""
        return rpc.Compare(target=rpc.Compare.VALUE, key=self.key, value=self.value)


class Sessions:
    """The sessions of one client. Threads may share it."""

    def __init__(self, host: Host, cluster: Cluster) -> None:
        """Open none yet."""
        self._host = host
        self._runtime = host.runtime
        self._cluster = cluster
        self._mutex = host.runtime.mutex()
        self._all: list[Session] = []
        self._opening: dict[int, Event] = {}
        self._warned_ttls: set[int] = set()

    # -- open --------------------------------------------------------------------------------------------------------

    async def attach(self, contender: Contender, ttl: int, answer_by: float) -> None:
        """
        Give a contender its session. A writer's is one in which this client has no other writer of the lock.

        Raises:
            LockError: No session could be opened.
        """

        def take(session: Session) -> bool:
            if contender.mode == "exclusive":
                if contender.name in session.by_name:
                    return False
                session.by_name[contender.name] = contender
            contender.home = contender.session = session
            contender.key = values.key_of(contender.prefix, session.id, contender.owner, contender.mode)
            session.contenders.add(contender)
            return True

        await self._find_or_open(ttl, take, answer_by)

    async def prepare_move(self, contenders: Collection[Contender], ttl: int, answer_by: float) -> Session:
        """
        Return a session to move keys to. Their contenders are in both sessions until `finish_move`.

        Raises:
            LockError: No session could be opened.
        """

        def take(session: Session) -> bool:
            session.contenders.update(contenders)
            for contender in contenders:
                contender.moving_to = session
            return True

        return await self._find_or_open(ttl, take, answer_by)

    def finish_move(self, contender: Contender, mod_revision: int) -> None:
        """Note that a key is surely attached to the session that it was to be moved to, and to no other."""
        assert contender.moving_to is not None
        with self._mutex:
            self._remove(contender)
            contender.session, contender.moving_to = contender.moving_to, None
            contender.mod_revision = mod_revision
            contender.session.contenders.add(contender)

    async def _find_or_open(self, ttl: int, take: Callable[[Session], bool], answer_by: float) -> Session:
        while True:
            with self._mutex:
                now = self._runtime.now()
                for session in self._all:
                    if session.takes_keys(ttl, now) and take(session):
                        return session
                opening = self._opening.get(ttl)
            if opening is None:
                # Goes on if the caller is cancelled: else the cluster would keep a lease that nobody knows.
                await settle_by(self._runtime, self._open(ttl, answer_by), answer_by)
            # One caller opens it while the others wait; if that fails, they try themselves.
            elif not await opening.wait(max(0.0, answer_by - now)):
                self._finish_opening(ttl, opening)  # in case an interrupt kept the first caller from doing so
                raise BackendUnavailable("etcd did not grant a lease in time")

    async def _open(self, ttl: int, answer_by: float) -> None:
        """Open a session, and wake the callers that wait for it; not if another caller has just begun to."""
        opening = self._runtime.event()
        try:
            with self._mutex:
                if self._opening.setdefault(ttl, opening) is not opening:
                    return
                # Drop those that have ended unnoticed.
                now = self._runtime.now()
                self._all = [one for one in self._all if now < one.ends_at or one.is_wanted(now)]
            session = await self._grant(ttl, answer_by)
            with self._mutex:
                self._all.append(session)
        finally:
            self._finish_opening(ttl, opening)

    def _finish_opening(self, ttl: int, opening: Event) -> None:
        with self._mutex:
            if self._opening.get(ttl) is opening:
                del self._opening[ttl]
        opening.set()

    async def _grant(self, ttl: int, answer_by: float) -> Session:
        started = self._runtime.now()
        # If the first answer is lost, its lease expires with nothing attached to it.
        request = rpc.LeaseGrantRequest(TTL=ttl)
        answer = await self._cluster.call(GRANT, request, resend=True, answer_by=answer_by)
        if ttl < answer.TTL and ttl not in self._warned_ttls:
            self._warned_ttls.add(ttl)
            log.warning(
                "etcd keeps locks for %d s instead of the requested ttl of %d s: its shortest lease is one and a half "
                "election timeouts",
                answer.TTL,
                ttl,
            )
        return Session(answer.ID, ttl, float(answer.TTL), started)

    # -- keep --------------------------------------------------------------------------------------------------------

    async def keep_alive(self, session: Session, answer_by: float) -> bool:
        """
        Send a heartbeat, after deleting the keys in the session that are not wanted. False if it has ended.

        Raises:
            LockError: No answer.
        """
        if session.is_over:
            return False
        now = self._runtime.now()
        session.delay_heartbeat(now)
        with self._mutex:
            unwanted = [one for one in session.contenders if one.wanted_until <= now]
        await self.delete_keys(unwanted, answer_by)
        started = self._runtime.now()
        request = rpc.LeaseKeepAliveRequest(ID=session.id)
        answer = await self._cluster.call(KEEP_ALIVE, request, resend=True, answer_by=answer_by)
        if answer.TTL <= 0:
            self.end(session)
        else:
            session.was_kept_alive(started)
        return not session.ended

    async def delete_keys(self, contenders: Sequence[Contender], answer_by: float) -> None:
        """
        Delete keys, and forget their contenders.

        Raises:
            LockError: No answer.
        """
        for request, batch in transactions.delete_keys(contenders):
            await self._cluster.call(TXN, request, resend=True, answer_by=answer_by)
            for contender in batch:
                self.detach(contender)

    def detach(self, contender: Contender) -> None:
        """Forget a contender whose key is gone; but if its key may be created late, it stays in its session."""
        with self._mutex:
            contender.wanted_until = -inf
            self._remove(contender)
            home = contender.home
            if home is None:
                return
            if home.by_name.get(contender.name) is contender:
                del home.by_name[contender.name]
            if contender.may_come_late and not home.ended:
                home.contenders.add(contender)

    def _remove(self, contender: Contender) -> None:
        for session in self._all:
            session.contenders.discard(contender)

    # -- end ---------------------------------------------------------------------------------------------------------

    def end(self, session: Session) -> None:
        """Note that a session is gone: its holders have lost their locks, its waiters look again."""
        with self._mutex:
            session.ended = True
            contenders = [*session.contenders]
            session.contenders.clear()
            session.by_name.clear()
            if session in self._all:
                self._all.remove(session)
        for contender in contenders:
            # Not for one that was given up: its request may hold the lock by now, with another key.
            if contender.wanted_until == -inf:
                continue
            if contender.wake is not None:
                contender.wake.set()
            if contender.wanted_until < inf:
                self._host.lost(contender.owner, "session")

    async def revoke_if_unused(self, session: Session, answer_by: float) -> bool:
        """
        Revoke a session in which nothing is held or waited for; tell whether that is so.

        Raises:
            LockError: No answer. The session takes no more keys.
        """
        with self._mutex:
            session.closing = session.closing or not session.is_wanted(self._runtime.now())
        if session.closing and not session.ended:
            await self._revoke(session, answer_by)
        return session.closing

    async def _revoke(self, session: Session, answer_by: float) -> None:
        """End a session, and all its keys with it. etcd refuses what is created in it late."""
        try:
            request = rpc.LeaseRevokeRequest(ID=session.id)
            await self._cluster.call(REVOKE, request, resend=True, answer_by=answer_by)
        except LeaseEnded as ended:
            log.debug("session %x: %s", session.id, ended)
        self.end(session)

    async def close(self) -> None:
        """Revoke all sessions, best effort: the others end by their ttl."""
        with self._mutex:
            now = self._runtime.now()
            sessions = [one for one in self._all if now < one.ends_at]
        for session in sessions:
            try:
                await self._revoke(session, self._runtime.now() + CLOSE_SECONDS)
            except LockError as error:
                log.debug("session %x is left to its ttl: %s", session.id, error)
                return
