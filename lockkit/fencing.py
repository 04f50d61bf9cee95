"""
Guards: storage that lets no stale holder write.

A lease alone does not keep a paused holder out: it may wake up after its lock has passed to another holder, and write.
Each grant carries a token that is higher than all before it, so storage that remembers the newest token it has seen can
refuse an older one, in the same atomic step as the write.

====================  =======================================================
`TokenGuard`          for what lives in this process
`RedisGuard`          for data in Redis, blocking
`AsyncRedisGuard`     for data in Redis, with asyncio
`EtcdGuard`           for data in the etcd where the lock is, blocking
`AsyncEtcdGuard`      for data in the etcd where the lock is, with asyncio
`SqlGuard`            for data in a SQL database, blocking
`AsyncSqlGuard`       for data in a SQL database, with asyncio
`fenced`              the condition alone, for a statement of SQLAlchemy's
`FenceMixin`          the column for it, for mapped classes
====================  =======================================================

All accept a token that is not older than the newest one, so a holder writes as often as it likes, and raise
`lockkit.StaleToken` for an older one. The guard of a store is loaded, and its driver with it, when it is first named.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockkit.errors import ConfigurationError, StaleToken
from lockkit.validation import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockkit.storage.etcd.guard import AsyncEtcdGuard, EtcdGuard
    from lockkit.storage.redis.guard import AsyncRedisGuard, RedisGuard
    from lockkit.storage.sql.guard import AsyncSqlGuard, FenceMixin, SqlGuard, fenced

__all__ = [
    "TOKEN_MAX",
    "AsyncEtcdGuard",
    "AsyncRedisGuard",
    "AsyncSqlGuard",
    "EtcdGuard",
    "FenceMixin",
    "RedisGuard",
    "SqlGuard",
    "TokenGuard",
    "check_token",
    "fenced",
    "stale_token",
]

TOKEN_MAX = 2**63 - 1
"""Largest token: stores keep it as a signed 64-bit number."""

_LAZY = {
    "AsyncEtcdGuard": "lockkit.storage.etcd.guard",
    "EtcdGuard": "lockkit.storage.etcd.guard",
    "AsyncRedisGuard": "lockkit.storage.redis.guard",
    "RedisGuard": "lockkit.storage.redis.guard",
    "AsyncSqlGuard": "lockkit.storage.sql.guard",
    "FenceMixin": "lockkit.storage.sql.guard",
    "SqlGuard": "lockkit.storage.sql.guard",
    "fenced": "lockkit.storage.sql.guard",
}


class TokenGuard:
    """
    Guards something in this process. For threads and for tasks.

    ::

        guard = TokenGuard("seat:12A")
        with guard.writing(lease.token):
            seats["12A"] = customer

    It knows what it has seen itself: for data that other processes write too, the guard must be where the data are.
    """

    def __init__(self, name: str | None = None) -> None:
        """
        Have seen no token yet.

        Args:
            name: What is guarded, for messages.
        """
        self._name = name
        self._last: int | None = None
        self._mutex = threading.Lock()

    @property
    def last(self) -> int | None:
        """The newest token that was accepted, None if there was none. No I/O."""
        return self._last

    def accept(self, token: int) -> None:
        """
        Accept a token from now on, and none that is older.

        Between this and a write of yours another thread can come with a newer one: put writes under `writing`.

        Args:
            token: Of the lease under which you work.

        Raises:
            StaleToken: A newer one was accepted before.
            ConfigurationError: It is not a token.
        """
        check_token(token, name=self._name)
        with self._mutex:
            self._accept(token)

    @contextmanager
    def writing(self, token: int) -> Iterator[None]:
        """
        Accept a token, and let no other in until the body has ended.

        Args:
            token: Of the lease under which you work. The body should only write: others wait. No ``await`` in it.

        Raises:
            StaleToken: A newer one was accepted before; the body is not run.
            ConfigurationError: It is not a token.
        """
        check_token(token, name=self._name)
        with self._mutex:
            self._accept(token)
            yield

    def _accept(self, token: int) -> None:
        if self._last is not None and token < self._last:
            raise stale_token("the write", token, self._last, name=self._name)
        self._last = token


def check_token(token: object, *, name: str | None = None) -> int:
    """
    Check that something is a fencing token. For guards of further stores.

    Args:
        token: What the caller gave.
        name: What is guarded, for the error.

    Raises:
        ConfigurationError: It is not a whole number from 1 to `TOKEN_MAX`.
    """
    if isinstance(token, bool) or not isinstance(token, int) or not 1 <= token <= TOKEN_MAX:
        message = f"token={shown(token)} is not a fencing token: give the lease's, lease.token"
        raise ConfigurationError(message, name=name)
    return token


def stale_token(what: str, token: int, last: int, *, name: str | None = None, backend: str | None = None) -> StaleToken:
    """
    Make the error of a refusal. For guards of further stores.

    Args:
        what: What was tried, as the start of a sentence.
        token: What the caller came with.
        last: The newest token that was accepted.
        name: What is guarded.
        backend: Where, without a password.
    """
    place = "".join((f" to {name!r}" if name else "", f" at {backend}" if backend else ""))
    message = (
        f"{what}{place} was refused: a holder with token {last} has been here since this one, {token}, was granted. "
        "The lock has passed on: stop the work, and acquire again before you start anew"
    )
    return StaleToken(message, name=name, backend=backend)


def __getattr__(name: str) -> object:
    """Load the guard of a store, with its driver, on its first use (PEP 562)."""
    if name not in _LAZY:
        message = f"module 'lockkit.fencing' has no attribute {name!r}"
        raise AttributeError(message)
    import importlib  # noqa: PLC0415 - only where it is needed

    try:
        module = importlib.import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lockkit"):
            raise
        store = _LAZY[name].split(".")[2]
        message = f"lockkit.fencing.{name} needs the module {error.name!r}: pip install 'lockkit[{store}]'"
        raise ConfigurationError(message) from error
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, the lazy ones too."""
    return sorted(__all__)
