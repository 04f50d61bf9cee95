"""
Statements that a MariaDB session has prepared.

MariaDB parses the text of a statement each time, and with statements as long as those of the lock table that takes a
third of the time that the statement takes without its flush to the disk. ``PREPARE name FROM text`` parses it once for
the session, and ``EXECUTE name USING …`` takes values in its text, so every driver can send it. (MariaDB, "EXECUTE
STATEMENT". MySQL takes user variables only, which would be another round trip.)

A session may forget what it prepared: a proxy has reset it, or has sent it to another server. It then refuses to
execute (error 1243), and nothing was done: the statement is sent again as text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from lockkit.backends.sql.errors import mysql_kind, mysql_number
from lockkit.backends.sql.statement import Parameter, Result, Statement

PREPARE_AFTER = 8
"""How often a session runs a statement before it prepares it. Less often prepares what is not used again: a server has
16,382 prepared statements at once for all its clients, unless it is told otherwise."""


_UNPREPARABLE = {1295, 1461}
"""MariaDB takes the statement as text only: it is of such a kind, or too many are prepared."""

Send: TypeAlias = Callable[[Statement, Sequence[Parameter]], Awaitable[Result]]


class PreparedStatements:
    """What one session has prepared."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._uses: dict[Statement, int] = {}
        self._forms: dict[Statement, Statement] = {}

    async def run(self, statement: Statement, parameters: Sequence[Parameter], send: Send) -> Result:
        """Run a statement by `send`, which raises the driver's errors."""
        if statement not in self._forms:
            self._uses[statement] = self._uses.get(statement, 0) + 1
            if self._uses[statement] > PREPARE_AFTER:
                await self._prepare(statement, send)
        try:
            return await send(self._forms.get(statement, statement), parameters)
        except Exception as error:
            if mysql_kind(error) != "unprepared":
                raise
            self._uses.clear()
            self._forms.clear()
        return await send(statement, parameters)

    async def _prepare(self, statement: Statement, send: Send) -> None:
        name = self._name(statement)
        self._forms[statement] = statement
        try:
            await send(Statement(f"PREPARE {name} FROM '{_quoted(statement)}'", once=True), ())
        except Exception as error:
            if mysql_number(error) not in _UNPREPARABLE:
                raise
        else:
            places = ", ".join(f"${number}" for number in statement.places)
            self._forms[statement] = Statement(f"EXECUTE {name} USING {places}")

    def _name(self, statement: Statement) -> str:
        return f"lockkit_{list(self._uses).index(statement) + 1}"


def _quoted(statement: Statement) -> str:
    """Write the text of a statement for a literal, with ``?`` for parameters."""
    text, _ = statement.spelled("qmark")
    assert "\\" not in text, "depends on sql_mode"
    return text.replace("'", "''")
