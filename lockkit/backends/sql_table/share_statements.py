"""
The statements for readers and permits: leases beside one another, on one row of the lock table.

All of them are in the row's column ``shares``, a JSON object by owner. While there is one, the row has the owner
`SHARED`, and ``expires_at_us`` is the latest end of them: so the same statement as ever refuses an exclusive lock,
also that of an older version or of a foreign client. A statement counts the permits and adds one while it has locked
the row, on the row's newest version, so two clients never count the same. (PostgreSQL: "INSERT", ON CONFLICT DO UPDATE;
InnoDB: "Locking Reads"; SQLite has one writer.)

What is in ``shares`` counts only if ``owner`` is `SHARED` and its own end ``e`` is in the future. The grant of a permit
removes those that have ended: a renewal by an older clock reading must not find them.

A writer that waits for readers, or on a read/write lock for another writer, writes itself and the end of its *mark*
into ``writer`` and ``writer_until_us``. Until then no reader gets in; the writer repeats it while it waits, and its
grant ends it.

==================  ==========================================  =======================================================
statement           parameters                                  returns
==================  ==========================================  =======================================================
``acquire``         name, owner, ttl in µs, metadata (, limit)  by database, see there
``acquire_alone``   name, owner, ttl in µs, metadata            the same, where it is cheaper; only if nobody holds any
``look``            name, owner (, limit)                       if it cannot be had: µs left, own token, own slot
``mark``            name, owner, µs                             one row changed, if the lock is held and no other writer
                                                                has marked it
``unmark``          name, owner                                 removes it
``free_alone``      name, owner                                 one row changed, if nobody else has one; where it is
                                                                cheaper
``free``            names, owners                               one row changed for each lock
``renew``           ttl in µs, names, owners                    rows changed
``state``           names                                       name, owner, expired, last broken owner, shares, clock
``downgrade``       name, owner                                 one row changed, if the owner held the lock exclusively
``update``          metadata, name, owner                       one row changed, if that owner holds it and it differs
``write_note``      text, life in µs, name, owner               one row changed, if that owner holds it
==================  ==========================================  =======================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from lockkit.backends.sql.statement import Statement
from lockkit.backends.sql_table.statements import PostgresqlStatementMaker, StatementMaker

SHARED = "+shared"
"""Owner of a row that readers or permits hold. No lease of lockkit has it: those are hexadecimal digits."""

SLOTS = 1024
"""More than a semaphore has permits. MariaDB and MySQL tell the slot with the token in one number."""

Side = Literal["shared", "permit"]

_SIDES: tuple[Side, ...] = ("shared", "permit")
_EMPTY = "'{}'"
_HELD = "l.owner = '+shared' AND l.expires_at_us > {now}"


class ShareStatements(StatementMaker, ABC):
    """The statements on one table."""

    def __init__(self, table: str, now_us: str) -> None:
        super().__init__(table, now_us)
        self.acquire = {side: self._written(self._acquire_text(side)) for side in _SIDES}
        self.acquire_alone = {
            side: self._written(self._acquire_text(side, alone=True), frequent=True) for side in self._cheaper_alone
        }
        self.look = {side: self._written(self._look_text(side)) for side in _SIDES}
        self.mark = self._written(
            "UPDATE {table} SET writer = $2, writer_until_us = {now} + $3 WHERE name = $1"
            " AND owner IS NOT NULL AND expires_at_us > {now} AND (writer = $2 OR writer_until_us <= {now})"
        )
        unmark = "UPDATE {table} SET writer_until_us = 0 WHERE name = $1 AND writer = $2"
        self.unmark = self._written(self._notifying(unmark))
        self.downgrade = self._written(self._notifying(self._downgrade_text()))
        free_alone = self._notifying(self._free_alone_text())
        self.free_alone = self._written(free_alone, frequent=True) if self._only_mine else None
        holds = f"{_HELD} AND {self._end_of('$3')} > {{now}}"
        self.update = self._written(
            f"UPDATE {{table}} AS l SET shares = {self._metadata_set} WHERE name = $2 AND {holds}"
        )
        self.write_note = self._written(
            "UPDATE {table} AS l SET note = $1, note_until_us = {now} + $2"
            f" WHERE name = $3 AND {_HELD} AND {self._end_of('$4')} > {{now}}"
        )
        self.renew = self._for_many(self._renew_text)
        self.free = self._for_many(self._free_text)
        self.state = self._for_many(self._state_text)

    _cheaper_alone: tuple[Side, ...] = ()
    _only_mine = ""
    _metadata_set: str

    # -- JSON ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _each(self, shares: str, alias: str) -> str:
        """Make rows of an object, to select from: owner o, token t, end e, slot p, metadata m."""

    @abstractmethod
    def _share(self, token: str, end: str, slot: str, metadata: str, owner: str = "$2") -> str:
        """Make the value of one."""

    @abstractmethod
    def _gathered(self, end: str = "s.e") -> str:
        """Make an object of rows s, with another end."""

    @abstractmethod
    def _put(self, shares: str, share: str) -> str:
        """Put the share of owner $2 into an object."""

    @abstractmethod
    def _end_of(self, owner: str, field: str = "e", row: str = "l.") -> str:
        """Read the end (or another number) of an owner's share; NULL if it has none."""

    # -- granting --------------------------------------------------------------------------------------------------

    @abstractmethod
    def _acquire_text(self, side: Side, *, alone: bool = False) -> str:
        """See the module."""

    def _mine(self, now: str, row: str = "l.") -> str:
        """Granted to this owner already: the answer was lost."""
        return f"(COALESCE({row}owner, '') = '+shared' AND COALESCE({self._end_of('$2', row=row)}, 0) > {now})"

    def _fits(self, side: Side, now: str, row: str = "l.", limit: str = "$5", *, alone: bool = False) -> str:
        """Tell whether the lease can be had; never NULL."""
        free, beside = f"{row}owner IS NULL OR {row}expires_at_us <= {now}", f"{row}owner = '+shared'"
        if alone:
            return f"(({free}) AND {row}writer_until_us <= {now})"
        if side == "shared":
            return f"(({free} OR {beside}) AND {row}writer_until_us <= {now} OR {self._mine(now, row)})"
        count = f"(SELECT count(*) FROM {self._each(f'{row}shares', 's')} WHERE s.e > {now})"
        return f"({free} OR ({beside} AND {count} < {limit}) OR {self._mine(now, row)})"

    def _beside(self, side: Side, now: str, row: str = "l.") -> str:
        """Give what the lease is put beside."""
        if side == "shared":
            kept = f"CASE WHEN {row}owner = '+shared' AND {row}expires_at_us > {now} THEN {row}shares END"
        else:
            kept = f"(SELECT {self._gathered()} FROM {self._others(now, row)})"
        return f"COALESCE({kept}, '{{}}')"

    def _others(self, now: str, row: str) -> str:
        """Give the permits of others, to select from."""
        shares = self._each(f"CASE WHEN {row}owner = '+shared' THEN {row}shares END", "s")
        return f"{shares} WHERE s.e > {now} AND s.o <> $2"

    def _slot(self, side: Side, now: str, row: str = "l.", *, alone: bool = False) -> str:
        """Give the lowest free number of a permit; NULL for a reader."""
        if side == "shared" or alone:
            return _first_slot(side)
        others = self._others(now, row)
        return f"(SELECT 0 AS n UNION SELECT s.p + 1 FROM {others} EXCEPT SELECT s.p FROM {others} ORDER BY n LIMIT 1)"

    def _until(self, now: str, end: str, greatest: str, row: str = "l.") -> str:
        """Give the end of the row: the latest of its shares."""
        held = f"{row}owner = '+shared' AND {row}expires_at_us > {now}"
        return f"CASE WHEN {held} THEN {greatest}({row}expires_at_us, {end}) ELSE {end} END"

    def _left(self, side: Side) -> str:
        """Give after how many µs a lease that does not fit may be had."""
        if side == "shared":
            end = "l.writer_until_us"
        else:
            end = f"COALESCE((SELECT min(s.e) FROM {self._each('l.shares', 's')} WHERE s.e > {{now}}), 0)"
        alone = "l.owner <> '+shared' AND l.expires_at_us > {now}"
        return f"CASE WHEN {alone} THEN l.expires_at_us ELSE {end} END - {{now}}"

    def _look_text(self, side: Side) -> str:
        busy = f"NOT {self._fits(side, '{now}', limit='$3')} OR {self._mine('{now}')}"
        mine = f"CASE WHEN {self._mine('{now}')} THEN {self._end_of('$2', 't')} END"
        slot = "NULL" if side == "shared" else f"CASE WHEN {mine} IS NULL THEN NULL ELSE {self._end_of('$2', 'p')} END"
        return f"SELECT {self._left(side)}, {mine}, {slot} FROM {{table}} AS l WHERE name = $1 AND ({busy})"

    # -- the rest --------------------------------------------------------------------------------------------------

    def _downgrade_text(self) -> str:
        share = self._share("l.token", "l.expires_at_us", "NULL", "l.metadata")
        return (
            f"UPDATE {{table}} AS l SET shares = {self._put(_EMPTY, share)}, metadata = NULL,"
            " metadata_owner = '+shared', owner = '+shared' WHERE name = $1 AND owner = $2 AND expires_at_us > {now}"
        )

    def _free_text(self, count: int) -> str:
        return self._freeing(self._among("l.name", 0, count), self._among("s.o", 1, count))

    def _free_alone_text(self) -> str:
        return (
            "UPDATE {table} AS l SET owner = NULL, expires_at_us = 0, shares = NULL"
            f" WHERE name = $1 AND {_HELD} AND {self._end_of('$2')} > {{now}} AND {self._only_mine}"
        )

    def _freeing(self, named: str, owned: str) -> str:
        each = self._each("l.shares", "s")
        rest = f"FROM {each} WHERE s.e > {{now}} AND NOT ({owned})"
        # InnoDB assigns from left to right: the shares last.
        return (
            f"UPDATE {{table}} AS l SET owner = CASE WHEN EXISTS (SELECT 1 {rest}) THEN '+shared' END,"
            f" expires_at_us = COALESCE((SELECT max(s.e) {rest}), 0), shares = (SELECT {self._gathered()} {rest})"
            f" WHERE {named} AND {_HELD} AND EXISTS (SELECT 1 FROM {each} WHERE s.e > {{now}} AND {owned})"
        )

    def _renew_text(self, count: int) -> str:
        named, owned = self._among("l.name", 0, count, 1), self._among("s.o", 1, count, 1)
        end = f"CASE WHEN {owned} THEN {{now}} + $1 ELSE s.e END"
        rest = f"FROM {self._each('l.shares', 's')} WHERE s.e > {{now}}"
        return (
            f"UPDATE {{table}} AS l SET expires_at_us = COALESCE((SELECT max({end}) {rest}), 0),"
            f" shares = (SELECT {self._gathered(end)} {rest})"
            f" WHERE {named} AND {_HELD} AND EXISTS (SELECT 1 {rest} AND {owned})"
        )

    def _state_text(self, count: int) -> str:
        return (
            "SELECT name, owner, expires_at_us <= {now}, broken_owner, shares, {now} FROM {table} AS l WHERE "
            + self._among("l.name", 0, count)
        )


