"""Errors of a Redis server or of redis-py, translated to lockkit's by one table."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
_TABLE: dict[str, tuple[Callable[[str], LockError], str]] = {
    "LOADING": (BackendUnavailable, "is still loading its data after a start: try again later"),
    "READONLY": (
        BackendUnavailable,
        "is a read-only replica: give the address of the master, or find it by redis+sentinel://",
    ),
    "MASTERDOWN": (BackendUnavailable, "is a replica that has lost its master: give the address of the master"),
    "CLUSTERDOWN": (
        BackendUnavailable,
        "belongs to a Cluster that is down: see CLUSTER INFO for slots that no node serves",
    ),
    "TRYAGAIN": (BackendUnavailable, "is moving this slot to another node: try again later"),
    # Those that a Cluster's topology does not follow.
    "MOVED": (ConfigurationError, _IN_CLUSTER),
    "ASK": (ConfigurationError, _IN_CLUSTER),
    "INCLUSTER": (ConfigurationError, _IN_CLUSTER),
    "CROSSSLOT": (BackendUnavailable, "finds keys of several slots in one script; that is a bug in lockkit"),
    "OOM": (
        BackendUnavailable,
        "is out of memory (maxmemory is reached, with the policy noeviction): free memory or raise maxmemory",
    ),
    "MISCONF": (BackendUnavailable, "refuses writes because it cannot save its data: see its log"),
    "NOREPLICAS": (BackendUnavailable, "refuses writes because too few replicas follow it (min-replicas-to-write)"),
    "BUSY": (BackendUnavailable, "is running a long script: see SCRIPT KILL"),
    "UNKILLABLE": (BackendUnavailable, "is running a long script that has written data"),
    "NOAUTH": (ConfigurationError, f"{_NO_PASSWORD}, redis://user:password@host"),
    "WRONGPASS": (ConfigurationError, f"{_REFUSED}: user name or password is wrong, or the user is disabled"),
    "NOPERM": (ConfigurationError, _NO_RIGHT),
    "NODATA": (
        ConfigurationError,
        "is a Sentinel, which knows the servers and has no locks: use redis+sentinel://, with the master's name",
    ),
    "NORUNID": (ConfigurationError, _NO_RUN_ID),
    "TOOOLD": (ConfigurationError, f"is too old: {_VERSION}"),
    "DENIED": (
        ConfigurationError,
        "runs in protected mode and refuses connections from other machines: set a password",
    ),
    "NOPROTO": (ConfigurationError, "does not support this version of the protocol: leave out protocol=3"),
    "WRONGTYPE": (
        ConfigurationError,
        "has something other than a lock at the key of this lock: remove it, or use another prefix=",
    ),
}
_CODES = re.compile(rf"\b({'|'.join(_TABLE)})\b")
# Messages without a code, in the order in which they are compared.
_TEXTS: tuple[tuple[str, Callable[[str], LockError], str], ...] = (
    ("max number of clients", BackendUnavailable, "has reached its limit of connections (maxclients)"),
    (
        "without any password configured",
        ConfigurationError,
        "has no password, but the URL gives one: leave it out",
    ),
    ("no password is set", ConfigurationError, "has no password, but the URL gives one: leave it out"),
    ("DB index", ConfigurationError, "has no database with that number: see the path of the URL"),
    (
        "unknown command",
        ConfigurationError,
        f"lacks a command that lockkit needs: {_VERSION}",
    ),
    ("syntax error", ConfigurationError, f"lacks an option of a command that lockkit needs: {_VERSION}"),
    (
        "certificate is not valid for",
        ConfigurationError,
        _OTHER_HOST,
    ),
    ("CERTIFICATE_VERIFY_FAILED", ConfigurationError, "has a certificate that is not trusted: see ssl_ca_certs="),
    ("WRONG_VERSION_NUMBER", ConfigurationError, _NO_TLS),
    ("the port answers in plain text", ConfigurationError, _NO_TLS),
    ("the port answers in TLS", ConfigurationError, _TLS),
    ("invalid username-password", ConfigurationError, f"{_REFUSED}: user name or password is wrong"),
    ("unauthenticated", ConfigurationError, _NO_PASSWORD),
    ("Authentication required", ConfigurationError, _NO_PASSWORD),
    ("HELLO must be called with the client already authenticated", ConfigurationError, _NO_PASSWORD),
    # Of a command within a script, which has the code ERR: Redis 7.0; later versions, and Valkey.
    ("The user executing the script can't", ConfigurationError, _NO_RIGHT),
    ("ACL failure in script", ConfigurationError, _NO_RIGHT),
)
# redis-py removes the code from the messages of errors that it knows.
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
    """Turn redis-py's exception for an error reply back into that reply."""
    code = _CODE_OF_CLASS.get(type(error).__name__)
    return ServerSaid(f"{code} {error}" if code else str(error))


def code_of(error: BaseException) -> str:
    """
    Return the code of an error: ``READONLY``, ``NOSCRIPT``, …; empty if it has none that is known.

    Errors inside a script have theirs within the text (before Redis 7: ``ERR Error running script …: OOM …``).
    """
    if isinstance(error, ServerSaid):
        found = _CODES.search(error.text)
        return found[1] if found else error.code
    return _CODE_OF_CLASS.get(type(error).__name__, "")


def is_replica(error: ServerSaid) -> bool:
    """Tell whether the server refused because it is a replica: it did nothing, and another may be the master now."""
    return code_of(error) in {"READONLY", "MASTERDOWN"}


def lacks_script(answer: object) -> bool:
    """Tell whether the server does not have the script that was called: it is new, was restarted, or was told to."""
    return isinstance(answer, ServerSaid) and answer.code == "NOSCRIPT"


def nothing_done(error: LockError) -> bool:
    """Tell whether the request that failed with this error was certainly not carried out."""
    cause = error.__cause__
    unsent = isinstance(error, BackendUnavailable) and not error.sent
    return unsent or (isinstance(cause, ServerSaid) and is_replica(cause))


@contextmanager
def nothing_sent(*, before: bool = False) -> Iterator[None]:
    """Note on errors of the driver that the request was not sent, unless it was sent `before`; see `translate`."""
    try:
        yield
    except DRIVER_ERRORS as error:
        vars(error)["unsent"] = not before
        raise


@contextmanager
def sent_before(sent: bool) -> Iterator[None]:  # noqa: FBT001 - says what the name says
    """Let an error say that the request was sent, if it was sent to another node before."""
    try:
        yield
    except BackendUnavailable as error:
        error.sent = sent or error.sent
        raise


def translate(error: BaseException, label: str) -> LockError:
    """Return lockkit's error for one of a driver or server."""
    translated = _translate(error, label)
    if isinstance(translated, BackendUnavailable):
        translated.sent = not vars(error).get("unsent", False)
    return translated


def _translate(error: BaseException, label: str) -> LockError:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ssl.SSLError):
        text = error.strerror  # without the number
    for part, make, advice in _TEXTS:
        if part in text:
            return make(f"{label} {advice} ({text})")
    entry = _TABLE.get(code_of(error))
    if entry is not None:
        make, advice = entry
        return make(f"{label} {advice.replace('{label}', label)} ({text})")
    if isinstance(error, (redis.TimeoutError, TimeoutError)):
        return BackendUnavailable(f"{label} did not answer in time ({text}): is it overloaded, stopped or cut off?")
    if isinstance(error, ServerSaid):
        return BackendUnavailable(f"{label} refused the request: {text}")
    return BackendUnavailable(f"no connection to {label}: is it running, and reachable from here? ({text})")
