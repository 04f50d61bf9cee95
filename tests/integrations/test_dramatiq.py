"""Dramatiq actors under locks, with its own worker and its broker for tests."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.rate_limits.backends import StubBackend as StubLimits
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

import lockkit
from lockkit.errors import LockTimeout
from lockkit.integrations.dramatiq import ActorBusy, current_lease, locked_actor
from lockkit.testing.timing import PATIENCE
from tests.tries import until

URL = "memory://dramatiq"
TIMEOUT = round(PATIENCE * 1000)


@pytest.fixture
def broker() -> Iterator[StubBroker]:
    """A broker in memory, with a worker of several threads."""
    broker = StubBroker()
    broker.add_middleware(Results(backend=StubBackend()))  # type: ignore[no-untyped-call] # has no types
    dramatiq.set_broker(broker)
    broker.emit_after("process_boot")
    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=3)
    worker.start()
    yield broker
    worker.stop()
    broker.close()


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A client of the same locks."""
    with lockkit.connect(URL) as client:
        yield client


def test_messages_of_one_account_run_one_after_the_other(broker: StubBroker) -> None:
    """Three threads, one lock: what is busy is sent again."""
    inside: list[int] = []
    overlaps: list[int] = []
    pause = threading.Event()

    @locked_actor("acct:{n}", busy_countdown=0.05, url=URL, broker=broker, store_results=True, max_retries=None)
    def pay(n: int) -> int:
        inside.append(n)
        overlaps.append(len(inside))
        pause.wait(0.1)
        inside.pop()
        return current_lease().token

    messages = [pay.send(1) for _ in range(3)]

    tokens = [message.get_result(block=True, timeout=TIMEOUT) for message in messages]
    assert len(set(tokens)) == 3
    assert overlaps == [1, 1, 1]


def test_limiter_of_dramatiq_lets_a_second_one_in() -> None:
    """Dramatiq's own, with a limit of 1: nothing renews its key."""
    limits = StubLimits()  # type: ignore[no-untyped-call] # has no types
    limiter = ConcurrentRateLimiter(limits, "acct:1", limit=1, ttl=100)  # type: ignore[no-untyped-call] # as above

    with limiter.acquire():
        with limiter.acquire(raise_on_failure=False) as second:
            assert not second

        def acquired() -> bool:
            with limiter.acquire(raise_on_failure=False) as found:
                return bool(found)

        until(acquired)


def test_busy_is_a_timeout_that_can_be_pickled(broker: StubBroker, client: lockkit.Client) -> None:
    """It can be caught, and pickled, as every LockTimeout."""

    @locked_actor("acct:{n}", url=URL, broker=broker)
    def pay(n: int) -> int:
        return n

    with client.lock("acct:4"), pytest.raises(LockTimeout) as caught:
        pay(4)
    assert caught.value.name == "acct:4"
    assert "'acct:4' at memory://dramatiq is busy" in str(caught.value)
    busy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - just pickled
    assert isinstance(busy, ActorBusy)
    assert vars(busy) == vars(caught.value)
    assert (str(busy), busy.delay) == (str(caught.value), 5000)
