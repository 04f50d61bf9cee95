"""
Calls to several nodes, so that one that hangs does not delay the others.

Each call runs in the background, in a thread or a task. A blocking call cannot be abandoned, only its thread can.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Runtime, Work

log = logging.getLogger("lockkit")

T = TypeVar("T")

Ask: TypeAlias = "tuple[str, Callable[[], Awaitable[T]]]"
"""The node's address, and what calls it."""

HEDGE_SECONDS = 0.1
"""Seconds until the next node is asked as well. Longer delays finding the servers while one hangs; shorter asks a
second one although the first is only slow."""


async def ask_all(runtime: Runtime, asks: Sequence[Ask[T]], until: float) -> list[T | LockError]:
    """Make several calls at the same time."""
    answers: list[T | LockError] = [*_unanswered(asks)]
    if len(asks) == 1:
        await _note(answers, 0, asks[0])
        return answers
    ended = [runtime.event() for _ in asks]

    async def run(index: int) -> None:
        try:
            await _note(answers, index, asks[index])
        finally:
            ended[index].set()

    for index in range(len(asks)):
        await _begin(runtime, partial(run, index))
    for event in ended:
        await event.wait(max(0.0, until - runtime.now()))
    return list(answers)  # a late answer must not change it


async def ask_first(runtime: Runtime, asks: Sequence[Ask[T]], until: float) -> T | list[LockError]:
    """Make one call after the other, the next one when the last has failed or is slow, until one has an answer."""
    unanswered = _unanswered(asks)
    answers: list[T | LockError] = [*unanswered]
    news = runtime.event()

    async def run(index: int) -> None:
        try:
            await _note(answers, index, asks[index])
        finally:
            news.set()

    for count, _ in enumerate(asks, start=1):
        await _begin(runtime, partial(run, count - 1))
        last = count == len(asks)
        while (left := until - runtime.now()) > 0:
            ended = await news.wait(left if last else min(HEDGE_SECONDS, left))
            news.clear()
            for answer in answers:
                if not isinstance(answer, LockError):
                    return answer
            if not ended or all(answers[index] is not unanswered[index] for index in range(count)):
                break
    return [answer for answer in answers if isinstance(answer, LockError)]


def raise_configuration(failures: Sequence[LockError]) -> None:
    """Raise an error that retrying cannot fix, if there is one among the failures."""
    for failure in failures:
        if isinstance(failure, ConfigurationError):
            raise failure


def _unanswered(asks: Sequence[Ask[T]]) -> list[LockError]:
    """Return for each call the error to raise when the wait is over before its own."""
    advice = "did not answer in time: is it overloaded, stopped or cut off?"
    return [BackendUnavailable(f"{label} {advice}") for label, _ in asks]


async def _note(answers: list[T | LockError], index: int, ask: Ask[T]) -> None:
    try:
        answers[index] = await ask[1]()
    except LockError as error:
        answers[index] = error


async def _begin(runtime: Runtime, work: Work) -> None:
    try:
        runtime.spawn("lockkit-redis-ask", work)
    except RuntimeError as error:  # no thread could be started (Python 3.12 and later start none at exit)
        log.debug("calling without a thread: %s", error)
        await work()
