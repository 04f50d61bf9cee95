"""Releases: of locks that stay held for a while after that, and where the stack is used up."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import lockkit
from lockkit.testing.face_driver import FaceDriver
from tests.engine.scripted import Gate, fail, once, scripted
from tests.faces import both_faces, scripted_for
from tests.tries import until


@both_faces
async def test_min_hold_that_is_over_frees_the_lock_at_once(driver: FaceDriver) -> None:
    """It counts from the grant, not from the release."""
    client, backend = scripted_for(driver)
    lease = await client.lock("cron", ttl=30, min_hold=0.05).acquire()
    await driver.sleep(0.06)
    await lease.release()
    assert "release" in backend.calls
    assert await client.holders("cron") == []
    await client.close()


@both_faces
async def test_min_hold_of_a_lost_lease_raises_as_any_loss(driver: FaceDriver) -> None:
    """Its release finds that somebody has broken it."""
    client, backend = scripted_for(driver)
    lease = await client.lock("cron", ttl=30, min_hold=20, renew=False).acquire()
    backend._space.locks["cron"].break_lock(client._engine.runtime.now())
    with pytest.raises(lockkit.LockLost):
        await lease.release()
    await client.close()


@both_faces
async def test_no_answer_to_an_early_release_is_told(driver: FaceDriver) -> None:
    """As for any release: it may be sent again."""
    client, backend = scripted_for(driver)
    lease = await client.lock("cron", ttl=30, min_hold=20).acquire()
    backend.before["renew"] = once(fail(lockkit.BackendUnavailable("no answer")))
    with pytest.raises(lockkit.BackendUnavailable, match="could not release lock 'cron'"):
        await lease.release()
    await lease.release()
    assert len(await client.holders("cron")) == 1
    await client.close()


@both_faces
async def test_block_whose_end_is_not_answered_keeps_the_lock_for_min_hold(
    driver: FaceDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """In the background, as any release; and the log says how long the lock stays."""
    client, backend = scripted_for(driver)
    async with client.lock("cron", ttl=30, min_hold=300):
        backend.before["renew"] = once(fail(lockkit.BackendUnavailable("no answer")))
    while (holders := await client.holders("cron"))[0].remaining < 200:
        await driver.sleep(0.01)
    assert len(holders) == 1
    assert re.search(r"frees the lock within (300|2\d\d(\.\d)?) s", caplog.text)
    await client.close()


def test_renewal_that_the_server_runs_after_the_release_does_not_end_min_hold() -> None:
    """It was in flight, and sets the full ttl again."""
    client, backend = scripted()
    slow = Gate()
    backend.before["renew"] = once(slow)
    lease = client.lock("cron", ttl=30, min_hold=300).acquire()
    client._engine.confirm_soon()
    slow.reached()
    lease.release()
    slow.open.set()
    until(lambda: backend.calls.count("renew") == 3)
    until(lambda: client.holders("cron")[0].remaining > 200)
    client.close()


@both_faces
async def test_set_that_is_not_complete_keeps_nothing(driver: FaceDriver) -> None:
    """No work ran under the locks that it had."""
    client, backend = scripted_for(driver)
    other, _ = scripted_for(driver, backend.space)
    held = await other.lock("b").acquire()
    with pytest.raises(lockkit.LockTimeout):
        await client.locks(["a", "b"], ttl=30, min_hold=20).acquire(0)
    assert await other.holders("a") == []
    await held.release()
    async with client.locks(["a", "b"], ttl=30, min_hold=20):
        pass
    assert len(await other.holders("a")) == 1
    await client.close()
    await other.close()


def test_backend_whose_locks_end_with_their_holder_refuses_min_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not keep its word."""
    client, backend = scripted()
    capabilities = replace(backend.capabilities, crash_release="session", transfer=False)
    monkeypatch.setattr(backend, "capabilities", capabilities)
    with pytest.raises(lockkit.Unsupported, match="min_hold= needs a backend that keeps a lock") as error:
        client.lock("cron", min_hold=5)
    assert error.value.name == "cron"
    client.close()


@pytest.mark.parametrize("min_hold", [0, -1, float("inf"), "soon"])
def test_min_hold_that_is_no_time_is_refused(min_hold: Any) -> None:  # noqa: ANN401 - wrong on purpose
    """As other times."""
    client, _ = scripted()
    with pytest.raises(lockkit.ConfigurationError, match="min_hold"):
        client.lock("cron", min_hold=min_hold)
    client.close()


# -- a stack that is used up while a lock is released ---------------------------------------------------------------


@both_faces
async def test_body_that_uses_up_the_stack_leaves_no_lock_held(driver: FaceDriver) -> None:
    """Each block that was entered again can be left again; one that could not kept the lock for its ttl."""
    client = await driver.connect()

    async def nest(which: Any) -> None:  # noqa: ANN401 - a lock
        async with which:
            await nest(which)

    for which in (client.lock("x", reentrant=True), client.rwlock("y").read()):
        with pytest.raises(RecursionError):
            await nest(which)

    assert [name async for name in client.names()] == []
