"""Guards let no stale holder write to a database: on real ones, on both faces."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.ext.asyncio import AsyncSession

import lockkit
import lockkit.sql
from lockkit.fencing import TOKEN_MAX, AsyncSqlGuard, FenceMixin, SqlGuard, fenced
from tests.storage.sql import support
from tests.storage.sql.support import Base
from tests.tries import beside

KINDS = ["postgresql", "mariadb", "sqlite"]


class Model(orm.DeclarativeBase):
    """The application's classes."""


class Seat(FenceMixin, Model):
    """A row that is guarded by itself."""

    __tablename__ = "seat"

    name: orm.Mapped[str] = orm.mapped_column(sa.String(20), primary_key=True)
    customer: orm.Mapped[str | None] = orm.mapped_column(sa.String(20))
    kind: orm.Mapped[str] = orm.mapped_column(sa.String(20))

    __mapper_args__ = {"polymorphic_on": kind, "polymorphic_identity": "seat"}  # noqa: RUF012 - as SQLAlchemy wants it


class Window(Seat):
    """A class that the ORM finds by a criterion, in the same table."""

    __mapper_args__ = {"polymorphic_identity": "window"}  # noqa: RUF012 - as SQLAlchemy wants it


class Price(FenceMixin, Model):
    """A row that readers guard, too."""

    __tablename__ = "price"

    name: orm.Mapped[str] = orm.mapped_column(sa.String(20), primary_key=True)
    read_fence: orm.Mapped[int | None] = orm.mapped_column(sa.BigInteger)


class Plain(Model):
    """One that has no column for the token."""

    __tablename__ = "plain"

    name: orm.Mapped[str] = orm.mapped_column(sa.String(20), primary_key=True)


OLD = sa.Table(
    "old", sa.MetaData(), sa.Column("name", sa.String(20), primary_key=True), sa.Column("seen", sa.BigInteger)
)


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest, bases: dict[str, Base]) -> Base:
    """Each kind in turn, with two free seats."""
    base = bases[request.param]
    with base.engine() as engine:
        for metadata in (Model.metadata, OLD.metadata):
            metadata.drop_all(engine)
            metadata.create_all(engine)
        with orm.Session(engine) as session, session.begin():
            session.add_all([Seat(name="12A"), Window(name="12B"), Plain(name="x"), Price(name="tea")])
            session.execute(sa.insert(OLD).values(name="x"))
    base.rows("DROP TABLE IF EXISTS lockkit_fences")
    return base


