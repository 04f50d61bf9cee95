"""
Locks on ZooKeeper: sequential ephemeral nodes.

Algorithm (ZooKeeper Recipes and Solutions, "Locks"; the layout is that of kazoo's ``Lock``, so the two exclude each
other): everybody creates a node in the directory of the lock, to which ZooKeeper appends a number; the lowest number
holds, each of the others watches the one before it. So a release wakes one waiter, and the order is that of arrival.

A lease lies in a session whose timeout is its ttl, or somewhat longer (`lockkit.backends.zookeeper.sessions`): the
server ends it, and removes its nodes, when it hears nothing for that long. kazoo keeps it alive; lockkit's renewals
find out until when it surely is. `lockkit.backends.zookeeper.short_leases` ends leases that end earlier than their
session.

==========  ===================================================================================================
acquire     create, get_children (sent together); the lowest number is granted, its token is the node's ``czxid``
wait        get of the predecessor, with a watch: when it goes away, look again
look again  sync, get_children (sent together)
renew       sync for each session; at first and after a new connection exists of each node, with a watch
release     delete
close       closeSession
==========  ===================================================================================================

An answer that was lost: the node is looked for by the owner in its name ("protected" creation, Apache Curator).
``sync`` goes through the leader, so its answer says that the member that we talk to was not cut off from it.

What the server must offer: ZooKeeper 3.5, sessions from ttl to ttl (``minSessionTimeout``, ``maxSessionTimeout``).

What it cannot promise: a member tells its leader of our heartbeats every half tick. If it is cut off within that time
after a heartbeat, the leader ends the session up to a third of the ttl before our deadline. That is what tokens are
for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from lockkit.backend import (
    CALL_SECONDS,
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
    decode_metadata,
    seconds_left,
)
from lockkit.backends.zookeeper.connection import ANSWER_SECONDS, CONNECT_SECONDS
from lockkit.backends.zookeeper.options import (
    OPTIONS,
    client_arguments,
    client_label,
    driver_options,
    probe_arguments,
    root_of,
)
from lockkit.backends.zookeeper.path import contenders, escape_name, node_prefix
from lockkit.backends.zookeeper.session import MILLISECOND, Held, Session
from lockkit.backends.zookeeper.sessions import Sessions
from lockkit.backends.zookeeper.short_leases import Caretaker, Leftover
from lockkit.backends.zookeeper.tree import Tree
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, Unsupported

if TYPE_CHECKING:
    from lockkit.backends.zookeeper.path import Contender
    from lockkit.url import Url

__all__ = ["ZooKeeperBackend"]

log = logging.getLogger("lockkit")

JOINS_MAX = 5
"""How often a node of ours that somebody removed is created anew in one attempt."""

OUTAGE_SECONDS = 10.0
"""How long a waiter keeps its place in line without a connection. Longer is told later that the ensemble is away."""

OUTAGE_LOOK = 0.25
"""How often such a waiter looks whether its client is being closed, seconds."""

MAJORITY_HOSTS_MIN = 3
"""Servers in the URL from which on the ensemble is taken for one that survives the loss of a server."""

LATE_SHARE = 1.5
"""In session timeouts, after which a node whose creation was not answered, and that was not found, is looked for once
more: by then the server has closed the connection that may still have carried it."""

_CAPABILITIES = Capabilities(
    crash_release="session",
    min_ttl=1.0,
    ttl_granularity=0.001,
    fair=True,
    wakeup="push",
    token_source="czxid of the node: the ensemble's transaction number, higher with every change anywhere in it",  # noqa: S106
    survives_node_loss=False,
    survives_data_loss=False,
    shared_mode=False,
    clock_assumption="the servers' clocks run at the rate of the clients' within 1 %",
    waiters_visible=True,
    scope="network",
    caveat="A ttl outside of the ensemble's session limits is changed, with a warning; in an ensemble that lost its "
    "data, tokens start anew.",
)


class ZooKeeperBackend(LockBackend):
    """Processes that reach the same ZooKeeper ensemble."""

    capabilities = _CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, url: str, label: str, tree: Tree, host: Host) -> None:
        """
        Use an ensemble; nothing is sent.

        Args:
            url: For messages.
            label: The servers, for messages.
            tree: Where the locks are.
            host: The engine's side.
        """
        self._url = url
        self._label = label
        self._tree = tree
        self._host = host
        self._runtime = host.runtime
        self._sessions = Sessions(host, url, label)
        self._caretaker = Caretaker(host.runtime, self._remove, self._sessions.let_go)

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        """See `LockBackend.driver_options`: keyword arguments of kazoo's client."""
        return driver_options()

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> ZooKeeperBackend:
        """See `LockBackend.open`."""
        arguments = client_arguments(url, options)
        tree = Tree(root_of(url, options["prefix"]), cleanup=options["cleanup"])
        backend = cls(url.safe_text, arguments["hosts"], tree, host)
        if len(url.hosts) >= MAJORITY_HOSTS_MIN:
            backend.capabilities = replace(_CAPABILITIES, survives_node_loss=True)
        try:
            backend._sessions.use(arguments)  # have kazoo look at the arguments now, and not at the first use
        except (TypeError, ValueError) as error:
            message = f"{url.safe_text} is not understood: kazoo does not take its options: {error}"
            raise ConfigurationError(message, backend=url.safe_text) from error
        return backend

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> ZooKeeperBackend | None:
        """See `LockBackend.adopt`: kazoo's client, which both faces take. It must be started."""
        if not isinstance(client, KazooClient):
            return None
        _check_adoptable(client)
        label = client_label(client)
        tree = Tree(f"/{options['prefix']}", cleanup=options["cleanup"])
        backend = cls(f"zookeeper://{label}{client.chroot}", label, tree, host)
        backend._sessions.adopt(client, probe_arguments(client))
        if len(client.hosts) >= MAJORITY_HOSTS_MIN:
            backend.capabilities = replace(_CAPABILITIES, survives_node_loss=True)
        return backend

    @property
    def url(self) -> str:
        """See `LockBackend.url`."""
        return self._url

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        place: _Place | None = request.state
        until = self._until(request.answer_by)
        if place is not None and not place.session.failed:
            session = await self._sessions.ready(place.session, until, patient=True)
        else:
            session = await self._sessions.get(request.ttl, until)
        directory = f"{self._tree.root}/{escape_name(request.name)}"
        children: Sequence[str] | None = None
        if place is None and not request.queue:
            children = await self._look_first(session, directory, until)
            if holders := contenders(children):
                return Busy(owner=holders[0].owner)
        elif place is not None:
            children = await self._children_when_woken(session, directory, request, until)
        return await self._stand(request, session, directory, children, until)

    def _until(self, answer_by: float = inf) -> float:
        """Until when a call that begins now may wait for the server, client monotonic clock."""
        now = self._runtime.now()
        return now + seconds_left(answer_by, now)

    async def _look_first(self, session: Session, directory: str, until: float) -> list[str]:
        """For a single try: a look is much cheaper for the ensemble than a node that is created in vain."""
        try:
            found: list[str] = await session.answer(session.client.get_children_async(directory), until)
        except NoNodeError:
            return []
        return found

    @staticmethod
    async def _children(session: Session, directory: str, until: float) -> list[str]:
        try:
            return await session.children(directory, until)
        except NoNodeError:
            return []

    @staticmethod
    async def _children_when_woken(session: Session, directory: str, request: Request, until: float) -> list[str]:
        try:
            children, request.state.asked_at = await session.children_when_woken(directory, request, until)
        except NoNodeError:
            return []
        return children

    async def _stand(
        self, request: Request, session: Session, directory: str, children: Sequence[str] | None, until: float
    ) -> Grant | Busy:
        """Take or keep the place in line, and say whose turn it is."""
        for _ in range(JOINS_MAX):
            place: _Place | None = request.state
            if place is not None and (place.session is not session or place.session_id != session.id):
                self._leave_behind(request, place)
                place = None
            if place is None:
                place, children = await self._join(request, session, directory, until)
            line = contenders(children or ())
            position = next((index for index, one in enumerate(line) if one.node == place.node), None)
            if position == 0:
                return self._granted(request, place)
            if position is None:
                self._unwatch(request, place)
                request.state = None  # somebody removed our node, or the session has ended: to the end of the line
            elif not request.queue or await self._watch(request, place, line[position - 1], until):
                return Busy(owner=line[0].owner)
            else:
                children = await self._children(session, directory, until)
        message = f"the place in line for lock {request.name!r} is removed as often as it is taken"
        raise BackendUnavailable(message)

    def _leave_behind(self, request: Request, place: _Place) -> None:
        """Give up a place whose session has ended: the server removes it."""
        self._unwatch(request, place)
        request.state = None

    async def _join(
        self, request: Request, session: Session, directory: str, until: float
    ) -> tuple[_Place, Sequence[str]]:
        """Create the node, and list the line behind it in the same round trip."""
        session_id = session.id
        place = request.state = _Place(session, session_id, directory)
        path, data = f"{directory}/{node_prefix(request.owner)}", request.metadata.encode()

        async def create() -> tuple[Any, list[str]]:
            created = session.create_place(path, data)
            listed = session.client.get_children_async(directory)
            answer = await session.answer(created, until)
            place.node = answer[0].rpartition("/")[2]
            return answer, await session.answer(listed, until)

        try:
            (created_path, stat), children = await self._tree.within(session, directory, create, until)
        except ConfigurationError:
            if place.node is None:
                request.state = None  # refused: there is nothing to be removed
            raise
        except BackendUnavailable:
            # "Protected" creation: it may have been created, and the owner in its name tells.
            found = await self._find(session, directory, request.owner, until)
            if found is None:
                raise
            created_path, stat, children = found
        if stat.ephemeralOwner != session_id:
            # The connection was lost, and with it the session: what was found is about to vanish.
            message = f"the session at {self._label} has ended"
            raise BackendUnavailable(message)
        place.node = created_path.rpartition("/")[2]
        place.token = stat.czxid
        return place, children

    async def _find(
        self, session: Session, directory: str, owner: str, until: float
    ) -> tuple[str, Any, list[str]] | None:
        """Look for a node that may have been created; give its path, its state and who else is in line."""
        children = await self._children(session, directory, until)
        for node in children:
            if node.startswith(node_prefix(owner)):
                path = f"{directory}/{node}"
                stat = await session.read(partial(session.client.exists_async, path), until)
                if stat is not None:
                    return path, stat, children
        return None

    async def _watch(self, request: Request, place: _Place, predecessor: Contender, until: float) -> bool:
        """Be woken when the one before us leaves; False if it has left already."""
        path = f"{place.directory}/{predecessor.node}"
        if place.watched == path and place.session.watches(path, request):
            return True
        self._unwatch(request, place)
        place.watched = path
        try:
            await place.session.read(lambda: place.session.watch(path, request), until)
        except NoNodeError:
            return False
        return True

    @staticmethod
    def _unwatch(request: Request, place: _Place) -> None:
        if place.watched is not None:
            place.session.unwatch(place.watched, request)
            place.watched = None

    def _granted(self, request: Request, place: _Place) -> Grant:
        self._unwatch(request, place)
        session = place.session
        held = Held(session, place.session_id, request.owner, f"{place.directory}/{place.node}")
        held.ttl = self._sessions.granted_ttl(session, request.ttl)
        held.until = self._runtime.now() + held.ttl
        session.held[request.owner] = held
        if session.id != place.session_id:
            # It ended after the answer, and nobody would be told any more.
            session.held.pop(request.owner, None)
            message = f"the session at {self._label} has just ended"
            raise BackendUnavailable(message)
        self._caretaker.keep(held)
        session.forget(request)
        request.state = None
        return Grant(request.name, request.owner, place.token, held.ttl, place.asked_at, held)

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """See `LockBackend.wait`."""
        await super().wait(request, busy, until)
        # The node stays while the session does: a place in line is not given up because a connection broke.
        session, now = request.state.session, self._runtime.now()
        until = min(until, now + OUTAGE_SECONDS)
        while not (session.usable or session.failed or request.wake.is_set()) and now < until:
            await session.reconnected(min(until, now + OUTAGE_LOOK))
            now = self._runtime.now()

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`. What cannot be removed now is left to the caretaker."""
        place: _Place | None = request.state
        if place is None:
            # Nothing was created, or it was granted, and the answer came too late to be believed.
            held = self._sessions.holding(request.owner)
            if held is not None:
                await self._release(held, self._until(request.answer_by))
            return
        self._unwatch(request, place)
        leftover = place.leftover(request.owner)
        try:
            gone = await self._remove_leftover(leftover, self._until(request.answer_by))
        except LockError as error:
            log.debug("removing the place in line for lock %r: %s", request.name, error)
            self._caretaker.hasten(leftover)
        else:
            if not gone:
                self._caretaker.keep(leftover)
        place.session.forget(request)
        place.session.held.pop(request.owner, None)  # an interrupt may have come between the grant and its lease
        request.state = None

    async def _remove_leftover(self, leftover: Leftover, until: float) -> bool:
        """Remove what a request left behind; False if it is to be looked for once more."""
        session, directory, node = leftover.session, leftover.directory, leftover.node
        if session.id != leftover.session_id or session.over:
            return True
        if not session.usable:
            message = f"no connection to {self._label}"
            raise BackendUnavailable(message)
        if node is not None:
            await self._delete(session, f"{directory}/{node}", until)
            return True
        try:
            children = await self._children(session, directory, until)
        except LockError:
            leftover.missed_at = None  # an outage: what the old connection carries may still come
            raise
        found = [node for node in children if node.startswith(node_prefix(leftover.owner))]
        for node in found:
            await self._delete(session, f"{directory}/{node}", until)
        now = self._runtime.now()
        # The request may still be on its way, through a connection that hangs: see the caretaker.
        late = LATE_SHARE * session.seconds
        if found or (leftover.missed_at is not None and now >= leftover.missed_at + late):
            return True
        if leftover.missed_at is None:
            leftover.missed_at = now
        leftover.until = leftover.missed_at + late
        return False

    async def _delete(self, session: Session, path: str, until: float) -> bool:
        """Remove a node; False if it was gone."""
        if not session.usable:
            await session.connected(until, patient=True)
        try:
            await session.answer(session.client.delete_async(path), until)
        except NoNodeError:
            return False
        self._tree.left(session, path.rpartition("/")[0])
        return True

    # -- held ------------------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`. One heartbeat for each session; nodes are asked for once for each connection."""
        started = self._runtime.now()
        sessions = [grant.state.session for grant in grants]
        if not any(session.usable for session in sessions):
            await sessions[0].reconnected(started + CONNECT_SECONDS)
        beats: dict[Session, Any] = {}
        looks: list[Any] = []
        for grant in grants:
            held: Held = grant.state
            session = held.session
            if session.usable and session not in beats:
                # Answered by the leader: the member that answers for the nodes is not cut off from it.
                beats[session] = session.sync()
            looks.append(None if session not in beats or session.keeps_watch(held) else session.look_after(held))
        # A member that hangs must not hold up what the others have answered for leases that end sooner.
        patience = min(ANSWER_SECONDS, *(grant.ttl / 3 for grant in grants))
        until = min(started + CALL_SECONDS, self._runtime.now() + patience)
        problems = {session: await self._heard(session, beat, until) for session, beat in beats.items()}
        no_connection = BackendUnavailable(f"no connection to {self._label}")
        outcomes: list[Renewal] = []
        for grant, look in zip(grants, looks, strict=True):
            problem = problems.get(grant.state.session, no_connection)
            outcomes.append(Unknown(problem) if problem else await self._renewed(grant, look, started, until))
        return outcomes

    @staticmethod
    async def _heard(session: Session, beat: Any, until: float) -> LockError | None:  # noqa: ANN401 - kazoo's
        """Wait for the answer to a heartbeat; None if it came."""
        try:
            await session.answer(beat, until)
        except LockError as error:
            return error
        except NoNodeError:
            pass  # of a chroot that somebody removed; the leader has answered
        return None

    async def _renewed(self, grant: Grant, look: Any, started: float, until: float) -> Renewal:  # noqa: ANN401 - kazoo's
        held: Held = grant.state
        session = held.session
        stat = None
        if look is not None:
            try:
                stat = await session.answer(look, until)
            except LockError as error:
                return Unknown(error)
        if held.session_id != session.id:
            return Gone("session")
        if held.owner not in session.held or (look is not None and stat is None):
            return Gone("gone")
        if stat is not None and stat.ephemeralOwner != held.session_id:
            return Gone("taken")
        if grant.ttl > session.seconds + MILLISECOND:
            if grant.ttl > held.ttl:
                raise self._cannot_extend(grant, session)
            grant = replace(grant, ttl=session.seconds)  # another member, with other limits
        held.until = started + grant.ttl
        self._caretaker.keep(held)
        return Renewed(ttl=grant.ttl)

    def _cannot_extend(self, grant: Grant, session: Session) -> LockError:
        message = (
            f"lock {grant.name!r} at {self._url} cannot be extended to {grant.ttl:g} s: ZooKeeper keeps the nodes of a "
            f"session for {session.seconds:g} s. Acquire with the longest ttl that will be needed, or let it be renewed"
        )
        return Unsupported(message, name=grant.name, backend=self._url)

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """See `LockBackend.release`."""
        return await self._release(grant.state, self._until(answer_by))

    async def _release(self, held: Held, until: float) -> bool:
        session = held.session
        session.let_go(held)
        if session.id != held.session_id:
            self._caretaker.forget(held)
            return False  # the server has removed it with its session
        try:
            ours = await self._delete(session, held.path, until)
        except BaseException:
            # kazoo keeps the session, and with it the node: the caretaker goes on.
            self._caretaker.hasten(held)
            raise
        self._caretaker.forget(held)
        return ours and session.id == held.session_id

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`. The end of a session frees all that it holds, in one transaction."""
        until = self._until(answer_by)
        lent: list[tuple[Held, Any]] = []
        for grant in grants:
            held: Held = grant.state
            self._caretaker.forget(held)
            if not self._sessions.is_own(held.session):
                held.session.let_go(held)
                lent.append((held, held.session.client.delete_async(held.path)))
        own = {grant.state.session for grant in grants if self._sessions.is_own(grant.state.session)}
        problem: LockError | None = None
        try:
            await self._sessions.end([*own], until)
        except LockError as error:
            problem = error
        for held, result in lent:
            try:
                await held.session.answer(result, until)
            except NoNodeError:
                continue
            except LockError as error:
                self._caretaker.hasten(held)
                problem = error
        if problem is not None:
            raise problem

    async def _remove(self, due: Held | Leftover) -> bool:
        """Remove the node of a lease that has ended, or of a request that was given up, for the caretaker."""
        until = self._until()
        if isinstance(due, Leftover):
            return await self._remove_leftover(due, until)
        due.session.let_go(due)
        if not due.session.usable:
            message = f"no connection to {self._label}"
            raise BackendUnavailable(message)
        await self._delete(due.session, due.path, until)
        return True

    # -- looking and breaking --------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `LockBackend.holders`."""
        until = self._until()
        session = await self._sessions.any(until)
        directory = f"{self._tree.root}/{escape_name(name)}"
        while line := contenders(await self._children(session, directory, until)):
            path = f"{directory}/{line[0].node}"
            try:
                data, stat = await session.read(partial(session.client.get_async, path), until)
            except NoNodeError:
                continue  # it has just left: who is next?
            return [Holder(line[0].owner, stat.czxid, None, decode_metadata(data), len(line) - 1)]
        return []

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`."""
        until = self._until()
        session = await self._sessions.any(until)
        directory = f"{self._tree.root}/{escape_name(name)}"
        line = contenders(await self._children(session, directory, until))
        return bool(line) and await self._delete(session, f"{directory}/{line[0].node}", until)

    async def ping(self) -> None:
        """See `LockBackend.ping`."""
        until = self._until()
        session = await self._sessions.any(until)
        await session.answer(session.client.exists_async("/"), until)

    async def close(self) -> None:
        """See `LockBackend.close`. Ends the sessions that are ours, and with them whatever is left."""
        self._caretaker.close(self._sessions.is_own)
        await self._sessions.close()


class _Place:
    """
    A place in line.

    Attributes:
        session: In which the node is.
        session_id: The session's id then.
        directory: Of the lock.
        node: Its name; None until the server has said that it created it.
        token: Its ``czxid``.
        watched: Path of the node before it, whose end wakes us.
        asked_at: Before the question was sent whose answer says that we are first, if that was before `try_acquire`.
    """

    __slots__ = ("asked_at", "directory", "node", "session", "session_id", "token", "watched")

    def __init__(self, session: Session, session_id: int, directory: str) -> None:
        self.session = session
        self.session_id = session_id
        self.directory = directory
        self.node: str | None = None
        self.token = 0
        self.watched: str | None = None
        self.asked_at: float | None = None

    def leftover(self, owner: str) -> Leftover:
        """Give what has to be removed of it."""
        return Leftover(owner, self.session, self.session_id, self.directory, self.node)


_process_of: WeakKeyDictionary[KazooClient, int] = WeakKeyDictionary()
"""In which process a client of an application was first given to us."""


def _check_adoptable(client: KazooClient) -> None:
    """
    See that kazoo's threads serve this client.

    Raises:
        ConfigurationError: They are gevent's or eventlet's, or stayed in the parent of a forked process.
    """
    if client.handler.name != "sequential_threading_handler":
        message = f"lockkit needs a KazooClient with kazoo's own threads, not with its {client.handler.name}"
        raise ConfigurationError(message)
    if _process_of.setdefault(client, os.getpid()) != os.getpid():
        message = (
            "this KazooClient belongs to the parent process: start one in the child, and give that to from_client()"
        )
        raise ConfigurationError(message)
