"""Where a Redis node is, and how to log in there."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import redis.asyncio.connection
import redis.connection

from lockkit.backends.redis.quirks import TlsConnections
from lockkit.runtime import Kind
from lockkit.url import HostPort

DEFAULT_PORT = 6379

SOCKET_TIMEOUT = 2.5
"""Seconds for an answer. Longer delays callers of a server that hangs; shorter gives up on a busy one."""

CONNECT_TIMEOUT = 2.0
"""Seconds for a TCP connection. With `SOCKET_TIMEOUT` for the login, a call stays below five seconds."""

_DEFAULTS = {"socket_timeout": SOCKET_TIMEOUT, "socket_connect_timeout": CONNECT_TIMEOUT, "protocol": 2}


@dataclass(frozen=True, slots=True)
class Target:
    """
    One node and how to connect to it.

    Attributes:
        arguments: Keyword arguments of redis-py's ``Connection``. **Hold the password.**
        form: The transport; or the application's class of redis-py connections.
        label: For messages: ``host:port``, or the socket's path.
        tls_connections: Makes the connections that use TLS; servers that have it in common share a TLS context.
    """

    arguments: Mapping[str, Any] = field(repr=False)
    form: Literal["tcp", "tls", "unix"] | type
    label: str
    tls_connections: TlsConnections = field(default_factory=TlsConnections, repr=False, compare=False)

    @classmethod
    def of(cls, host: HostPort, arguments: Mapping[str, Any], *, tls: bool) -> Target:
        """Combine a server of a URL, and its own user and password if given, with the arguments common to all."""
        own = credentials(host.username, host.password)
        return cls.anywhere({**own, **arguments}, tls=tls).moved(host.host, host.port or DEFAULT_PORT)

    @classmethod
    def anywhere(cls, arguments: Mapping[str, Any], *, tls: bool) -> Target:
        """Make it for servers that have the arguments in common; `moved` gives it an address."""
        # redis-py 5 checks no host name unless it is told to.
        own = {"ssl_check_hostname": verifies_certificate(arguments)} if tls else {}
        defaults = {**_DEFAULTS, "socket_keepalive": True, **own}
        return cls({**defaults, **arguments}, "tls" if tls else "tcp", "").moved("", 0)

    def moved(self, host: str, port: int) -> Target:
        """Return the same for the server at another address."""
        return replace(self, arguments={**self.arguments, "host": host, "port": port}, label=_label(host, port))

    @classmethod
    def unix(cls, path: str, arguments: Mapping[str, Any]) -> Target:
        """Make it for the server at a Unix socket."""
        return cls({**_DEFAULTS, **arguments, "path": path}, "unix", path)

    @classmethod
    def lent(cls, pool: Any, timeout: float | None = None) -> Target:  # noqa: ANN401 - redis-py's, sync or async
        """Make it from an application's connection pool: its class of connections, and their arguments."""
        arguments = dict(pool.connection_kwargs)
        # The engine retries, because it knows for how long.
        for name in ("retry", "retry_on_error", "retry_on_timeout"):
            arguments.pop(name, None)
        limits = {"socket_timeout": SOCKET_TIMEOUT, "socket_connect_timeout": CONNECT_TIMEOUT}
        if "path" in arguments:
            del limits["socket_connect_timeout"]
        for name, limit in limits.items():
            arguments[name] = timeout or min(arguments.get(name) or limit, limit)
        host, port = arguments.get("host", "localhost"), arguments.get("port", DEFAULT_PORT)
        return cls(arguments, pool.connection_class, str(arguments.get("path") or _label(host, port)))

    @property
    def timeout(self) -> float:
        """Seconds for an answer."""
        return float(self.arguments["socket_timeout"] or SOCKET_TIMEOUT)

    def driver_connection(self, kind: Kind) -> Any:  # noqa: ANN401 - one of six classes of redis-py's
        """Make redis-py's connection object. No I/O."""
        module: Any = redis.asyncio.connection if kind == "asyncio" else redis.connection
        if self.form in {"tls", module.SSLConnection}:
            return self.tls_connections.make(kind, self.arguments)
        if isinstance(self.form, type):
            return self.form(**self.arguments)
        name = "UnixDomainSocketConnection" if self.form == "unix" else "Connection"
        return getattr(module, name)(**self.arguments)

    def unverified(self, kind: Kind) -> Literal["certificate", "host"] | None:
        """Tell what of the server's certificate is not verified; None if all is, or if there is no TLS."""
        connection = self.driver_connection(kind)
        if not speaks_tls(type(connection)):
            return None
        if connection.cert_reqs == ssl.CERT_NONE:
            return "certificate"
        return None if connection.check_hostname else "host"


def _label(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def credentials(username: str | None, password: str | None) -> dict[str, str]:
    """
    Turn the user information of a URL into arguments.

    A word alone (``redis://word@host``) is the password, as for ``redis-cli -u``.
    """
    if password is None:
        return {} if username is None else {"password": username}
    return {"password": password} if username is None else {"username": username, "password": password}


def verifies_certificate(arguments: Mapping[str, Any]) -> bool:
    """Tell whether redis-py verifies the server's certificate with these arguments."""
    return arguments.get("ssl_cert_reqs", "required") not in (None, "none", ssl.CERT_NONE)


def speaks_tls(connection_class: type) -> bool:
    """Tell whether a class of redis-py's connections uses TLS."""
    return issubclass(connection_class, (redis.connection.SSLConnection, redis.asyncio.connection.SSLConnection))
