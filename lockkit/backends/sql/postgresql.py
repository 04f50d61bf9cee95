"""
PostgreSQL, by psycopg 3, driven through its libpq wrapper (``psycopg.pq``), for sync and async clients.

psycopg's cursors wait without a time limit, and a lock needs one. So this module sends statements and reads answers
itself, and the runtime waits: a server that is stopped holds no caller up beyond the limit, and the answer of a
cancelled call is read later, as libpq's documentation asks ("34.4. Asynchronous Command Processing").
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import pq

from lockkit.backends.sql.connection import NO_ANSWER, Connection, Driver, Parameter, Result, Statement
from lockkit.backends.sql.dialect import CONNECT_SECONDS, STATEMENT_SECONDS
from lockkit.backends.sql.options import as_it_is, parse_connect_limit
from lockkit.runtime import Runtime

FLUSH_PAUSE = 0.001
"""Between two tries to send what the socket did not take, seconds. Only large batches to a slow server need it."""

_SEVERITY = pq.DiagnosticField.SEVERITY_NONLOCALIZED
_OK = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY)

# psycopg's own adapters would do what `_LOADERS` and `_pack` do, but an application may have registered others, and
# they give an int another type with its size, which does not fit a statement that was prepared once.
_LOADERS: dict[int, Callable[[bytes], Any]] = {**dict.fromkeys((20, 21, 23, 26), int), 16: b"t".__eq__}
"""By pg_type.dat: int8, int2, int4 and oid; bool. All else is text."""


_DECIDED = {"user", "password", "dbname", "port", "client_encoding", "options", "replication"}
"""What the URL says elsewhere, and what lockkit decides itself."""

KEYWORDS = frozenset(one.keyword.decode() for one in pq.Conninfo.get_defaults())
"""Libpq's own list, "34.1.2. Parameter Key Words"."""

OPTIONS: dict[str, Callable[[Any], object]] = dict.fromkeys(sorted(KEYWORDS - _DECIDED), as_it_is)
OPTIONS["connect_timeout"] = parse_connect_limit


def keep_password_secret(parameters: dict[str, Any]) -> None:
    """
    Have libpq send no password in clear text to an unverified server.

    By default libpq does so when asked: "34.1.2. Parameter Key Words", ``require_auth`` (since version 16).
    """
    if not str(parameters.get("sslmode", "")).startswith("verify-") and "require_auth" in KEYWORDS:
        parameters.setdefault("require_auth", "!password")


class PsycopgDriver(Driver):
    """Connects to a server; `parameters` gives libpq's, anew for each connection: an application's may change."""

    errors = (psycopg.Error, OSError, EOFError)

    def __init__(self, parameters: Callable[[], Mapping[str, Any]]) -> None:
        self._parameters = parameters
        self._last = ("", "")  # host and port of the last connection

    def open(self, runtime: Runtime) -> PsycopgConnection:
        given = self._parameters()
        self.password = str(given.get("password") or "")
        limits = {"connect_timeout": CONNECT_SECONDS, "tcp_user_timeout": int(STATEMENT_SECONDS * 1000)}
        parameters: dict[str, Any] = {**limits, **given, "client_encoding": "utf8"}
        hosts, ports = (str(given.get(name) or "").split(",") for name in ("host", "port"))
        if len(hosts) == len(ports) > 1 and "hostaddr" not in given:
            # The last one first. Behind two that do not answer a caller's time is over, but this goes on in its thread,
            # and then the next call knows.
            places = list(zip(hosts, ports, strict=True))
            places.sort(key=lambda place: place not in {self._last, (self._last[0], "")})
            parameters["host"], parameters["port"] = (",".join(column) for column in zip(*places, strict=True))
        try:
            made = psycopg.connect(autocommit=True, prepare_threshold=None, **parameters)
        except psycopg.Error as error:
            # Its traceback refers to a generator of psycopg that keeps the socket open, for as long as the error lives.
            raise error.with_traceback(None) from None
        self._last = (made.pgconn.host.decode(), made.pgconn.port.decode())
        return PsycopgConnection(made, runtime)


