"""An outage: what the log says of it, and how often a client asks meanwhile."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.errors import BackendUnavailable
from lockkit.runtime import AsyncioRuntime
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisServer, require
from tests.engine.scripted import MovableClock, ScriptedBackend, fail, pass_time, scripted
from tests.tries import until, until_async

FACES = ["sync", "asyncio"]
CALLS = 20
LEASES = 2000
LONG = 20.0
LINE_SECONDS = 0.01


def refused(text: str = "connection refused") -> BackendUnavailable:
    """The error of a request that never left this machine."""
    error = BackendUnavailable(text)
    error.sent = False
    return error


class SlowHandler(logging.Handler):
    """Takes its time for each line, as one that writes to a network does."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Write slowly."""
        time.sleep(LINE_SECONDS)
        self.lines.append(record.getMessage())


@pytest.fixture
def slow_log() -> Iterator[list[str]]:
    """The lines that a slow handler has written."""
    handler, logger = SlowHandler(), logging.getLogger("lockkit")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


# -- the log -------------------------------------------------------------------------------------------------------


@contextmanager
def restarted(server: RedisServer) -> Iterator[None]:
    """Restart the server, which keeps its data, around a body."""
    server.stop()
    try:
        yield
    finally:
        server.start()


def in_jeopardy(leases: Sequence[Any]) -> int:
    """Count."""
    return sum(lease._record.renewal.in_jeopardy for lease in leases)


def check_lines(lines: list[str]) -> None:
    """One about the leases that could not be renewed, one about the end."""
    about = [line for line in lines if "renewal" in line]
    # The batch that fails first may be a smaller one: where the acquisitions took a third of the ttl.
    assert sum(f"of {LEASES} held at" in line for line in about) == 1, about
    assert re.match(r"renewal of \d+ locks ", about[0]), about
    assert "nearest deadline" in about[0]
    assert sum("work again after" in line and f"{LEASES} renewed again, 0 lost" in line for line in about) == 1, about
    assert len(lines) <= 10, lines


def test_restart_under_many_leases_writes_few_lines_and_loses_none(slow_log: list[str]) -> None:
    """A line for each lease, each of 10 ms, would take longer than the ttl, and the retry would wait for all."""
    require("redis", local=True)
    with RedisServer(appendonly=True, appendfsync="always") as server, lockkit.connect(server.url) as client:
        leases = [client.lock(f"x{number}", ttl=LONG).acquire() for number in range(LEASES)]
        with restarted(server):
            client._engine.confirm_soon()
            until(lambda: in_jeopardy(leases) == LEASES)
        until(lambda: in_jeopardy(leases) == 0)
        assert all(lease.held for lease in leases)
        until(lambda: any("work again" in line for line in tuple(slow_log)))
    check_lines(slow_log)


def test_line_about_one_lease_is_a_sentence(slow_log: list[str]) -> None:
    """It said "to the its deadline"."""
    require("redis", local=True)
    with RedisServer(appendonly=True) as server, lockkit.connect(server.url) as client:
        lease = client.lock("a", ttl=LONG).acquire()
        with restarted(server):
            client._engine.confirm_soon()
            until(lambda: any("renewal of lock 'a'" in line for line in tuple(slow_log)))
        until(lambda: in_jeopardy([lease]) == 0)

    line = next(line for line in slow_log if "renewal of lock 'a'" in line)
    assert re.search(r" of 1 held at redis://\S+ failed, \d+\.\d{3} s to its deadline; lockkit retries: ", line)


def test_restart_under_many_leases_in_an_event_loop(slow_log: list[str]) -> None:
    """As above: here a handler stops everything while it writes."""
    require("redis", local=True)

    async def run(server: RedisServer) -> None:
        async with lockkit.aio.connect(server.url) as client:
            leases = [await client.lock(f"x{number}", ttl=LONG).acquire() for number in range(LEASES)]
            with restarted(server):
                client._engine.confirm_soon()
                await until_async(lambda: in_jeopardy(leases) == LEASES)
            await until_async(lambda: in_jeopardy(leases) == 0)
            assert all(lease.held for lease in leases)
            await until_async(lambda: any("work again" in line for line in slow_log))

    with RedisServer(appendonly=True, appendfsync="always") as server:
        asyncio.run(run(server))
    check_lines(slow_log)


def test_losses_of_an_outage_are_counted_in_a_line(slow_log: list[str]) -> None:
    """Their holders and the observers are told of each."""
    client, backend = scripted(MovableClock())
    backend.before["renew"] = fail(refused())
    told: list[str] = []
    locks = [client.lock(f"x{number}", ttl=60, on_lost=lambda _, reason: told.append(reason)) for number in range(50)]
    leases = [lock.acquire() for lock in locks]
    pass_time(client, 25.0)
    until(lambda: in_jeopardy(leases) == len(leases))
    watch = client._engine.client
    for _ in range(4):  # a single leap would be a pause of this process
        pass_time(client, 10.0)
        until(lambda: watch.watch_at > watch.runtime.now())
    until(lambda: len(told) == len(leases))
    client.close()

    def lost() -> dict[str, int]:
        lines = [line for line in slow_log if line.startswith("lost")]
        return {line: int(line.split()[1]) if "locks" in line else 1 for line in lines}

    # The last holders may have been told before the line about them is written.
    until(lambda: sum(lost().values()) == len(leases))
    # Where the machine stands still between two of the losses, more than one.
    assert 1 <= len(lost()) <= 3, lost()
    assert "'x0' (token " in next(iter(lost()))
    assert all(line.endswith(f" at {client.url}: its deadline passed without a renewal") for line in lost())


