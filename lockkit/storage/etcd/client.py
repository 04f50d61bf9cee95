"""The etcd that has an application's data, for `lockkit.fencing` and `lockkit.optimistic`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from lockkit import aio, sync
from lockkit.backends.etcd.backend import EtcdBackend
from lockkit.backends.etcd.connection import TXN
from lockkit.backends.etcd.options import adopt_cluster
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.validation import shown

if TYPE_CHECKING:
    from lockkit.backend import Host
    from lockkit.backends.etcd import rpc_pb2 as rpc
    from lockkit.backends.etcd.cluster import Cluster
    from lockkit.runtime import Runtime

__all__ = ["Key", "Store", "Value", "as_bytes", "text_of"]

Key: TypeAlias = str | bytes
Value: TypeAlias = str | bytes


class Store:
    """An etcd, reached through a lockkit client or a channel of the application."""

    def __init__(self, runtime: Runtime, client: object) -> None:
        """
        Find the etcd that a client leads to. No I/O.

        Raises:
            ConfigurationError: It is no such client, or one for the other API (sync or async).
        """
        self.runtime = runtime
        ours, other = (aio.Client, sync.Client) if runtime.kind == "asyncio" else (sync.Client, aio.Client)
        if isinstance(client, other):
            raise ConfigurationError(f"client must be a {ours.__module__}.Client, not a {other.__module__}.Client")
        self._client = client if isinstance(client, ours) else None
        self._cluster: Cluster | None = None
        if self._client is not None:
            self.label = self._client.url
            self._checked(self._client._engine._backend)  # noqa: SLF001 - ours
            return
        # `adopt_cluster` uses nothing of the host but its runtime.
        found = adopt_cluster(client, cast("Host", SimpleNamespace(runtime=runtime)))
        if found is None:
            message = f"client must be a lockkit client on etcd, or a gRPC channel, not {type(client).__name__}"
            raise ConfigurationError(message)
        self.label, self._cluster = found

    def _backend(self) -> EtcdBackend:
        assert self._client is not None
        # Each time: a forked child has another one.
        return self._checked(self._client._engine._ready())  # noqa: SLF001 - ours

    def _checked(self, backend: object) -> EtcdBackend:
        if not isinstance(backend, EtcdBackend):
            raise ConfigurationError(f"{self.label} is no etcd, or closed: give a client whose data are in etcd")
        return backend

    async def transact(self, request: rpc.TxnRequest, name: str, *, changes: bool) -> Any:  # noqa: ANN401 - a message
        """
        Execute a transaction.

        Args:
            request: Its message.
            name: Key or lock, for error messages.
            changes: Send it once, and if the answer is lost, say in the error that the change may have been made.

        Raises:
            BackendUnavailable: No usable answer.
            ConfigurationError: Missing rights and the like.
        """
        cluster = self._cluster or self._backend().cluster
        unknown: list[bool] = []
        try:
            return await cluster.call(TXN, request, resend=not changes, on_unknown=lambda: unknown.append(True))
        except BackendUnavailable as error:
            what = f"{name!r} at {self.label}: {error}"
            if changes and unknown:
                message = f"the answer to a change of {what}. It may have been made or not: look before you try again"
                raise BackendUnavailable(message, name=name, backend=self.label) from error
            raise type(error)(what, name=name, backend=self.label) from error


def as_bytes(value: object, what: str, *, empty: bool = False) -> bytes:
    """
    Check a key or a value, and return it as bytes.

    Raises:
        ConfigurationError: It is neither text nor bytes, or empty where it must not be.
    """
    if not isinstance(value, (str, bytes)) or not (value or empty):
        kind = "a str or bytes" if empty else "a str or bytes that is not empty"
        raise ConfigurationError(f"{what} must be {kind}, not {shown(value)}")
    return value.encode() if isinstance(value, str) else value


def text_of(key: bytes) -> str:
    """Return a key as text, for people."""
    return key.decode("utf-8", "backslashreplace")
