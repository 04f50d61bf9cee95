"""Migrations by several processes at the same time, with Alembic and with SQLAlchemy alone, on real servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

import lockkit
from lockkit.integrations.alembic import migration_lock
from lockkit.integrations.migrations import LOCK_NAME, client_for
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import MariaServer, PooledPostgres, require
from tests.conventions.sources import ROOT
from tests.integrations import migrators
from tests.programs import printed, run_python
from tests.tries import until

PROCESSES = 8
LIMIT = 100.0


@pytest.fixture(scope="module")
def pooled() -> Iterator[PooledPostgres]:
    """PostgreSQL, and a pgbouncer in transaction mode with one connection to it."""
    require("postgresql", local=True)
    require("pgbouncer", local=True)
    with PooledPostgres(pool_size=1) as servers:
        yield servers


@pytest.fixture
def postgresql(pooled: PooledPostgres) -> str:
    """The URL of an empty PostgreSQL database, without the pooler."""
    pooled.server.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return f"postgresql+psycopg://postgres@{pooled.server.address}/postgres"


@pytest.fixture
def mariadb() -> Iterator[str]:
    """The URL of an empty MariaDB database."""
    require("mariadb", local=True)
    with MariaServer() as server:
        yield server.url.replace("mariadb://", "mysql+pymysql://")


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """One of the two."""
    value: str = request.getfixturevalue(request.param)
    return value


def migrate(kind: str, url: str, *, processes: int = PROCESSES) -> list[str]:
    """Run Alembic in processes; return what each said."""
    done = run_python("-W", "ignore", "-m", "tests.integrations.migrators", str(processes), kind, url)
    said = [line for line in done.stdout.splitlines() if line.startswith("status")]
    assert len(said) == processes, done.stdout + done.stderr
    return [*sorted(said), done.stderr]


@contextmanager
def engine_of(url: str) -> Iterator[Engine]:
    """An engine without a pool."""
    engine = create_engine(url, poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("url", ["postgresql", "mariadb"], indirect=True)
def test_eight_processes_migrate_once(url: str) -> None:
    """All end well, though one migration makes an index concurrently; those that come later need no lock."""
    *said, errors = migrate("locked", url)

    assert all(one.startswith("status 0") for one in said), errors
    assert any("had the lock" in one for one in said)
    with engine_of(url) as engine, engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM orders")).scalar_one() == 100
        assert [one["name"] for one in sqlalchemy.inspect(engine).get_indexes("orders")] == ["orders_reference"]
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == [
            "reference_index"
        ]
        if engine.dialect.name == "postgresql":
            valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'orders_reference'::regclass"
            assert connection.execute(text(valid)).scalar_one()


def test_alembic_alone_does_not_exclude(pooled: PooledPostgres, postgresql: str) -> None:
    """Two processes that have read the same revision run the same migration, and one fails (Alembic has no lock)."""
    pooled.server.execute("CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY)")

    *said, errors = migrate("unlocked", postgresql, processes=2)

    assert [one[:8] for one in said] == ["status 0", "status 1"], errors
    assert "duplicate key" in errors or "already exists" in errors


def test_at_head_nothing_waits_for_the_lock(postgresql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts later is not held up, nor are commands that change nothing."""
    monkeypatch.setenv("DATABASE_URL", postgresql)
    with engine_of(postgresql) as engine, client_for(engine) as client:
        with client.lock(LOCK_NAME):
            command.current(migrators.config())
            command.upgrade(migrators.config(), "head", sql=True)
        command.upgrade(migrators.config(), "head")

        with client.lock(LOCK_NAME):
            command.upgrade(migrators.config(), "head")

        assert client.holders(LOCK_NAME) == []
    command.downgrade(migrators.config(), "-1")
    with engine_of(postgresql) as engine:
        assert sqlalchemy.inspect(engine).get_indexes("orders") == []


