"""Celery tasks under locks: real workers over a real Redis."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import redis
from celery import Celery, _state, current_task
from celery.exceptions import Reject, Retry
from celery.signals import task_retry
from celery_once import AlreadyQueued, QueueOnce
from pydantic import BaseModel

import lockkit
from lockkit.errors import ConfigurationError, LockTimeout
from lockkit.integrations.celery import LockedTask
from lockkit.integrations.jobs import current_lease
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisServer
from tests.integrations.processes import START_SECONDS, celery
from tests.tries import until


@pytest.fixture(scope="module")
def shop(redis_server: RedisServer) -> Iterator[ModuleType]:
    """The app, as the sender imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKKIT_TEST_REDIS", redis_server.url)
        module = importlib.import_module("tests.integrations.celery_app")
        yield module
        module.app.close()
        sys.modules.pop("tests.integrations.celery_app")


@pytest.fixture
def connection(redis_server: RedisServer, shop: ModuleType) -> Iterator[redis.Redis]:
    """To Redis, without events of earlier tests."""
    with redis.Redis.from_url(redis_server.url) as connected:
        connected.delete(shop.EVENTS)
        yield connected


WORKER = ("worker", "--concurrency=2", "--without-gossip", "--without-mingle", "--without-heartbeat")


class Worker:
    """A worker of two forked processes, which may be killed and started again."""

    def __init__(self, url: str, log: Path, stack: ExitStack) -> None:
        self._url, self._log, self._stack = url, log, stack
        self.start()

    def start(self) -> None:
        """Start it; its first answer takes seconds."""
        self._process = self._stack.enter_context(celery(self._url, self._log, *WORKER))

    def kill(self) -> None:
        """Kill all of its processes at once."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def pid(self) -> int:
        """Of the process that forks the others."""
        return self._process.pid


@pytest.fixture(scope="module")
def worker(redis_server: RedisServer, shop: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that answers."""
    log = tmp_path_factory.mktemp("worker") / "log"
    with ExitStack() as stack:
        started = Worker(redis_server.url, log, stack)
        assert shop.clients.delay(0).get(timeout=START_SECONDS), log.read_text()
        yield started


@pytest.mark.usefixtures("worker")
class TestWorker:
    """What a worker does with locked tasks."""

    def test_tasks_of_one_account_run_one_after_the_other(self, shop: ModuleType, connection: redis.Redis) -> None:
        """Two processes, one lock: what is busy is sent again, without a retry being counted."""
        results = [shop.pay.delay(1, 0.2) for _ in range(3)]

        returned = [result.get(timeout=PATIENCE) for result in results]
        seen = shop.events(connection)
        assert [event["what"] for event in seen] == ["begin", "end"] * 3
        tokens = [event["token"] for event in seen][::2]
        assert tokens == sorted(set(tokens))
        assert sorted(returned) == [[token, 0] for token in tokens]

    @pytest.mark.parametrize("how", ["terminate", "soft time limit"])
    def test_task_that_is_ended_frees_its_lock(self, shop: ModuleType, connection: redis.Redis, how: str) -> None:
        """By an exception that Celery raises in it, long before the ttl of an hour."""
        sent = shop.sleep.apply_async((9,), soft_time_limit=1 if how == "soft time limit" else None)
        until(lambda: shop.events(connection))
        if how == "terminate":
            shop.app.control.revoke(sent.id, terminate=True)

        with lockkit.connect(shop.URL) as client, client.lock("acct:9", timeout=PATIENCE):
            assert [event["what"] for event in shop.events(connection)] == ["begin"]

    def test_forked_process_has_a_client_of_its_own(self, shop: ModuleType, worker: Worker) -> None:
        """The parent had one before it forked."""
        owners, own, holders = shop.clients.delay(7).get(timeout=PATIENCE)

        assert owners == own == holders
        assert own != [worker.pid]


@pytest.mark.timeout(START_SECONDS * 2 + 60)
def test_task_of_a_killed_worker_is_done_by_the_next(shop: ModuleType, connection: redis.Redis, worker: Worker) -> None:
    """With acks_late the broker delivers it again; the lock is free after its ttl; the key lets it complete once."""
    connection.set(shop.HOLD, 1)
    result = shop.charge.delay(8)
    (begun,) = until(lambda: shop.events(connection))
    worker.kill()
    connection.delete(shop.HOLD)
    # The broker delivers it again when a worker starts after the visibility timeout, and else looks only now and then.
    until(lambda: connection.zrange("unacked_index", 0, time.time() - shop.VISIBLE_SECONDS, byscore=True))

    worker.start()
    returned = result.get(timeout=START_SECONDS)
    repeated = shop.charge.delay(8).get(timeout=PATIENCE)

    assert returned["token"] > begun["token"]
    assert repeated == returned
    assert [event["what"] for event in shop.events(connection)] == ["begin", "begin", "end"]


