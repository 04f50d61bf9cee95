"""Connections of asyncio drivers, in SQLAlchemy's PEP 249 form: see `lockkit.backends.sql.connection`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy.util import greenlet_spawn

from lockkit.backends.sql import quirks
from lockkit.backends.sql.blocking import DbapiConnection
from lockkit.backends.sql.connection import NO_ANSWER, SessionConnection, cut
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.runtime import Event, Runtime
from lockkit.units import Instant

CLOSE_SECONDS = 0.2
"""How long saying good-bye to a server may take, seconds. Longer delays `Client.close` when the server hangs; shorter
leaves the server to notice the end by itself."""

THREAD_SECONDS = 3.0
"""How long the thread of a driver may take to close its connection, seconds: on a busy disk SQLite takes long to copy
its log into the file. A thread that ends after its event loop prints a traceback."""


class AdaptedConnection(DbapiConnection, SessionConnection):
    """Any asyncio driver, as SQLAlchemy presents it: a greenlet makes it look like a blocking one."""

    def __init__(
        self,
        dbapi: Any,  # noqa: ANN401 - any driver's
        paramstyle: str,
        terminate: Any,  # noqa: ANN401 - SQLAlchemy's
        runtime: Runtime,
        keep: object = None,
    ) -> None:
        """Take over a connection in autocommit."""
        super().__init__(dbapi, paramstyle, keep)
        quirks.only_warn_without_loop(self._driver_connection)
        self._terminate = terminate
        self._runtime = runtime
        self._task: asyncio.Task[Result] | None = None

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """See `Connection.run`. In a task of its own: drivers differ in what a cancellation leaves of a connection."""
        self.send(statement, parameters)
        return await self.answer(seconds)

    def send(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        self._task = asyncio.create_task(self._in_greenlet(statement, parameters))

    async def answer(self, seconds: float) -> Result:
        task = self._task
        assert task is not None
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise TimeoutError(NO_ANSWER)
        self._task = None
        return task.result()

    @property
    def answered(self) -> bool:
        return self._task is None or self._task.done()

    async def until_answer(self, wake: Event, until: Instant) -> None:
        task = self._task
        if task is None:
            return

        def notify(_: object) -> None:
            wake.set()

        task.add_done_callback(notify)
        try:
            if not task.done():
                await wake.wait(max(0.0, until - self._runtime.now()))
        finally:
            task.remove_done_callback(notify)
        wake.clear()

    async def _in_greenlet(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        return await greenlet_spawn(self._run, statement, parameters)

    def _run_text(self, statement: Statement, parameters: Sequence[Parameter]) -> Result:
        self._cursor = self.dbapi.cursor()
        try:
            return super()._run_text(statement, parameters)
        finally:
            self._cursor.close()
            self._cursor = None

    async def finish(self, seconds: float) -> None:
        if self._task is not None:
            await self.answer(seconds)

    def terminate(self) -> None:
        dbapi, self.dbapi = self.dbapi, None
        fd, self._fd = self._fd, -1
        task, self._task = self._task, None
        if fd >= 0 and self._runtime.loop_has_ended():
            # As when the interpreter exits: the driver could only ask the event loop.
            if dbapi is not None:
                cut(fd)
                quirks.forget_asyncio_stream(getattr(dbapi, "driver_connection", dbapi))
            return
        if task is not None:
            task.cancel()
            task.add_done_callback(_ignore_error)
        if dbapi is not None:
            tls = quirks.tls_transport(getattr(dbapi, "driver_connection", dbapi))
            self._terminate(dbapi)
            if tls is not None:
                tls.abort()

    async def close(self) -> None:
        """See `Connection.close`. Drivers with a thread of their own (aiosqlite) end it only so."""
        dbapi, self.dbapi = self.dbapi, None
        if dbapi is not None:
            self._fd = -1
            tls = quirks.tls_transport(getattr(dbapi, "driver_connection", dbapi))
            await asyncio.wait([close_later(dbapi)], timeout=CLOSE_SECONDS)
            if tls is not None:
                tls.abort()


def _ignore_error(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging an error of a task whose result no caller wants."""
    if not task.cancelled():
        task.exception()


_closing: set[asyncio.Task[None]] = set()
"""What `until_closed` waits for; asyncio itself keeps tasks that nobody awaits by weak references only."""


def close_later(dbapi: Any) -> asyncio.Task[None]:  # noqa: ANN401 - any driver's
    """Close a connection in a task, as drivers demand that cannot terminate at once or have a thread (aiosqlite)."""
    task: asyncio.Task[None] = asyncio.ensure_future(greenlet_spawn(dbapi.close))
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    task.add_done_callback(_ignore_error)
    return task


async def until_closed() -> None:
    """Wait for all that `close_later` is closing in this event loop."""
    loop = asyncio.get_running_loop()
    closing = [task for task in _closing if task.get_loop() is loop]
    if closing:
        await asyncio.wait(closing, timeout=THREAD_SECONDS)