@pytest.fixture(params=["sync", "asyncio"])
def guard(request: pytest.FixtureRequest, base: Base) -> Callable[[Callable[[Any], Any]], Any]:
    """Ask a guard of each face something, in a session whose transaction commits if nothing was raised."""

    def blocking(ask: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - what is asked
        with base.engine() as engine, orm.Session(engine) as session, session.begin():
            return ask(SqlGuard(session))

    def asynchronous(ask: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - see above
        async def main(engine: Any) -> Any:  # noqa: ANN401 - an AsyncEngine
            async with AsyncSession(engine) as session, session.begin():
                return await ask(AsyncSqlGuard(session))

        return base.aio(main)

    return blocking if request.param == "sync" else asynchronous


def customers(base: Base) -> dict[str, tuple[str | None, int]]:
    """What is in the table."""
    return {name: (customer, fence) for name, customer, fence in base.rows("SELECT name, customer, fence FROM seat")}


def book(name: str, customer: str) -> sa.Update:
    """Write to a seat."""
    return sa.update(Seat).where(Seat.name == name).values(customer=customer)


def test_newer_and_equal_tokens_write_and_older_ones_are_refused(guard: Any, base: Base) -> None:  # noqa: ANN401 - a fixture
    """The newest token decides, and a refusal leaves everything as it was."""
    assert guard(lambda guard: guard.execute(book("12A", "first"), token=41)) == 1
    assert guard(lambda guard: guard.execute(book("12A", "again"), token=41)) == 1
    assert guard(lambda guard: guard.execute(book("12A", "newer"), token=42)) == 1

    with pytest.raises(lockkit.StaleToken, match=r"to 'seat' at .* token 42 .* yours, 41") as refusal:
        guard(lambda guard: guard.execute(book("12A", "late"), token=41))
    with pytest.raises(lockkit.StaleToken):
        guard(lambda guard: guard.execute(sa.delete(Seat).where(Seat.name == "12A"), token=1))

    assert base.kind in str(refusal.value.backend)
    assert customers(base)["12A"] == ("newer", 42)
    assert guard(lambda guard: guard.execute(sa.delete(Seat).where(Seat.name == "12A"), token=42)) == 1
    assert guard(lambda guard: guard.execute(book("99Z", "Ada"), token=1)) == 0  # no row has no newer holder


def test_one_stale_row_refuses_all(guard: Any, base: Base) -> None:  # noqa: ANN401 - a fixture
    """Nothing is written in part, even if the refusal is caught and the transaction commits."""
    guard(lambda guard: guard.execute(book("12B", "Ben"), token=9))

    def all_of_them(guard: Any) -> Any:  # noqa: ANN401 - of either face
        return guard.execute(sa.update(Seat).values(customer="Ada"), token=8)

    with (
        base.engine() as engine,
        orm.Session(engine) as session,
        session.begin(),
        pytest.raises(lockkit.StaleToken),
    ):
        all_of_them(SqlGuard(session))
    with pytest.raises(lockkit.StaleToken):
        guard(all_of_them)

    assert customers(base) == {"12A": (None, 0), "12B": ("Ben", 9)}


def test_row_that_is_inserted_again_with_a_token_refuses_older_holders(guard: Any, base: Base) -> None:  # noqa: ANN401 - a fixture
    """A DELETE removes the token with the row, so the INSERT must set it."""
    guard(lambda guard: guard.execute(sa.delete(Seat), token=42))
    with base.engine() as engine, orm.Session(engine) as session, session.begin():
        session.add_all([Seat(name="12A", fence=42), Seat(name="12B")])

    with pytest.raises(lockkit.StaleToken):
        guard(lambda guard: guard.execute(book("12A", "late"), token=41))
    assert guard(lambda guard: guard.execute(book("12B", "late"), token=41)) == 1


@pytest.mark.parametrize(
    "statement",
    [
        sa.update(Window).values(customer="Ada"),
        sa.update(Seat).options(orm.with_loader_criteria(Seat, Seat.name == "12B")).values(customer="Ada"),
    ],
    ids=["inheritance", "options"],
)
def test_rows_that_the_orm_leaves_out_are_not_compared(guard: Any, base: Base, statement: sa.Update) -> None:  # noqa: ANN401 - a fixture
    """By its own criteria, which are not in the statement's WHERE."""
    guard(lambda guard: guard.execute(book("12A", "Ben"), token=9))

    assert guard(lambda guard: guard.execute(statement, token=5)) == 1
    assert customers(base) == {"12A": ("Ben", 9), "12B": ("Ada", 5)}


def test_column_of_another_name_that_may_be_null(guard: Any, base: Base) -> None:  # noqa: ANN401 - a fixture
    """NULL is no token; the largest one fits."""
    statement = sa.update(OLD).where(OLD.c.name == "x").values(name="x")

    assert guard(lambda guard: guard.execute(statement, token=1, fence=OLD.c.seen)) == 1
    assert guard(lambda guard: guard.execute(statement, token=TOKEN_MAX, fence=OLD.c.seen)) == 1
    with pytest.raises(lockkit.StaleToken):
        guard(lambda guard: guard.execute(statement, token=TOKEN_MAX - 1, fence=OLD.c.seen))
    assert base.rows("SELECT seen FROM old") == [(TOKEN_MAX,)]


@pytest.mark.parametrize(
    ("declared", "fits"),
    [
        (sa.Integer(), False),
        (sa.SmallInteger(), False),
        (sa.BigInteger().with_variant(sa.Integer(), "sqlite"), True),
        (None, True),
    ],
    ids=str,
)
def test_column_that_is_too_small_for_tokens_is_refused(base: Base, declared: Any, fits: bool) -> None:  # noqa: ANN401, FBT001 - a type of SQLAlchemy's
    """MariaDB may store the largest number that fits, and would then admit all holders; SQLite's INTEGER is wide."""
    table = sa.table("old", sa.column("name"), sa.column("seen", declared))
    with base.engine() as engine, engine.begin() as connection:
        refused = pytest.raises(lockkit.ConfigurationError, match=r"seen is too small for tokens: make it a BIGINT col")
        with nullcontext() if fits or base.kind == "sqlite" else refused:
            SqlGuard(connection).execute(sa.update(table).values(name="x"), token=TOKEN_MAX, fence=table.c.seen)


def test_condition_alone_for_core_and_orm(base: Base) -> None:
    """`fenced` is for a statement that the application runs itself: one round trip."""
    with base.engine() as engine, engine.begin() as connection, orm.Session(connection) as session:
        table: Any = Seat.__table__
        core = table.update().where(table.c.name == "12A").values(customer="Ada")

        changed = [
            connection.execute(fenced(core, 5)).rowcount,
            connection.execute(fenced(core, 4)).rowcount,
            session.execute(fenced(book("12A", "Ben"), 6)).rowcount,  # type: ignore[attr-defined]
            session.execute(fenced(book("12A", "Cat"), 5, fence=Seat.fence)).rowcount,  # type: ignore[attr-defined,arg-type]
            connection.execute(fenced(sa.delete(Seat).where(Seat.name == "12A"), 5)).rowcount,
        ]
    assert changed == [1, 0, 1, 0, 0]
    assert customers(base)["12A"] == ("Ben", 6)


def test_object_is_read_again_and_flushed_under_its_row(base: Base) -> None:
    """What is decided by its values is decided by the newest ones."""
    with base.engine() as engine, orm.Session(engine) as session, session.begin():
        seat = session.get_one(Seat, "12A")
        if base.kind == "sqlite":
            session.execute(book("12A", "Zoe"), execution_options={"synchronize_session": False})
        else:
            with engine.begin() as other:
                other.execute(book("12A", "Zoe"))
        SqlGuard(session).accept_object(seat, token=7)
        SqlGuard(session).accept_object(seat, token=7)
        assert (seat.customer, seat.fence) == ("Zoe", 7)
        seat.customer = "Ada"
    assert customers(base)["12A"] == ("Ada", 7)

    async def main(engine: Any) -> None:  # noqa: ANN401 - an AsyncEngine
        async with AsyncSession(engine) as session, session.begin():
            seat = await session.get_one(Seat, "12A")
            await AsyncSqlGuard(session).accept_object(seat, token=7)
            seat.customer = "Ben"
        async with AsyncSession(engine) as session, session.begin():
            seat = await session.get_one(Seat, "12A")
            with pytest.raises(lockkit.StaleToken, match=r"to .Seat \('12A',\). at .* token 7 .* yours, 6"):
                await AsyncSqlGuard(session).accept_object(seat, token=6)

    base.aio(main)
    assert customers(base)["12A"] == ("Ben", 7)


def test_object_that_cannot_be_guarded_is_named(base: Base) -> None:
    """Each with what to do."""
    with base.engine() as engine, orm.Session(engine) as session:
        guard = SqlGuard(session)
        changed = session.get_one(Seat, "12A")
        changed.customer = "Ada"
        with pytest.raises(lockkit.ConfigurationError, match="has unsaved changes: accept the token first"):
            guard.accept_object(changed, token=1)
        session.rollback()
        wrong: list[tuple[object, str]] = [
            (session.get_one(Plain, "x"), "has no column 'fence'"),
            (Seat(name="new"), "not in the database yet"),
            ("12A", "must be an object of a mapped class, not '12A'"),
        ]
        for instance, message in wrong:
            with pytest.raises(lockkit.ConfigurationError, match=message):
                guard.accept_object(instance, token=1)
        with pytest.raises(lockkit.ConfigurationError, match="no column 'read_fence': add one like 'fence'"):
            guard.accept_object(session.get_one(Seat, "12A"), token=1, shared=True)
        with orm.Session(engine) as other, pytest.raises(lockkit.ConfigurationError, match="session of this guard"):
            SqlGuard(other).accept_object(changed, token=1)
        session.rollback()

        gone = session.get_one(Seat, "12B")
        session.execute(sa.text("DELETE FROM seat WHERE name = '12B'"))
        with pytest.raises(orm.exc.StaleDataError, match="is gone"):
            guard.accept_object(gone, token=1)
        session.rollback()


def test_names_of_scopes_are_compared_as_bytes(base: Base) -> None:
    """And the table makes itself."""
    with base.engine() as engine, engine.begin() as connection:
        guard = SqlGuard(connection)
        for token, scope in enumerate(("seat:12A", "SEAT:12a ", "seat:12A "), 3):
            guard.accept(scope, token=token)
        assert [guard.last(scope) for scope in ("seat:12A", "SEAT:12a ", "seat:12A ")] == [3, 4, 5]


def test_only_what_a_newer_holder_excludes_is_refused(base: Base) -> None:
    """Whatever the order in which tokens arrive, of rows and of objects; of scopes, see `tests.storage.test_guards`."""
    chance = random.Random(17)
    refused = 0
    with base.engine() as engine:
        for number in range(10):
            with orm.Session(engine) as session, session.begin():
                session.add(Price(name=f"p{number}"))
            writes, reads = [0], [0]
            for _ in range(12):
                token, shared = chance.randrange(1, 7), chance.random() < 0.5
                stale = token < max(writes) or (not shared and token <= max(reads))
                assert _let(engine, _touch_row, f"p{number}", token, shared) is not stale, (
                    token,
                    shared,
                    writes,
                    reads,
                )
                refused += stale
                if not stale:
                    (reads if shared else writes).append(token)
    assert refused > 10


def _let(engine: sa.Engine, touch: Callable[..., None], name: str, token: int, shared: bool) -> bool:  # noqa: FBT001 - a test's
    """Do something in a transaction; tell whether it was let."""
    try:
        with orm.Session(engine) as session, session.begin():
            touch(session, name, token, shared=shared)
    except lockkit.StaleToken:
        return False
    return True


def _touch_row(session: orm.Session, name: str, token: int, *, shared: bool) -> None:
    """Accept a token for a row; what writes, in each of three ways."""
    guard, update = SqlGuard(session), sa.update(Price).where(Price.name == name).values(name=name)
    if shared or token % 3 == 0:
        guard.accept_object(session.get_one(Price, name), token=token, shared=shared)
    elif token % 3 == 1:
        guard.execute(update, token=token)
    else:
        result: Any = session.execute(fenced(update, token))
        if result.rowcount == 0:
            raise lockkit.StaleToken("refused by the condition")


@pytest.mark.parametrize("what", ["scope", "row"])
def test_stale_writer_that_came_first_is_waited_for_and_a_later_one_refused(base: Base, what: str) -> None:
    """The row stays locked until the transaction ends, so no other transaction writes between comparison and commit."""
    if base.kind == "sqlite":
        return  # it has one writer

    def change(connection: sa.Connection, token: int) -> None:
        guard = SqlGuard(connection)
        if what == "scope":
            guard.accept("s", token=token)
        else:
            guard.execute(book("12A", f"by {token}"), token=token)

    with base.engine() as engine, engine.connect() as older, engine.connect() as newer:
        change(newer, 1)
        newer.commit()
        change(older, 5)
        waiting = beside(change, newer, 6)
        time.sleep(0.3)
        assert not waiting.done()
        older.commit()
        waiting.result(support.PATIENCE)
        newer.commit()

        with pytest.raises(lockkit.StaleToken):
            change(older, 5)


def test_transaction_that_another_one_prevents_is_told_to_start_again(base: Base) -> None:
    """As by `lock_in`: what ended it is not the application's statement."""
    limit = {
        "postgresql": "SET LOCAL lock_timeout = '50ms'",
        "mariadb": "SET SESSION innodb_lock_wait_timeout = 0",
        "sqlite": "PRAGMA busy_timeout = 50",
    }
    with base.engine() as engine, engine.connect() as first, engine.connect() as second:
        SqlGuard(first).execute(book("12A", "first"), token=1)
        second.execute(sa.text(limit[base.kind]))

        with pytest.raises(lockkit.LockTimeout, match="roll back and run the transaction again"):
            SqlGuard(second).execute(book("12A", "second"), token=2)


def test_statement_s_own_error_is_the_application_s(guard: Any) -> None:  # noqa: ANN401 - a fixture
    """It comes as SQLAlchemy's."""
    statement = sa.update(Seat).where(Seat.name == "12A").values(name="12B")

    with pytest.raises(exc.IntegrityError):
        guard(lambda guard: guard.execute(statement, token=1))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda guard: guard.accept("", token=1), "scope"),
        (lambda guard: guard.accept(None, token=1), "scope must be a str"),
        (lambda guard: guard.execute(book("12A", "Ada"), token="5"), "fencing token, not '5'"),  # noqa: S106 - a number
        (
            lambda guard: guard.execute(sa.update(Plain).values(name="y"), token=1),
            "plain has no column 'fence': add a BIGINT",
        ),
        (lambda guard: guard.execute(sa.select(Seat), token=1), "an UPDATE or a DELETE"),
        (lambda guard: guard.execute("UPDATE seat", token=1), "an UPDATE or a DELETE"),
        (lambda guard: guard.execute(book("12A", "Ada").returning(Seat), token=1), r"leave out returning\(\)"),
    ],
)
def test_bad_input_is_named(bases: dict[str, Base], ask: Callable[[SqlGuard], Any], message: str) -> None:
    """Wrong calls tell what is right."""
    with (
        bases["sqlite"].engine() as engine,
        engine.connect() as connection,
        pytest.raises(lockkit.ConfigurationError, match=message),
    ):
        ask(SqlGuard(connection))


