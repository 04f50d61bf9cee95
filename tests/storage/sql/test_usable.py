"""Is this connection usable for locks? Real drivers, in autocommit of their own, and in encodings of their own."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

import lockkit
import lockkit.aio
from lockkit.backends.sql.connection import Statement
from lockkit.fencing import SqlGuard
from lockkit.runtime import drive
from lockkit.sql import lock_in
from tests.storage.sql.support import Base, Bases
from tests.tries import busy_async

ACCOUNTS = sa.Table(
    "accounts",
    sa.MetaData(),
    sa.Column("name", sa.String(20), primary_key=True),
    sa.Column("balance", sa.Integer, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False, server_default="0"),
)

DRIVERS = [
    ("postgresql", "sync", "postgresql+psycopg", {"autocommit": True}),
    ("postgresql", "sync", "postgresql+psycopg2", None),
    ("postgresql", "sync", "postgresql+pg8000", None),
    ("mariadb", "sync", "mariadb+pymysql", {"autocommit": True}),
    ("sqlite", "sync", "sqlite+pysqlite", {"isolation_level": None}),
    ("postgresql", "asyncio", "postgresql+psycopg", {"autocommit": True}),
    ("mariadb", "asyncio", "mariadb+aiomysql", {"autocommit": True}),
    ("mariadb", "asyncio", "mariadb+asyncmy", {"autocommit": True}),
    ("sqlite", "asyncio", "sqlite+aiosqlite", {"isolation_level": None}),
]
"""The arguments that have a driver commit each statement, without a word to SQLAlchemy; None: its attribute does it."""


def money(base: Base) -> int:
    """Tell what an account has."""
    ((balance,),) = base.rows("SELECT balance FROM accounts WHERE name = 'a'")
    return int(balance)


@pytest.fixture
def base(bases: Bases, request: pytest.FixtureRequest) -> Base:
    """The database of the case, with one account."""
    base = bases[request.param]
    with base.engine() as engine:
        ACCOUNTS.drop(engine, checkfirst=True)
        ACCOUNTS.create(engine)
        with engine.begin() as connection:
            connection.execute(sa.insert(ACCOUNTS).values(name="a", balance=10))
            connection.execute(sa.text("DROP TABLE IF EXISTS lockkit_tx"))
    return base


def nothing_written(base: Base) -> bool:
    """Tell whether neither the application's data nor the table of locks was written."""
    with base.engine() as engine:
        has_table = sa.inspect(engine).has_table("lockkit_tx")
    return money(base) == 10 and not (has_table and base.rows("SELECT * FROM lockkit_tx"))


CHANGE = sa.update(ACCOUNTS).where(ACCOUNTS.c.name == "a").values(balance=ACCOUNTS.c.balance - 1)


@pytest.mark.parametrize(("base", "face", "driver", "arguments"), DRIVERS, indirect=["base"])
def test_autocommit_of_the_driver_is_refused_in_the_applications_transaction(
    base: Base, face: str, driver: str, arguments: dict[str, Any] | None
) -> None:
    """SQLAlchemy knows nothing of it: no lock would last. On a connection and in a session, before it is written."""

    async def main(engine: Any) -> None:  # noqa: ANN401 - an AsyncEngine
        for opened in (engine.connect(), AsyncSession(engine)):
            async with opened as target:
                with pytest.raises(lockkit.ConfigurationError, match="is in autocommit"):
                    await lock_in(target, "x")

    if face == "asyncio":
        base.aio(main, driver=driver, connect_args=arguments)
    else:
        engine = sa.create_engine(f"{driver}://{base.place}", connect_args=arguments or {})
        if arguments is None:
            sa.event.listen(engine, "connect", lambda connection, _: setattr(connection, "autocommit", True))
        for opened in (engine.connect(), Session(engine)):
            with opened as target, pytest.raises(lockkit.ConfigurationError, match="is in autocommit"):
                lock_in(target, "x")
        engine.dispose()
    assert nothing_written(base)


@pytest.mark.parametrize("base", ["postgresql", "mariadb", "sqlite"], indirect=True)
def test_transact_on_an_engine_in_autocommit_applies_nothing_twice(base: Base) -> None:
    """A transfer whose first try meets a conflict after its first half."""
    tries = 0

    def transfer(place: Any) -> None:  # noqa: ANN401 - a session or connection
        nonlocal tries
        place.execute(CHANGE)
        tries += 1
        if tries == 1:
            raise sa.orm.exc.StaleDataError

    with base.engine() as engine:
        lockkit.optimistic.transact(engine, transfer)
    assert money(base) == 9

    with base.engine(isolation_level="AUTOCOMMIT") as engine:
        for source in (engine, sessionmaker(engine)):
            tries = 0
            with pytest.raises(lockkit.ConfigurationError, match="is in autocommit"):
                lockkit.optimistic.transact(source, transfer)
            assert money(base) == 9

    async def main(engine: Any) -> None:  # noqa: ANN401 - an AsyncEngine
        async def half(place: Any) -> None:  # noqa: ANN401 - see above
            await place.execute(CHANGE)

        for source in (engine, async_sessionmaker(engine)):
            with pytest.raises(lockkit.ConfigurationError, match="is in autocommit"):
                await lockkit.optimistic.transact_async(source, half)

    base.aio(main, isolation_level="AUTOCOMMIT")
    assert money(base) == 9


NAME = "café4"


