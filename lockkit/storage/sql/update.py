"""
Optimistic transactions and updates of a row in a SQL database: see `lockkit.optimistic`.

Each try has a session or connection of its own, and a transaction that is committed at its end. What the database, or
SQLAlchemy's count of versions, gives up for somebody else was rolled back, so it is tried again. Only an answer to
COMMIT that was lost leaves open what happened; that is told and not tried again.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import Connection, Delete, Engine, Table, Update, and_, delete, event, exc, insert, select, update
from sqlalchemy import inspect as inspect_mapped
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Mapper, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from lockkit import validation
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.optimistic import DELETE
from lockkit.optimistic import Delete as DeleteMark
from lockkit.runtime import AsyncioRuntime, BlockingRuntime
from lockkit.storage.retry import Conflict, check_bounds, retry
from lockkit.storage.sql.client import Problem, StartAgain, data_error, label_of, problem_of, refuse_autocommit

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement

    from lockkit.runtime import Runtime

__all__ = ["RowUpdate", "Transactions", "versioned"]

S = TypeVar("S", bound="Update | Delete")

VERSION = "version"
"""Name of the column that counts versions, unless told otherwise."""

_OTHERS = {Problem.BUSY, Problem.DEADLOCK, Problem.STALE}

_FORMS: dict[type, str] = {
    Engine: "blocking",
    sessionmaker: "blocking",
    AsyncEngine: "asyncio",
    async_sessionmaker: "asyncio",
}


class Transactions:
    """One call: a function tried in transactions of its own."""

    missed = "committed"

    def __init__(self, kind: str, source: object, fn: object, name: str | None = None) -> None:
        """
        Look at what was given. No I/O.

        Raises:
            ConfigurationError: It is something else.
        """
        form = next((form for cls, form in _FORMS.items() if isinstance(source, cls)), None)
        if form is None:
            message = (
                "give a SQLAlchemy Engine or sessionmaker, or one of their asyncio forms, not "
                f"{type(source).__name__}: each try needs a transaction of its own"
            )
            raise ConfigurationError(message)
        if form != kind:
            ending = "that ends in _async" if form == "asyncio" else "without _async"
            message = f"{type(source).__name__} is {form}: use the function {ending}"
            raise ConfigurationError(message)
        if not callable(fn):
            message = f"fn must be a function, not {validation.shown(fn)}"
            raise ConfigurationError(message, name=name)
        self._runtime: Runtime = BlockingRuntime() if kind == "blocking" else AsyncioRuntime()
        self._source: Any = source
        self._fn: Callable[..., Any] = fn
        self._committing = False
        self.name = name or getattr(fn, "__qualname__", None) or repr(fn)

    async def run(self, attempts: object, timeout: object) -> Any:  # noqa: ANN401 - what `fn` returns
        """Try until it succeeds or a bound is reached."""
        bounds = check_bounds(attempts, timeout, self.name)
        label = partial(label_of, self._engine())
        return await retry(self._runtime, self._try, bounds, name=self.name, label=label, missed=self.missed)

    async def body(self, place: Any) -> Any:  # noqa: ANN401 - a session or connection; what `fn` returns
        """Do the work in a transaction that is committed afterwards."""
        return await self._call(place)

    async def _call(self, *given: object) -> Any:  # noqa: ANN401 - what `fn` returns
        result = self._fn(*given)
        if self._runtime.kind == "blocking" and inspect.iscoroutine(result):
            result.close()
            message = f"{self.name} is a coroutine function: use the function that ends in _async"
            raise ConfigurationError(message, name=self.name)
        return await self._runtime.io(result)

    async def _try(self) -> Any:  # noqa: ANN401 - what `fn` returns
        """
        Begin, work, commit.

        Raises:
            Conflict: Nothing was committed, and it may be tried again.
        """
        io = self._runtime.io
        self._committing = False
        try:
            async with self._opened() as place:
                await self._refuse_autocommit(place)
                result = await self.body(place)
                if hasattr(place, "flush"):
                    await io(place.flush())  # so that COMMIT is all that is left
                await self._commit(place)
                return result
        except (StaleDataError, StartAgain) as error:
            raise Conflict from error
        except exc.TimeoutError as error:
            raise data_error(error, self._engine(), name=self.name) from error
        except exc.DBAPIError as error:
            if problem_of(error) in _OTHERS or error.connection_invalidated:
                raise Conflict from error
            if error.statement is None and not self._committing:  # SQLAlchemy could not connect
                raise data_error(error, self._engine(), name=self.name) from error
            raise

    async def _refuse_autocommit(self, place: Any) -> None:  # noqa: ANN401 - a session or connection
        """See that what is done can be undone together. A session connects when it is used: it is asked then."""
        if isinstance(place, Connection):
            refuse_autocommit(place)
        elif isinstance(place, AsyncConnection):
            await place.run_sync(refuse_autocommit)
        else:
            session = place.sync_session if isinstance(place, AsyncSession) else place
            event.listen(
                session, "after_begin", lambda _session, _transaction, connection: refuse_autocommit(connection)
            )

    async def _commit(self, place: Any) -> None:  # noqa: ANN401 - see `body`
        self._committing = True
        try:
            await self._runtime.io(place.commit())
        except exc.DBAPIError as error:
            if not error.connection_invalidated:
                raise
            label = label_of(self._engine())
            message = (
                f"the answer to COMMIT of {self.name!r} at {label} was lost: it may have been made or not. "
                "Read what is there before you do it again"
            )
            raise BackendUnavailable(message, name=self.name, backend=label) from error

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        """Give a session or connection; closing it rolls back what was not committed."""
        source = self._source
        made: Any = source.connect() if isinstance(source, (Engine, AsyncEngine)) else source()
        if self._runtime.kind == "blocking":
            with made as place:
                yield place
        else:
            async with made as place:
                yield place

    def _engine(self) -> Engine | None:
        """Where it is, if that is known before a session asks."""
        source = self._source
        bind = source if isinstance(source, (Engine, AsyncEngine)) else source.kw.get("bind")
        return bind.sync_engine if isinstance(bind, AsyncEngine) else cast("Engine | None", bind)


class RowUpdate(Transactions):
    """One call: a function of one row that has a count of versions."""

    missed = "changed"

    def __init__(self, kind: str, source: object, fn: object, *, table: object, key: object, version: str) -> None:
        """
        Look at what was given. No I/O.

        Raises:
            ConfigurationError: It is something else, or there is no such column.
        """
        mapped = inspect_mapped(table, raiseerr=False)
        found = mapped.local_table if isinstance(mapped, Mapper) else table
        if not isinstance(found, Table):
            message = f"give a SQLAlchemy Table or a mapped class, not {validation.shown(table)}"
            raise ConfigurationError(message)
        self._table = found
        keys = key if isinstance(key, tuple) else (key,)
        columns = list(found.primary_key.columns)
        if len(keys) != len(columns):
            message = f"{found} has {len(columns)} columns in its primary key: give as many values, several as a tuple"
            raise ConfigurationError(message)
        if version not in found.c:
            message = f"{found} has no column {version!r}: add one of whole numbers, or say which it is with version="
            raise ConfigurationError(message)
        self._version = found.c[version]
        self._keys = dict(zip((column.key for column in columns), keys, strict=True))
        self._where = and_(*(column == value for column, value in zip(columns, keys, strict=True)))
        self._refused: exc.IntegrityError | None = None
        super().__init__(kind, source, fn, f"{found} {', '.join(map(str, keys))}")

    async def body(self, place: Any) -> Any:  # noqa: ANN401 - a session or connection; what `fn` returned
        """Read, ask `fn`, write if nobody changed the row; else raise `Conflict`."""
        io = self._runtime.io
        row = (await io(place.execute(select(self._table).where(self._where)))).mappings().one_or_none()
        new = self._checked(await self._call(row))
        if new is None or (row is None and new is DELETE):
            return new
        if row is None:
            await self._insert(place, cast("Mapping[str, Any]", new))
            return new
        base: Any = delete(self._table) if new is DELETE else update(self._table).values(dict(cast("Any", new)))
        statement = versioned(base.where(self._where), row[self._version.key], version=self._version)
        if (await io(place.execute(statement))).rowcount == 0:
            raise Conflict
        return new

    async def _insert(self, place: Any, new: Mapping[str, Any]) -> None:  # noqa: ANN401 - see `body`
        statement = insert(self._table).values({self._version.key: 1, **new, **self._keys})
        try:
            await self._runtime.io(place.execute(statement))
        except exc.IntegrityError as error:
            # Somebody else has inserted it; the next try finds it. If it does not, something else is wrong.
            if self._refused is not None:
                raise
            self._refused = error
            raise Conflict from error

    def _checked(self, new: object) -> Mapping[str, Any] | DeleteMark | None:
        if new is None or isinstance(new, (Mapping, DeleteMark)):
            return new
        message = (
            f"fn returned {validation.shown(new)}: it must return a mapping of columns to their new values, "
            "lockkit.optimistic.DELETE, or None to leave the row as it is"
        )
        raise ConfigurationError(message, name=self.name)


def versioned(statement: S, expected: int, *, version: ColumnElement[int] | None = None) -> S:
    """See `lockkit.optimistic.versioned`."""
    given: object = statement
    if not isinstance(given, (Update, Delete)):
        message = f"give an UPDATE or a DELETE of SQLAlchemy's, not {validation.shown(statement)}"
        raise ConfigurationError(message)
    column: Any = version
    if column is None:
        table: Any = statement.table
        if VERSION not in table.c:
            message = f"{table} has no column {VERSION!r}: add one of whole numbers, or say which it is with version="
            raise ConfigurationError(message)
        column = table.c[VERSION]
    guarded: Any = statement.where(column == expected)
    return cast("S", guarded.values({column: column + 1}) if isinstance(statement, Update) else guarded)
