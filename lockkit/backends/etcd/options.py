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
from lockkit.backends.etcd.cluster import AsyncioConnection, Cluster, MemberConnection, open_connection
from lockkit.backends.tls import client_context
from lockkit.errors import ConfigurationError
from lockkit.url import HostPort, Url

DEFAULT_PORT = 2379


def _parse_prefix(value: object) -> str:
    text = validation.parse_text(value)
    if text.endswith("/") or "\0" in text:
        raise ValueError("it must not end with a slash: lockkit puts one between it and the name")
    return text


OPTIONS: Mapping[str, Option] = {
    "prefix": Option(_parse_prefix, "First part of all keys; clients that share locks need the same.", "lockkit"),
    "ca": Option(validation.parse_text, "File with the certificate authorities of the members (PEM)."),
    "cert": Option(validation.parse_text, "File with the client's certificate (PEM)."),
    "key": Option(validation.parse_text, "File with the client's private key (PEM)."),
    "server_name": Option(validation.parse_text, "Host name in the members' certificates, if not that of the URL."),
}

FILES = ("ca", "cert", "key")
TLS_OPTIONS = (*FILES, "server_name")


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
    paths = _certificates(url, options)
    labels = [str(HostPort(one.host, one.port or DEFAULT_PORT)) for one in url.hosts]
    if len(set(labels)) != len(labels):
        raise _wrong(url, "it names a member twice")
    user, server_name = (url.username, url.password), options["server_name"]
    return _make_cluster(host, url.safe_text, labels, paths, user=user, server_name=server_name)


def _certificates(url: Url, options: Mapping[str, Any]) -> Mapping[str, str | None] | None:
    given = [name for name in TLS_OPTIONS if options[name] is not None]
    if url.base != "etcds":
        if given:
            raise _wrong(url, f"the option {given[0]} is for etcds:// only")
        return None
    if (options["cert"] is None) != (options["key"] is None):
        raise _wrong(url, "cert and key belong together: give both, or neither")
    return {name: options[name] for name in FILES}


def _wrong(url: Url, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{url.safe_text} is not understood: {problem}", backend=url.safe_text)


def _make_cluster(
    host: Host,
    where: str,
    labels: Sequence[str],
    paths: Mapping[str, str | None] | None,
    *,
    user: tuple[str | None, str | None] = (None, None),
    server_name: str | None = None,
) -> Cluster:
    """Make a cluster; with TLS if there are the paths of `FILES`."""
    if paths is None:
        return Cluster(host.runtime, labels, lambda label: open_connection(host.runtime, label, None), user)

    def read() -> list[bytes | None]:
        return [None if path is None else Path(path).read_bytes() for path in paths.values()]

    try:
        client_context(paths)
    except ValueError as error:
        raise ConfigurationError(f"{where} cannot be used: {error}", backend=where) from None
    files = read()

    def current() -> list[bytes | None]:
        """Read them again, as they may be replaced: gRPC keeps for each channel what was in them."""
        with suppress(OSError, ValueError):  # they may just be being replaced: what was read before counts
            found = read()
            if found != files and b"" not in found:  # gRPC ends the process if one is empty
                client_context(paths)
                files[:] = found
        return [*files]

    def connect(label: str) -> MemberConnection:
        ca, cert, key = used = current()
        connection = open_connection(host.runtime, label, grpc.ssl_channel_credentials(ca, key, cert), server_name)
        connection.is_outdated = lambda: current() != used
        return connection

    return Cluster(host.runtime, labels, connect, user)


def adopt_cluster(client: Any, host: Host) -> tuple[str, Cluster] | None:  # noqa: ANN401 - of one of several libraries
    """
    Make a cluster that uses a client of the application; None if it is none for etcd.

    That is a gRPC channel, or a client that has one (python-etcd3, pyetcd, aetcd). A client of etcd3gw speaks HTTP: of
    that only address and certificates are used, since etcd serves HTTP and gRPC at the same port.
    """
    if type(client).__module__.partition(".")[0] == "etcd3gw" and hasattr(client, "host"):
        label = str(HostPort(client.host, int(client.port)))
        if client.protocol != "https":
            return f"etcd://{label}", _make_cluster(host, f"etcd://{label}", [label], None)
        ca, (cert, key) = client.session.verify, client.session.cert or (None, None)
        paths = {"ca": ca if isinstance(ca, str) else None, "cert": cert, "key": key}
        return f"etcds://{label}", _make_cluster(host, f"etcds://{label}", [label], paths)
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
    label = _target_of(channel)
    connection = (AsyncioConnection if asyncio else MemberConnection)(label, channel, owned=False)
    logged_in = None if is_channel else client
    return f"etcd://{label}", Cluster(host.runtime, [label], lambda _: connection, client=logged_in)


def _target_of(channel: grpc.Channel | grpc.aio.Channel) -> str:
    """Give the address that a channel leads to, which only its C part knows; "channel" where that changes."""
    target = getattr(getattr(channel, "_channel", None), "target", None)
    if not callable(target):
        return "channel"
    found = target()
    text = found.decode() if isinstance(found, bytes) else str(found)
    return text.rpartition("/")[2].removeprefix("ipv4:").removeprefix("ipv6:").replace("%5B", "[").replace("%5D", "]")