class PostgresqlShareStatements(PostgresqlStatementMaker, ShareStatements):
    """
    PostgreSQL.

    ``acquire`` and ``acquire_or_wait`` return one row, as those of `PostgresqlStatements`, and behind it the slot.

    A release of one permit does not free the row: so the mark for the wake-up is only set while the lease does not fit,
    on the newest version of the row. It stays when a lease is granted beside others.
    """

    acquire_or_wait: dict[Side, Statement]

    def __init__(self, table: str, now_us: str) -> None:
        super().__init__(table, now_us)
        self.acquire_or_wait = {side: self._written(self._acquire_text(side, wait=True)) for side in _SIDES}

    _cheaper_alone = ("permit",)
    _only_mine = "l.shares - CAST($2 AS text) = CAST('{}' AS jsonb)"
    _metadata_set = "jsonb_set(l.shares, ARRAY[CAST($3 AS text), 'm'], to_jsonb(CAST($1 AS text)))"

    def _each(self, shares: str, alias: str) -> str:
        fields = ", ".join(f"CAST(value ->> '{field}' AS bigint) AS {field}" for field in "tep")
        return f"(SELECT key AS o, {fields}, value ->> 'm' AS m FROM jsonb_each({shares})) AS {alias}"

    def _share(self, token: str, end: str, slot: str, metadata: str, owner: str = "$2") -> str:
        del owner
        return f"jsonb_build_object('t', {token}, 'e', {end}, 'p', {slot}, 'm', {metadata})"

    def _gathered(self, end: str = "s.e") -> str:
        return f"jsonb_object_agg(s.o, {self._share('s.t', end, 's.p', 's.m')})"

    def _put(self, shares: str, share: str) -> str:
        return f"CAST({shares} AS jsonb) || jsonb_build_object(CAST($2 AS text), {share})"

    def _end_of(self, owner: str, field: str = "e", row: str = "l.") -> str:
        return f"CAST({row}shares -> CAST({owner} AS text) ->> '{field}' AS bigint)"

    def _acquire_text(self, side: Side, *, alone: bool = False, wait: bool = False) -> str:
        now = "excluded.token"
        token = "greatest(l.token + 1, excluded.token)"  # noqa: S105 - SQL
        first = self._share("c.now_us", "c.now_us + $3", _first_slot(side), "CAST($4 AS text)")
        share = self._share(token, "excluded.expires_at_us", self._slot(side, now, alone=alone), "CAST($4 AS text)")
        if alone:
            return self._acquire_alone_text(token, first, share)
        held = (
            f"held AS (SELECT owner, {self._left(side)} AS left_us, wanted,"
            " owner IS NOT NULL AND owner IS DISTINCT FROM metadata_owner AS alien"
            f" FROM {{table}} AS l WHERE name = $1 AND NOT {self._fits(side, '{now}')})"
        )
        granted = (
            "granted AS (INSERT INTO {table} AS l (name, owner, token, expires_at_us, metadata_owner, shares)"
            f" SELECT $1, '+shared', c.now_us, c.now_us + $3, '+shared', {self._put(_EMPTY, first)}"
            " FROM (SELECT {now} AS now_us) AS c WHERE NOT EXISTS (SELECT FROM held)"
            f" ON CONFLICT (name) DO UPDATE SET owner = '+shared', token = {token},"
            f" expires_at_us = {self._until(now, 'excluded.expires_at_us', 'greatest')}, metadata = NULL,"
            f" metadata_owner = '+shared', shares = {self._put(self._beside(side, now), share)},"
            f" wanted = l.wanted AND l.owner = '+shared' AND l.expires_at_us > {now}"
            f" WHERE {self._fits(side, now)} RETURNING l.token, {self._end_of('$2', 'p')} AS slot)"
        )
        given = "SELECT token, NULL, NULL, false, true, slot FROM granted"
        if not wait:
            return f"WITH {held}, {granted} {given} UNION ALL SELECT NULL, owner, left_us, alien, true, NULL FROM held"
        marked = (
            f"marked AS (UPDATE {{table}} AS l SET wanted = true WHERE name = $1 AND NOT wanted"
            f" AND NOT {self._fits(side, '{now}')} AND EXISTS (SELECT FROM held WHERE NOT wanted) RETURNING 1)"
        )
        settled = "wanted OR EXISTS (SELECT FROM marked)"
        return (
            f"WITH {held}, {granted}, {marked} {given}"
            f" UNION ALL SELECT NULL, owner, left_us, alien, {settled}, NULL FROM held"
        )

    def _acquire_alone_text(self, token: str, first: str, share: str) -> str:
        """Without a look before: the index tells that the row is there, and the row whether it is free."""
        return (
            "INSERT INTO {table} AS l (name, owner, token, expires_at_us, metadata_owner, shares)"
            f" SELECT $1, '+shared', c.now_us, c.now_us + $3, '+shared', {self._put(_EMPTY, first)}"
            " FROM (SELECT {now} AS now_us) AS c"
            f" ON CONFLICT (name) DO UPDATE SET owner = '+shared', token = {token},"
            " expires_at_us = excluded.expires_at_us, metadata = NULL, metadata_owner = '+shared',"
            f" shares = {self._put(_EMPTY, share)}, wanted = false"
            f" WHERE {self._fits('permit', 'excluded.token', alone=True)} RETURNING l.token, NULL, NULL, false, true, 0"
        )

    def _freeing(self, named: str, owned: str) -> str:
        # A waiter may have what one of several readers leaves only if none is left; a permit in any case.
        permits = f"EXISTS (SELECT FROM {self._each('l.shares', 's')} WHERE s.p IS NOT NULL)"
        wanted = f"wanted AND (owner IS NULL OR {permits}) AS wanted"
        return self._notifying(super()._freeing(named, owned), wanted)


