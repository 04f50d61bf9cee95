"""
Optimistic transactions and row updates in a SQL database: see `lockkit.optimistic`.

Each try has its own session or connection, and a transaction that is committed at its end. If the database, or
SQLAlchemy's version counter, ends the transaction because of another one, nothing was written, so lockkit tries again.
Only a lost answer to COMMIT leaves the outcome open; lockkit then raises and does not try again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Mapper, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from lockkit import validation
from lockkit.errors import ConfigurationError, LockError
from lockkit.runtime import Runtime
from lockkit.storage.retry import DELETE, Conflict, OptimisticUpdate, unknown_outcome
from lockkit.storage.sql.client import (
    StartAgain,
    column_of,
    data_error,
    kind_of,
    label_of,
    no_column,
    refuse_autocommit,
    with_value,
)

S = TypeVar("S", bound="sa.Update | sa.Delete")

VERSION = "version"
"""Default name of the version column."""

_CAUSED_BY_OTHERS = {"locked", "deadlock", "stale", "new table"}


class TransactionRetry(OptimisticUpdate):
    """One call of `lockkit.optimistic.transact` or `lockkit.optimistic.transact_async`."""

    missed = "committed"

    def __init__(self, runtime: Runtime, source: Any, fn: object, name: str | None = None) -> None:  # noqa: ANN401 - what is wrong, too
        """Check the arguments. No I/O."""
        kind = "blocking" if isinstance(source, (sa.Engine, sessionmaker)) else "asyncio"
        if not isinstance(source, (sa.Engine, sessionmaker, AsyncEngine, async_sessionmaker)):
            message = (
                "give a SQLAlchemy Engine or sessionmaker, or one of their asyncio forms, not "
                f"{type(source).__name__}: each try needs a transaction of its own"
            )
            raise ConfigurationError(message)
        if kind != runtime.kind:
            ending = "that ends in _async" if kind == "asyncio" else "without _async"
            raise ConfigurationError(f"{type(source).__name__} is {kind}: use the function {ending}")
        # The engine; None if the source only knows it once a session asks.
        bind = source if isinstance(source, (sa.Engine, AsyncEngine)) else source.kw.get("bind")
        self._engine: sa.Engine | None = bind.sync_engine if isinstance(bind, AsyncEngine) else bind
        name = name or getattr(fn, "__qualname__", None) or repr(fn)
        super().__init__(runtime, fn, name, label_of(self._engine))
        self._source: Any = source
        self._committing = False

    async def body(self, executor: Any) -> Any:  # noqa: ANN401 - a session or connection; what `fn` returns
        """Do the work of one try, in a transaction that is committed afterwards."""
        return await self.call(executor)

    async def _attempt(self) -> Any:  # noqa: ANN401 - what `fn` returns
        io = self.runtime.io
        self._committing = False
        try:
            async with self._opened() as executor:
                result = await self.body(executor)
                if hasattr(executor, "flush"):
                    await io(executor.flush())  # so that only COMMIT is left
                await self._commit(executor)
                return result
        except (StaleDataError, StartAgain) as error:
            raise Conflict from error
        except sa.exc.TimeoutError as error:
            raise data_error(error, self._engine, name=self.name) from error
        except sa.exc.DBAPIError as error:
            if kind_of(error) in _CAUSED_BY_OTHERS or error.connection_invalidated:
                raise Conflict from error
            if error.statement is None and not self._committing:  # SQLAlchemy could not connect
                raise data_error(error, self._engine, name=self.name) from error
            raise

    async def _first(self, asked: Any) -> Any:  # noqa: ANN401 - what may be the first to connect; its result
        """Await what may have to connect: SQLAlchemy leaves an OSError of asyncpg's as it is then."""
        try:
            return await self.runtime.io(asked)
        except LockError:  # of a handler of the application's: some are an OSError
            raise
        except OSError as error:
            raise data_error(error, self._engine, name=self.name) from error

    async def _commit(self, executor: Any) -> None:  # noqa: ANN401 - see `body`
        self._committing = True
        try:
            await self.runtime.io(executor.commit())
        except sa.exc.DBAPIError as error:
            if not error.connection_invalidated:
                raise
            raise unknown_outcome(self.name, self.label, "to COMMIT") from error

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        """
        Open a session or connection; closing it rolls back what was not committed.

        Autocommit, which could not undo a try, is refused: of a session when it connects, at its first use.
        """
        source = self._source
        async with AsyncExitStack() as stack:
            if isinstance(source, AsyncEngine):
                executor: Any = await self._first(stack.enter_async_context(source.connect()))
                await executor.run_sync(self.begin)
            elif isinstance(source, sa.Engine):
                executor = self.begin(stack.enter_context(source.connect()))
            else:
                made: Any = source()
                asyncio = isinstance(made, AsyncSession)
                executor = await stack.enter_async_context(made) if asyncio else stack.enter_context(made)
                session = made.sync_session if asyncio else made
                sa.event.listen(session, "after_begin", lambda _, __, connection: self.begin(connection))
            yield executor

    @staticmethod
    def begin(connection: sa.Connection) -> sa.Connection:
        """Refuse autocommit. On SQLite send BEGIN: its driver does so only before the first write, after the reads."""
        driver: Any = refuse_autocommit(connection).connection.driver_connection
        if connection.dialect.name == "sqlite" and not driver.in_transaction:
            connection.exec_driver_sql("BEGIN")
        return connection


