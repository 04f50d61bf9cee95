"""The guard of data in this process. For all guards, see `tests.storage.test_guards`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

import lockkit
from lockkit.fencing import TokenGuard


def test_guard_in_this_process_runs_no_body_under_an_older_token() -> None:
    """A newer one counts from the begin of the body on."""
    guard = TokenGuard("seat")
    guard.accept(5)

    with pytest.raises(lockkit.StaleToken), guard.writing(4):
        pytest.fail("the body ran")

    with guard.writing(6):
        assert guard.last == 6


def test_guard_in_this_process_writes_one_at_a_time() -> None:
    """Eight threads with tokens in any order: what is written never goes back."""
    guard = TokenGuard()
    tokens = iter(range(1, 4001))
    log: list[int] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for token in tokens:
            try:
                with guard.writing(token):
                    log.append(token)
            except lockkit.StaleToken:
                continue

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert log == sorted(log)
    assert log


def test_guard_in_this_process_is_free_after_an_error() -> None:
    """A body that raises does not shut the next one out."""
    guard = TokenGuard()
    with pytest.raises(RuntimeError, match="mine"), guard.writing(1):
        raise RuntimeError("mine")

    with guard.writing(1):
        pass


def test_guard_in_this_process_does_not_wait_for_itself() -> None:
    """A body that writes through the same guard again, or awaits while another task does, would wait for ever."""
    guard = TokenGuard("seat")

    async def write() -> None:
        with guard.writing(3):
            await asyncio.sleep(0)

    async def both() -> list[BaseException | None]:
        return [*await asyncio.gather(write(), write(), return_exceptions=True)]

    with guard.writing(1):
        with pytest.raises(lockkit.LockError, match=r"inside writing\(\) of the guard of 'seat' already"):
            guard.accept(2)
        with pytest.raises(lockkit.LockError, match="already"), guard.writing(2):
            pytest.fail("the body ran")
    assert guard.last == 1
    first, second = asyncio.run(both())
    assert first is None
    assert isinstance(second, lockkit.LockError)
    guard.accept(4)


def test_driver_is_loaded_by_the_guard_that_needs_it() -> None:
    """To guard a dict you need no Redis."""
    script = (
        "import sys, lockkit\n"
        "lockkit.fencing.TokenGuard().accept(1); lockkit.optimistic.with_retry\n"
        "assert 'redis' not in sys.modules\n"
        "sys.modules['redis'] = None\n"
        "try: lockkit.fencing.RedisGuard\n"
        "except lockkit.ConfigurationError as error: print(error)\n"
        "try: lockkit.optimistic.with_retry(None, 'x', str)\n"
        "except lockkit.ConfigurationError as error: print(error)\n"
    )

    said = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True, timeout=60)

    assert said.stdout.count("pip install 'lockkit[redis]'") == 2
    assert "RedisGuard" in dir(lockkit.fencing)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lockkit.fencing.nothing