class MysqlShareStatements(ShareStatements):
    """
    MariaDB and MySQL.

    ``acquire`` returns no rows, see `MysqlStatements`: ``LAST_INSERT_ID(…)`` is the token times `SLOTS`, plus the slot
    of a permit; 0 is busy. The first assignment decides; the others look whether the share has the next token.
    """

    _cheaper_alone = _SIDES
    _only_mine = "JSON_LENGTH(l.shares) = 1"
    _metadata_set = "JSON_SET(l.shares, CONCAT('$.\"', $3, '\".m'), $1)"

    def _each(self, shares: str, alias: str) -> str:
        numbers = ", ".join(f"{field} BIGINT PATH '$.{field}'" for field in "tep")
        columns = f"o VARCHAR(64) PATH '$.o', {numbers}, m TEXT PATH '$.m'"
        return f"JSON_TABLE({shares}, '$.*' COLUMNS({columns})) AS {alias}"

    def _share(self, token: str, end: str, slot: str, metadata: str, owner: str = "$2") -> str:
        return f"JSON_OBJECT('o', {owner}, 't', {token}, 'e', {end}, 'p', {slot}, 'm', {metadata})"

    def _gathered(self, end: str = "s.e") -> str:
        return f"JSON_OBJECTAGG(s.o, {self._share('s.t', end, 's.p', 's.m', 's.o')})"

    def _put(self, shares: str, share: str) -> str:
        return f"JSON_SET({shares}, CONCAT('$.\"', $2, '\"'), {share})"

    def _end_of(self, owner: str, field: str = "e", row: str = "l.") -> str:
        return f"CAST(JSON_EXTRACT({row}shares, CONCAT('$.\"', {owner}, '\".{field}')) AS SIGNED)"

    def _acquire_text(self, side: Side, *, alone: bool = False) -> str:
        # A subquery takes no VALUES(token), but the clock stands still during a statement: UTC_TIMESTAMP is its start.
        now, end, token = "{now}", "VALUES(expires_at_us)", "GREATEST(token + 1, VALUES(token))"
        if alone:
            return self._acquire_alone_text(side)
        share = self._share(token, end, self._slot(side, now, ""), "$4")
        ours = f"COALESCE({self._end_of('$2', 't', '')}, 0) = "
        slot = "0" if side == "shared" else self._end_of("$2", "p", "")
        granted = self._put(self._beside(side, now, ""), share)
        return (
            "INSERT INTO {table} (name, owner, token, expires_at_us, shares) VALUES ($1, '+shared',"
            f" {{now}} + 0 * LAST_INSERT_ID({{now}} * {SLOTS}), {{now}} + $3, {self._first(side)})"
            f" ON DUPLICATE KEY UPDATE shares = IF({self._fits(side, now, '')}, {granted}, shares),"
            f" token = IF({ours}{token}, {token} + 0 * LAST_INSERT_ID({token} * {SLOTS} + {slot}),"
            " token + LAST_INSERT_ID(0)),"
            f" expires_at_us = IF({ours}token, {self._until(now, end, 'GREATEST', '')}, expires_at_us),"
            f" owner = IF({ours}token, '+shared', owner)"
        )

    def _first(self, side: Side) -> str:
        return f"JSON_OBJECT($2, {self._share('{now}', '{now} + $3', _first_slot(side), '$4')})"

    def _acquire_alone_text(self, side: Side) -> str:
        """
        Take the row if it is free; not if the clock has not passed the last token, which the share would not have.

        It writes into ``metadata_owner`` that it does, with its time, so that it is no other attempt of that owner.
        """
        granted = "metadata_owner = VALUES(metadata_owner)"
        now = "VALUES(token)"
        free = f"{self._fits(side, now, '', alone=True)} AND token < {now}"
        return (
            "INSERT INTO {table} (name, owner, token, expires_at_us, metadata_owner, shares) VALUES ($1, '+shared',"
            f" LAST_INSERT_ID({{now}} * {SLOTS}) DIV {SLOTS}, token + $3, CONCAT($2, '/', token), JSON_OBJECT($2,"
            f" {self._share('token', 'expires_at_us', _first_slot(side), '$4')})) ON DUPLICATE KEY UPDATE"
            f" metadata_owner = IF({free}, VALUES(metadata_owner), metadata_owner),"
            f" token = IF({granted}, LAST_INSERT_ID({now} * {SLOTS}) DIV {SLOTS}, token + LAST_INSERT_ID(0)),"
            f" expires_at_us = IF({granted}, VALUES(expires_at_us), expires_at_us),"
            f" owner = IF({granted}, '+shared', owner), shares = IF({granted}, VALUES(shares), shares)"
        )