# -- what a well-known lock for Celery does, celery-once 3.0.1 ---------------------------------------------------------


def test_lock_of_celery_once_ends_while_its_task_runs(redis_server: RedisServer) -> None:
    """It is taken when the task is sent, is not renewed, and is deleted without a look at whose it is."""
    app = Celery("once", broker="memory://", set_as_current=False)
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": redis_server.url}}

    @app.task(shared=False, base=QueueOnce, once={"timeout": 1})
    def pay(n: int) -> None: ...

    pay.apply_async((1,))  # A, which a worker may begin to run now, or in an hour
    with pytest.raises(AlreadyQueued):
        pay.apply_async((1,))
    until(lambda: not pay.once_backend.redis.exists(pay.get_key((1,))))
    pay.apply_async((1,))  # B: A has not ended, but its lock has
    pay.after_return("SUCCESS", None, "a", (1,), {}, None)  # A ends, and deletes the lock of B
    pay.apply_async((1,))  # C


def test_lock_of_celery_once_outlives_its_worker(redis_server: RedisServer) -> None:
    """Nobody deletes the lock of a task whose worker was killed: it stays for the timeout, an hour unless told else."""
    app = Celery("once", broker="memory://", set_as_current=False)
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": redis_server.url}}

    @app.task(shared=False, base=QueueOnce)
    def pay(n: int) -> None: ...

    pay.apply_async((2,))  # its worker is killed: after_return never runs
    assert pay.once_backend.redis.ttl(pay.get_key((2,))) > 3500
    with pytest.raises(AlreadyQueued):
        pay.apply_async((2,))


# -- in one process --------------------------------------------------------------------------------------------------


