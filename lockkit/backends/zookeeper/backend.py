"""
Locks on ZooKeeper: sequential ephemeral nodes.

Algorithm (ZooKeeper Recipes and Solutions, "Locks"; the layout is that of kazoo's ``Lock``, so the two exclude each
other): each client that wants a lock creates a node in the lock's directory, to which ZooKeeper appends a number. The
lowest number holds; each of the others watches the one before it. So a release wakes one waiter, first come, first
served. Readers (the same, "Shared Locks"; kazoo's ``ReadLock``) watch the nearest writer before them. For them and for
permits see `lockkit.backends.zookeeper.path`.

A lease belongs to a session whose timeout is its ttl, or somewhat longer (`lockkit.backends.zookeeper.sessions`): the
server ends the session, and removes its nodes, when no packet came for that long. Its connection keeps it alive;
renewals find out how long it certainly lives. `lockkit.backends.zookeeper.nodes.Removals` ends leases that end before
their session.

===========  ==================================================================================================
acquire      create, get_children (sent together); the lowest number is granted, its token is the node's ``czxid``
wait         get of the predecessor, with a watch: when it goes away, list again; the first that waits for a permit:
             get_children, with a watch
permit       if others hold permits: also multi of check, set and create, which creates its mark
list again   sync, get_children (sent together)
renew        sync for each session; at first and after a new connection get of each node, with a watch
update       set
downgrade    multi of set and create, which creates the mark
release      delete; multi of two deletes if there is a mark
close        closeSession
===========  ==================================================================================================

If an answer is lost, the client looks for the node by the owner in its name ("protected" creation, Apache Curator).
``sync`` goes through the leader, so its answer says that the member that answers was not cut off from it.

Notes are nodes beside the locks' directories (`lockkit.backends.zookeeper.nodes`). What lives apart from the locks is
in a directory of its own, ``/PREFIX+once`` or ``/PREFIX+sem``.

Required of the server: ZooKeeper 3.5, sessions from ttl to ttl (``minSessionTimeout``, ``maxSessionTimeout``).

Known limit: a member reports heartbeats to its leader every half tick. If it is cut off within that time after a
heartbeat, the leader ends the session up to a third of the ttl before the lease's deadline. Tokens cover that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any, ClassVar

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Exists, GetChildren, GetData

from lockkit.backend import (
    CALL_SECONDS,
    SINCE_EXACT_SECONDS,
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
    apart,
    decode_metadata,
    seconds_left,
    since_stored,
)
from lockkit.backends.zookeeper.connection import ANSWER_SECONDS, CONNECT_SECONDS, Answer
from lockkit.backends.zookeeper.nodes import LockNode, LockNodes, Removals
from lockkit.backends.zookeeper.options import DRIVER_OPTIONS, OPTIONS, adopted_arguments, client_arguments, root_of
from lockkit.backends.zookeeper.path import READ_MARK, Contender, contenders, held
from lockkit.backends.zookeeper.queue import LockQueue
from lockkit.backends.zookeeper.session import MILLISECOND, SYNC, Session
from lockkit.backends.zookeeper.sessions import Sessions
from lockkit.errors import BackendUnavailable, LockError, Unsupported
from lockkit.runtime import wall_clock
from lockkit.units import Instant, Seconds
from lockkit.url import Url

log = logging.getLogger("lockkit")

OUTAGE_SECONDS = 10.0
"""How long a waiter keeps its place in the queue without a connection. Longer reports an outage later."""

PAGE_DIRECTORIES = 200
"""Directories that one page of `ZooKeeperBackend.names` looks into, all at once. More delays other requests on the same
connection; fewer takes more round trips."""

OUTAGE_CHECK_SECONDS = 0.25
"""How often such a waiter checks whether its client is being closed."""

MAJORITY_HOSTS_MIN = 3
"""Servers in the URL from which on the ensemble counts as one that survives the loss of a server."""

_CAPABILITIES = Capabilities(
    crash_release="session",
    min_ttl=1.0,
    ttl_granularity=0.001,
    fair=True,
    wakeup="push",
    token_source="czxid of the node: the ensemble's transaction number, higher with every change anywhere in it",  # noqa: S106
    survives_node_loss=False,
    survives_data_loss=False,
    shared_mode=True,
    clock_assumption="the servers' clocks run at the rate of the clients' within 1 %",
    waiters_visible=True,
    scope="network",
    caveat="A ttl outside of the ensemble's session limits is changed, with a warning; in an ensemble that lost its "
    "data, tokens start anew.",
    metadata_update=True,
    listing=True,
    fair_shared=True,
    downgrade=True,
    permits="native",
    notes=True,
)


class ZooKeeperBackend(LockBackend):
    """Locks for processes that reach the same ZooKeeper ensemble."""

    capabilities = _CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(
        self, url: str, arguments: Mapping[str, Any], root: str, options: Mapping[str, Any], host: Host
    ) -> None:
        """Lock below `root`, with sessions that connect with these arguments; nothing is sent."""
        self._url = url
        self._nodes = LockNodes(root, cleanup=options["cleanup"])
        self._runtime = host.runtime
        self._sessions = Sessions(host, url, arguments)
        self._removals = Removals(host.runtime)
        if arguments["hosts"].count(",") + 1 >= MAJORITY_HOSTS_MIN:
            self.capabilities = replace(_CAPABILITIES, survives_node_loss=True)

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        """See `LockBackend.driver_options`: keyword arguments of kazoo's client."""
        return DRIVER_OPTIONS

    @classmethod
    def examiner(cls, url: Url) -> str:
        del url
        return "lockkit.backends.zookeeper.examine"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> ZooKeeperBackend:
        return cls(url.safe_text, client_arguments(url, options), root_of(url, options["prefix"]), options, host)

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> ZooKeeperBackend | None:
        """See `LockBackend.adopt`: a client of kazoo's, for the sync and async APIs. It need not be started."""
        if not isinstance(client, KazooClient):
            return None
        arguments, root = adopted_arguments(client, options), f"{client.chroot}/{options['prefix']}"
        return cls(f"zookeeper://{arguments['hosts']}{client.chroot}", arguments, root, options, host)

    @property
    def url(self) -> str:
        return self._url

    def _until(self, answer_by: Instant = inf) -> Instant:
        """Until when a call that begins now may wait for the server, client monotonic clock."""
        now = self._runtime.now()
        return now + seconds_left(answer_by, now)

    async def _any(self, answer_by: Instant = inf) -> tuple[Session, Instant]:
        """Give a session that is connected, and `_until`."""
        until = self._until(answer_by)
        return await self._sessions.any(until), until

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        node: LockNode | None = request.state
        until = self._until(request.answer_by)
        try:
            if node is not None and not node.session.failed:
                session = node.session
                await session.connected(until, patient=True)
            else:
                session = await self._sessions.get(request.ttl, until)
            found = await LockQueue(self._nodes, request, session, until).attempt()
        except BackendUnavailable as error:
            error.sent = error.sent or request.state is not None  # there may be a node, though the last one was not
            raise
        return found if isinstance(found, Busy) else self._granted(request, found)

    def _granted(self, request: Request, node: LockNode) -> Grant:
        session, now = node.session, self._runtime.now()
        session.stop_waking(request)
        node.ttl = self._sessions.granted_ttl(session, request.ttl)
        session.held[request.owner] = node
        self._removals.add(node, now + node.ttl)
        if now - node.joined_at > SINCE_EXACT_SECONDS:
            node.since = wall_clock()
            with suppress(BackendUnavailable):  # without it, `Holder.since` is the time of the request
                node.send_metadata(request.metadata)  # nobody waits for the answer
        request.state = None
        return Grant(request.name, request.owner, node.token, node.ttl, None, node, node.slot)

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        await super().wait(request, busy, until)
        # The node stays while the session does: a broken connection is no reason to give up a place in the queue.
        session: Session = request.state.session
        until = min(until, self._runtime.now() + OUTAGE_SECONDS)
        while not (session.usable or session.failed or request.wake.is_set()) and (now := self._runtime.now()) < until:
            await session.reconnected(min(until, now + OUTAGE_CHECK_SECONDS))

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`. `Removals` removes later what cannot be removed now."""
        node: LockNode | None = request.state
        until = self._until(request.answer_by)
        if node is None:
            # Nothing was created, or it was granted, and the answer came too late to be believed.
            granted = self._sessions.holding(request.owner)
            if granted is not None:
                await self._release(granted, until)
            return
        node.session.stop_waking(request)
        try:
            if not await self._removals.remove(node, until):
                self._removals.add(node, node.remove_at)
        except LockError as error:
            log.debug("removing the place in the queue for lock %r: %s", request.name, error)
            self._removals.add(node)
        request.state = None

    # -- held ------------------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`. One heartbeat for each session; each node is asked for once per connection."""
        started = self._runtime.now()
        sessions = [grant.state.session for grant in grants]
        if not any(session.usable for session in sessions):
            await sessions[0].reconnected(started + CONNECT_SECONDS)
        heartbeats: dict[Session, Answer] = {}
        checks: list[Answer | LockError | None] = []
        for grant in grants:
            node: LockNode = grant.state
            try:
                if node.session not in heartbeats:
                    # The leader answers it: the member that answers for the nodes is not cut off from its leader.
                    heartbeats[node.session] = node.session.send(SYNC)[0]
                checks.append(node.session.watch_lease(node.path, node.owner))
            except BackendUnavailable as error:
                checks.append(error)
        # A member that hangs must not delay the answers of the others for leases that end sooner.
        patience_seconds = min(ANSWER_SECONDS, *(grant.ttl / 3 for grant in grants))
        until = min(started + CALL_SECONDS, self._runtime.now() + patience_seconds)
        problems: dict[Session, LockError] = {}
        for session, sent in heartbeats.items():
            try:
                await session.answer(sent, until)
            except LockError as error:
                problems[session] = error
        return [
            await self._renewed(grant, problems.get(grant.state.session, check), started, until)
            for grant, check in zip(grants, checks, strict=True)
        ]

    async def _renewed(
        self, grant: Grant, check: Answer | LockError | None, started: Instant, until: Instant
    ) -> Renewal:
        node: LockNode = grant.state
        session = node.session
        try:
            if isinstance(check, LockError):
                raise check
            if check is not None:
                await session.answer(check, until)
        except NoNodeError:
            session.forget_lease(node.path, node.owner)
        except LockError as error:
            return Unknown(error)
        if node.session_id != session.id:
            return Gone("session")
        if node.owner not in session.held:
            return Gone(await session.why_gone(node.directory, node.owner, until))
        granted_seconds = session.granted_seconds
        if grant.ttl > granted_seconds + MILLISECOND:
            if grant.ttl > node.ttl:
                message = (
                    f"lock {grant.name!r} at {self._url} cannot be extended to {grant.ttl:g} s: ZooKeeper keeps the "
                    f"nodes of a session for {granted_seconds:g} s. Acquire with the longest ttl that will be needed, "
                    "or let it be renewed"
                )
                raise Unsupported(message, name=grant.name, backend=self._url)
            grant = replace(grant, ttl=granted_seconds)  # another member, with other limits
        self._removals.add(node, started + grant.ttl)
        return Renewed(ttl=grant.ttl)

    async def downgrade(self, grant: Grant) -> bool:
        """See `LockBackend.downgrade`. The node stays; its mark says that it is a reader's."""
        node: LockNode = grant.state
        return node.session_lives and await node.create_mark(READ_MARK, self._until())

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        node: LockNode = grant.state
        session, until = node.session, self._until()
        if not node.session_lives:
            return Gone("session")
        await session.connected(until, patient=True)
        try:
            await session.answer(node.send_metadata(metadata), until)
        except NoNodeError:
            return Gone(await session.why_gone(node.directory, node.owner, until))
        return None

    async def release(self, grant: Grant, answer_by: Instant = inf) -> bool:
        return await self._release(grant.state, self._until(answer_by))

    async def _release(self, node: LockNode, until: Instant) -> bool:
        if node.session.id != node.session_id:
            node.session.forget_lease(node.path, node.owner)
            return False  # the server has removed it with its session
        try:
            existed = await node.delete(until)
        except BaseException:
            # The session stays alive, and with it the node: keep trying.
            self._removals.add(node)
            raise
        self._removals.forget(node)
        return existed

    async def release_all(self, grants: Sequence[Grant], answer_by: Instant) -> None:
        """See `LockBackend.release_all`. The end of a session frees all that it holds, in one transaction."""
        for grant in grants:
            self._removals.forget(grant.state)
        await self._sessions.end({grant.state.session for grant in grants}, self._until(answer_by))

    # -- other clients' locks --------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        session, until = await self._any()
        directory = self._nodes.directory(name)
        while queue := contenders(await session.children(directory, until)):
            holding = held(queue)
            found = await session.of_each([GetData(f"{directory}/{one.node}", None) for one in holding], until)
            waiters_count = len(queue) - len(holding)
            holders = [
                _holder(one, node[0], node[1], waiters_count)
                for one, node in zip(holding, found, strict=True)
                if node is not None
            ]
            if holders:
                return holders
            # all have just left: the next ones hold it
        return []

    async def confirm(self, grant: Grant) -> Gone | None:
        """See `LockBackend.confirm`. One round trip, however many hold it."""
        session, until = await self._any()
        node: LockNode = grant.state
        queue = contenders(await session.children(node.directory, until))
        if any(one.node == node.name for one in held(queue)):
            return None
        reason = await session.why_gone(node.directory, node.owner, until)
        return Gone("taken" if queue and reason == "gone" else reason)

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`. Nodes of an application are no contenders: see `contenders`."""
        return await self._break(name, held)

    async def break_permit(self, name: str, slot: int) -> bool:
        return await self._break(name, lambda queue: [one for one in held(queue) if one.slot == slot])

    async def _break(self, name: str, choose: Callable[[Sequence[Contender]], Sequence[Contender]]) -> bool:
        session, until = await self._any()
        directory = self._nodes.directory(name)
        chosen = choose(contenders(await session.children(directory, until)))
        return bool(chosen) and await self._nodes.delete_held(session, directory, chosen, until)

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """See `LockBackend.names`. The first page lists the directories; each page looks into some of them."""
        session, until = await self._any()
        if after is None:
            return NamesPage([], await self._nodes.names(session, prefix, until) or None)
        part, left = after.next[:PAGE_DIRECTORIES], after.next[PAGE_DIRECTORIES:]
        await session.read(SYNC, until=until)
        queues = await session.of_each([GetChildren(self._nodes.directory(name), None) for name in part], until)
        names = [name for name, children in zip(part, queues, strict=True) if contenders(children or ())]
        return NamesPage(names, left or None)

    async def read_note(self, name: str, answer_by: Instant = inf) -> Note | None:
        """See `LockBackend.read_note`. A second round trip once in a while, for the leader's clock."""
        session, until = await self._any(answer_by)
        return await self._nodes.read_note(session, name, until)

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: Instant = inf) -> bool:
        node: LockNode = grant.state
        until = self._until(answer_by)
        return node.session_lives and await self._nodes.write_note(node, grant.name, text, keep, until)

    async def clock(self) -> float:
        session, until = await self._any()
        return await self._nodes.clock(session, apart("once", "x"), until)

    async def erase(self) -> None:
        await self._nodes.erase(*await self._any())

    async def ping(self) -> None:
        session, until = await self._any()
        await session.ask(Exists("/", None), until)

    async def close(self) -> None:
        """See `LockBackend.close`. Ends the sessions, and with them whatever is left."""
        self._removals.close()
        await self._sessions.close()


def _holder(one: Contender, data: bytes, stat: Any, waiters_count: int) -> Holder:  # noqa: ANN401 - kazoo's
    about, since = since_stored(decode_metadata(data))
    if since is None and "pid" in about:  # of lockkit, granted when it came
        since = stat.ctime / 1000
    return Holder(one.owner, stat.czxid, None, about, waiters_count, one.mode, one.slot, since)
