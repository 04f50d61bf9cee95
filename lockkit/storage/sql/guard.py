"""
The guard for data in a SQL database.

Next to the guarded data, the database stores the newest token that was accepted: in a column of the row itself, or in
``lockkit_fences`` under the name of a *scope*. The guard compares and writes it in the application's own transaction,
which keeps that row locked until it ends. So a holder with an older token finds a newer one, or waits and then finds
it; and what the transaction writes afterwards, under the same row, needs no further comparison.

Readers of a read/write lock hold it together, so a guard keeps two marks: the newest token of a writer and that of a
reader (the columns ``token`` and ``read_token``; ``fence`` and, if there is one, ``read_fence``). A writer must have at
least the first and more than the second, a reader at least the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.orm import InstanceState, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from lockkit import validation
from lockkit.errors import ConfigurationError
from lockkit.runtime import Kind, drive
from lockkit.storage.sql import FENCES
from lockkit.storage.sql.client import (
    ApplicationTransaction,
    Asynchronous,
    Blocking,
    StartAgain,
    column_of,
    data_error,
    label_of,
    translating,
    with_value,
)
from lockkit.storage.sql.schema import KEYS, Family, family_of, key_of, quoted, with_table
from lockkit.storage.tokens import check_token, stale_token

S = TypeVar("S", bound="sa.Update | sa.Delete")
T = TypeVar("T")

FENCE = "fence"
"""Default name of the column with the newest token."""

READ_FENCE = "read_fence"
"""Name of the column with a reader's newest token, if the table has one."""


class FenceMixin:
    """
    Gives a declarative class the column ``fence``, for `fenced` and `SqlGuard`.

    ::

        class Seat(FenceMixin, Base):
            __tablename__ = "seat"

    For a table that exists already: ``ALTER TABLE seat ADD COLUMN fence BIGINT NOT NULL DEFAULT 0``. If readers of a
    read/write lock guard the rows, too, add a column ``read_fence`` of the same kind; both are compared then.

    A DELETE removes the token with its row: insert a row that may have existed before with ``fence=lease.token``, or
    guard it by a scope.
    """

    fence: Mapped[int] = mapped_column(sa.BigInteger, default=0, server_default="0", nullable=False)


def fenced(statement: S, token: int, *, fence: sa.ColumnElement[int] | None = None) -> S:
    """
    Restrict an UPDATE or DELETE to rows that no newer holder has touched; an UPDATE stores the token there.

    ::

        statement = fenced(update(Seat).where(Seat.name == "12A").values(customer="Ben"), lease.token)
        if session.execute(statement).rowcount == 0:
            ...  # a newer holder has changed the row, or there is no such seat

    No I/O. `SqlGuard.execute` runs it, too, and distinguishes the two cases.

    Args:
        statement: Of one table, for Core or the ORM.
        token: The token of the lease under which you work.
        fence: The column with the newest token; None: the column ``fence`` of the table. NULL means no token yet.

    Returns:
        ``… WHERE … AND fence <= token``, for an UPDATE with ``SET fence = token``. Equal tokens are accepted: a holder
        may write as often as it likes. With a column ``read_fence`` also ``… AND read_fence < token``.

    Raises:
        ConfigurationError: The token is not valid, or there is no such column.
    """
    check_token(token)
    column = column_of(statement, fence, FENCE, option="fence")
    guarded: Any = statement.where(_or_null(column, column <= token))
    read = _read_column(statement)
    if read is not None:
        guarded = guarded.where(_or_null(read, read < token))
    return cast("S", with_value(guarded, column, token))


