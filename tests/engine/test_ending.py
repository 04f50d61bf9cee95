"""The end of a client, of an event loop and of the interpreter: nothing stays held, no body goes on unprotected."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.engine import renewal
from lockkit.errors import BackendUnavailable, LockError, LockLost
from lockkit.runtime import AsyncioRuntime
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import scripted
from tests.tries import beside, until, until_async, until_renewed, until_renewed_async

LONG = 60.0


# -- close -------------------------------------------------------------------------------------------------------------


def test_close_by_another_thread_loses_the_lease_of_a_body_and_releases_others() -> None:
    """The body was not protected to its end, and is told so at once; all leases go in one request, with one bound."""
    client, backend = scripted()
    told: list[str] = []
    calls: list[tuple[int, float]] = []
    release_all = backend.release_all

    async def noted(grants: Any, answer_by: float) -> None:  # noqa: ANN401 - a sequence
        calls.append((len(grants), answer_by - client._engine.runtime.now()))
        await release_all(grants, answer_by)
        raise BackendUnavailable("hangs")

    backend.release_all = noted  # type: ignore[method-assign]
    others = [client.lock(f"y{number}", ttl=LONG).acquire() for number in range(10)]
    with pytest.raises(LockLost), client.lock("x", ttl=LONG, on_lost=lambda _, reason: told.append(reason)) as lease:  # noqa: PT012
        waiting = beside(others[0].wait_lost)
        until(lambda: others[0]._record.end_events)
        beside(client.close).result(PATIENCE)
        assert lease.lost

    until(lambda: told == ["session"])
    assert waiting.result(PATIENCE) is False  # released: nobody else had the lock
    assert [(other.held, other.lost) for other in others] == [(False, False)] * 10
    others[0].release()
    ((count, seconds),) = calls
    assert count == 11
    assert 0.0 < seconds < 5.0
    assert lockkit.connect(backend.url).holders("x") == []


@pytest.mark.parametrize("ending", ["closed", "idle"])
def test_watch_does_not_stay_until_a_released_lease_would_have_been_due(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Twenty minutes, here: its thread ends with the client, or soon after the last lease that it looked at."""
    monkeypatch.setattr(renewal, "LINGER", 0.1 if ending == "idle" else 3600.0)
    client = lockkit.connect("memory://watched")
    renewer = client._engine.renewer
    lease = client.lock("x", ttl=3600).acquire()
    until_renewed(lease, begin=client._engine.confirm_soon)
    until(lambda: lease._record.look_at is not None)
    lease.release()
    if ending == "closed":
        client.close()
    else:
        client.lock("y", ttl=0.05, renew=False).acquire().wait_lost()

    until(lambda: not renewer._watching.running and not renewer._renewing.running)
    client.close()


@pytest.mark.parametrize("where", ["release_all", "close"])
def test_close_that_was_cancelled_can_be_finished(where: str) -> None:
    """The second call goes on where the first was cut short; connections that are being closed are closed."""
    client, backend = scripted(AsyncioRuntime())
    ended: list[str] = []
    close, release_all = backend.close, backend.release_all

    async def run() -> None:
        closing, go_on, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slow(what: str) -> None:
            closing.set()
            if what == where and not ended:
                ended.append("cut")
                await go_on.wait()

        async def slow_release_all(grants: Any, answer_by: float) -> None:  # noqa: ANN401 - a sequence
            await slow("release_all")
            await release_all(grants, answer_by)

        async def slow_close() -> None:
            await slow("close")
            await close()
            closed.set()

        backend.release_all, backend.close = slow_release_all, slow_close  # type: ignore[method-assign]
        lease = await client.lock("x", ttl=LONG).acquire()
        task = asyncio.create_task(client.close())
        await until_async(lambda: bool(ended))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not lease.held
        assert not closed.is_set()
        with pytest.raises(LockError, match="closed"):
            client.lock("y")
        go_on.set()
        await client.close()
        await client.close()
        await asyncio.wait_for(closed.wait(), PATIENCE)

    asyncio.run(run())

    other, _ = scripted(space=backend.space)
    assert other.holders("x") == []


# -- the end of an event loop ------------------------------------------------------------------------------------------


