"""The options of the etcd backend, and how to make a cluster from a URL or from a client of another library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from lockkit import validation
from lockkit.backend import Host, Option
from lockkit.backends.etcd.cluster import BorrowedLogin, Cluster, Login
from lockkit.backends.etcd.connection import (
    AsyncioConnection,
    BlockingConnection,
    MemberConnection,
    open_connection,
)
from lockkit.backends.etcd.quirks import target_of
from lockkit.errors import ConfigurationError
from lockkit.url import HostPort, Url

DEFAULT_PORT = 2379


def _parse_prefix(value: object) -> str:
    text = validation.parse_text(value)
    if text.endswith("/") or "\0" in text:
        message = "it must not end with a slash: lockkit puts one between it and the name"
        raise ValueError(message)
    return text


OPTIONS: Mapping[str, Option] = {
    "prefix": Option(_parse_prefix, "First part of all keys; clients that share locks need the same.", "lockkit"),
    "ca": Option(validation.parse_text, "File with the certificate authorities of the members (PEM)."),
    "cert": Option(validation.parse_text, "File with the client's certificate (PEM)."),
    "key": Option(validation.parse_text, "File with the client's private key (PEM)."),
    "server_name": Option(validation.parse_text, "Host name in the members' certificates, if not that of the URL."),
}

_FILES = ("ca", "cert", "key")
_TLS = (*_FILES, "server_name")


def open_cluster(url: Url, options: Mapping[str, Any], host: Host) -> Cluster:
    """Make the cluster of a URL. Reads certificate files; no network I/O."""
    if not url.hosts or any(not one.host for one in url.hosts):
        raise _wrong(url, f"it must name the members: {url.scheme}://host1:{DEFAULT_PORT},host2")
    if url.path.strip("/"):
        raise _wrong(
            url, f"etcd has no databases, so it has no path. For another key prefix write ?prefix={url.path[1:]}"
        )
    url.require_one_login()
    if url.username is not None and url.password is None:
        raise _wrong(url, "the user has no password: write user:password@, or use a client certificate")
    certificates = _certificates(url, options)
    labels = [str(HostPort(one.host, one.port or DEFAULT_PORT)) for one in url.hosts]
    if len(set(labels)) != len(labels):
        raise _wrong(url, "it names a member twice")

    login = Login(host.runtime, url.username, url.password)
    return _make_cluster(host, labels, certificates, login, options["server_name"])


class _Certificates:
    """
    The files for TLS, which may be replaced while the client runs.

    gRPC keeps for each channel what was in them when that was made.
    """

    def __init__(self, *paths: str | None) -> None:
        """Read them: of the authorities, the certificate and the key, each or None."""
        self._paths = paths
        self._files = self._read()

    def _read(self) -> list[bytes | None]:
        return [None if path is None else Path(path).read_bytes() for path in self._paths]

    def current(self) -> list[bytes | None]:
        """Read them again; what was read before if that fails, as they may just be being replaced."""
        with suppress(OSError):
            self._files = self._read()
        return self._files


def _make_cluster(
    host: Host, labels: Sequence[str], certificates: _Certificates | None, login: Login, server_name: str | None = None
) -> Cluster:
    def connect(label: str) -> MemberConnection:
        if certificates is None:
            return open_connection(host.runtime, label, None)
        ca, cert, key = files = certificates.current()
        connection = open_connection(host.runtime, label, grpc.ssl_channel_credentials(ca, key, cert), server_name)
        connection.is_outdated = lambda: certificates.current() != files
        return connection

    return Cluster(host.runtime, labels, connect, login)


def _certificates(url: Url, options: Mapping[str, Any]) -> _Certificates | None:
    given = [name for name in _TLS if options[name] is not None]
    if url.base != "etcds":
        if given:
            raise _wrong(url, f"the option {given[0]} is for etcds:// only")
        return None
    if (options["cert"] is None) != (options["key"] is None):
        raise _wrong(url, "cert and key belong together: give both, or neither")
    for name in set(given) & set(_FILES):
        try:
            Path(options[name]).read_bytes()
        except OSError as error:
            # Without the error's text, which has the path: messages must not name the key file.
            raise _wrong(url, f"the file of the option {name} cannot be read ({error.strerror})") from None
    return _Certificates(*(options[name] for name in _FILES))


def _wrong(url: Url, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{url.safe_text} is not understood: {problem}", backend=url.safe_text)


def check_adopted_options(options: Mapping[str, Any]) -> None:
    """Check the options that come with a client of the application."""
    given = next((name for name in _TLS if options[name] is not None), None)
    if given is not None:
        message = f"the option {given} is for URLs with etcds://: the channel or client has its certificates already"
        raise ConfigurationError(message)


def adopt_cluster(client: object, host: Host) -> tuple[str, Cluster] | None:
    """
    Make a cluster that uses a client of the application.

    That is a gRPC channel, or a client that has one (python-etcd3, pyetcd, aetcd). A client of etcd3gw speaks HTTP: of
    that only address and certificates are used, since etcd serves HTTP and gRPC at the same port.
    """
    if _is_gateway(client):
        return _adopt_gateway(client, host)
    is_channel = isinstance(client, (grpc.Channel, grpc.aio.Channel))
    channel = client if is_channel else getattr(client, "channel", None)
    if not isinstance(channel, (grpc.Channel, grpc.aio.Channel)):
        return None
    asyncio = host.runtime.kind == "asyncio"
    if isinstance(channel, grpc.aio.Channel) is not asyncio:
        face, module = ("lockkit.aio", "grpc.aio") if asyncio else ("lockkit", "grpc")
        passed = "sync" if asyncio else "async"
        message = f"{face}.from_client needs a channel of {module}: {type(client).__name__} is for the {passed} API"
        raise ConfigurationError(message)
    label = target_of(channel)
    connection = (AsyncioConnection if asyncio else BlockingConnection)(label, channel, owned=False)
    login = Login(host.runtime, None, None) if is_channel else BorrowedLogin(host.runtime, client)
    return f"etcd://{label}", Cluster(host.runtime, [label], lambda _: connection, login)


def _is_gateway(client: object) -> bool:
    return type(client).__module__.partition(".")[0] == "etcd3gw" and hasattr(client, "host")


def _adopt_gateway(client: Any, host: Host) -> tuple[str, Cluster]:  # noqa: ANN401 - etcd3gw's
    label = str(HostPort(client.host, int(client.port)))
    certificates = None
    if client.protocol == "https":
        ca, (cert, key) = client.session.verify, client.session.cert or (None, None)
        certificates = _Certificates(ca if isinstance(ca, str) else None, cert, key)
    scheme = "etcd" if certificates is None else "etcds"
    return f"{scheme}://{label}", _make_cluster(host, [label], certificates, Login(host.runtime, None, None))
