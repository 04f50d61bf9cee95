"""Ctrl-C while a block is entered, in a program that goes on with the same lock."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Any

import pytest

import lockkit
from lockkit.lease import WithStack
from lockkit.sync.lock import Attempt, Lock, ThreadingLock
from lockkit.sync.once import Attempt as OnceAttempt
from lockkit.sync.once import Once
from tests.interrupts import CallStrike

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

pytestmark = [
    pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

ENTERING = [
    WithStack.push,
    Attempt.__enter__,
    Lock.__enter__,
    Once.__enter__,
    OnceAttempt.__init__,
    ThreadingLock.__enter__,
    ThreadingLock.acquire,
]

BLOCKS: dict[str, Callable[[lockkit.Client], AbstractContextManager[Any]]] = {
    "lock": lambda client: client.lock("x"),
    "reentrant": lambda client: client.lock("x", reentrant=True),
    "attempt": lambda client: client.lock("x").attempt(),
    "threading": lambda client: client.lock("x").as_threading_lock(),
    "once": lambda client: client.once("x", keep=60),
}


spaces = itertools.count()


def entered_until_struck(make: Callable[[lockkit.Client], Any], enter: str) -> int:
    """Interrupt at each instant in turn; tell at how many the call that was interrupted has left nothing held."""
    number = 0
    while True:
        # A lease that is dropped keeps its lock until its ttl is over.
        with lockkit.connect(f"memory://lease-{next(spaces)}") as client:
            strike = CallStrike(number, *(function.__code__ for function in ENTERING))
            kept = make(client)
            strike.during(getattr(kept, enter))
            if not strike.struck:
                return number
            gc.collect()
            assert client._engine.leases.records == {}, f"instant {number} of {kept!r}"
        number += 1


@pytest.mark.parametrize("kind", BLOCKS)
def test_interrupted_entry_leaves_nothing_held(kind: str) -> None:
    """No block was entered, so nobody would leave it, and its lease would be renewed for ever."""
    assert entered_until_struck(BLOCKS[kind], "__enter__") > 1


def test_interrupted_acquire_of_a_threading_lock_leaves_nothing_held() -> None:
    """The same without a block."""
    assert entered_until_struck(BLOCKS["threading"], "acquire") > 1
