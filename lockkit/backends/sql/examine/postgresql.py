"""Examines ``postgresql:`` URLs."""

from __future__ import annotations

from typing import Any, cast

from lockkit.backends.sql.examine import common
from lockkit.backends.sql.examine.common import SqlServer
from lockkit.backends.sql.options import VERIFIED, postgresql_sslmode
from lockkit.backends.sql.postgresql import PsycopgConnection
from lockkit.backends.sql.schema import quoted
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity

_PAGE = "how-to/check-your-servers.md#postgresql"

STANDBY = Check(
    "postgresql-standby", Severity.ERROR, "The server is a read-only standby: no lock can be taken there.", _PAGE
)
FSYNC_OFF = Check(
    "postgresql-fsync-off",
    Severity.ERROR,
    "A crash of the machine loses locks that are held, or the whole database.",
    _PAGE,
)
SYNCHRONOUS_COMMIT_OFF = Check(
    "postgresql-synchronous-commit-off",
    Severity.WARNING,
    "A crash of the server undoes the locks of the last moments, though they were granted. lockkit sets it on for its "
    "own sessions, but cannot behind a pooler that lends them out.",
    _PAGE,
)
POOLED = Check(
    "postgresql-pooled",
    Severity.INFO,
    "Waiters are not woken: they look again after pauses.",
    _PAGE,
)
POOLED_SESSION = Check(
    "postgresql-pooled-session",
    Severity.WARNING,
    "A lock of the modes row and advisory keeps one of the pooler's few connections for as long as it is held or "
    "waited for: when all are kept, everybody waits, also who wants to renew.",
    _PAGE,
)
ASYNCHRONOUS_STANDBY = Check(
    "postgresql-asynchronous-standby",
    Severity.WARNING,
    "A promoted standby may not know the newest locks, and give them to somebody else.",
    _PAGE,
)

_LOOK = """
SELECT current_setting('server_version'), pg_is_in_recovery(), current_setting('transaction_read_only'),
 current_setting('fsync'), (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'),
 current_setting('synchronous_standby_names'), (SELECT count(*) FROM pg_stat_replication),
 CAST(current_setting('max_connections') AS integer),
 (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
 coalesce((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false),
 coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), current_user
"""
_NAMES = (
    *("version", "standby", "read_only", "fsync", "synchronous_commit", "synchronous_names", "standbys_count"),
    *("connections_max", "connections_count", "encrypted", "may_create", "user"),
)
_RIGHTS = "SELECT " + ", ".join(
    f"has_table_privilege(CAST($1 AS text), '{right}')" for right in ("SELECT", "INSERT", "UPDATE", "DELETE")
)


async def examine(examination: Examination) -> None:
    """Look at the server and the tables."""
    server = await common.open_server(examination)
    try:
        ((*values,),) = await server.ask(_LOOK)
        facts = dict(zip(_NAMES, values, strict=True))
        examination.note("version", f"PostgreSQL {facts['version']}")
        _examine_access(examination, server, facts)
        _examine_durability(examination, server, facts)
        _examine_pooling(examination, server)
        _examine_standbys(examination, facts)
        common.examine_connections(
            examination,
            facts["connections_count"],
            facts["connections_max"],
            f"ALTER SYSTEM SET max_connections = {2 * facts['connections_max']}, then restart it; "
            "pg_stat_activity shows who has them",
        )
        await _examine_tables(examination, server, facts)
        await server.time(examination)
    finally:
        await server.close()