def local_app(**settings: Any) -> Celery:
    """An app of this process."""
    app = Celery("local", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(lockkit_url="memory://celery", **settings)
    return app


def test_called_eagerly_it_runs_under_its_lock_and_raises_when_busy() -> None:
    """There is no message to send again."""
    app = local_app()

    @app.task(shared=False, base=LockedTask, bind=True, lock="acct:{n}")
    def pay(self: LockedTask, n: int) -> tuple[int, int]:  # noqa: ARG001
        return self.request.lockkit_token, current_lease().token

    token, same = pay(1)
    assert token == same > 0
    with lockkit.connect("memory://celery").lock("acct:1"), pytest.raises(LockTimeout):
        pay.apply((1,), throw=True)
    assert pay.apply((1,)).get()[0] > token


@pytest.mark.parametrize("way", ["the task", "its run()"])
def test_task_that_calls_itself_keeps_its_own_token(way: str) -> None:
    """The inner call is a direct one: its lease and token are not those of the task, and it sends nothing again."""
    app = local_app()

    @app.task(shared=False, base=LockedTask, bind=True, lock="acct:{n}")
    def pay(self: LockedTask, n: int, inner: int | None = None) -> list[Any]:  # noqa: ARG001
        request, name = self.request, current_task.name
        before = request.lockkit_token, request.lockkit_lease
        if inner is not None:
            (pay if way == "the task" else self.run)(inner)  # Celery makes no request for its run()
        return [(request.lockkit_token, request.lockkit_lease) == before, request.lockkit_lease.name, name]

    for returned in (pay.apply((1, 2)).get(), pay(1, 2)):
        assert returned == [True, "acct:1", pay.name]
    with lockkit.connect("memory://celery").lock("acct:2"), pytest.raises(LockTimeout, match="acct:2"):
        pay.apply((1, 2), throw=True)


def test_task_shares_its_lock_with_those_that_it_calls() -> None:
    """Directly or eagerly they run within it, and would wait for it, be skipped or fail."""
    app = local_app(task_always_eager=True, task_eager_propagates=True)

    @app.task(shared=False, base=LockedTask, bind=True, lock="acct:{n}", on_busy="skip")
    def notify(self: LockedTask, n: int) -> int:  # noqa: ARG001
        token: int = self.request.lockkit_token
        return token

    @app.task(shared=False, base=LockedTask, bind=True, lock="acct:{n}")
    def pay(self: LockedTask, n: int) -> list[int]:
        return [notify(n), notify.delay(n).result, self.request.lockkit_token]

    for returned in (pay(1), pay.delay(1).result):
        assert len(set(returned)) == 1
        assert returned[0] > 0


def received(app: Celery) -> dict[str, Any] | None:
    """Headers of the next message in the app's queue."""
    with app.connection_for_read() as connection:
        message = connection.default_channel.basic_get(app.conf.task_default_queue)
        return None if message is None else message.headers


@contextmanager
def busy_in_worker(task: LockedTask) -> Iterator[None]:
    """The lock of ``acct:1`` is another client's, and the task runs as a worker runs it."""
    task.push_request(id="one", args=(1,), kwargs={}, retries=2, called_directly=False, is_eager=False)
    try:
        with lockkit.connect("memory://celery").lock("acct:1"):
            yield
    finally:
        task.pop_request()


def test_busy_task_is_sent_again_as_it_was() -> None:
    """After the countdown, and without a retry being counted; Celery notes it as a retry."""
    app = local_app(task_default_queue="again")

    @app.task(shared=False, base=LockedTask, lock="acct:{n}", busy_countdown=timedelta(hours=1))
    def pay(n: int) -> None: ...

    with busy_in_worker(pay), pytest.raises(Retry) as caught:
        pay.run(1)

    assert (caught.value.when, type(caught.value.exc)) == (3600.0, LockTimeout)
    sent = received(app)
    assert sent is not None
    assert (sent["id"], sent["retries"], sent["argsrepr"]) == ("one", 2, "(1,)")
    assert datetime.fromisoformat(sent["eta"]) - datetime.now().astimezone() > timedelta(minutes=50)
    assert received(app) is None


def test_busy_task_that_cannot_be_sent_again_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ``Task.retry()``: it must not count as done, nor come again at once."""
    app = local_app()

    @app.task(shared=False, base=LockedTask, lock="acct:{n}")
    def pay(n: int) -> None: ...

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no broker")

    monkeypatch.setattr(pay, "apply_async", fail)
    with busy_in_worker(pay), pytest.raises(Reject, match="no broker") as caught:
        pay.run(1)
    assert caught.value.requeue is False


def test_wait_that_ends_in_a_worker_fails_the_task() -> None:
    """It is not sent again."""
    app = local_app(task_default_queue="waited")

    @app.task(shared=False, base=LockedTask, lock="acct:{n}", on_busy="wait", lock_timeout=0)
    def pay(n: int) -> None: ...

    with busy_in_worker(pay), pytest.raises(LockTimeout):
        pay.run(1)
    assert received(app) is None


def test_autoretry_counts_errors_of_the_lock() -> None:
    """As any error of the task."""
    app = local_app()
    ran: list[int] = []

    @app.task(
        shared=False, base=LockedTask, lock="acct:{n}", on_busy="wait", lock_timeout=0,
        autoretry_for=(LockTimeout,), max_retries=2, default_retry_delay=0,
    )  # fmt: skip
    def pay(n: int) -> None:
        ran.append(n)

    def note(**_: object) -> None:
        retried.append(1)

    retried: list[int] = []
    task_retry.connect(note, sender=pay)
    with lockkit.connect("memory://celery").lock("acct:1"):
        pay.apply((1,))
    task_retry.disconnect(note, sender=pay)
    assert (len(retried), ran) == (2, [])


def test_task_class_without_the_init_of_its_base_runs_under_its_lock() -> None:
    """Classes of tasks often have one of their own, for a connection."""

    class Pay(LockedTask):
        name = "pay"
        lock: ClassVar[str | None] = "acct:{n}"

        def __init__(self) -> None:
            self.paid = 0

        def run(self, n: int) -> int:  # noqa: ARG002
            token: int = self.request.lockkit_token
            return token

    class PayTwice(Pay):
        name = "pay twice"

        def run(self, n: int) -> int:
            return super().run(n)

    app = local_app()
    for kind in (Pay, PayTwice):
        pay = app.register_task(kind())
        assert pay(1) > 0
        with lockkit.connect("memory://celery").lock("acct:1"), pytest.raises(LockTimeout):
            pay(1)


def test_name_is_made_of_what_was_sent() -> None:
    """Before pydantic makes models of it (from Celery 5.5 on)."""
    app = local_app()

    class Order(BaseModel):
        id: int

    @app.task(shared=False, base=LockedTask, bind=True, pydantic=True, lock="order:{order[id]}")
    def pay(self: LockedTask, order: Order) -> str:  # noqa: ARG001
        return str(self.request.lockkit_lease.name)

    assert pay.apply(({"id": 17},)).get() == "order:17"


def test_lock_server_may_be_named_in_the_settings_of_django() -> None:
    """They begin with a prefix; tasks do not read LOCKKIT, which is for Django's own clients."""
    app = Celery("local", set_as_current=False)
    settings = SimpleNamespace(
        CELERY_BROKER_URL="memory://", CELERY_LOCKKIT_URL="memory://prefixed", LOCKKIT={"default": "memory://other"}
    )
    app.config_from_object(settings, namespace="CELERY")

    @app.task(shared=False, base=LockedTask, lock="account")
    def pay() -> str:
        return "paid"

    assert pay() == "paid"
    with lockkit.connect("memory://prefixed") as client, client.lock("account"), pytest.raises(LockTimeout):
        pay()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lock": "acct:{self}"}, "no parameter 'self'"),
        ({"lock": "a", "ttl": 30}, "ttl=, which has no effect: use lock_ttl="),
        ({"lock": "a", "timeout": 5}, "timeout=, which has no effect: use lock_timeout="),
        ({"once": "a", "keep": 60}, "keep=, which has no effect: use once_keep="),
        ({"lock": "a", "timout": 5}, "timout=, which has no effect: use lock_timeout="),
        ({"lok": "acct:{n}"}, "lok=, which has no effect: use lock="),
        ({"lock_name": "acct:{n}"}, "lock_name=, which has no effect: use lock"),
        ({"lock": "a", "onbusy": "skip"}, "onbusy=, which has no effect: use on_busy="),
    ],
)
def test_misspelt_option_is_an_error_when_the_task_is_registered(options: dict[str, Any], message: str) -> None:
    """Not when a worker runs it."""
    app = local_app()

    @app.task(shared=False, base=LockedTask, bind=True, **options)
    def pay(self: LockedTask, n: int) -> None: ...

    with pytest.raises(ConfigurationError, match=message):
        app.finalize()


