"""The decorator, and the adapter for code that wants a ``threading.Lock``."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial, wraps
from math import inf, nan
from typing import Any

import pytest

import lockkit
from lockkit.sync import ThreadingLock
from lockkit.testing.conformance.base import NOT_GRANTED, Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE


class Decorating(Cases):
    """``@client.lock("stock:{product_id}")``."""

    @case()
    async def test_coroutine_function_holds_the_lock_until_it_ends(self, driver: FaceDriver) -> None:
        """The name is made of the call's arguments, by position, keyword or default; result and signature are kept."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()

        @client.lock(f"{name}:{{product_id}}:{{size!r:>4}}", ttl=driver.timing.long, timeout=20)
        async def sell(product_id: int, *, size: str = "M") -> list[str]:
            """Sell one."""
            owners = await other.holders(f"{name}:{product_id}: {size!r}")
            await driver.sleep(0)
            return [holder.owner for holder in owners]

        assert len(await sell(7)) == 1
        assert len(await sell(product_id=8, size="L")) == 1
        assert await other.holders(f"{name}:7: 'M'") == []
        assert (sell.__name__, sell.__doc__) == ("sell", "Sell one.")
        assert list(inspect.signature(sell).parameters) == ["product_id", "size"]

    @case()
    async def test_wrapper_of_a_coroutine_function_holds_the_lock_until_it_ends(self, driver: FaceDriver) -> None:
        """A plain function around it returns before the body has run; so does an object with an ``async`` call."""
        client, other = await driver.connect(), await driver.connect()
        name = driver.name()

        async def sell(product_id: int) -> bool:
            await driver.sleep(0)
            return bool(await other.holders(f"{name}:{product_id}"))

        @wraps(sell)
        def logged(product_id: int) -> Coroutine[Any, Any, bool]:
            return sell(product_id)

        class Seller:
            async def __call__(self, product_id: int) -> bool:
                return await sell(product_id)

        for function in (logged, partial(logged), partial(sell), Seller()):
            assert await client.lock(f"{name}:{{product_id}}", ttl=driver.timing.long)(function)(7), function
            assert await other.holders(f"{name}:7") == []

    @case()
    async def test_coroutine_that_returns_unfinished_work_is_refused(self, driver: FaceDriver) -> None:
        """A coroutine that nobody awaited, or a generator, would run without the lock."""
        client = await driver.connect()
        name = driver.name()
        ran = []

        async def body() -> None:
            ran.append("body")

        async def forgets_to_await() -> Coroutine[Any, Any, None]:
            return body()

        async def generates() -> Iterator[None]:
            return (ran.append(item) for item in ["item"])  # type: ignore[func-returns-value]

        for function in (forgets_to_await, generates):
            with pytest.raises(lockkit.ConfigurationError, match="after the lock is released"):
                await client.lock(name)(function)()
        assert ran == []
        assert await client.holders(name) == []

    @case(faces=["blocking"])
    async def test_function_that_returns_unfinished_work_is_refused(self, driver: FaceDriver) -> None:
        """Its body would run without the lock, whatever hides it."""
        name = driver.name()
        ran = []

        async def body() -> None:
            ran.append("body")

        def generate() -> Iterator[None]:
            ran.append("generator")
            yield

        async def generate_async() -> AsyncIterator[None]:
            ran.append("async generator")
            yield

        with driver.target.connect() as client:
            for unfinished in (body, generate, generate_async):
                decorated = client.lock(name)(lambda function=unfinished: function())
                with pytest.raises(lockkit.ConfigurationError, match="after the lock is released") as caught:
                    decorated()
                assert (caught.value.name, caught.value.backend) == (name, client.url)
                assert client.holders(name) == []
        assert ran == []

    @case(faces=["blocking"])
    async def test_wrapper_that_runs_its_coroutine_stays_a_plain_function(self, driver: FaceDriver) -> None:
        """As ``asyncio.run`` in the decorators of many command lines."""
        name = driver.name()

        async def main() -> int:
            return 7

        with driver.target.connect() as client:

            @wraps(main)
            def command() -> tuple[int, int]:
                held = len(client.holders(name))
                return asyncio.run(main()), held

            assert client.lock(name)(command)() == (7, 1)
            assert client.holders(name) == []

    @case()
    async def test_exception_of_the_function_goes_on_and_the_lock_is_free(self, driver: FaceDriver) -> None:
        """As with a block."""
        client = await driver.connect()
        name = driver.name()

        @client.lock(name, ttl=driver.timing.long)
        async def fail() -> None:
            assert await client.lock(name).locked()
            raise ValueError("the function's own")

        with pytest.raises(ValueError, match="the function's own"):
            await fail()
        assert await client.holders(name) == []

    @case()
    async def test_wrong_uses_are_refused_when_decorating(self, driver: FaceDriver) -> None:
        """A generator would run without the lock; a field must be a parameter. The name is checked at the call."""
        client = await driver.connect()

        def generator() -> Iterator[int]:
            yield 1

        async def async_generator() -> AsyncIterator[int]:
            yield 1

        async def function(product_id: int) -> None:
            raise AssertionError(product_id)

        @wraps(generator)
        def wrapper() -> list[int]:
            return [*generator()]

        class Generator:
            def __call__(self) -> Iterator[int]:
                yield 1

        managers = contextmanager(generator), asynccontextmanager(async_generator)
        for wrong in (generator, async_generator, wrapper, partial(generator), Generator(), *managers):
            with pytest.raises(lockkit.ConfigurationError, match="generator"):
                client.lock(driver.name())(wrong)
        with pytest.raises(lockkit.ConfigurationError, match="order_id"):
            client.lock(driver.name() + "{order_id}")(function)
        with pytest.raises(lockkit.ConfigurationError, match="lock name"):
            await client.lock("{product_id}")(function)("")  # type: ignore[arg-type]

    @case(faces=["blocking"])
    async def test_plain_function_holds_the_lock(self, driver: FaceDriver) -> None:
        """The blocking face decorates plain functions and methods."""
        client = driver.target.connect()
        name = driver.name()

        class Shop:
            @client.lock(f"{name}:{{self.city}}:{{count}}", ttl=driver.timing.long)
            def sell(self, count: int = 3) -> int:
                return len(client.holders(f"{name}:{self.city}:{count}"))

            city = "Łódź"

        with client:
            assert Shop().sell() == 1
            assert Shop().sell(4) == 1
            assert client.holders(f"{name}:Łódź:3") == []

    @case(faces=["asyncio"])
    async def test_plain_function_is_refused_by_the_asyncio_face(self, driver: FaceDriver) -> None:
        """It could not wait."""
        client = await driver.connect()

        def function() -> None:
            raise AssertionError

        for plain in (function, partial(function)):
            with pytest.raises(lockkit.ConfigurationError, match="coroutine function"):
                client.lock(driver.name())(plain)


