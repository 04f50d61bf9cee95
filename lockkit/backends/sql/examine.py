"""Examines ``postgresql:``, ``mariadb:``, ``mysql:`` and ``sqlite:`` URLs for the doctor. Makes nothing."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from lockkit.backends.sql.backend import SqlBackend
from lockkit.backends.sql.connection import Connection, Parameter, Statement
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.options import VERIFIED
from lockkit.backends.sql.schema import Table, columns_of
from lockkit.doctor import timing
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import LockError
from lockkit.file_systems import NETWORK_FILE_SYSTEMS, find_flaw_on_the_way, kind_of_file_system

T = TypeVar("T")

FULL = 0.9
"""Part of a limit from which on it is nearly reached. Higher tells later, lower cries wolf."""

_ERROR, _WARNING, _INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
_sql, _postgresql, _mysql, _sqlite = (
    partial(Check, page=f"how-to/check-your-servers.md#{heading}")
    for heading in ("sql-databases", "postgresql", "mariadb-and-mysql", "sqlite")
)

TABLE_MISSING = _sql("sql-table-missing", _ERROR, "No lock can be taken.")
TABLE_TO_BE_MADE = _sql("sql-table-to-be-made", _INFO, "None: the first lock makes the table.")
COLUMNS_MISSING = _sql(
    "sql-columns-missing", _ERROR, "No lock can be taken: the table is of another version of lockkit."
)
FURTHER_COLUMNS_MISSING = _sql(
    "sql-further-columns-missing",
    _WARNING,
    "Read locks, semaphores and notes (client.once) cannot be used: the table is of another version of lockkit. Locks"
    " work.",
)
RIGHTS = _sql("sql-rights", _ERROR, "Locks cannot be taken, renewed or released.")
READ_ONLY = _sql("sql-read-only", _ERROR, "The server takes no writes, so no lock can be taken, renewed or released.")
TLS_UNVERIFIED = _sql(
    "sql-tls-unverified",
    _WARNING,
    "An attacker between client and server can pretend to be the server: read the login, grant and free locks.",
)
NO_TLS = _sql("sql-no-tls", _WARNING, "Anyone on the network path can read the password, and break any lock with it.")
NO_PASSWORD = _sql("sql-no-password", _WARNING, "Anyone who reaches the server can break any lock.")
CONNECTIONS = _sql(
    "sql-connections",
    _WARNING,
    "When no connection is left, clients cannot connect: a holder that reconnects cannot renew. In the modes row and "
    "advisory every lock that is held or waited for takes one.",
)
STANDBY = _postgresql("postgresql-standby", _ERROR, "The server is a read-only standby: no lock can be taken there.")
FSYNC_OFF = _postgresql(
    "postgresql-fsync-off", _ERROR, "A crash of the machine loses locks that are held, or the whole database."
)
SYNCHRONOUS_COMMIT_OFF = _postgresql(
    "postgresql-synchronous-commit-off",
    _WARNING,
    "A crash of the server undoes the locks of the last moments, though they were granted. lockkit sets it on for its"
    " own sessions, but cannot behind a pooler that lends them out.",
)
POOLED = _postgresql("postgresql-pooled", _INFO, "Waiters are not woken: they look again after pauses.")
POOLED_SESSION = _postgresql(
    "postgresql-pooled-session",
    _WARNING,
    "A lock of the modes row and advisory keeps one of the pooler's few connections for as long as it is held or "
    "waited for: when all are kept, everybody waits, also who wants to renew.",
)
ASYNCHRONOUS_STANDBY = _postgresql(
    "postgresql-asynchronous-standby",
    _WARNING,
    "A promoted standby may not know the newest locks, and give them to somebody else.",
)
NOT_FLUSHED = _mysql(
    "mysql-not-flushed",
    _WARNING,
    "A crash of the machine (at 0, of the server too) undoes the locks of the last second, though they were granted.",
)
GALERA = _mysql(
    "mysql-galera",
    _ERROR,
    "Each node would grant locks that another has granted, so lockkit refuses mode=row and mode=advisory.",
)
NOT_INNODB = _mysql(
    "mysql-not-innodb",
    _ERROR,
    "Its rows cannot be locked, and a failed statement is not undone: two clients can hold one lock.",
)
MISSING = _sqlite("sqlite-missing", _INFO, "None: the first lock makes the file.")
UNUSABLE = _sqlite("sqlite-unusable", _ERROR, "No lock can be taken.")
NETWORK = _sqlite(
    "sqlite-network",
    _ERROR,
    "SQLite relies on locks of the file system that network ones do not keep: locks are held twice, or the file is "
    "damaged.",
)
WRITABLE_BY_OTHERS = _sqlite(
    "sqlite-writable-by-others", _ERROR, "Other users could break any lock, or replace the file: lockkit refuses it."
)


async def examine(examination: Examination) -> None:
    """Look at the server or the file, and at the tables."""
    opened = examination.backend_class.open(examination.url, examination.options, examination.host)
    backend = cast("SqlBackend", opened)
    database = backend.database
    if database.dialect.name == "sqlite" and not _examine_file(examination, Path(database.label)):
        await database.close()
        return  # to connect would make the file
    judge = {"postgresql": _Postgresql, "mysql": _Mysql, "sqlite": _Sqlite}[database.dialect.name]
    server = judge(examination, database, backend.tables, await database.connect())
    try:
        await server.judge()
        where = examination.url.safe_text
        await examination.time(where, lambda: server.ask("SELECT 1"))
        timing.judge_clock(examination, where, *await timing.clock_offset(examination.runtime, server.clock))
    finally:
        await server.connection.close()
        await database.close()


class _Server(NamedTuple):
    """A database and one connection to it, made as lockkit makes them."""

    examination: Examination
    database: Database
    tables: Sequence[Table]
    connection: Connection

    def find(self, check: Check, seen: str, fix: str, *, if_: bool = True) -> None:
        """Report a finding, if it is one."""
        if if_:
            self.examination.find(check, self.examination.url.safe_text, seen, fix)

    @property
    def by_session(self) -> bool:
        """Whether an open session is the lock: a crash of the server then ends both."""
        return self.examination.options.get("mode") in {"row", "advisory"}

    async def judge(self) -> None:
        """Look at all that this kind of database has."""
        raise NotImplementedError

    async def ask(self, text: str, *parameters: Parameter) -> list[tuple[Any, ...]]:
        """Run a query."""
        try:
            return list((await self.connection.run(Statement(text), parameters)).rows)
        except self.database.driver_errors as error:
            raise self.database.translate(error) from error

    async def unless_denied(self, asking: Awaitable[T]) -> T | None:
        """Return the answer to a question; None if this user has no right to ask it."""
        try:
            return await asking
        except LockError as error:
            if error.__cause__ is None or self.database.kind(error.__cause__) != "denied":
                raise
            return None

    async def clock(self) -> float:
        ((micros,),) = await self.ask(f"SELECT {self.database.dialect.now_us}")
        return int(micros) / 1e6

    def name(self, table: Table) -> str:
        return table.quoted(self.database.dialect.name)

    async def judge_tables(self, *, creatable: bool) -> list[Table]:
        """Look whether the tables are there as they should be; return those that are there."""
        command, present = _migrate(self.examination), []
        for table in self.tables:
            columns = await self.unless_denied(columns_of(self.database, table))
            if columns is None:
                there = f"There is no table {table.fullname}, and"
                auto = bool(self.examination.options.get("auto_create", True))
                if creatable and auto:
                    self.find(TABLE_TO_BE_MADE, f"{there} this user may make it.", f"Nothing to do; or: {command}")
                else:
                    why = "auto_create is off" if creatable else "this user may not make it"
                    self.find(TABLE_MISSING, f"{there} {why}.", f"As a user who may make tables: {command}")
                continue
            present.append(table)
            for check, beyond in ((COLUMNS_MISSING, False), (FURTHER_COLUMNS_MISSING, True)):
                missing = [one.name for one in table.columns if one.name not in columns and one.beyond_locks is beyond]
                self.find(check, f"The table {table.fullname} has no {', '.join(missing)}.", command, if_=bool(missing))
        return present

    def judge_rights(self, table: Table, missing: Sequence[str], user: str) -> None:
        seen = f"This user has no right to {', '.join(missing)} on {table.fullname}."
        grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {self.name(table)} TO {user}"
        self.find(RIGHTS, seen, grant, if_=bool(missing))

    def judge_network(self, *, encrypted: bool, verified: bool, fix: str) -> None:
        """Judge how the connection was made."""
        host = self.examination.url.host
        if host is None or is_loopback(host):
            return
        seen = "The connection crosses a network"
        self.find(NO_TLS, f"{seen} and is not encrypted.", fix, if_=not encrypted)
        seen = f"{seen}, and nothing checks that the server is the host of the URL."
        self.find(TLS_UNVERIFIED, seen, fix, if_=encrypted and not verified)

    def judge_connections(self, used: int, most: int, fix: str) -> None:
        self.find(CONNECTIONS, f"{used} of {most} connections are in use.", fix, if_=used > FULL * most)


def _migrate(examination: Examination) -> str:
    """Return the command that makes the tables, for a shell. It shows no password."""
    return f"lockkit migrate {shlex.quote(examination.url.safe_text)}"


# -- PostgreSQL ----------------------------------------------------------------------------------------------------

_POSTGRESQL_FACTS = {
    "version": "current_setting('server_version')",
    "standby": "pg_is_in_recovery()",
    "read_only": "current_setting('transaction_read_only')",
    "fsync": "current_setting('fsync')",
    "synchronous_commit": "(SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit')",
    "synchronous_names": "current_setting('synchronous_standby_names')",
    "standbys": "(SELECT count(*) FROM pg_stat_replication)",
    "connections_max": "CAST(current_setting('max_connections') AS integer)",
    "connections": "(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')",
    "encrypted": "coalesce((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false)",
    "may_create": "coalesce(has_schema_privilege(CAST(to_regnamespace(coalesce(CAST($1 AS text),"
    " quote_ident(current_schema()))) AS oid), 'CREATE'), false)",
    "user": "current_user",
}
_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")
_POSTGRESQL_RIGHTS = "SELECT " + ", ".join(f"has_table_privilege(CAST($1 AS text), '{right}')" for right in _RIGHTS)


class _Postgresql(_Server):
    async def judge(self) -> None:
        schema = self.tables[0].schema
        facts_of = f"SELECT {', '.join(_POSTGRESQL_FACTS.values())}"
        (found,) = await self.ask(facts_of, f'"{schema}"' if schema else None)
        facts = dict(zip(_POSTGRESQL_FACTS, found, strict=True))
        self.examination.note("version", f"PostgreSQL {facts['version']}")
        self._judge_access(facts)
        self._judge_state(facts)
        most = facts["connections_max"]
        fix = f"ALTER SYSTEM SET max_connections = {2 * most}, then restart it; pg_stat_activity shows who has them"
        self.judge_connections(facts["connections"], most, fix)
        if facts["standby"]:
            return  # what is missing there is made on the primary
        for table in await self.judge_tables(creatable=facts["may_create"]):
            (allowed,) = await self.ask(_POSTGRESQL_RIGHTS, self.name(table))
            missing = [right for right, has in zip(_RIGHTS, allowed, strict=True) if not has]
            self.judge_rights(table, missing, f'"{facts["user"]}"')

    def _judge_access(self, facts: Mapping[str, Any]) -> None:
        pgconn = cast("Any", self.connection).pgconn
        # Also from the environment (PGSSLMODE).
        verified = any((one.keyword, one.val) == (b"sslmode", VERIFIED.encode()) for one in pgconn.info)
        fix = f"ALTER SYSTEM SET ssl = on, and ?sslmode={VERIFIED} in the URL"
        self.judge_network(encrypted=facts["encrypted"], verified=verified, fix=fix)
        # A certificate, Kerberos or the socket's owner would do as well, but none of them looks so from here.
        open_ = self.examination.url.host is not None and not pgconn.used_password and not facts["encrypted"]
        fix = "Write scram-sha-256 instead of trust in pg_hba.conf (of a pooler: auth_type), then: SELECT"
        seen = f"The server asks the user {facts['user']} for no password."
        self.find(NO_PASSWORD, seen, f"{fix} pg_reload_conf()", if_=open_)

    def _judge_state(self, facts: Mapping[str, Any]) -> None:
        reload, pooled, by_session = "; then: SELECT pg_reload_conf()", self.database.pooled, self.by_session
        read_only = not facts["standby"] and facts["read_only"] == "on"
        asynchronous = bool(facts["standbys"]) and not facts["synchronous_names"]
        # Also with pool_mode = session: from here the two look the same, and lockkit treats them alike.
        between = (
            "A pooler such as pgbouncer stands between, which may lend a session to others after each transaction."
        )
        fix = f"ALTER SYSTEM SET fsync = on, and full_page_writes = on{reload}"
        self.find(FSYNC_OFF, "fsync is off.", fix, if_=facts["fsync"] == "off")
        if pooled and not by_session:
            fix = f'ALTER ROLE "{facts["user"]}" SET synchronous_commit = on'
            wrong = facts["synchronous_commit"] == "off"
            self.find(SYNCHRONOUS_COMMIT_OFF, "synchronous_commit is off.", fix, if_=wrong)
            self.find(POOLED, between, "Nothing, if pauses will do; or connect to the server itself")
        elif pooled:
            fix = "Connect to the server itself, or use mode=table; or raise default_pool_size in pgbouncer.ini"
            self.find(POOLED_SESSION, between, fix)
        fix = "Give the primary's address; or several hosts, of which the primary is found: postgresql://h1,h2/db"
        self.find(STANDBY, "The server is in recovery (a standby).", fix, if_=facts["standby"])
        fix = f'ALTER ROLE "{facts["user"]}" SET default_transaction_read_only = off'
        self.find(READ_ONLY, "Transactions are read-only (default_transaction_read_only).", fix, if_=read_only)
        seen = f"Standbys that follow the server: {facts['standbys']}; none of them has to confirm a commit."
        fix = f"ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'{reload}"
        self.find(ASYNCHRONOUS_STANDBY, seen, fix, if_=asynchronous)


# -- MariaDB and MySQL ---------------------------------------------------------------------------------------------

_MYSQL_LOOK = """
SELECT VERSION(), @@global.read_only, @@global.innodb_flush_log_at_trx_commit, @@global.max_connections,
 CURRENT_USER(), DATABASE()
