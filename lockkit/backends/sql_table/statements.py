"""
The statements of the lock table.

Each decides by itself, in a transaction of its own, by the database's clock (``{now}``, see
`lockkit.backends.sql.dialect`). A lock is held while ``owner`` is set and ``expires_at_us`` is in the future.

==============  ==========================================  ===========================================================
statement       parameters                                  returns
==============  ==========================================  ===========================================================
``acquire``     name, owner, ttl in µs, metadata            by database, see there
``look``        name                                        of a held lock: owner, µs left, token, metadata, its owner
``release``     name, owner                                 one row changed, if that owner held it
``free``        names, owners                               releases many, one row changed for each
``break_lock``  name                                        one row changed, if it was held
``renew``       ttl in µs, names, owners                    one row changed for each that was held
``update``      metadata, name, owner                       one row changed, if that owner holds it and it differs
``read_note``   name                                        of a note whose life is not over: the text, µs left
``write_note``  text, life in µs, name, owner               one row changed, if that owner held the lock
``clock``       none                                        the clock in µs
``state``       names                                       as ``rows``, without the columns of readers and permits
``names``       first name, limit (, one behind the last)   names of locks that are held, in the order of their bytes
``idle``        least age in µs, limit                      names of rows that were not used for so long
``reap``        least age in µs, names                      removes those rows unless they were used meanwhile
``rows``        names                                       all that readers and permits need, and the clock
``change``      see there                                   rows changed: those that are as they were read
``want``        name, version of the row                    one row marked, so that its release notifies
``make_row``    name                                        makes a free row unless it is there
``free_alone``  name, token                                 one row changed, if the newest lease beside others was held
``mark``        name, owner, µs                             one row changed, if the lock is held and no other writer
                                                            has marked it
``unmark``      name, owner                                 removes it
==============  ==========================================  ===========================================================

The next token is the larger of the last one plus 1 and the clock; so a row may be removed once the clock has passed its
token, and a table that was lost starts above all tokens that it ever granted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from lockkit.backends.sql.connection import Parameter, Statement

SHARED = "+shared"
"""Owner of a row that readers or permits hold. No lease of lockkit has it: those are hexadecimal digits."""

_HELD = "owner IS NOT NULL AND expires_at_us > {now}"
_IDLE = "token < {now} - $1 AND expires_at_us < {now} - $1 AND note_until_us < {now}"


class Statements(ABC):
    """The statements on one table."""

    acquire: Statement

    _shares_text = "COALESCE(CAST(shares AS text), '')"
    _as_json = "{}"
    _keep_row = "ON CONFLICT (name) DO NOTHING"

    def __init__(self, table: str, now_us: str) -> None:
        """Keep what stands for ``{table}``, ``{now}`` and ``{channel}``."""
        self._words = {"{table}": table, "{now}": now_us, "{channel}": table.rpartition(".")[2].strip('"`')}
        written, for_many, among, freeing = self._written, self._for_many, self._among, self._freeing
        self.look = written(
            "SELECT owner, expires_at_us - {now}, token, metadata, metadata_owner FROM {table}"
            f" WHERE name = $1 AND {_HELD}"
        )
        self.release = written(freeing("owner = NULL", "name = $1 AND owner = $2"))
        self.break_lock = written(freeing("broken_owner = owner, owner = NULL", f"name = $1 AND {_HELD}"))
        self.update = written(
            "UPDATE {table} SET metadata = $1 WHERE name = $2 AND owner = $3 AND expires_at_us > {now}"
        )
        self.take_over = written(
            "UPDATE {table} SET owner = $1, metadata_owner = $1, expires_at_us = {now} + $2, metadata = $3,"
            " token = CASE WHEN token >= {now} THEN token + 1 ELSE {now} END"
            " WHERE name = $4 AND owner = $5 AND expires_at_us > {now}"
        )
        self.clock = written("SELECT {now}")
        self.read_note = written(
            "SELECT note, note_until_us - {now} FROM {table} WHERE name = $1 AND note_until_us > {now}"
        )
        self.write_note = written(
            "UPDATE {table} SET note = $1, note_until_us = {now} + $2"
            " WHERE name = $3 AND owner = $4 AND expires_at_us > {now}"
        )
        self.idle = written(f"SELECT name FROM {{table}} WHERE {_IDLE} LIMIT $2")
        held = f"SELECT name FROM {{table}} WHERE {_HELD} AND name >= $1"
        self.names = written(f"{held} ORDER BY name LIMIT $2")
        self.names_below = written(f"{held} AND name < $3 ORDER BY name LIMIT $2")
        self.renew = for_many(
            lambda count: (
                "UPDATE {table} SET expires_at_us = {now} + $1"
                f" WHERE {among('name', 0, count, 1)} AND {among('owner', 1, count, 1)} AND expires_at_us > {{now}}"
            )
        )
        self.free = for_many(
            lambda count: freeing("owner = NULL", f"{among('name', 0, count)} AND {among('owner', 1, count)}")
        )
        self.state = for_many(
            lambda count: (
                "SELECT name, owner, metadata, metadata_owner, broken_owner, NULL, token, expires_at_us, 0,"
                f" wanted, '', {{now}} FROM {{table}} WHERE {among('name', 0, count)}"
            )
        )
        self.reap = for_many(lambda count: f"DELETE FROM {{table}} WHERE {_IDLE} AND {among('name', 0, count, 1)}")
        self._write_shared()
        self._write_acquire()

    @abstractmethod
    def _write_acquire(self) -> None:
        """Write what takes the lock."""

    def _write_shared(self) -> None:
        """Write what readers and permits need."""
        written, for_many, among, freeing = self._written, self._for_many, self._among, self._freeing
        self.rows = for_many(
            lambda count: (
                "SELECT name, owner, metadata, metadata_owner, broken_owner, writer, token, expires_at_us,"
                f" writer_until_us, wanted, {self._shares_text}, {{now}} FROM {{table}} WHERE {among('name', 0, count)}"
            ),
        )
        self.change = for_many(self._change_text)
        self.make_row = written(f"INSERT INTO {{table}} (name) VALUES ($1) {self._keep_row}")
        self.want = written(f"UPDATE {{table}} SET wanted = true WHERE {self._unchanged(1)}")
        newest = f"name = $1 AND owner = '{SHARED}' AND token = $2 AND expires_at_us > {{now}}"
        self.free_alone = written(freeing("owner = NULL, shares = NULL", newest))
        self.mark = written(
            "UPDATE {table} SET writer = $2, writer_until_us = {now} + $3"
            f" WHERE name = $1 AND {_HELD} AND (writer = $2 OR writer_until_us <= {{now}})"
        )
        # Readers whom the mark has stopped are notified, also when the writer's grant has taken their own mark away.
        unmark = "UPDATE {table} SET writer_until_us = 0, wanted = true WHERE name = $1 AND writer = $2"
        self.unmark = written(self._notifying(unmark))

    def _unchanged(self, first: int) -> str:
        """Tell whether a row has this name and version: the parameters from `first` on, see `Row.version`."""
        columns = ("name", "token", "expires_at_us", "writer_until_us", "wanted", self._shares_text)
        return " AND ".join([f"{column} = ${first + place}" for place, column in enumerate(columns)])

    def _change_text(self, count: int) -> str:
        """Write rows that are unchanged. $1: notify; then of each row its name, version and content."""
        width = 11
        firsts = range(2, 2 + count * width, width)

        def chosen(place: int, otherwise: str) -> str:
            by_name = " ".join([f"WHEN ${first} THEN ${first + place}" for first in firsts])
            return f"CASE name {by_name}{otherwise} END"

        columns = enumerate(("owner", "token", "expires_at_us", "wanted"), 6)
        content = ", ".join([f"{column} = {chosen(place, f' ELSE {column}')}" for place, column in columns])
        shares = self._as_json.format(chosen(10, ""))
        which = " OR ".join([f"({self._unchanged(first)})" for first in firsts])
        return self._notifying(
            f"UPDATE {{table}} SET {content}, shares = {shares}, metadata = NULL, metadata_owner = '{SHARED}'"
            f" WHERE {which}",
            "wanted AND CAST($1 AS integer) = 1 AS wanted",
        )

    def _freeing(self, owners: str, which: str) -> str:
        return self._notifying(f"UPDATE {{table}} SET {owners}, expires_at_us = 0 WHERE {which}")

    def _notifying(self, change: str, wanted: str = "wanted") -> str:
        """Have those notified that wait for the locks that a change frees, where they can be, and are `wanted`."""
        del wanted
        return change

    def _written(self, text: str) -> Statement:
        for word, meaning in self._words.items():
            text = text.replace(word, meaning)
        return Statement(text)

    def _for_many(self, text_of: Callable[[int], str]) -> Callable[[int], Statement]:
        """Return what gives the statement for so many names; that for one is kept, and so prepared."""
        single = self._written(text_of(1))
        if text_of(1) == text_of(2):  # a list is one parameter
            return lambda _: single
        return lambda count: single if count == 1 else self._written(text_of(count))

    def many(self, *lists: Sequence[str]) -> list[Parameter]:
        """Return the parameters of a statement for many: lists of equal length."""
        return [value for values in lists for value in values]

    def _among(self, column: str, number: int, count: int, behind: int = 0) -> str:
        """Compare a column with the values of the list of this number (0, 1, …), behind so many other parameters."""
        first = behind + number * count + 1
        values = ", ".join(f"${place}" for place in range(first, first + count))
        return f"{column} IN ({values})"


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

    _as_json = "CAST({} AS jsonb)"

    def many(self, *lists: Sequence[str]) -> list[Parameter]:
        return [list(values) for values in lists]  # a list of any length is one parameter

    def _among(self, column: str, number: int, count: int, behind: int = 0) -> str:
        del count
        return f"{column} = ANY (CAST(${behind + number + 1} AS text[]))"

    def _notifying(self, change: str, wanted: str = "wanted") -> str:
        freed = f"WITH freed AS ({change} RETURNING name, {wanted})"
        return f"{freed} SELECT CASE WHEN wanted THEN pg_notify('{{channel}}', name) END FROM freed"

    def _write_acquire(self) -> None:
        held = (
            "held AS (SELECT owner, expires_at_us - {now} AS left_us, wanted,"
            " owner IS DISTINCT FROM metadata_owner AS alien"
            " FROM {table} WHERE name = $1 AND owner <> $2 AND expires_at_us > {now})"
        )
        granted = (
            "granted AS (INSERT INTO {table} AS l (name, owner, token, expires_at_us, metadata, metadata_owner)"
            " SELECT $1, $2, {now}, {now} + $3, $4, $2 WHERE NOT EXISTS (SELECT FROM held)"
            " ON CONFLICT (name) DO UPDATE SET owner = excluded.owner,"
            " token = greatest(l.token + 1, excluded.token), expires_at_us = excluded.expires_at_us,"
            " metadata = excluded.metadata, metadata_owner = excluded.owner, wanted = false"
            " WHERE l.owner IS NULL OR l.owner = excluded.owner OR l.expires_at_us <= excluded.token"
            " RETURNING token)"
        )
        marked = (
            "marked AS (UPDATE {table} SET wanted = true WHERE name = $1 AND owner IS NOT NULL AND NOT wanted"
            " AND EXISTS (SELECT FROM held WHERE NOT wanted) RETURNING 1)"
        )
        self.acquire = self._written(
            f"WITH {held}, {granted} SELECT token, NULL, NULL, false, false FROM granted"
            " UNION ALL SELECT NULL, owner, left_us, alien, true FROM held"
        )
        self.acquire_or_wait = self._written(
            f"WITH {held}, {granted}, {marked} SELECT token, NULL, NULL, false, false FROM granted"
            " UNION ALL SELECT NULL, owner, left_us, alien, wanted OR EXISTS (SELECT FROM marked) FROM held"
        )


class MysqlStatements(Statements):
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

    _shares_text = "COALESCE(CAST(shares AS BINARY), '')"
    _keep_row = "ON DUPLICATE KEY UPDATE name = name"

    def _write_acquire(self) -> None:
        ours = "owner IS NULL OR owner = VALUES(owner) OR expires_at_us <= VALUES(token)"
        self.acquire = self._written(
            "INSERT INTO {table} (name, owner, token, expires_at_us, metadata, metadata_owner)"
            " VALUES ($1, $2, LAST_INSERT_ID({now}), token + $3, $4, owner) ON DUPLICATE KEY UPDATE"
            f" token = IF({ours}, LAST_INSERT_ID(GREATEST(token + 1, VALUES(token))), token + LAST_INSERT_ID(0)),"
            f" owner = IF({ours}, VALUES(owner), owner),"
            " expires_at_us = IF(owner = VALUES(owner), VALUES(expires_at_us), expires_at_us),"
            " metadata = IF(owner = VALUES(owner), VALUES(metadata), metadata),"
            " metadata_owner = IF(owner = VALUES(owner), owner, metadata_owner)",
        )


class SqliteStatements(Statements):
    """
    SQLite.

    ``acquire`` returns the token, or no row if the lock is busy. One writer at a time: others wait in the driver.
    """

    def _write_acquire(self) -> None:
        self.acquire = self._written(
            "INSERT INTO {table} AS l (name, owner, token, expires_at_us, metadata, metadata_owner)"
            " VALUES ($1, $2, {now}, {now} + $3, $4, $2) ON CONFLICT (name) DO UPDATE SET owner = excluded.owner,"
            " token = max(l.token + 1, excluded.token), expires_at_us = excluded.expires_at_us,"
            " metadata = excluded.metadata, metadata_owner = excluded.owner"
            " WHERE l.owner IS NULL OR l.owner = excluded.owner OR l.expires_at_us <= excluded.token RETURNING token"
        )
