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

A watch stays when its waiter is done. Clients that take turns wait behind the same client each time, whose key has the
same name each time, so the next waiter needs no other watch: this one is older than what the waiter saw. It ends when
it reports something that nobody waits for.

When the stream ends (the member died, has no leader, rejects the login) all waiters look again, and the next watch
opens another stream; not at once if the member has reported nothing on the one before, as it may do so again. The
client also closes the stream when it switches to another member: a member that hangs doesn't end it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import count
from math import inf
from typing import Any
from weakref import finalize, ref

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import Cluster
from lockkit.backends.etcd.connection import AsyncioConnection, MemberConnection, Metadata
from lockkit.backends.etcd.contender import Contender, Watch
from lockkit.backends.etcd.errors import DRIVER_ERRORS, code_of, details_of, is_stale_token
from lockkit.runtime import Runtime

log = logging.getLogger("lockkit")

# A member without a majority then ends the stream, rather than stay silent (clientv3.WithRequireLeader).
_REQUIRE_LEADER = (("hasleader", "true"),)


REFUSED_SECONDS = 1.0
"""Pause after a stream that failed before the member reported anything. Longer lets waiters poll for longer after an
outage; shorter asks more often where something between client and member refuses watches."""

IDLE_MAX = 8
"""Watches of one client that stay without a waiter. More help a client that waits for many locks in turn; each takes
memory of the member, and a message when its key is deleted."""


class WakeupListener:
    """The watches of one client."""

    def __init__(self, runtime: Runtime, cluster: Cluster) -> None:
        self._runtime = runtime
        self._cluster = cluster
        self._mutex = runtime.mutex()
        self._ids = count(1)
        self._watches: dict[int, Watch] = {}
        self._idle: dict[bytes, Watch] = {}
        self._stream: _WatchStream | None = None
        self._refused_until = -inf

    def watch(self, contender: Contender) -> bool:
        """
        Have `Contender.wake` set when the key in front is deleted, or may have been before it was watched.

        A reader is also woken when that key is changed: its writer may have become a reader.
        """
        connection, _ = self._cluster.connection()
        stream = self._stream
        if stream is not None and stream.connection is not connection:
            self.on_end(stream, None)
            stream.close()
        if self._stream is None and self._runtime.now() < self._refused_until:
            return False
        watch = contender.watch
        if watch is not None and watch.key == contender.key_in_front:
            return True
        self.unwatch(contender)
        opened: _WatchStream | None = None
        try:
            with self._mutex:
                stream = self._stream
                if stream is None:
                    kind = _TaskStream if isinstance(connection, AsyncioConnection) else _ThreadStream
                    stream = opened = kind(connection, self._cluster.login.metadata, self)
                    self._stream = opened
                if not self._reuse(contender):
                    self._create(stream, contender)
            if opened is not None:
                opened.open()
        except BaseException as error:
            if opened is not None:
                self.on_end(opened, None)
                opened.close()
            if not isinstance(error, RuntimeError):
                raise
            log.warning("watching at etcd at %s: %s", connection.label, error)  # no more threads
            return False
        return True

    def _create(self, stream: _WatchStream, contender: Contender) -> None:
        """Watch the key in front. Under the mutex."""
        watch_id = next(self._ids)
        key, behind = contender.key_in_front, contender.behind_front
        create = rpc.WatchCreateRequest(key=key, range_end=behind, watch_id=watch_id)
        deletions_only = contender.mode != "shared"
        if deletions_only:
            create.filters.append(rpc.WatchCreateRequest.NOPUT)
        watch = Watch(watch_id, key, contender, reusable=deletions_only and not behind)
        self._watches[watch_id] = contender.watch = watch
        stream.send(rpc.WatchRequest(create_request=create))

    def _reuse(self, contender: Contender) -> bool:
        """Use a watch that is there already, if it has missed nothing since the contender looked. Under the mutex."""
        if contender.mode == "shared" or contender.behind_front:
            return False
        watch = self._idle.get(contender.key_in_front)
        if watch is None or watch.since > contender.seen_at:
            return False
        del self._idle[watch.key]
        watch.contender, contender.watch = contender, watch
        return True

    def unwatch(self, contender: Contender) -> None:
        """Wake a contender no more."""
        watch = contender.watch
        if watch is None:
            return
        with self._mutex:
            contender.watch = None
            if watch.id not in self._watches:  # its stream has just ended
                return
            watch.contender = None
            if not watch.reusable or not watch.since:
                self._cancel(watch)
                return
            former = self._idle.pop(watch.key, None)
            self._idle[watch.key] = watch
            if former is None and len(self._idle) > IDLE_MAX:
                former = self._idle.pop(next(iter(self._idle)))
            if former is not None:
                self._cancel(former)

    def _cancel(self, watch: Watch) -> None:
        """End a watch. Under the mutex."""
        self._forget(watch)
        if self._stream is not None:
            cancel = rpc.WatchCancelRequest(watch_id=watch.id)
            self._stream.send(rpc.WatchRequest(cancel_request=cancel))

    def _forget(self, watch: Watch) -> None:
        """Take no more note of a watch. Under the mutex."""
        del self._watches[watch.id]
        if self._idle.get(watch.key) is watch:
            del self._idle[watch.key]

    def on_answer(self, stream: _WatchStream, answer: Any) -> bool:  # noqa: ANN401 - a WatchResponse
        """Wake the contender whose watch was confirmed too late, fired or cancelled. False: the stream is of no use."""
        with self._mutex:
            watch = self._watches.get(answer.watch_id)
            contender = self._read_answer(watch, answer) if watch is not None and stream is self._stream else None
        if contender is not None and contender.wake is not None:
            contender.wake.set()
        if answer.canceled and answer.created:
            log.debug("etcd refuses the watch: %s", answer.cancel_reason)
            # In case the token has expired: then the next call logs in again.
            self._cluster.login.discard(stream.login)
            return False
        return True

    def _read_answer(self, watch: Watch, answer: Any) -> Contender | None:  # noqa: ANN401 - a WatchResponse
        """Give the contender that has to look again. Under the mutex."""
        contender = watch.contender
        if answer.canceled:
            self._forget(watch)
            if contender is not None:
                contender.watch = None
        elif answer.created:
            watch.since = answer.header.revision
            if contender is not None and watch.since <= contender.seen_at:
                return None
        elif contender is None:
            self._cancel(watch)
        return contender

    def on_end(self, stream: _WatchStream, error: Exception | None) -> None:
        """Wake all waiters: a key may have been deleted unnoticed."""
        with self._mutex:
            if self._stream is not stream:
                return
            self._stream = None
            if error is not None and not stream.has_reported:
                self._refused_until = self._runtime.now() + REFUSED_SECONDS
            waiting = [watch.contender for watch in self._watches.values() if watch.contender is not None]
            self._watches.clear()
            self._idle.clear()
            for contender in waiting:
                contender.watch = None
        if isinstance(error, DRIVER_ERRORS):
            label = stream.connection.label
            log.debug("watching at etcd at %s ended: %s %s", label, code_of(error).name, details_of(error))
            if is_stale_token(error):
                self._cluster.login.discard(stream.login)
            else:
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