class SqliteShareStatements(ShareStatements):
    """
    SQLite.

    ``acquire`` returns the token and the slot, or no row if the lease cannot be had.
    """

    _metadata_set = "json_set(l.shares, '$.\"' || $3 || '\".m', $1)"

    def _each(self, shares: str, alias: str) -> str:
        fields = ", ".join(f"json_extract(value, '$.{field}') AS {field}" for field in "tepm")
        return f"(SELECT key AS o, {fields} FROM json_each({shares})) AS {alias}"

    def _share(self, token: str, end: str, slot: str, metadata: str, owner: str = "$2") -> str:
        del owner
        return f"json_object('t', {token}, 'e', {end}, 'p', {slot}, 'm', {metadata})"

    def _gathered(self, end: str = "s.e") -> str:
        return f"json_group_object(s.o, {self._share('s.t', end, 's.p', 's.m')})"

    def _put(self, shares: str, share: str) -> str:
        return f"json_set({shares}, '$.\"' || $2 || '\"', {share})"

    def _end_of(self, owner: str, field: str = "e", row: str = "l.") -> str:
        return f"json_extract({row}shares, '$.\"' || {owner} || '\".{field}')"

    def _acquire_text(self, side: Side, *, alone: bool = False) -> str:
        assert not alone, "not cheaper"
        now = "excluded.token"
        token = "max(l.token + 1, excluded.token)"  # noqa: S105 - SQL
        first = self._share("{now}", "{now} + $3", _first_slot(side), "$4")
        share = self._share(token, "excluded.expires_at_us", self._slot(side, now), "$4")
        return (
            "INSERT INTO {table} AS l (name, owner, token, expires_at_us, metadata_owner, shares)"
            f" VALUES ($1, '+shared', {{now}}, {{now}} + $3, '+shared', {self._put(_EMPTY, first)})"
            f" ON CONFLICT (name) DO UPDATE SET owner = '+shared', token = {token},"
            f" expires_at_us = {self._until(now, 'excluded.expires_at_us', 'max')}, metadata = NULL,"
            f" metadata_owner = '+shared', shares = {self._put(self._beside(side, now), share)}"
            f" WHERE {self._fits(side, now)} RETURNING token, {self._end_of('$2', 'p', '')}"
        )


def _first_slot(side: Side) -> str:
    return "NULL" if side == "shared" else "0"