def test_relative_revisions_take_the_lock(postgresql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is relative to the present revision is compared under the lock only."""
    monkeypatch.setenv("DATABASE_URL", postgresql)
    command.upgrade(migrators.config(), "+1")
    with engine_of(postgresql) as engine, client_for(engine) as client, client.lock(LOCK_NAME) as lease:
        upgrade = threading.Thread(target=command.upgrade, args=(migrators.config(), "+1"), daemon=True)
        upgrade.start()
        until(lambda: _waits(engine), LIMIT)
        assert sqlalchemy.inspect(engine).get_indexes("orders") == []
        lease.release()
        upgrade.join(PATIENCE)

        assert [one["name"] for one in sqlalchemy.inspect(engine).get_indexes("orders")] == ["orders_reference"]


def test_lock_excludes_behind_a_pooler_where_advisory_locks_do_not(pooled: PooledPostgres, postgresql: str) -> None:
    """PgBouncer in transaction mode lends two clients the same session, whose advisory locks are its own."""
    bouncer = f"postgresql+psycopg://postgres@{pooled.bouncer.address}/postgres"
    attempt = text("SELECT pg_try_advisory_lock(42)")
    with engine_of(bouncer) as engine:
        with engine.connect() as one, engine.connect() as other:
            assert one.execute(attempt).scalar_one()
            one.commit()
            assert other.execute(attempt).scalar_one()
            other.execute(text("SELECT pg_advisory_unlock_all()"))

        with migration_lock(engine):
            for url in (bouncer, postgresql):
                assert is_held(url)


def test_advisory_lock_and_concurrent_index_block_each_other(postgresql: str) -> None:
    """A process that waits for an advisory lock has a snapshot, and CREATE INDEX CONCURRENTLY waits for that."""
    create = text("CREATE INDEX CONCURRENTLY made_x ON made (x)")
    with engine_of(postgresql) as autocommit:
        engine = autocommit.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as holder, engine.connect() as waiter:
            holder.execute(text("CREATE TABLE made (x integer)"))
            holder.execute(text("SET deadlock_timeout = '50ms'"))
            holder.execute(text("SELECT pg_advisory_lock(42)"))
            failed: list[str] = []

            def wait() -> None:
                try:
                    waiter.execute(text("SELECT pg_advisory_lock(42)"))
                except OperationalError as error:
                    failed.append(str(error))

            thread = threading.Thread(target=wait)
            thread.start()
            until(lambda: _waits(engine, "pg_advisory_lock(42)", "wait_event_type = 'Lock'"), LIMIT)
            try:
                holder.execute(create)
            except OperationalError as error:
                failed.append(str(error))
            holder.execute(text("SELECT pg_advisory_unlock_all()"))
            thread.join(PATIENCE)

        assert "deadlock detected" in failed[0]


def test_lost_lock_is_an_error(postgresql: str) -> None:
    """What was done was not protected to its end."""
    with engine_of(postgresql) as engine, client_for(engine) as client:
        client.lock("connects", timeout=PATIENCE).acquire().release()
        with pytest.raises(lockkit.LockLost), migration_lock(engine):
            client.break_lock(LOCK_NAME)

        with migration_lock(engine, client=client, timeout=PATIENCE) as lease:
            assert lease is not None
            assert lease.name == LOCK_NAME


def test_connection_must_not_be_in_a_transaction(postgresql: str) -> None:
    """Its snapshot may be older than what the process before has migrated."""
    with engine_of(postgresql) as engine, engine.connect() as connection:
        with migration_lock(connection, timeout=PATIENCE) as lease:
            assert lease is not None
        connection.execute(text("SELECT 1"))
        with pytest.raises(lockkit.ConfigurationError, match="inside a transaction"), migration_lock(connection):
            pytest.fail("it had the lock")


def test_sqlite_has_its_lock_beside_it(tmp_path: Path) -> None:
    """A migration has the database for itself, so that a lock in it could not be renewed."""
    database = tmp_path / "a b%.db"
    with migration_lock(f"sqlite:///{database}") as lease:
        assert lease is not None
        assert not database.exists()
        assert (tmp_path / "a b%.db-lockkit").is_dir()
        assert is_held(f"sqlite:///{database}")


@pytest.mark.parametrize(
    "database",
    ["", "/:memory:", "/file:shared?mode=memory&cache=shared&uri=true", "/file::memory:?cache=shared&uri=true"],
)
def test_database_in_memory_needs_no_lock(database: str) -> None:
    """No other process has it, in each way that SQLite has to write it."""
    with migration_lock(f"sqlite://{database}") as lease:
        assert lease is None


def test_what_cannot_be_locked_is_refused() -> None:
    """The message says what to give instead, and shows no password."""
    asyncio = create_async_engine("postgresql+psycopg_async://u:secret@localhost/x").sync_engine
    for wrong, says in ((asyncio, "is for asyncio"), ("u:secret", "a valid URL"), (17, "a valid URL")):
        with pytest.raises(lockkit.ConfigurationError, match=says) as caught, migration_lock(wrong):  # type: ignore[arg-type]
            pytest.fail("it had the lock")
        assert "secret" not in str(caught.value)
    with pytest.raises(lockkit.ConfigurationError, match="URI"), migration_lock("sqlite:///file:x?uri=true"):
        pytest.fail("it had the lock")


def test_driver_for_asyncio_is_refused_in_env_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before lockkit looks for the revision, for which it would need an event loop; SQL alone needs no connection."""
    monkeypatch.setenv("DATABASE_URL", f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    command.upgrade(migrators.config(), "head", sql=True)

    with pytest.raises(lockkit.ConfigurationError, match="aiosqlite is for asyncio"):
        command.upgrade(migrators.config(), "head")


def test_example_runs(tmp_path: Path) -> None:
    """One command, on SQLite."""
    out = printed(ROOT / "examples" / "alembic_app", cwd=tmp_path, without=["DATABASE_URL"])

    assert out.splitlines()[-1] == "100 orders, indexes: orders_reference"
    assert "had the lock" in out


def is_held(url: str) -> bool:
    """Whether another process would wait; a server on a busy machine may take seconds to let it connect."""
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            with migration_lock(url, timeout=0):
                return False
        except lockkit.LockTimeout:
            return True
        except lockkit.BackendUnavailable:
            assert time.monotonic() < deadline


def _waits(engine: Engine, statement: str = "LISTEN", condition: str = "true") -> bool:
    """Whether another session runs such a statement, or has just run it."""
    query = f"SELECT count(*) FROM pg_stat_activity WHERE query LIKE :x AND pid <> pg_backend_pid() AND {condition}"  # noqa: S608
    with engine.connect() as connection:
        return bool(connection.execute(text(query), {"x": f"%{statement}%"}).scalar_one())
