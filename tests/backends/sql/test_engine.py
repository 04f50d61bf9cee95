"""Engines of an application: whatever their driver is, lockkit finds address, login and TLS settings in them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import event, orm
from sqlalchemy.ext.asyncio import create_async_engine

import lockkit
import lockkit.aio
from lockkit.backends.sql.options import _for_psycopg, _for_pymysql
from lockkit.backends.sql.postgresql import KEYWORDS
from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.tries import have_time_to_answer

PATIENCE = 60.0
DRIVERS = {
    "postgresql": ["psycopg", "psycopg_async", "psycopg2", "pg8000", "asyncpg"],
    "mariadb": ["pymysql", "aiomysql", "asyncmy"],
    "sqlite": ["pysqlite", "aiosqlite"],
}
ASYNC = {"asyncpg", "psycopg_async", "aiomysql", "asyncmy", "aiosqlite"}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single try opens a connection here, which may take longer than its half second on a busy machine."""
    have_time_to_answer(monkeypatch)


def engine_of(url: str, driver: str, **options: Any) -> Any:  # noqa: ANN401 - of either kind
    """Make an engine with a driver."""
    scheme, _, rest = url.partition(":")
    scheme = {"mariadb": "mysql"}.get(scheme, scheme)
    make: Callable[..., Any] = create_async_engine if driver in ASYNC else sqlalchemy.create_engine
    return make(f"{scheme}+{driver}:{rest}", **options)


def lock_on_both_faces(engine: Any) -> None:  # noqa: ANN401 - of either kind
    """Lock with a client for threads, and with one for asyncio; they exclude each other."""

    async def try_it() -> bool:
        async with lockkit.aio.from_client(engine) as client:
            lease = await client.lock("x").try_acquire()
            if lease is not None:
                await lease.release()
            return lease is not None

    with lockkit.from_client(engine) as client:
        with client.lock("x", ttl=600, timeout=PATIENCE):
            assert not asyncio.run(try_it())
        assert asyncio.run(try_it())


