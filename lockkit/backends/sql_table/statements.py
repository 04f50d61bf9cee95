"""
The statements of the lock table.

Each decides by itself, in a transaction of its own, by the database's clock (``{now}``, see
`lockkit.backends.sql.dialect`). A lock is held while ``owner`` is set and ``expires_at_us`` is in the future.

==============  ==========================================  ===========================================================
statement       parameters                                  returns
==============  ==========================================  ===========================================================
``acquire``     name, owner, ttl in µs, metadata            by database, see there
``…_of_writer`` the same                                    the same, for a writer that has marked readers' lock
``look``        name                                        of a held lock: owner, µs left, token, metadata, its owner
``release``     name, owner (and the channel)               one row, or one row changed, if that owner held it
``free``        names, owners (and the channel)             releases many, returns the same
``break_lock``  name (and the channel)                      the same, if it was held
``renew``       ttl in µs, names, owners                    the owners that held theirs; MariaDB and MySQL: how many
``update``      metadata, name, owner                       one row changed, if that owner holds it and it differs
``read_note``   name                                        of a note whose life is not over: the text, µs left
``write_note``  text, life in µs, name, owner               one row, if that owner held the lock
``clock``       none                                        the clock in µs
``state``       names                                       name, owner, expired, last broken owner
``names``       first name (and one behind the last)        names of locks that are held
``idle``        least age in µs                             names of rows that were not used for so long
``reap``        least age in µs, names                      removes those rows unless they were used meanwhile
==============  ==========================================  ===========================================================

The next token is the larger of the last one plus 1 and the clock; so a row may be removed once the clock has passed its
token, and a table that was lost starts above all tokens that it ever granted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from lockkit.backends.sql.statement import Statement

__all__ = [
    "MysqlStatements",
    "PostgresqlStatements",
    "SqliteStatements",
    "StatementMaker",
    "Statements",
    "places",
]


class StatementMaker:
    """Writes the statements on one table."""

    def __init__(self, table: str, now_us: str) -> None:
        """
        Keep what stands for ``{table}`` and ``{now}``.

        Args:
            table: As it stands in SQL.
            now_us: The database's clock.
        """
        self._table = table
        self._now = now_us
        self._made: dict[tuple[str, int], Statement] = {}

    def _written(self, text: str, *, once: bool = False, frequent: bool = False) -> Statement:
        return Statement(text.replace("{table}", self._table).replace("{now}", self._now), once=once, frequent=frequent)

    def _for_many(self, what: str, count: int, text: str) -> Statement:
        """Write a statement whose length depends on how many it is for; those for few are kept."""
        made = self._made.get((what, count))
        if made is None:
            keep = count <= KEPT_MAX
            made = self._written(text, once=not keep)
            if keep:
                self._made[what, count] = made
        return made


class Statements(StatementMaker, ABC):
    """The statements on one table."""

    acquire: Statement
    acquire_of_writer: Statement
    release: Statement
    break_lock: Statement

    def __init__(self, table: str, now_us: str) -> None:
        """See `StatementMaker`."""
        super().__init__(table, now_us)
        self.look = self._written(
            "SELECT owner, expires_at_us - {now}, token, metadata, metadata_owner FROM {table}"
            " WHERE name = $1 AND owner IS NOT NULL AND expires_at_us > {now}"
        )
        self.update = self._written(
            "UPDATE {table} SET metadata = $1 WHERE name = $2 AND owner = $3 AND expires_at_us > {now}"
        )
        self.clock = self._written("SELECT {now}")
        self.read_note = self._written(
            "SELECT note, note_until_us - {now} FROM {table} WHERE name = $1 AND note_until_us > {now}"
        )
        self.write_note = self._written(self._write_note_text())
        self._write()

    def _write_note_text(self) -> str:
        return (
            "UPDATE {table} SET note = $1, note_until_us = {now} + $2"
            " WHERE name = $3 AND owner = $4 AND expires_at_us > {now}"
        )

    @abstractmethod
    def _write(self) -> None:
        """Write what differs."""

    def renew(self, count: int) -> Statement:
        """Renew so many leases at once; one parameter for each name, then one for each owner."""
        return self._for_many("renew", count, self._renew_text(count))

    def _renew_text(self, count: int) -> str:
        return (
            "UPDATE {table} SET expires_at_us = {now} + $1"
            f" WHERE name IN ({places(2, count)}) AND owner IN ({places(2 + count, count)})"
            " AND expires_at_us > {now}"
        )

    def free(self, count: int) -> Statement:
        """Release so many leases at once; one parameter for each name, then one for each owner."""
        return self._for_many("free", count, self._free_text(count))

    def _free_text(self, count: int) -> str:
        return (
            "UPDATE {table} SET owner = NULL, expires_at_us = 0"
            f" WHERE name IN ({places(1, count)}) AND owner IN ({places(1 + count, count)})"
        )

    def state(self, count: int) -> Statement:
        """See the module."""
        return self._for_many(
            "state",
            count,
            "SELECT name, owner, expires_at_us <= {now}, broken_owner FROM {table}"
            f" WHERE name IN ({places(1, count)})",
        )

    def reap(self, count: int) -> Statement:
        """See the module."""
        return self._for_many("reap", count, f"DELETE FROM {{table}} WHERE {_IDLE} AND name IN ({places(2, count)})")

    def idle(self, count: int) -> Statement:
        """See the module; at most so many."""
        return self._for_many("idle", count, f"SELECT name FROM {{table}} WHERE {_IDLE} LIMIT {count}")

    def names(self, count: int, *, bounded: bool) -> Statement:
        """See the module; at most so many, in the order of their bytes."""
        below = " AND name < $2" if bounded else ""
        return self._for_many(
            f"names{below}",
            count,
            "SELECT name FROM {table} WHERE owner IS NOT NULL AND expires_at_us > {now}"
            f" AND name >= $1{below} ORDER BY name LIMIT {count}",
        )


KEPT_MAX = 8
"""Statements for so many names are kept, and so prepared. More takes memory here and at the server."""


_IDLE = "token < {now} - $1 AND expires_at_us < {now} - $1 AND note_until_us < {now}"


def places(first: int, count: int) -> str:
    """Write so many parameters, from a number on."""
    return ", ".join(f"${number}" for number in range(first, first + count))


class PostgresqlStatements(Statements):
    """
    PostgreSQL.

    ``acquire`` returns one row: the token, or NULL and of the holder: owner, µs left, whether it is a foreign client.
    No row: another client took the lock between the SELECT and the INSERT of this statement; retry.

    It selects first, so that a try on a lock that is held writes nothing. ``ON CONFLICT`` waits for a concurrent
    transaction on the same row and then decides by the newest version of it. (PostgreSQL: "INSERT", and "13.2.1. Read
    Committed Isolation Level".)

    ``acquire_or_wait`` also marks the held row as wanted, so that its release notifies. The last column says whether
    the row is marked; if it is not, the lock changed hands meanwhile: retry.

    Races: a release that commits before the mark does not wait for it, and the mark finds a row without owner: not
    marked. A release after it waits for the marking transaction and sees the mark. A waiter that finds the mark there
    already was listening when it looked, and only a new grant removes the mark, after a release that notified.
    """

    acquire_or_wait: Statement
    acquire_of_writer_or_wait: Statement

    def _write(self) -> None:
        self.acquire, self.acquire_or_wait = self._acquiring("wanted = false")
        # Readers whom its mark has stopped still wait: its release notifies them.
        ends = "writer_until_us = CASE WHEN l.writer = excluded.owner THEN 0 ELSE l.writer_until_us END"
        self.acquire_of_writer, self.acquire_of_writer_or_wait = self._acquiring(ends)
        notify = " SELECT CASE WHEN wanted THEN pg_notify($2, $1) END FROM freed"
        self.release = self._written(
            "WITH freed AS (UPDATE {table} SET owner = NULL, expires_at_us = 0 WHERE name = $1 AND owner = $3"
            f" RETURNING wanted){notify}"
        )
        self.break_lock = self._written(
            "WITH freed AS (UPDATE {table} SET broken_owner = owner, owner = NULL, expires_at_us = 0"
            f" WHERE name = $1 AND owner IS NOT NULL AND expires_at_us > {{now}} RETURNING wanted){notify}"
        )

    def _acquiring(self, also: str) -> tuple[Statement, Statement]:
        """Write ``acquire`` and ``acquire_or_wait``, and what else a grant sets."""
        held = (
            "held AS (SELECT owner, expires_at_us - {now} AS left_us, wanted,"
            " owner IS DISTINCT FROM metadata_owner AS alien"
            " FROM {table} WHERE name = $1 AND owner <> $2 AND expires_at_us > {now})"
        )
        granted = (
            "granted AS (INSERT INTO {table} AS l (name, owner, token, expires_at_us, metadata, metadata_owner)"
            " SELECT $1, $2, {now}, {now} + CAST($3 AS bigint), $4, $2 WHERE NOT EXISTS (SELECT FROM held)"
            " ON CONFLICT (name) DO UPDATE SET owner = excluded.owner,"
            " token = greatest(l.token + 1, excluded.token), expires_at_us = excluded.expires_at_us,"
            f" metadata = excluded.metadata, metadata_owner = excluded.owner, {also}"
            " WHERE l.owner IS NULL OR l.owner = excluded.owner OR l.expires_at_us <= excluded.token"
            " RETURNING token)"
        )
        marked = (
            "marked AS (UPDATE {table} SET wanted = true WHERE name = $1 AND owner IS NOT NULL AND NOT wanted"
            " AND EXISTS (SELECT FROM held WHERE NOT wanted) RETURNING 1)"
        )
        acquire = self._written(
            f"WITH {held}, {granted} SELECT token, NULL, NULL, false, false FROM granted"
            " UNION ALL SELECT NULL, owner, left_us, alien, true FROM held"
        )
        acquire_or_wait = self._written(
            f"WITH {held}, {granted}, {marked} SELECT token, NULL, NULL, false, false FROM granted"
            " UNION ALL SELECT NULL, owner, left_us, alien, wanted OR EXISTS (SELECT FROM marked) FROM held"
        )
        return acquire, acquire_or_wait

    def _write_note_text(self) -> str:
        return (
            "UPDATE {table} SET note = $1, note_until_us = {now} + CAST($2 AS bigint)"
            " WHERE name = $3 AND owner = $4 AND expires_at_us > {now} RETURNING 1"
        )

    def _renew_text(self, count: int) -> str:
        del count
        return (
            "UPDATE {table} SET expires_at_us = {now} + CAST($1 AS bigint)"
            " WHERE name = ANY (CAST($2 AS text[])) AND owner = ANY (CAST($3 AS text[])) AND expires_at_us > {now}"
            " RETURNING owner"
        )

    def _free_text(self, count: int) -> str:
        del count
        return (
            "WITH freed AS (UPDATE {table} SET owner = NULL, expires_at_us = 0"
            " WHERE name = ANY (CAST($1 AS text[])) AND owner = ANY (CAST($2 AS text[])) RETURNING name, wanted)"
            " SELECT CASE WHEN wanted THEN pg_notify($3, name) END FROM freed"
        )


class _PollingStatements(Statements):
    """A database that cannot notify waiters: a release only writes the row."""

    def _write(self) -> None:
        self.release = self._written(
            "UPDATE {table} SET owner = NULL, expires_at_us = 0 WHERE name = $1 AND owner = $2"
        )
        self.break_lock = self._written(
            "UPDATE {table} SET broken_owner = owner, owner = NULL, expires_at_us = 0"
            " WHERE name = $1 AND owner IS NOT NULL AND expires_at_us > {now}"
        )


class MysqlStatements(_PollingStatements):
    """
    MariaDB and MySQL.

    ``acquire`` returns no rows (MySQL has no RETURNING, and a result set would take longer than the statement): the
    token is the value of ``LAST_INSERT_ID(…)``, which travels with the number of changed rows; 0 is busy. The last
    evaluation counts: that of ON DUPLICATE KEY comes after that of VALUES. ("Information Functions", LAST_INSERT_ID.)

    Assignments run from left to right and see the new values ("INSERT … ON DUPLICATE KEY UPDATE"; lockkit's sessions
    are without MariaDB's SIMULTANEOUS_ASSIGNMENT): the token is decided first, and once the owner is, the others only
    compare that.

    ``VALUES(column)`` is what would have been inserted; of the token that is the clock. In the list of VALUES a column
    that stands further left is its new value, too ("INSERT").
    UTC_TIMESTAMP is the time at which the statement began. It may have waited for the row since: then it takes an
    expired lock for held, and what it grants ends earlier; both are harmless.
    """

    def _write(self) -> None:
        super()._write()
        ours = "owner IS NULL OR owner = VALUES(owner) OR expires_at_us <= VALUES(token)"
        acquire = (
            "INSERT INTO {table} (name, owner, token, expires_at_us, metadata, metadata_owner)"
            " VALUES ($1, $2, LAST_INSERT_ID({now}), token + $3, $4, owner) ON DUPLICATE KEY UPDATE"
            f" token = IF({ours}, LAST_INSERT_ID(GREATEST(token + 1, VALUES(token))), token + LAST_INSERT_ID(0)),"
            f" owner = IF({ours}, VALUES(owner), owner),"
            " expires_at_us = IF(owner = VALUES(owner), VALUES(expires_at_us), expires_at_us),"
            " metadata = IF(owner = VALUES(owner), VALUES(metadata), metadata),"
            " metadata_owner = IF(owner = VALUES(owner), owner, metadata_owner)"
        )
        self.acquire = self._written(acquire, frequent=True)
        self.acquire_of_writer = self._written(
            f"{acquire}, writer_until_us = IF(owner = VALUES(owner) AND writer = owner, 0, writer_until_us)"
        )


class SqliteStatements(_PollingStatements):
    """
    SQLite.

    ``acquire`` returns the token, or no row if the lock is busy. One writer at a time: others wait in the driver.
    """

    def _write(self) -> None:
        super()._write()
        ends = ", writer_until_us = CASE WHEN l.writer = excluded.owner THEN 0 ELSE l.writer_until_us END"
        self.acquire, self.acquire_of_writer = (self._written(self._acquire_text(also)) for also in ("", ends))

    @staticmethod
    def _acquire_text(also: str) -> str:
        return (
            "INSERT INTO {table} AS l (name, owner, token, expires_at_us, metadata, metadata_owner)"
            " VALUES ($1, $2, {now}, {now} + $3, $4, $2) ON CONFLICT (name) DO UPDATE SET owner = excluded.owner,"
            " token = max(l.token + 1, excluded.token), expires_at_us = excluded.expires_at_us,"
            f" metadata = excluded.metadata, metadata_owner = excluded.owner{also}"
            " WHERE l.owner IS NULL OR l.owner = excluded.owner OR l.expires_at_us <= excluded.token RETURNING token"
        )

    def _renew_text(self, count: int) -> str:
        return f"{super()._renew_text(count)} RETURNING owner"
