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
from lockkit.engine.engine import EXIT_SECONDS, Engine
from lockkit.errors import BackendUnavailable, LockError, LockLost
from lockkit.runtime import AsyncioRuntime
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import fail, scripted
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
        until(lambda: others[0]._record.lost_event is not None)
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


def test_lease_that_comes_when_the_watch_ends_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch has found nothing to do and still counts as running: it is told, and goes on."""
    monkeypatch.setattr(renewal, "LINGER", 0.0)
    client = lockkit.connect("memory://watch-ends")
    watching = client._engine.renewer._watching
    watch = watching._work
    leases: list[lockkit.Lease] = []
    told: list[bool] = []

    async def watch_until_idle() -> None:
        await watch()
        if not leases:
            leases.append(client.lock("x", ttl=LONG).acquire())
            told.append(watching._event.is_set())

    watching._work = watch_until_idle
    client.lock("first", ttl=0.1, renew=False).acquire().release()  # the watch begins, and looks again soon

    until(lambda: bool(told))
    assert told == [True]
    leases[0].release()
    client.close()


def test_nothing_is_started_for_a_client_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that leaves late finds the connections closed: its request ends with its ttl."""
    client, backend = scripted()
    client.close()
    started: list[str] = []
    monkeypatch.setattr(client._engine.runtime, "spawn", lambda name, *_: started.append(name))

    client._engine.cleanups.add(LONG, backend.ping)

    assert started == []


def test_close_by_two_threads_at_once_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first comes to its end when the second has just begun."""
    client = lockkit.connect("memory://closed-twice")

    def close_meanwhile(engine: Engine[Any]) -> object:
        monkeypatch.undo()
        backend = engine.client.backend
        client.close()
        return backend

    monkeypatch.setattr(Engine, "_backend", property(close_meanwhile))

    client.close()

    with pytest.raises(LockError, match="closed"):
        client.ping()


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


def test_close_that_is_cancelled_while_it_undoes_goes_on_with_that_when_called_again() -> None:
    """Else the requests whose answers were lost would hold their locks for a ttl."""
    client, backend = scripted(AsyncioRuntime())
    space = backend.space
    abandon = backend.abandon
    names = ("a", "b")

    async def run() -> None:
        undoing, go_on = asyncio.Event(), asyncio.Event()
        begun: list[str] = []

        async def slow_abandon(request: Any) -> None:  # noqa: ANN401 - a request
            begun.append(request.name)
            undoing.set()
            await go_on.wait()
            await abandon(request)

        backend.after["try_acquire"] = backend.before["abandon"] = fail(BackendUnavailable("down"))
        for name in names:
            with pytest.raises(BackendUnavailable):
                await client.lock(name, ttl=LONG).acquire(timeout=0)
        cleanups, now = client._engine.cleanups, client._engine.runtime.now
        # Not the background's turn: it has tried both, and pauses.
        await until_async(lambda: len(cleanups._pending) == len(names) and cleanups._pending[0][0] > now())
        backend.before.clear()
        backend.abandon = slow_abandon  # type: ignore[method-assign]

        closing = asyncio.create_task(client.close())
        await undoing.wait()
        cleanups._hurry()
        cleanups._background.wake()
        await asyncio.sleep(0.05)  # the background would begin with another
        assert len(begun) == 1
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        go_on.set()
        await client.close()

    asyncio.run(run())

    with lockkit.connect(f"memory://{space}") as other:
        assert [other.lock(name).locked() for name in names] == [False, False]


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


def test_lease_that_nobody_releases_is_free_when_the_loop_has_ended() -> None:
    """At once, not at its ttl; it is not held any more."""
    space = "memory://loop"

    async def main() -> lockkit.aio.Lease:
        client = await lockkit.aio.connect(space)
        return await client.lock("x", ttl=600).acquire()

    lease = asyncio.run(main())

    assert not lease.held
    with lockkit.connect(space) as other:
        assert other.holders("x") == []


def test_loop_that_ends_before_the_watch_has_begun_releases() -> None:
    """A task that is cancelled before its first step runs nothing: the lock stayed for its ttl."""
    space = "memory://begun"

    async def main() -> lockkit.aio.Lease:
        client = await lockkit.aio.connect(space)
        lease = await client.lock("x", ttl=600).acquire()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return lease

    lease = asyncio.run(main())

    assert not lease.held
    with lockkit.connect(space) as other:
        assert other.holders("x") == []


# -- the end of the interpreter ----------------------------------------------------------------------------------------


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("library", "method"),
    [
        ("multiprocessing", "fork"),
        ("multiprocessing", "forkserver"),
        ("multiprocessing", "spawn"),
        ("billiard", "fork"),
        ("billiard", "spawn"),
    ],
)
def test_end_of_a_child_process_releases(library: str, method: str, tmp_path: Path) -> None:
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

            library, method, url = sys.argv[1:]
            client, leases = lockkit.connect(url), []

            def work():
                leases.append(client.lock("of the parent's client", ttl=600).acquire())
                leases.append(lockkit.connect(url).lock("of its own", ttl=600).acquire())

            if __name__ == "__main__":
                child = importlib.import_module(library).get_context(method).Process(target=work)
                child.start()
                child.join()
                print(child.exitcode)
            """
        )
    )
    command = [sys.executable, str(script), library, method, url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr) == ("0\n", "")
    with lockkit.connect(url) as client:
        assert [*client.names()] == []


def test_exit_of_many_clients_takes_one_bound_for_all() -> None:
    """A server that hangs holds up the exit once, not for each client; the bound here is a generous one."""
    run = python(
        """
        import atexit, time, lockkit
        from lockkit.backends.memory.backend import MemoryBackend

        async def hang(self, *arguments):
            time.sleep(60)

        started = []
        atexit.register(lambda: print(time.monotonic() - started[0]))  # runs after lockkit's own
        import lockkit.engine.engine
        atexit.unregister(lockkit.engine.engine._at_exit)
        atexit.register(lockkit.engine.engine._at_exit)
        MemoryBackend.release = hang
        clients = [lockkit.connect(f"memory://{number}") for number in range(30)]
        leases = [client.lock("x", ttl=600).acquire() for client in clients]
        started.append(time.monotonic())
        """
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 30 * EXIT_SECONDS / 2


def test_sys_exit_within_a_loop_releases(tmp_path: Any) -> None:  # noqa: ANN401 - a path
    """``SystemExit`` ends the loop at once; what is held is free all the same."""
    url = f"sqlite:///{tmp_path}/locks.db"
    run = python(
        """
        import asyncio, sys, lockkit.aio
        from lockkit.engine import engine
        engine.EXIT_SECONDS = 30  # the machine may stand still

        async def main():
            client = await lockkit.aio.connect(sys.argv[1])
            lease = await client.lock("x", ttl=600).acquire()
            async def other():
                async with client.lock("y", ttl=600):
                    await asyncio.sleep(60)
            task = asyncio.create_task(other())
            while not await client.holders("y"):
                await asyncio.sleep(0.005)
            sys.exit(3)

        asyncio.run(main())
        """,
        url,
    )
    assert run.returncode == 3, run.stderr
    with lockkit.connect(url) as client:
        assert client.holders("x") == []
        assert client.holders("y") == []
