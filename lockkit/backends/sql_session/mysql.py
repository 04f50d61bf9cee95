"""Sessions at MariaDB and MySQL: see `lockkit.backends.sql_session.session`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from lockkit.backends.sql.connection import NO_ANSWER
from lockkit.backends.sql.statement import Result
from lockkit.backends.sql_session.session import Session, until_readable

if TYPE_CHECKING:
    import asyncio

    from lockkit.backends.sql.connection import AdaptedLink, DbapiLink, Link
    from lockkit.backends.sql.statement import Parameter, Statement
    from lockkit.runtime import Event, Runtime

__all__ = ["PyMysqlSession", "TaskSession", "error_number"]

COM_QUERY = 3
"""The protocol's command for a statement as text."""


_ENDED = frozenset({1053, 1927, 4031})
"""What the server says when it ends a session: it stops, by KILL, after ``wait_timeout``."""


class _MysqlSession(Session):
    def told(self, error: BaseException) -> bool:
        """See `Session.told`."""
        return error_number(error) in _ENDED


class PyMysqlSession(_MysqlSession):
    """
    A session of PyMySQL.

    PyMySQL has no public way to send a statement and to hear its answer later, so the two methods are used here that
    its own ``query`` is made of. Its limit of time ends the connection, and with it the lock; ours does not.
    """

    link: DbapiLink

    def __init__(self, link: Link, runtime: Runtime) -> None:
        """Take over a connection with nothing under way."""
        super().__init__(runtime)
        self.link = cast("DbapiLink", link)
        self._dbapi: Any = self.link.dbapi
        self._fd: int = self._dbapi._sock.fileno()  # noqa: SLF001 - see the class

    def _send(self, statement: Statement, parameters: Sequence[Parameter]) -> None:
        text, order = statement.spelled("format")
        escape = self._dbapi.escape
        text %= tuple([escape(value) for value in order(parameters)])
        self._dbapi._execute_command(COM_QUERY, text.encode())  # noqa: SLF001 - see the class

    async def _answer(self, seconds: float) -> Result:
        if not await self._runtime.readable(self._fd, seconds):
            raise TimeoutError(NO_ANSWER)
        # It has begun to answer: the rest must come in the same time.
        self._dbapi._read_timeout = max(0.001, seconds)  # noqa: SLF001 - see the class
        try:
            changed = self._dbapi._read_query_result()  # noqa: SLF001 - see the class
        except BaseException as error:
            if not isinstance(error, Exception):
                self.drop()  # Ctrl-C: nobody knows how much of the answer was read
            raise
        return Result(self._dbapi._result.rows or (), changed, self._dbapi.insert_id())  # noqa: SLF001 - see the class

    def fileno(self) -> int:
        """See `Session.fileno`."""
        return self._fd

    @property
    def answered(self) -> bool:
        """See `Session.answered`."""
        return self.link.stale  # it looks whether there is something to read

    async def until_answer(self, wake: Event, until: float) -> None:
        """See `Session.until_answer`."""
        await until_readable(self._runtime, self._fd, wake, until)


class TaskSession(_MysqlSession):
    """A session of an asyncio driver, through SQLAlchemy's form of it."""

    link: AdaptedLink

    def __init__(self, link: Link, runtime: Runtime) -> None:
        """Take over a connection with nothing under way."""
        super().__init__(runtime)
        self.link = cast("AdaptedLink", link)
        self._task: asyncio.Task[Result] | None = None

    def _send(self, statement: Statement, parameters: Sequence[Parameter]) -> None:
        self._task = self.link.send(statement, parameters)

    async def _answer(self, seconds: float) -> Result:
        return await self.link.answer(seconds)

    def fileno(self) -> int:
        """See `Session.fileno`."""
        return self.link._fd  # noqa: SLF001 - asyncio drivers have no public name for it

    @property
    def answered(self) -> bool:
        """See `Session.answered`."""
        return self._task is not None and self._task.done()

    async def until_answer(self, wake: Event, until: float) -> None:
        """See `Session.until_answer`."""
        task = self._task
        assert task is not None

        def tell(_: object) -> None:
            wake.set()

        task.add_done_callback(tell)
        try:
            if not task.done():
                await wake.wait(max(0.0, until - self._runtime.now()))
        finally:
            task.remove_done_callback(tell)
        wake.clear()

    @property
    def ended(self) -> bool:
        """See `Session.ended`. asyncio has read the end of the connection before we could see it at the socket."""
        if self.dropped:
            return True
        reader = getattr(self.link.dbapi.driver_connection, "_reader", None)
        if reader is None:
            return super().ended
        return bool(reader.at_eof() or reader.exception() is not None)

    def drop(self) -> None:
        """See `Session.drop`. At the exit of the interpreter there is no event loop for the driver to do it with."""
        driver: Any = getattr(self.link.dbapi, "driver_connection", None)
        if driver is None or not self._runtime.loop_has_ended():
            super().drop()
            return
        self.unheard = False
        self.dropped = True
        with suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as connection:  # it may have ended
            connection.shutdown(socket.SHUT_RDWR)
        driver._writer = None  # noqa: SLF001 - else its __del__ asks the event loop to close it


def error_number(error: BaseException | None) -> int:
    """Give the number of a driver's error, 0 if it has none: its first argument in all drivers."""
    arguments = getattr(getattr(error, "orig", None) or error, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else 0
