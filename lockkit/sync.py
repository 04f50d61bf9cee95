"""The sync API: threads wait inside the call. Thin: every decision is made by the engine."""

from __future__ import annotations

import functools
import inspect
import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from lockkit import validation
from lockkit.configuration import profiles, registry
from lockkit.configuration.name_template import NameTemplate
from lockkit.engine.engine import Engine
from lockkit.lease import INHERIT, BaseLease, Inherit, WithStack
from lockkit.runtime import BlockingRuntime, drive

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from datetime import timedelta
    from types import TracebackType
    from typing import Self

    from lockkit.backend import Capabilities, Holder
    from lockkit.engine.settings import LockSettings, LostCallback

__all__ = ["Client", "Lease", "Lock", "ThreadingLock", "connect", "from_client"]

P = ParamSpec("P")
R = TypeVar("R")


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


class Lease(BaseLease):
    """
    One grant of a lock to one holder, for a limited time.

    May be handed to another thread and released there. Leaving it as a context manager releases it.
    """

    __slots__ = ()

    def confirm(self) -> bool:
        """
        Ask the backend whether this lease still holds the lock. A "no" marks it as lost.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return drive(self._engine.confirm(self._record))

    def extend(self, ttl: float | timedelta | None = None) -> None:
        """
        Set the time left to `ttl`; never adds to it.

        Args:
            ttl: Seconds; None means the lease's ttl. Renewal goes on with it.

        Raises:
            LockLost: The lease is not held.
            BackendUnavailable: No answer; the lease may still be held, see ``remaining()``.
            ConfigurationError: The ttl is wrong.
        """
        drive(self._engine.extend(self._record, ttl))

    def release(self) -> None:
        """
        Give the lock back. Releasing twice is no error.

        Raises:
            LockLost: The lease was lost before: the work since then was not protected.
            BackendUnavailable: No answer. Renewal has stopped; call again, or leave it to the ttl.
        """
        drive(self._engine.releases.release(self._record))

    def wait_lost(self, timeout: float | timedelta | None = None) -> bool:
        """
        Wait until the lease is lost.

        Args:
            timeout: Seconds at most; None without limit.

        Returns:
            True when lost; False when it was released, or the time is over.
        """
        return drive(self._engine.leases.wait_lost(self._record, timeout))

    def __enter__(self) -> Self:
        """Return itself: it is held already."""
        self._record.body = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, as leaving ``with lock`` does."""
        drive(self._engine.releases.leave(self._record, error))


