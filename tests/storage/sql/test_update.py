"""Optimistic transactions of SQL, and its row updates: what `tests.storage.test_updates` does not ask of all stores."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

import lockkit
from lockkit.optimistic import transact, transact_async, update_row, update_row_async, versioned
from lockkit.sql import create_tables, lock_in
from tests.storage.sql.support import PATIENCE, Base
from tests.tries import beside

KINDS = ["postgresql", "mariadb", "sqlite"]


class Model(orm.DeclarativeBase):
    """The application's classes."""


class Product(Model):
    """With the count of versions that SQLAlchemy keeps."""

    __tablename__ = "product"

    name: orm.Mapped[str] = orm.mapped_column(sa.String(20), primary_key=True)
    stock: orm.Mapped[int]
    version: orm.Mapped[int] = orm.mapped_column(nullable=False)

    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - as SQLAlchemy wants it


def prepared(base: Base) -> Base:
    """The same, with one product."""
    with base.engine() as engine:
        Model.metadata.drop_all(engine)
        Model.metadata.create_all(engine)
        with orm.Session(engine) as session, session.begin():
            session.add(Product(name="x", stock=10))
    return base


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest, bases: dict[str, Base]) -> Base:
    """Each kind in turn."""
    return prepared(bases[request.param])


@pytest.fixture(params=["sync", "asyncio"])
def change(request: pytest.FixtureRequest, base: Base) -> Callable[..., Any]:
    """Change a row by a function, on each face."""

    def blocking(table: Any, key: Any, fn: Any, **given: Any) -> Any:  # noqa: ANN401 - also what is wrong
        with base.engine() as engine:
            return update_row(engine, table, key, fn, **given)

    def asynchronous(table: Any, key: Any, fn: Any, **given: Any) -> Any:  # noqa: ANN401 - see above
        return base.aio(lambda engine: update_row_async(engine, table, key, fn, **given))

    return blocking if request.param == "sync" else asynchronous


def stock(base: Base) -> tuple[Any, ...]:
    """What is in the table."""
    return base.rows("SELECT stock, version FROM product")[0]


def test_row_is_changed_and_inserted(change: Any, base: Base) -> None:  # noqa: ANN401 - a fixture
    """By its primary key, one value or a tuple; a version more for each change."""
    seen: list[Any] = []

    def less(row: Any) -> dict[str, int]:  # noqa: ANN401 - a row
        seen.append(dict(row))
        return {"stock": row["stock"] - 1}

    assert change(Product, "x", less) == {"stock": 9}
    assert change(Product.__table__, ("x",), less) == {"stock": 8}
    assert stock(base) == (8, 3)
    assert seen[0] == {"name": "x", "stock": 10, "version": 1}
    assert change(Product, "new", lambda row: {"stock": 1 if row is None else 0}) == {"stock": 1}
    assert base.rows("SELECT stock, version FROM product WHERE name = 'new'") == [(1, 1)]


def test_insert_that_is_refused_for_another_reason_is_the_application_s_error(change: Any) -> None:  # noqa: ANN401 - a fixture
    """It is not tried for ever."""
    with pytest.raises(exc.IntegrityError):
        change(Product, "y", lambda _: {"stock": None})


def test_session_with_a_version_id_col_is_tried_again(base: Base) -> None:
    """SQLAlchemy's StaleDataError is a conflict like others."""
    if base.kind == "sqlite":
        base.rows("PRAGMA journal_mode = WAL")  # or the rival would wait for the reader
    asked = 0

    def sell(session: orm.Session) -> int:
        nonlocal asked
        asked += 1
        product = session.get_one(Product, "x")
        if asked == 1:
            base.rows("UPDATE product SET stock = stock - 3, version = version + 1")
        product.stock -= 1
        return product.stock

    with base.engine() as engine:
        assert transact(orm.sessionmaker(engine), sell) == 6
    assert asked == 2

    assert stock(base) == (6, 3)


