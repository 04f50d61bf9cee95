"""The client of a lock service in the sync API."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from lockkit.backend import Capabilities, Holder
from lockkit.configuration import profiles, registry
from lockkit.engine.engine import Engine, Origin
from lockkit.engine.lookup import Kind, Listing
from lockkit.engine.settings import INHERIT, LockOptions, skipping_timeout
from lockkit.lease import OtherApi
from lockkit.primitives import note
from lockkit.primitives import once as core
from lockkit.primitives.election import Candidate
from lockkit.primitives.lock_set import LockSetCore
from lockkit.primitives.note import Note
from lockkit.runtime import BlockingRuntime, drive
from lockkit.sync.election import Election, Term
from lockkit.sync.lease import Lease
from lockkit.sync.lock import Lock, SkippingLock
from lockkit.sync.lock_set import LockSet
from lockkit.sync.once import Once
from lockkit.sync.sharing import RWLock, Semaphore
from lockkit.units import Seconds

__all__ = ["Client", "connect", "from_client"]


def connect(url: str | None = None, *, profile: str | None = None, **options: Any) -> Client:
    """
    Make a client of a lock service. No I/O: the first call that needs the backend connects.

    Args:
        url: Which backend, for example ``redis://localhost:6379/0``, ``file:///var/lock/app`` or ``memory://``.
            None: the profile, ``LOCKKIT_URL``, the profile named by ``LOCKKIT_ENV``, the profile ``default``; without
            any configuration files of this user, which lock out only this user's processes on this machine.
        profile: A profile of ``lockkit.toml`` or of ``[tool.lockkit]`` in ``pyproject.toml``.
        **options: ``ttl`` and ``timeout`` (defaults of the client's locks, seconds), ``unavailable_after`` (seconds
            without one answer after which a wait without timeout gives up), ``scope`` (``"network"``, ``"machine"`` or
            ``"process"``: refuse a backend that locks out fewer) and the backend's options, which the URL's query may
            have too. Options given here override the query.

    Raises:
        ConfigurationError: The URL, the profile or an option is wrong; or the program runs on eventlet.
    """
    settings = profiles.resolve(url, profile, options)
    client = open_client(settings)
    client._engine.origin = Origin(connect, url, profile, options, settings.shows_secret(url, options))  # noqa: SLF001 - as `Client`
    return client


def open_client(settings: profiles.Settings) -> Client:
    """Make the client that `connect` makes of these settings."""
    open_backend = functools.partial(registry.open_backend, settings.url, settings.options, source=settings.elsewhere)
    return Client(Engine(open_backend, BlockingRuntime(), Lease))


def from_client(client: object, **options: Any) -> Client:
    """
    Make a client on a connection of the application, which ``close()`` leaves open.

    Args:
        client: For example a ``redis.Redis``; the message of the error lists what is accepted.
        **options: As for `connect`, but none of the driver, which has made the object.

    Raises:
        ConfigurationError: No backend knows this kind of object, or an option is wrong.
    """
    return Client(Engine(functools.partial(registry.adopt, client, options), BlockingRuntime(), Lease))


class Client:
    """
    A connection to a lock service, made by `connect` or `from_client`. Safe to use from many threads.

    Used as a context manager it is closed at the end.
    """

    __slots__ = ("__weakref__", "_engine")
    __aenter__ = OtherApi()

    def __init__(self, engine: Engine[Lease]) -> None:
        """Made by `connect` and `from_client`."""
        self._engine = engine

    @property
    def capabilities(self) -> Capabilities:
        """What the backend promises."""
        return self._engine.capabilities

    @property
    def url(self) -> str:
        """Where the backend is, without its password."""
        return self._engine.url

    @overload
    def lock(self, name: str, *, on_busy: Literal["skip"], **options: Unpack[LockOptions]) -> SkippingLock: ...

    @overload
    def lock(self, name: str, *, on_busy: Literal["raise"] = "raise", **options: Unpack[LockOptions]) -> Lock: ...

    def lock(self, name: str, *, on_busy: Literal["raise", "skip"] = "raise", **options: Unpack[LockOptions]) -> Lock:
        """
        Describe a lock. Nothing is sent yet.

        Args:
            name: 1 to 255 UTF-8 bytes without NUL. Names that differ in any byte are different locks.
            on_busy: What the decorator does when the lock stays busy: ``"raise"`` raises `LockTimeout`, ``"skip"``
                returns None without running the function (then ``timeout`` is 0 by default). A ``with`` block cannot
                be skipped and raises: see `Lock.attempt`.
            **options: See `LockOptions`.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        if on_busy != "raise":
            options["timeout"] = skipping_timeout(on_busy, options.get("timeout", INHERIT), name, self._engine.url)
        settings = self._engine.settings(name, Client.lock, **options)
        settings.skips = on_busy != "raise"
        return (SkippingLock if settings.skips else Lock)(self._engine, settings)

    def rwlock(self, name: str, **options: Unpack[LockOptions]) -> RWLock:
        """
        Describe a read/write lock. Nothing is sent yet.

        Args:
            name: As for `lock`, whose locks of the same name are the write side.
            **options: See `LockOptions`. With ``reentrant``, the thread that holds the write side gets its lease again
                for writing too.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        return RWLock(self._engine, self._engine.settings(name, Client.rwlock, True, **options))  # noqa: FBT003 - nests

    def semaphore(self, name: str, limit: int, **options: Unpack[LockOptions]) -> Semaphore:
        """
        Describe a semaphore. Nothing is sent yet.

        Args:
            name: As for `lock`; where the backend has a lock for each slot, at most 240 bytes.
            limit: How many permits may be held at the same time, 1 to 1,000. Clients may give different ones.
            **options: See `LockOptions`. With ``reentrant``, the thread that holds a permit gets it again, counted.

        Raises:
            ConfigurationError: One of them is wrong.
            Unsupported: The backend has no semaphores.
            LockError: The client is closed.
        """
        settings = self._engine.settings(name, Client.semaphore, **options)
        return Semaphore(self._engine, self._engine.permit_settings(settings, limit))

    def locks(self, names: Iterable[str], **options: Unpack[LockOptions]) -> LockSet:
        """
        Describe several locks that are held together or not at all. Nothing is sent yet. See `LockSet`.

        Args:
            names: At least 1, at most 100 names; a name that is there twice counts once. Their order does not matter.
            **options: See `LockOptions`; of each lock. But ``timeout`` counts for all of them together (0 tries each
                once), and ``on_lost`` is called once, with the first lease that is lost.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        return LockSet(LockSetCore.of_names(self._engine, names, Client.locks, options))

    def election(
        self,
        name: str,
        *,
        ttl: Seconds | timedelta | None = None,
        grace: Seconds | timedelta | None = None,
        stall: Seconds | timedelta | None = None,
        value: object = None,
        label: str | None = None,
    ) -> Election:
        """
        Describe an election of one leader. Nothing is sent yet.

        Args:
            name: As for `lock`: an election is a lock, of the same name space.
            ttl: Seconds after which another candidate can lead if the leader dies. None: the client's default.
            grace: Seconds that the leader needs to stop; ``term.must_stop()`` is True so long before the deadline.
                Below half of the ttl. None: a third of it.
            stall: Seconds without ``term.must_stop()`` or ``term.beat()`` after which the leader must stop and its term
                is not renewed, so that a leader that is stuck is replaced. None: never.
            value: Text, or any JSON value, that `Election.leader` shows to others, such as an address. Never a secret.
            label: As for `lock`.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        return Election(
            Candidate(self._engine, name, Term, ttl=ttl, grace=grace, stall=stall, value=value, label=label)
        )

    def once(
        self,
        key: str,
        *,
        keep: float | timedelta,
        ttl: Seconds | timedelta | None = None,
        timeout: Seconds | timedelta | None = None,
        stall: Seconds | timedelta | None = None,
        match: str | None = None,
        store_errors: tuple[type[BaseException], ...] | type[BaseException] = (),
        label: str | None = None,
    ) -> Once:
        """
        Describe work that is done once per key. Nothing is sent yet. A decorator, and a context manager.

        While one run is under way, others wait for it; when it is done, they get its stored result. A crash before that
        runs the work again.

        Args:
            key: Identifies the work; the rules of lock names apply. For a decorator, a template.
            keep: Seconds for which the result is kept, counted from completion by the server's clock.
            ttl: Seconds after which a crashed run counts as ended. None: the client's default.
            timeout: Seconds to wait for a run that is under way; None without limit, 0 raises `LockTimeout` at once.
            stall: Seconds without ``attempt.beat()`` after which the run's lease is not renewed until the next beat, so
                that another attempt replaces one that is stuck. None: never.
            match: Text that must be the same for each repeat of a key, else `KeyReused`; None allows anything. For a
                decorator, a template.
            store_errors: Classes of the errors that count as done: repeats raise `StoredError`. After any other error
                the next attempt runs again.
            label: As for `lock`.

        Raises:
            ConfigurationError: One of them is wrong.
            Unsupported: The backend keeps no notes on locks.
            LockError: The client is closed.
        """
        described = core.Once.described(
            self._engine,
            key,
            keep=keep,
            ttl=ttl,
            timeout=timeout,
            stall=stall,
            match=match,
            store_errors=store_errors,
            label=label,
        )
        return Once(described)

    def take(self, ticket: str, **options: Unpack[LockOptions]) -> Lease:
        """
        Take the lock that another client has handed over with `Lease.ticket`: the lease that goes on.

        The server gives it to one taker, with a larger token, so that guarded storage refuses what the giver still
        sends.

        Args:
            ticket: The text of ``ticket()``.
            **options: See `LockOptions`. There is no ``timeout``: a ticket is taken at once or not at all.

        Raises:
            LockLost: Taken already, nobody took it in time, or the lock was broken. Nothing was changed.
            ConfigurationError: The text is no ticket, or an option is wrong.
            BackendUnavailable: No answer for `unavailable_after` seconds, or the ttl if that is shorter.
            Unsupported: As for `Lease.ticket`. Nothing was sent.
        """
        return drive(self._engine.take(ticket, Client.take, options))

    def holders(self, name: str) -> list[Holder]:
        """
        Ask the backend who holds a lock now; an empty list if it is free.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return drive(self._engine.holders(name))

    def names(self, prefix: str = "", kind: Kind = "lock") -> Iterator[str]:
        """
        List what is held now, or waited for: the names, each once, in no particular order.

        The iterator asks the backend for about a thousand names at a time and only as you read on, so that a million
        locks need neither the memory nor the time of a single answer. So the list is not a snapshot: a lock that is
        released, expires or is acquired meanwhile may be listed or not. `holders` says who holds one of them.

        Args:
            prefix: Only names that begin with it; no character in it is a wildcard.
            kind: ``"lock"`` (also elections and read/write locks), ``"semaphore"``, or ``"once"``: keys of which a run
                is under way, see `Once.state`. With a third-party backend that lists only locks, the others have none.

        Raises:
            ConfigurationError: The prefix is no str, has NUL, or more than 255 UTF-8 bytes; or the kind is unknown.
            BackendUnavailable: From the iterator: the backend cannot be asked.
            Unsupported: From the iterator: the backend cannot tell (`Capabilities.listing`).
        """
        return _read(self._engine.names(prefix, kind))

    def read_note(self, name: str) -> Note | None:
        """
        Read the value that a holder of a lock has left with it (`Lease.write_note`), whether it is held or free.

        Raises:
            Unsupported: The backend keeps no notes (``capabilities.notes``). Nothing was sent.
            BackendUnavailable: It cannot be asked.
            LockError: Something else than `Lease.write_note` has written the note.
        """
        return drive(note.read(self._engine, name))

    def break_lock(self, name: str, *, force: bool = False) -> bool:
        """
        Free a lock by force. The holder notices at its next renewal; the next token is higher than the holder's.

        Args:
            name: The lock.
            force: Also if lockkit cannot prove that it is a lock and no data of an application, which is deleted then:
                with an empty ``prefix=``, a Redis key without an expiry and without a record of lockkit's; a key of
                etcd that no client of locks has made.

        Returns:
            False if it was free.

        Raises:
            LockError: It may be data of an application, see `force`. Nothing was deleted.
            BackendUnavailable: No answer.
            Unsupported: The backend lacks the rights; the message says which.
        """
        return drive(self._engine.break_lock(name, force=force))

    def ping(self) -> None:
        """
        Ask the backend for any answer.

        Raises:
            BackendUnavailable: There was none.
            ConfigurationError: It refuses the credentials.
        """
        drive(self._engine.ping())

    def close(self) -> None:
        """Release what is held, end the waits of other threads with a `LockError`, disconnect. May be called twice."""
        drive(self._engine.close())

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Show the backend."""
        return f"<lockkit.Client {self._engine.url}>"


def _read(listing: Listing) -> Iterator[str]:
    while (page := drive(listing.page())) is not None:
        yield from page