def _or_null(column: Any, admitted: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:  # noqa: ANN401 - a column, mapped or not
    return sa.or_(column.is_(None), admitted) if getattr(column, "nullable", True) else admitted


def _read_column(statement: sa.Update | sa.Delete) -> Any:  # noqa: ANN401 - a column, or None
    """Return the column with the token of readers, if the table has one."""
    table: Any = statement.table
    return table.c.get(READ_FENCE)


class AsyncSqlGuard:
    """
    Guards data in a SQL database, with asyncio.

    The same as `SqlGuard`, and both may guard the same data; what does I/O is awaited.
    """

    _kind: ClassVar[Kind] = "asyncio"

    def __init__(self, target: Asynchronous, *, table: str = FENCES, auto_create: bool = True) -> None:
        """
        Use the application's session or connection. No I/O.

        Args:
            target: An `AsyncSession` or `AsyncConnection`.
            table: See `SqlGuard`.
            auto_create: See `SqlGuard`.
        """
        self._transaction = ApplicationTransaction(target)
        if self._transaction.runtime.kind != self._kind:
            other = "AsyncSqlGuard" if self._kind == "blocking" else "SqlGuard"
            raise ConfigurationError(f"{type(target).__name__} is for lockkit.fencing.{other}")
        quoted("sqlite", table)  # raises if it is not a table name
        self._table = table
        self._auto_create = auto_create

    async def execute(
        self, statement: sa.Update | sa.Delete, *, token: int, fence: sa.ColumnElement[int] | None = None
    ) -> int:
        """Run an UPDATE or DELETE, unless the token is stale for any of its rows. See `SqlGuard.execute`."""
        column = column_of(statement, fence, FENCE, option="fence")
        if statement.exported_columns:
            raise ConfigurationError("execute() returns a count: leave out returning()")
        guarded = fenced(statement, token, fence=fence)

        def work(executor: Session | sa.Connection, connection: sa.Connection) -> int:
            name, rows = str(statement.table), _marks_of(statement, column, connection).with_for_update()
            try:
                found = _refuse_any(executor.execute(rows), token, name, connection)
                result: Any = executor.execute(guarded)
                changed: int = result.rowcount
                if changed < found:
                    # SQLite locks no rows: another transaction may have written between the two statements.
                    _refuse_any(executor.execute(rows), token, name, connection)
            except sa.exc.DBAPIError as error:
                made = data_error(error, connection)
                if not (error.connection_invalidated or isinstance(made, StartAgain)):
                    raise  # the application's own statement is wrong
                raise made from error
            return changed

        return await self._transaction.run(work)

    async def accept(self, scope: str, *, token: int, shared: bool = False) -> None:
        """Accept a token for a scope. See `SqlGuard.accept`."""
        name = _scope(scope)
        check_token(token, name=name)

        def work(_: object, connection: sa.Connection) -> None:
            def ask(sql: Mapping[str, sa.TextClause], given: dict[str, Any]) -> Iterable[Any]:
                result = connection.execute(sql["read" if shared else "write"], {**given, "token": token})
                return result if result.returns_rows else connection.execute(sql["locked"], given)

            _refuse_any(self._ask(connection, name, ask), token, name, connection, shared=shared)

        await self._transaction.run(work)

    async def accept_object(self, instance: object, *, token: int, shared: bool = False) -> None:
        """Accept a token for a mapped object, and read the object again. See `SqlGuard.accept_object`."""
        state = sa.inspect(instance, raiseerr=False)
        if not isinstance(state, InstanceState):
            raise ConfigurationError(f"instance must be an object of a mapped class, not {validation.shown(instance)}")
        name = f"{type(instance).__name__} {state.identity}"
        check_token(token, name=name)
        column = _mapped_column(state, name)
        read: Any = column.table.c.get(READ_FENCE)
        if shared and read is None:
            message = f"the table of {name} has no column {READ_FENCE!r}: add one like {FENCE!r}, or use a scope"
            raise ConfigurationError(message, name=name)
        keys = zip(state.mapper.primary_key, state.identity or (), strict=True)
        statement = sa.update(column.table).where(*(key == value for key, value in keys))
        if shared:
            newest = sa.case((_or_null(read, read < token), token), else_=read)
            guarded = statement.where(_or_null(column, column <= token)).values({read: newest})
        else:
            guarded = fenced(statement, token, fence=column)

        def work(executor: Session | sa.Connection, connection: sa.Connection) -> None:
            if not isinstance(executor, Session) or state.session is not executor:
                raise ConfigurationError(f"{name} does not belong to the session of this guard", name=name)
            if state.modified:
                message = f"{name} has unsaved changes: accept the token first, then read the object and change it"
                raise ConfigurationError(message, name=name)
            marks = _marks_of(statement, column, connection)
            with translating(connection, name):
                result: Any = connection.execute(guarded)
                if result.rowcount == 0:
                    rows = connection.execute(marks)
                    if not _refuse_any(rows, token, name, connection, shared=shared):
                        raise StaleDataError(f"the row of {name} is gone")
                # With a lock, so that MariaDB and MySQL return the newest row and not that of an earlier snapshot.
                executor.refresh(instance, with_for_update=True)

        await self._transaction.run(work)

    async def last(self, scope: str) -> int | None:
        """Return the newest token that was accepted for a scope, as this transaction sees it; None if there is none."""
        name = _scope(scope)

        def work(_: object, connection: sa.Connection) -> int | None:
            row = self._ask(connection, name, lambda sql, given: connection.execute(sql["last"], given).first())
            return None if row is None else max(row)

        return await self._transaction.run(work)

    def _ask(
        self, connection: sa.Connection, name: str, ask: Callable[[Mapping[str, sa.TextClause], dict[str, Any]], T]
    ) -> T:
        """Query the table of scopes."""
        family = family_of(connection.dialect.name)
        sql, given = _statements(family, quoted(family, self._table)), {"scope": key_of(family, name)}
        with translating(connection, name):
            return with_table(connection, "fences", self._table, lambda: ask(sql, given), auto_create=self._auto_create)


class _Blocking(AsyncSqlGuard):
    """The same on the blocking forms."""

    _kind = "blocking"


class SqlGuard:
    """
    Guards data in PostgreSQL, MariaDB, MySQL or SQLite, blocking, inside a transaction of the application's.

    ::

        with client.lock("seat:12A") as lease, Session(engine) as session, session.begin():
            guard = lockkit.fencing.SqlGuard(session)
            guard.execute(update(Seat).where(Seat.name == "12A").values(customer="Ben"), token=lease.token)

    The guard commits nothing: the transaction is yours. Until it ends, other transactions wait for the same row or
    scope. **After a refusal you must not commit**: let `StaleToken` leave the ``with`` block.

    Raises:
        lockkit.StaleToken: By each change, when a newer token was accepted. Nothing was written.
        lockkit.LockTimeout: The transaction met a deadlock or began too early: roll back and run it again.
        lockkit.BackendUnavailable: By each call, when the database gave no usable answer.
    """

    def __init__(self, target: Blocking, *, table: str = FENCES, auto_create: bool = True) -> None:
        """
        Use the application's session or connection. No I/O.

        Args:
            target: A `Session` or `Connection`, not in autocommit.
            table: For scopes, as ``table`` or ``schema.table``. Use the same one in all programs that guard the same
                data.
            auto_create: Create that table if it is missing; without it, see `lockkit.sql.create_tables`.
        """
        blocking: Any = target
        self._guard = _Blocking(blocking, table=table, auto_create=auto_create)

    def execute(
        self, statement: sa.Update | sa.Delete, *, token: int, fence: sa.ColumnElement[int] | None = None
    ) -> int:
        """
        Run an UPDATE or DELETE, unless the token is stale for any of its rows.

        The guard first locks the rows and reads their tokens. For a single row that you know to exist, `fenced` is
        cheaper. A DELETE removes the tokens with the rows: see `FenceMixin`.

        Args:
            statement: Of one table with a column for the token, with its values. See `fenced`.
            token: The token of the lease under which you work.
            fence: See `fenced`.

        Returns:
            How many rows it changed.

        Raises:
            sqlalchemy.exc.DBAPIError: The database refused the statement itself.
        """
        return drive(self._guard.execute(statement, token=token, fence=fence))

    def accept(self, scope: str, *, token: int, shared: bool = False) -> None:
        """
        Accept a token for a scope: no other holder's until this transaction ends, and never again an older one.

        Use it for data without a token column of its own: several tables, rows that are yet to be inserted. Call it
        first; what you write in the same transaction afterwards is guarded.

        Readers hold a read/write lock together, so a reader's token shuts out older writers, not older readers.

        Args:
            scope: 1 to 255 UTF-8 bytes, such as the name of the lock.
            token: The token of the lease under which you work.
            shared: It is a reader's: ``lease.mode == "shared"``. You only read then.
        """
        drive(self._guard.accept(scope, token=token, shared=shared))

    def accept_object(self, instance: object, *, token: int, shared: bool = False) -> None:
        """
        Accept a token for a mapped object that has the column ``fence`` (`FenceMixin`), and read the object again.

        Call it before you change the object. Its row is locked until the transaction ends, so what you decide by its
        values, and flush, is guarded.

        Args:
            instance: A persistent object of this guard's session.
            token: The token of the lease under which you work.
            shared: It is a reader's: ``lease.mode == "shared"``. You only read then; the table needs a column
                ``read_fence``, see `FenceMixin`.

        Raises:
            sqlalchemy.orm.exc.StaleDataError: Its row is gone.
        """
        drive(self._guard.accept_object(instance, token=token, shared=shared))

    def last(self, scope: str) -> int | None:
        """Return the newest token that was accepted for a scope, as this transaction sees it; None if there is none."""
        return drive(self._guard.last(scope))


@lru_cache(maxsize=64)
def _statements(family: Family, table: str) -> Mapping[str, sa.TextClause]:
    """
    Return what accepts a token, and what reads the marks.

    A stale token changes nothing, and the marks that come back show it. MariaDB and MySQL have no RETURNING: there
    ``locked`` reads them, with a lock, because the transaction's snapshot may be older.
    """
    scope = KEYS[family].format("scope")
    last = f"SELECT token, read_token FROM {table} WHERE scope = {scope}"
    if family == "mysql":
        into, written, read, token = table, "token", "read_token", "CAST(:token AS SIGNED)"
        conflict, returning = "ON DUPLICATE KEY UPDATE", ""
    else:
        into, written, read, token = f"{table} AS held", "held.token", "held.read_token", "CAST(:token AS BIGINT)"
        conflict, returning = "ON CONFLICT (scope) DO UPDATE SET", " RETURNING token, read_token"
    newer = f"CASE WHEN {written} <= {token} AND {read} < {token} THEN {token}"
    sql = {
        "write": f"INSERT INTO {into} (scope, token) VALUES ({scope}, :token)"
        f" {conflict} token = {newer} ELSE {written} END{returning}",
        "read": f"INSERT INTO {into} (scope, token, read_token) VALUES ({scope}, 0, :token)"
        f" {conflict} read_token = {newer} ELSE {read} END{returning}",
        "last": last,
        "locked": f"{last} FOR UPDATE",
    }
    return {key: sa.text(statement) for key, statement in sql.items()}


def _mapped_column(state: InstanceState[Any], name: str) -> sa.Column[Any]:
    column = state.mapper.columns.get(FENCE)
    if column is None:
        message = (
            f"the class of {name} has no column {FENCE!r}: derive it from lockkit.fencing.FenceMixin, or use a scope"
        )
        raise ConfigurationError(message, name=name)
    if state.identity is None:
        message = f"{name} is not in the database yet: there is nothing to guard. Flush it, or use a scope"
        raise ConfigurationError(message, name=name)
    if any(key.table is not column.table for key in state.mapper.primary_key):
        raise ConfigurationError(f"{FENCE!r} of {name} is not in the table of its primary key: use a scope", name=name)
    return column


def _marks_of(
    statement: sa.Update | sa.Delete,
    column: Any,  # noqa: ANN401 - a column, mapped or not
    connection: sa.Connection,
) -> sa.Select[Any]:
    """Read the marks of the rows that a statement changes, by the ORM's criteria, too (inheritance, options)."""
    read = _read_column(statement)
    for mark in (column,) if read is None else (column, read):
        kind = mark.type.dialect_impl(connection.dialect)
        # An INTEGER of SQLite has 64 bits; MariaDB may store the largest number that fits, and admit all holders then.
        if isinstance(kind, sa.Integer) and not isinstance(kind, sa.BigInteger) and connection.dialect.name != "sqlite":
            message = (
                f"{mark} is too small for tokens: make it a BIGINT column, and declare it as sqlalchemy.BigInteger"
            )
            raise ConfigurationError(message, backend=label_of(connection))
    marks = sa.select(column, sa.literal(0) if read is None else read).select_from(statement.table)
    marks = marks.options(*statement._with_options)  # noqa: SLF001 - no public name
    return marks if statement.whereclause is None else marks.where(statement.whereclause)


def _refuse_any(marks: Iterable[Any], token: int, name: str, connection: sa.Connection, *, shared: bool = False) -> int:
    """Refuse a token that is older than marks of writers and readers allow; return how many rows have such marks."""
    rows = list(marks)
    for written, seen in rows:
        last = max(written or 0, 0 if shared else seen or 0)
        if last > token or (not shared and (seen or 0) >= token):
            what = "the read" if shared else "the change"
            raise stale_token(what, token, last, name=name, backend=label_of(connection))
    return len(rows)


def _scope(scope: object) -> str:
    try:
        return validation.lock_name(scope)
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("lock name", "scope"), name=error.name) from None
