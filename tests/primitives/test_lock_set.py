"""Several locks at once: order, all or nothing, and what is left when something strikes halfway."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pickle
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import inf
from types import ModuleType
from typing import Any

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import Busy, Grant, Request
from lockkit.engine.acquisition import UNDO_SECONDS_MIN
from lockkit.engine.cleanup import RELEASE_SECONDS
from lockkit.errors import BackendUnavailable, ConfigurationError, LockLost, LockTimeout
from lockkit.primitives.lock_set import NAMES_MAX
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, monotonic
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import wait_until
from tests.engine.scripted import ScriptedBackend, fail, once, scripted
from tests.tries import until_async

DOWN = BackendUnavailable("down")


def space(backend: ScriptedBackend) -> str:
    """Name what another client must join to share its locks."""
    return backend.url.removeprefix("memory://")


def held(client: lockkit.Client, *names: str) -> list[str]:
    """Return those of the names that are held by anybody."""
    return [name for name in names if client.holders(name)]


def state(leases: lockkit.LeaseSet) -> tuple[bool, bool]:
    """Return whether a set is held, and whether it is lost."""
    return leases.held, leases.lost


def asked(backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each request is added."""
    names: list[str] = []
    original = backend.try_acquire

    async def note(request: Request) -> Grant | Busy:
        names.append(request.name)
        return await original(request)

    monkeypatch.setattr(backend, "try_acquire", note)
    return names


# -- which locks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [scripted, partial(scripted, AsyncioRuntime())])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "at least one"),
        ("acct:1", "single str"),
        (b"acct:1", "single bytes"),
        (7, "not int"),
        ([f"n{number}" for number in range(NAMES_MAX + 1)], f"at most {NAMES_MAX}"),
        (["a", ""], "empty"),
        (["a", 7], "must be a str"),
    ],
)
def test_wrong_names_are_refused(make: Callable[[], tuple[Any, ScriptedBackend]], names: object, message: str) -> None:
    """At once, with nothing sent."""
    client, backend = make()

    with pytest.raises(ConfigurationError, match=message):
        client.locks(names)

    assert backend.calls == []


