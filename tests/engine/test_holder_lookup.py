"""`LockTimeout.holder`: who held the lock when a wait timed out, and what it costs to find out."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import secrets
from pathlib import Path
from typing import Any

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import Busy, Grant, Holder, Request
from lockkit.engine import acquisition
from lockkit.engine.lookup import holder_of
from lockkit.errors import BackendUnavailable, LockHolder, LockTimeout
from lockkit.runtime import drive
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import Gate, ScriptedBackend
from tests.faces import both_faces, scripted_for
from tests.test_validation import HOSTILE

WAIT = 0.02


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the answer may take longer than a caller waits for it."""
    monkeypatch.setattr(acquisition, "ANSWER_GRACE", PATIENCE)


class Silent(ScriptedBackend):
    """Refuses without saying who holds the lock, as a server does, and counts who asks."""

    asked = 0
    answer: Gate | None = None

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        outcome = await super().try_acquire(request)
        return Busy(outcome.retry_after) if isinstance(outcome, Busy) else outcome

    async def holders(self, name: str) -> list[Holder]:
        """See `LockBackend.holders`."""
        self.asked += 1
        if self.answer is not None:
            await asyncio.to_thread(self.answer) if in_event_loop() else self.answer()
        return [*await super().holders(name)]


def in_event_loop() -> bool:
    """Tell whether to block would stop others."""
    return asyncio._get_running_loop() is not None


async def silent(driver: FaceDriver, *, answer: Gate | None = None) -> tuple[Any, Any, Silent]:
    """Make a client that holds the lock ``x``, another one, and that one's silent backend."""
    space = f"holder-{secrets.token_hex(4)}"
    holding, _ = scripted_for(driver, space)
    client, backend = scripted_for(driver, space)
    backend.__class__ = Silent
    assert isinstance(backend, Silent)
    backend.answer = answer
    return holding, client, backend


@pytest.mark.usefixtures("patient")
@both_faces
async def test_timeout_of_a_wait_names_the_holder(driver: FaceDriver) -> None:
    """The backend is asked once, also for those that never were at the head of the line; the error can be pickled."""
    holding, client, backend = await silent(driver)
    async with holding, client, holding.lock("x", metadata="nightly import") as lease:
        calls = [driver.spawn(client.lock("x").acquire(timeout=0.1)) for _ in range(5)]
        for call in calls:
            with pytest.raises(LockTimeout, match=r"is busy \(held by host .*, pid \d+, text 'nightly .*'\)") as caught:
                await call.result()

            holder = caught.value.holder
            assert holder is not None
            assert (holder.owner, holder.host, holder.pid) == (lease.owner, os.uname().nodename, os.getpid())
            assert (holder.text, holder.metadata["text"]) == ("nightly import", "nightly import")
            assert pickle.loads(pickle.dumps(caught.value)).holder == holder  # noqa: S301 - our own bytes
        assert 1 <= backend.asked <= len(calls)
        assert not client._engine.acquisitions.lookups._pending, "a name that is kept for ever"


@both_faces
async def test_single_try_asks_nobody(driver: FaceDriver) -> None:
    """It has one round trip; so does what returns None instead of the error."""
    holding, client, backend = await silent(driver)
    async with holding, client, holding.lock("x"):
        with pytest.raises(LockTimeout) as caught:
            await client.lock("x").acquire(timeout=0)
        assert await client.lock("x").try_acquire(timeout=WAIT) is None

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


@pytest.mark.parametrize("error", [None, BackendUnavailable("down")])
@both_faces
async def test_backend_that_does_not_say_who_holds_changes_nothing(
    driver: FaceDriver, error: BackendUnavailable | None
) -> None:
    """It hangs, and delays the error no longer than its answer may take; or it fails."""
    gate = Gate(error)
    if error is not None:
        gate.open.set()
    holding, client, _ = await silent(driver, answer=gate)
    async with holding, client, holding.lock("x"):
        with pytest.raises(LockTimeout, match="is busy: waited") as caught:
            await client.lock("x").acquire(timeout=WAIT)
        assert caught.value.holder is None
        assert gate.open.is_set() is (error is not None)
        gate.open.set()


def test_foreign_holder_is_named_by_its_owner() -> None:
    """It has stored neither host nor pid; what it stored may be a secret, of which a message shows the beginning."""
    assert str(LockHolder("abc")) == "owner abc"
    assert "4711" not in str(LockHolder("session-token-4711"))
    assert str(LockHolder("abc", "web-3", 4711)) == "host web-3, pid 4711"


@pytest.mark.parametrize("place", ["memory://hostile", "file:"])
def test_hostile_metadata_of_the_holder_breaks_no_call(place: str, tmp_path: Path) -> None:
    """A client of another kind may have stored anything: waiting, asking and listing go on, in both APIs."""
    url = f"file:{tmp_path}/locks" if place == "file:" else place
    seen = {}
    with lockkit.connect(url) as holding, lockkit.connect(url) as client:
        for name, text in HOSTILE.items():
            stored = text[:4096].encode("ascii", "replace").decode()
            request = Request(name, "0" * 32, 30.0, stored, queue=False, runtime=holding._engine.runtime)
            assert isinstance(drive(holding._engine.client.ready().try_acquire(request)), Grant)
            with pytest.raises(LockTimeout) as caught:
                client.lock(name, timeout=0).acquire()
            assert str(caught.value).encode()
            seen[name] = client.holders(name)[0].metadata
            assert json.dumps(seen[name])

        async def ask() -> None:
            async with aio.connect(url) as other:
                for name in HOSTILE:
                    with pytest.raises(LockTimeout):
                        await other.lock(name, timeout=0).acquire()
                    assert [found.metadata for found in await other.holders(name)] == [seen[name]]

        asyncio.run(ask())


@pytest.mark.parametrize(
    "about", [{"host": ["h"], "pid": "5"}, {"host": 1, "pid": True}, {"host": "h", "pid": 1.5, "text": {}}]
)
def test_wrong_types_in_metadata_describe_nobody(about: dict[str, object]) -> None:
    """What is no host, process or text is not shown as one."""
    holder = holder_of("owner", about)
    assert (holder.pid, holder.text) == (None, None)
    assert holder.host in {None, "h"}
    assert str(holder)
