"""Once per key, in the sync API."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from lockkit.lease import OtherApi, SharedWithStack, as_current
from lockkit.primitives import once as core
from lockkit.primitives.once import OnceDone, OnceRunning
from lockkit.runtime import drive

__all__ = ["Attempt", "Once"]

P = ParamSpec("P")
R = TypeVar("R")


class Attempt(core.BaseAttempt):
    """One attempt at the work of a key, made by ``with client.once(…)``."""

    __slots__ = ()
    _api = "lockkit"

    def done(self, result: Any = None) -> None:  # noqa: ANN401 - any JSON
        """
        Store the result, and free the key: it is done. Without this call, the next attempt does the work again.

        Args:
            result: A JSON value, at most 64 KiB as JSON text.

        Raises:
            LockLost: The lease ended before: the result is not stored, and another attempt may run.
            BackendUnavailable: The backend did not store the result for a ttl.
            ConfigurationError: The result cannot be stored; the key is done, without a result.
            LockError: The key was done before.
        """
        drive(self._attempt.done(result))


class Once:
    """
    Work that is done once per key. Made by `Client.once`; a decorator, and a context manager.

    May be used again, by many threads at once.
    """

    __slots__ = ("_blocks", "_once")
    __aenter__ = OtherApi()

    def __init__(self, once: core.Once) -> None:
        """Made by `Client.once`."""
        self._once = once
        self._blocks: SharedWithStack[core.Attempt] = SharedWithStack()

    def __enter__(self) -> Attempt:
        """
        Find out whether the key is done; if it is not, hold it. Waits for a run that is under way.

        Raises:
            KeyReused: The key is done, with another ``match``.
            StoredError: The key is done: its run ended with an error of ``store_errors``.
            LockTimeout: Another run was under way for the whole wait.
            BackendUnavailable: The backend did not answer.
        """
        attempt = drive(self._once.begin())
        self._blocks.push(self._once.engine.runtime.current(), attempt)
        return Attempt(attempt)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Free the key. It is done only if `Attempt.done` was called, or the error is one of ``store_errors``.

        Raises:
            LockLost: The body ended well without `Attempt.done`, after the lease was lost.
        """
        drive(self._blocks.pop(self._once.engine.runtime.current).leave(error))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """
        Decorate a function: the first call with a key runs it, the others return its stored result.

        Key and ``match`` are formatted with the call's arguments, as the name by `Lock.__call__`. For a coroutine
        function, waiting blocks its event loop: prefer `lockkit.aio` there.

        Raises:
            ConfigurationError: A generator function, or a field that is no parameter of the function.
                From a call: the result cannot be stored; the key is done, without a result.
        """
        call = core.Call(self._once, function)
        template = call.template
        if template.is_coroutine:

            @functools.wraps(function)
            async def await_once(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - as the function
                with Once(call.named(arguments, keywords)) as attempt:
                    if attempt.first:
                        with as_current(attempt._attempt.lease):
                            result = await cast("Awaitable[object]", function(*arguments, **keywords))
                        attempt.done(template.finished(result, awaited=True))
                return attempt.result

            return cast("Callable[P, R]", await_once)

        @functools.wraps(function)
        def run_once(*arguments: P.args, **keywords: P.kwargs) -> Any:  # noqa: ANN401 - what the function returns
            with Once(call.named(arguments, keywords)) as attempt:
                if attempt.first:
                    with as_current(attempt._attempt.lease):
                        result = function(*arguments, **keywords)
                    attempt.done(template.finished(result))
            return attempt.result

        return run_once

    def state(self) -> OnceRunning | OnceDone | None:
        """
        Look at the key, without running anything: None if it is neither done nor under way.

        For a decorator with a template, make one for the key: ``client.once("charge:17", keep=…).state()``.

        Raises:
            BackendUnavailable: No answer.
            LockError: The record was not written by this version of lockkit.
        """
        return drive(self._once.state())

    def forget(self) -> bool:
        """
        Forget that the key is done: the next call runs the work again.

        Returns:
            False if it was not done. A run that is under way goes on, and will have done it.

        Raises:
            BackendUnavailable: No answer.
            LockLost: The lease under which it is forgotten ended first.
        """
        return drive(self._once.forget())

    def __repr__(self) -> str:
        """Show key and backend."""
        return f"<lockkit.Once {self._once.key!r} at {self._once.engine.url}>"
