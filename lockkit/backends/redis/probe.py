"""
Whether a connection fails because the server uses TLS and the URL does not, or the other way round.

Neither side says so. A TLS port closes the connection at the first command in plain text; Redis takes the first message
of a TLS client for the beginning of a line, and waits for its end. So lockkit tries the other way, on a separate
connection, without credentials, and only if the server has never answered.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING

import redis

if TYPE_CHECKING:
    from lockkit.backends.redis.address import Target
    from lockkit.runtime import Runtime

__all__ = ["TLS_SHARE", "other_form"]

TLS_SHARE = 0.75
"""Share of the time that a first TLS connection may take. The rest is for this probe; more leaves it too little."""

TLS_SECONDS = 0.5
"""Longest time for a TLS handshake. Longer delays the error of a server that ends connections for another reason."""

_ERRORS = (OSError, EOFError)  # ssl.SSLError and TimeoutError are OSErrors


async def other_form(runtime: Runtime, target: Target, error: BaseException, until: float) -> str | None:
    """
    Say what is wrong, if the server answers in the other way.

    Args:
        runtime: Of the sync or the async API.
        target: The server that could not be reached.
        error: Why.
        until: Client monotonic time by which this returns.

    Returns:
        A sentence that `lockkit.backends.redis.errors.translate` knows, or None.
    """
    left_seconds = until - runtime.now()
    if left_seconds <= 0 or not _may_be(error, target):
        return None
    address = str(target.arguments["host"]), int(target.arguments["port"])
    context = None
    if target.form == "tcp":
        context, left_seconds = _trusting(), min(left_seconds, TLS_SECONDS)
    try:
        if runtime.kind == "asyncio":
            found = await _ask_asyncio(address, context, left_seconds)
        else:
            found = _ask(address, context, left_seconds)
    except _ERRORS:
        return None
    if not found:
        return None
    return "the port answers in TLS" if context else "the port answers in plain text"


def _may_be(error: BaseException, target: Target) -> bool:
    """Tell whether TLS on one side only may have caused this error."""
    causes = (error, error.__cause__, error.__context__)
    if target.form == "tcp":
        # Closed at the first command, or answered with a TLS alert.
        return any(
            isinstance(cause, (ConnectionResetError, BrokenPipeError, redis.InvalidResponse)) for cause in causes
        ) or "closed by server" in str(error)
    if target.form == "tls":
        return any(isinstance(cause, (TimeoutError, redis.TimeoutError, ssl.SSLError)) for cause in causes)
    return False


def _trusting() -> ssl.SSLContext:
    """Trust any certificate: nothing secret is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _ask(address: tuple[str, int], context: ssl.SSLContext | None, left_seconds: float) -> bool:
    with socket.create_connection(address, left_seconds) as plain:
        if context is not None:
            context.wrap_socket(plain).close()
            return True
        plain.sendall(b"PING\r\n")
        return plain.recv(1) in {b"+", b"-"}


async def _ask_asyncio(address: tuple[str, int], context: ssl.SSLContext | None, left_seconds: float) -> bool:
    async with asyncio.timeout(left_seconds):
        reader, writer = await asyncio.open_connection(*address, ssl=context)
        try:
            if context is not None:
                return True
            writer.write(b"PING\r\n")
            return await reader.read(1) in {b"+", b"-"}
        finally:
            writer.transport.abort()
