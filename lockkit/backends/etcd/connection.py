"""
The calls to one etcd member, on each face.

====================  =======================================================================================
`BlockingLink`        grpc's blocking calls
`AsyncioLink`         ``grpc.aio``
`ForkedLink`          grpc's blocking stack under asyncio, in a process that was forked after ``grpc.aio`` ran
====================  =======================================================================================

The last one: ``grpc.aio`` has one poller thread for the whole process. It does not exist in a forked child, and cannot
be started again there (grpc/grpc#16573, "Fork is not supported by grpc.aio"). The blocking stack can, if
``GRPC_ENABLE_FORK_SUPPORT=1`` was in the environment when ``grpc`` was first imported: this module puts it there
unless the application imported ``grpc`` before.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

import grpc
import grpc.aio

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.runtime import in_forked_child, let_go

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockkit.runtime import Runtime

__all__ = [
    "WATCH",
    "AsyncioLink",
    "BlockingLink",
    "Call",
    "ClosedError",
    "Link",
    "Metadata",
    "open_link",
]

Metadata = tuple[tuple[str, str], ...] | None

CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    # Whether a call is sent again is decided where it is known whether that does harm.
    ("grpc.enable_retries", 0),
    # A connection per client: gRPC would share them within the process, and with them the pauses after failures.
    ("grpc.use_local_subchannel_pool", 1),
    # After an outage look again soon: gRPC's default is up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Notice within 7.5 s that the member of an idle watch hangs or its host is gone. etcd refuses pings more often than
    # every 5 s. What ends the wait for their answers is ping_timeout_ms (60 s if it is not set), not
    # keepalive_timeout_ms; and after two pings without data gRPC would send no more.
    ("grpc.keepalive_time_ms", 5_500),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
)


class Call:
    """One method of etcd's: its path and the type of its answer."""

    __slots__ = ("answer", "path")

    def __init__(self, path: str, answer: Any) -> None:  # noqa: ANN401 - a class that protoc made
        self.path = f"/etcdserverpb.{path}"
        self.answer = answer


TXN = Call("KV/Txn", rpc.TxnResponse)
RANGE = Call("KV/Range", rpc.RangeResponse)
GRANT = Call("Lease/LeaseGrant", rpc.LeaseGrantResponse)
REVOKE = Call("Lease/LeaseRevoke", rpc.LeaseRevokeResponse)
TIME_TO_LIVE = Call("Lease/LeaseTimeToLive", rpc.LeaseTimeToLiveResponse)
# A stream in etcd's description. One question and one answer are a stream, too, and need neither thread nor task.
KEEP_ALIVE = Call("Lease/LeaseKeepAlive", rpc.LeaseKeepAliveResponse)
AUTHENTICATE = Call("Auth/Authenticate", rpc.AuthenticateResponse)
WATCH = Call("Watch/Watch", rpc.WatchResponse)


class _Limit(float):
    """
    A time limit for a call, seconds, that does not depend on ``time.time``.

    gRPC adds it to ``time.time()`` and has its core take the system's clock off again. Where the first is not the
    second (frozen or moved by an application's tests) every call would time out at once, or never.
    """

    __slots__ = ()

    def __radd__(self, now: float) -> float:
        del now
        return time.clock_gettime(time.CLOCK_REALTIME) + float(self)


_UNARY = (TXN, RANGE, GRANT, REVOKE, TIME_TO_LIVE, KEEP_ALIVE, AUTHENTICATE)


def _serialize(message: Any) -> bytes:  # noqa: ANN401 - a class that protoc made
    data: bytes = message.SerializeToString()
    return data


class Link(ABC):
    """
    One member.

    Attributes:
        label: ``host:port``, for messages.
        channel: gRPC's.
    """

    def __init__(self, label: str, channel: Any, *, ours: bool) -> None:  # noqa: ANN401 - of one of two classes
        """
        Use a channel.

        Args:
            label: For messages.
            channel: A `grpc.Channel` or `grpc.aio.Channel`. No connection is made before the first call.
            ours: Whether `close` closes it.
        """
        self.label = label
        self.channel = channel
        self._ours = ours
        self._calls = {call: self._prepare(channel.unary_unary, call) for call in _UNARY}

    @staticmethod
    def _prepare(kind: Any, call: Call) -> Any:  # noqa: ANN401 - a method of the channel, and what it gives
        return kind(call.path, request_serializer=_serialize, response_deserializer=call.answer.FromString)

    @abstractmethod
    async def call(self, call: Call, request: Any, timeout: float, metadata: Metadata) -> Any:  # noqa: ANN401 - messages
        """
        Ask and give the answer.

        Raises:
            Exception: One of `DRIVER_ERRORS`.
        """

    def open_stream(self, requests: Any, metadata: Metadata) -> Any:  # noqa: ANN401 - see grpc
        """
        Open a watch stream; what that is depends on the face, see `lockkit.backends.etcd.wakeup`.

        Raises:
            ClosedError: The channel is closed.
        """
        try:
            return self._prepare(self.channel.stream_stream, WATCH)(requests, metadata=metadata)
        except (ValueError, grpc.aio.UsageError) as error:
            raise ClosedError(str(error)) from error

    @abstractmethod
    async def close(self) -> None:
        """Close the channel if it is ours."""


