"""
The directories of locks: made when they are missing, removed when they are unused.

A lock's directory is a container node: the ensemble removes it some time after its last child has gone (ZooKeeper
Administrator's Guide, ``znode.container.checkIntervalMs``: it checks every minute). It decides in one atomic step
whether the node is empty, so a client that creates a child at that moment gets "no node", and makes the directory anew.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError

from lockkit.backend import SPACES, apart, split_space
from lockkit.backends.zookeeper.node import LockNode
from lockkit.backends.zookeeper.path import Contender, escape_name, is_of_owner, name_of, with_broken
from lockkit.backends.zookeeper.quirks import create_directory
from lockkit.backends.zookeeper.session import Session
from lockkit.errors import BackendUnavailable, LockError
from lockkit.units import Instant

ATTEMPTS_MAX = 10
"""How often a directory is made that another client removes at once. Each time it lived shorter than a round trip: more
than a few are no coincidence."""

_NOTES = "+note"

LATE_SHARE = 1.5
"""In session timeouts: how long after it was missed a node whose creation was not answered is looked for again. By then
the server has closed the connection that may still have carried the request."""


class LockDirectories:
    """The directories of locks below one root, and the creation and removal of nodes in them."""

    def __init__(self, root: str, *, cleanup: bool) -> None:
        self._root = root
        self._cleanup = cleanup

    def path(self, name: str, what: str = "") -> str:
        """Give the path of a lock's directory, or of what is kept beside those."""
        space, name = split_space(name)
        return f"{self._root}{f'+{space}' if space else ''}{what}/{escape_name(name)}"

    def note_path(self, name: str) -> str:
        """Give the path of the note on a lock."""
        return self.path(name, _NOTES)

    @property
    def clock_path(self) -> str:
        """Path of a node that may be changed to learn the leader's clock: the directory of the notes of once."""
        return self.note_path(apart("once", "x")).rpartition("/")[0]

    async def names(self, session: Session, prefix: str, until: Instant) -> list[str]:
        """Name the locks of a space that have a directory, held or not; what lockkit cannot have made is left out."""
        space, prefix = split_space(prefix)
        root = f"{self._root}+{space}" if space else self._root
        found = [name_of(child) for child in await session.children(root, until)]
        names = [name for name in found if name is not None and name.startswith(prefix)]
        return [apart(space, name) for name in names] if space else names

    async def create_in(
        self, session: Session, path: str, create: Callable[[], Coroutine[Any, Any, Any]], until: Instant
    ) -> Any:  # noqa: ANN401 - what `create` returns
        """Call `create`, which creates a node in the directory of a lock; make the directory if it is missing."""
        for _ in range(ATTEMPTS_MAX):
            try:
                return await create()
            except NoNodeError:
                await self.make(session, path, until)
        message = f"another client removes {path} as often as lockkit creates it"
        raise BackendUnavailable(message)

    async def make(self, session: Session, path: str, until: Instant) -> None:
        """Make a directory of locks or notes, after those above it: also an application's chroot, if it is missing."""
        # The directories above those of the locks stay: users agreed on them, and may have set access rights there.
        container = self._cleanup and path.count("/") > self._root.count("/")
        try:
            await session.answer(create_directory(session.client, path, container=container), until)
        except NodeExistsError:
            return  # another client was faster
        except NoNodeError:
            parent = path.rpartition("/")[0]
            if parent:
                await self.make(session, parent, until)
            with suppress(NodeExistsError, NoNodeError):  # the next attempt to create a node in it deals with either
                await session.answer(create_directory(session.client, path, container=container), until)

    async def delete_all(self, session: Session, until: Instant) -> None:
        """Delete the root with all locks below it, and what lives apart from them."""
        for space in ("", *(f"+{space}" for space in SPACES)):
            await self._delete_below(session, f"{self._root}{space}", until)
            await self._delete_below(session, f"{self._root}{space}{_NOTES}", until)

    async def _delete_below(self, session: Session, path: str, until: Instant) -> None:
        for name in await session.children(path, until):
            await self._delete_below(session, f"{path}/{name}", until)
        with suppress(NoNodeError):
            await session.answer(session.client.delete_async(path), until)

    async def delete_node(
        self, session: Session, directory: str, node: str, until: Instant, mark: str | None = None
    ) -> bool:
        """Delete a node of a lock with its mark; False if the node was gone."""
        if not session.usable:
            await session.connected(until, patient=True)
        path, client = f"{directory}/{node}", session.client
        if mark is not None:  # in one step, which wakes a waiter once; unless either is missing
            transaction = client.transaction()
            transaction.delete(path)
            transaction.delete(f"{path}{mark}")
            if await session.committed(transaction.commit_async(), until) is None:
                return True
        deleted = client.delete_async(path)
        if mark is not None:
            client.delete_async(f"{path}{mark}")  # without the node it means nothing
        try:
            await session.answer(deleted, until)
        except NoNodeError:
            return False
        return True

    async def delete_held(self, session: Session, directory: str, queue: Sequence[Contender], until: Instant) -> bool:
        """
        Delete the nodes of all who hold a lock, with all requests sent at once; False if none was left.

        Before that their owners are noted in the directory: the server carries out a client's requests in their order.
        Without the right to do so, their holders are told that the nodes are gone.
        """
        with suppress(NoNodeError):
            data, _ = await session.read(partial(session.client.get_async, directory), until)
            if (noted := with_broken(data, (one.owner for one in queue))) is not None:
                session.client.set_async(directory, noted)
        sent = [session.client.delete_async(f"{directory}/{one.node}") for one in queue]
        for one in queue:
            if one.mark is not None:
                session.client.delete_async(f"{directory}/{one.node}{one.mark}")
        existed = False
        for result in sent:
            with suppress(NoNodeError):
                await session.answer(result, until)
                existed = True
        return existed

    async def remove(self, node: LockNode, until: Instant) -> bool:
        """Remove the node of a lease that has ended, or of a request that was given up."""
        if not node.session_lives:
            return True
        if node.name is None:
            node.session.check_usable()
            return await self._remove_by_owner(node, until)
        node.session.forget_lease(node.path, node.owner)
        node.session.check_usable()
        await self.delete_node(node.session, node.directory, node.name, until, node.mark)
        return True

    async def _remove_by_owner(self, node: LockNode, until: Instant) -> bool:
        """Remove a node that may have been created, or may still be: see `lockkit.backends.zookeeper.short_leases`."""
        session = node.session
        try:
            children = await session.children(node.directory, until)
        except LockError:
            node.missed_at = None  # an outage: what the old connection carries may still come
            raise
        found = [child for child in children if is_of_owner(child, node.owner)]
        for child in found:
            await self.delete_node(session, node.directory, child, until)
        now = session.now
        if node.missed_at is None:
            node.missed_at = now
        node.remove_at = node.missed_at + LATE_SHARE * session.granted_seconds
        return bool(found) or now >= node.remove_at
