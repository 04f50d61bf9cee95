"""
Hearing that the contender in front has gone: one watch stream per client, whatever the number of waiters.

Each waiter watches the key in front of it, and nobody else is woken when that goes (no herd).

The order that keeps a wake-up from being missed: watch from now on, and when the member has confirmed that, look once
more. Why not from the revision at which the waiter looked: unless nothing at all was written since, the member takes
such a watch for one that lags behind, and serves those every 100 ms (etcd, ``mvcc/watchable_store.go``,
``syncWatchersLoop``): 95 ms to the event where it was 0.8. It also is why compaction does not reach a waiter; a watch
that the member cancels all the same makes it look again.

When the stream ends (the member died, has no leader, does not accept the login any more) all waiters look again, and
the next watch opens another one. It also ends when the client turns to another member: one that hangs does not say so.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.connection import AsyncioLink, Link
from lockkit.backends.etcd.errors import DRIVER_ERRORS, code_of, details_of, is_stale_token

if TYPE_CHECKING:
    from lockkit.backends.etcd.cluster import Cluster
    from lockkit.backends.etcd.connection import Metadata
    from lockkit.backends.etcd.session import Contender
    from lockkit.runtime import Runtime

__all__ = ["Watches"]

log = logging.getLogger("lockkit")

# A member that lost the majority ends the stream, rather than stay silent (clientv3.WithRequireLeader).
_REQUIRE_LEADER = (("hasleader", "true"),)


class Watches:
    """The watches of one client."""

    def __init__(self, runtime: Runtime, cluster: Cluster) -> None:
        """Watch nothing yet."""
        self._cluster = cluster
        self._mutex = runtime.mutex()
        self._ids = count(1)
        self._watching: dict[int, Contender] = {}
        self._stream: _Stream | None = None

    def watch(self, contender: Contender) -> bool:
        """
        See that its `Contender.wake` is set when the key before it goes, and once as soon as it is watched.

        Returns:
            False if that cannot be had now: look again soon.

        Raises:
            LockError: The client is closed.
        """
        link, _ = self._cluster.link()
        stream = self._stream
        if stream is not None and stream.link is not link:
            self._ended(stream, None)
            stream.close()
        if contender.watch_id and contender.watched == contender.before:
            return True
        self.forget(contender)
        made: _Stream | None = None
        try:
            with self._mutex:
                stream = self._stream
                if stream is None:
                    kind = _TaskStream if isinstance(link, AsyncioLink) else _ThreadStream
                    stream = made = kind(link, self._cluster.login.metadata, self._heard, self._ended)
                    self._stream = made
                contender.watch_id = next(self._ids)
                contender.watched = contender.before
                self._watching[contender.watch_id] = contender
                create = rpc.WatchCreateRequest(
                    key=contender.before, watch_id=contender.watch_id, filters=[rpc.WatchCreateRequest.NOPUT]
                )
                stream.send(rpc.WatchRequest(create_request=create))
            if made is not None:
                made.open()
        except BaseException as error:
            if made is not None:
                self._ended(made, None)
            if not isinstance(error, RuntimeError):
                raise
            log.warning("watching at etcd at %s: %s", link.label, error)  # no more threads
            return False
        return True

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

    def _heard(self, stream: _Stream, answer: Any) -> bool:  # noqa: ANN401 - a WatchResponse
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
            # As with a token that has run out: the next call logs in anew if that is the reason.
            self._cluster.login.forget(stream.login)
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
        if isinstance(error, DRIVER_ERRORS):
            log.debug("watching at %s ended: %s %s", stream.link.label, code_of(error).name, details_of(error))
            if is_stale_token(error):
                self._cluster.login.forget(stream.login)
            else:
                self._cluster.leave(stream.link, error)
        elif error is not None:
            log.error("watching at etcd at %s failed", stream.link.label, exc_info=error)
        for contender in waiting:
            if contender.wake is not None:
                contender.wake.set()

    def close(self) -> None:
        """End the stream. Who still waits looks again."""
        stream = self._stream
        if stream is not None:
            self._ended(stream, None)
            stream.close()


class _Stream(ABC):
    """
    One watch stream: requests are sent from anywhere, answers are read in the background.

    However the reading ends, `ended` is called: a stream that nobody reads is not kept.
    """

    def __init__(
        self,
        link: Link,
        login: Metadata,
        heard: Callable[[_Stream, Any], bool],
        ended: Callable[[_Stream, Exception | None], None],
    ) -> None:
        self.link = link
        self.login = login
        self._heard = heard
        self._ended = ended
        self._call: Any = None

    @property
    def metadata(self) -> Metadata:
        """What goes along with the call."""
        return (*(self.login or ()), *_REQUIRE_LEADER)

    @abstractmethod
    def open(self) -> None:
        """
        Start; does not wait for an answer.

        Raises:
            RuntimeError: No thread could be started.
        """

    @abstractmethod
    def send(self, request: Any) -> None:  # noqa: ANN401 - a WatchRequest
        """Send a request, without waiting; also before `open`."""

    @abstractmethod
    def close(self) -> None:
        """End it. May be called twice."""


class _ThreadStream(_Stream):
    """
    On grpc's blocking stack: a thread of ours reads, and one of grpc's writes.

    The call is made in our thread, where no Ctrl-C can strike in the middle of grpc's code and leave its locks taken.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False

    def open(self) -> None:
        threading.Thread(target=self._read, name="lockkit-etcd-watch", daemon=True).start()

    def send(self, request: Any) -> None:  # noqa: ANN401 - see _Stream
        self._requests.put(request)

    def _read(self) -> None:
        error: Exception | None = None
        try:
            self._call = self.link.open_stream(iter(self._requests.get, None), self.metadata)
            if self._closed:
                self._call.cancel()
            for answer in self._call:
                if not self._heard(self, answer):
                    break
        except Exception as failure:  # noqa: BLE001 - whatever it was, the waiters must look again
            error = failure
        finally:
            self._ended(self, error)
            self.close()

    def close(self) -> None:
        self._closed = True
        self._requests.put(None)
        if self._call is not None:
            self._call.cancel()


class _TaskStream(_Stream):
    """On ``grpc.aio``: a task reads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._read(), name="lockkit-etcd-watch")
        # Not in the task: one that is cancelled before it began has run nothing.
        self._task.add_done_callback(self._done)

    def send(self, request: Any) -> None:  # noqa: ANN401 - see _Stream
        self._requests.put_nowait(request)

    async def _read(self) -> None:
        self._call = self.link.open_stream(_Taken(self._requests), self.metadata)
        async for answer in self._call:
            if not self._heard(self, answer):
                break

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._ended(self, error if isinstance(error, Exception) else None)
        self.close()

    def close(self) -> None:
        self._requests.put_nowait(None)
        if self._call is not None:
            self._call.cancel()
        elif self._task is not None:
            self._task.cancel()


class _Taken:
    """
    What is taken out of a queue, up to None.

    Not an asynchronous generator: a cancelled call leaves that running, and asyncio complains when it is collected.
    """

    def __init__(self, requests: asyncio.Queue[Any]) -> None:
        self._requests = requests

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401 - a WatchRequest
        request = await self._requests.get()
        if request is None:
            raise StopAsyncIteration
        return request
