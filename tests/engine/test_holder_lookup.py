"""`LockTimeout.holder`: who held the lock when a wait timed out, and what it costs to find out."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import Busy, Grant, Holder, Request
from lockkit.engine import acquisition
from lockkit.engine.lookup import holder_of
from lockkit.errors import BackendUnavailable, LockHolder, LockTimeout
from lockkit.runtime import AsyncioRuntime, drive
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import ScriptedBackend, scripted
from tests.test_validation import HOSTILE
from tests.tries import until

WAIT = 0.02


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the answer may take longer than a caller waits for it."""
    monkeypatch.setattr(acquisition, "ANSWER_GRACE", PATIENCE)


class Silent(ScriptedBackend):
    """Refuses without saying who holds the lock, as a server does, and counts who asks."""

    asked = 0
    answer: threading.Event | None = None
    error: BackendUnavailable | None = None

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        outcome = await super().try_acquire(request)
        return Busy(outcome.retry_after) if isinstance(outcome, Busy) else outcome

    async def holders(self, name: str) -> list[Holder]:
        """See `LockBackend.holders`."""
        self.asked += 1
        if self.answer is not None:
            self.answer.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return [*await super().holders(name)]


def silent(space: str, **arguments: Any) -> tuple[Any, Any, Silent]:
    """Make a client that holds the lock ``x``, another one, and that one's silent backend."""
    holding, _ = scripted(space=space)
    client, backend = scripted(space=space, **arguments)
    backend.__class__ = Silent
    assert isinstance(backend, Silent)
    return holding, client, backend


@pytest.mark.usefixtures("patient")
def test_timeout_of_a_wait_names_the_holder() -> None:
    """The backend is asked once; the error survives pickling."""
    holding, client, backend = silent("holder-wait")
    with holding, client, holding.lock("x", metadata="nightly import") as lease:
        with pytest.raises(LockTimeout, match=r"is busy \(held by host .*, pid \d+, text 'nightly import'\)") as caught:
            client.lock("x").acquire(timeout=WAIT)

        holder = caught.value.holder
        assert holder is not None
        assert (holder.owner, holder.host, holder.pid) == (lease.owner, os.uname().nodename, os.getpid())
        assert (holder.text, holder.metadata["text"]) == ("nightly import", "nightly import")
        assert backend.asked == 1
        assert pickle.loads(pickle.dumps(caught.value)).holder == holder  # noqa: S301 - our own bytes


@pytest.mark.asyncio
@pytest.mark.usefixtures("patient")
async def test_timeout_of_an_async_wait_names_the_holder() -> None:
    """As in the sync API."""
    holding, client, backend = silent("holder-async", runtime=AsyncioRuntime())
    with holding, holding.lock("x", metadata="import"):
        async with client:
            with pytest.raises(LockTimeout) as caught:
                await client.lock("x").acquire(timeout=WAIT)

            assert caught.value.holder is not None
            assert caught.value.holder.text == "import"
            assert backend.asked == 1


def test_single_try_asks_nobody() -> None:
    """It has one round trip; so does what returns None instead of the error."""
    holding, client, backend = silent("holder-single")
    with holding, client, holding.lock("x"):
        with pytest.raises(LockTimeout) as caught:
            client.lock("x").acquire(timeout=0)
        assert client.lock("x").try_acquire(timeout=WAIT) is None

        assert caught.value.holder is None
        assert backend.asked == 0


def test_single_try_names_the_holder_where_the_refusal_does() -> None:
    """The memory backend has it at hand."""
    url = "memory://holder-known"
    with lockkit.connect(url) as client, lockkit.connect(url) as other, client.lock("x", metadata="known"):
        for one in (client, other):
            with pytest.raises(LockTimeout) as caught:
                one.lock("x").acquire(timeout=0)
            assert caught.value.holder is not None
            assert caught.value.holder.text == "known"
            assert one is client or "'known'" in str(caught.value)


def test_backend_that_hangs_delays_the_error_no_longer_than_its_answer_may() -> None:
    """The error comes without the holder."""
    holding, client, backend = silent("holder-hangs")
    backend.answer = threading.Event()
    with holding, client, holding.lock("x"):
        with pytest.raises(LockTimeout) as caught:
            client.lock("x").acquire(timeout=WAIT)
        assert not backend.answer.is_set()
        backend.answer.set()

    assert caught.value.holder is None


