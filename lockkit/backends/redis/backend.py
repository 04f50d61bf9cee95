"""
Locks on Redis or Valkey: one node, a master found by Sentinel, or a Cluster.

Algorithm: the lock is a string key ``PREFIX:NAME`` with the owner as its value, set with ``NX PX``, so that redis-py's
``Lock``, redsync and redlock-py exclude with lockkit on the same key. Beside it, in the same Cluster slot:

==========================  =========================================================================================
``{PREFIX:NAME}:fence``     the last token, with owner and metadata of its lease: ``TOKEN OWNER METADATA``
``{PREFIX:NAME}:queue``     waiting requests, in order of arrival
``{PREFIX:NAME}:shares``    owners of leases beside one another (readers, permits) and when they end: a sorted set
``{PREFIX:NAME}:leases``    token and metadata of each of them
``{PREFIX:NAME}:broken``    the owners of the leases that `break_lock` ended, for their holders' next renewal
``{PREFIX:NAME}:note``      the note on the lock, which ends by itself (``PX``)
==========================  =========================================================================================

What lives apart from the locks has the prefix ``PREFIX+once`` or ``PREFIX+sem`` instead.

Each operation is one script (``scripts``), so one round trip. A release sets the lock to ``next:OWNER`` for the first
waiter and notifies that client (`lockkit.backends.redis.wakeup`): no polling, no herd, no overtaking.
The offer ends after half of the waiter's ttl, at most a second. The second waiter is notified of that time and retries
then, so a stopped waiter blocks the others no longer.

While readers hold the lock, its key has the value ``lockkit:shared`` until the last of them ends, so that other clients
find it taken. Each has an end of its own, by the server's clock (``scripts/shares.lua``), and so has each permit of a
semaphore. Waiters of all kinds are in one queue; an offer to a reader or a permit is made to all that fit beside it.

Requirements: Redis 6.2 or Valkey, scripts, pub/sub, and a user with the rights to use them.

Known limits: replication is asynchronous, so a promoted replica may not know a lock that was granted (unless
``replicas=`` is used), and a server without persistence forgets all locks when it restarts. Tokens still increase: they
are at least the server's time in microseconds.

lockkit does not use newer atomic commands (``DELEX``, ``SET … IFEQ`` of Redis 8.4, ``DELIFEQ`` of Valkey 9): a release
has to read the queue in the same atomic step, so it needs a script in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, ClassVar, NamedTuple, cast

from lockkit.backend import (
    SPACES,
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    NamesPage,
    Note,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
    decode_metadata,
    granted_at,
    unproven,
)
from lockkit.backends.redis.keys import KeysByName, LockKeys, Script, fence_milliseconds, ttl_milliseconds
from lockkit.backends.redis.listing import Scan
from lockkit.backends.redis.node import NotReplicatedError, Topology, delete_keys
from lockkit.backends.redis.options import OPTIONS, adopt_topology, driver_options, open_topology
from lockkit.backends.redis.resp import Reply, bulk
from lockkit.backends.redis.wakeup import WakeupListener, gone_channel, warn_of_polling
from lockkit.errors import BackendUnavailable, LockError
from lockkit.units import Instant, Seconds
from lockkit.url import Url

log = logging.getLogger("lockkit")

GRACE_MS_MAX = 1000
"""Longest offer to a waiter. Longer: a stopped waiter delays the others more. Shorter than a busy machine takes to
schedule a woken process: the order of arrival is lost."""

RENEW_SHARE = 1 / 6
"""Share of the shortest ttl in use that a renewal at several nodes may take. More: a node that hangs delays the next
renewals at the others until leases end. Less gives up on nodes that are only slow."""

RENEW_SECONDS_MIN = 0.3
"""Least time for such a renewal. Shorter gives up on a node that is slow only once in a while."""

_KEYS = "lock", "fence", "queue", "shares", "leases"
_ACQUIRE = Script("acquire", keys=_KEYS, arguments=7)
_RELEASE = Script("release", keys=_KEYS, arguments=2, alone=True)
_ABANDON = Script("abandon", keys=_KEYS, arguments=3, alone=True)
_RENEW = Script("renew", keys=["lock", "fence", "broken", "shares", "leases"], arguments=4, alone=True)
_DOWNGRADE = Script("downgrade", keys=_KEYS, arguments=3)
_BREAK = Script("break", keys=["lock", "fence", "broken", "queue", "shares", "leases"], arguments=3)
_TAKE_OVER = Script("take_over", keys=["lock", "fence"], arguments=5)
_UPDATE = Script("update", keys=["lock", "fence", "shares", "leases"], arguments=2, alone=True)
_HOLDERS = Script("holders", keys=_KEYS, arguments=0)
_CLOCK = Script("clock", keys=["lock"], arguments=0)
_READ_NOTE = Script("read_note", keys=["note"], arguments=0)
_WRITE_NOTE = Script("write_note", keys=["lock", "note", "fence", "shares", "leases"], arguments=3)

_EMPTY = bulk("")

_RENEWALS: Mapping[object, Renewal] = {1: Renewed(), 0: Gone("gone"), -1: Gone("taken"), -2: Gone("broken")}

_CAPABILITIES = Capabilities(
    crash_release="ttl",
    min_ttl=0.01,
    ttl_granularity=0.001,
    fair=True,
    wakeup="push",
    token_source="max(last + 1, server time in µs), so it also grows when the server comes back without its data",  # noqa: S106
    survives_node_loss=False,
    survives_data_loss=True,
    shared_mode=True,
    fair_shared=True,
    downgrade=True,
    clock_assumption="the server's clock runs at the rate of the clients' within 1 % and is not set forward while a "
    "lock is held; for tokens after a loss of data it is not set back by more than the outage",
    waiters_visible=True,
    scope="network",
    caveat="A promoted replica may not know the newest locks (replication is asynchronous): guard storage by token.",
    metadata_update=True,
    listing=True,
    permits="native",
    notes=True,
    transfer=True,
)


class RedisBackend(LockBackend):
    """Processes that reach the same Redis or Valkey."""

    capabilities = _CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, url: str, topology: Topology, options: Mapping[str, Any], host: Host) -> None:
        self._url = url
        self._topology = topology
        self._run = topology.run
        self._runtime = host.runtime
        self._prefix: str = options["prefix"]
        self._replicas: int = options["replicas"]
        self._keys = KeysByName(partial(LockKeys, self._prefix))
        self._idle_ms = ttl_milliseconds(options["idle_ttl"])
        self._gone = bulk(gone_channel(self._prefix))
        self._shortest_ttl = inf
        self._warned_of_polling = False

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        return driver_options()

    @classmethod
    def examiner(cls, url: Url) -> str:
        del url
        return "lockkit.backends.redis.examine"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> RedisBackend:
        return cls(url.safe_text, open_topology(url, options, host), options, host)

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> RedisBackend | None:
        found = adopt_topology(client, options, host)
        return None if found is None else cls(found[0], found[1], options, host)

    @property
    def url(self) -> str:
        return self._url

    async def try_acquire(self, request: Request) -> Grant | Busy:
        keys = self._keys[request.name]
        ttl_ms, terms = _terms(request.ttl, request.metadata, self._idle_ms)
        limit = "" if request.mode == "exclusive" else 0 if request.mode == "shared" else request.limit
        subscribed = False
        while True:
            entry = (
                self._queue_entry(request, keys, ttl_ms, limit) if request.queue and self._topology.listening else None
            )
            body = b"%b%b%b%b%b%b" % (
                keys.packed(_ACQUIRE),
                bulk(request.owner),
                terms,
                _EMPTY if entry is None else bulk(entry.text),
                _EMPTY if limit == "" else bulk(limit),
                _EMPTY if entry is None or not entry.former else bulk(entry.former),
            )
            try:
                reply = await self._change(_ACQUIRE, keys, body, request.answer_by)
            except NotReplicatedError as error:
                # A promoted replica might not know this grant. Busy, not unavailable: another client may hold the lock.
                await self._abandon(request, keys)
                log.warning("lock %r at %s was granted, and that was undone: %s", request.name, self._url, error)
                return Busy(None, poll=True)
            if type(reply) is not list:
                if request.state is not None:
                    self._left_queue(request)
                token, slot = (reply, None) if type(reply) is int else map(int, cast("bytes", reply).split())
                return Grant(request.name, request.owner, token, ttl_ms / 1000, None, keys, slot)
            left_ms, holder, foreign = cast("tuple[int, bytes, int]", reply)
            queued = entry is not None or not request.queue
            if queued or foreign or subscribed:
                # Not queued although subscribed: the subscription ended at once. Then poll.
                poll = foreign == 1 or not queued
                retry_after = None if left_ms < 0 else left_ms / 1000
                return Busy(retry_after, poll=poll, owner=holder.decode("utf-8", "replace") or None)
            # No subscription, so no queue entry: a waiter that cannot be notified must not be offered the lock.
            await self._topology.listen(keys.lock, request.answer_by)
            subscribed = True
            listener = self._topology.listener_for(keys.lock)
            if not self._warned_of_polling and listener is not None and listener.denied is not None:
                self._warned_of_polling = True
                warn_of_polling(self._url, listener.denied)

    def _change(self, script: Script, keys: LockKeys, body: bytes, answer_by: float = inf) -> Awaitable[Reply]:
        """Run a script that may be sent again; its change counts when the replicas have it."""
        return self._run(script, keys.lock, body, resend=True, replicas=self._replicas, answer_by=answer_by)

    async def _ask(self, script: Script, keys: LockKeys, *arguments: str | int, answer_by: float = inf) -> Any:  # noqa: ANN401 - as the script says
        """Run a script that may be sent again and needs no replicas."""
        return await self._run(script, keys.lock, keys.body(script, *arguments), resend=True, answer_by=answer_by)

    def _queue_entry(self, request: Request, keys: LockKeys, ttl_ms: int, limit: str | int) -> _QueueEntry | None:
        """Return the queue entry for the script; None when no subscription is active."""
        listener = self._topology.listener_for(keys.lock)
        channel = None if listener is None else listener.channel
        if listener is None or channel is None:
            return None
        beside = "" if limit == "" else f"+{limit}"
        text = f"{min(ttl_ms // 2, GRACE_MS_MAX)}{beside} {channel}"
        entry: _QueueEntry | None = request.state
        if entry is None or entry.channel != channel:
            # Messages to a former subscription are lost; its queue entry is removed when its turn comes.
            self._left_queue(request)
            entry = request.state = _QueueEntry(listener, channel, text, "")
            listener.expect(request, keys.lock)
        elif entry.text != text:  # the cap of a semaphore was changed
            entry = request.state = _QueueEntry(listener, channel, text, entry.text)
        return entry

    def _left_queue(self, request: Request) -> None:
        if request.state is not None:
            request.state.listener.forget(request)
            request.state = None

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        # The subscription may have ended since: then retry at once, which subscribes anew.
        if request.state is not None and request.state.listener.channel == request.state.channel:
            await super().wait(request, busy, until)

    async def abandon(self, request: Request) -> None:
        if request.state is not None or request.uncertain:
            if request.state is not None:
                # First, also if there is no answer: after a long outage nobody would say so again.
                request.state.listener.forget(request)
            await self._abandon(request, self._keys[request.name])
            request.state = None

    async def _abandon(self, request: Request, keys: LockKeys) -> None:
        entry: _QueueEntry | None = request.state
        # With the former text too: the call that was to replace it may have had no answer.
        body = keys.body(_ABANDON, request.owner, *(("", "") if entry is None else (entry.text, entry.former)))
        await self._run(_ABANDON, keys.lock, body, resend=True, answer_by=request.answer_by)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        calls = []
        for grant in grants:
            keys: LockKeys = grant.state
            ttl_ms = ttl_milliseconds(grant.ttl)
            fence_ms = fence_milliseconds(ttl_ms, self._idle_ms)
            calls.append((keys.lock, keys.body(_RENEW, grant.owner, ttl_ms, fence_ms) + self._gone))
        answer_by = inf
        if self._topology.several:
            self._shortest_ttl = min([self._shortest_ttl, *(grant.ttl for grant in grants)])
            answer_by = self._runtime.now() + max(RENEW_SECONDS_MIN, self._shortest_ttl * RENEW_SHARE)
        replies = await self._topology.run_many(_RENEW, calls, replicas=self._replicas, answer_by=answer_by)
        return [Unknown(reply) if isinstance(reply, LockError) else _RENEWALS[cast("int", reply)] for reply in replies]

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        # Sent again by the engine only.
        return await self._run(_RELEASE, *self._release_call(grant), answer_by=answer_by) == 1

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        replies = await self._topology.run_many(_RELEASE, list(map(self._release_call, grants)), answer_by=answer_by)
        failures = [reply for reply in replies if isinstance(reply, LockError)]
        if failures:
            message = f"{len(failures)} of {len(grants)} locks may still be held: {failures[0]}"
            raise BackendUnavailable(message) from failures[0]

    def _release_call(self, grant: Grant) -> tuple[str, bytes]:
        keys: LockKeys = grant.state
        return keys.lock, keys.body(_RELEASE, grant.owner) + self._gone

    async def downgrade(self, grant: Grant) -> bool:
        keys: LockKeys = grant.state
        body = keys.body(_DOWNGRADE, grant.owner, grant.token, ttl_milliseconds(grant.ttl))
        return await self._change(_DOWNGRADE, keys, body) == 1

    async def holders(self, name: str) -> Sequence[Holder]:
        reply: list[Any] = await self._ask(_HOLDERS, self._keys[name])
        if not reply:
            return []
        if type(reply[0]) is int:
            holders = [_holder(*share, waiters=reply[0]) for share in reply[1:]]
            return sorted(holders, key=lambda holder: holder.token or 0)
        owner, left_ms, token, metadata, waiters = reply
        return [_holder(owner, left_ms, token + b" " + metadata, None, waiters=waiters)]

    async def take_over(self, request: Request, owner: str) -> Grant | None:
        keys = self._keys[request.name]
        ttl_ms, terms = _terms(request.ttl, request.metadata, self._idle_ms)
        body = b"%b%b%b%b" % (keys.packed(_TAKE_OVER), bulk(request.owner), terms, bulk(owner))
        token = cast("int", await self._change(_TAKE_OVER, keys, body, request.answer_by))
        return Grant(request.name, request.owner, token, ttl_ms / 1000, None, keys) if token else None

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        reply = await self._ask(_UPDATE, grant.state, grant.owner, metadata)
        return None if reply == 1 else Gone("gone" if reply == 0 else "taken")

    async def break_lock(self, name: str) -> bool:
        # With an empty prefix, a key may be an application's.
        keys = self._keys[name]
        reply = await self._ask(_BREAK, keys, self._idle_ms, "", "" if self._prefix else "1")
        if reply == -1:
            raise unproven(self._url, name, f"its key {keys.lock!r} has neither an expiry nor a record")
        return bool(reply == 1)

    async def break_unproven(self, name: str) -> bool:
        return bool(await self._ask(_BREAK, self._keys[name], self._idle_ms, "", "") == 1)

    async def break_permit(self, name: str, slot: int) -> bool:
        return bool(await self._ask(_BREAK, self._keys[name], self._idle_ms, slot, "") == 1)

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        masters = self._topology.masters
        scan: Scan = Scan(self._prefix, prefix, await masters()) if after is None else after.next
        return await scan.page(masters)

    async def read_note(self, name: str, answer_by: float = inf) -> Note | None:
        reply = await self._ask(_READ_NOTE, self._keys[name], answer_by=answer_by)
        if not reply:
            return None
        text, left_ms = reply
        return Note(text.decode("utf-8", "replace"), left_ms / 1000 if left_ms >= 0 else None)

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: float = inf) -> bool:
        keys: LockKeys = grant.state
        body = keys.body(_WRITE_NOTE, grant.owner, text, ttl_milliseconds(keep))
        return await self._change(_WRITE_NOTE, keys, body, answer_by) == 1

    async def clock(self) -> float:
        seconds, microseconds = await self._ask(_CLOCK, self._keys["clock"])
        return int(seconds) + int(microseconds) / 1e6

    async def erase(self) -> None:
        for node in await self._topology.masters():
            for prefix in (self._prefix, *(f"{self._prefix}+{space}" for space in SPACES)):
                await delete_keys(node, prefix)

    async def ping(self) -> None:
        await self.clock()

    async def close(self) -> None:
        await self._topology.close()


@lru_cache
def _terms(ttl: Seconds, metadata: str, idle_ms: int) -> tuple[int, bytes]:
    """Pack ttl, metadata and life of the record: the acquisitions of a client mostly use the same."""
    ttl_ms = ttl_milliseconds(ttl)
    return ttl_ms, bulk(ttl_ms) + bulk(metadata) + bulk(fence_milliseconds(ttl_ms, idle_ms))


class _QueueEntry(NamedTuple):
    """An entry in a lock's queue, and the subscription by which its client is notified."""

    listener: WakeupListener
    channel: str
    text: str
    former: str  # what it may still be at the server, where it keeps its place; "" if it has had one text only


def _holder(owner: bytes, left_ms: int, lease: bytes, number: bytes | None, *, waiters: int) -> Holder:
    digits, _, metadata = lease.partition(b" ")
    token = int(digits) if digits.isdigit() else None
    return Holder(
        owner.decode("utf-8", "replace"),
        token,
        None if left_ms < 0 else left_ms / 1000,
        decode_metadata(metadata),
        waiters,
        mode="exclusive" if number is None else "permit" if number else "shared",
        slot=int(number) if number and number.isdigit() else None,
        since=granted_at(token),
    )
