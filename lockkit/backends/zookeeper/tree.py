"""
The directories of locks: made when they are missing, gone when nobody uses them.

A lock's directory is a container node: the ensemble removes it some time after its last child has gone (ZooKeeper
Administrator's Guide, ``znode.container.checkIntervalMs``: looked after every minute). It decides in one atomic step
whether the node is empty, so whoever creates a child in this instant gets "no node" and makes the directory again.

Where the ensemble has no containers, whoever leaves tries to delete the directory, which ZooKeeper refuses unless it is
empty: the same rule, at the price of a request for each release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kazoo.exceptions import NodeExistsError, NoNodeError, UnimplementedError

from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from lockkit.backends.zookeeper.session import Session

__all__ = ["Tree"]

ATTEMPTS_MAX = 10
"""How often a directory is made again that somebody removes meanwhile. Each time its life was shorter than a round
trip: more than a few are no coincidence."""


class Tree:
    """
    The directories below one root.

    Attributes:
        root: Path of the directory of all locks.
        containers: The ensemble has container nodes, and they are wanted.
        cleanup: Directories of locks shall go away.
    """

    def __init__(self, root: str, *, cleanup: bool) -> None:
        """Know no directory yet."""
        self.root = root
        self.cleanup = cleanup
        self.containers = cleanup

    async def within(
        self, session: Session, path: str, attempt: Callable[[], Coroutine[Any, Any, Any]], until: float
    ) -> Any:  # noqa: ANN401 - what `attempt` gives
        """
        Run `attempt`, which creates something in the directory of a lock, and make that if it is missing.

        Raises:
            BackendUnavailable: Somebody removes the directory again and again; and whatever `attempt` raises.
        """
        for _ in range(ATTEMPTS_MAX):
            try:
                return await attempt()
            except NoNodeError:
                await self._make(session, path, until)
        message = f"{path} is removed by somebody as often as it is created"
        raise BackendUnavailable(message)

    async def _make(self, session: Session, path: str, until: float) -> None:
        """Make a directory, after those above it."""
        try:
            await session.answer(self._create(session, path), until)
        except NodeExistsError:
            return  # somebody was quicker
        except NoNodeError:
            parent = path.rpartition("/")[0]
            if parent:
                await self._make(session, parent, until)
            await self._make_again(session, path, until)
        except LockError as error:
            if not (self.containers and isinstance(error.__cause__, UnimplementedError)):
                raise
            self.containers = False
            await self._make(session, path, until)

    async def _make_again(self, session: Session, path: str, until: float) -> None:
        try:
            await session.answer(self._create(session, path), until)
        except (NodeExistsError, NoNodeError):
            return  # both are for the next attempt to find out

    def _create(self, session: Session, path: str) -> Any:  # noqa: ANN401 - kazoo has no types
        # What is above the locks stays: it is what was agreed on, and rights may be set there.
        return session.create_directory(path, container=self.containers and len(path) > len(self.root))

    def left(self, session: Session, path: str) -> None:
        """Remove the directory of a lock that was left, if it is empty; nobody waits for the answer."""
        if self.cleanup and not self.containers:
            session.client.delete_async(path)
