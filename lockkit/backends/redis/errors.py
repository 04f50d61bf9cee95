"""From what a Redis server or redis-py says to what a user of lockkit sees, in one table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import redis

from lockkit.backends.redis.resp import ServerSaid
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DRIVER_ERRORS", "code_of", "nothing_done", "server_said", "translate"]

DRIVER_ERRORS: tuple[type[BaseException], ...] = (redis.RedisError, ServerSaid, OSError, EOFError)
"""What sending, receiving and connecting may raise."""

_REFUSED = "the server refuses the login"
_TABLE: dict[str, tuple[Callable[[str], LockError], str]] = {
    "LOADING": (BackendUnavailable, "is loading its data after a start: try again when it is done"),
    "READONLY": (
        BackendUnavailable,
        "is a read-only replica: give the address of the master, or find it by redis+sentinel://",
    ),
    "MASTERDOWN": (BackendUnavailable, "is a replica that has lost its master: give the address of the master"),
    "CLUSTERDOWN": (BackendUnavailable, "belongs to a Cluster that is down: see CLUSTER INFO for slots nobody serves"),
    "TRYAGAIN": (BackendUnavailable, "is moving this slot to another node: try again when it is done"),
    "MOVED": (BackendUnavailable, "is a node of a Cluster: use redis+cluster://"),
    "ASK": (BackendUnavailable, "is a node of a Cluster: use redis+cluster://"),
    "CROSSSLOT": (BackendUnavailable, "finds keys of several slots in one script; that is a bug in lockkit"),
    "OOM": (
        BackendUnavailable,
        "is out of memory (maxmemory is reached, and its policy noeviction keeps all): free memory or raise maxmemory",
    ),
    "MISCONF": (BackendUnavailable, "refuses writes because it cannot save its data: see its log"),
    "NOREPLICAS": (BackendUnavailable, "refuses writes because too few replicas follow it (min-replicas-to-write)"),
    "BUSY": (BackendUnavailable, "is busy with somebody's long script: see SCRIPT KILL"),
    "UNKILLABLE": (BackendUnavailable, "is busy with somebody's long script"),
    "NOAUTH": (ConfigurationError, f"{_REFUSED}: it wants a password. Give it in the URL, redis://user:password@host"),
    "WRONGPASS": (ConfigurationError, f"{_REFUSED}: user name or password is wrong, or the user is disabled"),
    "NOPERM": (
        ConfigurationError,
        "denies this user a right: the page on this backend lists those that lockkit needs (keys, channels, commands)",
    ),
    "DENIED": (ConfigurationError, "runs in protected mode and lets nobody in from another machine: set a password"),
    "NOPROTO": (ConfigurationError, "does not speak this version of the protocol: leave out protocol=3"),
    "WRONGTYPE": (
        ConfigurationError,
        "holds something else than a lock under the key of this lock: remove it, or use another prefix=",
    ),
}
_CODES = re.compile(rf"\b({'|'.join(_TABLE)})\b")
# Texts without a code of their own, in the order in which they are tried.
_TEXTS: tuple[tuple[str, Callable[[str], LockError], str], ...] = (
    ("max number of clients", BackendUnavailable, "has no room for another connection (maxclients)"),
    (
        "without any password configured",
        ConfigurationError,
        "has no password, but the URL gives one: leave it out",
    ),
    ("no password is set", ConfigurationError, "has no password, but the URL gives one: leave it out"),
    ("DB index", ConfigurationError, "has no database of that number: see the path of the URL"),
    ("unknown command", ConfigurationError, "lacks a command that lockkit needs: Redis 5 or Valkey is the oldest"),
    ("CERTIFICATE_VERIFY_FAILED", ConfigurationError, "shows a certificate that is not trusted: see ssl_ca_certs="),
    ("WRONG_VERSION_NUMBER", ConfigurationError, "does not speak TLS at this port: use redis://"),
    ("the port answers in plain text", ConfigurationError, "does not speak TLS at this port: use redis://"),
    ("the port answers in TLS", ConfigurationError, "speaks TLS at this port: use rediss://"),
    ("invalid username-password", ConfigurationError, f"{_REFUSED}: user name or password is wrong"),
    ("unauthenticated", ConfigurationError, f"{_REFUSED}: it wants a password. Give it in the URL"),
    ("Authentication required", ConfigurationError, f"{_REFUSED}: it wants a password. Give it in the URL"),
)
# redis-py takes the code off the text of the errors that it knows.
_CODE_OF_CLASS: dict[str, str] = {
    "NoScriptError": "NOSCRIPT",
    "BusyLoadingError": "LOADING",
    "ReadOnlyError": "READONLY",
    "OutOfMemoryError": "OOM",
    "NoPermissionError": "NOPERM",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "AuthenticationError": "WRONGPASS",
}


def server_said(error: redis.ResponseError) -> ServerSaid:
    """Give redis-py's exception for an error reply back as the reply it was."""
    code = _CODE_OF_CLASS.get(type(error).__name__)
    return ServerSaid(f"{code} {error}" if code else str(error))


def code_of(error: BaseException) -> str:
    """
    Tell what an error is about: ``READONLY``, ``NOSCRIPT``, …; empty if it has no known code.

    Errors inside a script carry theirs within the text (before Redis 7: ``ERR Error running script …: OOM …``).
    """
    if isinstance(error, ServerSaid):
        found = _CODES.search(error.text)
        return found[1] if found else error.code
    return _CODE_OF_CLASS.get(type(error).__name__, "")


def nothing_done(error: LockError) -> bool:
    """Tell whether the request behind one of our errors was surely not carried out."""
    cause = error.__cause__
    # redis-py's own errors come from connecting only: after that we use its socket. And a replica refuses writes.
    return isinstance(cause, redis.RedisError) or (isinstance(cause, ServerSaid) and code_of(cause) == "READONLY")


def translate(error: BaseException, label: str) -> LockError:
    """
    Make our error of a driver's or server's.

    Args:
        error: One of `DRIVER_ERRORS`. To be the ``__cause__``.
        label: Which server, without a password: ``host:port``.
    """
    text = str(error) or type(error).__name__
    for part, make, advice in _TEXTS:
        if part in text:
            return make(f"{label} {advice} ({text})")
    entry = _TABLE.get(code_of(error))
    if entry is not None:
        make, advice = entry
        return make(f"{label} {advice} ({text})")
    if isinstance(error, (redis.TimeoutError, TimeoutError)):
        return BackendUnavailable(f"{label} did not answer in time ({text}): is it overloaded, stopped or cut off?")
    if isinstance(error, ServerSaid):
        return BackendUnavailable(f"{label} refused the request: {text}")
    return BackendUnavailable(f"no connection to {label}: {text}")
