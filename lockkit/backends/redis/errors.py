"""Errors of a Redis server or of redis-py, translated to lockkit's by one table."""

from __future__ import annotations

import re
import ssl

import redis

from lockkit.backends.redis.resp import ServerSaid
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

DRIVER_ERRORS: tuple[type[BaseException], ...] = (redis.RedisError, ServerSaid, OSError, EOFError)
"""Errors that sending, receiving and connecting may raise."""

_VERSION = "it must be Redis 6.2 or later, or Valkey"
_REFUSED = "refuses the login"
_NO_PASSWORD = f"{_REFUSED}: the server requires a password. Give it in the URL"
_TLS = "uses TLS at this port: use the scheme with an s, such as rediss:// or redlocks://"
_NO_TLS = "does not use TLS at this port: use the scheme without s, such as redis:// or redlock://"
_OTHER_HOST = (
    "has a certificate for another host: connect by a name that the certificate has. Sentinels and Clusters tell "
    "addresses, unless they have announced host names: see TLS on the page of the redis backend"
)
_CLIENT_CERTIFICATE = "wants a certificate of the client that it trusts: give ssl_certfile= and ssl_keyfile="
_IN_CLUSTER = (
    "is a node of a Cluster and refuses the locks of the other nodes: use redis+cluster://{label} (with TLS "
    "rediss+cluster://), or from_client with a RedisCluster"
)
_NO_RUN_ID = (
    "does not tell the run id of the server, so lockkit could not notice a restart, which may bring back old data, and "
    "the node must not vote. Grant its user the right (redis-cli ACL SETUSER NAME +info); or set durable=1 if no node "
    "loses data (appendonly yes, appendfsync always)"
)
_NO_RIGHT = "denies this user a right: the documentation of this backend lists the rights that lockkit needs"
# Codes and parts of messages, in the order in which they are compared. Errors inside a script have their code within
# the text (before Redis 7: ``ERR Error running script …: OOM …``).
_CONFIGURATION = {
    "without any password configured": "has no password, but the URL gives one: leave it out",
    "no password is set": "has no password, but the URL gives one: leave it out",
    "DB index": "has no database with that number: see the path of the URL",
    "unknown command": f"lacks a command that lockkit needs: {_VERSION}",
    "syntax error": f"lacks an option of a command that lockkit needs: {_VERSION}",
    "certificate is not valid for": _OTHER_HOST,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _CLIENT_CERTIFICATE,
    "SSLV3_ALERT_BAD_CERTIFICATE": _CLIENT_CERTIFICATE,
    "TLSV1_ALERT_UNKNOWN_CA": _CLIENT_CERTIFICATE,
    "CERTIFICATE_VERIFY_FAILED": "has a certificate that is not trusted: see ssl_ca_certs=",
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "the port answers in plain text": _NO_TLS,
    "the port answers in TLS": _TLS,
    "unauthenticated": _NO_PASSWORD,
    "HELLO must be called with the client already authenticated": _NO_PASSWORD,
    # Of a command within a script, which has the code ERR: Redis 7.0; later versions, and Valkey.
    "The user executing the script can't": _NO_RIGHT,
    "ACL failure in script": _NO_RIGHT,
    # Those that a Cluster's topology does not follow.
    "MOVED": _IN_CLUSTER,
    "ASK": _IN_CLUSTER,
    "INCLUSTER": _IN_CLUSTER,
    "NOAUTH": f"{_NO_PASSWORD}, redis://user:password@host",
    "WRONGPASS": f"{_REFUSED}: user name or password is wrong, or the user is disabled",
    "NOPERM": _NO_RIGHT,
    "NODATA": "is a Sentinel, which knows the servers and has no locks: use redis+sentinel://, with the master's name",
    "NORUNID": _NO_RUN_ID,
    "TOOOLD": f"is too old: {_VERSION}",
    "DENIED": "runs in protected mode and refuses connections from other machines: set a password",
    "NOPROTO": "does not support this version of the protocol: leave out protocol=3",
    "WRONGTYPE": "has something other than a lock at the key of this lock: remove it, or use another prefix=",
}
_UNAVAILABLE = {
    "max number of clients": "has reached its limit of connections (maxclients)",
    "LOADING": "is still loading its data after a start: try again later",
    "READONLY": "is a read-only replica: give the address of the master, or find it by redis+sentinel://",
    "MASTERDOWN": "is a replica that has lost its master: give the address of the master",
    "CLUSTERDOWN": "belongs to a Cluster that is down: see CLUSTER INFO for slots that no node serves",
    "TRYAGAIN": "is moving this slot to another node: try again later",
    "CROSSSLOT": "finds keys of several slots in one script; that is a bug in lockkit",
    "OOM": "is out of memory (maxmemory is reached, with the policy noeviction): free memory or raise maxmemory",
    "MISCONF": "refuses writes because it cannot save its data: see its log",
    "NOREPLICAS": "refuses writes because too few replicas follow it (min-replicas-to-write)",
    "BUSY": "is running a long script: see SCRIPT KILL",
    "UNKILLABLE": "is running a long script that has written data",
}
_PATTERNS = {part: re.compile(rf"\b{part}\b") for part in (*_CONFIGURATION, *_UNAVAILABLE, "NOSCRIPT")}
# redis-py removes the code from the messages of errors that it knows.
_CODE_OF_CLASS = {
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
    """Turn redis-py's exception for an error reply back into that reply."""
    code = _CODE_OF_CLASS.get(type(error).__name__)
    return ServerSaid(f"{code} {error}" if code else str(error))


def code_of(error: BaseException | None) -> str:
    """Return the code of an error (``READONLY``, ``MOVED``, …) or the part of its message that tells it; else empty."""
    if isinstance(error, ServerSaid) and error.code in _PATTERNS:
        return error.code
    text = f"{_CODE_OF_CLASS.get(type(error).__name__, '')} {error}"
    return next((part for part, pattern in _PATTERNS.items() if pattern.search(text)), "")


def is_replica(reply: object) -> bool:
    """Tell whether the server refused because it is a replica: it did nothing, and another may be the master now."""
    return isinstance(reply, ServerSaid) and code_of(reply) in {"READONLY", "MASTERDOWN"}


def lacks_script(answer: object) -> bool:
    """Tell whether the server does not have the script that was called: it is new, was restarted, or was told to."""
    return isinstance(answer, ServerSaid) and answer.code == "NOSCRIPT"


def nothing_done(error: LockError) -> bool:
    """Tell whether the request that failed with this error was certainly not carried out."""
    return (isinstance(error, BackendUnavailable) and not error.sent) or is_replica(error.__cause__)


def translate(error: BaseException, label: str, *, sent: bool = True) -> LockError:
    """Return lockkit's error for one of a driver or server; `sent` says whether it may have got the request."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ssl.SSLError):
        text = error.strerror  # without the number
    code = code_of(error)
    translated: LockError
    if code in _CONFIGURATION:
        translated = ConfigurationError(f"{label} {_CONFIGURATION[code].replace('{label}', label)} ({text})")
    else:
        if code in _UNAVAILABLE:
            message = f"{label} {_UNAVAILABLE[code]} ({text})"
        elif isinstance(error, (redis.TimeoutError, TimeoutError)):
            message = f"{label} did not answer in time ({text}): is it overloaded, stopped or cut off?"
        elif isinstance(error, ServerSaid):
            message = f"{label} refused the request: {text}"
        else:
            message = f"no connection to {label}: is it running, and reachable from here? ({text})"
        translated = BackendUnavailable(message)
        translated.sent = sent
    translated.__cause__ = error
    return translated
