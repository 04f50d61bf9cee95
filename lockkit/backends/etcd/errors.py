"""Turns errors of gRPC and of etcd members into those of lockkit, by one table."""

from __future__ import annotations

import grpc

from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

DRIVER_ERRORS: tuple[type[Exception], ...] = (grpc.RpcError,)
"""What a call may raise, also with grpc.aio."""


class LeaseEnded(BackendUnavailable):
    """The etcd lease in the request has expired or was revoked. The backend handles it."""


NO_ANSWER = "did not answer in time: is it overloaded, stopped or cut off?"

_NO_SPACE = (
    "its database is full (alarm NOSPACE), so it grants no lock; held ones can be renewed and released. Compact and "
    "defragment it, then run `etcdctl alarm disarm`, or raise --quota-backend-bytes"
)
_LOGIN_REFUSED = "refuses the login"
_LOGIN_ENDED = "it rejects the token of the login. If that is an application's client's, the client must log in again"
_NO_RIGHTS = "denies this user a right: grant read and write on the keys below the prefix"
_CLIENT_REFUSED = "it wants a certificate of this client, of an authority that it trusts: give cert and key"
_CLOSED = "it closes the connection at once: is it starting or stopping"

# etcd's messages (api/v3rpc/rpctypes/error.go), the same since 3.3; the class of the error, and what to say.
_MESSAGES: tuple[tuple[str, type[LockError], str], ...] = (
    ("requested lease not found", LeaseEnded, "the lease has ended"),
    ("database space exceeded", BackendUnavailable, _NO_SPACE),
    ("permission denied", ConfigurationError, f"it {_NO_RIGHTS}"),
    ("invalid user ID or password", ConfigurationError, f"it {_LOGIN_REFUSED}: user name or password is wrong"),
    ("user name is empty", ConfigurationError, f"it {_LOGIN_REFUSED}: it requires a user name and a password"),
    ("user name not found", ConfigurationError, f"it {_LOGIN_REFUSED}: it does not know this user"),
    ("invalid auth token", BackendUnavailable, _LOGIN_ENDED),
    ("auth store is old", BackendUnavailable, "its users have just changed: try again"),
    ("no leader", BackendUnavailable, "the cluster has no leader: a majority of its members must run"),
    ("leader changed", BackendUnavailable, "the cluster is electing a leader: try again"),
    ("request timed out", BackendUnavailable, "the cluster does not agree in time: a majority of its members must run"),
    ("too many requests", BackendUnavailable, "it is overloaded: try again later"),
    ("corrupt cluster", BackendUnavailable, "its data are corrupt (alarm CORRUPT): see its log"),
    ("context canceled", BackendUnavailable, "it cancelled the call. Is it `etcd grpc-proxy`? Connect to the members"),
    (
        "Hostname Verification Check failed",
        ConfigurationError,
        "its certificate is for another host: name that one in the URL, or in the option server_name",
    ),
    ("CERTIFICATE_VERIFY_FAILED", ConfigurationError, "its certificate is not trusted: see the option ca"),
    (": Unwrap failed (TSI_DATA_CORRUPTED)", ConfigurationError, _CLIENT_REFUSED),  # TLS 1.3: gRPC only logs the alert
    ("ALERT_BAD_CERTIFICATE", ConfigurationError, _CLIENT_REFUSED),
    ("ALERT_CERTIFICATE", ConfigurationError, _CLIENT_REFUSED),
    ("ALERT_UNKNOWN_CA", ConfigurationError, _CLIENT_REFUSED),
    ("Failed to create security handshaker", ConfigurationError, "gRPC cannot use the files of ca, cert and key"),
    ("WRONG_VERSION_NUMBER", ConfigurationError, "it does not use TLS at this port: write etcd://"),
    ("Handshake read failed", BackendUnavailable, f"{_CLOSED}, or without TLS at this port (then write etcd://)?"),
    (": Socket closed", BackendUnavailable, f"{_CLOSED}, or does it use TLS at this port (then write etcds://)?"),
    ("too many operations in txn", ConfigurationError, "its --max-txn-ops is below the default of 128"),
)

# The last: of a user who logged in when the cluster did not require it yet.
_STALE_TOKEN = ("invalid auth token", "auth store is old", "user name is empty")
_NEVER_SENT = ("failed to connect to all addresses", "no leader", "DNS resolution failed")

# The call may or may not have been executed, and another member may do better.
_FAILURES: dict[grpc.StatusCode, tuple[type[LockError], str]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (BackendUnavailable, NO_ANSWER),
    grpc.StatusCode.UNAVAILABLE: (BackendUnavailable, "cannot be reached: is it running, and reachable from here?"),
    grpc.StatusCode.CANCELLED: (BackendUnavailable, "did not finish the call: the connection was closed"),
    grpc.StatusCode.INTERNAL: (BackendUnavailable, "broke the connection"),
    grpc.StatusCode.UNKNOWN: (BackendUnavailable, "failed"),
    grpc.StatusCode.ABORTED: (BackendUnavailable, "aborted the call"),
}

_REFUSALS: dict[grpc.StatusCode, tuple[type[LockError], str]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: (BackendUnavailable, "is overloaded"),
    grpc.StatusCode.UNIMPLEMENTED: (ConfigurationError, "is no etcd of version 3.4 or later"),
    grpc.StatusCode.UNAUTHENTICATED: (ConfigurationError, _LOGIN_REFUSED),
    grpc.StatusCode.PERMISSION_DENIED: (ConfigurationError, _NO_RIGHTS),
}


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the status of a failed call."""
    code = getattr(error, "code", None)
    return code() if callable(code) else grpc.StatusCode.UNKNOWN


def details_of(error: Exception) -> str:
    """Return the message of a failed call."""
    details = getattr(error, "details", None)
    return str((details() if callable(details) else None) or "")


def is_member_failure(error: Exception) -> bool:
    """Tell whether the member failed, rather than refused: another one may do better."""
    return code_of(error) in _FAILURES


def is_outcome_unknown(error: Exception) -> bool:
    """Tell whether the request may have been executed: unless the member answered, or never got it."""
    return is_member_failure(error) and not any(message in details_of(error) for message in _NEVER_SENT)


def is_stale_token(error: Exception) -> bool:
    """Tell whether a fresh login would help, if there is a user: the token has expired, or the member was restarted."""
    return any(message in details_of(error) for message in _STALE_TOKEN)


def translate(error: Exception, label: str, *, sent: bool = True) -> LockError:
    """Turn a failed call into an error of lockkit; raise it ``from`` the original."""
    code, details = code_of(error), details_of(error)
    kind, text = (_FAILURES | _REFUSALS).get(code, (BackendUnavailable, f"failed with {code.name}"))
    more = f" ({details})" if details and code is not grpc.StatusCode.DEADLINE_EXCEEDED else ""
    failure = kind(f"etcd at {label} {text}{more}")
    for message, kind, text in _MESSAGES:
        if message in details:
            failure = kind(f"etcd at {label}: {text}")
            break
    if isinstance(failure, BackendUnavailable):
        failure.sent = sent
    return failure
