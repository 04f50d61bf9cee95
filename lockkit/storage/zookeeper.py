"""
Optimistic updates of a ZooKeeper node: see `lockkit.optimistic`.

ZooKeeper counts the changes of a node, and ``setData`` and ``delete`` may name the count that they expect (ZooKeeper
Programmer's Guide, "ZooKeeper Data Model"). Known limit: a node that was deleted and created anew counts from 0 again,
and after the same number of changes it looks like the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError

from lockkit import validation
from lockkit.backends.zookeeper.connection import outcome
from lockkit.backends.zookeeper.errors import DRIVER_ERRORS, translate, was_unanswered
from lockkit.backends.zookeeper.options import client_label
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import Runtime
from lockkit.storage.retry import DELETE, Conflict, Delete, OptimisticUpdate, unknown_outcome


class NodeUpdate(OptimisticUpdate):
    """One call of `lockkit.optimistic.update_node` or `lockkit.optimistic.update_node_async`."""

    def __init__(self, runtime: Runtime, client: object, path: object, fn: object) -> None:
        """Check the arguments. Nothing is sent."""
        if not isinstance(client, KazooClient) or client.handler.name != "sequential_threading_handler":
            message = f"client must be a KazooClient with kazoo's own threads, not {validation.shown(client)}"
            raise ConfigurationError(message)
        if not isinstance(path, str) or not path.startswith("/"):
            raise ConfigurationError(f"path must be a str that starts with a slash, not {validation.shown(path)}")
        super().__init__(runtime, fn, path, client_label(client))
        self._client = client
        self._path = path

    async def _attempt(self) -> Any:  # noqa: ANN401 - what `fn` returns
        try:
            data, stat = await self._ask(self._client.get_async)
        except NoNodeError:
            data, stat = None, None
        new = await self.new_value(data)
        if new is not None:
            await self._write(new, stat)
        return new

    async def _write(self, new: bytes | str | Literal[Delete.DELETE], stat: Any) -> None:  # noqa: ANN401 - kazoo's
        value = new.encode() if isinstance(new, str) else new
        try:
            if stat is None:
                if value is not DELETE:
                    await self._change(partial(self._client.create_async, value=value))
            elif value is DELETE:
                await self._change(partial(self._client.delete_async, version=stat.version))
            else:
                await self._change(partial(self._client.set_async, value=value, version=stat.version))
        except (BadVersionError, NodeExistsError) as error:
            raise Conflict from error
        except NoNodeError as error:
            if stat is not None:
                raise Conflict from error
            message = f"{self._path!r} at {self.label} cannot be created: create its parent node first"
            raise ConfigurationError(message, name=self._path) from error
        except NotEmptyError as error:
            message = f"{self._path!r} at {self.label} has children and cannot be deleted"
            raise ConfigurationError(message, name=self._path) from error

    async def _change(self, ask: Callable[[str], Any]) -> None:
        """Send a change. If it may have been made already, it is not sent again."""
        try:
            await self._ask(ask)
        except BackendUnavailable as error:
            if was_unanswered(error):
                raise unknown_outcome(self._path, self.label, error) from error.__cause__
            raise

    async def _ask(self, ask: Callable[[str], Any]) -> Any:  # noqa: ANN401 - kazoo has no types
        if not self._client.connected:
            # kazoo would queue the request, and send it when it is connected again, which may be much later.
            message = f"no connection to {self.label}: is the client started, and the ensemble up?"
            raise BackendUnavailable(message, name=self._path)
        try:
            return await outcome(self.runtime, ask(self._path))
        except (BadVersionError, NodeExistsError, NoNodeError, NotEmptyError):
            raise
        except DRIVER_ERRORS as error:
            made = translate(error, self.label)
            made.name = self._path
            raise made from error
