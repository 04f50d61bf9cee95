"""
MariaDB and MySQL, by PyMySQL: over verified TLS, and without revealing the password.

With ``ssl_ca`` alone PyMySQL checks no host name. So lockkit makes the `ssl.SSLContext` itself, one for all connections
of a client, and a subclass of PyMySQL's connection checks two steps of the login.

PyMySQL's private names are used for what it has no public ones for: a time limit for each statement, sending a
statement now and reading its answer later, and the login. Seen with PyMySQL 1.1 and 1.2. Without the limit an
acquisition with a short timeout waits for that of the connection when the server hangs; and a waiter's statement may be
answered hours later, which any limit of ``query`` would end. Tests: ``tests/backends/sql/test_pymysql.py``.
"""

from __future__ import annotations

import inspect
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pymysql
from pymysql.connections import Connection as PymysqlBase  # after the package, see `test_options.py`

from lockkit import validation
from lockkit.backends.sql.connection import (
    NO_ANSWER,
    Connection,
    Driver,
    Parameter,
    Result,
    Statement,
    Worker,
    cut,
    end_quietly,
    readable,
)
from lockkit.backends.sql.dialect import CONNECT_SECONDS, STATEMENT_SECONDS
from lockkit.backends.sql.options import as_it_is, parse_limit
from lockkit.errors import ConfigurationError
from lockkit.runtime import Event, Runtime

TLS_OPTIONS = frozenset({
    *("ssl", "ssl_ca", "ssl_cert", "ssl_key", "ssl_key_password"),
    *("ssl_verify_cert", "ssl_verify_identity", "ssl_disabled"),
})  # fmt: skip

_ASKING = ("ssl", "ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity")
"""Any of them asks for TLS."""

_CLIENT_SSL = 0x800
"""In the server's greeting: it has TLS. (MySQL, "Capabilities Flags".)"""

_SSL_CONNECTION_ERROR = 2026
_PLUGIN_CANNOT_LOAD = 2059
_CLEAR_TEXT = frozenset({"mysql_clear_password", "dialog"})
"""Plugins that send the password in clear text."""

_COM_QUERY = 3
"""MySQL's protocol command for a statement as text."""

_LIMIT_SECONDS_MIN = 0.001
"""0 would mean to PyMySQL that the socket does not block, and its reader fails on that with a TypeError."""


def _parse_tls(value: object) -> object:
    return value if isinstance(value, ssl.SSLContext) else validation.parse_bool(value)


_DECIDED = {
    "self", "user", "password", "passwd", "db", "database", "port", "autocommit", "cursorclass", "conv",
    "defer_connect", "init_command", "sql_mode", "client_flag", "use_unicode", "collation", "named_pipe",
    "compress", "local_infile",
}  # fmt: skip
"""What the URL says elsewhere, and what lockkit decides itself."""

_PARSERS: dict[str, Callable[[Any], object]] = {
    "connect_timeout": parse_limit,
    "read_timeout": parse_limit,
    "write_timeout": parse_limit,
    "ssl": _parse_tls,
    "ssl_disabled": validation.parse_bool,
    "ssl_verify_cert": validation.parse_bool,
    "ssl_verify_identity": validation.parse_bool,
}
OPTIONS: dict[str, Callable[[Any], object]] = {
    name: _PARSERS.get(name, as_it_is)
    for name in sorted({*inspect.signature(PymysqlBase.__init__).parameters, *TLS_OPTIONS} - _DECIDED)
}
"""PyMySQL's arguments that a URL may give."""


class PymysqlDriver(Driver):
    """Connects to a server; `parameters` gives PyMySQL's, anew for each connection: an application's may change."""

    errors = (pymysql.Error, OSError, EOFError)

    def __init__(self, parameters: Callable[[], Mapping[str, Any]], url: str) -> None:
        self._parameters = parameters
        self._url = url
        self._tls: Mapping[str, Any] | None = None
        self._guard: Guard

    def prepare(self, tls: Mapping[str, Any]) -> Guard:
        """Read the certificates, once for all connections: that takes 20 ms."""
        if tls != self._tls:
            self._tls, self._guard = tls, Guard(tls, self._url)
        return self._guard

    @property
    def verified(self) -> bool:
        """Whether the server must prove that it is the host of the URL."""
        return self._guard.verified

    def open(self, runtime: Runtime) -> PymysqlConnection:
        given = dict(self._parameters())
        self.password = str(given.get("password") or "")
        guard = self.prepare({name: given.pop(name) for name in TLS_OPTIONS & given.keys()})
        limits = {"read_timeout": STATEMENT_SECONDS, "write_timeout": STATEMENT_SECONDS}
        arguments = {"connect_timeout": CONNECT_SECONDS, **limits, **given, "charset": "utf8mb4", "autocommit": True}
        return PymysqlConnection(_Guarded(guard, **arguments), runtime)


