"""The etcd that has an application's data, for `lockkit.fencing` and `lockkit.optimistic`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from lockkit.backend import Host
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import TXN, Cluster
from lockkit.backends.etcd.options import adopt_cluster
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import Runtime
from lockkit.validation import shown

_CLIENTS = {"blocking": "a lockkit.Client", "asyncio": "a lockkit.aio.Client"}

Key: TypeAlias = str | bytes
Value: TypeAlias = str | bytes


@runtime_checkable
class _Client(Protocol):
    """`lockkit.Client` or `lockkit.aio.Client`: what is below the two APIs may not import them."""

    @property
    def url(self) -> str: ...
    @property
    def _engine(self) -> Any: ...  # noqa: ANN401 - see above


@runtime_checkable
class Lease(Protocol):
    """`lockkit.Lease` or `lockkit.aio.Lease`."""

    @property
    def token(self) -> int:
        """The fencing token."""
        ...

    @property
    def _record(self) -> Any: ...  # noqa: ANN401 - see `_Client`


class Store:
    """An etcd, reached through a lockkit client or a channel of the application."""

    def __init__(self, runtime: Runtime, client: object) -> None:
        """Find the etcd that a client leads to. No I/O."""
        self.runtime = runtime
        self._client = client if isinstance(client, _Client) else None
        self._cluster: Cluster | None = None
        if self._client is not None:
            engine = self._client._engine  # noqa: SLF001 - ours
            if engine.runtime.kind != runtime.kind:
                message = f"client must be {_CLIENTS[runtime.kind]}, not {_CLIENTS[engine.runtime.kind]}"
                raise ConfigurationError(message)
            self.label = self._client.url
            self._cluster_of(engine.client.backend)
            return
        # `adopt_cluster` uses nothing of the host but its runtime.
        found = adopt_cluster(client, cast("Host", SimpleNamespace(runtime=runtime)))
        if found is None:
            message = f"client must be a lockkit client on etcd, or a gRPC channel, not {type(client).__name__}"
            raise ConfigurationError(message)
        self.label, self._cluster = found

    def _cluster_of(self, backend: object) -> Cluster:
        cluster = getattr(backend, "cluster", None)
        if not isinstance(cluster, Cluster):
            message = f"client must be an open client of etcd, where the data are; this one is of {self.label}"
            raise ConfigurationError(message)
        return cluster

    async def transact(self, request: rpc.TxnRequest, name: str, *, changes: bool) -> Any:  # noqa: ANN401 - a message
        """Execute a transaction. If it `changes` something it is sent once; its error says if it may have been made."""
        cluster = self._cluster
        if self._client is not None:
            # Asked for each time: a forked child has another one.
            cluster = self._cluster_of(self._client._engine.client.ready())  # noqa: SLF001 - ours
        assert cluster is not None
        unknown: list[bool] = []
        try:
            return await cluster.call(TXN, request, resend=not changes, on_unknown=lambda: unknown.append(True))
        except BackendUnavailable as error:
            if changes and unknown:
                message = (
                    f"the answer to a change of {name!r} at {self.label} was lost ({error}), so the change may have "
                    "been made or not. Read the value before you try again"
                )
                raise BackendUnavailable(message, name=name, backend=self.label) from error
            raise type(error)(f"{name!r} at {self.label}: {error}", name=name, backend=self.label) from error


def as_bytes(value: object, what: str, *, empty: bool = False) -> bytes:
    """Check a key or a value, and return it as bytes."""
    if not isinstance(value, (str, bytes)) or not (value or empty):
        kind = "a str or bytes" if empty else "a non-empty str or bytes"
        raise ConfigurationError(f"{what} must be {kind}, not {shown(value)}")
    return value.encode() if isinstance(value, str) else value


def text_of(key: bytes) -> str:
    """Return a key as text, for people."""
    return key.decode("utf-8", "backslashreplace")
