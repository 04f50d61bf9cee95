"""The kit for tests of code that uses lockkit."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.fencing import TokenGuard
from lockkit.testing.kit import assert_fenced
from lockkit.testing.kit import clock as kit_clock
from lockkit.testing.kit.clients import AioKitClient, KitClient
from lockkit.testing.kit.clock import Clock
from lockkit.testing.timing import PATIENCE
from tests.programs import printed

pytest_plugins = ["pytester", "lockkit.testing.kit"]


@contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[list[object]]:
    """Call a function in a thread while the block runs; the list has its result, or what it raised, afterwards."""
    outcome: list[object] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - the outcome
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join(PATIENCE)
        assert not thread.is_alive()


# -- the plugin ------------------------------------------------------------------------------------------------------


TEST_FILE = """
import asyncio

import lockkit
import pytest


def test_sync(lockkit_client, lockkit_time):
    with lockkit_client.lock("a", ttl=30) as lease:
        lockkit_time.advance(31)
        lease.check()
        assert lockkit_client.other().lock("a").try_acquire() is None
    lockkit_client.assert_all_released()


def test_asyncio(lockkit_aio_client, lockkit_time):
    async def main():
        async with lockkit_aio_client.lock("a", ttl=30) as lease:
            await lockkit_time.advance(31)
            lease.check()
            assert await lockkit_aio_client.other().lock("a").try_acquire() is None
        lockkit_aio_client.assert_all_released()

    asyncio.run(main())


def test_lost(lockkit_client):
    with pytest.raises(lockkit.LockLost), lockkit_client.lock("a"):
        lockkit_client.lose("a", "expired")
"""


@pytest.mark.parametrize("autoload", ["1", ""], ids=["by name alone", "by the entry point too"])
def test_fixtures_of_the_plugin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, autoload: str) -> None:
    """A project's tests get them, whichever way the plugin is loaded."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", autoload)
    pytester.makeconftest('pytest_plugins = ["lockkit.testing.kit"]')
    pytester.makepyfile(TEST_FILE)

    result = pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider", timeout=4 * PATIENCE)

    result.assert_outcomes(passed=3)


def test_plugin_loads_no_driver_and_little_of_lockkit() -> None:
    """Every run of pytest in an environment with lockkit loads it."""
    script = (
        "import sys, pytest; before = set(sys.modules); import lockkit.testing.kit.plugin; "
        "print(*sorted(name for name in set(sys.modules) - before if name.startswith('lockkit') or '.' not in name))"
    )
    names = printed("-c", script).split()

    roots = {name for name in names if not name.startswith("lockkit")}
    assert roots <= sys.stdlib_module_names - {"asyncio"}
    assert {name for name in names if name.startswith("lockkit")} == {
        "lockkit", "lockkit.errors", "lockkit.testing", "lockkit.testing.kit", "lockkit.testing.kit.plugin",
    }  # fmt: skip


# -- the clock -------------------------------------------------------------------------------------------------------


def test_lease_that_is_renewed_outlives_its_ttl(lockkit_client: KitClient, lockkit_time: Clock) -> None:
    """The renewals that are due run."""
    with lockkit_client.lock("a", ttl=30) as lease:
        for _ in range(10):
            lockkit_time.advance(31)
            assert 10 <= lease.remaining() <= 30
            assert lease.confirm()


def test_lease_that_is_not_renewed_expires_on_time(lockkit_client: KitClient, lockkit_time: Clock) -> None:
    """Its callback has run when the clock stands again, and it ran at the deadline."""
    seen: list[tuple[str, float]] = []
    lease = lockkit_client.lock(
        "a", ttl=30, renew=False, on_lost=lambda _, reason: seen.append((reason, lockkit_time.elapsed))
    ).acquire()

    lockkit_time.advance(29)
    assert lease.held
    lockkit_time.advance(timedelta(seconds=2))

    assert lease.lost
    ((reason, at),) = seen
    assert reason == "expired"
    assert 29 < at < 30
    lockkit_client.other().lock("a").acquire(timeout=0).release()


