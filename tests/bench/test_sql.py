"""What is particular to SQL: connections, and tables that are removed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy
from psycopg import connect

from lockkit_tools.bench.adapters.sql import Dlock
from lockkit_tools.bench.catalog import ENTRIES, Entry
from lockkit_tools.bench.run import Run
from lockkit_tools.bench.workloads import WORKLOADS
from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.bench.test_command import report
from tests.bench.test_honesty import SHORT
from tests.tries import until

DATABASES = ("postgresql", "mariadb", "sqlite")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """URLs by scheme."""
    require("postgresql", "mariadb", local=True)
    with PostgresServer() as postgresql, MariaServer() as mariadb:
        yield {"postgresql": postgresql.url, "mariadb": mariadb.url}


DLOCKS = [entry for entry in ENTRIES if "sql:Dlock" in entry.template.target and entry.mode == "advisory"]


@pytest.mark.parametrize("scheme", ["postgresql", "mariadb"])
@pytest.mark.parametrize("entry", DLOCKS, ids=lambda entry: entry.template.target)
def test_idle_waiters_of_sqlalchemy_dlock_wait_for_the_lock(servers: dict[str, str], scheme: str, entry: Entry) -> None:
    """Each on a connection of its own, not for one of the pool's; and what they leave open at the end is no failure."""
    settings = replace(SHORT, waiters=40, settle=2.0, idle_seconds=0.5, patience=120)

    outcome = Run([entry.subject(servers[scheme], "here")], [WORKLOADS["idle"]], settings, seed=1).go(lambda *_: None)

    (cell,) = outcome.cells
    assert not cell.failed
    assert cell.rounds[0].figures["connections"] > settings.waiters


def test_sqlalchemy_dlock_waits_at_the_server(servers: dict[str, str]) -> None:
    """With a time limit it would look once a second on PostgreSQL, and hand-offs would take as long."""
    adapter = Dlock(servers["postgresql"], 30.0)
    asyncio.run(adapter.open())

    def enter() -> None:
        with adapter.lock("seat"):
            pass

    waiter = threading.Thread(target=enter)
    with connect(servers["postgresql"], autocommit=True) as eye, adapter.lock("seat"):
        waiter.start()
        query = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        until(lambda: eye.execute(query).fetchone())
    waiter.join()
    asyncio.run(adapter.close())


@pytest.mark.parametrize(
    ("scheme", "mode", "tables"),
    [
        *((scheme, "table", {"lockkit_bench_baseline"}) for scheme in DATABASES),
        *(
            (scheme, mode, {"lockkit_bench_rows", "lockkit_bench_tokens"})
            for scheme in ("postgresql", "mariadb")
            for mode in ("row", "advisory")
        ),
    ],
)
def test_tables_of_the_baselines_are_removed(
    servers: dict[str, str], tmp_path: Path, scheme: str, mode: str, tables: set[str]
) -> None:
    """Nothing of theirs stays in the user's database."""
    url = servers.get(scheme, f"sqlite:///{tmp_path}/bench.db")
    engine = sqlalchemy.create_engine(engine_url(url))
    arguments = ["--workload", "pair", "--face", "sync", "--rounds", "1", "--seconds", "0.01"]

    found = report(f"{url}?mode={mode}", *arguments)

    assert "ok" in {row["status"] for row in found["workloads"][0]["results"] if "by hand" in row["subject"]}
    with closing(engine.connect()) as connection:
        assert tables.isdisjoint(sqlalchemy.inspect(connection).get_table_names())
    engine.dispose()


def engine_url(url: str) -> str:
    """SQLAlchemy's URL, with the drivers that are installed."""
    return url.replace("postgresql:", "postgresql+psycopg:").replace("mariadb:", "mariadb+pymysql:")
