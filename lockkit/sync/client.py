"""The client of a lock service in the sync API."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from lockkit.configuration import profiles, registry
from lockkit.engine.engine import Engine
from lockkit.primitives import once as core
from lockkit.runtime import BlockingRuntime, drive
from lockkit.sync.lease import Lease
from lockkit.sync.lock import Lock
from lockkit.sync.once import Once

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta
    from types import TracebackType
    from typing import Self

    from lockkit.backend import Capabilities, Holder
    from lockkit.engine.settings import LostCallback

__all__ = ["Client", "connect", "from_client"]


def connect(url: str | None = None, *, profile: str | None = None, **options: Any) -> Client:
    """
    Make a client of a lock service. No I/O: the first call that needs the backend connects.

    Args:
        url: Which backend, for example ``redis://localhost:6379/0``, ``file:///var/lock/app`` or ``memory://``.
            None: the profile, ``LOCKKIT_URL``, the profile named by ``LOCKKIT_ENV``, else files of this user's machine.
        profile: A profile of ``lockkit.toml`` or of ``[tool.lockkit]`` in ``pyproject.toml``.
        **options: ``ttl`` (default of the client's locks, seconds), ``unavailable_after`` (seconds without one answer
            after which a wait without timeout gives up) and the backend's options, which the URL's query may have
            too. What is given here wins.

    Raises:
        ConfigurationError: The URL, the profile or an option is wrong.
    """
    settings = profiles.resolve(url, profile, options)
    return Client(
        Engine(functools.partial(registry.open_backend, settings.url, settings.options), BlockingRuntime(), Lease)
    )


def from_client(client: object, **options: Any) -> Client:
    """
    Make a client on a connection of the application, which ``close()`` leaves open.

    Args:
        client: For example a ``redis.Redis``; the message of the error lists what is accepted.
        **options: As for `connect`.

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

    def lock(
        self,
        name: str,
        *,
        ttl: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
        renew: bool = True,
        reentrant: bool = False,
        max_hold: float | timedelta | None = None,
        metadata: str | Mapping[str, object] | None = None,
        on_lost: LostCallback | None = None,
        raise_on_lost: bool = True,
    ) -> Lock:
        """
        Describe a lock. Nothing is sent yet.

        Args:
            name: 1 to 255 UTF-8 bytes without NUL. Names that differ in any byte are different locks.
            ttl: Seconds after which the backend frees the lock unless it is renewed: how long others wait for a crashed
                holder. None: the client's default (30 s unless configured).
            timeout: Seconds that the caller waits; None without limit, 0 tries once.
            renew: Extend the ttl in the background while held. With False the lease ends at its ttl.
            reentrant: The thread that holds the lock through this client gets the same lease again, counted. In a
                thread that runs an event loop: the task that holds it.
            max_hold: Seconds after which renewal ends, so that a stuck holder loses the lock.
            metadata: Text or a mapping of JSON values, shown by `holders`. Never a secret.
            on_lost: Called once with ``(lease, reason)`` if the lease is lost, from a thread of its own.
            raise_on_lost: Leaving ``with`` after a loss raises `LockLost`; False only logs it.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        settings = self._engine.settings(
            name,
            ttl=ttl,
            timeout=timeout,
            renew=renew,
            reentrant=reentrant,
            max_hold=max_hold,
            metadata=metadata,
            on_lost=on_lost,
            raise_on_lost=raise_on_lost,
        )
        return Lock(self._engine, settings)

    def once(
        self,
        key: str,
        *,
        keep: float | timedelta,
        ttl: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
        match: str | None = None,
        store_errors: tuple[type[BaseException], ...] | type[BaseException] = (),
    ) -> Once:
        """
        Describe work that is done once per key. Nothing is sent yet. A decorator, and a context manager.

        While one run is under way, others wait for it; when it is done, they get its stored result. A crash before that
        runs the work again.

        Args:
            key: What stands for the work, by the rules of lock names. For a decorator, the template of it.
            keep: Seconds for which the result is kept, counted from completion by the server's clock.
            ttl: Seconds after which a crashed run counts as ended. None: the client's default.
            timeout: Seconds to wait for a run that is under way; None without limit, 0 raises `LockTimeout` at once.
            match: What must be the same at each repeat of a key, else `KeyReused`; None for anything. For a decorator,
                the template of it.
            store_errors: Classes of the errors that count as done: repeats raise `StoredError`. After any other error
                the next attempt runs again.

        Raises:
            ConfigurationError: One of them is wrong.
            Unsupported: The backend keeps no notes on locks.
            LockError: The client is closed.
        """
        described = core.Once.described(
            self._engine, key, keep=keep, ttl=ttl, timeout=timeout, match=match, store_errors=store_errors
        )
        return Once(described)

    def holders(self, name: str) -> list[Holder]:
        """
        Ask the backend who holds a lock now; an empty list if it is free.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return drive(self._engine.holders(name))

    def break_lock(self, name: str) -> bool:
        """
        Free a lock by force. The holder notices at its next renewal; the next token is higher than the holder's.

        Returns:
            False if it was free.

        Raises:
            BackendUnavailable: No answer.
            Unsupported: The backend lacks the rights; the message says which.
        """
        return drive(self._engine.break_lock(name))

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
