"""Something else has the name of a table of lockkit's, or its tables would not be what they should be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import lockkit
from lockkit.backends.sql.options import open_database
from lockkit.backends.sql.schema import locks, migrate
from lockkit.runtime import drive
from lockkit.url import parse
from lockkit_tools.servers import MariaServer, PostgresServer
from tests.backends.sql_table.support import Look
from tests.backends.support import StubHost

PATIENCE = 15.0
COLUMNS = (
    "'x' AS name, 'x' AS owner, 1 AS token, 0 AS expires_at_us, 'x' AS metadata, 'x' AS metadata_owner,"
    " 'x' AS broken_owner, 1 AS wanted, 1 AS granted_at_us, 1 AS session"
)
TYPED = COLUMNS.replace("1 AS wanted", "true AS wanted").replace("1 AS token", "CAST(1 AS bigint) AS token")
LACKS = "lacks a column: run lockkit migrate, or give another table="
UNFIT = "is no table of lockkit's.*or give another table="
OTHER = "has something else of this name: give another table="


@contextmanager
def made(url: str, what: str, definition: str) -> Iterator[None]:
    """Have something named ``thing`` meanwhile."""
    look = Look(url)
    look.run("CREATE TABLE IF NOT EXISTS other (n int)")
    look.run(f"CREATE {what} thing {definition}")
    try:
        yield
    finally:
        look.run(f"DROP {what} thing")
        look.run("DROP TABLE IF EXISTS thing_leases")


ALL_MODES = ("table", "row", "advisory")
UNFIT_OR_LACKS = f"{UNFIT}|{LACKS}"
IN_POSTGRESQL = [
    ("VIEW", "AS SELECT 1 AS n", LACKS),
    ("VIEW", f"AS SELECT {TYPED}", UNFIT_OR_LACKS),
    ("MATERIALIZED VIEW", f"AS SELECT {TYPED}", UNFIT_OR_LACKS),
    ("SEQUENCE", "", LACKS),
    ("TYPE", "AS ENUM ('a')", OTHER),
    ("TYPE", "AS (n int)", UNFIT),
    ("TABLE", "(name text PRIMARY KEY, n int NOT NULL) PARTITION BY HASH (name)", UNFIT_OR_LACKS),
    ("TABLE", f"AS SELECT {TYPED}", UNFIT_OR_LACKS),
    ("TABLE", f"AS SELECT {COLUMNS}", UNFIT_OR_LACKS),
]


@pytest.mark.parametrize(
    ("kind", "mode", "what", "definition", "message"),
    [
        *[("postgresql", mode, *other) for mode in ALL_MODES for other in IN_POSTGRESQL],
        *[("mariadb", mode, "VIEW", f"AS SELECT {COLUMNS}", UNFIT) for mode in ALL_MODES],
        ("mariadb", "table", "SEQUENCE", "", LACKS),
        ("sqlite", "table", "VIEW", "AS SELECT 1 AS n", LACKS),
        ("sqlite", "table", "VIEW", f"AS SELECT {COLUMNS}", UNFIT),
        ("sqlite", "table", "TABLE", f"AS SELECT {COLUMNS}", UNFIT),
        ("sqlite", "table", "TABLE", "(name TEXT PRIMARY KEY)", LACKS),
        ("sqlite", "table", "INDEX", "ON other (n)", OTHER),
    ],
)
def test_what_else_has_the_name_is_an_error_of_configuration(
    request: pytest.FixtureRequest, tmp_path: Path, *, kind: str, mode: str, what: str, definition: str, message: str
) -> None:
    """Said at once: it was a server that ended connections, or a lock that is busy for ever."""
    url = f"sqlite:///{tmp_path}/locks.db" if kind == "sqlite" else request.getfixturevalue(kind).url
    with (
        made(url, what, definition),
        lockkit.connect(url, mode=mode, table="thing") as client,
        pytest.raises(lockkit.ConfigurationError, match=message),
    ):
        client.lock("y").acquire(PATIENCE)


@pytest.mark.parametrize(
    ("what", "definition", "message"),
    [
        ("VIEW", "AS SELECT 1 AS n", f"{UNFIT}.*not supported for views"),
        ("SEQUENCE", "", "has something else named thing"),
        ("TYPE", "AS ENUM ('a')", OTHER),
    ],
)
def test_migration_says_what_is_there(postgresql: PostgresServer, what: str, definition: str, message: str) -> None:
    """It does not say that it has made the table."""
    database = open_database(parse(postgresql.url), {}, {}, StubHost())
    with made(postgresql.url, what, definition), pytest.raises(lockkit.ConfigurationError, match=message):
        drive(migrate(database, [locks("thing")]))
    drive(database.close())


@pytest.mark.parametrize("mode", ["table", "row", "advisory"])
def test_no_table_is_made_with_an_engine_that_locks_no_rows(mariadb: MariaServer, mode: str) -> None:
    """MariaDB would make one of the enforced engine, and a writer would get a row that readers have locked."""
    table = f"engine_{mode}"
    mariadb.execute("SET GLOBAL enforce_storage_engine = MyISAM; SET GLOBAL sql_mode = ''")
    try:
        with (
            lockkit.connect(mariadb.url, mode=mode, table=table) as client,
            pytest.raises(lockkit.ConfigurationError, match="makes no tables with InnoDB"),
        ):
            client.lock("y").acquire(PATIENCE)
    finally:
        mariadb.execute("SET GLOBAL enforce_storage_engine = NULL; SET GLOBAL sql_mode = DEFAULT")