@pytest.mark.parametrize("driver", [driver for drivers in DRIVERS.values() for driver in drivers])
def test_engine_of_each_driver(driver: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Each driver of SQLAlchemy's."""
    (kind,) = (kind for kind, drivers in DRIVERS.items() if driver in drivers)
    url = f"sqlite:///{tmp_path}/x.db" if kind == "sqlite" else request.getfixturevalue(kind).url
    lock_on_both_faces(engine_of(url, driver))


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_listener_puts_in_a_new_password(kind: str) -> None:
    """As tokens of IAM: each connection asks for one."""
    require(kind, local=True)
    with PostgresServer(password="old") if kind == "postgresql" else MariaServer(password="old") as server:  # noqa: S106
        bare = server.url.replace("old", "nothing")
        engine = engine_of(bare, "psycopg2" if kind == "postgresql" else "pymysql")
        passwords = ["old"]

        @event.listens_for(engine, "do_connect")
        def put_in(dialect: object, record: object, positional: object, named: dict[str, Any]) -> None:
            del dialect, record, positional
            named["password"] = passwords[-1]

        with lockkit.from_client(engine) as client:
            client.lock("x").acquire(timeout=PATIENCE).release()
            passwords.append("new")
            user = "ROLE postgres PASSWORD 'new'" if kind == "postgresql" else "USER lockkit IDENTIFIED BY 'new'"
            server.execute(f"ALTER {user}")
            client._engine._backend.database.drop_idle()  # type: ignore[union-attr]
            client.lock("x").acquire(timeout=PATIENCE).release()
            passwords.append("wrong one")
            client._engine._backend.database.drop_idle()  # type: ignore[union-attr]
            with pytest.raises(lockkit.ConfigurationError, match="refuses the login") as caught:
                client.lock("x").acquire(timeout=PATIENCE)
            assert "wrong one" not in str(caught.value)


def test_engine_that_connects_by_itself_is_refused(postgresql: PostgresServer) -> None:
    """Where its function leads to, lockkit cannot know; by the engine's own means, or by a listener."""
    plain = engine_of(postgresql.url, "psycopg")
    connected: list[Any] = []

    def connect(*_: object) -> Any:  # noqa: ANN401 - psycopg's
        connected.append(plain.raw_connection().driver_connection)
        return connected[-1]

    listened = engine_of(postgresql.url, "psycopg")
    event.listen(listened, "do_connect", connect)
    for engine in (sqlalchemy.create_engine("postgresql+psycopg://", creator=connect), listened):
        with (
            lockkit.from_client(engine) as client,
            pytest.raises(lockkit.ConfigurationError, match="give it the URL of the database"),
        ):
            client.lock("x").acquire(timeout=PATIENCE)
    plain.dispose()


def test_application_goes_on_connecting(postgresql: PostgresServer) -> None:
    """Lockkit's listener concerns lockkit alone."""
    engine = engine_of(postgresql.url, "psycopg")
    with lockkit.from_client(engine) as client, client.lock("x", timeout=PATIENCE), engine.connect() as connection:
        assert connection.execute(sqlalchemy.text("SELECT 1")).scalar() == 1
    engine.dispose()


@pytest.mark.parametrize("option", ["password", "sslpassword", "ssl_key_password"])
def test_secret_in_the_query_is_not_shown(option: str) -> None:
    """SQLAlchemy hides only the one before the host."""
    with lockkit.from_client(engine_of(f"postgresql://app@h/db?{option}=hunter2&sslmode=require", "psycopg")) as client:
        assert client.url == "postgresql+psycopg://app@h/db?sslmode=require"


def verifying(*, verify: bool) -> ssl.SSLContext:
    """Make a context."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


LOGIN = {"host": "h", "user": "u", "password": "p"}


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ({"port": 5433, "dbname": "d", "cursor_factory": 1}, {"port": 5433, "dbname": "d"}),
        ({"database": "d", "statement_cache_size": 0}, {"dbname": "d"}),
        ({"sslmode": "verify-ca", "sslrootcert": "f"}, {"sslmode": "verify-ca", "sslrootcert": "f"}),
        ({"options": "-c search_path=s", "client_encoding": "latin1"}, {"options": "-c search_path=s"}),
        ({"timeout": 0.4}, {"connect_timeout": 1}),
        ({"ssl": "verify-full"}, {"sslmode": "verify-full"}),
        ({"ssl": True}, {"sslmode": "verify-full", "sslrootcert": "system"}),
        ({"ssl": False}, {}),
        ({"ssl_context": verifying(verify=False)}, {"sslmode": "require"}),
        ({"dsn": "host=h2"}, {"conninfo": "host=h2"}),
    ],
)
def test_arguments_for_postgresql(named: dict[str, Any], wanted: dict[str, Any]) -> None:
    """What concerns server, login and TLS means the same to libpq; the rest is the application's."""
    assert _for_psycopg([], {**LOGIN, **named}, KEYWORDS, "url") == {**LOGIN, **wanted}


def test_certificates_in_a_context_are_refused() -> None:
    """Libpq could only do without: it must not."""
    with pytest.raises(lockkit.ConfigurationError, match="sslmode=verify-full"):
        _for_psycopg([], {"ssl": verifying(verify=True)}, KEYWORDS, "url")


CONTEXT = verifying(verify=True)


@pytest.mark.parametrize(
    ("driver", "named", "wanted"),
    [
        ("pymysql", {"db": "d", "charset": "latin1", "autocommit": False}, {"database": "d"}),
        ("aiomysql", {"ssl": CONTEXT, "loop": 1}, {"ssl": CONTEXT}),
        (
            "pymysql",
            {"ssl": {"ca": "f"}},
            {"ssl": True, "ssl_ca": "f", "ssl_verify_cert": True, "ssl_verify_identity": True},
        ),
        ("pymysql", {"ssl": {"cert": "c"}}, {"ssl": True, "ssl_cert": "c", "ssl_verify_cert": False}),
        (
            "mysqldb",
            {"ssl": {"ca": "f"}, "ssl_mode": "VERIFY_CA"},
            {"ssl": True, "ssl_ca": "f", "ssl_verify_cert": True, "ssl_verify_identity": False},
        ),
        ("mysqldb", {"ssl_mode": "VERIFY_IDENTITY"}, {"ssl": True, "ssl_verify_identity": True}),
        ("mysqldb", {"ssl_mode": "REQUIRED"}, {"ssl": True, "ssl_verify_cert": False}),
        ("mysqlconnector", {"ssl_ca": "f"}, {"ssl_ca": "f", "ssl_verify_identity": False}),
    ],
)
def test_arguments_for_mysql(driver: str, named: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same for PyMySQL."""
    names = frozenset(("host", "user", "password", "database", "ssl", "ssl_ca", "ssl_cert"))
    names |= {"ssl_verify_cert", "ssl_verify_identity"}

    found = _for_pymysql({**LOGIN, **named}, driver, names, "url")

    assert {name: value for name, value in found.items() if value or name in wanted} == {**LOGIN, **wanted}


def test_unknown_setting_of_tls_is_refused() -> None:
    """It might be one that protects."""
    with pytest.raises(lockkit.ConfigurationError, match="capath"):
        _for_pymysql({"ssl": {"capath": "d"}}, "pymysql", frozenset(), "url")


def test_session_or_connection_is_refused_with_its_engine_named() -> None:
    """An application has one at hand more often than the engine."""
    engine = sqlalchemy.create_engine("sqlite://")
    with orm.Session(engine) as session, engine.connect() as connection:
        for given in (session, connection):
            with pytest.raises(lockkit.ConfigurationError, match=r"session\.get_bind\(\), connection\.engine"):
                lockkit.from_client(given)
