"""
The nodes of locks: their directories, the node of each request, its removal, and notes.

A lock's directory is a container node: the ensemble removes it some time after its last child has gone (ZooKeeper
Administrator's Guide, ``znode.container.checkIntervalMs``: it checks every minute). It decides in one atomic step
whether the node is empty, so a client that creates a child at that moment gets "no node", and makes the directory anew.

A note is a persistent node beside the locks' directories::

    /lockkit+once/charge:17/9f…c1__lock__0000000041       the holder of the lock of a run
    /lockkit+once+note/charge:17                          the note on that lock

Its data is its life in milliseconds, a space, and the text; its life counts from the node's ``mtime``, which the
ensemble's leader sets. It is written in one transaction with a check that the holder's node exists. The ensemble does
not remove a note whose life is over: lockkit deletes it when it is read, or overwrites it.

To know the leader's clock, a client sets the data of the notes' directory and reads the ``mtime`` in the answer; it
repeats that after `CLOCK_SECONDS` at the earliest.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.protocol.serialization import CheckVersion, Create, Create2, Delete, GetData, SetData, Transaction

from lockkit.backend import SPACES, Note, apart, split_space, unsent, with_since
from lockkit.backends.zookeeper.connection import Answer
from lockkit.backends.zookeeper.path import Contender, escape_name, name_of, with_broken
from lockkit.backends.zookeeper.session import Session
from lockkit.background import Background, nothing
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

EPHEMERAL, SEQUENCE, CONTAINER = 1, 2, 4
"""ZooKeeper's ``CreateMode`` flags."""

ATTEMPTS_MAX = 10
"""How often something is made anew that other clients undo at once. Each time that takes them less than a round trip:
more than a few are no coincidence."""

CLOCK_SECONDS = 60.0
"""How long a client relies on what it knows of the leader's clock. Longer notices later that it was set; shorter costs
another round trip more often."""

LATE_SHARE = 1.5
"""In session timeouts: how long after it was missed a node whose creation was not answered is looked for again. By then
the server has closed the connection that may still have carried the request."""

LINGER_SECONDS = 10.0
"""How long `Removals` runs without work. Shorter starts threads more often; longer keeps a dropped client."""

LOOK_SECONDS = 0.5
"""How often it looks for nodes that are due, or were not removed before. Longer keeps others waiting; shorter asks in
vain more often."""

_NOTES = "+note"


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo has no types
    """ZooKeeper's request ``createContainer`` (since 3.5.3), which kazoo lacks."""

    type = 19


@dataclass(slots=True, eq=False)
class LockNode:
    """
    The node of a request: its place in the queue of a lock, then what holds the lock.

    It is sequential and ephemeral. Each change names it by its path, which has the random owner of the request in it:
    if the node is gone, nothing is changed. Times are the client's monotonic clock.
    """

    session: Session
    session_id: int  # of the session in which its creation was sent: later the session gets another one
    owner: str  # of the request, and of the lease
    directory: str  # path of the lock's directory
    data: bytes  # with which it was created, or that it was last told to have: the metadata
    name: str | None = None  # None until the server has said that it created the node
    mark: str | None = None  # end of the name of its mark (`lockkit.backends.zookeeper.path`), once that may exist
    slot: int | None = None  # of a permit that was granted
    token: int = 0  # its ``czxid``; 0 before
    ttl: Seconds = 0.0  # of the lease, as granted
    joined_at: Instant = inf  # when it was created
    since: float | None = None  # when the lease was granted, Unix time; None if that is when the server created it
    remove_at: Instant = inf  # when `Removals` removes it, unless it is renewed
    missed_at: Instant | None = None  # when it was first looked for by its owner and not found

    @property
    def path(self) -> str:
        """Its path. Only once it has a name."""
        assert self.name is not None
        return f"{self.directory}/{self.name}"

    @property
    def session_lives(self) -> bool:
        """Whether the server may still have it: it removes the nodes of a session that ends."""
        return not self.session.ended and self.session.id == self.session_id

    def send_metadata(self, metadata: str) -> Answer:
        """
        Write its data, and so wake those that watch it.

        Under the mutex: requests are sent in the order of these calls, and none brings back older data.
        """
        with self.session.mutex:
            self.data = (metadata if self.since is None else with_since(metadata, self.since)).encode()
            return self.session.send(SetData(self.path, self.data, -1))[0]

    async def create_mark(self, end: str, until: Instant, *, behind: str | None = None) -> bool:
        """Create its mark, and wake those that watch it. Again, it changes nothing."""
        session = self.session
        await session.connected(until, patient=True)
        self.mark = end
        checks = [] if behind is None else [CheckVersion(behind, -1)]
        create = Create(f"{self.path}{end}", b"", session.acl, EPHEMERAL)
        with session.mutex:  # as in `send_metadata`
            sent = session.send(Transaction([*checks, SetData(self.path, self.data, -1), create]))[0]
        failed = await session.committed(sent, until)
        if failed is None or failed == len(checks) + 1:  # it was created before, and the answer was lost
            return self.session_lives
        self.mark = None
        return False

    async def delete(self, until: Instant) -> bool:
        """Delete it with its mark; False if it was gone."""
        session = self.session
        session.forget_lease(self.path, self.owner)
        if not session.usable:
            await session.connected(until, patient=True)
        deletions = [Delete(self.path, -1)]
        if self.mark is not None:  # in one step, which wakes a waiter once; unless either is missing
            deletions.append(Delete(f"{self.path}{self.mark}", -1))
            if await session.committed(session.send(Transaction(deletions))[0], until) is None:
                return True
        try:
            await session.answer(session.send(*deletions)[0], until)  # without the node its mark means nothing
        except NoNodeError:
            return False
        return True


