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

from typing import TYPE_CHECKING

from lockkit.backends.sql.errors import is_unknown_prepared, is_unpreparable
from lockkit.backends.sql.statement import Statement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockkit.backends.sql.statement import Parameter, Result

__all__ = ["PREPARE_AFTER", "PreparedStatements"]

PREPARE_AFTER = 8
"""How often a session runs a statement before it prepares it. Less often prepares what is not used again: a server has
16,382 prepared statements at once for all its clients, unless it is told otherwise."""


class PreparedStatements:
    """What one session has prepared."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._uses: dict[Statement, int] = {}
        self._forms: dict[Statement, Statement] = {}

    def form(self, statement: Statement) -> Statement:
        """Return what is to be sent for a statement."""
        return self._forms.get(statement, statement)

    def preparing(self, statement: Statement) -> Statement | None:
        """Count a use of a statement, and return what prepares it, if it is to be prepared now."""
        if not statement.frequent or statement in self._forms:
            return None
        uses = self._uses[statement] = self._uses.get(statement, 0) + 1
        if uses <= PREPARE_AFTER:
            return None
        return Statement(f"PREPARE {self._name(statement)} FROM '{_quoted(statement)}'", once=True)

    def prepared(self, statement: Statement) -> None:
        """Execute it from now on."""
        places = ", ".join(f"${number}" for number in statement.places)
        self._forms[statement] = Statement(f"EXECUTE {self._name(statement)} USING {places}")

    def failed(self, statement: Statement, error: BaseException) -> bool:
        """Take note of an error of `preparing`; return whether the statement can be sent as text."""
        self._forms[statement] = statement
        return is_unpreparable(error)

    def forget(self, error: BaseException) -> bool:
        """Prepare anew if this error says that the session has forgotten what it prepared; return whether it does."""
        if not is_unknown_prepared(error):
            return False
        self._uses.clear()
        self._forms.clear()
        return True

    def run(
        self,
        statement: Statement,
        parameters: Sequence[Parameter],
        send: Callable[[Statement, Sequence[Parameter]], Result],
    ) -> Result:
        """Run a statement by `send`, which raises the driver's errors."""
        preparing = self.preparing(statement)
        if preparing is not None:
            try:
                send(preparing, ())
            except Exception as error:
                if not self.failed(statement, error):
                    raise
            else:
                self.prepared(statement)
        try:
            return send(self.form(statement), parameters)
        except Exception as error:
            if not self.forget(error):
                raise
        return send(statement, parameters)

    def _name(self, statement: Statement) -> str:
        return f"lockkit_{list(self._uses).index(statement) + 1}"


def _quoted(statement: Statement) -> str:
    """Write the text of a statement for a literal, with ``?`` for parameters."""
    text, _ = statement.spelled("qmark")
    assert "\\" not in text, "depends on sql_mode"
    return text.replace("'", "''")
