"""
Waking waiters: one watch stream per client, however many waiters it has.

Each waiter watches the key in front of its own, so a deletion wakes one waiter and nobody else (no herd). The readers
behind one writer all watch that; of those who wait for a permit, only the first watches the holders.

Order of steps, so that no deletion is missed: watch from now on, and look at the queue again once the member has
confirmed the watch. The confirmation has the revision after which the watch reports everything (etcd,
``v3rpc/watch.go``, ``recvLoop``): if the waiter saw the key in front at that revision or a later one, it need not look
again. A watch from the revision at which the waiter looked would never need a second look, but unless nothing at all
was written since, the member counts it as unsynced and serves unsynced watches every 100 ms (etcd,
``mvcc/watchable_store.go``, ``syncWatchersLoop``): 95 ms until the event instead of 0.8. It also would fail after a
compaction. If the member cancels a watch all the same, the waiter looks again.

When the stream ends (the member died, has no leader, rejects the login) all waiters look again, and the next watch
opens another stream; not at once if the member has reported nothing on the one before, as it may do so again. The
client also closes the stream when it switches to another member: a member that hangs doesn't end it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import count
from math import inf
from typing import Any
from weakref import finalize, ref

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import AsyncioConnection, Cluster, MemberConnection, Metadata
from lockkit.backends.etcd.errors import DRIVER_ERRORS, is_stale_token
from lockkit.backends.etcd.keys import Contender
from lockkit.runtime import Runtime

log = logging.getLogger("lockkit")

# A member without a majority then ends the stream, rather than stay silent (clientv3.WithRequireLeader).
_REQUIRE_LEADER = (("hasleader", "true"),)

UNWATCHED_SECONDS = 0.5
"""How often a waiter without a watch looks again, and pause after a stream that failed before the member reported
anything. Longer hands over later after an outage; shorter asks more often where something refuses watches."""


class WakeupListener:
    """The watches of one client. Threads may share it."""

    def __init__(self, runtime: Runtime, cluster: Cluster) -> None:
        self._runtime = runtime
        self._cluster = cluster
        self._mutex = runtime.mutex()
        self._ids = count(1)
        self._watching: dict[int, Contender] = {}  # by the id of the watch
        self._stream: _WatchStream | None = None
        self._refused_until = -inf

    def watch(self, contender: Contender) -> bool:
        """
        Have `Contender.wake` set when the key in front is deleted, or may have been before it was watched.

        A reader is also woken when that key is changed: its writer may have become a reader. False: there is no stream.
        """
        connection = self._cluster.connection()
        if self._stream is not None and self._stream.connection is not connection:
            self.close()
        with self._mutex:
            if self._stream is None:
                if self._runtime.now() < self._refused_until:
                    return False
                stream = _WatchStream(connection, self._cluster.metadata, self)
                stream.open()
                self._stream = stream
            if contender.watch_id and contender.key_watched == contender.key_in_front:
                return True
            self._cancel(contender)
            key, behind = contender.key_in_front, contender.behind_front
            contender.watch_id, contender.key_watched = next(self._ids), key
            self._watching[contender.watch_id] = contender
            create = rpc.WatchCreateRequest(key=key, range_end=behind, watch_id=contender.watch_id)
            if contender.mode != "shared":
                create.filters.append(rpc.WatchCreateRequest.NOPUT)
            self._stream.send(rpc.WatchRequest(create_request=create))
        return True

    def unwatch(self, contender: Contender) -> None:
        """Wake a contender no more."""
        if contender.watch_id:
            with self._mutex:
                self._cancel(contender)

    def _cancel(self, contender: Contender) -> None:
        """End a watch, unless it or its stream has just ended. Under the mutex."""
        if self._watching.pop(contender.watch_id, None) is not None and self._stream is not None:
            cancel = rpc.WatchCancelRequest(watch_id=contender.watch_id)
            self._stream.send(rpc.WatchRequest(cancel_request=cancel))
        contender.watch_id = 0

    def on_answer(self, stream: _WatchStream, answer: Any) -> bool:  # noqa: ANN401 - a WatchResponse
        """Wake the contender whose watch was confirmed too late, fired or cancelled. False: the stream is of no use."""
        with self._mutex:
            contender = self._watching.get(answer.watch_id) if stream is self._stream else None
            if contender is not None and answer.canceled:
                del self._watching[answer.watch_id]
                contender.watch_id = 0
        is_early = answer.created and not answer.canceled and contender and answer.header.revision <= contender.seen_at
        if contender is not None and contender.wake is not None and not is_early:
            contender.wake.set()
        if answer.canceled and answer.created:
            log.debug("etcd refuses the watch: %s", answer.cancel_reason)
            # In case the token has expired: then the next call logs in again.
            self._cluster.discard_login(stream.login)
            return False
        return True

    def on_end(self, stream: _WatchStream, error: BaseException | None) -> None:
        """Wake all waiters: a key may have been deleted unnoticed."""
        with self._mutex:
            if self._stream is not stream:
                return
            self._stream = None
            if error is not None and not stream.has_reported:
                self._refused_until = self._runtime.now() + UNWATCHED_SECONDS
            waiting = [*self._watching.values()]
            self._watching.clear()
            for contender in waiting:
                contender.watch_id = 0
        if isinstance(error, DRIVER_ERRORS) and is_stale_token(error):
            self._cluster.discard_login(stream.login)
        elif isinstance(error, DRIVER_ERRORS):
            self._cluster.switch_from(stream.connection, error)
        elif error is not None:
            log.error("watching at etcd at %s failed", stream.connection.label, exc_info=error)
        for contender in waiting:
            if contender.wake is not None:
                contender.wake.set()

    def close(self) -> None:
        """End the stream. Waiters look again."""
        stream = self._stream
        if stream is not None:
            self.on_end(stream, None)
            stream.close()


class _WatchStream:
    """
    One watch stream: any thread or task sends requests, a thread or a task (with ``grpc.aio``) reads the answers.

    However the reading ends, it tells the listener, so that no stream without a reader stays in use. It has only a weak
    reference to that: a client that was dropped without ``close()`` must not live as long as its stream.
    """

    def __init__(self, connection: MemberConnection, login: Metadata, listener: WakeupListener) -> None:
        self.connection = connection
        self.login = login  # metadata of the call
        self.has_reported = False  # the member has answered anything
        self._listener = ref(listener)
        self._call: Any = None
        self._closed = False
        self._loop = asyncio.get_running_loop() if isinstance(connection, AsyncioConnection) else None
        self._requests: Any = queue.SimpleQueue() if self._loop is None else asyncio.Queue()
        self._if_dropped = finalize(listener, self.close)
        self._if_dropped.atexit = False

    def open(self) -> None:
        """Start, without waiting for an answer."""
        if self._loop is None:
            threading.Thread(target=self._read, name="lockkit-etcd-watch", daemon=True).start()
        else:
            task = self._loop.create_task(self._read_async(), name="lockkit-etcd-watch")
            # Not in the task: a task that is cancelled before its first step runs nothing.
            task.add_done_callback(lambda task: self._end(None if task.cancelled() else task.exception()))

    def send(self, request: rpc.WatchRequest) -> None:
        """Send a request, without waiting; also before the call is made."""
        self._requests.put_nowait(request)

    def close(self) -> None:
        """End it soon. From any thread, also from the garbage collector while that is in the middle of something."""
        self._closed = True
        if self._loop is None:
            self._requests.put_nowait(None)
        else:
            with suppress(RuntimeError):  # the loop has ended, and the stream with it
                self._loop.call_soon_threadsafe(self._requests.put_nowait, None)

    def _read(self) -> None:
        """Read in a thread, which makes the call, too: a Ctrl-C strikes the main thread only, so never in it."""
        error: Exception | None = None
        try:
            for answer in self._made_call(self._take()):
                if not self._report(answer):
                    break
        except Exception as failure:  # noqa: BLE001 - after any error the waiters must look again
            error = failure
        finally:
            self._end(error)

    async def _read_async(self) -> None:
        async for answer in self._made_call(self._take_async()):
            if not self._report(answer):
                break

    def _made_call(self, requests: Any) -> Any:  # noqa: ANN401 - see grpc
        self._call = self.connection.open_stream(requests, (*(self.login or ()), *_REQUIRE_LEADER))
        if self._closed:  # perhaps before the call was there to be cancelled
            self._call.cancel()
        return self._call

    def _take(self) -> Iterator[Any]:
        """Take requests out of the queue, up to None; in grpc's thread."""
        while (request := self._requests.get()) is not None:
            yield request
        if self._call is not None:
            self._call.cancel()

    async def _take_async(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield request
        self._call.cancel()

    def _report(self, answer: Any) -> bool:  # noqa: ANN401 - a WatchResponse
        """Hand on an answer. False: the stream is of no use."""
        self.has_reported = True
        listener = self._listener()
        return listener is not None and listener.on_answer(self, answer)

    def _end(self, error: BaseException | None) -> None:
        """Hand on the end, and close the stream."""
        listener = self._listener()
        if listener is not None:
            listener.on_end(self, error)
        self._if_dropped.detach()
        self.close()
        if self._call is not None:
            self._call.cancel()