class LockNodes:
    """The directories of locks and notes below one root."""

    def __init__(self, root: str, *, cleanup: bool) -> None:
        self._root = root
        self._cleanup = cleanup
        self._clock_offset = 0.0
        self._clock_at = -inf

    def directory(self, name: str, what: str = "") -> str:
        """Give the path of a lock's directory, or of what is kept beside those."""
        space, name = split_space(name)
        return f"{self._root}{f'+{space}' if space else ''}{what}/{escape_name(name)}"

    async def names(self, session: Session, prefix: str, until: Instant) -> list[str]:
        """Name the locks of a space that have a directory, held or not; what lockkit cannot have made is left out."""
        space, prefix = split_space(prefix)
        found = [name_of(child) for child in await session.children(self._space(space), until)]
        names = [name for name in found if name is not None and name.startswith(prefix)]
        return [apart(space, name) for name in names] if space else names

    def _space(self, space: str) -> str:
        return f"{self._root}+{space}" if space else self._root

    async def create_in(
        self, session: Session, path: str, create: Callable[[], Coroutine[Any, Any, Any]], until: Instant
    ) -> Any:  # noqa: ANN401 - what `create` returns
        """Call `create`, which needs a directory of locks or notes, or one above; make that if it is missing."""
        for _ in range(ATTEMPTS_MAX):
            try:
                return await create()
            except NoNodeError:
                await self._make(session, path, until)
        raise BackendUnavailable(f"another client removes {path} as often as lockkit creates it")

    async def _make(self, session: Session, path: str, until: Instant) -> None:
        # Those above that of a lock stay: users agreed on them, and may have set access rights there.
        container = self._cleanup and path.count("/") > self._root.count("/")
        request = (_CreateContainer if container else Create2)(path, b"", session.acl, CONTAINER if container else 0)
        with suppress(NodeExistsError):  # another client was faster
            if parent := path.rpartition("/")[0]:
                await self.create_in(session, parent, partial(session.ask, request, until), until)
            else:
                await session.ask(request, until)

    async def erase(self, session: Session, until: Instant) -> None:
        """Delete the root with all locks below it, and what lives apart from them."""
        for space in ("", *SPACES):
            for what in ("", _NOTES):
                await self._delete_below(session, self._space(space) + what, until)

    async def _delete_below(self, session: Session, path: str, until: Instant) -> None:
        for name in await session.children(path, until):
            await self._delete_below(session, f"{path}/{name}", until)
        with suppress(NoNodeError):
            await session.ask(Delete(path, -1), until)

    async def delete_held(self, session: Session, directory: str, queue: Sequence[Contender], until: Instant) -> bool:
        """
        Delete the nodes of all these holders of a lock, with all requests sent at once; False if none was left.

        Before that their owners are noted in the directory: the server carries out a client's requests in their order.
        Without the right to do so, their holders are told that the nodes are gone.
        """
        requests: list[Any] = [Delete(f"{directory}/{one.node}", -1) for one in queue]
        requests += [Delete(f"{directory}/{one.node}{one.mark}", -1) for one in queue if one.mark is not None]
        with suppress(NoNodeError):
            data, _ = await session.read(GetData(directory, None), until=until)
            if (noted := with_broken(data, (one.owner for one in queue))) is not None:
                session.send(SetData(directory, noted, -1))
        deleted = await session.of_each(requests, until)
        return any(deleted[: len(queue)])

    # -- notes -----------------------------------------------------------------------------------------------------

    async def read_note(self, session: Session, name: str, until: Instant) -> Note | None:
        path = self.directory(name, _NOTES)
        try:
            data, stat = await session.read(GetData(path, None), until=until)
        except NoNodeError:
            return None
        keep_ms, _, text = data.decode("utf-8", "replace").partition(" ")
        if not re.fullmatch(r"\d{1,15}", keep_ms):
            return None  # not lockkit's, or not of this form
        remaining = (stat.mtime + int(keep_ms)) / 1000 - await self.clock(session, name, until)
        if remaining > 0:
            return Note(text, remaining)
        session.send(Delete(path, stat.version))  # refused if it was written meanwhile; nobody waits
        return None

    async def clock(self, session: Session, name: str, until: Instant) -> float:
        """Give the leader's wall clock, Unix time; for that, change the directory of the note on that lock."""
        asked_at = session.now
        if asked_at - self._clock_at >= CLOCK_SECONDS:
            directory = self.directory(name, _NOTES).rpartition("/")[0]
            change = partial(session.ask, SetData(directory, b"", -1), until)
            stat = await self.create_in(session, directory, change, until)
            self._clock_offset = stat.mtime / 1000 - asked_at
            self._clock_at = asked_at
        return session.now + self._clock_offset

    async def write_note(self, node: LockNode, name: str, text: str, keep: Seconds, until: Instant) -> bool:
        session, path = node.session, self.directory(name, _NOTES)
        data = f"{math.ceil(keep * 1000)} {text}".encode()
        create = True  # most keys get one note
        for _ in range(ATTEMPTS_MAX):
            write = Create(path, data, session.acl, 0) if create else SetData(path, data, -1)
            failed = await session.committed(session.send(Transaction([CheckVersion(node.path, -1), write]))[0], until)
            if failed is None:
                return node.session_lives
            if failed == 0:
                return False
            if not create:  # neither a note nor, it seems, a directory for it
                await self._make(session, path.rpartition("/")[0], until)
            create = not create
        raise BackendUnavailable(f"others create and delete {path} as often as lockkit writes it")


