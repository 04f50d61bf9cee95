"""
A pytest plugin for tests of code that uses lockkit: clients on memory, with a clock that the test advances.

pytest finds it where lockkit is installed. Elsewhere, or with ``PYTEST_DISABLE_PLUGIN_AUTOLOAD``, write
``pytest_plugins = ["lockkit.testing.kit"]`` in the top ``conftest.py``; both at once do no harm. It loads the rest of
lockkit when a test first uses a fixture, and never a driver.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from lockkit.errors import StaleToken

if TYPE_CHECKING:
    from lockkit.testing.kit.clients import AioKitClient, KitClient
    from lockkit.testing.kit.clock import Clock
    from lockkit.testing.kit.workers import OncePerRun

__all__ = ["assert_fenced", "lockkit_aio_client", "lockkit_client", "lockkit_once", "lockkit_time"]


@pytest.fixture
def lockkit_time() -> Clock:
    """The clock of ``lockkit_client`` and ``lockkit_aio_client``. It stands still until the test advances it."""
    from lockkit.testing.kit.clock import Clock  # noqa: PLC0415 - pytest loads this module in every run

    return Clock()


@pytest.fixture
def lockkit_client(lockkit_time: Clock) -> Iterator[KitClient]:
    """A `lockkit.Client` with locks of this test alone, closed at its end."""
    from lockkit.testing.kit.clients import KitClient  # noqa: PLC0415 - see above

    client = KitClient(lockkit_time)
    yield client
    client.close()


@pytest.fixture
def lockkit_aio_client(lockkit_time: Clock) -> Iterator[AioKitClient]:
    """A `lockkit.aio.Client` with locks of this test alone, the same as those of ``lockkit_client``."""
    from lockkit.testing.kit.clients import AioKitClient  # noqa: PLC0415 - see above

    client = AioKitClient(lockkit_time)
    yield client
    client.close_without_loop()


@pytest.fixture(scope="session")
def lockkit_once(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[OncePerRun]:
    """``lockkit_once(key, make)``: what the first worker of pytest-xdist makes, and all the others get."""
    from lockkit.testing.kit.workers import OncePerRun  # noqa: PLC0415 - see above

    # Not by the environment: a run of pytest within a test of a worker inherits that of the worker.
    worker = getattr(pytestconfig, "workerinput", None)
    once = OncePerRun(tmp_path_factory, None if worker is None else worker["testrunuid"])
    yield once
    once.close()


def assert_fenced(
    write: Callable[[int], Any], *, refused: type[BaseException] | tuple[type[BaseException], ...] = StaleToken
) -> Awaitable[None]:
    """
    Check that storage rejects a write with a token that is older than one it has seen.

    Calls ``write(token)`` with a newer token and then with an older one, as a holder does that was paused after it had
    acquired the lock, while the next holder wrote.

    Args:
        write: The application's write. If it returns an awaitable, await what this returns (without a running event
            loop the check runs at once).
        refused: What it raises when storage rejects the token.

    Raises:
        AssertionError: Storage accepted the older token, or rejected the newer one.
    """
    from lockkit.backends.lock_state import wall_clock_us  # noqa: PLC0415 - pytest loads this module in every run
    from lockkit.runtime import drive  # noqa: PLC0415 - see above
    from lockkit.testing.kit.clock import Done  # noqa: PLC0415 - see above

    # Above all that memory has granted so far, which the storage may have seen, and below all that it will grant.
    older = wall_clock_us()
    newer = older + 1
    first = _begun(write, newer, refused)
    check = _check(first, write, newer, older, refused)
    if inspect.isawaitable(first):
        import asyncio  # noqa: PLC0415 - see above

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(check)
        else:
            return check
    else:
        drive(check)
    return Done()


_Refused = type[BaseException] | tuple[type[BaseException], ...]


def _begun(write: Callable[[int], Any], token: int, refused: _Refused) -> Any:  # noqa: ANN401 - whatever it returns
    """Call the write; give what it returned, or the error if storage rejects the token."""
    try:
        return write(token)
    except refused as error:
        return error


async def _check(first: Any, write: Callable[[int], Any], newer: int, older: int, refused: _Refused) -> None:  # noqa: ANN401
    if (error := await _rejection(first, refused)) is not None:
        raise AssertionError(_newer_refused(newer, error)) from error
    if await _rejection(_begun(write, older, refused), refused) is None:
        raise AssertionError(_older_accepted(older, newer))


async def _rejection(answer: Any, refused: _Refused) -> BaseException | None:  # noqa: ANN401
    """Wait for the end of a write; give the error if storage rejected the token."""
    try:
        if inspect.isawaitable(answer):
            await answer
    except refused as error:
        return error
    return answer if isinstance(answer, refused) else None


def _newer_refused(newer: int, error: BaseException) -> str:
    return f"storage rejected token {newer}, the highest that it has seen: {error!r}"


def _older_accepted(older: int, newer: int) -> str:
    return (
        f"storage accepted token {older} after it had seen {newer}: a holder that was paused can overwrite the work of "
        "the next one. Compare tokens where you write; lockkit.fencing has guards"
    )
