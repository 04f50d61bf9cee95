"""
Guards: storage that refuses writes of stale holders.

A lease alone does not stop a paused holder: it may wake up after another client has taken over its lock, and write.
Each grant carries a token that is higher than all before it. Storage that remembers the newest token it has seen can
refuse an older one, in the same atomic step as the write.

====================  =======================================================
`TokenGuard`          for data in this process
`RedisGuard`          for data in Redis, blocking
`AsyncRedisGuard`     for data in Redis, with asyncio
`EtcdGuard`           for data in the etcd that has the lock, blocking
`AsyncEtcdGuard`      for data in the etcd that has the lock, with asyncio
`SqlGuard`            for data in a SQL database, blocking
`AsyncSqlGuard`       for data in a SQL database, with asyncio
`fenced`              the condition alone, for a statement of SQLAlchemy
`FenceMixin`          the column for it, for mapped classes
====================  =======================================================

All accept a token that is not older than the newest one, so a holder may write as often as it likes, and raise
`lockkit.StaleToken` for an older one. A store's guard, and its driver, are loaded when you first use that name.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockkit.errors import LockError
from lockkit.storage import load
from lockkit.storage.tokens import TOKEN_MAX, check_token, stale_token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockkit.storage.etcd import AsyncEtcdGuard, EtcdGuard
    from lockkit.storage.redis import AsyncRedisGuard, RedisGuard
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

_MODULES = {
    "AsyncEtcdGuard": "etcd",
    "EtcdGuard": "etcd",
    "AsyncRedisGuard": "redis",
    "RedisGuard": "redis",
    "AsyncSqlGuard": "sql.guard",
    "FenceMixin": "sql.guard",
    "SqlGuard": "sql.guard",
    "fenced": "sql.guard",
}


class TokenGuard:
    """
    Guards data in this process. For threads and for tasks.

    ::

        guard = TokenGuard("seat:12A")
        with guard.writing(lease.token):
            seats["12A"] = customer

    It knows only the tokens that it has seen itself. For data that other processes write too, use a guard in the store
    that has the data.
    """

    def __init__(self, name: str | None = None) -> None:
        """
        Make a guard that has seen no token.

        Args:
            name: What is guarded, for messages.
        """
        self._name = name
        # Two marks: with one, reader 7 would shut out reader 6, which holds the lock beside it.
        self._write_mark: int | None = None
        self._read_mark: int | None = None
        self._mutex = threading.Lock()
        self._writer: int | None = None  # the thread that is inside `writing`

    @property
    def last(self) -> int | None:
        """The newest token that was accepted, None if there was none. No I/O."""
        return max((mark for mark in (self._write_mark, self._read_mark) if mark is not None), default=None)

    def accept(self, token: int, *, shared: bool = False) -> None:
        """
        Accept a token, and no older one from now on.

        Another thread can bring a newer token between this call and your write: use `writing` for writes.

        Readers hold a read/write lock together, so a reader's token shuts out older writers, not older readers.

        Args:
            token: The token of the lease under which you work.
            shared: It is a reader's: ``lease.mode == "shared"``.

        Raises:
            StaleToken: A newer one was accepted before.
            ConfigurationError: It is not a token.
            LockError: The body of `writing` calls this.
        """
        check_token(token, name=self._name)
        self._check_not_writing()
        with self._mutex:
            self._accept(token, shared=shared)

    @contextmanager
    def writing(self, token: int) -> Iterator[None]:
        """
        Accept a token, and keep other threads out until the body has ended.

        Args:
            token: The token of the lease under which you work. The body should only write, because others wait; it must
                not ``await``.

        Raises:
            StaleToken: A newer one was accepted before; the body is not run.
            ConfigurationError: It is not a token.
            LockError: The body of another `writing` calls this, or another task of this event loop while that body
                awaits: it would wait for itself.
        """
        check_token(token, name=self._name)
        self._check_not_writing()
        with self._mutex:
            self._accept(token)
            self._writer = threading.get_ident()
            try:
                yield
            finally:
                self._writer = None

    def _check_not_writing(self) -> None:
        """Refuse what would wait for this thread itself, without end."""
        if self._writer == threading.get_ident():
            what = "this guard" if self._name is None else f"the guard of {self._name!r}"
            message = (
                f"this thread is inside writing() of {what} already: its body should only write, and must not await"
            )
            raise LockError(message, name=self._name)

    def _accept(self, token: int, *, shared: bool = False) -> None:
        write_mark, read_mark = self._write_mark, self._read_mark
        if write_mark is not None and token < write_mark:
            raise stale_token("the read" if shared else "the write", token, write_mark, name=self._name)
        if shared:
            self._read_mark = token if read_mark is None else max(read_mark, token)
            return
        if read_mark is not None and token <= read_mark:
            # With the same token: the lease was downgraded, and reads only.
            raise stale_token("the write", token, read_mark, name=self._name)
        self._write_mark = token


def __getattr__(name: str) -> object:
    """Load the guard of a store, with its driver, on its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'lockkit.fencing' has no attribute {name!r}")
    value: object = getattr(load(_MODULES[name], f"lockkit.fencing.{name}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, also those that are not loaded yet."""
    return sorted(__all__)