def test_backend_that_cannot_be_asked_changes_nothing() -> None:
    """The lock was busy: that is the error."""
    holding, client, backend = silent("holder-down")
    backend.error = BackendUnavailable("down")
    with holding, client, holding.lock("x"), pytest.raises(LockTimeout, match="is busy: waited") as caught:
        client.lock("x").acquire(timeout=WAIT)

    assert caught.value.holder is None


@pytest.mark.usefixtures("patient")
def test_waiters_that_time_out_in_the_queue_of_the_client_name_the_holder() -> None:
    """Also those that never were at the head, which no answer of the backend has reached."""
    holding, client, _ = silent("holder-many")
    errors: list[LockTimeout] = []

    def wait() -> None:
        with pytest.raises(LockTimeout) as caught:
            client.lock("x").acquire(timeout=0.1)
        errors.append(caught.value)

    with holding, client, holding.lock("x") as lease:
        _run_together(wait, 5)

    assert [error.holder.owner for error in errors if error.holder is not None] == [lease.owner] * 5


def test_lookups_at_one_time_share_one_question() -> None:
    """A crowd that times out together does not all ask the server."""
    holding, client, backend = silent("holder-share")
    answer = backend.answer = threading.Event()
    lookups = client._engine.acquisitions.lookups
    found: list[LockHolder | None] = []

    def release_answer() -> None:
        until(lambda: "x" in lookups._pending and len(lookups._pending["x"].done._sleepers) == 2)
        answer.set()

    with holding, client, holding.lock("x") as lease:
        first = threading.Thread(target=lambda: found.append(drive(lookups.ask(backend, "x", PATIENCE))))
        first.start()
        until(lambda: "x" in lookups._pending)
        releasing = threading.Thread(target=release_answer)
        releasing.start()
        found.append(drive(lookups.ask(backend, "x", PATIENCE)))
        first.join(PATIENCE)
        releasing.join(PATIENCE)

        assert [holder.owner for holder in found if holder is not None] == [lease.owner] * 2
    assert backend.asked == 1


def _run_together(function: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=function) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)


def test_foreign_holder_is_named_by_its_owner() -> None:
    """It has stored neither host nor pid; what it stored may be a secret, of which a message shows the beginning."""
    assert str(LockHolder("abc")) == "owner abc"
    assert "4711" not in str(LockHolder("session-token-4711"))
    assert str(LockHolder("abc", "web-3", 4711)) == "host web-3, pid 4711"


@pytest.mark.parametrize("place", ["memory://hostile", "file:"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_of_the_holder_breaks_no_call(place: str, name: str, tmp_path: Path) -> None:
    """A client of another kind may have stored anything: waiting, asking and listing go on, in both APIs."""
    url = f"file:{tmp_path}/locks" if place == "file:" else place
    text = HOSTILE[name][:4096].encode("ascii", "replace").decode()
    with lockkit.connect(url) as holding, lockkit.connect(url) as client:
        backend = holding._engine.client.ready()
        request = Request(name, "0" * 32, 30.0, text, queue=False, runtime=holding._engine.runtime)
        assert isinstance(drive(backend.try_acquire(request)), Grant)

        with pytest.raises(LockTimeout) as caught:
            client.lock(name, timeout=0).acquire()
        (holder,) = client.holders(name)

        async def ask() -> None:
            async with aio.connect(url) as other:
                with pytest.raises(LockTimeout):
                    await other.lock(name, timeout=0).acquire()
                assert [found.metadata for found in await other.holders(name)] == [holder.metadata]

        asyncio.run(ask())
    assert str(caught.value).encode()
    assert json.dumps(holder.metadata)


@pytest.mark.parametrize(
    "about", [{"host": ["h"], "pid": "5"}, {"host": 1, "pid": True}, {"host": "h", "pid": 1.5, "text": {}}]
)
def test_wrong_types_in_metadata_describe_nobody(about: dict[str, object]) -> None:
    """What is no host, process or text is not shown as one."""
    holder = holder_of("owner", about)
    assert (holder.pid, holder.text) == (None, None)
    assert holder.host in {None, "h"}
    assert str(holder)
