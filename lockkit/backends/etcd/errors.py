"""From what gRPC or an etcd member says to what a user of lockkit sees, in one table."""

from __future__ import annotations

import grpc

from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

__all__ = [
    "DRIVER_ERRORS",
    "LeaseEnded",
    "code_of",
    "details_of",
    "is_elsewhere",
    "is_stale_token",
    "is_unknown",
    "translate",
]

DRIVER_ERRORS: tuple[type[Exception], ...] = (grpc.RpcError,)
"""What a call may raise. Those of asyncio are of the same class."""


class LeaseEnded(BackendUnavailable):
    """The etcd lease of the request has run out or was revoked: an outcome that the backend deals with."""


_SPACE = (
    "its database is full (alarm NOSPACE), so it takes no new lock; held ones can be renewed and released. Compact and "
    "defragment it, then run `etcdctl alarm disarm`, or raise --quota-backend-bytes"
)
_REFUSED = "it refuses the login"
_RIGHTS = "it denies this user a right: grant read and write on the keys below the prefix"

# In etcd's words (api/v3rpc/rpctypes/error.go), which have been the same since 3.3.
_SAYINGS: tuple[tuple[str, type[LockError], str], ...] = (
    ("requested lease not found", LeaseEnded, "the lease has ended"),
    ("database space exceeded", BackendUnavailable, _SPACE),
    ("permission denied", ConfigurationError, _RIGHTS),
    ("invalid user ID or password", ConfigurationError, f"{_REFUSED}: user name or password is wrong"),
    ("user name is empty", ConfigurationError, f"{_REFUSED}: it wants a user name and a password"),
    ("user name not found", ConfigurationError, f"{_REFUSED}: it does not know this user"),
    ("invalid auth token", BackendUnavailable, "it does not accept the token of the login, also a fresh one"),
    ("auth store is old", BackendUnavailable, "its users were just changed: try again"),
    ("no leader", BackendUnavailable, "the cluster has no leader: a majority of its members must run"),
    ("leader changed", BackendUnavailable, "the cluster is electing a leader: try again"),
    ("request timed out", BackendUnavailable, "the cluster does not agree in time: a majority of its members must run"),
    ("too many requests", BackendUnavailable, "it is overloaded: try again later"),
    ("CORRUPT", BackendUnavailable, "its data are corrupt (alarm CORRUPT): see its log"),
    ("too many operations in txn", ConfigurationError, "it is started with a --max-txn-ops below its default of 128"),
)

_STALE_TOKEN = ("invalid auth token", "auth store is old")
_NEVER_SENT = ("failed to connect to all addresses", "no leader", "DNS resolution failed")

_CODES: dict[grpc.StatusCode, tuple[type[LockError], str]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (BackendUnavailable, "did not answer in time"),
    grpc.StatusCode.UNAVAILABLE: (BackendUnavailable, "cannot be reached"),
    grpc.StatusCode.CANCELLED: (BackendUnavailable, "the call was cancelled: the connection was closed"),
    grpc.StatusCode.INTERNAL: (BackendUnavailable, "the connection broke"),
    grpc.StatusCode.UNKNOWN: (BackendUnavailable, "the call failed"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (BackendUnavailable, "it is overloaded"),
    grpc.StatusCode.UNIMPLEMENTED: (ConfigurationError, "it is no etcd of version 3.4 or later"),
    grpc.StatusCode.UNAUTHENTICATED: (ConfigurationError, _REFUSED),
    grpc.StatusCode.PERMISSION_DENIED: (ConfigurationError, _RIGHTS),
}

# After these the request may or may not have been carried out.
_UNKNOWN = {
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.ABORTED,
}


def code_of(error: Exception) -> grpc.StatusCode:
    """Give the status of a failed call."""
    code = getattr(error, "code", None)
    found = code() if callable(code) else None
    return found if isinstance(found, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def details_of(error: Exception) -> str:
    """Give the text of a failed call."""
    details = getattr(error, "details", None)
    return str((details() if callable(details) else None) or "")


def is_unknown(error: Exception) -> bool:
    """
    Tell whether the request may have been carried out although it failed.

    A connection that was never made and a member without leader are the two failures that prove the contrary; the
    member that says something else has decided.
    """
    return code_of(error) in _UNKNOWN and not any(saying in details_of(error) for saying in _NEVER_SENT)


def is_elsewhere(error: Exception) -> bool:
    """Tell whether another member may do better."""
    return code_of(error) in _UNKNOWN


def is_stale_token(error: Exception) -> bool:
    """Tell whether a fresh login would help: the token has run out, or the member was restarted."""
    return any(saying in details_of(error) for saying in _STALE_TOKEN)


def translate(error: Exception, label: str) -> LockError:
    """
    Turn a failed call into our error; raise it ``from`` the original.

    Args:
        error: One of `DRIVER_ERRORS`. Has no password in it: gRPC tells addresses and what the member said.
        label: Of the member.
    """
    code, details = code_of(error), details_of(error)
    for saying, kind, text in _SAYINGS:
        if saying in details:
            return kind(f"etcd at {label}: {text}")
    known = _CODES.get(code)
    if known is None:
        return BackendUnavailable(f"etcd at {label} said {code.name}: {details or 'nothing more'}")
    kind, text = known
    more = f" ({details})" if details and code is not grpc.StatusCode.DEADLINE_EXCEEDED else ""
    return kind(f"etcd at {label} {text}{more}")