@pytest.mark.parametrize("options", [{"ttl": -1}, {"timeout": -1}, {"on_lost": 7}, {"metadata": 7}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """At the call that brought them in."""
    client, _ = scripted()

    with pytest.raises(ConfigurationError):
        client.locks(["a"], **options)


def test_a_hundred_names_are_accepted() -> None:
    """The largest set; the same name again does not count."""
    client, _ = scripted()
    names = [f"n{number}" for number in range(NAMES_MAX)]

    with client.locks([*names, "n0"]) as leases:
        assert len(leases) == NAMES_MAX


@pytest.mark.parametrize("module", [lockkit, aio])
def test_locks_of_both_apis_do_not_mix(module: ModuleType) -> None:
    """Nor do locks of the other one."""
    sync_lock = lockkit.connect("memory://mixed").lock("a")
    aio_lock = aio.connect("memory://mixed").lock("a")
    other = aio_lock if module is lockkit else sync_lock

    for locks in ([sync_lock, aio_lock], [other], ["a"]):
        with pytest.raises(ConfigurationError, match="same API"):
            module.locks(locks)
    wrongs: list[Any] = [[], "a", sync_lock]
    for wrong in wrongs:
        with pytest.raises(ConfigurationError):
            module.locks(wrong)


def test_order_is_by_bytes_whatever_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """UTF-8 bytes, not the code units of UTF-16, and not what a locale says; each name once."""
    client, backend = scripted()
    names = asked(backend, monkeypatch)
    given = ["é", "z", "\U0001f600", "\uffff", "Z", "a", "z"]

    with client.locks(given, timeout=PATIENCE) as leases:
        assert [lease.name for lease in leases] == names
        assert leases.names == tuple(names)

    assert names == ["Z", "a", "z", "é", "\uffff", "\U0001f600"]


def test_same_lock_of_two_clients_is_one() -> None:
    """It would wait for itself."""
    first, second = lockkit.connect("memory://twice"), lockkit.connect("memory://twice")

    with lockkit.locks([first.lock("a"), second.lock("a")], timeout=PATIENCE) as leases:
        assert len(leases) == 1
        assert leases[first.lock("a")] is leases[second.lock("a")] is leases["a"]


def test_same_lock_of_clients_with_different_options_is_refused() -> None:
    """Whether the options matter is more than lockkit can tell: neither waits for itself, nor is one left out."""
    first, second = lockkit.connect("memory://twice"), lockkit.connect("memory://twice", ttl=7)

    with pytest.raises(ConfigurationError, match="cannot tell"):
        lockkit.locks([first.lock("a"), second.lock("a")])


def test_same_name_at_two_backends_is_two_locks() -> None:
    """Sorted by URL; the name alone does not say which."""
    near, far = lockkit.connect("memory://near"), lockkit.connect("memory://far")
    locks = [near.lock("a"), far.lock("a"), far.lock("b")]

    with lockkit.locks(locks, timeout=PATIENCE) as leases:
        assert [leases[lock].name for lock in locks] == ["a", "a", "b"]
        assert list(leases) == [leases[locks[1]], leases[locks[0]], leases[locks[2]]]
        for lookup in (lambda: leases["a"], lambda: leases.tokens):
            with pytest.raises(ConfigurationError, match="several locks of the set have the name"):
                lookup()
        assert held(near, "a") == ["a"]
        assert held(far, "a", "b") == ["a", "b"]

    assert held(near, "a") + held(far, "a", "b") == []


# -- the leases ------------------------------------------------------------------------------------------------------


def test_leases_are_found_by_name_and_by_lock() -> None:
    """Each has its own token; the set has none."""
    client, _ = scripted()

    with client.locks(["b", "a"], timeout=PATIENCE) as leases:
        assert leases["a"].name == "a"
        assert leases[client.lock("b")] is leases["b"]
        assert leases.tokens == {"a": leases["a"].token, "b": leases["b"].token}
        # As the error of a set that is to be pickled advises.
        assert pickle.loads(pickle.dumps(leases.tokens)) == leases.tokens  # noqa: S301
        assert "a" in leases
        assert "c" not in leases
        assert leases["b"] in leases
        assert client.lock("c") not in leases
        assert leases[client.lock("a")].held
        for unknown in ("c", client.lock("c"), 7):
            with pytest.raises(KeyError):
                leases[unknown]
        assert "'a', 'b'" in repr(leases)
        with pytest.raises(TypeError, match="pickled"):
            leases.__reduce__()


def test_set_is_held_as_long_as_all_are() -> None:
    """Remaining is the least; what asks the backend asks for each."""
    client, _ = scripted()
    leases = lockkit.locks([client.lock("a", ttl=60), client.lock("b", ttl=30)], timeout=PATIENCE).acquire()

    assert state(leases) == (True, False)
    assert leases.confirm()
    assert 25 < leases.remaining() < 30
    leases.extend(100)
    assert leases.remaining() > 60
    leases.check()

    leases.release()

    assert state(leases) == (False, False)
    assert leases.remaining() == 0.0
    assert not leases.confirm()
    for call in (leases.check, leases.extend):
        with pytest.raises(LockLost, match="released"):
            call()
    leases.release()
    assert held(client, "a", "b") == []


def test_extend_refuses_a_wrong_ttl_before_anything_is_sent() -> None:
    """The least ttl may differ between backends: none is extended if one cannot be."""
    (client, backend), (other, strict) = scripted(), scripted()
    strict.capabilities = replace(strict.capabilities, min_ttl=5.0)
    with lockkit.locks([client.lock("a"), other.lock("b")], timeout=PATIENCE) as leases:
        for wrong in (-1, 2):
            with pytest.raises(ConfigurationError):
                leases.extend(wrong)
        assert "renew" not in backend.calls
    client.close()
    other.close()


def test_loss_of_one_is_loss_of_the_set() -> None:
    """The callback is called once, with the lease; leaving the block raises, and the other is released."""
    client, _ = scripted()
    calls: list[tuple[str, str]] = []
    told = threading.Event()

    def on_lost(lease: lockkit.Lease, reason: str) -> None:
        calls.append((lease.name, reason))
        told.set()

    with (  # noqa: PT012 - the block is what is tested
        pytest.raises(LockLost, match="'b'"),
        client.locks(["a", "b"], timeout=PATIENCE, on_lost=on_lost) as leases,
    ):
        client.break_lock("b")
        assert not leases.confirm()
        assert leases.lost
        assert not leases.held
        assert leases.remaining() == 0.0
        with pytest.raises(LockLost, match="'b'"):
            leases.check()
        assert told.wait(PATIENCE)
        assert leases["a"].held

    assert len(calls) == 1
    assert calls[0][0] == "b"
    assert held(client, "a", "b") == []


def test_callback_is_called_once_for_all_losses() -> None:
    """It means "stop", and that does not happen twice."""
    client, _ = scripted()
    calls: list[str] = []
    each: list[str] = []
    told = threading.Event()

    def note(lease: lockkit.Lease, _: str) -> None:
        each.append(lease.name)
        if len(each) == 2:
            told.set()

    with client.locks(["a", "b"], timeout=PATIENCE, raise_on_lost=False) as leases:
        leases.on_lost(lambda lease, _: calls.append(lease.name))
        for lease in leases:
            lease.on_lost(note)
        client.break_lock("a")
        client.break_lock("b")
        assert not leases.confirm()
        assert told.wait(PATIENCE)

    assert sorted(each) == ["a", "b"]
    assert len(calls) <= 1  # its thread may not have run yet
    wait_until(lambda: None if calls else "not called")
    assert len(calls) == 1


def test_decorator_fills_in_the_names_of_semaphores_too() -> None:
    """They are apart from the locks of the same name."""
    with lockkit.connect("memory://set-with-semaphore") as client:

        @lockkit.locks([client.semaphore("x:{number}", 2), client.lock("x:{number}")])
        def look(number: int) -> tuple[int, bool]:
            return client.semaphore(f"x:{number}", 2).available(), client.lock(f"x:{number}").locked()

        assert look(7) == (1, True)
        assert client.semaphore("x:7", 2).available() == 2


def test_permit_in_a_set_is_found_by_the_semaphore_s_name() -> None:
    """As a lease by that of its lock; with a lock of the same name, by the object."""
    with lockkit.connect("memory://set-with-permits") as client:
        semaphore, lock = client.semaphore("x", 2), client.lock("x")

        with lockkit.locks([semaphore, client.lock("y")]) as leases:
            assert leases.names == ("x", "y")
            assert leases["x"].slot == 0
            assert leases.tokens == {"x": leases["x"].token, "y": leases["y"].token}

        with lockkit.locks([semaphore, lock]) as leases:
            assert (leases[semaphore].mode, leases[lock].mode) == ("permit", "exclusive")
            with pytest.raises(lockkit.ConfigurationError, match="have the name 'x'"):
                leases["x"]


@pytest.mark.parametrize("order", [("read", "write"), ("write", "read"), ("read", "lock")])
def test_set_for_reading_and_writing_writes(order: tuple[str, str]) -> None:
    """A lock that is there twice counts once, as the stronger of the two, in whichever order."""
    with lockkit.connect("memory://read-and-write") as client:
        rwlock = client.rwlock("a")
        sides = {"read": rwlock.read(), "write": rwlock.write(), "lock": client.lock("a")}

        with lockkit.locks([sides[side] for side in order]) as leases:
            assert len(leases) == 1
            assert leases["a"].mode == "exclusive"


def test_reentrant_locks_are_counted() -> None:
    """The inner set is released, and the outer block still holds."""
    client, _ = scripted()
    locks = client.locks(["a", "b"], timeout=PATIENCE, reentrant=True)

    with client.lock("b", reentrant=True) as outer:
        with locks as first:
            with locks as second:
                assert first["b"] is second["b"] is outer
            assert first.held
            assert not second.held
            second.release()
            assert first.held
        assert held(client, "a", "b") == ["b"]
        assert outer.held
    assert held(client, "a", "b") == []


def test_set_that_another_thread_enters_does_not_count_for_this_one() -> None:
    """As a single lease that was handed over: this thread then reads under a lease of its own."""
    client, _ = scripted()
    rwlock = client.rwlock("a", timeout=PATIENCE)
    leases = lockkit.locks([rwlock.read(), client.lock("b")], timeout=PATIENCE).acquire()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(leases.__enter__).result(PATIENCE)

        with rwlock.read() as own:
            assert own is not leases["a"]

        pool.submit(leases.__exit__, None, None, None).result(PATIENCE)
    assert held(client, "a", "b") == []


def test_decorated_function_holds_all_locks() -> None:
    """The names come from the arguments; two that are equal are one."""
    client, _ = scripted()

    @client.locks(["acct:{source}", "acct:{target}"], timeout=PATIENCE)  # type: ignore[untyped-decorator]
    def transfer(source: int, target: int) -> list[str]:
        return held(client, f"acct:{source}", f"acct:{target}")

    assert transfer(2, 1) == ["acct:2", "acct:1"]
    assert transfer(2, target=2) == ["acct:2", "acct:2"]
    assert held(client, "acct:1", "acct:2") == []
    with pytest.raises(ConfigurationError, match="no parameter"):
        client.locks(["a", "{other}"])(transfer)


def test_decorated_coroutine_function_holds_all_locks() -> None:
    """Of both APIs; what would run without the locks is refused."""

    async def check(client: lockkit.Client | aio.Client) -> None:
        decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = client.locks(["a", "b"], timeout=PATIENCE)

        async def names() -> list[str]:
            await asyncio.sleep(0)
            return sorted(record.grant.name for record in client._engine.leases.records.values())

        @functools.wraps(names)
        def wrapper() -> Coroutine[Any, Any, list[str]]:
            return names()

        assert await decorate(names)() == ["a", "b"]
        assert not client._engine.leases.records
        with pytest.raises(ConfigurationError, match="wraps a coroutine"):
            decorate(wrapper)

    asyncio.run(check(scripted()[0]))
    asyncio.run(check(scripted(AsyncioRuntime())[0]))
    with pytest.raises(ConfigurationError, match="not a coroutine function"):
        scripted(AsyncioRuntime())[0].locks(["a"])(state)


# -- all or nothing --------------------------------------------------------------------------------------------------


def test_timeout_names_the_busy_lock_and_leaves_nothing() -> None:
    """One timeout for all; try_acquire returns None."""
    client, backend = scripted()
    other, _ = scripted(space=space(backend))

    with other.lock("b"):
        with pytest.raises(LockTimeout, match=r"3 locks.*lock 'b'.*busy") as caught:
            client.locks(["c", "b", "a"], timeout=0.05).acquire()
        assert caught.value.name == "b"
        assert caught.value.holder is not None
        assert caught.value.holder.pid == os.getpid()
        assert held(client, "a", "c") == []
        assert client.locks(["a", "b"]).try_acquire() is None
        assert held(client, "a", "b", "c") == ["b"]
    leases = client.locks(["c", "b", "a"]).try_acquire(PATIENCE)
    assert leases is not None
    leases.release()


class SlowServer(BlockingRuntime):
    """Real time, and what each answer is made to take."""

    added = 0.0

    def now(self) -> float:
        """See `Runtime.now`."""
        return monotonic() + self.added


def test_one_timeout_is_for_all() -> None:
    """What the first took is missing to the second."""
    clock = SlowServer()
    client, backend = scripted(clock)
    other, _ = scripted(space=space(backend))

    def answer() -> None:
        clock.added += 3.0

    with other.lock("b"):
        backend.after["try_acquire"] = answer
        with pytest.raises(LockTimeout, match="'b'"):
            client.locks(["a", "b"], timeout=3.05, ttl=60).acquire()

    assert "wait" not in backend.calls


def test_timeout_of_the_set_counts_not_that_of_its_locks() -> None:
    """The locks bring their ttl and the rest."""
    client, backend = scripted()
    other, _ = scripted(space=space(backend))

    with other.lock("a"), pytest.raises(LockTimeout):
        lockkit.locks([client.lock("a", timeout=None)], timeout=0).acquire()


def test_waiting_keeps_the_smaller_ones() -> None:
    """So nobody starves: a waiter keeps what it has, and its place in the queue."""
    client, backend = scripted()
    other, _ = scripted(space=space(backend))
    blocker = other.lock("b").acquire(PATIENCE)
    result: list[lockkit.LeaseSet] = []
    waiter = threading.Thread(target=lambda: result.append(client.locks(["a", "b", "c"]).acquire()))
    waiter.start()
    wait_until(lambda: None if client._engine.acquisitions.waiting_count("b") else "it does not wait yet")

    assert held(other, "a", "b", "c") == ["a", "b"]
    blocker.release()
    waiter.join(PATIENCE)

    assert held(other, "a", "b", "c") == ["a", "b", "c"]
    result[0].release()


def test_what_was_lost_while_waiting_is_noticed_after_the_last_grant() -> None:
    """The first ran out while the second was waited for: the body must not run."""
    client, backend = scripted()
    other, _ = scripted(space=space(backend))
    blocker = other.lock("b").acquire(PATIENCE)
    caught: list[BaseException] = []

    def acquire() -> None:
        try:
            client.locks(["a", "b"]).acquire()
        except LockLost as error:
            caught.append(error)

    waiter = threading.Thread(target=acquire)
    waiter.start()
    wait_until(lambda: None if client._engine.acquisitions.waiting_count("b") else "it does not wait yet")
    (record,) = client._engine.leases.all()
    client._engine.leases.lose(record, "taken")
    blocker.release()
    waiter.join(PATIENCE)

    assert "lost lock 'a'" in str(caught[0])
    assert held(other, "b") == []


def test_outage_halfway_leaves_nothing() -> None:
    """The second is not answered: the first is released."""
    client, backend = scripted()
    calls: list[None] = []

    def second_fails() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise DOWN

    backend.before["try_acquire"] = second_fails

    with pytest.raises(BackendUnavailable):
        client.locks(["a", "b"], timeout=0).acquire()

    assert held(client, "a", "b") == []


def test_undoing_goes_on_in_the_background() -> None:
    """The backend is away when the first lock is to be given back."""
    client, backend = scripted()
    other, _ = scripted(space=space(backend))
    backend.before["release"] = once(fail(DOWN))

    with other.lock("b"), pytest.raises(LockTimeout):
        client.locks(["a", "b"], ttl=300, timeout=0).acquire()

    wait_until(lambda: "still held" if held(client, "a") else None)
    assert backend.calls.count("release") == 2


# -- release ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_undoing_takes_no_longer_than_the_caller_has_time(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    """Half a second beyond the timeout, as for one lock, also if the server hangs when the others are given back."""
    client, backend = scripted()
    other, _ = scripted(space=space(backend))
    left: list[float] = []
    release = backend.release

    async def hang(_: Grant, answer_by: float = inf) -> bool:
        if threading.current_thread() is threading.main_thread():  # else it goes on in the background
            left.append(answer_by - monotonic())
        raise BackendUnavailable("hangs")

    monkeypatch.setattr(backend, "release", hang)
    with other.lock("c"), pytest.raises(LockTimeout):
        client.locks(["a", "b", "c"]).acquire(timeout=timeout)
    assert len(left) == 2
    assert max(left) < 0.5 + timeout

    monkeypatch.setattr(backend, "release", release)
    wait_until(lambda: str(held(client, "a", "b")) if held(client, "a", "b") else None)


def test_release_is_in_reverse_order_and_tries_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is raised, the others are its notes; a second call sends what was not answered."""
    client, backend = scripted()
    leases = client.locks(["a", "b", "c", "d"], timeout=PATIENCE).acquire()
    released: list[str] = []
    original = backend.release

    async def note(grant: Grant, answer_by: float = inf) -> bool:
        released.append(grant.name)
        if grant.name == "b" and released.count("b") == 1:
            raise DOWN
        return await original(grant, answer_by)

    monkeypatch.setattr(backend, "release", note)
    client.break_lock("c")

    with pytest.raises(LockLost, match="'c'") as caught:
        leases.release()

    assert released == ["d", "b", "a"]
    assert any("'b'" in note for note in caught.value.__notes__)
    assert held(client, "a", "b", "c", "d") == ["b"]
    leases.release()
    assert held(client, "b") == []
    leases.release()
    assert released == ["d", "b", "a", "b"]


def test_releases_at_a_server_that_hangs_share_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving a block takes about as long as with one lock, not that long for each."""
    clock = SlowServer()
    client, backend = scripted(clock)
    tried: list[int] = []

    async def hang(grant: Grant, answer_by: float = inf) -> bool:
        tried.append(grant.token)
        clock.added += max(0.0, answer_by - clock.now())
        raise DOWN

    names = [f"n{number}" for number in range(20)]
    leases = client.locks(names, ttl=300, timeout=PATIENCE).acquire()
    monkeypatch.setattr(backend, "release", hang)
    before = clock.added

    with pytest.raises(BackendUnavailable):
        leases.release()

    assert len(set(tried)) == len(names)
    assert clock.added - before <= RELEASE_SECONDS + len(names) * UNDO_SECONDS_MIN
    monkeypatch.undo()
    leases.release()
    assert held(client, *names) == []


def test_error_of_the_body_goes_on_with_notes() -> None:
    """A release error never hides it."""
    client, _ = scripted()

    with pytest.raises(ValueError, match="body") as caught, client.locks(["a", "b"], timeout=PATIENCE):  # noqa: PT012
        client.break_lock("a")
        client.break_lock("b")
        raise ValueError("body")

    assert [name for name in ("'b'", "'a'") for note in caught.value.__notes__ if name in note] == ["'b'", "'a'"]


def test_unreachable_at_the_end_of_a_good_body_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The work was protected; what is held still is released in the background."""
    client, backend = scripted()
    with caplog.at_level(logging.WARNING, "lockkit"), client.locks(["a", "b"], ttl=300, timeout=PATIENCE):
        backend.before["release"] = once(fail(DOWN))

    assert "could not release lock 'b'" in caplog.text
    wait_until(lambda: "still held" if held(client, "a", "b") else None)


# -- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["block", "release", "undo"])
def test_interrupt_while_one_is_released_releases_the_others(end: str) -> None:
    """At the end of a block, by `release`, and when a set that timed out is undone."""
    client, backend = scripted()
    other, _ = scripted(space=space(backend))
    locks = client.locks(["a", "b", "c"], timeout=0)
    backend.before["release"] = once(fail(KeyboardInterrupt()))

    if end == "block":
        locks.__enter__()
        with pytest.raises(KeyboardInterrupt):
            locks.__exit__(None, None, None)
    elif end == "release":
        leases = locks.acquire()
        with pytest.raises(KeyboardInterrupt):
            leases.release()
    else:
        with other.lock("c"), pytest.raises(KeyboardInterrupt):
            locks.acquire()

    assert held(client, "a", "b", "c") == []
    assert not client._engine.leases.records


def test_interrupt_while_waiting_for_one_releases_the_others() -> None:
    """Ctrl-C in the wait for the last."""
    client, backend = scripted()
    other, _ = scripted(space=space(backend))
    backend.before["wait"] = once(fail(KeyboardInterrupt()))

    with other.lock("c"), pytest.raises(KeyboardInterrupt):
        client.locks(["a", "b", "c"]).acquire()

    assert held(client, "a", "b", "c") == []


# -- asyncio -----------------------------------------------------------------------------------------------------------


async def aio_held(client: aio.Client, *names: str) -> list[str]:
    """As `held`."""
    return [name for name in names if await client.holders(name)]


def test_cancelled_acquisition_leaves_none_held() -> None:
    """While it waits for the last, holding the others; cancelled twice."""

    async def main() -> None:
        client, _ = scripted(AsyncioRuntime())
        async with client.lock("c"):
            task = asyncio.create_task(client.locks(["a", "b", "c"]).acquire())
            await until_async(lambda: bool(client._engine.acquisitions.waiting_count("c")))
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_async(lambda: len(client._engine.leases.records) == 1)
            assert await aio_held(client, "a", "b", "c") == ["c"]
        assert await aio_held(client, "c") == []

    asyncio.run(main())


def test_cancellation_at_each_step_leaves_none_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an acquisition, its block and its release, after so many steps of the event loop."""

    async def steps(count: int) -> bool:
        client, backend = scripted(AsyncioRuntime())
        original, release = backend.try_acquire, backend.release

        async def slow(request: Request) -> Grant | Busy:
            outcome = await original(request)
            await asyncio.sleep(0)
            return outcome

        async def slow_release(grant: Grant, answer_by: float = inf) -> bool:
            await asyncio.sleep(0)
            return await release(grant, answer_by)

        monkeypatch.setattr(backend, "try_acquire", slow)
        monkeypatch.setattr(backend, "release", slow_release)

        async def block() -> None:
            async with client.locks(["a", "b"]):
                await asyncio.sleep(0)

        task = asyncio.create_task(block())
        for _ in range(count):
            await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert not finished
        assert await aio_held(client, "a", "b") == [], count
        assert not client._engine.leases.records, count
        return finished

    count = 0
    while not asyncio.run(steps(count)):
        count += 1
    assert count > 4


def test_cancel_on_lost_cancels_the_body_and_releases_the_others() -> None:
    """The loss of any is raised in place of the cancellation."""

    async def main() -> None:
        client, _ = scripted(AsyncioRuntime())
        with pytest.raises(LockLost, match="'b'"):  # noqa: PT012 - the block is what is tested
            async with client.locks(["a", "b"], cancel_on_lost=True, raise_on_lost=False) as leases:
                await client.break_lock("b")
                assert not await leases.confirm()
                await asyncio.sleep(PATIENCE)
        assert await aio_held(client, "a", "b") == []

    asyncio.run(main())


def test_across_asyncio_clients() -> None:
    """As in the sync API."""

    async def main() -> None:
        near, far = aio.connect("memory://aio-near"), aio.connect("memory://aio-far")
        async with aio.locks([near.lock("a"), far.lock("a")], timeout=PATIENCE) as leases:
            assert leases[near.lock("a")].token > 0
            assert await aio_held(far, "a") == ["a"]
            await leases.extend()
        assert await aio_held(far, "a") == []
        again = await aio.locks([near.lock("a")]).try_acquire(PATIENCE)
        assert again is not None
        await again.release()

    asyncio.run(main())