def _answered(acquire: Callable[..., bool], *arguments: Any, **keywords: Any) -> bool:
    """Call as `FaceDriver.answered` does."""
    deadline = FaceDriver.now() + PATIENCE
    while True:
        try:
            return acquire(*arguments, **keywords)
        except lockkit.BackendUnavailable:
            if FaceDriver.now() > deadline:
                raise


class ThreadingLocks(Cases):
    """``as_threading_lock()``."""

    @staticmethod
    def _lock(driver: FaceDriver, client: lockkit.Client, name: str) -> ThreadingLock:
        return client.lock(name, ttl=driver.timing.long).as_threading_lock()

    @case(faces=["blocking"])
    async def test_threading_lock_has_the_signatures_of_threading(self, driver: FaceDriver) -> None:
        """acquire(blocking=True, timeout=-1) -> bool, release(), locked(), with."""
        name = driver.name()
        with driver.target.connect() as client:
            lock, other = self._lock(driver, client, name), self._lock(driver, client, name)

            assert lock.acquire() is True
            assert lock.locked()
            assert _answered(other.acquire, blocking=False) is False
            assert _answered(other.acquire, True, 0.05) is False  # noqa: FBT003 - as threading.Lock is called
            lock.release()
            assert not lock.locked()
            with other as entered:
                assert entered is True
                assert _answered(lock.acquire, blocking=False) is False
            assert lock.acquire(timeout=20) is True
            lock.release()

    @case(faces=["blocking"])
    async def test_threading_lock_refuses_what_threading_refuses(self, driver: FaceDriver) -> None:
        """With the same exceptions."""
        with driver.target.connect() as client:
            lock = self._lock(driver, client, driver.name())
            with pytest.raises(RuntimeError, match="unlocked"):
                lock.release()
            with pytest.raises(ValueError, match="timeout"):
                lock.acquire(blocking=False, timeout=1)
            with pytest.raises(ValueError, match="timeout"):
                lock.acquire(timeout=-2)
            for seconds in (threading.TIMEOUT_MAX + 1, inf):
                with pytest.raises(OverflowError, match="timeout"):
                    lock.acquire(timeout=seconds)
            with pytest.raises(ValueError, match="timeout"):
                lock.acquire(timeout=nan)
            assert not lock.locked()

    @case(faces=["blocking"])
    async def test_threading_lock_can_be_referred_to_and_shown_as_one(self, driver: FaceDriver) -> None:
        """Weakly, as libraries that keep a lock per object do; its repr says whether it is locked."""
        with driver.target.connect() as client:
            lock = self._lock(driver, client, driver.name())
            reference = weakref.ref(lock)
            assert reference() is lock
            assert repr(lock).startswith("<unlocked lockkit.ThreadingLock object ")
            with lock:
                assert repr(lock).startswith("<locked lockkit.ThreadingLock object ")
            assert repr(lock).startswith("<unlocked ")
            del lock
            gc.collect()
            assert reference() is None

    @case(faces=["blocking"])
    async def test_threading_lock_left_after_its_loss_does_not_free_the_next_holder(self, driver: FaceDriver) -> None:
        """A loses the lock inside ``with``, or after ``acquire()``, B enters by the same object, A leaves: B holds."""
        self._lose(driver, lambda lock: lock.__enter__(), lambda lock: lock.__exit__(None, None, None))
        self._lose(driver, lambda lock: lock.acquire(), lambda lock: lock.release())

    @staticmethod
    def _lose(
        driver: FaceDriver, enter: Callable[[ThreadingLock], object], leave: Callable[[ThreadingLock], None]
    ) -> None:
        name = driver.name()
        with driver.target.connect() as client, driver.target.connect() as other:
            lock = client.lock(name, ttl=driver.timing.long).as_threading_lock()
            entered, may_leave = threading.Event(), threading.Event()
            seen: list[bool] = []

            def second() -> None:
                with lock:
                    entered.set()
                    seen.append(may_leave.wait(120))

            b = threading.Thread(target=second)
            enter(lock)
            assert other.break_lock(name)
            b.start()
            assert entered.wait(120)

            with pytest.raises(lockkit.LockLost):
                leave(lock)

            assert len(other.holders(name)) == 1
            with pytest.raises(NOT_GRANTED):
                other.lock(name).acquire(0)
            may_leave.set()
            b.join(120)
            assert seen == [True]
            assert other.holders(name) == []

    @case(faces=["blocking"])
    async def test_threading_lock_may_be_released_by_another_thread(self, driver: FaceDriver) -> None:
        """And a waiting thread gets it."""
        name = driver.name()
        with driver.target.connect() as client:
            lock, theirs = self._lock(driver, client, name), self._lock(driver, client, name)
            lock.acquire()
            got: list[bool] = []
            waiting = threading.Thread(target=lambda: got.append(theirs.acquire(timeout=20)))
            waiting.start()

            releasing = threading.Thread(target=lock.release)
            releasing.start()
            releasing.join(20)
            waiting.join(20)

            assert got == [True]
            theirs.release()
