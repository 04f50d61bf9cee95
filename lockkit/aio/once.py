"""Once per key, in the async API."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from lockkit.errors import ConfigurationError
from lockkit.lease import OtherApi, SharedWithStack, as_current
from lockkit.primitives import once as core
from lockkit.primitives.once import OnceDone, OnceRunning

__all__ = ["Attempt", "Once"]

P = ParamSpec("P")
R = TypeVar("R")


class Attempt(core.BaseAttempt):
    """One attempt at the work of a key, made by ``async with client.once(…)``. See `lockkit.sync.once.Attempt`."""

    __slots__ = ()
    _api = "lockkit.aio"

    async def done(self, result: Any = None) -> None:  # noqa: ANN401 - any JSON
        """Store the result, and free the key. See `lockkit.sync.once.Attempt.done`."""
        await self._attempt.done(result)


class Once:
    """
    Work that is done once per key. Made by `Client.once`; a decorator, and an async context manager.

    May be used again, by many tasks at once. See `lockkit.sync.once.Once`.
    """

    __slots__ = ("_blocks", "_once")
    __enter__ = OtherApi()

    def __init__(self, once: core.Once) -> None:
        """Made by `Client.once`."""
        self._once = once
        self._blocks: SharedWithStack[core.Attempt] = SharedWithStack()

    async def __aenter__(self) -> Attempt:
        """Find out whether the key is done; if it is not, hold it. See `lockkit.sync.once.Once.__enter__`."""
        attempt = await self._once.begin()
        self._blocks.push(self._once.engine.runtime.current(), attempt)
        return Attempt(attempt)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the key. See `lockkit.sync.once.Once.__exit__`."""
        await self._blocks.pop(self._once.engine.runtime.current).leave(error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """
        Decorate a coroutine function: the first call with a key runs it, the others return its stored result.

        Raises:
            ConfigurationError: Not a coroutine function, or a field that is no parameter of the function.
                From a call: the result cannot be stored; the key is done, without a result.
        """
        call = core.Call(self._once, function)
        template, key = call.template, self._once.key
        if not template.is_coroutine and not template.wraps_coroutine:
            message = (
                f"once {key!r} of an asyncio client cannot decorate {template.label!r}, which is not a coroutine "
                "function: make it `async def`, or use a client of lockkit.connect()"
            )
            raise ConfigurationError(message, name=key, backend=self._once.engine.url)

        @functools.wraps(function)
        async def run_once(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - what the function returns
            async with Once(call.named(arguments, keywords)) as attempt:
                if attempt.first:
                    with as_current(attempt._attempt.lease):
                        result = function(*arguments, **keywords)
                        value = await result if inspect.isawaitable(result) else result
                    await attempt.done(template.finished(value, awaited=True))
            return attempt.result

        # The wrapper is a coroutine function, as the function is: for callers, its type is unchanged.
        return run_once  # type: ignore[return-value]

    async def state(self) -> OnceRunning | OnceDone | None:
        """Look at the key, without running anything. See `lockkit.sync.once.Once.state`."""
        return await self._once.state()

    async def forget(self) -> bool:
        """Forget that the key is done. See `lockkit.sync.once.Once.forget`."""
        return await self._once.forget()

    def __repr__(self) -> str:
        """Show key and backend."""
        return f"<lockkit.aio.Once {self._once.key!r} at {self._once.engine.url}>"