@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_serialization_failure_is_tried_again(bases: dict[str, Base], face: str) -> None:
    """Also one that comes with COMMIT: write skew, which no version sees."""
    base = prepared(bases["postgresql"])
    base.rows("INSERT INTO product VALUES ('y', 10, 1)")
    asked = 0
    read, write = sa.text("SELECT sum(stock) FROM product"), sa.text("UPDATE product SET stock = 0 WHERE name = 'x'")

    def rival() -> None:
        with base.engine(isolation_level="SERIALIZABLE") as engine, engine.begin() as connection:
            connection.execute(read)
            connection.execute(sa.text("UPDATE product SET stock = 0 WHERE name = 'y'"))

    def close_one(connection: sa.Connection) -> int:
        nonlocal asked
        asked += 1
        left = int(connection.execute(read).scalar_one())
        connection.execute(write)
        if asked == 1:
            rival()
        return left

    async def close_one_async(connection: Any) -> int:  # noqa: ANN401 - an AsyncConnection
        return int(await connection.run_sync(close_one))

    if face == "sync":
        with base.engine(isolation_level="SERIALIZABLE") as engine:
            assert transact(engine, close_one) == 10
    else:
        assert base.aio(lambda engine: transact_async(engine, close_one_async), isolation_level="SERIALIZABLE") == 10
    assert asked == 2


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_deadlock_is_tried_again(bases: dict[str, Base], kind: str) -> None:
    """Both get through, of rows and of `lock_in`."""
    base = prepared(bases[kind])
    meeting = threading.Barrier(2)
    asked = 0

    def both(first: str, second: str) -> Callable[[sa.Connection], None]:
        tried = 0

        def lock(connection: sa.Connection) -> None:
            nonlocal asked, tried
            asked += 1
            tried += 1
            lock_in(connection, first)
            if tried == 1:
                meeting.wait(PATIENCE)
            lock_in(connection, second)

        return lock

    with base.engine() as engine:
        given = [("a", "b"), ("b", "a")]
        for done in [beside(transact, engine, both(*names)) for names in given]:
            done.result(PATIENCE)
    assert asked == 3


@pytest.mark.parametrize("source", ["engine", "sessionmaker", "asyncio"])
def test_two_that_read_the_same_number_on_sqlite_both_add_to_it(bases: dict[str, Base], source: str) -> None:
    """The read belongs to the transaction, although the driver begins one only before the first write."""
    base = prepared(bases["sqlite"])
    meeting = threading.Barrier(2)

    def add_one() -> None:
        tried = 0

        def add(executor: Any) -> None:  # noqa: ANN401 - a session or connection
            nonlocal tried
            tried += 1
            found = executor.execute(sa.text("SELECT stock FROM product")).scalar_one()
            if tried == 1:
                meeting.wait(PATIENCE)
            executor.execute(sa.text("UPDATE product SET stock = :stock"), {"stock": found + 1})

        if source == "asyncio":
            base.aio(lambda engine: transact_async(engine, lambda connection: connection.run_sync(add)))
        else:
            with base.engine() as engine:
                transact(engine if source == "engine" else orm.sessionmaker(engine), add)

    for done in [beside(add_one), beside(add_one)]:
        done.result(PATIENCE)
    assert stock(base)[0] == 12


def test_exception_of_the_function_rolls_back(base: Base) -> None:
    """It comes as it is, and so does what the database says to the application's statement."""

    def fail(connection: sa.Connection) -> None:
        connection.execute(sa.text("UPDATE product SET stock = 0"))
        raise ZeroDivisionError

    with base.engine() as engine:
        with pytest.raises(ZeroDivisionError):
            transact(engine, fail)
        with pytest.raises(exc.DBAPIError, match="nowhere"):
            transact(engine, lambda connection: connection.execute(sa.text("SELECT 1 FROM nowhere")))
    assert stock(base) == (10, 1)