"""
_STORAGE_ENGINE = (
    "SELECT engine FROM information_schema.tables WHERE table_schema = COALESCE($1, DATABASE()) AND table_name = $2"
)
_GRANT = re.compile(r"GRANT (.+?) ON (\S+) TO ", re.DOTALL)
_MYSQL_RIGHTS = {
    "SELECT": "EXPLAIN SELECT * FROM {table} WHERE name = ''",
    "INSERT": "EXPLAIN INSERT INTO {table} (name) VALUES ('')",
    "UPDATE": "EXPLAIN UPDATE {table} SET name = name WHERE name = ''",
    "DELETE": "EXPLAIN DELETE FROM {table} WHERE name = ''",
}
"""EXPLAIN needs the rights of the statement, and does not run it."""


class _Mysql(_Server):
    async def judge(self) -> None:
        ((version, read_only, flush, most, account, database),) = await self.ask(_MYSQL_LOOK)
        self.examination.note("version", version if "MariaDB" in version else f"MySQL {version}")
        name, _, host = account.partition("@")
        user = f"'{name}'@'{host}'"
        await self._judge_access(name, user)
        # MySQL: 0 or 1; MariaDB from 12 on by name.
        replica = str(read_only).upper() not in {"0", "OFF"}
        fix = "Give the primary's address; or, if it is the primary: SET GLOBAL read_only = 0"
        self.find(READ_ONLY, "read_only is on: the server is a replica, or meant to be.", fix, if_=replica)
        fix = "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and in my.cnf"
        self.find(NOT_FLUSHED, f"innodb_flush_log_at_trx_commit is {flush}.", fix, if_=int(flush) != 1)
        cluster = self.by_session and ("wsrep_on", "ON") in await self.ask("SHOW VARIABLES LIKE 'wsrep_on'")
        fix = "Use mode=table, whose rows the nodes replicate"
        self.find(GALERA, "The server is a node of a Galera cluster.", fix, if_=cluster)
        used = int((await self.ask("SHOW GLOBAL STATUS LIKE 'Threads_connected'"))[0][1])
        fix = f"SET GLOBAL max_connections = {2 * int(most)} (and in my.cnf); SHOW PROCESSLIST shows who has them"
        self.judge_connections(used, int(most), fix)
        for table in await self.judge_tables(creatable=await self._may_create(self.tables[0].schema or str(database))):
            texts = {right: text.format(table=self.name(table)) for right, text in _MYSQL_RIGHTS.items()}
            missing = [right for right, text in texts.items() if await self.unless_denied(self.ask(text)) is None]
            self.judge_rights(table, missing, user)
            await self._judge_storage_engine(table)

    async def _judge_access(self, name: str, user: str) -> None:
        cipher = (await self.ask("SHOW SESSION STATUS LIKE 'Ssl_cipher'"))[0][1]
        verified = cast("Any", self.database.driver).verified
        fix = "Set ssl_cert and ssl_key in my.cnf, and ?ssl_ca=… in the URL"
        self.judge_network(encrypted=bool(cipher), verified=verified, fix=fix)
        otherwise = {"unix_socket", "read_default_file"} & self.examination.options.keys()
        open_ = self.examination.url.password is None and not otherwise
        fix = f"ALTER USER {user} IDENTIFIED BY 'A_PASSWORD', and give it in the URL"
        self.find(NO_PASSWORD, f"The server asks the user {name} for no password.", fix, if_=open_)

    async def _judge_storage_engine(self, table: Table) -> None:
        """Look at what a dump that was loaded, or an administrator, may have made: lockkit makes tables of InnoDB."""
        name = self.name(table)
        for (engine,) in await self.ask(_STORAGE_ENGINE, table.schema or None, table.name):
            if str(engine).lower() != "innodb":
                fix = f"While no client runs: ALTER TABLE {name} ENGINE = InnoDB"
                self.examination.find(NOT_INNODB, name, f"The table's storage engine is {engine}.", fix)

    async def _may_create(self, database: str) -> bool:
        """Tell whether this user may make tables in the database. A right through a role that is not set is none."""
        for (line,) in await self.ask("SHOW GRANTS"):
            found = _GRANT.match(str(line))
            # In a GRANT the name of a database is a pattern; _ and % in it may be escaped.
            if found and found[2].replace("\\", "") in {"*.*", f"`{database}`.*"}:
                rights = {right.strip() for right in found[1].split(",")}
                if rights & {"ALL PRIVILEGES", "CREATE"}:
                    return True
        return False


# -- SQLite --------------------------------------------------------------------------------------------------------


class _Sqlite(_Server):
    async def judge(self) -> None:
        ((version,),) = await self.ask("SELECT sqlite_version()")
        ((journal,),) = await self.ask("PRAGMA journal_mode")
        self.examination.note("version", f"SQLite {version}, journal_mode {journal}")
        await self.judge_tables(creatable=True)


def _examine_file(examination: Examination, path: Path) -> bool:
    """Look at the file from outside; tell whether it can be opened."""
    folder, where = path.parent, str(path)
    if not folder.is_dir():
        fix = f"mkdir -p -m 700 {shlex.quote(str(folder))}"
        examination.find(UNUSABLE, where, f"There is no directory {folder}.", fix)
        return False
    if path.is_dir():
        examination.find(UNUSABLE, where, f"{path} is a directory.", "Name a file: sqlite:////var/lib/app/locks.db")
        return False
    kind = kind_of_file_system(folder.stat().st_dev)
    if kind in NETWORK_FILE_SYSTEMS:
        seen = f"The file lies on a network file system ({kind})."
        fix = "Name a local file, or use a backend for several machines, such as postgresql:// or redis://"
        examination.find(NETWORK, where, seen, fix)
    # The journal is made beside it.
    denied = next((one for one in (folder, path) if one.exists() and not os.access(one, os.R_OK | os.W_OK)), None)
    if denied is not None:
        name = shlex.quote(str(denied))
        fix = f"chown {os.geteuid()} {name} && chmod u+rw {name}"
        examination.find(UNUSABLE, where, f"This user may not write to {denied}.", fix)
        return False
    if not path.exists():
        seen = f"There is no file {path}, and this user may make it."
        examination.find(MISSING, where, seen, f"Nothing to do; or: {_migrate(examination)}")
        return False
    flaw = find_flaw_on_the_way(where, group=examination.options["group"])
    if flaw is not None:
        examination.find(WRITABLE_BY_OTHERS, where, f"{flaw.path} {flaw.seen}.", flaw.fix)
        return False
    return True
