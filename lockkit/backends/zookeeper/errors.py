"""Translates the errors of ZooKeeper and kazoo to lockkit's, in one table."""

from __future__ import annotations

import ssl

from kazoo import exceptions as kazoo
from kazoo.handlers.threading import KazooTimeoutError

from lockkit.backend import unsent
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

DRIVER_ERRORS: tuple[type[BaseException], ...] = (kazoo.KazooException, KazooTimeoutError)
"""What a request through kazoo may raise."""

_NO_TIME = "did not answer in time: is it overloaded, stopped or cut off?"
# In the order in which they are tried: ConnectionClosedError is a SessionExpiredError.
_UNAVAILABLE = {
    KazooTimeoutError: _NO_TIME,
    kazoo.ConnectionClosedError: "cannot be reached: the connection has been closed",
    kazoo.SessionExpiredError: "has ended the session, and all locks that it held",
    kazoo.ConnectionLoss: "lost the connection before it answered",
    kazoo.SessionMovedError: "refused the request: another connection has replaced this one",
    kazoo.OperationTimeoutError: _NO_TIME,
    kazoo.RequestTimeoutError: _NO_TIME,
    kazoo.ThrottledOpError: "is overloaded and refuses requests",
    kazoo.QuotaExceededError: "has no room left in this directory: a quota is used up (see listquota)",
    kazoo.NotReadOnlyCallError: "is read-only: the member is cut off from the majority",
    kazoo.KazooException: "refused the request",
}
_REFUSED = {
    kazoo.AuthFailedError: "refuses the login: user name or password is wrong",
    kazoo.SessionClosedRequireSaslError: "requires a login by SASL: put user and password in the URL, and auth=sasl",
    kazoo.NoAuthError: "denies this user a right: it needs create, delete and read in the directory of the locks, and "
    "write on nodes",
    kazoo.InvalidACLError: "refuses the access rights of the option acl",
    kazoo.UnimplementedError: "lacks a request that lockkit needs: use ZooKeeper 3.5 or later",
    kazoo.NoChildrenForEphemeralsError: "has an ephemeral node where the directory of a lock should be: remove it, or "
    "use another prefix",
}
_CLOSED = (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_CLIENT_REFUSED = "it wants a certificate of this client, of an authority that it trusts: give certfile and keyfile"
_TLS_REFUSED = {
    "certificate is not valid for": "its certificate is for another host: name that one in the URL, or see the option "
    "check_hostname",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted, see the options ca and verify_certs",
    "ALERT_BAD_CERTIFICATE": _CLIENT_REFUSED,
    "ALERT_CERTIFICATE": _CLIENT_REFUSED,
    "ALERT_UNKNOWN_CA": _CLIENT_REFUSED,
    "WRONG_VERSION_NUMBER": "it does not use TLS at this port: leave out use_ssl",
    "of the option": "TLS needs other files",  # of a client of kazoo's, or they were replaced
}
_NO_ANSWER = (kazoo.ConnectionLoss, kazoo.SessionExpiredError, kazoo.SessionMovedError, KazooTimeoutError)


def was_unanswered(error: LockError) -> bool:
    """Tell whether no answer came, so that the request may or may not have been carried out."""
    return isinstance(error.__cause__, _NO_ANSWER)


def translate(error: BaseException, label: str) -> LockError:
    """Translate an error of kazoo's to one of lockkit's."""
    text = str(error) or type(error).__name__
    for kind, advice in (*_REFUSED.items(), *_UNAVAILABLE.items()):
        if isinstance(error, kind):
            return (ConfigurationError if kind in _REFUSED else BackendUnavailable)(f"{label} {advice} ({text})")
    raise TypeError(error)


def connection_failed(error: BaseException | None, label: str) -> LockError:
    """Say why there is no connection; `error` is why the last attempt failed, if one has ended."""
    if isinstance(error, kazoo.AuthFailedError):
        return translate(error, label)
    if error is None or isinstance(error, TimeoutError):
        return unsent(f"{label} did not answer in time: is it stopped or cut off, or without a majority?")
    text = str(error) or type(error).__name__
    advice = "is it running, and reachable from here?"
    if isinstance(error, _CLOSED):
        advice = (
            "it closes the connection at once. Has it no majority, or this host maxClientCnxns connections already? Or "
            "does only one side use TLS at this port (option use_ssl)?"
        )
    refusal = next((refusal for part, refusal in _TLS_REFUSED.items() if part in text), None)
    failed = (ConfigurationError if refusal else unsent)(f"no connection to {label}: {refusal or advice} ({text})")
    failed.__cause__ = error
    return failed