def test_what_is_due_runs_in_the_order_of_its_times(lockkit_client: KitClient, lockkit_time: Clock) -> None:
    """Also where one advance spans all of it."""
    seen: list[tuple[str, float]] = []

    def note(lease: Any, reason: str) -> None:  # noqa: ANN401 - a lease
        del reason
        seen.append((lease.name, round(lockkit_time.elapsed)))

    leases = [
        client.lock(name, ttl=ttl, renew=False, on_lost=note).acquire()
        for client, name, ttl in [
            (lockkit_client, "c", 30), (lockkit_client.other(), "a", 10), (lockkit_client, "b", 20)
        ]
    ]  # fmt: skip

    lockkit_time.advance(60)

    assert seen == [("a", 10), ("b", 20), ("c", 30)]
    assert all(lease.lost for lease in leases)


def test_blocking_wait_ends_when_the_test_says_so(lockkit_client: KitClient, lockkit_time: Clock) -> None:
    """A wait with a timeout does not advance the clock by itself."""
    with lockkit_client.lock("a"), in_thread(lockkit_client.other().lock("a", timeout=5).acquire) as outcome:
        lockkit_time.until_waiting()
        time.sleep(0.05)
        assert (outcome, lockkit_time.elapsed) == ([], 0)
        lockkit_time.advance(4)
        assert outcome == []
        lockkit_time.advance(2)

    assert isinstance(outcome[0], lockkit.LockTimeout)


def test_waiter_acts_at_the_time_at_which_it_is_woken(lockkit_client: KitClient, lockkit_time: Clock) -> None:
    """It times out after 5 seconds, though the same advance frees the lock after 10."""
    held = lockkit_client.lock("a", ttl=10, renew=False).acquire()
    with in_thread(lockkit_client.other().lock("a", timeout=5).acquire) as outcome:
        lockkit_time.until_waiting()
        lockkit_time.advance(60)

    assert isinstance(outcome[0], lockkit.LockTimeout)
    assert held.lost


def test_release_wakes_a_waiter_without_an_advance(lockkit_client: KitClient, lockkit_time: Clock) -> None:
    """The hand-over takes no time."""
    with in_thread(lambda: lockkit_client.other().lock("a").acquire().release()) as outcome, lockkit_client.lock("a"):
        pass

    assert outcome == [None]
    assert lockkit_time.elapsed == 0


def test_clock_refuses_to_go_back(lockkit_time: Clock) -> None:
    """And what is no time."""
    with pytest.raises(lockkit.ConfigurationError, match="seconds"):
        lockkit_time.advance(-1)
    lockkit_time.advance(0)


