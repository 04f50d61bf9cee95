"""
What lockkit uses of drivers and of SQLAlchemy that has no public name.

Each function says what it reaches into and why, what happens without it, and which test fails then. Seen with PyMySQL
1.1 and 1.2, aiomysql 0.2 and 0.3, asyncmy 0.2, pg8000 1.31, SQLAlchemy 2.0 and 2.1.
"""

from __future__ import annotations

import io
import socket
import traceback
import warnings
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from lockkit.backends.sql.statement import Result

if TYPE_CHECKING:
    from sqlalchemy import Pool


LIMIT_SECONDS_MIN = 0.001

COM_QUERY = 3
"""MySQL's protocol command for a statement as text."""


def file_descriptor(driver_connection: Any) -> int:  # noqa: ANN401 - any driver's
    """
    Find the socket of a connection; -1 if there is none to be found.

    psycopg2 has `fileno()`. PyMySQL keeps its socket as `_sock`, pg8000 as `_usock`; aiomysql has a `_writer`, asyncmy
    and asyncpg have a `_transport`. Without it lockkit learns that a server closed a kept connection only from the next
    statement, and the holder of a lock that is a session only from the next renewal.

    Tests: `test_quirks.py::test_socket_is_found`, `test_quirks.py::test_socket_of_an_asyncio_driver_is_found`.
    """
    sock = driver_connection if hasattr(driver_connection, "fileno") else None
    for name in ("_usock", "_sock"):
        sock = sock or getattr(driver_connection, name, None)
    if sock is None:
        stream = getattr(driver_connection, "_writer", None)
        transport = getattr(driver_connection, "_transport", None) if stream is None else stream.transport
        sock = None if transport is None else transport.get_extra_info("socket")
    try:
        return int(sock.fileno()) if sock is not None else -1
    except OSError:  # closed
        return -1