def _examine_access(examination: Examination, server: SqlServer, facts: dict[str, Any]) -> None:
    host = examination.url.host
    local = host is None or is_loopback(host)
    fix = f"ALTER SYSTEM SET ssl = on, and ?sslmode={VERIFIED} in the URL"
    # Other drivers do not tell: the URL does. By its name: where psycopg is missing, its class cannot be imported.
    tells = server.database.engine.dialect.driver == "psycopg"
    pgconn = cast("PsycopgConnection", server.connection).pgconn if tells else None
    if pgconn is not None:  # also from the environment (PGSSLMODE)
        verified = any((one.keyword, one.val) == (b"sslmode", VERIFIED.encode()) for one in pgconn.info)
    else:
        verified = postgresql_sslmode(examination.options) == VERIFIED
    common.examine_network(examination, encrypted=facts["encrypted"], verified=verified, loopback=local, fix=fix)
    asked = pgconn is None or pgconn.used_password
    # A certificate, Kerberos or the socket's owner would do as well, but none of them looks so from here.
    if host is not None and not asked and not facts["encrypted"]:
        examination.find(
            common.NO_PASSWORD,
            examination.url.safe_text,
            f"The server asks the user {facts['user']} for no password.",
            "Write scram-sha-256 instead of trust in pg_hba.conf (of a pooler: auth_type), then: SELECT "
            "pg_reload_conf()",
        )


def _examine_durability(examination: Examination, server: SqlServer, facts: dict[str, Any]) -> None:
    where = examination.url.safe_text
    if facts["fsync"] == "off":
        fix = "ALTER SYSTEM SET fsync = on, and full_page_writes = on; then: SELECT pg_reload_conf()"
        examination.find(FSYNC_OFF, where, "fsync is off.", fix)
    if facts["synchronous_commit"] == "off" and server.database.pooled and not _by_session(examination):
        fix = f'ALTER ROLE "{facts["user"]}" SET synchronous_commit = on'
        examination.find(SYNCHRONOUS_COMMIT_OFF, where, "synchronous_commit is off.", fix)


def _examine_pooling(examination: Examination, server: SqlServer) -> None:
    if not server.database.pooled:
        return
    where = examination.url.safe_text
    # Also with pool_mode = session: from here the two look the same, and lockkit treats them alike.
    seen = "A pooler such as pgbouncer stands between, which may lend a session to others after each transaction."
    if _by_session(examination):
        fix = "Connect to the server itself, or use mode=table; or raise default_pool_size in pgbouncer.ini"
        examination.find(POOLED_SESSION, where, seen, fix)
    else:
        fix = "Nothing, if pauses will do; or connect to the server itself"
        examination.find(POOLED, where, seen, fix)


def _by_session(examination: Examination) -> bool:
    """Tell whether an open transaction is the lock: a crash of the server then ends both."""
    return examination.options.get("mode") in {"row", "advisory"}


def _examine_standbys(examination: Examination, facts: dict[str, Any]) -> None:
    where = examination.url.safe_text
    if facts["standby"]:
        fix = "Give the primary's address; or several hosts, of which the primary is found: postgresql://h1,h2/db"
        examination.find(STANDBY, where, "The server is in recovery (a standby).", fix)
    elif facts["read_only"] == "on":
        fix = f'ALTER ROLE "{facts["user"]}" SET default_transaction_read_only = off'
        examination.find(common.READ_ONLY, where, "Transactions are read-only (default_transaction_read_only).", fix)
    if facts["standbys_count"] and not facts["synchronous_names"]:
        seen = f"Standbys that follow the server: {facts['standbys_count']}; none of them has to confirm a commit."
        fix = "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'; then: SELECT pg_reload_conf()"
        examination.find(ASYNCHRONOUS_STANDBY, where, seen, fix)


async def _examine_tables(examination: Examination, server: SqlServer, facts: dict[str, Any]) -> None:
    if facts["standby"]:
        return  # what is missing there is made on the primary
    for table in await common.examine_tables(examination, server, creatable=facts["may_create"]):
        name = quoted(table, server.database.engine.dialect)
        (allowed,) = await server.ask(_RIGHTS, name)
        rights = ("SELECT", "INSERT", "UPDATE", "DELETE")
        missing = [right for right, has in zip(rights, allowed, strict=True) if not has]
        grant = f'GRANT {{rights}} ON {{table}} TO "{facts["user"]}"'
        common.find_rights(examination, server, table, missing, grant)