def test_wait_that_nothing_will_end_says_so(
    lockkit_client: KitClient, lockkit_time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that forgot to advance the clock fails with what to do, and hangs no longer."""
    monkeypatch.setattr(kit_clock, "STUCK_SECONDS", 0.05)

    with lockkit_client.lock("a"), pytest.raises(RuntimeError, match="advance"):
        lockkit_client.other().lock("a", timeout=5).acquire()
    with pytest.raises(RuntimeError, match="only 0 calls"):
        lockkit_time.until_waiting()


# -- what a test does to a client ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["expired", "paused", "taken", "gone", "session", "broken"])
def test_lose(lockkit_client: KitClient, reason: Any) -> None:  # noqa: ANN401 - a reason
    """The holder notices, and others can have the lock, with a higher token."""
    seen: list[str] = []
    lease = lockkit_client.lock("a", on_lost=lambda _, reason: seen.append(reason)).acquire()

    lockkit_client.lose("a", reason)

    assert lease.lost
    assert seen == [reason]
    with pytest.raises(lockkit.LockLost):
        lease.check()
    with lockkit_client.other().lock("a", timeout=0) as other:
        assert other.token > lease.token
    lockkit_client.assert_all_released()


def test_lose_permits_and_readers(lockkit_client: KitClient) -> None:
    """By the name that the application gave."""
    permit = lockkit_client.semaphore("a", limit=1).acquire()
    reader = lockkit_client.rwlock("b").read().acquire()

    lockkit_client.lose("a", "gone")
    lockkit_client.lose("b", "gone")

    assert permit.lost
    assert reader.lost
    assert lockkit_client.semaphore("a", limit=1).available() == 1


def test_lose_what_is_not_held(lockkit_client: KitClient) -> None:
    """A test that loses nothing would prove nothing."""
    with lockkit_client.other().lock("a"), pytest.raises(lockkit.LockError, match="not held by this client"):
        lockkit_client.lose("a", "expired")
    with pytest.raises(lockkit.ConfigurationError, match="reason must be one of"):
        lockkit_client.lose("a", "stolen")  # type: ignore[arg-type]


def test_fail_counts_acquisitions(lockkit_client: KitClient) -> None:
    """So many fail, and no more; each time the error knows the lock."""
    lockkit_client.fail(lockkit.BackendUnavailable("down"), times=2)

    for name in ("a", "b"):
        with pytest.raises(lockkit.BackendUnavailable, match="down") as caught:
            lockkit_client.lock(name, timeout=5).acquire()
        assert caught.value.name == name
    lockkit_client.lock("a").acquire().release()

    assert [grant.name for grant in lockkit_client.grants] == ["a"]


def test_other_clients_are_closed_with_the_first(lockkit_client: KitClient, lockkit_aio_client: AioKitClient) -> None:
    """In both APIs: what they hold is free."""
    other, aio_other = lockkit_client.other(), lockkit_aio_client.other()
    lease = other.lock("a").acquire()

    async def use() -> lockkit.aio.Lease:
        aio_lease = await aio_other.lock("b").acquire()
        await lockkit_aio_client.close()
        return aio_lease

    lockkit_client.close()
    assert not lease.held
    assert not asyncio.run(use()).held
    with pytest.raises(lockkit.LockError, match="closed"):
        other.lock("a").acquire()


def test_fail_does_not_touch_leases_and_other_clients(lockkit_client: KitClient, lockkit_time: Clock) -> None:
    """Renewals and releases work on."""
    with lockkit_client.lock("a", ttl=30) as lease:
        lockkit_client.fail(lockkit.BackendUnavailable, times=1)
        lockkit_time.advance(31)
        lease.check()
        lockkit_client.other().lock("b").acquire().release()
    with pytest.raises(lockkit.BackendUnavailable) as caught:
        lockkit_client.lock("b").acquire()
    assert (caught.value.name, caught.value.backend) == ("b", lockkit_client.url)


@pytest.mark.parametrize(("error", "times"), [("down", 1), (ValueError, -1), (ValueError, 1.5), (int, 1)])
def test_fail_refuses_what_cannot_be_raised(lockkit_client: KitClient, error: Any, times: Any) -> None:  # noqa: ANN401
    """Bad input is refused where it comes in."""
    with pytest.raises(lockkit.ConfigurationError):
        lockkit_client.fail(error, times=times)


def test_slow_answer(lockkit_client: KitClient, lockkit_time: Clock) -> None:
    """The lease counts from before the request was sent."""
    lockkit_client.slow(20)
    with in_thread(lockkit_client.lock("a", ttl=30, renew=False).acquire) as outcome:
        lockkit_time.until_waiting()
        lockkit_time.advance(19)
        assert outcome == []
        lockkit_time.advance(1)

    (lease,) = outcome
    assert isinstance(lease, lockkit.Lease)
    assert 9 < lease.remaining() <= 10
    lease.release()
    lockkit_client.slow(0)
    lockkit_client.lock("b").acquire().release()


def test_grants(lockkit_client: KitClient) -> None:
    """All that were granted, in order, with the names that the application gave."""
    with lockkit_client.lock("b", ttl=7) as first, lockkit_client.semaphore("a", limit=2) as second:
        lockkit_client.other().lock("c").acquire().release()
        lockkit_client.lock("b").try_acquire()

    grants = [(grant.name, grant.mode, grant.token, grant.owner, grant.slot) for grant in lockkit_client.grants]
    assert grants == [
        ("b", "exclusive", first.token, first.owner, None),
        ("a", "permit", second.token, second.owner, 0),
    ]
    assert lockkit_client.grants[0].ttl == 7


def test_assert_all_released(lockkit_client: KitClient) -> None:
    """It names what is held; locks of other clients are their matter."""
    other = lockkit_client.other().lock("b").acquire()
    lockkit_client.assert_all_released()

    lease = lockkit_client.lock("a").acquire()
    with pytest.raises(AssertionError, match=rf"1 of 1 leases are not released: 'a' \(token {lease.token}\)"):
        lockkit_client.assert_all_released()

    lease.release()
    lockkit_client.assert_all_released()
    other.release()


def test_dropped_lease_is_not_released(lockkit_client: KitClient) -> None:
    """The application forgot it."""
    with pytest.warns(ResourceWarning, match="dropped"):
        lockkit_client.lock("a").acquire()

    with pytest.raises(AssertionError, match="'a'"):
        lockkit_client.assert_all_released()


# -- asyncio ---------------------------------------------------------------------------------------------------------


async def settled() -> None:
    """Let tasks run."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_asyncio_renewals_and_expiry(lockkit_aio_client: AioKitClient, lockkit_time: Clock) -> None:
    """Awaited or not, what is due in the background has run."""
    seen: list[str] = []

    async def note(lease: object, reason: str) -> None:
        del lease
        await asyncio.sleep(0)
        seen.append(reason)

    async with lockkit_aio_client.lock("a", ttl=30) as lease:
        lockkit_time.advance(31)
        lease.check()
        await lockkit_time.advance(31)
        lease.check()
        short = await lockkit_aio_client.lock("b", ttl=30, renew=False, on_lost=note).acquire()
        await lockkit_time.advance(31)

    assert short.lost
    assert seen == ["expired"]


@pytest.mark.asyncio
async def test_asyncio_waiter_acts_at_its_time(lockkit_aio_client: AioKitClient, lockkit_time: Clock) -> None:
    """As a thread does."""
    held = await lockkit_aio_client.lock("a", ttl=10, renew=False).acquire()
    early = asyncio.create_task(lockkit_aio_client.other().lock("a", timeout=5).try_acquire(5))
    late = asyncio.create_task(lockkit_aio_client.other().lock("a", ttl=100).acquire())
    await settled()
    assert lockkit_time.elapsed == 0

    await lockkit_time.advance(60)

    assert early.done()
    assert await early is None
    assert held.lost
    async with await late as lease:
        assert 30 < lease.remaining() <= 90


@pytest.mark.asyncio
async def test_asyncio_task_acts_at_its_time_however_often_it_waits(
    lockkit_aio_client: AioKitClient, lockkit_time: Clock
) -> None:
    """A poller in one long advance."""
    seen: list[float] = []

    async def poll() -> None:
        while True:
            assert await lockkit_aio_client.lock("a", renew=False).try_acquire(10) is None
            seen.append(lockkit_time.elapsed)

    async with lockkit_aio_client.other().lock("a"):
        poller = asyncio.create_task(poll())
        await lockkit_time.advance(300)
        poller.cancel()

    assert seen == [10 * count for count in range(1, 31)]


def test_asyncio_tasks_of_another_thread_act_at_their_time(
    lockkit_aio_client: AioKitClient, lockkit_time: Clock
) -> None:
    """The application's event loop may run in a thread of its own, as that of a test client for ASGI does."""
    seen: list[float] = []

    async def wait(seconds: float) -> None:
        assert await lockkit_aio_client.lock("a").try_acquire(seconds) is None
        seen.append(lockkit_time.elapsed)

    async def main() -> None:
        async with lockkit_aio_client.other().lock("a"):
            await asyncio.gather(*(wait(seconds) for seconds in (1, 2, 3)))

    with in_thread(lambda: asyncio.run(main())) as outcome:
        lockkit_time.until_waiting(3)
        lockkit_time.advance(10)

    assert outcome == [None]
    assert seen == [1, 2, 3]


@pytest.mark.asyncio
async def test_asyncio_waiters_go_on_without_awaiting_the_advance(
    lockkit_aio_client: AioKitClient, lockkit_time: Clock
) -> None:
    """The loop finishes it."""
    async with lockkit_aio_client.lock("a"):
        waiter = asyncio.create_task(lockkit_aio_client.other().lock("a").try_acquire(5))
        await settled()
        lockkit_time.advance(6)
        assert await waiter is None
    await settled()
    assert lockkit_time.elapsed == 6


@pytest.mark.asyncio
async def test_asyncio_lose_fail_slow(lockkit_aio_client: AioKitClient, lockkit_time: Clock) -> None:
    """They may be awaited, too."""
    client = lockkit_aio_client

    async def lose() -> None:
        async with client.lock("a", cancel_on_lost=True):
            client.lose("a", "taken")
            await asyncio.sleep(PATIENCE)

    with pytest.raises(lockkit.LockLost):
        await lose()
    await client.fail(lockkit.BackendUnavailable("down"), times=1)
    with pytest.raises(lockkit.BackendUnavailable):
        await client.lock("a").acquire()
    await client.slow(3)
    task = asyncio.create_task(client.lock("a").acquire())
    await lockkit_time.advance(2)
    assert not task.done()
    await lockkit_time.advance(1)
    assert task.done()
    await (await task).release()

    assert [grant.name for grant in client.grants] == ["a", "a"]
    await client.assert_all_released()


@pytest.mark.asyncio
async def test_both_apis_share_locks_and_clock(
    lockkit_client: KitClient, lockkit_aio_client: AioKitClient, lockkit_time: Clock
) -> None:
    """A program may use both."""
    lease = lockkit_client.lock("a", ttl=30, renew=False).acquire()
    assert await lockkit_aio_client.lock("a").try_acquire() is None
    await lockkit_time.advance(31)

    assert lease.lost
    async with lockkit_aio_client.lock("a", timeout=0):
        pass


def test_asyncio_client_outlives_an_event_loop(lockkit_aio_client: AioKitClient, lockkit_time: Clock) -> None:
    """A test may run several."""

    async def use() -> int:
        async with lockkit_aio_client.lock("a", ttl=30) as lease:
            lockkit_time.advance(100)
            return lease.token

    assert asyncio.run(use()) < asyncio.run(use())


def test_asyncio_lease_that_a_test_leaves_is_no_error(lockkit_aio_client: AioKitClient) -> None:
    """The client is closed at the end of the test, without an event loop."""
    leases = []

    async def main() -> None:
        leases.append(await lockkit_aio_client.lock("a").acquire())

    asyncio.run(main())
    lockkit_aio_client.close_without_loop()

    assert not leases[0].held


# -- fencing ---------------------------------------------------------------------------------------------------------


def test_guarded_write_is_fenced() -> None:
    """The guard rejects the older token."""
    guard, written = TokenGuard(), list[int]()

    def write(token: int) -> None:
        guard.accept(token)
        written.append(token)

    assert_fenced(write)
    assert_fenced(write)  # again, on the same storage

    assert written == sorted(written)
    assert len(written) == 2


def test_write_that_accepts_any_token_is_not_fenced() -> None:
    """The older one came through."""
    written: list[int] = []

    with pytest.raises(AssertionError, match="storage accepted token"):
        assert_fenced(written.append)

    newer, older = written
    assert newer > older > 0


def test_write_that_rejects_everything_is_not_fenced() -> None:
    """The newer one must come through."""

    def write(token: int) -> None:
        raise lockkit.StaleToken(str(token))

    with pytest.raises(AssertionError, match="rejected token"):
        assert_fenced(write)


def test_refusals_of_another_kind() -> None:
    """Storage has errors of its own; others go through."""
    last = 0

    def write(token: int) -> None:
        nonlocal last
        if token < last:
            raise PermissionError
        last = token

    assert_fenced(write, refused=PermissionError)
    assert_fenced(write, refused=(KeyError, PermissionError))
    with pytest.raises(PermissionError):
        assert_fenced(write)


@pytest.mark.asyncio
async def test_asyncio_writes_are_awaited() -> None:
    """In a loop, what it returns is awaited."""
    guard = TokenGuard()

    async def write(token: int) -> None:
        await asyncio.sleep(0)
        guard.accept(token)

    async def careless(token: int) -> None:
        del token

    async def closed(token: int) -> None:
        raise lockkit.StaleToken(str(token))

    await assert_fenced(write)
    with pytest.raises(AssertionError, match="accepted"):
        await assert_fenced(careless)
    with pytest.raises(AssertionError, match="rejected"):
        await assert_fenced(closed)


def test_asyncio_writes_without_a_loop_are_checked_at_once() -> None:
    """Nothing to forget to await."""

    async def careless(token: int) -> None:
        del token

    with pytest.raises(AssertionError, match="accepted"):
        assert_fenced(careless)
