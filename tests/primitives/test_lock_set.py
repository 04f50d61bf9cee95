"""Several locks at once: order, all or nothing, and what is left when something strikes halfway."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import pickle
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import Busy, Grant, Request
from lockkit.engine.cleanup import RELEASE_SECONDS
from lockkit.errors import BackendUnavailable, ConfigurationError, LockLost, LockTimeout
from lockkit.primitives.lock_set import NAMES_MAX
from lockkit.runtime import AsyncioRuntime, monotonic
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import MovableClock, fail, once, scripted
from tests.faces import both_faces, scripted_for
from tests.tries import until

DOWN = BackendUnavailable("down")


async def held(client: Any, *names: str) -> list[str]:  # noqa: ANN401 - with the interface of the async API
    """Return those of the names that are held by anybody."""
    return [name for name in names if await client.holders(name)]


def held_now(client: lockkit.Client, *names: str) -> list[str]:
    """As `held`, in the sync API."""
    return [name for name in names if client.holders(name)]


# -- which locks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", [lockkit, aio])
@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], {}, "at least one"),
        ("acct:1", {}, "single str"),
        (b"acct:1", {}, "single bytes"),
        (7, {}, "not int"),
        ([f"n{number}" for number in range(NAMES_MAX + 1)], {}, f"at most {NAMES_MAX}"),
        (["a", ""], {}, "empty"),
        (["a", 7], {}, "must be a str"),
        (["a"], {"ttl": -1}, "ttl"),
        (["a"], {"timeout": -1}, "timeout"),
        (["a"], {"on_lost": 7}, "on_lost"),
        (["a"], {"metadata": 7}, "metadata"),
    ],
)
def test_wrong_arguments_are_refused(api: ModuleType, names: object, options: dict[str, Any], message: str) -> None:
    """At the call that brought them in."""
    with pytest.raises(ConfigurationError, match=message):
        api.connect("memory://set-arguments").locks(names, **options)


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


@both_faces
async def test_order_is_by_bytes_whatever_was_given(driver: FaceDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """UTF-8 bytes, not the code units of UTF-16, and not what a locale says; each name once, of up to a hundred."""
    client, backend = scripted_for(driver)
    asked: list[str] = []
    original = backend.try_acquire

    async def note(request: Request) -> Grant | Busy:
        asked.append(request.name)
        return await original(request)

    monkeypatch.setattr(backend, "try_acquire", note)
    given = ["é", "z", "\U0001f600", "\uffff", "Z", "a", "z", *(f"b{number:02}" for number in range(NAMES_MAX - 6))]

    async with client, client.locks(given, timeout=PATIENCE) as leases:
        assert [lease.name for lease in leases] == asked
        assert leases.names == tuple(asked)
        assert len(leases) == NAMES_MAX

    assert [name for name in asked if not name.startswith("b")] == ["Z", "a", "z", "é", "\uffff", "\U0001f600"]


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
        assert held_now(near, "a") == ["a"]
        assert held_now(far, "a", "b") == ["a", "b"]

    assert held_now(near, "a") + held_now(far, "a", "b") == []


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


@both_faces
async def test_set_is_held_as_long_as_all_are(driver: FaceDriver) -> None:
    """Remaining is the least; what asks the backend asks for each."""
    client = await driver.connect(ttl=60)
    locks = client.locks(["a", "b"], timeout=PATIENCE)
    leases = await locks.acquire()
    await leases["b"].extend(30)

    assert (leases.held, leases.lost) == (True, False)
    assert await leases.confirm()
    assert 25 < leases.remaining() < 30
    await leases.extend(100)
    assert leases.remaining() > 60
    leases.check()

    await leases.release()

    assert (leases.held, leases.lost) == (False, False)
    assert leases.remaining() == 0.0
    assert not await leases.confirm()
    with pytest.raises(LockLost, match="released"):
        leases.check()
    with pytest.raises(LockLost, match="released"):
        await leases.extend()
    await leases.release()
    assert await held(client, "a", "b") == []
    again = await locks.try_acquire(PATIENCE)
    assert again is not None
    await again.release()


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


@both_faces
async def test_loss_of_one_is_loss_of_the_set(driver: FaceDriver) -> None:
    """Leaving the block raises, and the other is released. The callback is called once: "stop" happens once."""
    client = await driver.connect()
    calls: list[tuple[str, str]] = []
    each: list[str] = []

    with pytest.raises(LockLost, match="'b'"):  # noqa: PT012 - the block is what is tested
        async with client.locks(
            ["a", "b", "c"], timeout=PATIENCE, on_lost=lambda lease, reason: calls.append((lease.name, reason))
        ) as leases:
            for lease in leases:
                lease.on_lost(lambda lost, _: each.append(lost.name))
            await client.break_lock("b")
            assert not await leases.confirm()
            assert (leases.held, leases.lost, leases.remaining()) == (False, True, 0.0)
            with pytest.raises(LockLost, match="'b'"):
                leases.check()
            assert leases["a"].held
            await driver.eventually(lambda: len(calls) == 1, "the callback of the set")
            await client.break_lock("c")
            assert not await leases["c"].confirm()
            await driver.eventually(lambda: sorted(each) == ["b", "c"], "the callbacks of the leases")

    assert calls == [("b", "broken")]
    assert await held(client, "a", "b", "c") == []


def test_semaphores_in_a_set() -> None:
    """They are apart from the locks of the same name: the object tells which, and the decorator fills in both."""
    with lockkit.connect("memory://set-with-semaphore") as client:
        semaphore, lock = client.semaphore("x", 2), client.lock("x")

        @lockkit.locks([client.semaphore("{name}", 2), client.lock("{name}")])
        def look(name: str) -> tuple[int, bool]:
            return client.semaphore(name, 2).available(), client.lock(name).locked()

        assert look("x") == (1, True)
        assert semaphore.available() == 2
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


@both_faces
async def test_reentrant_locks_are_counted(driver: FaceDriver) -> None:
    """The inner set is released, and the outer block still holds."""
    client = await driver.connect()
    locks = client.locks(["a", "b"], timeout=PATIENCE, reentrant=True)

    async with client.lock("b", reentrant=True) as outer:
        async with locks as first:
            async with locks as second:
                assert first["b"] == second["b"] == outer
            assert first.held
            assert not second.held
            await second.release()
            assert first.held
        assert await held(client, "a", "b") == ["b"]
        assert outer.held
    assert await held(client, "a", "b") == []


@both_faces
async def test_outer_block_of_a_reentrant_lock_is_as_before_once_the_set_is_left(driver: FaceDriver) -> None:
    """It expects no beats, calls nobody of the set when it is lost, and can be handed over."""
    client = await driver.connect()
    told: list[str] = []
    locks = client.locks(["a", "b"], reentrant=True, stall=0.01, on_lost=lambda *_: told.append("set"))

    for end in ("lost", "handed over"):
        with pytest.raises(LockLost) if end == "lost" else nullcontext():
            async with client.lock("a", reentrant=True) as outer:
                async with locks as leases:
                    leases.on_lost(lambda *_: told.append("leases"))
                await driver.sleep(0.02)
                assert not outer.stalled
                if end == "handed over":
                    await outer.ticket(0.01)
                else:
                    outer.on_lost(lambda *_: told.append("outer"))
                    await client.break_lock("a")
                    assert not await outer.confirm()
                    await driver.eventually(lambda: "outer" in told, "the callback")

    assert told == ["outer"]


@both_faces
async def test_loss_of_an_entered_lease_within_a_set_is_told_to_the_set(driver: FaceDriver) -> None:
    """Until the set is left."""
    client = await driver.connect()
    told: list[str] = []

    with pytest.raises(LockLost):  # noqa: PT012 - the block is what is tested
        async with (
            client.lock("a", reentrant=True) as outer,
            client.locks(["a", "b"], reentrant=True, on_lost=lambda lease, _: told.append(lease.name)),
        ):
            await client.break_lock("a")
            assert not await outer.confirm()

    await driver.eventually(lambda: told == ["a"], "the callback")


@both_faces
async def test_decorated_function_holds_all_locks(driver: FaceDriver) -> None:
    """The names come from the arguments; two that are equal are one. What would run without the locks is refused."""
    client = await driver.connect()

    @client.locks(["acct:{source}", "acct:{target}"], timeout=PATIENCE)
    async def transfer(source: int, target: int) -> list[str]:
        return await held(client, f"acct:{source}", f"acct:{target}")

    @functools.wraps(transfer)
    def wrapper(source: int, target: int) -> Coroutine[Any, Any, list[str]]:
        return transfer(source, target)

    assert await transfer(2, 1) == ["acct:2", "acct:1"]
    assert await transfer(2, target=2) == ["acct:2", "acct:2"]
    assert await held(client, "acct:1", "acct:2") == []
    with pytest.raises(ConfigurationError, match="no parameter"):
        client.locks(["a", "{other}"])(transfer)
    with pytest.raises(ConfigurationError, match="wraps a coroutine"):
        client.locks(["a"])(wrapper)


def test_plain_functions_are_decorated_by_the_sync_api_alone() -> None:
    """In the async API nothing could wait."""
    with lockkit.connect("memory://set-plain") as client:
        assert client.locks(["a{number}", "b"])(lambda number: held_now(client, f"a{number}", "b"))(7) == ["a7", "b"]
    with pytest.raises(ConfigurationError, match="not a coroutine function"):
        aio.connect("memory://set-plain").locks(["a"])(lambda: None)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])  # noqa: S301 - our own
@pytest.mark.parametrize("make", [lambda client: client.locks(["a", "b"]), lambda client: client.once("a", keep=60)])
def test_what_a_block_is_inside_of_is_pickled(
    make: Callable[[Any], Any], duplicate: Callable[[Any], Any], tmp_path: Path
) -> None:
    """As a lock is, without the block."""

    async def main() -> None:
        async with aio.connect(f"file://{tmp_path}") as client, (made := make(client)):
            assert repr(duplicate(made)) == repr(made)

    with lockkit.connect(f"file://{tmp_path}") as client, (made := make(client)):
        assert repr(duplicate(made)) == repr(made)
    asyncio.run(main())


# -- all or nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["answer", "wait", "release"])
def test_what_strikes_halfway_leaves_nothing(failure: str) -> None:
    """The second is not answered; Ctrl-C in the wait for the last; or no answer to the release of the first."""
    client, backend = scripted()
    other, _ = scripted(space=backend.space)
    calls: list[None] = []

    def second_fails() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise DOWN

    expected: type[BaseException] = LockTimeout
    with other.lock("c"):
        if failure == "answer":
            expected, backend.before["try_acquire"] = BackendUnavailable, second_fails
        elif failure == "wait":
            expected, backend.before["wait"] = KeyboardInterrupt, once(fail(KeyboardInterrupt()))
        else:
            backend.before["release"] = once(fail(DOWN))
        with pytest.raises(expected):
            client.locks(["a", "b", "c"], ttl=300, timeout=PATIENCE if failure == "wait" else 0).acquire()

    until(lambda: not held_now(client, "a", "b", "c"))  # the background sends a release again


def test_one_timeout_is_for_all() -> None:
    """What the first took is missing to the second."""
    clock = MovableClock()
    client, backend = scripted(clock)
    other, _ = scripted(space=backend.space)

    def answer() -> None:
        clock.added += 3.0

    with other.lock("b"):
        backend.after["try_acquire"] = answer
        with pytest.raises(LockTimeout, match="'b'"):
            lockkit.locks([client.lock(name, ttl=60, timeout=None) for name in "ab"], timeout=3.05).acquire()

    assert "wait" not in backend.calls


@both_faces
async def test_waiting_keeps_the_smaller_ones(driver: FaceDriver) -> None:
    """So nobody starves: a waiter keeps what it has, and its place in the queue."""
    client, other = await driver.connect(), await driver.connect()
    blocker = await other.lock("b").acquire()
    waiter = driver.spawn(client.locks(["a", "b", "c"]).acquire())
    await driver.until_waiting(client, "b")

    assert await held(other, "a", "b", "c") == ["a", "b"]
    await blocker.release()
    leases = await waiter.result()

    assert await held(other, "a", "b", "c") == ["a", "b", "c"]
    await leases.release()


@both_faces
async def test_what_was_lost_while_waiting_is_noticed_after_the_last_grant(driver: FaceDriver) -> None:
    """The first ran out while the second was waited for: the body must not run."""
    client, other = await driver.connect(), await driver.connect()
    blocker = await other.lock("b").acquire()
    waiter = driver.spawn(client.locks(["a", "b"]).acquire())
    await driver.until_waiting(client, "b")
    (record,) = client._engine.leases.all()
    client._engine.leases.lose(record, "taken")
    await blocker.release()

    with pytest.raises(LockLost, match="lost lock 'a'"):
        await waiter.result()
    assert await held(other, "b") == []


# -- release ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_undoing_takes_no_longer_than_the_caller_has_time(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    """Half a second beyond the timeout, as for one lock, also if the server hangs when the others are given back."""
    client, backend = scripted()
    other, _ = scripted(space=backend.space)
    left: list[float] = []

    async def hang(_: Grant, answer_by: float = inf) -> bool:
        if threading.current_thread() is threading.main_thread():  # else it goes on in the background
            left.append(answer_by - monotonic())
        raise BackendUnavailable("hangs")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "release", hang)
        with other.lock("c"), pytest.raises(LockTimeout):
            client.locks(["a", "b", "c"]).acquire(timeout=timeout)
    assert len(left) == 2
    assert max(left) < 0.5 + timeout
    until(lambda: not held_now(client, "a", "b"))


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
    assert held_now(client, "a", "b", "c", "d") == ["b"]
    leases.release()
    assert held_now(client, "b") == []
    leases.release()
    assert released == ["d", "b", "a", "b"]


@pytest.mark.parametrize("end", ["release", "block", "undo", "slow"])
def test_releases_at_a_server_that_hangs_share_one_time(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """As long as with one lock, not that long for each: those for which no time is left are not asked for."""
    clock = MovableClock()
    client, backend = scripted(clock)
    names = [f"n{number:02}" for number in range(20)]
    locks = client.locks(names, ttl=300, timeout=1.0)
    original, release = backend.try_acquire, backend.release

    async def hang(grant: Grant, answer_by: float = inf) -> bool:
        if threading.current_thread() is threading.main_thread():  # else in the background
            clock.added += max(0.0, answer_by - clock.now())
        if end == "slow":
            return await release(grant)
        raise DOWN

    async def hang_at_the_last(request: Request) -> Grant | Busy:
        if request.name == names[-1]:
            clock.added += max(0.0, request.answer_by - clock.now())
            raise DOWN
        return await original(request)

    leases = None if end == "undo" else locks.acquire()
    monkeypatch.setattr(backend, "release", hang)
    monkeypatch.setattr(backend, "try_acquire", hang_at_the_last)
    before = clock.added
    if leases is None:
        with pytest.raises(BackendUnavailable):
            locks.acquire()
    elif end == "block":
        with leases:
            pass
    else:
        with pytest.raises(BackendUnavailable):
            leases.release()

    assert clock.added - before <= (1.5 if end == "undo" else RELEASE_SECONDS)
    assert not client._engine.leases.records
    monkeypatch.undo()
    if end == "release":
        assert leases is not None
        leases.release()
        assert held_now(client, *names) == []
    until(lambda: not held_now(client, *names[:-1]))


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
    until(lambda: not held_now(client, "a", "b"))


# -- interrupts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["block", "release", "undo"])
def test_interrupt_while_one_is_released_releases_the_others(end: str) -> None:
    """At the end of a block, by `release`, and when a set that timed out is undone."""
    client, backend = scripted()
    other, _ = scripted(space=backend.space)
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

    assert held_now(client, "a", "b", "c") == []
    assert not client._engine.leases.records


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_cancel_on_lost_cancels_the_body_and_releases_the_others() -> None:
    """The loss of any is raised in place of the cancellation."""

    async def main() -> None:
        client, _ = scripted(AsyncioRuntime())
        with pytest.raises(LockLost, match="'b'"):  # noqa: PT012 - the block is what is tested
            async with client.locks(["a", "b"], cancel_on_lost=True, raise_on_lost=False) as leases:
                await client.break_lock("b")
                assert not await leases.confirm()
                await asyncio.sleep(PATIENCE)
        assert await held(client, "a", "b") == []

    asyncio.run(main())