class RowUpdate(TransactionRetry):
    """One call of `lockkit.optimistic.update_row` or `lockkit.optimistic.update_row_async`."""

    missed = "changed"
    values = (Mapping,)
    values_named = "a mapping of columns to their new values"
    begin = staticmethod(refuse_autocommit)  # the version protects the row, so others may write while `fn` runs

    def __init__(
        self, runtime: Runtime, source: object, fn: object, *, table: object, key: object, version: object
    ) -> None:
        """Check the arguments. No I/O."""
        mapped = sa.inspect(table, raiseerr=False)
        found = mapped.local_table if isinstance(mapped, Mapper) else table
        if not isinstance(found, sa.Table):
            raise ConfigurationError(f"give a SQLAlchemy Table or a mapped class, not {validation.shown(table)}")
        self._table = found
        keys = key if isinstance(key, tuple) else (key,)
        columns = list(found.primary_key.columns)
        if not columns:
            message = f"{found} has no primary key, so update_row cannot find a single row: use transact"
            raise ConfigurationError(message)
        if len(keys) != len(columns):
            message = (
                f"{found} has {len(columns)} columns in its primary key: give one value for each, several as a tuple"
            )
            raise ConfigurationError(message)
        if any(value is None for value in keys):
            # No row has it, so each call would insert one.
            raise ConfigurationError(f"key must have a value for each column of the primary key of {found}, not None")
        if not isinstance(version, str) or version not in found.c:
            raise no_column(found, version, option="version")
        self._version = found.c[version]
        self._keys = dict(zip((column.key for column in columns), keys, strict=True))
        self._where = sa.and_(*(column == value for column, value in zip(columns, keys, strict=True)))
        self._refused: sa.exc.IntegrityError | None = None
        super().__init__(runtime, source, fn, f"{found} {', '.join(map(str, keys))}")

    async def body(self, executor: Any) -> Any:  # noqa: ANN401 - a session or connection; what `fn` returns
        """Read, call `fn`, and write unless another writer changed the row; else raise `Conflict`."""
        io = self.runtime.io
        found = await self._first(executor.execute(sa.select(self._table).where(self._where)))
        row = found.mappings().one_or_none()
        new = await self.new_value(row)
        if new is None or (row is None and new is DELETE):
            return new
        if row is None:
            await self._insert(executor, new)
            return new
        base: Any = sa.delete(self._table) if new is DELETE else sa.update(self._table).values(dict(new))
        statement = versioned(base.where(self._where), row[self._version.key], version=self._version)
        if (await io(executor.execute(statement))).rowcount == 0:
            raise Conflict
        return new

    async def _insert(self, executor: Any, new: Mapping[str, Any]) -> None:  # noqa: ANN401 - see `body`
        statement = sa.insert(self._table).values({self._version.key: 1, **new, **self._keys})
        try:
            await self.runtime.io(executor.execute(statement))
        except sa.exc.IntegrityError as error:
            # Another writer has inserted it, so the next try finds it. If it does not, something else is wrong.
            if self._refused is not None:
                raise
            self._refused = error
            raise Conflict from error


def versioned(statement: S, expected: int | None, *, version: sa.ColumnElement[int] | None = None) -> S:
    """See `lockkit.optimistic.versioned`."""
    if expected is not None and (isinstance(expected, bool) or not isinstance(expected, int)):
        message = f"expected must be the version that was read, an int or None, not {validation.shown(expected)}"
        raise ConfigurationError(message)
    column = column_of(statement, version, VERSION, option="version")
    guarded: Any = statement.where(column == expected)
    following = 1 if expected is None else column + 1  # NULL + 1 is NULL, which the next writer would find unchanged
    return cast("S", with_value(guarded, column, following))
