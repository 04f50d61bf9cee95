"""
The calls to one etcd member.

=========================  ==================================================================================
`BlockingConnection`       grpc's blocking API
`AsyncioConnection`        ``grpc.aio``
`ForkedConnection`         grpc's blocking API under asyncio, in a process that was forked after it used ``grpc.aio``
=========================  ==================================================================================
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from lockkit.backends.etcd import quirks
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.errors import ConfigurationError
from lockkit.runtime import Runtime
from lockkit.units import Seconds

Metadata = tuple[tuple[str, str], ...] | None

CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    # The caller decides whether to send a request again: it knows whether that does harm.
    ("grpc.enable_retries", 0),
    # A connection per client: gRPC would share them within the process, and with them the pauses after failures.
    ("grpc.use_local_subchannel_pool", 1),
    # Reconnect soon after an outage, so that renewals succeed before a leader must stop: gRPC's default backs off up to
    # two minutes. Longer ends terms of a few seconds; shorter knocks more often at a member that is down.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Notice within 7.5 s that the member of an idle watch hangs or its host is gone. etcd refuses pings more often than
    # every 5 s. ping_timeout_ms (60 s by default) ends the wait for their answers, not keepalive_timeout_ms; and after
    # two pings without data gRPC would send no more.
    ("grpc.keepalive_time_ms", 5_500),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    # A DNS name that moves is looked up again after this time without a connection. gRPC's own 30 s cost all leases of
    # that length; shorter asks the name servers more often while a member is down.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A proxy for the web (http_proxy in the environment) leads to no etcd.
    ("grpc.enable_http_proxy", 0),
    # The holders of a lock with many readers, or of a semaphore, with long metadata: gRPC's limit is 4 MiB.
    ("grpc.max_receive_message_length", -1),
)


class Method:
    """One method of etcd's: its path and the type of its answer."""

    __slots__ = ("answer", "path")

    def __init__(self, path: str, answer: Any) -> None:  # noqa: ANN401 - a class that protoc made
        self.path = f"/etcdserverpb.{path}"
        self.answer = answer


TXN = Method("KV/Txn", rpc.TxnResponse)
RANGE = Method("KV/Range", rpc.RangeResponse)
GRANT = Method("Lease/LeaseGrant", rpc.LeaseGrantResponse)
REVOKE = Method("Lease/LeaseRevoke", rpc.LeaseRevokeResponse)
TIME_TO_LIVE = Method("Lease/LeaseTimeToLive", rpc.LeaseTimeToLiveResponse)
# etcd describes it as a stream. One request and one answer are a stream, too, and need neither thread nor task.
KEEP_ALIVE = Method("Lease/LeaseKeepAlive", rpc.LeaseKeepAliveResponse)
AUTHENTICATE = Method("Auth/Authenticate", rpc.AuthenticateResponse)
STATUS = Method("Maintenance/Status", rpc.StatusResponse)
MEMBER_LIST = Method("Cluster/MemberList", rpc.MemberListResponse)
WATCH = Method("Watch/Watch", rpc.WatchResponse)

_UNARY = (TXN, RANGE, GRANT, REVOKE, TIME_TO_LIVE, KEEP_ALIVE, AUTHENTICATE, STATUS, MEMBER_LIST)


def _serialize(message: Any) -> bytes:  # noqa: ANN401 - a class that protoc made
    data: bytes = message.SerializeToString()
    return data


class MemberConnection(ABC):
    """
    The connection to one member.

    Attributes:
        label: ``host:port``, for messages.
        is_outdated: Tells whether a new connection would use other certificates.
    """

    def __init__(self, label: str, channel: Any, *, owned: bool) -> None:  # noqa: ANN401 - of one of two classes
        """Use a channel."""
        self.label = label
        self._channel = channel
        self._owned = owned
        self.is_outdated: Callable[[], bool] = lambda: False
        self._calls = {method: self._prepare(channel.unary_unary, method) for method in _UNARY}

    @staticmethod
    def _prepare(kind: Any, method: Method) -> Any:  # noqa: ANN401 - a method of the channel, and its result
        return kind(method.path, request_serializer=_serialize, response_deserializer=method.answer.FromString)

    @abstractmethod
    async def call(self, method: Method, request: Any, timeout: Seconds, metadata: Metadata) -> Any:  # noqa: ANN401 - messages
        """Send a request and return the answer."""

    def open_stream(self, requests: Any, metadata: Metadata) -> Any:  # noqa: ANN401 - see grpc
        """Open a watch stream: `lockkit.backends.etcd.wakeup` has one for each API of grpc."""
        try:
            return self._prepare(self._channel.stream_stream, WATCH)(requests, metadata=metadata)
        except (ValueError, grpc.aio.UsageError) as error:
            raise ClosedError(str(error)) from error

    @abstractmethod
    async def close(self) -> None:
        """Close the channel if this connection owns it."""