class BlockingLink(Link):
    """
    Blocks the thread in the call.

    Ctrl-C, or whatever else a signal handler raises, at an unlucky instant makes grpc lose track of the call; closing
    or collecting the channel then waits for it for ever. So from then on the channel belongs to a daemon thread, which
    closes it when the time has come.
    """

    _close_now: threading.Event | None = None

    async def call(self, call: Call, request: Any, timeout: float, metadata: Metadata) -> Any:  # noqa: ANN401
        """See `Link.call`."""
        try:
            return self._calls[call](request, timeout=_Limit(timeout), metadata=metadata)
        except ValueError as error:
            raise ClosedError(str(error)) from error
        except grpc.RpcError:
            raise
        except BaseException:
            _free_locks(self.channel)
            self._hand_over()
            raise

    def _hand_over(self) -> None:
        if self._ours and self._close_now is None:
            self._close_now = threading.Event()
            arguments = (self.channel, self._close_now)
            threading.Thread(target=_close_later, args=arguments, name="lockkit-etcd-close", daemon=True).start()

    async def close(self) -> None:
        """See `Link.close`."""
        if self._close_now is not None:
            self._close_now.set()
        elif self._ours:
            self.channel.close()


def _close_later(channel: Any, when: threading.Event) -> None:  # noqa: ANN401 - grpc's
    when.wait()
    channel.close()


def _free_locks(channel: Any) -> None:  # noqa: ANN401 - grpc's
    """
    Free what an interrupt has left taken of a channel's locks: else all its users hang, as renewals and who closes it.

    grpc's C part keeps the lock that matters to itself, but shows it to the garbage collector.
    """
    while (inner := getattr(channel, "_channel", None)) is not None:  # grpc's Python part, perhaps with interceptors
        channel = inner
    for state in gc.get_referents(channel):
        for lock in gc.get_referents(state):
            if isinstance(lock, threading.Condition):
                let_go(lock)


class ForkedLink(BlockingLink):
    """grpc's blocking stack, awaited."""

    async def call(self, call: Call, request: Any, timeout: float, metadata: Metadata) -> Any:  # noqa: ANN401
        """See `Link.call`."""
        import asyncio  # noqa: PLC0415 - this face only

        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(future: Any) -> None:  # noqa: ANN401 - grpc's
            if not done.done():
                done.set_result(future)

        future = self._calls[call].future(request, timeout=_Limit(timeout), metadata=metadata)
        future.add_done_callback(lambda future: loop.call_soon_threadsafe(settle, future))
        try:
            return (await done).result()
        except asyncio.CancelledError:
            future.cancel()
            raise


class AsyncioLink(Link):
    """Awaits the call. A caller that is cancelled cancels it."""

    def __init__(self, label: str, channel: Any, *, ours: bool) -> None:  # noqa: ANN401 - see Link
        global _aio_used  # noqa: PLW0603 - of the process, as the poller thread is
        super().__init__(label, channel, ours=ours)
        _aio_used = True
        _open.append(channel)

    async def call(self, call: Call, request: Any, timeout: float, metadata: Metadata) -> Any:  # noqa: ANN401
        """See `Link.call`."""
        import asyncio  # noqa: PLC0415 - this face only

        try:
            return await self._calls[call](request, timeout=_Limit(timeout), metadata=metadata)
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            # Closed, perhaps in this instant.
            raise ClosedError(str(error)) from error
        except asyncio.CancelledError as error:
            # Somebody who closes the channel cancels its calls, which looks as if the caller had been cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ClosedError("the channel was closed") from error

    async def close(self) -> None:
        """See `Link.close`."""
        if self.channel in _open:
            _open.remove(self.channel)
        if self._ours:
            await self.channel.close()


class ClosedError(grpc.RpcError):
    """The channel was closed, by us or by the application."""

    def code(self) -> grpc.StatusCode:
        """As an answer of gRPC's."""
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        """As an answer of gRPC's."""
        return str(self)


def open_link(
    runtime: Runtime, label: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]
) -> Link:
    """
    Make the link to a member. No I/O. Without a running event loop it is one that blocks.

    Args:
        runtime: Of the face.
        label: ``host:port``.
        credentials: For TLS; None for plain TCP.
        options: Further options of the channel.
    """
    options = [*CHANNEL_OPTIONS, *options]
    kind: type[Link] = BlockingLink
    factory: Any = grpc
    if runtime.kind == "asyncio" and not runtime.loop_has_ended():
        kind = ForkedLink
        if not _forked:
            kind, factory = AsyncioLink, grpc.aio
    if credentials is None:
        channel = factory.insecure_channel(label, options=options)
    else:
        channel = factory.secure_channel(label, credentials, options=options)
    return kind(label, channel, ours=True)


# Channels of grpc.aio in use. In a forked child they must be neither used nor collected: closing one waits for a thread
# that does not exist there.
_open: list[Any] = []
_aio_used = False
_forked = False


def _after_fork() -> None:
    global _forked  # noqa: PLW0603 - as above
    _forked = _aio_used


in_forked_child(_after_fork)
