"""Queue, wake-ups, and holders and waiters that are killed or stopped: with other processes, in real time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import lockkit.aio
from lockkit.backend import Busy
from lockkit.backends.file import backend as file_backend
from lockkit.backends.file import record_store
from lockkit.backends.file import wakeup as file_wakeup
from lockkit.backends.file.backend import FileBackend
from lockkit.backends.file.record_store import RecordStore
from lockkit.backends.file.wakeup import Inotify
from lockkit.errors import LockError
from lockkit.runtime import AsyncioRuntime, drive
from lockkit.url import parse
from tests.backends.file.support import LONG, Connect, acquire
from tests.backends.support import StubHost, granted
from tests.tries import until, until_async


class _Instances:
    """Counts the inotify instances that are open, of those that were made since; others may end meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count from now on."""
        self._fds: set[int] = set()
        make = Inotify.__init__

        def noted(instance: Inotify) -> None:
            make(instance)
            self._fds.add(instance.fd)

        monkeypatch.setattr(Inotify, "__init__", noted)

    def count(self) -> int:
        """Look which are open."""
        count = 0
        for fd in self._fds:
            # Listeners close theirs in threads of their own.
            with contextlib.suppress(FileNotFoundError):
                count += Path(f"/proc/self/fd/{fd}").readlink() == Path("anon_inode:inotify")
        return count


def _refuse(self: Inotify) -> None:
    del self
    raise OSError(errno.EMFILE, "no more instances", "inotify")


def test_readers_that_wait_do_not_each_read_the_record_now_and_then(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look of a client is enough, and takes the longer, the more wait: 300 of them used a fifth of a core."""
    for module in (file_backend, record_store):
        monkeypatch.setattr(module, "CHECK_SECONDS", 0.05)
    looks: list[str] = []
    update = RecordStore.update

    async def run() -> None:
        async with lockkit.aio.connect(f"file://{directory}") as client, client.rwlock("x").write():
            readers = [asyncio.create_task(client.rwlock("x").read().acquire()) for _ in range(20)]
            await until_async(lambda: len(client._engine.acquisitions.waiting) == len(readers))

            def counted(store: RecordStore, name: str, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - as it is
                looks.append(name)
                return update(store, name, *arguments, **keywords)

            monkeypatch.setattr(RecordStore, "update", counted)
            await asyncio.sleep(1)
            monkeypatch.undo()
        for lease in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(lease, LockError)  # the client is closed

    asyncio.run(run())

    assert 0 < len(looks) < 100  # of about 400


def test_waiter_that_nothing_can_wake_polls_and_gets_the_lock(
    connect: Connect, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pauses; not a thousand times a second. With inotify back, it is woken again."""
    holder, waiter = connect(host), connect(host)
    grant = granted(drive(holder.try_acquire(host.request(ttl=LONG))))
    attempts = 0
    request = host.request(ttl=LONG)
    with monkeypatch.context() as shortage:
        shortage.setattr(Inotify, "__init__", _refuse)
        until_at = host.runtime.now() + 1.0
        while host.runtime.now() < until_at:
            busy = drive(waiter.try_acquire(request))
            assert isinstance(busy, Busy)
            drive(waiter.wait(request, busy, until_at))
            attempts += 1
    assert attempts < 100
    assert request.state == "polls"

    waiter._listen_at = 0.0  # some seconds later
    assert isinstance(drive(waiter.try_acquire(request)), Busy)
    assert request.state is waiter._listener is not None
    thread = threading.Thread(target=acquire, args=(waiter, request))
    thread.start()
    drive(holder.release(grant))
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_dropped_clients_give_their_inotify_instances_back(
    directory: Path, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user has 128 of them. While a client exists but waits for nothing, it has none either."""
    monkeypatch.setattr(file_wakeup, "LINGER_SECONDS", 0.2)
    backends = [FileBackend.open(parse(f"file://{directory}"), {"group": False}, host) for _ in range(6)]
    granted(drive(backends[0].try_acquire(host.request(ttl=LONG))))
    instances = _Instances(monkeypatch)
    idle, dropped = backends[1:3], backends[3:]
    requests = {backend: host.request(ttl=LONG) for backend in backends[1:]}
    assert all(isinstance(drive(backend.try_acquire(request)), Busy) for backend, request in requests.items())
    assert instances.count() == 5

    while requests:
        backend, request = requests.popitem()
        drive(backend.abandon(request))
    until(lambda: instances.count() == 0)
    for backend in idle:
        drive(backend.close())
    while dropped:
        backend = dropped.pop()
        backends.remove(backend)
        backend._listener = file_wakeup.WakeupListener(
            host.runtime, backend._directory, {}
        )  # one that was not started, and so does not end by itself
        assert instances.count() == 1
        del backend
        # Again and again: while another thread collects, a call does nothing.
        until(lambda: gc.collect() >= 0 and instances.count() == 0)
    drive(backends[0].close())


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
@pytest.mark.parametrize("kind", ["cancelled", "eager"])
def test_waiter_is_woken_whatever_becomes_of_the_task_of_its_listener(directory: Path, kind: str) -> None:
    """Some programs cancel all tasks that they did not start; an eager one runs within the call that starts it."""
    if kind == "eager" and sys.version_info < (3, 12):
        pytest.skip("asyncio has eager tasks since Python 3.12")

    async def main() -> None:
        if kind == "eager":
            asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
        host = StubHost(AsyncioRuntime())
        holder, waiter = (FileBackend.open(parse(f"file://{directory}"), {"group": False}, host) for _ in range(2))
        grant = granted(await holder.try_acquire(host.request(ttl=LONG)))
        request = host.request(ttl=LONG)

        async def contend() -> None:
            while isinstance(outcome := await waiter.try_acquire(request), Busy):
                await waiter.wait(request, outcome, host.runtime.now() + LONG)

        waiting = asyncio.create_task(contend())
        await asyncio.sleep(0.05)
        if kind == "cancelled":
            (listener,) = asyncio.all_tasks() - {waiting, asyncio.current_task()}
            listener.cancel()
            await asyncio.wait([listener])
            await asyncio.sleep(0.05)
        assert await holder.release(grant)

        await asyncio.wait_for(waiting, 30)
        await waiter.close()
        await holder.close()

    asyncio.run(main())
