"""A lock in the sync API: attempts, decorators that skip, the client's timeout, and parameters of other libraries."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import lockkit
from lockkit.testing.timing import PATIENCE


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A client of a space of its own."""
    with lockkit.connect("memory://sync-lock", ttl=PATIENCE) as client:
        yield client


# -- attempt -----------------------------------------------------------------------------------------------------------


def test_attempt_gives_the_lease_and_releases_it(client: lockkit.Client) -> None:
    """A free lock is held inside the block, and free after it."""
    with client.lock("a").attempt() as lease:
        assert lease is not None
        assert [holder.owner for holder in client.holders("a")] == [lease.owner]

    assert client.holders("a") == []


def test_attempt_on_a_busy_lock_runs_the_body_without_a_lease(client: lockkit.Client) -> None:
    """None stands for "busy", and leaving the block releases nothing of the holder's."""
    with client.lock("a") as held:
        with client.lock("a").attempt() as lease:
            assert lease is None
        with client.lock("a").attempt(timeout=0.01) as lease:
            assert lease is None

        assert held.confirm()


def test_attempt_raises_the_loss_as_a_with_block_does(client: lockkit.Client) -> None:
    """The body ended well, but was not protected to its end."""
    with pytest.raises(lockkit.LockLost), client.lock("a").attempt():
        client.break_lock("a")


def test_attempt_lets_a_timeout_of_the_body_through(client: lockkit.Client) -> None:
    """Only the attempt's own wait ends in None."""
    with client.lock("b"), pytest.raises(lockkit.LockTimeout, match="'b'"), client.lock("a").attempt():
        client.lock("b").acquire(timeout=0)

    assert client.holders("a") == []


def test_one_attempt_in_several_threads_keeps_their_leases_apart(client: lockkit.Client) -> None:
    """A thread that got nothing leaves the other's lease alone."""
    attempt = client.lock("a").attempt()
    seen: list[object] = []

    def other() -> None:
        with attempt as lease:
            seen.append(lease)

    with attempt as lease:
        assert lease is not None
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(PATIENCE)

        assert seen == [None]
        assert lease.held
    assert client.holders("a") == []


def test_attempt_checks_its_timeout_when_it_is_made(client: lockkit.Client) -> None:
    """Not when it is entered."""
    with pytest.raises(lockkit.ConfigurationError, match="timeout"):
        client.lock("a").attempt(timeout=-1)


# -- on_busy ----------------------------------------------------------------------------------------------------------


def test_skipping_function_returns_none_while_the_lock_is_busy(client: lockkit.Client) -> None:
    """It does not run then; once the lock is free it runs and returns its result."""
    calls: list[int] = []

    @client.lock("job:{number}", on_busy="skip")
    def job(number: int) -> str:
        calls.append(number)
        return "done"

    with client.lock("job:1"):
        assert job(1) is None
        assert job(2) == "done"
    assert job(1) == "done"
    assert calls == [2, 1]


def test_skipping_coroutine_function_returns_none_while_the_lock_is_busy(client: lockkit.Client) -> None:
    """The call gives a coroutine as ever, and awaiting that gives None."""

    @client.lock("job", timeout=0, on_busy="skip")
    async def job() -> str:
        return "done"

    with client.lock("job"):
        assert _run(job()) is None
    assert _run(job()) == "done"


def test_skipping_function_lets_a_timeout_of_its_body_through(client: lockkit.Client) -> None:
    """The function ran: its error is its own."""

    @client.lock("job", on_busy="skip")
    def job() -> None:
        client.lock("inner").acquire(timeout=0)

    with client.lock("inner"), pytest.raises(lockkit.LockTimeout, match="'inner'"):
        job()


def test_decorated_function_raises_by_default(client: lockkit.Client) -> None:
    """As ``on_busy="raise"`` says."""
    for lock in (client.lock("job", timeout=0), client.lock("job", timeout=0, on_busy="raise")):
        with client.lock("job"), pytest.raises(lockkit.LockTimeout):
            lock(print)()


def test_skipping_refuses_what_would_never_skip(client: lockkit.Client) -> None:
    """A wait without limit, an unknown word, and a wrapper of which nobody knows what it returns."""
    with pytest.raises(lockkit.ConfigurationError, match="needs a limit"):
        client.lock("job", timeout=None, on_busy="skip")
    with pytest.raises(lockkit.ConfigurationError, match=r"on_busy must be .*did you mean 'skip'") as caught:
        client.lock("job", on_busy="skipp")  # type: ignore[call-overload]
    assert (caught.value.name, caught.value.backend) == ("job", "memory://sync-lock")

    async def body() -> None: ...

    @functools.wraps(body)
    def wrapper() -> Coroutine[Any, Any, None]:
        return body()

    with pytest.raises(lockkit.ConfigurationError, match="plain wrapper"):
        client.lock("job", on_busy="skip")(wrapper)


def test_skipping_ignores_the_timeout_of_the_client() -> None:
    """It tries once, as ``try_acquire`` does, whatever the other locks wait."""
    with lockkit.connect("memory://sync-skip", timeout=1000) as client, client.lock("job"):
        assert client.lock("job", on_busy="skip")(lambda: "ran")() is None


# -- the client's timeout ---------------------------------------------------------------------------------------------