def test_targets_of_another_kind_are_refused(bases: dict[str, Base]) -> None:
    """The message names what is for it."""
    with bases["sqlite"].engine() as engine, engine.connect() as connection:
        wrong: Any = connection
        with pytest.raises(lockkit.ConfigurationError, match=r"Connection is for lockkit\.fencing\.SqlGuard"):
            AsyncSqlGuard(wrong)
        wrong = engine
        with pytest.raises(lockkit.ConfigurationError, match="it has no transaction"):
            SqlGuard(wrong)
        with pytest.raises(lockkit.ConfigurationError, match="table='a b' is not understood"):
            SqlGuard(connection, table="a b")
    with (
        bases["postgresql"].engine(isolation_level="AUTOCOMMIT") as engine,
        engine.connect() as connection,
        pytest.raises(lockkit.ConfigurationError, match="is in autocommit"),
    ):
        SqlGuard(connection).accept("s", token=1)


def test_missing_table_of_scopes_is_named_if_it_is_not_to_be_made(base: Base) -> None:
    """And `create_tables` makes it."""
    with base.engine() as engine:
        with (
            engine.connect() as connection,
            pytest.raises(lockkit.ConfigurationError, match=r"create_tables\(engine\)"),
        ):
            SqlGuard(connection, table="fences_own", auto_create=False).accept("s", token=1)
        lockkit.sql.create_tables(engine, locks=None, fences="fences_own")
        with engine.begin() as connection:
            SqlGuard(connection, table="fences_own", auto_create=False).accept("s", token=1)
    base.rows("DROP TABLE fences_own")


def test_execute_locks_the_rows_that_it_looks_at(base: Base) -> None:
    """No other transaction writes after the guard has read the tokens: otherwise half of the rows could be changed."""
    if base.kind == "sqlite":
        return  # it has one writer
    refused: list[str] = []
    with base.engine() as engine, base.engine() as others:

        @sa.event.listens_for(engine, "after_cursor_execute")
        def come_between(*given: Any) -> None:
            if given[2].startswith("SELECT") and "seat" in given[2]:
                with others.connect() as other, pytest.raises(exc.OperationalError) as caught:
                    other.execute(sa.select(Seat).where(Seat.name == "12B").with_for_update(nowait=True))
                refused.append(str(caught.value.orig))

        with engine.begin() as connection:
            assert SqlGuard(connection).execute(sa.update(Seat).values(customer="Ada"), token=2) == 2
    assert len(refused) == 1