def close_pg8000_socket(error: BaseException) -> None:
    """
    Close the socket of a connection that pg8000 has failed to open.

    pg8000 leaves it open: in a variable of ``_make_socket``, as `_usock`, or in the file it writes to. Without this,
    Python closes it whenever nothing refers to the error any more, mostly with a ResourceWarning.

    Test: `test_quirks.py::test_pg8000_that_cannot_connect_leaves_no_socket_open`.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("pg8000."):
            for value in list(frame.f_locals.values()):
                found = getattr(value, "_usock", value)
                if isinstance(found, socket.socket):
                    # Not its own close(), which waits for pg8000's file of it to be closed.
                    super(socket.socket, found).close()
                elif isinstance(found, io.BufferedRWPair):
                    with suppress(OSError):  # it cannot write what is left in it, and closes the socket all the same
                        found.close()


def pymysql_limit(dbapi: Any) -> float | None:  # noqa: ANN401 - PyMySQL's
    """Return the time limit of PyMySQL for each read, seconds; None: it has none. See `set_pymysql_limit`."""
    limit: float | None = dbapi._read_timeout  # noqa: SLF001 - see set_pymysql_limit
    return limit


def set_pymysql_limit(dbapi: Any, seconds: float) -> None:  # noqa: ANN401 - PyMySQL's
    """
    Set the time limit of PyMySQL for each read and write of its socket.

    The public `read_timeout` is for the life of a connection; a statement of lockkit's has as long as its caller.
    Without it an acquisition with a short timeout waits for the limit of the connection when the server hangs.

    0 would mean to it that the socket does not block, and its reader fails on that with a TypeError.

    Test: `test_quirks.py::test_pymysql_limit_holds_for_one_statement`.
    """
    dbapi._read_timeout = dbapi._write_timeout = max(LIMIT_SECONDS_MIN, seconds)  # noqa: SLF001 - see the docstring


def pymysql_send(dbapi: Any, text: bytes) -> None:  # noqa: ANN401 - PyMySQL's
    """
    Send a statement without reading its answer; with `pymysql_answer` that is what PyMySQL's own `query` does.

    A waiter's statement may be answered hours later, and any time limit of `query` ends the connection.

    Test: `test_quirks.py::test_pymysql_answer_is_read_later`.
    """
    dbapi._execute_command(COM_QUERY, text)  # noqa: SLF001 - see the docstring


def pymysql_answer(dbapi: Any) -> Result:  # noqa: ANN401 - PyMySQL's
    """Read the answer to `pymysql_send`."""
    changed = dbapi._read_query_result()  # noqa: SLF001 - see pymysql_send
    return Result(dbapi._result.rows or (), changed, dbapi.insert_id())  # noqa: SLF001 - see pymysql_send


def forget_asyncio_stream(driver_connection: Any) -> None:  # noqa: ANN401 - any driver's
    """
    Keep the `__del__` of aiomysql from asking an event loop that has ended to close the connection.

    Without it a program that closes its event loop while it holds a lock prints "Event loop is closed".

    Test: `tests/backends/sql_session/test_faults.py`,
    `test_asyncio_program_that_closes_its_event_loop_frees_its_lock` on MariaDB.
    """
    if hasattr(driver_connection, "_writer"):
        driver_connection._writer = None  # noqa: SLF001 - see the docstring


def tls_transport(driver_connection: Any) -> Any:  # noqa: ANN401 - any driver's
    """
    Return the transport of a connection over TLS; None of others.

    aiomysql and asyncmy close it in order, which waits for the server, and an event loop that ends before leaves the
    socket open.

    Test: `tests/backends/sql/test_tls.py`, all with asyncio.
    """
    stream = getattr(driver_connection, "_writer", None)
    transport = getattr(driver_connection, "_transport", None) if stream is None else stream.transport
    return transport if transport is not None and transport.get_extra_info("sslcontext") is not None else None


def only_warn_without_loop(driver_connection: Any) -> None:  # noqa: ANN401 - any driver's
    """
    Have aiomysql's `__del__` only warn if the event loop is closed: it would ask that loop to close the connection.

    Without this, a program that ends without closing its client prints a traceback for each connection.

    Test: `tests/backends/sql/test_quirks.py`, `test_client_that_was_not_closed_is_a_warning`.
    """
    if hasattr(driver_connection, "_writer"):
        kind: Any = type(driver_connection)
        driver_connection.__class__ = _warning_kind(kind)


@cache
def _warning_kind(kind: Any) -> type:  # noqa: ANN401 - aiomysql's
    def finalize(self: Any) -> None:  # noqa: ANN401 - aiomysql's
        if self._writer is not None and self._loop.is_closed():
            warnings.warn(f"Unclosed connection {self!r}", ResourceWarning, source=self, stacklevel=2)
            self._writer = None
        kind.__del__(self)

    return type(kind.__name__, (kind,), {"__del__": finalize})


def keep_nothing_prepared(dbapi: Any) -> None:  # noqa: ANN401 - SQLAlchemy's form of an asyncpg connection
    """
    Keep SQLAlchemy from using again what it has prepared with asyncpg.

    The public `prepared_statement_cache_size` is for the life of a connection, and lockkit knows only then whether a
    pooler gives each transaction another session, which does not know what was prepared. Without it a statement fails
    there again and again.

    Test: `tests/backends/sql_table/test_faults.py`, `test_statement_and_its_values_reach_the_same_session`.
    """
    dbapi._prepared_statement_cache = None  # noqa: SLF001 - see the docstring


def pool_limit(pool: Pool) -> int | None:
    """
    Return how many connections an application's pool may have at once; None: any number.

    `QueuePool` has `size()`, but no public name for its `max_overflow`.

    Test: `tests/backends/sql_session/test_backend.py`, `test_pool_that_is_used_up_says_so`.
    """
    size = getattr(pool, "size", None)
    overflow = getattr(pool, "_max_overflow", -1)
    if size is None or overflow < 0:
        return None
    return max(1, int(size()) + int(overflow))
