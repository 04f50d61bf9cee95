"""
Hearing that the contender in front has gone: one watch stream per client, whatever the number of waiters.

Each waiter watches the key in front of it, and nobody else is woken when that goes (no herd).

The order that keeps a wake-up from being missed: watch from now on, and when the member has confirmed that, look once
more. Why not from the revision at which the waiter looked: unless nothing at all was written since, the member takes
such a watch for one that lags behind, and serves those every 100 ms (etcd, ``mvcc/watchable_store.go``,
``syncWatchersLoop``): 95 ms to the event where it was 0.8. It also is why compaction does not reach a waiter; a watch
that the member cancels all the same makes it look again.

When the stream ends (the member died, has no leader, does not accept the login any more) all waiters look again, and
the next watch opens another one.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from lockkit.backends import _etcd_rpc_pb2 as rpc
from lockkit.backends._etcd_errors import DRIVER_ERRORS, code_of, details_of, is_stale_token
from lockkit.backends._etcd_link import AsyncioLink, ClosedError, Link

if TYPE_CHECKING:
    from lockkit.backends._etcd_cluster import Cluster
    from lockkit.backends._etcd_link import Metadata
    from lockkit.backends._etcd_session import Contender
    from lockkit.runtime import Runtime

__all__ = ["Watches"]

log = logging.getLogger("lockkit")

# A member that lost the majority ends the stream, rather than stay silent (clientv3.WithRequireLeader).
_REQUIRE_LEADER = (("hasleader", "true"),)


class Watches:
    """The watches of one client."""

    def __init__(self, runtime: Runtime, cluster: Cluster) -> None:
        """Watch nothing yet."""
        self._runtime = runtime
        self._cluster = cluster
        self._mutex = runtime.mutex()
        self._ids = count(1)
        self._watching: dict[int, Contender] = {}
        self._stream: _Stream | None = None

    def watch(self, contender: Contender) -> None:
        """
        See that its `Contender.wake` is set when the key before it goes, and once as soon as it is watched.

        Raises:
            LockError: The client is closed.
        """
        if contender.watch_id and contender.watched == contender.before:
            return
        self.forget(contender)
        with self._mutex:
            stream = self._stream
            if stream is None:
                link, _ = self._cluster.link()
                metadata = (*(self._cluster.login.metadata or ()), *_REQUIRE_LEADER)
                kind = _TaskStream if isinstance(link, AsyncioLink) else _ThreadStream
                stream = self._stream = kind(link, self._heard, self._ended)
                stream.open(self._runtime, metadata)
            contender.watch_id = next(self._ids)
            contender.watched = contender.before
            self._watching[contender.watch_id] = contender
            create = rpc.WatchCreateRequest(
                key=contender.before, watch_id=contender.watch_id, filters=[rpc.WatchCreateRequest.NOPUT]
            )
            stream.send(rpc.WatchRequest(create_request=create))

    def forget(self, contender: Contender) -> None:
        """Watch for it no more."""
        if not contender.watch_id:
            return
        with self._mutex:
            known = self._watching.pop(contender.watch_id, None)
            if known is not None and self._stream is not None:
                cancel = rpc.WatchCancelRequest(watch_id=contender.watch_id)
                self._stream.send(rpc.WatchRequest(cancel_request=cancel))
            contender.watch_id = 0

    def _heard(self, answer: Any) -> bool:  # noqa: ANN401 - a WatchResponse
        """Wake whom an answer is about: confirmed, gone, or not watched any more. False: the stream is of no use."""
        with self._mutex:
            contender = self._watching.get(answer.watch_id)
            if answer.canceled and contender is not None:
                del self._watching[answer.watch_id]
                contender.watch_id = 0
        if contender is not None and contender.wake is not None:
            contender.wake.set()
        if answer.canceled and answer.created:
            log.debug("etcd does not watch: %s", answer.cancel_reason)
            return False
        return True

    def _ended(self, stream: _Stream, error: Exception | None) -> None:
        """Let everybody look again: something may have gone while nobody told."""
        with self._mutex:
            if self._stream is not stream:
                return
            self._stream = None
            waiting = [*self._watching.values()]
            self._watching.clear()
            for contender in waiting:
                contender.watch_id = 0
        if error is not None:
            log.debug("watching at %s ended: %s %s", stream.link.label, code_of(error).name, details_of(error))
            if is_stale_token(error):
                self._cluster.login.forget()
            else:
                self._cluster.leave(stream.link, error)
        else:
            # Refused, as with a token that has run out: the next call logs in anew if that is the reason.
            self._cluster.login.forget()
        for contender in waiting:
            if contender.wake is not None:
                contender.wake.set()

    def close(self) -> None:
        """End the stream. Who still waits looks again."""
        with self._mutex:
            stream = self._stream
        if stream is not None:
            self._ended(stream, None)
            stream.close()


class _Stream(ABC):
    """One watch stream: requests are sent from anywhere, answers are read in the background."""

    def __init__(
        self, link: Link, heard: Callable[[Any], bool], ended: Callable[[_Stream, Exception | None], None]
    ) -> None:
        self.link = link
        self._heard = heard
        self._ended = ended
        self._call: Any = None

    @abstractmethod
    def open(self, runtime: Runtime, metadata: Metadata) -> None:
        """Start; does not wait for an answer."""

    @abstractmethod
    def send(self, request: Any) -> None:  # noqa: ANN401 - a WatchRequest
        """Send a request, without waiting."""

    @abstractmethod
    def close(self) -> None:
        """End it. May be called twice."""


class _ThreadStream(_Stream):
    """
    On grpc's blocking stack: a thread of ours reads, and one of grpc's writes.

    The call is made in our thread, where no Ctrl-C can strike in the middle of grpc's code and leave its locks taken.
    """

    def open(self, runtime: Runtime, metadata: Metadata) -> None:
        del runtime  # under asyncio (see ForkedLink) it would start a task
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._read, args=(metadata,), name="lockkit-etcd-watch", daemon=True).start()

    def send(self, request: Any) -> None:  # noqa: ANN401 - see _Stream
        self._requests.put(request)

    def _read(self, metadata: Metadata) -> None:
        error: Exception | None = None
        try:
            self._call = self.link.open_stream(iter(self._requests.get, None), metadata)
            if self._closed:
                self._call.cancel()
            for answer in self._call:
                if not self._heard(answer):
                    break
        except DRIVER_ERRORS as failure:
            error = failure
        except ValueError as failure:
            error = ClosedError(str(failure))
        self._ended(self, error)
        self.close()

    def close(self) -> None:
        self._closed = True
        self._requests.put(None)
        if self._call is not None:
            self._call.cancel()


class _TaskStream(_Stream):
    """On ``grpc.aio``: a task reads."""

    def open(self, runtime: Runtime, metadata: Metadata) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._call = self.link.open_stream(self._iterate(), metadata)
        runtime.spawn("lockkit-etcd-watch", self._read)

    async def _iterate(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield request

    def send(self, request: Any) -> None:  # noqa: ANN401 - see _Stream
        self._requests.put_nowait(request)

    async def _read(self) -> None:
        error: Exception | None = None
        try:
            async for answer in self._call:
                if not self._heard(answer):
                    break
        except DRIVER_ERRORS as failure:
            error = failure
        finally:
            self._ended(self, error)
            self.close()

    def close(self) -> None:
        self._requests.put_nowait(None)
        self._call.cancel()
