"""From what ZooKeeper or kazoo says to what a user of lockkit sees, in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kazoo import exceptions as kazoo
from kazoo.handlers.threading import KazooTimeoutError

from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DRIVER_ERRORS", "connection_failed", "translate", "was_unanswered"]

DRIVER_ERRORS: tuple[type[BaseException], ...] = (kazoo.KazooException, KazooTimeoutError)
"""What a request of kazoo's may end in."""

# In the order in which they are tried: ConnectionClosedError is a SessionExpiredError.
_TABLE: tuple[tuple[type[BaseException], Callable[[str], LockError], str], ...] = (
    (KazooTimeoutError, BackendUnavailable, "did not answer in time: is it overloaded, stopped or cut off?"),
    (kazoo.ConnectionClosedError, BackendUnavailable, "cannot be asked: the connection has been closed"),
    (kazoo.SessionExpiredError, BackendUnavailable, "has ended our session, and all that it held"),
    (kazoo.ConnectionLoss, BackendUnavailable, "lost the connection before it answered"),
    (kazoo.SessionMovedError, BackendUnavailable, "was asked through a connection that another one has replaced"),
    (kazoo.OperationTimeoutError, BackendUnavailable, "did not answer in time"),
    (kazoo.RequestTimeoutError, BackendUnavailable, "did not answer in time"),
    (kazoo.ThrottledOpError, BackendUnavailable, "is overloaded and refuses requests"),
    (kazoo.QuotaExceededError, BackendUnavailable, "has no room left here: a quota is used up (see listquota)"),
    (kazoo.NotReadOnlyCallError, BackendUnavailable, "is read-only: that member is cut off from the majority"),
    (kazoo.AuthFailedError, ConfigurationError, "refuses the login: user name or password is wrong"),
    (
        kazoo.SessionClosedRequireSaslError,
        ConfigurationError,
        "wants a login by SASL: give user and password in the URL, and auth=sasl",
    ),
    (
        kazoo.NoAuthError,
        ConfigurationError,
        "denies this user a right: it needs create, delete and read where the locks are (see getAcl)",
    ),
    (kazoo.InvalidACLError, ConfigurationError, "does not take the access rights of the option acl"),
    (kazoo.UnimplementedError, ConfigurationError, "lacks a request that lockkit needs: ZooKeeper 3.5 is the oldest"),
    (
        kazoo.NoChildrenForEphemeralsError,
        ConfigurationError,
        "has an ephemeral node where the directory of a lock should be: remove it, or use another prefix",
    ),
)
_NO_ANSWER = (kazoo.ConnectionLoss, kazoo.SessionExpiredError, kazoo.SessionMovedError, KazooTimeoutError)


def was_unanswered(error: LockError) -> bool:
    """Tell whether no answer came, so that nobody knows whether the request was carried out."""
    return isinstance(error.__cause__, _NO_ANSWER)


def translate(error: BaseException, label: str) -> LockError:
    """
    Make our error of kazoo's.

    Args:
        error: One of `DRIVER_ERRORS`. To be the ``__cause__``.
        label: Which servers, without a password.
    """
    text = str(error) or type(error).__name__
    for kind, make, advice in _TABLE:
        if isinstance(error, kind):
            return make(f"{label} {advice} ({text})")
    return BackendUnavailable(f"{label} refused the request: {text}")


def connection_failed(error: BaseException | None, label: str) -> BackendUnavailable:
    """Say why there is no connection; `error` is what the last attempt ended in, if one has ended."""
    if error is None:
        return BackendUnavailable(f"{label} did not answer in time: is it stopped or cut off, or without a majority?")
    text = str(error) or type(error).__name__
    hint = ""
    if "CERTIFICATE_VERIFY_FAILED" in text:
        hint = "; its certificate is not trusted, see the options ca and verify_certs"
    failed = BackendUnavailable(f"no connection to {label}: {text}{hint}")
    failed.__cause__ = error
    return failed
