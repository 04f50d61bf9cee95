"""Examines ``mariadb:`` and ``mysql:`` URLs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from lockkit.backends.sql.examine import common
from lockkit.backends.sql.examine.common import SqlServer
from lockkit.backends.sql.schema import quoted
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity

if TYPE_CHECKING:
    from sqlalchemy import Table


_PAGE = "how-to/check-your-servers.md#mariadb-and-mysql"

NOT_FLUSHED = Check(
    "mysql-not-flushed",
    Severity.WARNING,
    "A crash of the machine (at 0, of the server too) undoes the locks of the last second, though they were granted.",
    _PAGE,
)
GALERA = Check(
    "mysql-galera",
    Severity.ERROR,
    "Each node would grant locks that another has granted, so lockkit refuses mode=row and mode=advisory.",
    _PAGE,
)
NOT_INNODB = Check(
    "mysql-not-innodb",
    Severity.ERROR,
    "Its rows cannot be locked, and a failed statement is not undone: two clients can hold one lock.",
    _PAGE,
)

_LOOK = """
SELECT VERSION(), @@global.read_only, @@global.innodb_flush_log_at_trx_commit, @@global.max_connections,
 CURRENT_USER(), DATABASE()
"""
_NAMES = ("version", "read_only", "flush", "connections_max", "user", "database")
_STORAGE_ENGINE = (
    "SELECT engine FROM information_schema.tables WHERE table_schema = COALESCE($1, DATABASE()) AND table_name = $2"
)
_GRANT = re.compile(r"GRANT (.+?) ON (\S+) TO ", re.DOTALL)
_RIGHTS = {
    "SELECT": "EXPLAIN SELECT * FROM {table} WHERE name = ''",
    "INSERT": "EXPLAIN INSERT INTO {table} (name) VALUES ('')",
    "UPDATE": "EXPLAIN UPDATE {table} SET name = name WHERE name = ''",
    "DELETE": "EXPLAIN DELETE FROM {table} WHERE name = ''",
}
"""EXPLAIN needs the rights of the statement, and does not run it."""


async def examine(examination: Examination) -> None:
    """Look at the server and the tables."""
    server = await common.open_server(examination)
    try:
        ((*values,),) = await server.ask(_LOOK)
        facts = dict(zip(_NAMES, values, strict=True))
        version = str(facts["version"])
        examination.note("version", version if "MariaDB" in version else f"MySQL {version}")
        await _examine_access(examination, server, facts)
        _examine_state(examination, facts)
        await _examine_cluster(examination, server)
        used = int((await server.ask("SHOW GLOBAL STATUS LIKE 'Threads_connected'"))[0][1])
        most = int(facts["connections_max"])
        fix = f"SET GLOBAL max_connections = {2 * most} (and in my.cnf); SHOW PROCESSLIST shows who has them"
        common.examine_connections(examination, used, most, fix)
        await _examine_tables(examination, server, facts)
        await server.time(examination)
    finally:
        await server.close()


async def _examine_access(examination: Examination, server: SqlServer, facts: dict[str, Any]) -> None:
    url = examination.url
    cipher = (await server.ask("SHOW SESSION STATUS LIKE 'Ssl_cipher'"))[0][1]
    common.examine_network(
        examination,
        encrypted=bool(cipher),
        verified=server.database.guard is None or server.database.guard.verified,
        loopback=url.host is None or is_loopback(url.host),
        fix="Set ssl_cert and ssl_key in my.cnf, and ?ssl_ca=… in the URL",
    )
    if url.password is None and "unix_socket" not in examination.options:
        user, _, host = str(facts["user"]).partition("@")
        seen = f"The server asks the user {user} for no password."
        fix = f"ALTER USER '{user}'@'{host}' IDENTIFIED BY 'A_PASSWORD', and give it in the URL"
        examination.find(common.NO_PASSWORD, url.safe_text, seen, fix)


def _examine_state(examination: Examination, facts: dict[str, Any]) -> None:
    where = examination.url.safe_text
    # MySQL: 0 or 1; MariaDB from 12 on by name.
    if str(facts["read_only"]).upper() not in {"0", "OFF"}:
        fix = "Give the primary's address; or, if it is the primary: SET GLOBAL read_only = 0"
        examination.find(common.READ_ONLY, where, "read_only is on: the server is a replica, or meant to be.", fix)
    if int(facts["flush"]) != 1:
        seen = f"innodb_flush_log_at_trx_commit is {facts['flush']}."
        fix = "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and in my.cnf"
        examination.find(NOT_FLUSHED, where, seen, fix)


async def _examine_cluster(examination: Examination, server: SqlServer) -> None:
    by_session = examination.options.get("mode") in {"row", "advisory"}
    if by_session and ("wsrep_on", "ON") in await server.ask("SHOW VARIABLES LIKE 'wsrep_on'"):
        seen = "The server is a node of a Galera cluster."
        examination.find(GALERA, examination.url.safe_text, seen, "Use mode=table, whose rows the nodes replicate")


async def _examine_tables(examination: Examination, server: SqlServer, facts: dict[str, Any]) -> None:
    creatable = await _may_create(server, str(facts["database"]))
    for table in await common.examine_tables(examination, server, creatable=creatable):
        missing = [right for right, text in _RIGHTS.items() if await _lacks(server, table, text)]
        user, _, host = str(facts["user"]).partition("@")
        common.find_rights(examination, server, table, missing, f"GRANT {{rights}} ON {{table}} TO '{user}'@'{host}'")
        await _examine_storage_engine(examination, server, table)


async def _examine_storage_engine(examination: Examination, server: SqlServer, table: Table) -> None:
    """Look at what a dump that was loaded, or an administrator, may have made: lockkit makes tables of InnoDB."""
    name = quoted(table, server.database.engine.dialect)
    for (engine,) in await server.ask(_STORAGE_ENGINE, table.schema, table.name):
        if str(engine).lower() != "innodb":
            fix = f"While no client runs: ALTER TABLE {name} ENGINE = InnoDB"
            examination.find(NOT_INNODB, name, f"The table's storage engine is {engine}.", fix)


async def _lacks(server: SqlServer, table: Table, text: str) -> bool:
    return await server.refuses(text.format(table=quoted(table, server.database.engine.dialect)))


async def _may_create(server: SqlServer, database: str) -> bool:
    """Tell whether this user may make tables in the database. Rights through a role that is not set do not count."""
    for (line,) in await server.ask("SHOW GRANTS"):
        found = _GRANT.match(str(line))
        # In a GRANT the name of a database is a pattern; _ and % in it may be escaped.
        if found and found[2].replace("\\", "") in {"*.*", f"`{database}`.*"}:
            rights = {right.strip() for right in found[1].split(",")}
            if rights & {"ALL PRIVILEGES", "CREATE"}:
                return True
    return False
