"""A session at PostgreSQL, through psycopg's libpq wrapper: see `lockkit.backends.sql_session.session`."""

from __future__ import annotations

import re
import select
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import psycopg
from psycopg import pq

from lockkit.backends.sql_session.session import Session, until_readable

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

    from lockkit.backends.sql.connection import Link
    from lockkit.backends.sql.postgresql import PqLink
    from lockkit.backends.sql.statement import Parameter, Result, Statement
    from lockkit.runtime import Event, Runtime

__all__ = ["PqSession"]

_PARAMETER = re.compile(rb"\$(\$?)([1-9])")


class PqSession(Session):
    """
    One session.

    Statements go by the simple protocol ("53.2.2. Simple Query"), which takes several in one text: BEGIN and what
    locks are one round trip. It has no parameters, so they are written into the text as libpq escapes them.
    """

    link: PqLink

    def __init__(self, link: Link, runtime: Runtime) -> None:
        """Take over a connection with nothing under way."""
        super().__init__(runtime)
        self.link = cast("PqLink", link)
        self._pgconn = self.link.pgconn
        self._literal = pq.Escaping(self._pgconn).escape_literal
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        self._poll = poll.poll
        # The server's last words, when they come while nothing is asked, are a notice to libpq.
        self._farewell = False
        self._pgconn.notice_handler = self._notice

    def _notice(self, notice: PGresult) -> None:
        # The text is in the server's language. PANIC is not for clients.
        if notice.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED) == b"FATAL":
            self._farewell = True

    @property
    def in_transaction(self) -> bool:
        """Whether the server has a transaction open for us, as of its last answer."""
        return self._pgconn.transaction_status != pq.TransactionStatus.IDLE

    @property
    def failed(self) -> bool:
        """Whether an error has ended that transaction, and with it what it had locked."""
        return self._pgconn.transaction_status == pq.TransactionStatus.INERROR

    def _send(self, statement: Statement, parameters: Sequence[Parameter]) -> None:
        text = statement.packed
        if parameters:
            text = _PARAMETER.sub(partial(self._written, parameters), text)
        self._pgconn.send_query(text)

    def _written(self, parameters: Sequence[Parameter], match: re.Match[bytes]) -> bytes:
        if match[1]:
            return b"$" + match[2]  # $$1 is a parameter of PREPARE
        value = parameters[int(match[2]) - 1]
        if isinstance(value, int):
            return b"%d" % value
        assert isinstance(value, str)
        return bytes(self._literal(value.encode()))

    async def _answer(self, seconds: float) -> Result:
        return await self.link.answer(seconds)

    @property
    def ended(self) -> bool:
        """See `Session.ended`. Not all that comes unasked is the end: a notice, a setting that was changed."""
        if self.dropped:
            return True
        try:
            # The server's last words, then the end: two looks.
            while not self.unheard and self._poll(0):
                self._pgconn.consume_input()
                self._pgconn.is_busy()  # reads them
        except psycopg.OperationalError:
            return True
        return self._farewell or self._pgconn.status != pq.ConnStatus.OK

    def told(self, error: BaseException) -> bool:
        """See `Session.told`. What the server said last may stand behind the end of the connection."""
        if self._farewell or getattr(error, "sqlstate", None) is not None:
            return True
        result = None if self.dropped else self._pgconn.get_result()
        return result is not None and result.error_field(pq.DiagnosticField.SQLSTATE) is not None

    def fileno(self) -> int:
        """See `Session.fileno`."""
        return self.link.fileno()

    @property
    def answered(self) -> bool:
        """See `Session.answered`."""
        try:
            if self._poll(0):
                self._pgconn.consume_input()
            return not self._pgconn.is_busy()
        except psycopg.OperationalError:
            return True  # the connection has ended: hearing the answer says so

    async def until_answer(self, wake: Event, until: float) -> None:
        """See `Session.until_answer`."""
        await until_readable(self._runtime, self.link.fileno(), wake, until)
