"""A lock as the database knows it, what the database has granted, and a client's claim on a lock."""

from __future__ import annotations

from typing import NamedTuple

from lockkit.backends.sql_session.session import Session


class Key(NamedTuple):
    """
    A lock as the database knows it.

    Attributes:
        name: As the tables have it.
        number: 64 bits of a hash, signed, for PostgreSQL's advisory locks.
        text: The same for MariaDB and MySQL: more bits of it, in hexadecimal digits.
        shared: The read side of the lock is meant.
    """

    name: str
    number: int
    text: str
    shared: bool = False


class Taken(NamedTuple):
    """
    What the database has granted.

    Attributes:
        identity: The holder's, for `lockkit.backends.sql_session.locking.Locking.write_lease`.
        token: The lease's, if it was written in the same statement; None: it is to be written; 0: it was written, and
            the server did not say under which token.
    """

    identity: int
    token: int | None = None


class Claim:
    """
    One client's claim on a lock: it waits in the database's queue, and then holds the lock.

    Attributes:
        session: The session that waits or holds; None: there is none (any more).
        queued: The statement that waits was sent, and its answer was not read.
        sent: A session was asked for the lock, this one or one that has ended since.
        ask_at: When to ask the server whether the session still waits, client monotonic clock.
        check_at: When to check whether it blocks other work in the database, client monotonic clock.
    """

    __slots__ = ("_key", "ask_at", "check_at", "queued", "sent", "session")

    def __init__(self) -> None:
        """Have no session yet."""
        self._key: Key | None = None
        self.session: Session | None = None
        self.queued = self.sent = False
        self.ask_at = self.check_at = 0.0

    @property
    def has_key(self) -> bool:
        """Whether the lock's key is known, and so a session may have locked it."""
        return self._key is not None

    @property
    def key(self) -> Key:
        """The lock's key; known once a session was told to lock it."""
        assert self._key is not None
        return self._key

    @key.setter
    def key(self, key: Key) -> None:
        self._key = key
