"""An outage: what the log says of it, and how often a client asks meanwhile."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lockkit.errors import BackendUnavailable, LockError
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import MovableClock, ScriptedBackend, fail, pass_time, scripted
from tests.faces import both_faces, scripted_for
from tests.tries import beside, until

CALLS = 20
LEASES = 500
LONG = 20.0
DOWN_SECONDS = 0.8
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


def in_jeopardy(leases: Sequence[Any]) -> int:
    """Count."""
    return sum(lease._record.renewal.in_jeopardy for lease in leases)


@both_faces
async def test_outage_under_many_leases_writes_few_lines_and_loses_none(
    driver: FaceDriver, slow_log: list[str]
) -> None:
    """A line for each lease, each of 10 ms, would take longer than the ttl, and the retry would wait for all."""
    client, backend = scripted_for(driver)
    leases = [await client.lock(f"x{number}", ttl=LONG).acquire() for number in range(LEASES)]
    backend.before["renew"] = fail(refused())
    client._engine.confirm_soon()
    await driver.eventually(lambda: in_jeopardy(leases) == LEASES, "all in jeopardy")
    backend.before.clear()
    await driver.eventually(lambda: in_jeopardy(leases) == 0, "all renewed again")
    assert all(lease.held for lease in leases)
    await driver.eventually(lambda: any("work again" in line for line in tuple(slow_log)), "the line about the end")
    await client.close()

    # Of this client: the log of another test's may be late.
    about = [line for line in slow_log if "renewal" in line and client.url in line]
    # The batch that fails first may be a smaller one: where the acquisitions took a third of the ttl.
    assert re.match(rf"renewal of \d+ locks .* of {LEASES} held at .* to the nearest deadline; ", about[0]), about
    assert re.search(rf"work again after .*: {LEASES} renewed again, 0 lost", about[1]), about
    assert len(about) == 2, about
    assert len(slow_log) <= 10, slow_log


def test_losses_of_an_outage_are_counted_in_a_line(slow_log: list[str]) -> None:
    """Their holders and the observers are told of each; the end of the outage counts them."""
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
    until(lambda: any(line.endswith(f": 0 renewed again, {len(leases)} lost") for line in tuple(slow_log)))
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


def test_failed_acquisitions_are_logged_once_until_the_server_answers(
    slow_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice down, twice a line, however many calls there were."""
    monkeypatch.setattr("lockkit.engine.observation.PAUSE", 0.1)
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
        assert sum("lockkit retries" in line and client.url in line for line in slow_log) == 1, slow_log
        assert sum("calls that had failed: 5" in line for line in slow_log) == 1, slow_log


def test_outage_is_logged_for_calls_that_waited_before(slow_log: list[str]) -> None:
    """A process that only waits, such as a standby, says so too; and that it is over."""
    client, backend = scripted()
    holder = client.lock("x").acquire()
    waiting = beside(client.lock("x").acquire)
    waiters = client._engine.acquisitions.waiting
    until(lambda: len(waiters) == 1)
    backend.before["try_acquire"] = fail(refused())
    next(iter(waiters)).wake.set()
    until(lambda: any("acquiring lock 'x'" in line for line in tuple(slow_log)))
    backend.before.clear()
    holder.release()

    waiting.result(PATIENCE).release()

    until(lambda: any("answers again" in line for line in tuple(slow_log)))
    client.close()


# -- how often the server is asked ---------------------------------------------------------------------------------


@both_faces
async def test_waiting_calls_share_the_tries(driver: FaceDriver) -> None:
    """
    Each tries at its beginning; between, they ask as often as one call would, and all go on once one is answered.

    Not one after each pause: twenty would take more than ten seconds.
    """
    client, backend = scripted_for(driver)
    began = time.monotonic()
    tries: list[float] = []

    def until_later() -> None:
        tries.append(time.monotonic() - began)
        if tries[-1] < DOWN_SECONDS:
            raise refused()

    backend.before["try_acquire"] = until_later
    calls = [driver.spawn(client.lock(f"x{number}").acquire(PATIENCE)) for number in range(CALLS)]
    for call in calls:
        await (await call.result()).release()
    await client.close()

    answered = [at for at in tries if at >= DOWN_SECONDS]
    assert len(answered) == CALLS, "each asks once after the server is back"
    # A pause is half a second or more once it has doubled seven times.
    assert CALLS <= len(tries) - len(answered) <= CALLS + 7 + answered[0] / 0.5
    assert "abandon" not in backend.calls  # nothing was sent


def test_error_of_one_lock_does_not_keep_others_from_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in line fails each time, with the same words; errors that name another server are another outage."""
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
    with client:
        bad = beside(client.lock("bad").acquire, PATIENCE)
        good = beside(client.lock("good").acquire, PATIENCE)
        assert good.result().held
        assert not bad.done()
        context = client._engine.acquisitions
        assert context.outage(refused("a is down")) is not context.outage(refused("b is down"))
    assert isinstance(bad.exception(PATIENCE), LockError)  # the client was closed
