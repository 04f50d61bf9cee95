"""
A PostgreSQL connection of psycopg 3, driven through its libpq wrapper (``psycopg.pq``), the same on both faces.

psycopg's cursors convert values, keep rows and wait without a limit; a lock needs none of the first two and must have
the third. So statements go out and answers come in here, and waiting is the runtime's: a server that is stopped holds
nobody up beyond the limit, and a cancelled caller leaves the answer to be heard out, as libpq's documentation asks
("34.4. Asynchronous Command Processing").
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq

from lockkit.backends.sql.connection import NO_ANSWER, Link
from lockkit.backends.sql.statement import Result

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

    from lockkit.backends.sql.statement import Parameter, Statement
    from lockkit.runtime import Runtime

__all__ = ["PqLink"]

FLUSH_PAUSE = 0.001
"""Between two tries to send what the socket did not take, seconds. Only large batches to a slow server need it."""

_OK = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY)
_INTEGERS = frozenset({20, 21, 23, 26})  # int8, int2, int4, oid: pg_type.dat
_BOOL = 16


class PqLink(Link):
    """One connection."""

    def __init__(self, connection: Any, runtime: Runtime, keep: object = None) -> None:  # noqa: ANN401 - psycopg's, of either face
        """
        Take over a connection of psycopg's.

        Args:
            connection: With nothing under way.
            runtime: Of the face.
            keep: What must live as long as it.
        """
        self.connection = connection
        self.pgconn: PGconn = connection.pgconn
        self._runtime = runtime
        self._keep = keep
        self._fd: int = self.pgconn.socket
        self._names: dict[Statement, bytes] = {}
        self._prepared = 0
        self._last: PGresult | None = None
        self._blocking = runtime.kind == "blocking"
        self._readable = runtime.readable
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        self._poll = poll.poll

    def fileno(self) -> int:
        """The socket."""
        return self._fd

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        """See `Link.run`."""
        pgconn = self.pgconn
        packed = _pack(parameters)
        name = self._names.get(statement)
        if name:
            pgconn.send_query_prepared(name, packed)
        elif name is None or self.pooled:
            # Preparing costs a round trip: not for what is run once. Behind a pooler the next may be another session.
            if not statement.once:
                self._names[statement] = b""
            pgconn.send_query_params(statement.packed, packed)
        else:
            self._prepared += 1
            name = b"lockkit_%d" % self._prepared
            pgconn.send_prepare(name, statement.packed)
            await self._answer(seconds)
            self._names[statement] = name
            pgconn.send_query_prepared(name, packed)
        return await self.answer(seconds)

    async def answer(self, seconds: float) -> Result:
        """Hear what was sent through `pgconn`: of several statements in one text, the last rows, if any gave some."""
        return _read(await self._answer(seconds))

    async def _answer(self, seconds: float) -> PGresult:
        """Give the last answer to what was sent; one that is an error is raised."""
        pgconn = self.pgconn
        until = self._runtime.now() + seconds
        while pgconn.flush():
            if self._runtime.now() >= until:
                raise TimeoutError(NO_ANSWER)
            await self._runtime.sleep(FLUSH_PAUSE)
        while True:
            while pgconn.is_busy():
                left = max(0.0, until - self._runtime.now())
                ready = self._poll(left * 1000) if self._blocking else await self._readable(self._fd, left)
                if not ready:
                    raise TimeoutError(NO_ANSWER)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                break
            # Kept: the caller may be cancelled before the server says that this was all, and then it is heard out.
            # Rows are not given up for a COMMIT behind them.
            if self._last is None or not self._last.nfields or result.status != pq.ExecStatus.COMMAND_OK:
                self._last = result
        last, self._last = self._last, None
        if last is None:
            # An interrupt struck between libpq's giving it and our keeping it. Nobody knows what it was.
            message = "the answer was lost to an interrupt"
            raise psycopg.OperationalError(message)
        if last.status not in _OK:
            self._forget_plans(last)
            raise psycopg.errors.error_from_result(last)
        return last

    def _forget_plans(self, result: PGresult) -> None:
        # DISCARD ALL or DEALLOCATE by whoever else has this session, or a table that was made anew.
        if result.error_field(pq.DiagnosticField.SQLSTATE) in {b"26000", b"0A000", b"42P05"}:
            self._names.clear()

    async def finish(self, seconds: float) -> None:
        """See `Link.finish`."""
        try:
            await self._answer(seconds)
        except psycopg.errors.Error as error:
            if error.sqlstate is None:
                raise

    @property
    def stale(self) -> bool:
        """See `Link.stale`. A notice ends it too."""
        return bool(self._poll(0)) or self.pgconn.status != pq.ConnStatus.OK

    @property
    def server_pid(self) -> int:
        """See `Link.server_pid`."""
        return self.pgconn.backend_pid

    def notifications(self) -> Iterable[bytes]:
        """
        Give what NOTIFY told since the last call. Call it when the socket is readable.

        Raises:
            psycopg.OperationalError: The connection has ended.
        """
        self.pgconn.consume_input()
        while (notification := self.pgconn.notifies()) is not None:
            yield notification.extra

    def terminate(self) -> None:
        """See `Link.terminate`. One message to the server, and the socket is closed."""
        self.pgconn.finish()


def _pack(parameters: Sequence[Parameter]) -> list[bytes | None]:
    """Write parameters as PostgreSQL reads them."""
    packed: list[bytes | None] = []
    for value in parameters:
        if value is None or type(value) is bytes:
            packed.append(value)
        elif type(value) is str:
            packed.append(value.encode())
        elif type(value) is int:
            packed.append(b"%d" % value)
        elif isinstance(value, list):
            packed.append(_array(value))
        else:
            packed.append(str(value).encode())
    return packed


def _array(values: list[str]) -> bytes:
    """Write an array of text ("8.15.2. Array Value Input")."""
    quoted = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return ("{" + ",".join(f'"{value}"' for value in quoted) + "}").encode()


def _read(result: PGresult) -> Result:
    columns = range(result.nfields)
    kinds = [result.ftype(column) for column in columns]
    value = result.get_value
    rows = [tuple([_convert(value(row, column), kinds[column]) for column in columns]) for row in range(result.ntuples)]
    return Result(rows, result.command_tuples or 0, 0)


def _convert(value: bytes | None, kind: int) -> str | int | bool | None:
    if value is None:
        return None
    if kind in _INTEGERS:
        return int(value)
    return value == b"t" if kind == _BOOL else value.decode()