class Removals:
    """
    Removes the nodes that the server would keep for too long, each at its `LockNode.remove_at`.

    ZooKeeper removes a node when its session ends, and that is kept alive as long as this process runs. So the client
    must remove what ends earlier, and keep trying until the server has confirmed it:

    - the node of a lease that is renewed no more: ``renew=False``, ``max_hold``, dropped without release, or released
      while the server could not be reached. It goes when its ttl is over;
    - the place in the queue of a request that was given up while the server could not be reached. It would stay as long
      as the client lives, and once it is first, nobody could take the lock any more;
    - a node that may have been created by a request whose answer was lost. The server may carry out such a request
      late: A sends it over a connection that hangs, reconnects, finds nothing and goes on; then the old connection gets
      through. The server reads a connection for one session timeout at most, so the client looks once more after that.

    One coroutine per client, started when first needed and ended when idle.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._nodes: dict[str, LockNode] = {}  # by owner
        self._closed = runtime.event()
        self._background = Background(runtime, "lockkit-zookeeper-removals", self._run, nothing)

    def add(self, node: LockNode, remove_at: Instant = 0.0) -> None:
        """Remove a node at that time, or now: it was given up, and the server has not confirmed that it is gone."""
        node.remove_at = remove_at
        self._nodes[node.owner] = node
        self._background.wake()  # if it is just ending
        try:
            if not self._background.running:
                self._background.start()
        except RuntimeError as error:  # the next node tries again, as does the next renewal
            log.warning("cannot start a thread that removes the nodes of leases that end: %s", error)

    def forget(self, node: LockNode) -> None:
        """Leave a node: it is gone, or goes with its session."""
        self._nodes.pop(node.owner, None)

    def close(self) -> None:
        """Leave the nodes: they go with their sessions."""
        self._nodes.clear()
        self._closed.set()

    async def remove(self, node: LockNode, until: Instant) -> bool:
        """Remove a node; False if its creation was not answered, so that it may come later."""
        session = node.session
        if not node.session_lives:
            return True
        if not session.usable:
            raise unsent("no connection")
        if node.name is not None:
            await node.delete(until)
            return True
        try:
            children = await session.children(node.directory, until)
        except LockError:
            node.missed_at = None  # an outage: what the old connection carries may still come
            raise
        found = [child for child in children if child.startswith(f"{node.owner}__")]
        for child in found:
            with suppress(NoNodeError):
                await session.ask(Delete(f"{node.directory}/{child}", -1), until)
        if node.missed_at is None:
            node.missed_at = session.now
        node.remove_at = node.missed_at + LATE_SHARE * session.granted_seconds
        return bool(found) or session.now >= node.remove_at

    async def _run(self) -> None:
        idle_since = self._runtime.now()
        while self._runtime.now() < idle_since + LINGER_SECONDS and not self._closed.is_set():
            for node in [*self._nodes.values()]:
                idle_since = self._runtime.now()
                if node.remove_at > idle_since:
                    continue
                try:
                    if await self.remove(node, inf):
                        self.forget(node)
                except Exception as error:  # noqa: BLE001 - whatever it is, the node must go: without it the others wait
                    log.debug("removing the node of a lease that has ended: %r", error)
            await self._closed.wait(LOOK_SECONDS)