class PymysqlConnection(Connection):
    """One connection. PyMySQL's time limit ends it, so `answer` waits for the socket itself."""

    def __init__(self, dbapi: Any, runtime: Runtime) -> None:  # noqa: ANN401 - its private names are used
        super().__init__(runtime, dbapi._sock.fileno())
        self.dbapi = dbapi
        self._limit: float = dbapi._read_timeout or STATEMENT_SECONDS

    async def run(self, statement: Statement, parameters: Sequence[Parameter] = (), seconds: float = 3.0) -> Result:
        def exchange() -> Result:
            self._limit_by(seconds)
            try:
                self.send(statement, parameters)
            except BaseException:
                self.broken = True
                raise
            return self._read()

        return await self._call(exchange, seconds)

    def _read(self) -> Result:
        dbapi = self.dbapi  # `terminate` forgets it, perhaps meanwhile
        try:
            changed = dbapi._read_query_result()
            return Result(dbapi._result.rows or (), changed, dbapi.insert_id())
        except BaseException as error:
            self.broken = not isinstance(error, Exception)  # Ctrl-C: how much of the answer was read is unknown
            raise

    def _limit_by(self, seconds: float) -> None:
        # Under asyncio the thread may go on when its caller has given up.
        limit = max(_LIMIT_SECONDS_MIN, min(seconds, self._limit)) if self._blocking else self._limit
        if self.dbapi is not None:
            self.dbapi._read_timeout = self.dbapi._write_timeout = limit

    def send(self, statement: Statement, parameters: Sequence[Parameter] = ()) -> None:
        self.dbapi._execute_command(_COM_QUERY, statement.filled(self.dbapi.escape, parameters))

    @property
    def _reading(self) -> Worker | None:
        """The thread that reads an answer whose caller did not wait to its end."""
        return self._worker if self._worker is not None and self._worker.pending else None

    async def answer(self, seconds: float) -> Result:
        if self._reading is not None:
            result: Result = await self._reading.finish(seconds)
            return result
        until = self._runtime.now() + seconds
        if not await self._runtime.readable(self.fd, seconds):
            raise TimeoutError(NO_ANSWER)
        # The server has begun to answer: the rest must come in the same time. Answers to a session are short.
        self._limit_by(seconds)
        return await self._call(self._read, until - self._runtime.now())

    @property
    def answered(self) -> bool:
        if self._reading is not None:
            return not self._reading.busy
        return self.fd < 0 or readable(self.fd)

    async def until_answer(self, wake: Event, until: float) -> None:
        if self._reading is not None:
            await self._reading.until_done(until - self._runtime.now())
        else:
            await super().until_answer(wake, until)

    @property
    def stale(self) -> bool:
        return self.fd >= 0 and readable(self.fd)

    def terminate(self) -> None:
        dbapi, self.dbapi = self.dbapi, None
        fd, self.fd = self.fd, -1
        if dbapi is None:
            return
        if self._worker is None:
            end_quietly(dbapi.close)
            return
        if self._worker.busy:
            cut(fd)
        self._worker.end(partial(end_quietly, dbapi.close))


class Guard:
    """What all connections of one client share for TLS."""

    def __init__(self, given: Mapping[str, Any], url: str) -> None:
        """Read the certificates; `given` are the `TLS_OPTIONS` of the URL, where ``ssl`` may be a context."""
        self.disabled: bool = given.get("ssl_disabled", False)  # the URL asks for no TLS
        # The URL asks for TLS: a server without TLS is refused.
        self.required = not self.disabled and any(given.get(name) for name in _ASKING)
        try:
            self.context = self._make_context(given)  # what PyMySQL uses
        except OSError as error:  # ssl.SSLError is one
            message = f"{url} cannot use its certificates for TLS ({error}): check ssl_ca, ssl_cert and ssl_key"
            if given.get("ssl_key") and not given.get("ssl_key_password"):
                message += ". A key with a password needs ssl_key_password"
            raise ConfigurationError(message, backend=url) from error
        self.verified = self.required and self.context.check_hostname  # the server must prove to be the URL's host

    def _make_context(self, given: Mapping[str, Any]) -> ssl.SSLContext:
        if isinstance(given.get("ssl"), ssl.SSLContext):
            context: ssl.SSLContext = given["ssl"]
            return context
        if not self.required:
            # As PyMySQL does: encrypt if the server can. That does not stop a man in the middle.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context
        context = ssl.create_default_context(cafile=given.get("ssl_ca"))
        # Certificates that MySQL generates do not conform to RFC 5280.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        verify = given.get("ssl_verify_cert", True)
        context.check_hostname = verify and given.get("ssl_verify_identity", True)
        context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
        if given.get("ssl_cert"):
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(given["ssl_cert"], given.get("ssl_key"), given.get("ssl_key_password") or "")
        return context


class _Guarded(PymysqlBase):  # type: ignore[misc] # PyMySQL has no types
    """PyMySQL's connection, with a `Guard` for two steps of the login before they are taken."""

    def __init__(self, guard: Guard, **arguments: Any) -> None:
        self.guard = guard  # first: the base connects
        tls = {"ssl": guard.context} if guard.required else {}
        super().__init__(**arguments, ssl_disabled=guard.disabled, **tls)

    def _request_authentication(self) -> Any:  # noqa: ANN401 - PyMySQL's
        if self.guard.required and not self.server_capabilities & _CLIENT_SSL:
            message = "the URL asks for TLS, which the server does not offer"
            raise pymysql.OperationalError(_SSL_CONNECTION_ERROR, message)
        # The plugin of the greeting is used without a further request.
        self._check_plugin(self._auth_plugin_name or "")
        return super()._request_authentication()

    def _process_auth(self, plugin_name: bytes, *rest: Any) -> Any:  # noqa: ANN401 - PyMySQL's
        self._check_plugin(plugin_name.decode("ascii", "replace"))
        return super()._process_auth(plugin_name, *rest)

    def _check_plugin(self, name: str) -> None:
        """Send no password in clear text to a server that may be another's."""
        if name in _CLEAR_TEXT and not (self.guard.verified or self.unix_socket):
            message = (
                f"the server asks for the password in clear text ({name}), which lockkit sends only over verified "
                "TLS (?ssl_ca=...) or a Unix socket"
            )
            raise pymysql.OperationalError(_PLUGIN_CANNOT_LOAD, message)

    def _create_ssl_ctx(self, given: Any) -> Any:  # noqa: ANN401 - PyMySQL's
        # PyMySQL makes a context for each connection, which takes 20 ms.
        return super()._create_ssl_ctx(given) if given else self.guard.context