def test_refusal_at_commit_is_the_application_s_error(bases: dict[str, Base]) -> None:
    """A constraint that is looked at by COMMIT; it is neither tried again nor called an outage."""
    base = bases["postgresql"]
    base.rows("DROP TABLE IF EXISTS late")
    base.rows("CREATE TABLE late (i int UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    def twice(connection: sa.Connection) -> None:
        connection.execute(sa.text("INSERT INTO late VALUES (1), (1)"))

    with base.engine() as engine, pytest.raises(exc.IntegrityError):
        transact(engine, twice)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_connection_lost_before_the_commit_is_tried_again(bases: dict[str, Base], kind: str) -> None:
    """The database has rolled back."""
    base = prepared(bases[kind])
    ended = {
        "postgresql": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'victim'",
        "mariadb": "KILL {}",
    }[kind]
    asked = 0

    def sell(connection: sa.Connection) -> None:
        nonlocal asked
        asked += 1
        if kind == "postgresql":
            connection.execute(sa.text("SET application_name = 'victim'"))
        if asked == 1:
            number = connection.execute(sa.text("SELECT CONNECTION_ID()")).scalar() if kind == "mariadb" else 0
            base.rows(ended.format(number))
        connection.execute(sa.text("UPDATE product SET stock = stock - 1"))

    with base.engine() as engine:
        transact(engine, sell)
    assert asked == 2
    assert stock(base)[0] == 9


def test_database_that_cannot_be_reached_is_unavailable() -> None:
    """The function is not asked, on either face."""

    def unasked(_: object) -> Any:  # noqa: ANN401 - nothing
        pytest.fail("asked")

    gone = Base("postgresql", "postgres:s3cret@127.0.0.1:1/postgres")
    with gone.engine() as engine:
        calls: list[Callable[[], object]] = [
            lambda: update_row(engine, Product, "x", unasked),
            lambda: create_tables(engine),
        ]
        for call in calls:
            with pytest.raises(lockkit.BackendUnavailable, match=r"127\.0\.0\.1:1/") as caught:
                call()
            assert "s3cret" not in f"{caught.value}{caught.value.backend}"

    async def main(engine: Any) -> None:  # noqa: ANN401 - an AsyncEngine
        async with AsyncSession(engine) as session:
            for call in (
                lambda: update_row_async(engine, Product, "x", unasked),
                lambda: update_row_async(async_sessionmaker(engine), Product, "x", unasked),
                lambda: transact_async(engine, unasked),
                lambda: create_tables(engine),
                lambda: lock_in(session, "x"),
            ):
                with pytest.raises(lockkit.BackendUnavailable, match=r"127\.0\.0\.1:1/"):
                    await call()

    gone.aio(main)
    gone.aio(main, driver="postgresql+asyncpg")  # whose errors SQLAlchemy does not wrap then


def test_condition_alone(base: Base) -> None:
    """`versioned` is for a statement that the application runs itself."""
    with base.engine() as engine, orm.Session(engine) as session, session.begin():
        changed = [
            session.execute(versioned(sa.update(Product).values(stock=5), version)).rowcount  # type: ignore[attr-defined]
            for version in (1, 1, 2)
        ]
        table: Any = Product.__table__
        gone = session.execute(versioned(sa.delete(table), 2, version=table.c.version)).rowcount  # type: ignore[attr-defined]
    assert (changed, gone) == ([1, 0, 1], 0)
    assert stock(base) == (5, 3)


def test_function_that_returns_the_whole_row_loses_no_change(change: Any, base: Base) -> None:  # noqa: ANN401 - a fixture
    """The version in it is the one that was read: the row gets the next one all the same."""
    table: Any = Product.__table__

    change(table, "x", lambda row: {**row, "stock": row["stock"] - 1})
    assert stock(base) == (9, 2)
    change(table, "x", lambda row: {table.c.stock: row["stock"] - 1, "version": 1, table.c.version: 1})
    assert stock(base) == (8, 3)
    change(Product, "x", lambda row: {**row, "stock": row["stock"] - 1})
    assert stock(base) == (7, 4)


class Renamed(Model):
    """Its columns have other names than its attributes."""

    __tablename__ = "renamed"

    name: orm.Mapped[str] = orm.mapped_column("n", sa.String(20), primary_key=True)
    version: orm.Mapped[int] = orm.mapped_column("v", nullable=False)


RENAMED: Any = Renamed.__table__


@pytest.mark.parametrize(
    ("statement", "version"),
    [
        (sa.update(Renamed).values(name="x", version=1), Renamed.version),
        (sa.update(Renamed).values({Renamed.version: 1}), RENAMED.c.v),
        (sa.update(RENAMED).values(v=1), Renamed.version),
        (sa.update(RENAMED).where(Renamed.name == "x").values(v=1), RENAMED.c.v),
        (sa.update(RENAMED).values(n="x", v=1), RENAMED.c.v),
        (sa.update(RENAMED).values({RENAMED.c.v: 1}), RENAMED.c.v),
    ],
    ids=str,
)
def test_statement_that_sets_the_version_itself_gets_the_next_one(
    bases: dict[str, Base],
    statement: sa.Update,
    version: Any,  # noqa: ANN401 - a column, mapped or not
) -> None:
    """Whichever way it names the column: with the version that it read, the next writer would find nothing changed."""
    base = prepared(bases["sqlite"])
    with base.engine() as engine, orm.Session(engine) as session, session.begin():
        session.add(Renamed(name="x", version=4))
        session.flush()

        session.execute(versioned(statement, 4, version=version))

        assert session.scalar(sa.select(RENAMED.c.v)) == 5


@pytest.mark.parametrize("expected", ["1", 1.0, True])
def test_version_that_is_no_number_is_refused(expected: Any) -> None:  # noqa: ANN401 - what is wrong
    """A row in place of its version, for example, would be an error of the driver."""
    with pytest.raises(lockkit.ConfigurationError, match=r"^expected must be the version that was read"):
        versioned(sa.update(Product), expected)


def test_row_without_a_version_yet_loses_no_change(bases: dict[str, Base]) -> None:
    """A column that was added to a table is NULL in the rows that were there."""
    table = sa.Table(
        "older", sa.MetaData(), sa.Column("name", sa.String(20), primary_key=True), sa.Column("stock", sa.Integer),
        sa.Column("version", sa.Integer),
    )  # fmt: skip
    stocks: list[int] = []

    with bases["sqlite"].engine() as engine:
        table.drop(engine, checkfirst=True)
        table.create(engine)
        with engine.begin() as connection:
            connection.execute(sa.insert(table).values(name="x", stock=10))

        def less(row: Any) -> dict[str, int]:  # noqa: ANN401 - a row
            stocks.append(row["stock"])
            if len(stocks) == 1:
                update_row(engine, table, "x", lambda _: {"stock": row["stock"] - 3})
            return {"stock": row["stock"] - 1}

        update_row(engine, table, "x", less)
        with engine.begin() as connection:
            assert connection.execute(sa.select(table)).one() == ("x", 6, 2)
    assert stocks == [10, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "sqlite://"}, "give a SQLAlchemy Engine or sessionmaker, .* not str"),
        ({"fn": lambda _: 5}, "fn returned 5: it must return a mapping"),
        ({"table": "product"}, "give a SQLAlchemy Table or a mapped class, not 'product'"),
        ({"key": ("x", 1)}, "1 columns in its primary key"),
        ({"key": None}, "^key must have a value for each column of the primary key of product, not None"),
        ({"table": RENAMED.alias()}, "give a SQLAlchemy Table or a mapped class"),
        ({"table": sa.Table("keyless", sa.MetaData(), sa.Column("version", sa.Integer))}, "keyless has no primary key"),
        ({"version": "count"}, "has no column 'count'"),
        ({"version": 5}, "has no column 5"),
    ],
)
def test_bad_input_is_named(bases: dict[str, Base], arguments: dict[str, Any], message: str) -> None:
    """Wrong calls tell what is right, and change nothing."""
    base = prepared(bases["sqlite"])
    with base.engine() as engine:
        given: dict[str, Any] = {
            "source": engine,
            "table": Product,
            "key": "x",
            "fn": lambda _: {"stock": 1},
            **arguments,
        }
        with pytest.raises(lockkit.ConfigurationError, match=message):
            update_row(**given)
    assert stock(base) == (10, 1)


def test_other_face_is_refused(bases: dict[str, Base]) -> None:
    """The message names what is for it."""
    base = prepared(bases["sqlite"])

    async def main(engine: Any) -> None:  # noqa: ANN401 - an AsyncEngine
        with pytest.raises(lockkit.ConfigurationError, match="AsyncEngine is asyncio: use the function that ends in"):
            transact(engine, lambda _: None)
        with base.engine() as blocking:
            wrong: Any = blocking
            with pytest.raises(lockkit.ConfigurationError, match="Engine is blocking: use the function without _async"):
                await transact_async(wrong, main)

    base.aio(main)
