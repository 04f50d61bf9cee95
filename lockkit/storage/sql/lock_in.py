"""
Locks inside an application's transaction: see `lockkit.sql.lock_in`.

Each name has a row. The transaction that has changed the row and has not committed yet holds the lock: the database
makes other transactions wait, in its own queue, and releases the row when the transaction ends, however it ends. The
row stores the last token and its `owner`, a random id of the transaction that got it: a transaction that asks twice
keeps its token.

Why a *changed* row and not an advisory lock, or a row that is only locked: a transaction at REPEATABLE READ reads the
database as of its first statement, which is often before the lock was granted. It would not see what the last holder
wrote, and sell the same thing again. Only a row that has changed since then reveals this, so lockkit can refuse such a
transaction.

Tokens are drawn after the row is locked, so for each name they follow the order of grants, and from a source that no
rollback resets. But neither PostgreSQL nor InnoDB promises that a number drawn by a transaction which did not commit
stays drawn when the server *crashes* (PostgreSQL manual, "Sequence Manipulation Functions"), nor does a replica that is
promoted have them all. So the numbers follow the time of day in microseconds, which has passed all that were drawn.

===========  ============================================================  =========================================
PostgreSQL   ``INSERT … ON CONFLICT DO UPDATE``, one round trip            a sequence, raised to the time
MariaDB,     ``SELECT … FOR UPDATE`` of a row that a second connection     an AUTO_INCREMENT number, raised to the
MySQL        has inserted and committed beforehand                         time once by each connection
SQLite       ``INSERT … ON CONFLICT DO UPDATE``: any write excludes all    the time of day, at least one more than the
             other writers                                                 last one committed
===========  ============================================================  =========================================
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, TextClause, exc, text

from lockkit import validation
from lockkit.backends.sql.dialect import dialect_named
from lockkit.errors import ConfigurationError, LockTimeout
from lockkit.runtime import Runtime, wall_clock
from lockkit.storage.retry import pause_until
from lockkit.storage.sql.client import (
    STALE,
    ApplicationTransaction,
    StartAgain,
    kind_of,
    label_of,
    spare,
    transaction_of,
    translating,
)
from lockkit.storage.sql.schema import KEYS, Family, family_of, key_of, quoted, with_table
from lockkit.units import Seconds

_PAUSE_MIN, _PAUSE_MAX = 0.005, 0.05
"""Pause between two tries, seconds, where the database cannot wait for less than a second."""

_SQLITE_WAIT_MAX = 0.25
"""Longest single wait of SQLite, seconds: its thread goes on for this long after the waiting task was cancelled."""

_KNOWN_ROWS_MAX = 10_000
"""Names whose row is known to exist, for each engine. More takes memory, fewer asks again (MariaDB, MySQL)."""

T = TypeVar("T")

Statements = Mapping[str, TextClause]
"""SQL statements by what they do."""


async def acquire(
    transaction: ApplicationTransaction, name: object, timeout: object, *, table: str, auto_create: bool
) -> tuple[str, str, int]:
    """
    Lock a name inside a transaction; see `lockkit.sql.lock_in`.

    Returns:
        Name, owner and token.
    """
    checked = validation.name_to_lock(name)
    seconds = validation.timeout(timeout, name=checked)
    runtime = transaction.runtime
    until = None if seconds is None else runtime.now() + seconds

    def attempt(_: object, connection: Connection) -> tuple[int | None, str, str]:
        locker = _LOCKERS[family_of(connection.dialect.name)](
            runtime, connection, checked, table, auto_create=auto_create
        )
        with translating(connection, checked):
            token = locker.attempt(None if until is None else max(0.0, until - runtime.now()))
        return token, locker.owner, locker.label

    while True:
        token, owner, label = await transaction.run(attempt)
        if token is not None:
            return checked, owner, token
        if until is not None and runtime.now() >= until:
            message = (
                f"{checked!r} at {label} stayed busy for {seconds:g} s: another transaction holds it. This one is "
                "unchanged: end it, try again later, or give a longer timeout"
            )
            raise LockTimeout(message, name=checked, backend=label)
        await pause_until(runtime, runtime.random.uniform(_PAUSE_MIN, _PAUSE_MAX), until)


class _Locker(ABC):
    """One attempt to lock a name in a transaction, on one kind of database."""

    def __init__(self, runtime: Runtime, connection: Connection, name: str, table: str, *, auto_create: bool) -> None:
        family = family_of(connection.dialect.name)
        self._runtime = runtime
        self._connection = connection
        self._name = name
        self._table = table
        self._auto_create = auto_create
        self._sql = self._statements(quoted(family, table), quoted(family, table, "_token"))
        self._given: dict[str, Any] = {"name": key_of(family, name)}
        self.label = label_of(connection)
        self.owner = ""

    @staticmethod
    @abstractmethod
    def _statements(table: str, tokens: str) -> Statements:
        """Write the statements. Cached: making them takes longer than sending them."""

    @abstractmethod
    def attempt(self, wait: Seconds | None) -> int | None:
        """Lock the row, waiting for at most `wait` seconds (None: as long as the database does), and draw a token."""

    def _begin(self) -> None:
        self.owner = transaction_of(self._connection, self._runtime)
        self._given["owner"] = self.owner

    def _ask(self, step: str, **given: object) -> Any:  # noqa: ANN401 - a result, with or without rows
        """Run a statement of ours."""
        return self._connection.execute(self._sql[step], {**self._given, **given})

    def _with_table(self, ask: Callable[[], T]) -> T:
        return with_table(self._connection, "locks", self._table, ask, auto_create=self._auto_create)

    def _start_again(self, message: str) -> StartAgain:
        return StartAgain(message, name=self._name, backend=self.label)

    def _is_stale(self, detail: object) -> StartAgain:
        return self._start_again(f"{STALE.format(label=self.label, name=self._name)} ({detail})")

    @contextmanager
    def _limited(self, before: object, limit: Callable[[object], object], value: object) -> Iterator[None]:
        """
        Limit how long a statement waits, and set back what belongs to the application's connection.

        Not if the connection was lost; nor after a cancellation or Ctrl-C: SQLAlchemy then closes the connection, and
        another statement could hide it.
        """
        limit(value)
        try:
            yield
        except Exception:
            if not self._connection.invalidated:
                limit(before)
            raise
        limit(before)


class _Postgres(_Locker):
    """PostgreSQL: one statement locks and draws."""

    @staticmethod
    @lru_cache(maxsize=64)
    def _statements(table: str, tokens: str) -> Statements:
        name = KEYS["postgresql"].format("name")
        # Others draw for other names meanwhile, and may set the sequence back by what passed between two of them, µs.
        # So does a crash; the time has passed that, and the token in the row has passed what was committed.
        number = f"'{tokens}'::regclass"
        drawn = f"setval({number}, greatest(held.token + 1, nextval({number}), {dialect_named('postgresql').now_us}))"
        statements = {
            "try": f"SELECT 1 FROM {table} WHERE name = {name} FOR UPDATE SKIP LOCKED",
            # PostgreSQL computes what ON CONFLICT sets after it has locked the row, but the values of a new row before:
            # so a new row gets 0 first, and then a number from `draw`.
            "lock": f"INSERT INTO {table} AS held (name, owner, token) VALUES ({name}, :owner, 0) "
            "ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, "
            f"token = CASE WHEN held.owner = excluded.owner THEN held.token ELSE {drawn} END RETURNING token",
            "draw": f"UPDATE {table} AS held SET token = {drawn} WHERE name = {name} RETURNING token",
            "limited": "SELECT current_setting('lock_timeout')",
            "limit": "SELECT set_config('lock_timeout', :limit, true)",
            "save": "SAVEPOINT lockkit",
            "restore": "ROLLBACK TO SAVEPOINT lockkit",
            "release": "RELEASE SAVEPOINT lockkit",
        }
        return {key: text(statement) for key, statement in statements.items()}

    def attempt(self, wait: Seconds | None) -> int | None:
        return self._with_table(lambda: self._lock(wait))

    def _lock(self, wait: Seconds | None) -> int | None:
        self._begin()
        # If this transaction has the row, or gets it at once, it does not wait.
        at_once = wait is None or self._ask("try").first() is not None
        token: int | None = self._ask("lock").scalar_one() if at_once else self._wait(wait or 0.0)
        if token == 0:
            token = self._ask("draw").scalar_one()
        return token

    def _wait(self, wait: Seconds) -> int | None:
        """
        Wait in the database's queue, under a savepoint: without one, an error would end the whole transaction.

        PostgreSQL counts `lock_timeout` from the moment at which a statement begins to wait, so even 1 ms is enough to
        get a row that is free. If it ends the statement for a deadlock, this transaction keeps its other locks until
        the application rolls it back: only what was locked since the savepoint is free at once.
        """
        before = self._ask("limited").scalar_one()
        self._ask("save")
        try:
            # After the savepoint, so that rolling back to it undoes this, too.
            self._ask("limit", limit=f"{max(1, int(-(wait * 1000) // -1))}ms")
            token: int = self._ask("lock").scalar_one()
        except exc.DBAPIError as error:
            if kind_of(error) != "locked":
                raise
            self._ask("restore")
            self._ask("release")
            return None
        self._ask("limit", limit=before)
        self._ask("release")
        return token


class _InnoDB(_Locker):
    """
    MariaDB and MySQL.

    The row is inserted and committed beforehand: if several transactions wait for a row whose insertion is then rolled
    back, InnoDB gives all of them a lock on the gap, and ends all but one with a deadlock. And a search for a missing
    row would itself lock the gap, so lockkit remembers which names have a row.
    """

    @staticmethod
    @lru_cache(maxsize=64)
    def _statements(table: str, tokens: str) -> Statements:
        name = KEYS["mysql"].format("name")
        lock = f"SELECT owner, token FROM {table} WHERE name = {name} FOR UPDATE"
        statements = {
            "insert": f"INSERT IGNORE INTO {table} (name, token) VALUES ({name}, 0)",
            "try": f"{lock} NOWAIT",
            "lock": lock,
            "read": f"SELECT token FROM {table} WHERE name = {name}",
            "keep": f"UPDATE {table} SET owner = :owner, token = :token WHERE name = {name}",
            # In microseconds: a server may crash and restart within the second in which the last number was drawn.
            "raise": f"INSERT IGNORE INTO {tokens} (id) VALUES (GREATEST({dialect_named('mysql').now_us}, :last))",
            "draw": f"INSERT INTO {tokens} () VALUES ()",
            "clean": f"DELETE FROM {tokens} WHERE id = :number",
            "limited": "SELECT @@innodb_lock_wait_timeout",
            "limit": "SET SESSION innodb_lock_wait_timeout = :limit",
            "rolls back": "SELECT @@innodb_rollback_on_timeout",
        }
        return {key: text(statement) for key, statement in statements.items()}

    def attempt(self, wait: Seconds | None) -> int | None:
        connection = self._connection
        if connection.get_transaction() in _rolled_back:
            message = f"{self.label} has aborted this transaction after an earlier error: roll it back first"
            raise ConfigurationError(message, name=self._name, backend=self.label)
        try:
            return self._with_table(lambda: self._attempt(wait))
        except exc.DBAPIError as error:
            transaction = connection.get_transaction()
            if kind_of(error) == "deadlock" and transaction is not None:
                # The server has undone the application's work. PostgreSQL would refuse the next statement; InnoDB
                # silently begins another transaction.
                _rolled_back.add(transaction)
            if kind_of(error) == "no table":
                _known_rows.pop(connection.engine, None)
            raise

    def _attempt(self, wait: Seconds | None) -> int | None:
        self._insert_row()
        self._begin()
        row = self._lock(wait)
        if row is None:
            return None
        owner, last = row
        if owner == self.owner:
            return int(last)
        # This reads the transaction's snapshot, not the locked row. It makes the snapshot if there is none yet.
        seen = self._ask("read").scalar()
        if (seen or 0) != last:
            raise self._is_stale(f"it sees token {seen}, the last one is {last}")
        token = self._draw(last)
        self._ask("keep", token=token)
        return token

    def _insert_row(self) -> None:
        known = _known_rows.setdefault(self._connection.engine, set())
        if (self._table, self._name) in known:
            return
        with spare(self._connection.engine) as own:
            # Looked for first: an INSERT would wait for the holder of the lock. So would a SELECT at SERIALIZABLE, but
            # not in autocommit.
            own.execution_options(isolation_level="AUTOCOMMIT")
            if own.execute(self._sql["read"], self._given).first() is None:
                own.execute(self._sql["insert"], self._given)
        if len(known) >= _KNOWN_ROWS_MAX:
            known.clear()
        known.add((self._table, self._name))

    def _lock(self, wait: Seconds | None) -> Any:  # noqa: ANN401 - a row
        """
        Wait in the database's queue, which counts whole seconds; for less than one, the caller polls.

        A lock wait that times out ends the statement, but the transaction goes on, unless the server is configured
        otherwise.
        """
        try:
            return self._found("lock" if wait is None else "try")
        except exc.DBAPIError as error:
            if kind_of(error) != "locked":
                raise
            if self._ask("rolls back").scalar_one():
                message = (
                    f"{self._name!r} at {self.label} stayed busy, and the server has rolled back this transaction "
                    "(innodb_rollback_on_timeout): roll back and run it again"
                )
                raise self._start_again(message) from error
        if wait is None or wait < 1:
            return None
        try:
            with self._limited(
                self._ask("limited").scalar_one(), lambda seconds: self._ask("limit", limit=seconds), int(wait)
            ):
                return self._found("lock")
        except exc.DBAPIError as error:
            if kind_of(error) != "locked":
                raise
            return None

    def _found(self, step: str) -> Any:  # noqa: ANN401 - a row
        row = self._ask(step).first()
        if row is None:
            _known_rows.get(self._connection.engine, set()).discard((self._table, self._name))
            message = f"the row of {self._name!r} at {self.label} was removed meanwhile"
            raise self._start_again(f"{message}: roll back and run the transaction again")
        return row

    def _draw(self, last: int) -> int:
        """
        Draw a number above the `last` of the row, and leave no row behind.

        Inserting a higher number raises all later ones, and a lower one changes nothing. So every connection inserts
        the time of day at its first use: no connection outlives the server. If a number is not above what this
        connection has seen, the table was emptied (TRUNCATE restarts at 1) or created again: raised once more, numbers
        are above all that were ever drawn, also by transactions that were rolled back.
        """
        table, highest = self._connection.info.get(_RAISED, ("", 0))
        number = self._inserted("draw") if table == self._table else 0
        if number <= max(highest, last):
            self._inserted("raise", last=last)
            number = self._inserted("draw")
        self._connection.info[_RAISED] = (self._table, number)
        return number

    def _inserted(self, step: str, **given: object) -> int:
        number: int = self._ask(step, **given).lastrowid
        self._ask("clean", number=number)
        return number


# Transactions that the server has rolled back, but their applications have not.
_rolled_back: weakref.WeakSet[Any] = weakref.WeakSet()
_RAISED = "lockkit: tokens raised"
# Tables and names that are known to have a row, by engine.
_known_rows: weakref.WeakKeyDictionary[Engine, set[tuple[str, str]]] = weakref.WeakKeyDictionary()


class _SQLite(_Locker):
    """SQLite: a writer excludes all other writers, whatever the name, until its transaction ends."""

    @staticmethod
    @lru_cache(maxsize=64)
    def _statements(table: str, tokens: str) -> Statements:
        del tokens
        statements = {
            "lock": f"INSERT INTO {table} AS held (name, token) VALUES (:name, 0) "
            "ON CONFLICT (name) DO UPDATE SET token = held.token RETURNING owner, token",
            "keep": f"UPDATE {table} SET owner = :owner, token = :token WHERE name = :name",
        }
        return {key: text(statement) for key, statement in statements.items()}

    def attempt(self, wait: Seconds | None) -> int | None:
        sql = self._connection.exec_driver_sql
        was_idle = not self._in_transaction()
        started = self._runtime.now()
        limit = _SQLITE_WAIT_MAX if wait is None else min(wait, _SQLITE_WAIT_MAX)
        self._begin()
        try:
            before = sql("PRAGMA busy_timeout").scalar_one()
            with self._limited(before, lambda ms: sql(f"PRAGMA busy_timeout = {ms}"), int(-(limit * 1000) // -1)):
                owner, token = self._with_table(lambda: self._ask("lock").one())
                if owner != self.owner:
                    # The time is read when no other transaction can write.
                    token = max(token + 1, int(wall_clock() * 1_000_000))
                    self._ask("keep", token=token)
        except exc.DBAPIError as error:
            if kind_of(error) != "locked":
                raise
            if was_idle and self._in_transaction():
                sql("ROLLBACK")  # undoes only the driver's BEGIN before this statement
            elif self._runtime.now() - started < limit * 0.9:
                # SQLite did not wait, because this transaction has read, and the writer waits for it to end (SQLite
                # manual, sqlite3_busy_handler).
                raise self._is_stale(error.orig) from error
            return None
        return int(token)

    def _in_transaction(self) -> bool:
        """Ask the driver: an application may send BEGIN itself on a connection that SQLAlchemy has in autocommit."""
        driver: Any = self._connection.connection.driver_connection
        return bool(driver.in_transaction)


_LOCKERS: dict[Family, type[_Locker]] = {"postgresql": _Postgres, "mysql": _InnoDB, "sqlite": _SQLite}
