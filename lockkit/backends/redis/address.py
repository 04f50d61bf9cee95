"""Where a Redis node is, and how to log in there."""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import redis.asyncio.connection
import redis.connection

from lockkit.errors import ConfigurationError
from lockkit.runtime import Kind
from lockkit.url import HostPort

DEFAULT_PORT = 6379

SOCKET_TIMEOUT = 2.5
"""Seconds for an answer. Longer delays callers of a server that hangs; shorter gives up on a busy one."""

CONNECT_TIMEOUT = 2.0
"""Seconds for a TCP connection. With `SOCKET_TIMEOUT` for the login, a call stays below five seconds."""

_TLS_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_LIMITS = {"socket_timeout": SOCKET_TIMEOUT, "socket_connect_timeout": CONNECT_TIMEOUT}
_DEFAULTS = {**_LIMITS, "protocol": 2}

# Arguments of redis-py that lockkit sets itself, does not use, or that would change the replies.
_NOT_PASSED_ON = {
    "self", "args", "kwargs", "host", "port", "path", "db", "parser", "parser_class", "decode_responses", "encoding",
    "encoding_errors", "encoder_class", "command_packer", "legacy_responses", "retry", "retry_on_timeout",
    "retry_on_error", "health_check_interval", "redis_connect_func", "event_dispatcher", "himport_registry",
    "socket_read_size", "lib_name", "lib_version", "driver_info",
}  # fmt: skip
_NOT_PASSED_ON_PREFIXES = ("maint", "orig_", "oss_", "ssl_validate_ocsp", "ssl_ocsp")

Form: TypeAlias = Literal["tcp", "tls", "unix"]

_CLASSES: dict[Form, str] = {"tcp": "Connection", "tls": "SSLConnection", "unix": "UnixDomainSocketConnection"}
"""The classes of redis-py, of the same names in both APIs."""


@cache
def argument_names() -> frozenset[str]:
    """Return the keyword arguments of redis-py's connections that lockkit passes on, for the installed version."""
    names: set[str] = set()
    for kind in (redis.connection.SSLConnection, redis.connection.UnixDomainSocketConnection):
        for cls in kind.__mro__:
            if "__init__" in vars(cls) and cls is not object:
                names |= set(inspect.signature(vars(cls)["__init__"]).parameters)
    return frozenset(name for name in names - _NOT_PASSED_ON if not name.startswith(_NOT_PASSED_ON_PREFIXES))


class Tls:
    """The TLS context that servers share, made at the first connection: reading the authorities takes 10 to 60 ms."""

    def __init__(self) -> None:
        self._made: tuple[object, ssl.SSLContext] | None = None

    def context(self, arguments: Mapping[str, Any], settings: Any) -> ssl.SSLContext:  # noqa: ANN401 - redis-py's
        """Return the context, a new one if a file was replaced: certificates are renewed while clients run."""
        files = [_version_of_file(arguments.get(name)) for name in _TLS_FILES]
        if self._made is None or self._made[0] != files:
            try:
                self._made = files, _make_context(arguments, settings)
            except (OSError, ValueError) as error:
                if self._made is not None:  # one of the files is not replaced yet
                    raise
                given = " and ".join(f"{name}={arguments[name]}" for name in _TLS_FILES if arguments.get(name))
                reason = error.strerror if isinstance(error, FileNotFoundError) else error
                message = f"cannot use {given or 'the options ssl_…'} for TLS: {reason}"
                if arguments.get("ssl_keyfile") and not arguments.get("ssl_password"):
                    message += ". A key with a password needs ssl_password"
                raise ConfigurationError(message) from error
        return self._made[1]