class Lock:
    """
    A named lock of a client. Holds nothing itself: every acquisition is a `Lease` of its own.

    May be used again, by many threads at once, as a context manager, and as a decorator.
    """

    __slots__ = ("_blocks", "_engine", "_settings")

    def __init__(self, engine: Engine[Lease], settings: LockSettings) -> None:
        """Made by `Client.lock`."""
        self._engine = engine
        self._settings = settings
        self._blocks: WithStack[Lease] = WithStack()

    @property
    def name(self) -> str:
        """Name of the lock."""
        return self._settings.name

    def acquire(self, timeout: float | timedelta | Inherit | None = INHERIT) -> Lease:
        """
        Wait for the lock. In a thread that runs an event loop the wait blocks that loop: prefer `lockkit.aio` there.

        Args:
            timeout: Seconds to wait: None without limit, 0 tries once. By default the lock's.

        Raises:
            LockError: The wait would never end: it would block the event loop of the task that holds the lock.
            LockTimeout: It was busy for the whole wait.
            BackendUnavailable: The backend did not answer to the end of the wait (without timeout: for
                ``unavailable_after`` seconds).
            ConfigurationError: The timeout is wrong, or the server refuses the credentials.
        """
        seconds = self._settings.timeout if isinstance(timeout, Inherit) else self._seconds(timeout)
        return drive(self._engine.acquire(self._settings, seconds))

    def try_acquire(self, timeout: float | timedelta | None = 0) -> Lease | None:
        """
        Wait for the lock, and return None if it stayed busy.

        Args:
            timeout: Seconds to wait; 0 tries once.

        Raises:
            BackendUnavailable: The backend did not answer.
            ConfigurationError: The timeout is wrong, or the server refuses the credentials.
        """
        return drive(self._engine.try_acquire(self._settings, self._seconds(timeout)))

    def locked(self) -> bool:
        """
        Ask the backend whether any client holds the lock.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return bool(drive(self._engine.holders(self._settings.name)))

    def as_threading_lock(self) -> ThreadingLock:
        """Return an adapter with the signatures of ``threading.Lock``, for code that takes one."""
        return ThreadingLock(self)

    def __enter__(self) -> Lease:
        """Acquire; the body never runs without the lock."""
        lease = drive(self._engine.acquire(self._settings, self._settings.timeout))
        lease.__enter__()
        self._blocks.push(threading.get_ident(), lease)
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Release.

        Raises:
            LockLost: The body ended well, but the lease was lost before (unless ``raise_on_lost=False``).
        """
        lease = self._blocks.pop(threading.get_ident())
        drive(self._engine.releases.leave(lease._record, error))  # noqa: SLF001 - the lock and its lease are one unit

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """
        Decorate a function: each call holds the lock.

        The name is formatted with the call's arguments: ``@client.lock("stock:{product_id}")``.
        A coroutine function holds the lock until its coroutine ends, but waits for it by blocking its event loop:
        prefer `lockkit.aio` there. A plain wrapper (`functools.wraps`) around a coroutine function acquires the lock
        when it is called, and holds it until the coroutine that it returns ends.

        Raises:
            ConfigurationError: A generator function, or a field that is no parameter of the function.
                From a call: the function returned an awaitable or a generator, which would run without the lock.
        """
        template = NameTemplate(self._settings.name, function, backend=self._engine.url)
        if template.is_coroutine:

            @functools.wraps(function)
            async def hold_until_done(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - what the function returns
                with self._named(template.name(arguments, keywords)).acquire():
                    result = await cast("Awaitable[object]", function(*arguments, **keywords))
                    return template.finished(result, awaited=True)

            return cast("Callable[P, R]", hold_until_done)

        if template.wraps_coroutine:

            @functools.wraps(function)
            def hold_until_result_is_done(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - as above
                with ExitStack() as block:
                    block.enter_context(self._named(template.name(arguments, keywords)).acquire())
                    result = function(*arguments, **keywords)
                    if not inspect.iscoroutine(result):
                        return template.finished(result)
                    return _finish(block.pop_all(), result, template)

            return hold_until_result_is_done

        @functools.wraps(function)
        def hold(*arguments: P.args, **keywords: P.kwargs) -> R:
            with self._named(template.name(arguments, keywords)):
                return template.finished(function(*arguments, **keywords))

        return hold

    def _seconds(self, timeout: float | timedelta | None) -> float | None:
        return validation.timeout(timeout, name=self._settings.name, backend=self._engine.url)

    def _named(self, name: str) -> Lock:
        return Lock(self._engine, replace(self._settings, name=validation.lock_name(name)))

    def __repr__(self) -> str:
        """Show name and backend."""
        return f"<lockkit.Lock {self._settings.name!r} at {self._engine.url}>"


async def _finish(block: ExitStack, coroutine: Coroutine[Any, Any, object], template: NameTemplate) -> object:
    """Run a coroutine in a block that was entered when the coroutine was made."""
    with block:
        return template.finished(await coroutine, awaited=True)


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


class ThreadingLock:
    """
    A lock with the signatures and rules of ``threading.Lock``, for libraries that take one.

    As there, any thread may release, and there is one holder at a time per object. Unlike a
    ``threading.Lock`` it can be lost: while A is inside, its lease may end and B enter through the same object. So each
    acquisition is kept with its thread, and a release ends the acquisition that it belongs to:

    - leaving ``with`` ends that of its ``with``;
    - ``release()`` ends the last one of its own thread; in a thread that has none, the oldest of all.
    """

    __slots__ = ("__weakref__", "_acquired", "_blocks", "_lock")

    def __init__(self, lock: Lock) -> None:
        """Made by `Lock.as_threading_lock`."""
        self._lock = lock
        # Its methods are atomic. A mutex might stay taken when Ctrl-C strikes.
        self._acquired: list[tuple[int, Lease]] = []
        self._blocks: WithStack[tuple[int, Lease]] = WithStack()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - threading.Lock's
        """
        Acquire as ``threading.Lock.acquire`` does.

        Args:
            blocking: Wait. False tries once.
            timeout: Seconds to wait; -1 without limit.

        Raises:
            ValueError: A timeout without blocking, or a negative one other than -1.
            OverflowError: A timeout above ``threading.TIMEOUT_MAX``.
            BackendUnavailable: The backend did not answer.
        """
        if not blocking and timeout != -1:
            message = "can't specify a timeout for a non-blocking call"
            raise ValueError(message)
        if timeout > threading.TIMEOUT_MAX:
            message = "timeout value is too large"
            raise OverflowError(message)
        seconds = 0.0 if not blocking else None if timeout == -1 else timeout
        lease = self._lock.try_acquire(seconds)
        if lease is None:
            return False
        self._acquired.append((threading.get_ident(), lease))
        return True

    def release(self) -> None:
        """
        Release, from any thread.

        Raises:
            RuntimeError: This object does not hold the lock.
            LockLost: It was lost before.
        """
        me = threading.get_ident()
        while acquired := self._acquired.copy():
            mine = [entry for entry in acquired if entry[0] == me]
            entry = mine[-1] if mine else acquired[0]
            if self._forget(entry):
                entry[1].release()
                return
        message = "release unlocked lock"
        raise RuntimeError(message)

    def _forget(self, entry: tuple[int, Lease]) -> bool:
        """End an acquisition; False if another thread has just done it."""
        try:
            self._acquired.remove(entry)
        except ValueError:
            return False
        return True

    def locked(self) -> bool:
        """Ask the backend whether any client holds the lock."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        """Acquire without limit."""
        lease = self._lock.acquire(None)
        entry = (threading.get_ident(), lease)
        self._acquired.append(entry)
        self._blocks.push(entry[0], entry)
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release; an exception of the body is not hidden."""
        entry = self._blocks.pop(threading.get_ident())
        if self._forget(entry):
            entry[1].__exit__(kind, error, trace)

    def __repr__(self) -> str:
        """Show name and backend, and whether this object holds the lock (it does not ask for other holders)."""
        state = "locked" if self._acquired else "unlocked"
        return f"<{state} lockkit.ThreadingLock object {self._lock.name!r} at {self._lock._engine.url}>"  # noqa: SLF001 - of the same API