@pytest.fixture(scope="module")
def latin(bases: Bases) -> Base:
    """A database in LATIN1 beside the one in UTF-8."""
    return made(bases, "latin", "LATIN1")


@pytest.fixture(scope="module")
def plain(bases: Bases) -> Base:
    """A database that converts nothing."""
    return made(bases, "plain", "SQL_ASCII")


def made(bases: Bases, name: str, encoding: str) -> Base:
    """Make a database."""
    with bases["postgresql"].engine(isolation_level="AUTOCOMMIT") as engine, engine.connect() as connection:
        connection.exec_driver_sql(
            f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        )
    return Base("postgresql", f"{bases['postgresql'].place.rpartition('/')[0]}/{name}")


class TestEncoding:
    """PostgreSQL converts what a client sends from the encoding that the client has named."""

    @pytest.mark.parametrize("mode", ["table", "row"])
    def test_role_with_another_encoding_excludes_the_others(self, bases: Bases, mode: str) -> None:
        """With asyncio, and where the role has it."""
        latin = role(bases, "latin", "client_encoding = 'LATIN1'")

        async def main(engine: Any) -> None:  # noqa: ANN401 - an AsyncEngine
            async with lockkit.aio.from_client(engine, mode=mode) as client:
                assert await busy_async(client.lock(NAME))

        with lockkit.connect(f"{bases['postgresql'].url}?mode={mode}") as plain, plain.lock(NAME, ttl=60):
            latin.aio(main)

    @pytest.mark.parametrize("mode", ["table", "row"])
    def test_name_that_the_database_cannot_store_is_refused(self, latin: Base, mode: str) -> None:
        """At the call, and not retried until the server may have another encoding."""
        with lockkit.connect(f"{latin.url}?mode={mode}") as client:
            with client.lock(NAME):
                pass
            with pytest.raises(lockkit.ConfigurationError, match="in the database's encoding"):
                client.lock("席位").acquire()

    @pytest.mark.parametrize("encodings", [("UTF8", "LATIN1"), ("LATIN1", "UTF8")])
    def test_lock_in_and_guards_know_one_name_in_all_encodings(self, plain: Base, encodings: tuple[str, str]) -> None:
        """Also in a database that stores what it gets."""
        first, second = (
            sa.create_engine(plain.url, connect_args={"client_encoding": encoding}) for encoding in encodings
        )
        with first.begin() as connection, second.begin() as other:
            token = lock_in(connection, NAME).token
            SqlGuard(connection).accept(NAME, token=token)
            with pytest.raises(lockkit.LockTimeout):
                lock_in(other, NAME, timeout=0)
        with second.begin() as other, pytest.raises(lockkit.StaleToken):
            SqlGuard(other).accept(NAME, token=1)
        first.dispose()
        second.dispose()

    def test_lock_in_takes_names_that_the_connection_cannot_send(self, bases: Bases, latin: Base) -> None:
        """The database decides what it can store."""
        arguments = {"client_encoding": "LATIN1"}
        with bases["postgresql"].engine(connect_args=arguments) as engine, engine.begin() as connection:
            assert lock_in(connection, "席位").token
        with (
            latin.engine(connect_args=arguments) as engine,
            engine.connect() as connection,
            pytest.raises(lockkit.ConfigurationError, match="in the database's encoding"),
        ):
            lock_in(connection, "席位")


def test_all_locks_are_refused_on_cockroachdb(bases: Bases) -> None:
    """It speaks PostgreSQL's protocol, but its advisory locks do nothing, and the lock table lacks a function there."""
    bases["postgresql"].rows("CREATE SCHEMA IF NOT EXISTS roach")
    bases["postgresql"].rows(
        "CREATE OR REPLACE FUNCTION roach.version() RETURNS text LANGUAGE sql AS "
        "$$ SELECT 'CockroachDB CCL v23.1.11 (x86_64-pc-linux-gnu, built 2023/09/27, go1.19.10)' $$"
    )
    # For this role only it is found before pg_catalog's.
    base = role(bases, "roach", "search_path = roach, pg_catalog, public")
    for mode in ("table", "row", "advisory"):
        with (
            lockkit.connect(f"postgresql://{base.place}?mode={mode}") as client,
            pytest.raises(lockkit.ConfigurationError, match=r"is CockroachDB CCL v23.1.11, on which"),
        ):
            client.lock("x").acquire()


def test_connections_are_at_read_committed_whatever_the_role_says(bases: Bases) -> None:
    """Otherwise PostgreSQL would give up statements that wait for one another, again and again."""
    base = role(bases, "strict", "default_transaction_isolation = 'serializable'")
    assert base.rows("SHOW transaction_isolation") == [("serializable",)]
    show = Statement("SHOW transaction_isolation")
    with lockkit.connect(f"postgresql://{base.place}") as client:
        client.ping()
        backend: Any = client._engine.client.backend
        assert drive(backend.database.run(show)).rows == [("read committed",)]


def role(bases: Bases, name: str, setting: str) -> Base:
    """Make a role of PostgreSQL with a setting; return the database as that role sees it."""
    base = bases["postgresql"]
    if not base.rows(f"SELECT 1 FROM pg_roles WHERE rolname = '{name}'"):  # noqa: S608 - a test's own name
        base.rows(f"CREATE ROLE {name} SUPERUSER LOGIN")
        base.rows(f"ALTER ROLE {name} SET {setting}")
    return Base("postgresql", f"{name}@{base.place.partition('@')[2] or base.place}")