class BlockingConnection(MemberConnection):
    """Blocks the thread during the call."""

    async def call(self, method: Method, request: Any, timeout: Seconds, metadata: Metadata) -> Any:  # noqa: ANN401
        try:
            return self._calls[method](request, timeout=quirks.WallClockTimeout(timeout), metadata=metadata)
        except ValueError as error:
            raise ClosedError(str(error)) from error
        except grpc.RpcError:
            raise
        except BaseException:
            quirks.free_locks(self._channel)
            raise

    async def close(self) -> None:
        if self._owned:
            self._channel.close()


class ForkedConnection(BlockingConnection):
    """grpc's blocking API, awaited. See `quirks.aio_is_unusable`."""

    async def call(self, method: Method, request: Any, timeout: Seconds, metadata: Metadata) -> Any:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(future: Any) -> None:  # noqa: ANN401 - grpc's
            if not done.done():
                done.set_result(future)

        try:
            future = self._calls[method].future(request, timeout=quirks.WallClockTimeout(timeout), metadata=metadata)
        except ValueError as error:
            raise ClosedError(str(error)) from error
        future.add_done_callback(lambda future: loop.call_soon_threadsafe(settle, future))
        try:
            return (await done).result()
        except asyncio.CancelledError:
            future.cancel()
            raise


class AsyncioConnection(MemberConnection):
    """Awaits the call. If the caller is cancelled, so is the call."""

    def __init__(self, label: str, channel: Any, *, owned: bool) -> None:  # noqa: ANN401 - see MemberConnection
        super().__init__(label, channel, owned=owned)
        quirks.keep_in_children(channel)

    async def call(self, method: Method, request: Any, timeout: Seconds, metadata: Metadata) -> Any:  # noqa: ANN401
        try:
            return await self._calls[method](request, timeout=quirks.WallClockTimeout(timeout), metadata=metadata)
        except grpc.aio.BaseError as error:
            raise ClosedError(str(error)) from error
        except asyncio.CancelledError as error:
            # Closing the channel cancels its calls, which looks as if the caller had been cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ClosedError("the channel was closed") from error
        except RuntimeError as error:  # asyncio's
            message = (
                f"the channel to etcd at {self.label} belongs to another event loop, or one that has ended: make it in "
                "the loop in which the client is used"
            )
            raise ConfigurationError(message) from error

    async def close(self) -> None:
        if self._owned:
            await self._channel.close()


class CallError(grpc.RpcError):
    """A call has failed, as grpc's own errors say it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return str(self)


class ClosedError(CallError):
    """lockkit or the application closed the channel."""

    def __init__(self, details: str) -> None:
        super().__init__(grpc.StatusCode.CANCELLED, details)


def open_connection(
    runtime: Runtime, label: str, credentials: grpc.ChannelCredentials | None, server_name: str | None = None
) -> MemberConnection:
    """Make the connection to a member, without I/O: a blocking one unless an event loop runs."""
    kind: type[MemberConnection] = BlockingConnection
    factory: Any = grpc
    if runtime.kind == "asyncio" and not runtime.loop_has_ended():
        kind = ForkedConnection
        if not quirks.aio_is_unusable():
            kind, factory = AsyncioConnection, grpc.aio
    options = [*CHANNEL_OPTIONS]
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    if credentials is None:
        channel = factory.insecure_channel(label, options=options)
    else:
        channel = factory.secure_channel(label, credentials, options=options)
    return kind(label, channel, owned=True)
