"""
Whether a connection fails because the server uses TLS and the URL does not, or the other way round.

Neither side says so. A TLS port closes the connection at the first command in plain text; Redis takes the first message
of a TLS client for the beginning of a line, and waits for its end. So lockkit tries the other way, on a separate
connection, without credentials, and only if the server has never answered.
"""

from __future__ import annotations

from ssl import SSLError

import redis

from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import open_connection
from lockkit.backends.redis.errors import DRIVER_ERRORS
from lockkit.backends.redis.resp import pack
from lockkit.runtime import Runtime

TLS_SHARE = 0.75
"""Share of the time that a first TLS connection may take. The rest is for this probe; more leaves it too little."""

TLS_SECONDS = 0.5
"""Longest time for a TLS handshake. Longer delays the error of a server that ends connections for another reason."""

_TRUSTING = {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
"""Trust any certificate: nothing secret is sent."""


async def other_form(runtime: Runtime, target: Target, error: BaseException, until: float) -> str | None:
    """Say what is wrong, if the server answers in the other way."""
    left_seconds = until - runtime.now()
    if left_seconds <= 0 or not _may_be(error, target):
        return None
    try_tls = target.form == "tcp"
    if try_tls:
        left_seconds = min(left_seconds, TLS_SECONDS)
    arguments = {
        "host": target.arguments["host"],
        "port": target.arguments["port"],
        "socket_timeout": left_seconds,
        "socket_connect_timeout": left_seconds,
        "redis_connect_func": _skip_login,
        **(_TRUSTING if try_tls else {}),
    }
    until = runtime.now() + left_seconds
    try:
        other = Target(arguments, "tls" if try_tls else "tcp", target.label)
        connection = await open_connection(runtime, other, until)
        try:
            if not try_tls:
                await runtime.io(connection.call(pack("PING"), until))
        finally:
            connection.close()
    except DRIVER_ERRORS:
        return None
    return "the port answers in TLS" if try_tls else "the port answers in plain text"


def _skip_login(connection: object) -> None:
    """Replace redis-py's login, with which it begins on each connection."""


def _may_be(error: BaseException, target: Target) -> bool:
    """Tell whether TLS on one side only may have caused this error."""
    causes = (error, error.__cause__, error.__context__)
    if target.form == "tcp":
        # Closed at the first command, or answered with a TLS alert.
        return any(
            isinstance(cause, (ConnectionResetError, BrokenPipeError, redis.InvalidResponse)) for cause in causes
        ) or "closed by server" in str(error)
    if target.form == "tls":
        return any(isinstance(cause, (TimeoutError, redis.TimeoutError, SSLError)) for cause in causes)
    return False