def test_bodies_that_clean_up_while_the_loop_ends_keep_their_leases() -> None:
    """asyncio.run cancels all tasks together: the background work too, which goes on as long as a body runs."""
    space = "memory://ends"
    overlaps: list[str] = []
    done: list[bool] = []

    async def body(client: lockkit.aio.Client, entered: asyncio.Event) -> None:
        async with client.lock("x", ttl=60) as lease:
            entered.set()
            try:
                await asyncio.sleep(60)
            finally:
                with lockkit.connect(space) as other:
                    for _ in range(3):
                        await until_renewed_async(lease, begin=client._engine.confirm_soon)
                        if (found := other.lock("x", ttl=1).try_acquire()) is not None:
                            overlaps.append(f"held={lease.held} lost={lease.lost}")
                            found.release()
                done.append(True)

    async def main() -> None:
        client = await lockkit.aio.connect(space)
        entered = asyncio.Event()
        main.task = asyncio.create_task(body(client, entered))  # type: ignore[attr-defined]
        await entered.wait()

    asyncio.run(main())

    assert done == [True]
    assert overlaps == []
    with lockkit.connect(space) as other:
        assert other.holders("x") == []


@pytest.mark.parametrize("watched", [True, False])
def test_lease_that_nobody_releases_is_free_when_the_loop_has_ended(watched: bool) -> None:  # noqa: FBT001 - a parameter
    """At once, not at its ttl; also if the watch is cancelled before its first step, and so runs nothing."""
    space = f"memory://loop-{watched}"

    async def main() -> lockkit.aio.Lease:
        client = await lockkit.aio.connect(space)
        lease = await client.lock("x", ttl=600).acquire()
        if watched:
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return lease

    lease = asyncio.run(main())

    assert not lease.held
    with lockkit.connect(space) as other:
        assert other.holders("x") == []


# -- the end of the interpreter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "methods"), [("multiprocessing", ["fork", "forkserver", "spawn"]), ("billiard", ["fork"])]
)
def test_end_of_a_child_process_releases(library: str, methods: list[str], tmp_path: Path) -> None:
    """Unless it was spawned, it ends with ``os._exit``, without what `atexit` would call. billiard is Celery's."""
    url = f"sqlite:///{tmp_path}/locks.db"
    script = tmp_path / "workers.py"
    script.write_text(
        textwrap.dedent(
            """
            import importlib, sys
            import lockkit
            from lockkit.engine import engine
            engine.EXIT_SECONDS = 30  # the machine may stand still

            library, url, *methods = sys.argv[1:]
            client, leases = lockkit.connect(url), []

            def work():
                leases.append(client.lock("of the parent's client", ttl=600).acquire())
                leases.append(lockkit.connect(url).lock("of its own", ttl=600).acquire())

            if __name__ == "__main__":
                for method in methods:
                    child = importlib.import_module(library).get_context(method).Process(target=work)
                    child.start()
                    child.join()
                    print(child.exitcode, *client.names())
            """
        )
    )
    command = [sys.executable, str(script), library, url, *methods]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr) == ("0\n" * len(methods), "")


@pytest.mark.parametrize("what", ["lock", "election"])
def test_thread_that_waits_gets_nothing_that_the_exit_frees(what: str, tmp_path: Path) -> None:
    """A daemon thread waits for a lock that the exit releases, or campaigns anew: nobody would release it again."""
    url = f"sqlite:///{tmp_path}/locks.db"
    script = textwrap.dedent(
        """
        import atexit, sys, threading, time
        granted = threading.Event()
        atexit.register(granted.wait, 0.5)  # called after lockkit's
        import lockkit

        what, url = sys.argv[1:]
        client, ready = lockkit.connect(url), threading.Event()

        def wait():
            waits.set()
            client.lock("x", ttl=600).acquire()
            granted.set()

        def lead():
            client.election("x", ttl=600).run(follow)
            granted.set()

        def follow(term):
            ready.set()
            term.must_stop(None)

        waits = threading.Event()
        if what == "lock":
            kept = client.lock("x", ttl=600).acquire()
            threading.Thread(target=wait, daemon=True).start()
            waits.wait()
            time.sleep(0.1)
        else:
            threading.Thread(target=lead, daemon=True).start()
            ready.wait()
        """
    )
    command = [sys.executable, "-c", script, what, url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0
    with lockkit.connect(url) as client:
        assert [*client.names()] == [], run.stderr