class _WatchStream(ABC):
    """
    One watch stream: any thread or task sends requests, one in the background reads the answers.

    However the reading ends, it tells the listener, so that no stream without a reader stays in use. It has only a weak
    reference to that: a client that was dropped without ``close()`` must not live as long as its stream.

    Attributes:
        connection: To the member.
        login: Metadata of the call.
        has_reported: The member has answered anything.
    """

    def __init__(self, connection: MemberConnection, login: Metadata, listener: WakeupListener) -> None:
        self.connection = connection
        self.login = login
        self.has_reported = False
        self._listener = ref(listener)
        self._call: Any = None
        # Last, also after what a subclass adds: an interrupt before it leaves nothing that could be dropped.
        self._if_dropped = finalize(listener, self.drop)
        self._if_dropped.atexit = False

    def _report(self, answer: Any) -> bool:  # noqa: ANN401 - a WatchResponse
        """Hand on an answer. False: the stream is of no use."""
        self.has_reported = True
        listener = self._listener()
        return listener is not None and listener.on_answer(self, answer)

    def _end(self, error: Exception | None) -> None:
        """Hand on the end, and close the stream."""
        listener = self._listener()
        if listener is not None:
            listener.on_end(self, error)
        self.close()

    @property
    def metadata(self) -> Metadata:
        """What goes with the call."""
        return (*(self.login or ()), *_REQUIRE_LEADER)

    @abstractmethod
    def open(self) -> None:
        """Start, without waiting for an answer."""

    @abstractmethod
    def send(self, request: Any) -> None:  # noqa: ANN401 - a WatchRequest
        """Send a request, without waiting; also before `open`."""

    def close(self) -> None:
        """End it. May be called twice."""
        self._if_dropped.detach()
        if self._call is not None:
            self._call.cancel()

    @abstractmethod
    def drop(self) -> None:
        """Have it end soon: the listener is gone. From any thread, also while that is in the middle of something."""


class _ThreadStream(_WatchStream):
    """
    With grpc's blocking API: a thread of lockkit's reads, and one of grpc's writes.

    lockkit's thread makes the call: a Ctrl-C strikes the main thread only, so never in the middle of this call.
    """

    def __init__(self, *arguments: Any) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False
        super().__init__(*arguments)

    def open(self) -> None:
        threading.Thread(target=self._read, name="lockkit-etcd-watch", daemon=True).start()

    def send(self, request: Any) -> None:  # noqa: ANN401 - see _WatchStream
        self._requests.put(request)

    def _read(self) -> None:
        error: Exception | None = None
        try:
            self._call = self.connection.open_stream(self._take(), self.metadata)
            if self._closed:
                self._call.cancel()
            for answer in self._call:
                if not self._report(answer):
                    break
        except Exception as failure:  # noqa: BLE001 - after any error the waiters must look again
            error = failure
        finally:
            self._end(error)

    def _take(self) -> Iterator[Any]:
        """Take requests out of the queue, up to None; in grpc's thread."""
        while (request := self._requests.get()) is not None:
            yield request
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        self.drop()
        super().close()

    def drop(self) -> None:
        self._closed = True
        self._requests.put(None)


class _TaskStream(_WatchStream):
    """With ``grpc.aio``: a task reads."""

    def __init__(self, *arguments: Any) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        super().__init__(*arguments)

    def open(self) -> None:
        self._task = self._loop.create_task(self._read(), name="lockkit-etcd-watch")
        # Not in the task: a task that is cancelled before its first step runs nothing.
        self._task.add_done_callback(self._done)

    def send(self, request: Any) -> None:  # noqa: ANN401 - see _WatchStream
        self._requests.put_nowait(request)

    async def _read(self) -> None:
        self._call = self.connection.open_stream(_take_from(self._requests), self.metadata)
        async for answer in self._call:
            if not self._report(answer):
                break

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._end(error if isinstance(error, Exception) else None)

    def close(self) -> None:
        self._requests.put_nowait(None)
        super().close()
        if self._call is None and self._task is not None:
            self._task.cancel()

    def drop(self) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the stream with it
            self._loop.call_soon_threadsafe(self.close)


async def _take_from(requests: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    """Take requests out of a queue, up to None."""
    while (request := await requests.get()) is not None:
        yield request