class PsycopgConnection(Connection):
    """One connection."""

    def __init__(self, connection: psycopg.Connection, runtime: Runtime) -> None:
        super().__init__(runtime, connection.pgconn.socket)
        self._driver = connection  # its end would close the socket
        self.pgconn: pq.abc.PGconn = connection.pgconn
        self._names: WeakKeyDictionary[Statement, bytes] = WeakKeyDictionary()
        self._prepared = 0
        self._last: pq.abc.PGresult | None = None
        # Of what comes unasked. The server says FATAL, frees the locks of the session, and closes the socket later.
        unasked = self._unasked = set[bytes | None]()
        self.pgconn.notice_handler = lambda notice: unasked.add(notice.error_field(_SEVERITY))
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        self._poll = poll.poll
        self._literal = pq.Escaping(self.pgconn).escape_literal

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        pgconn = self.pgconn
        packed = _pack(parameters)
        name = self._names.get(statement)
        if name:
            pgconn.send_query_prepared(name, packed)
        elif name is None or self.pooled:
            # Preparing costs a round trip: not for statements run once. A pooler may give the next another session.
            self._names[statement] = b""
            pgconn.send_query_params(statement.packed, packed)
        else:
            self._prepared += 1
            name = b"lockkit_%d" % self._prepared
            pgconn.send_prepare(name, statement.packed)
            await self.answer(seconds)
            self._names[statement] = name
            pgconn.send_query_prepared(name, packed)
        return await self.answer(seconds)

    async def answer(self, seconds: float) -> Result:
        """See `Connection.answer`. Of several statements in one text: the last rows, if any gave some."""
        pgconn = self.pgconn
        until = self._runtime.now() + seconds
        while pgconn.flush():
            if self._runtime.now() >= until:
                raise TimeoutError(NO_ANSWER)
            await self._runtime.sleep(FLUSH_PAUSE)
        while True:
            while pgconn.is_busy():
                left = max(0.0, until - self._runtime.now())
                ready = self._poll(left * 1000) if self._blocking else await self._runtime.readable(self.fd, left)
                if not ready:
                    raise TimeoutError(NO_ANSWER)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                break
            # Kept: the caller may be cancelled before the server says that this was all, and another call reads the
            # rest. Rows are not given up for a COMMIT behind them.
            if self._last is None or not self._last.nfields or result.status != pq.ExecStatus.COMMAND_OK:
                self._last = result
        last, self._last = self._last, None
        if last is None:
            # An interrupt struck after libpq returned it and before it was kept.
            raise psycopg.OperationalError("the answer was lost to an interrupt")
        if last.status not in _OK:
            raise self._error_of(last)
        return _read(last)

    def _error_of(self, result: pq.abc.PGresult) -> psycopg.Error:
        # DISCARD ALL or DEALLOCATE by another client of this session, or a table that was made anew.
        if result.error_field(pq.DiagnosticField.SQLSTATE) in {b"26000", b"0A000", b"42P05"}:
            self._names.clear()
        return psycopg.errors.error_from_result(result)

    async def finish(self, seconds: float) -> None:
        try:
            await self.answer(seconds)
        except psycopg.errors.Error as error:
            if error.sqlstate is None:
                raise

    def send(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        """
        See `Connection.send`.

        By the simple protocol ("53.2.2. Simple Query"), which takes several statements in one text: BEGIN and what
        locks are one round trip. It has no parameters, so they are written into the text as libpq escapes them.
        """
        self.pgconn.send_query(statement.filled(self._spell, parameters))

    def _spell(self, value: object) -> object:
        return value if isinstance(value, int) else bytes(self._literal(str(value).encode())).decode()

    @property
    def answered(self) -> bool:
        try:
            if self._poll(0):
                self.pgconn.consume_input()
            return not self.pgconn.is_busy()
        except psycopg.OperationalError:
            return True  # the connection has ended: reading the answer says so

    @property
    def in_transaction(self) -> bool:
        """Whether the server has a transaction open for this connection, as of its last answer."""
        return self.pgconn.transaction_status != pq.TransactionStatus.IDLE

    @property
    def failed(self) -> bool:
        """Whether an error has ended that transaction, and with it what it had locked."""
        return self.pgconn.transaction_status == pq.TransactionStatus.INERROR

    @property
    def stale(self) -> bool:
        """See `Connection.stale`. Not all that comes unasked is the end: a notice, a setting that was changed."""
        try:
            # The server's last words, then the end: two reads.
            while self._poll(0):
                self.pgconn.consume_input()
                self.pgconn.is_busy()  # parses what was read
        except psycopg.OperationalError:
            return True
        return b"FATAL" in self._unasked or self.pgconn.status != pq.ConnStatus.OK

    def notifications(self) -> Iterable[bytes]:
        """Return what NOTIFY sent since the last call. Call it when the socket is readable."""
        self.pgconn.consume_input()
        while (notification := self.pgconn.notifies()) is not None:
            yield notification.extra

    def terminate(self) -> None:
        """See `Connection.terminate`. One message to the server, and the socket is closed."""
        self.pgconn.finish()


def _pack(parameters: Sequence[Parameter]) -> list[bytes | None]:
    """Write parameters as PostgreSQL reads them."""
    return [
        value.encode() if isinstance(value, str)
        else str(value).encode() if isinstance(value, int)
        else _array(value) if isinstance(value, list)
        else value
        for value in parameters
    ]  # fmt: skip


def _array(values: list[str]) -> bytes:
    """Write an array of text ("8.15.2. Array Value Input")."""
    quoted = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return ("{" + ",".join(f'"{value}"' for value in quoted) + "}").encode()


def _read(result: pq.abc.PGresult) -> Result:
    width = result.nfields
    rows = []
    for row in range(result.ntuples):
        values: list[Any] = []
        for column in range(width):
            packed = result.get_value(row, column)
            load = _LOADERS.get(result.ftype(column), bytes.decode)
            values.append(None if packed is None else load(packed))
        rows.append(tuple(values))
    return Result(rows, result.command_tuples or 0, 0)