@pytest.mark.parametrize("options", [{"lok": "acct:{n}"}, {"lock": "acct:{n}", "lock_tll": 5}])
def test_wrong_option_of_a_class_is_an_error_when_the_task_is_registered(options: dict[str, Any]) -> None:
    """As one of the decorator; also if it stands in the base of a task."""
    app = local_app()

    def run(self: LockedTask, n: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"which has no effect: use lock"):
        app.register_task(type("Pay", (LockedTask,), {"name": "pay", "run": run, **options})())
    with pytest.raises(ConfigurationError, match=r"which has no effect: use lock"):
        app.task(shared=False, bind=True, base=type("Base", (LockedTask,), options), lock="acct:{n}")(run)


def test_attributes_of_a_tasks_own_class_may_have_any_name() -> None:
    """An application calls them as it likes, and may give them to the decorator."""

    class Mixin:
        locked = "no"

    class Request(Mixin, LockedTask):
        abstract = True
        timeout = 5.0
        ttl: ClassVar[float]
        clock: ClassVar[str] = "UTC"

        def unlock(self) -> None: ...

    app = local_app()

    @app.task(
        shared=False, base=Request, bind=True, lock="a", timeout=7.0, ttl=60.0, clock="CET", locked="yes", locale="en",
        title="Ask", soft_time_limit=3, rate_limit="1/s", autoretry_for=(OSError,), retry_backoff=True,
    )  # fmt: skip
    def ask(self: Request) -> tuple[float, float, str]:
        return self.timeout, self.ttl, self.clock + self.locked

    assert ask() == (7.0, 60.0, "CETyes")


def test_locked_task_may_be_the_base_of_all_tasks_of_an_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's own have no lock; those of the application must."""
    # Without the tasks that other tests share with each app.
    own = {each for each in _state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(_state, "_on_app_finalizers", own)
    app = Celery("all", broker="memory://", task_cls=LockedTask, set_as_current=False)
    app.conf.lockkit_url = "memory://all"
    pay = app.task(shared=False, lock="acct:{n}")(echo)
    app.finalize()

    assert pay(1) == 1
    with pytest.raises(ConfigurationError, match="neither lock= nor once="):
        app.task(shared=False, name="other")(echo)


def echo(n: int) -> int:
    """Return what it gets."""
    return n


@pytest.mark.parametrize(
    ("setting", "namespace"),
    [
        ("lockkit_ulr", None), ("LOCKKIT_BEAT_TIMEOUT", None), ("CELERY_LOCKKIT_LOCK_URL", "CELERY"),
        ("LOCKKIT_URL", None), ("LOCKKIT_URL", "CELERY"),
    ],
)  # fmt: skip
def test_misspelt_setting_is_an_error_when_a_task_is_registered(setting: str, namespace: str | None) -> None:
    """Celery does not find ours in upper case. If one were ignored, the locks would be files of this machine."""
    app = Celery("local", set_as_current=False)
    app.config_from_object(SimpleNamespace(**{setting: "redis://locks.example"}), namespace=namespace)

    @app.task(shared=False, base=LockedTask, lock="a")
    def pay() -> None: ...

    with pytest.raises(ConfigurationError, match=rf"'{setting}' has no effect.*lockkit_url.*CELERY_LOCKKIT_URL"):
        app.finalize()