def test_failed_acquisitions_are_logged_once_until_the_server_answers(slow_log: list[str]) -> None:
    """Twice down, twice a line, however many calls there were."""
    client, backend = scripted()
    for _ in range(2):
        slow_log.clear()
        backend.before["try_acquire"] = fail(refused())
        for number in range(5):
            with pytest.raises(BackendUnavailable, match="connection refused"):
                client.lock(f"x{number}").acquire(timeout=0.05)
        backend.before.clear()
        client.lock("x").acquire().release()
        until(lambda: any("answers again" in line for line in tuple(slow_log)))
        assert sum("lockkit retries" in line for line in slow_log) == 1, slow_log
        assert sum("calls that had failed: 5" in line for line in slow_log) == 1, slow_log


# -- how often the server is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_waiting_calls_share_the_tries(face: str) -> None:
    """Each tries at its beginning and at its end; between them they ask as often as one call would."""
    client, backend = scripted(AsyncioRuntime() if face == "asyncio" else None)
    backend.before["try_acquire"] = fail(refused())
    watch = Stopwatch()
    errors = acquire_all(client, timeout=2.0)
    seconds = watch.stop()

    assert all(isinstance(error, BackendUnavailable) for error in errors), errors
    # A pause is half a second or more once it has doubled seven times.
    assert CALLS <= backend.calls.count("try_acquire") <= 2 * CALLS + 7 + seconds / 0.5
    assert "abandon" not in backend.calls  # nothing was sent


@pytest.mark.parametrize("face", FACES)
def test_waiting_calls_go_on_when_one_of_them_is_answered(face: str) -> None:
    """All of them, not one after each pause: twenty would take more than ten seconds."""
    client, backend = scripted(AsyncioRuntime() if face == "asyncio" else None)
    began = time.monotonic()
    tries: list[float] = []

    def until_later() -> None:
        tries.append(time.monotonic() - began)
        if tries[-1] < 1.5:
            raise refused()

    backend.before["try_acquire"] = until_later
    assert acquire_all(client, timeout=PATIENCE) == [None] * CALLS
    answered = [at for at in tries if at >= 1.5]
    assert len(answered) == CALLS, "each asks once after the server is back"


def acquire_all(client: Any, timeout: float) -> list[BaseException | None]:  # noqa: ANN401 - of either API
    """Acquire and release as many locks at the same time; returns the errors."""

    def run(number: int) -> None:
        client.lock(f"x{number}", timeout=timeout).acquire().release()

    async def run_async(number: int) -> None:
        await (await client.lock(f"x{number}", timeout=timeout).acquire()).release()

    async def all_of_them() -> list[BaseException | None]:
        async with client:
            return await asyncio.gather(*map(run_async, range(CALLS)), return_exceptions=True)

    if isinstance(client, lockkit.aio.Client):
        return asyncio.run(all_of_them())
    with client, ThreadPoolExecutor(CALLS) as threads:
        return [call.exception() for call in [threads.submit(run, number) for number in range(CALLS)]]


def test_error_of_one_lock_does_not_keep_others_from_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in line fails each time, with the same words."""
    client, _ = scripted()
    failed = threading.Event()
    inner = ScriptedBackend.try_acquire

    async def try_acquire(self: ScriptedBackend, request: Any) -> Any:  # noqa: ANN401 - as in the base
        if request.name == "bad" or not failed.is_set():
            if request.name == "good":
                failed.set()
            raise refused()
        return await inner(self, request)

    monkeypatch.setattr(ScriptedBackend, "try_acquire", try_acquire)
    with client, ThreadPoolExecutor(2) as threads:
        bad = threads.submit(client.lock("bad").acquire, 5.0)
        good = threads.submit(client.lock("good").acquire, PATIENCE)
        assert good.result().held
        assert not bad.done()
        assert isinstance(bad.exception(), BackendUnavailable)


def test_other_errors_do_not_share_their_pauses() -> None:
    """Where one of several servers is down, the locks at the others do not wait for it: errors name the server."""
    client, _ = scripted()
    context = client._engine.acquisitions
    first, second = context.outage(refused("a is down")), context.outage(refused("b is down"))
    assert first is not second
    assert context.outage(refused("a is down")) is first


def test_cleanups_of_a_dead_port_wait_for_longer() -> None:
    """A hundred requests whose answers were lost are tried one at a time, with pauses that grow to a second."""
    client, backend = scripted()
    backend.after["try_acquire"] = fail(BackendUnavailable("the answer was lost"))
    backend.before["abandon"] = fail(refused())
    for number in range(100):
        with pytest.raises(BackendUnavailable):
            client.lock(f"x{number}").acquire(timeout=0)
    backend.calls.clear()
    watch = Stopwatch()
    until(lambda: backend.calls.count("abandon") >= 9)
    assert watch.stop() > 1.0  # without the pauses it takes a twentieth of that
    backend.before.clear()
    backend.after.clear()
    until(lambda: not client._engine.cleanups._pending)