def test_timeout_of_the_client_is_the_default_of_its_locks() -> None:
    """By keyword or in the URL; what a lock or a call says wins, and None there means without limit."""
    url = "memory://sync-timeout"
    for client in (lockkit.connect(url, timeout=0), lockkit.connect(f"{url}?timeout=0")):
        with client:
            lock = client.lock("a")
            waits: list[Callable[[], lockkit.Lease]] = [
                client.lock("a", timeout=None).acquire,
                functools.partial(lock.acquire, timeout=None),
            ]
            for wait in waits:
                with lock as held:
                    with pytest.raises(lockkit.LockTimeout):
                        lock.acquire()
                    with pytest.raises(lockkit.LockTimeout), lock:
                        pass
                    _waits_until_released(client, wait, held)


def test_wrong_timeout_of_a_client_is_refused_at_once() -> None:
    """With the name of the option."""
    with pytest.raises(lockkit.ConfigurationError, match=r"timeout=-1.*0 or more"):
        lockkit.connect("memory://", timeout=-1)
    with pytest.raises(lockkit.ConfigurationError, match="timeout='soon'"):
        lockkit.connect("memory://?timeout=soon")


# -- parameters of other libraries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "advice"),
    [
        ({"blocking": False}, "use timeout=0"),
        ({"blocking": True}, "leave it out"),
        ({"blocking_timeout": 5}, "use timeout="),
        ({"expire": 5}, "use ttl="),
        ({"expire_in": 5}, "use ttl="),
        ({"lease_time": 5}, "use ttl="),
        ({"auto_renewal": True}, "use renew="),
        ({"sleep": 0.1}, "leave it out"),
        ({"thread_local": False}, "leave it out"),
        ({"id": "me"}, "use metadata="),
        ({"tttl": 5}, "did you mean 'ttl'"),
    ],
)
def test_lock_names_its_parameter_for_that_of_another_library(
    client: lockkit.Client, keywords: dict[str, Any], advice: str
) -> None:
    """A `TypeError`, as Python raises for any unknown keyword, that says what to write instead."""
    with pytest.raises(TypeError, match=rf"Client.lock\(\) got an unexpected keyword argument .*{advice}"):
        client.lock("a", **keywords)


def test_methods_of_a_lock_name_their_parameter_too(client: lockkit.Client) -> None:
    """Nothing is acquired, and other type errors stay what they are."""
    lock = client.lock("a")
    methods: list[tuple[str, Callable[..., object]]] = [
        ("acquire", lock.acquire),
        ("try_acquire", lock.try_acquire),
        ("attempt", lock.attempt),
    ]
    for name, method in methods:
        with pytest.raises(TypeError, match=rf"Lock.{name}\(\) got .*'blocking': use timeout=0") as caught:
            method(blocking=False)
        assert caught.value.__cause__ is None
        with pytest.raises(TypeError, match=r"positional argument"):
            method(1, 2, 3)
        with pytest.raises(lockkit.ConfigurationError, match="use timeout=0"):
            method(False)  # noqa: FBT003 - as redis-py's acquire(False)

    assert client.holders("a") == []


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - what it returns
    """Run a coroutine that never suspends."""
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    return stop.value.value


def _waits_until_released(client: lockkit.Client, acquire: Callable[[], lockkit.Lease], held: lockkit.Lease) -> None:
    """Check that a call waits in another thread, and gets the lock once it is released."""
    leases: list[lockkit.Lease] = []
    thread = threading.Thread(target=lambda: leases.append(acquire()))
    thread.start()
    name = held.name
    waited = threading.Event()
    while not client._engine.acquisitions.waiting_count(name) and thread.is_alive():
        waited.wait(0.001)
    assert thread.is_alive()
    held.release()
    thread.join(PATIENCE)
    (lease,) = leases
    lease.release()


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [
    lambda _, lease: lease.extend(-1),
    lambda _, lease: lease.wait_lost(-1),
    lambda _, lease: lease.on_lost(3),
    lambda _, lease: lease.update(3),
    lambda client, _: client.holders("a" * 300),
    lambda client, _: client.break_lock("a" * 300),
    lambda client, _: client.once("a", keep=-1),
    lambda client, _: client.election("a", grace=-1),
    lambda client, _: client.lock("{name}")(identity)("a" * 300),
    lambda client, _: client.semaphore("{name}", 3)(identity)("a" * 300),
    lambda client, _: client.once("{name}", keep=1)(identity)("a" * 300),
    lambda client, _: client.locks(["{name}"])(identity)("a" * 300),
])  # fmt: skip
def test_error_names_lock_and_backend(
    client: lockkit.Client, call: Callable[[lockkit.Client, lockkit.Lease], object]
) -> None:
    """Whichever argument is wrong."""
    with client.lock("a") as lease, pytest.raises(lockkit.ConfigurationError) as caught:
        call(client, lease)

    assert caught.value.name is not None
    assert caught.value.name.startswith("a")
    assert caught.value.backend == client.url


def test_nul_in_the_name_of_a_decorated_call_is_refused(client: lockkit.Client) -> None:
    """Also of a semaphore, whose name lockkit keeps behind NUL characters."""
    for decorate in (client.lock("{name}"), client.semaphore("{name}", 3), client.locks(["{name}"])):
        with pytest.raises(lockkit.ConfigurationError, match="NUL"):
            decorate(identity)("a\0b")


def identity(name: str) -> str:
    """Return the name."""
    return name