@dataclass(frozen=True, slots=True)
class Target:
    """One node and how to connect to it. The arguments of redis-py's ``Connection`` **hold the password**."""

    arguments: Mapping[str, Any] = field(repr=False)
    form: Form
    label: str  # for messages
    tls: Tls = field(default_factory=Tls, repr=False, compare=False)

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
        label = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return replace(self, arguments={**self.arguments, "host": host, "port": port}, label=label)

    @classmethod
    def unix(cls, path: str, arguments: Mapping[str, Any]) -> Target:
        """Make it for the server at a Unix socket."""
        return cls({**_DEFAULTS, **arguments, "path": path}, "unix", path)

    @classmethod
    def lent(cls, pool: Any, timeout: float | None = None, *, in_cluster: bool = False) -> Target:  # noqa: ANN401 - redis-py's
        """Make it from an application's connection pool, sync or async: the arguments of its connections."""
        given, form = pool.connection_kwargs, _form_of(pool.connection_class)
        if given.get("redis_connect_func") is not None and not in_cluster:  # of redis-py itself in a Cluster
            message = "lockkit cannot call the redis_connect_func of this client: give it a credential_provider instead"
            raise ConfigurationError(message)
        if given.get("ssl_validate_ocsp") or given.get("ssl_validate_ocsp_stapled"):
            message = (
                "lockkit does not ask whether a certificate was revoked (ssl_validate_ocsp, "
                "ssl_validate_ocsp_stapled): give it a client without that, or connect through a TLS proxy that does"
            )
            raise ConfigurationError(message)
        wanted = {*argument_names(), "db"}
        arguments = {name: value for name, value in given.items() if name in wanted and value is not None}
        for name, limit in _LIMITS.items():
            arguments[name] = timeout or min(arguments.get(name, limit), limit)
        if form == "unix":
            return cls.unix(str(given["path"]), arguments)
        return cls(arguments, form, "").moved(given.get("host", "localhost"), int(given.get("port", DEFAULT_PORT)))

    @property
    def timeout(self) -> float:
        """Seconds for an answer."""
        return float(self.arguments["socket_timeout"] or SOCKET_TIMEOUT)

    @property
    def connect_timeout(self) -> float:
        """Seconds for a TCP connection."""
        return float(self.arguments.get("socket_connect_timeout") or CONNECT_TIMEOUT)

    def settings(self, kind: Kind) -> Any:  # noqa: ANN401 - one of six classes of redis-py's
        """Have redis-py read the arguments: return its connection object, which is never connected."""
        module: Any = redis.asyncio.connection if kind == "asyncio" else redis.connection
        return getattr(module, _CLASSES[self.form])(**self.arguments)

    def unverified(self, kind: Kind) -> Literal["certificate", "host"] | None:
        """Tell what of the server's certificate is not verified; None if all is, or if there is no TLS."""
        if self.form != "tls":
            return None
        settings = self.settings(kind)
        if settings.cert_reqs == ssl.CERT_NONE:
            return "certificate"
        return None if settings.check_hostname else "host"


def _make_context(arguments: Mapping[str, Any], settings: Any) -> ssl.SSLContext:  # noqa: ANN401 - redis-py's
    """Make a context by the arguments ``ssl_…`` of redis-py."""
    get: Callable[..., Any] = {name[4:]: value for name, value in arguments.items() if name[:4] == "ssl_"}.get
    context = ssl.create_default_context()
    context.check_hostname = settings.check_hostname
    context.verify_mode = settings.cert_reqs
    for flag in get("include_verify_flags") or ():
        context.verify_flags |= flag
    for flag in get("exclude_verify_flags") or ():
        context.verify_flags &= ~flag
    if get("certfile") or get("keyfile"):
        # Without a password OpenSSL would ask for one at the terminal.
        context.load_cert_chain(get("certfile"), get("keyfile"), get("password") or "")
    if get("ca_certs") or get("ca_path") or get("ca_data"):
        context.load_verify_locations(get("ca_certs"), get("ca_path"), get("ca_data"))
    if get("min_version") is not None:
        context.minimum_version = get("min_version")
    if get("ciphers"):
        context.set_ciphers(get("ciphers"))
    return context


def _version_of_file(path: Any) -> object:  # noqa: ANN401 - an argument of redis-py
    """Return what changes when a file is replaced."""
    try:
        found = Path(path).stat()
    except (OSError, TypeError, ValueError):
        return None
    return found.st_ino, found.st_mtime_ns


def _form_of(cls: type) -> Form:
    """Return the transport of redis-py's own classes. Any other may reach its server in a way of its own."""
    if cls.__module__.startswith("redis."):
        for form in ("tls", "unix"):
            kinds = [getattr(module, _CLASSES[form]) for module in (redis.connection, redis.asyncio.connection)]
            if issubclass(cls, tuple(kinds)):
                return form
        return "tcp"
    message = (
        f"connections of the class {cls.__module__}.{cls.__qualname__} have no socket that lockkit could use: it "
        "connects by itself, as redis-py's own classes do. A stand-in for Redis, such as fakeredis, cannot be used. In "
        "tests, use lockkit.connect('memory://')"
    )
    raise ConfigurationError(message)


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
