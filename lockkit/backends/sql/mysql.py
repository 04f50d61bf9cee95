"""
Logs in to MariaDB and MySQL: over verified TLS, and without revealing the password.

PyMySQL, aiomysql and asyncmy share a code base, and each connects in its own way: with ``ssl_ca`` alone PyMySQL checks
no host name, the other two take no files, and aiomysql continues without TLS if the server, or a man in the middle,
claims to have none. So lockkit makes the `ssl.SSLContext` itself, one for all connections of a client, and a subclass
of the driver's connection checks two steps of the login.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockkit.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Dialect


DRIVERS = frozenset({"pymysql", "aiomysql", "asyncmy"})

TLS_OPTIONS = frozenset({
    *("ssl", "ssl_ca", "ssl_cert", "ssl_key", "ssl_key_password"),
    *("ssl_verify_cert", "ssl_verify_identity", "ssl_disabled"),
})  # fmt: skip
"""Of each of these drivers; the names are PyMySQL's."""

_ASKING = ("ssl", "ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity")
"""Any of them asks for TLS."""

_CLIENT_SSL = 0x800
"""In the server's greeting: it has TLS. (MySQL, "Capabilities Flags".)"""

_SSL_CONNECTION_ERROR = 2026
_PLUGIN_CANNOT_LOAD = 2059
_CLEAR_TEXT = frozenset({"mysql_clear_password", "dialog"})
"""Plugins that send the password in clear text."""


class Guard:
    """
    The TLS context and the login checks that all connections of one client share.

    Attributes:
        required: The URL asks for TLS: a server without TLS is refused.
        verified: The server must prove that it is the host of the URL.
    """

    def __init__(self, given: Mapping[str, Any], url: str) -> None:
        """Read the certificates; `given` are the `TLS_OPTIONS` of the URL, where ``ssl`` may be a context."""
        self._disabled: bool = given.get("ssl_disabled", False)
        self.required = not self._disabled and any(given.get(name) for name in _ASKING)
        try:
            self._context = self._make_context(given)
        except OSError as error:  # ssl.SSLError is one
            message = f"{url} cannot use its certificates for TLS ({error}): check ssl_ca, ssl_cert and ssl_key"
            raise ConfigurationError(message, backend=url) from error
        self.verified = self.required and self._context.check_hostname
        self._classes: dict[str, type] = {}

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
            context.load_cert_chain(given["ssl_cert"], given.get("ssl_key"), given.get("ssl_key_password"))
        return context

    def connect(self, dialect: Dialect, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any driver's
        """Connect, as SQLAlchemy's dialect does."""
        named: dict[str, Any] = {**arguments}
        if self.required:
            named["ssl"] = self._context
        made = self._class(dialect)
        if dialect.driver == "pymysql":
            return made(**named, ssl_disabled=self._disabled)

        async def create(**named: Any) -> Any:  # noqa: ANN401 - any driver's
            connection = made(**named)
            try:
                await (connection.connect() if dialect.driver == "asyncmy" else connection._connect())  # noqa: SLF001
            except BaseException:
                transport = getattr(connection, "_transport", None)  # asyncmy leaves it open
                if transport is not None:
                    transport.abort()
                raise
            return connection

        return dialect.connect(async_creator_fn=create, **named)

    def _class(self, dialect: Dialect) -> type:
        """Derive a connection class that asks this guard."""
        found = self._classes.get(dialect.driver)
        if found is None:
            module = __import__(f"{dialect.driver}.connection{'s' * (dialect.driver == 'pymysql')}", fromlist=["_"])
            error = dialect.loaded_dbapi.OperationalError
            found = type("GuardedConnection", (_Guarded, module.Connection), {"_guard": self, "_guard_error": error})
            self._classes[dialect.driver] = found
        return found

    def check_greeting(self, connection: Any) -> None:  # noqa: ANN401 - any driver's
        """See `_Guarded`. Raises the driver's error."""
        if self.required and not connection.server_capabilities & _CLIENT_SSL:
            message = "the URL asks for TLS, which the server does not offer"
            raise connection._guard_error(_SSL_CONNECTION_ERROR, message)  # noqa: SLF001 - ours
        # aiomysql and asyncmy use the plugin of the greeting without a further request.
        self.check_plugin(connection, getattr(connection, "_server_auth_plugin", ""))

    def check_plugin(self, connection: Any, plugin: str | bytes) -> None:  # noqa: ANN401 - any driver's
        """See `_Guarded`. Raises the driver's error."""
        name = plugin.decode("ascii", "replace") if isinstance(plugin, bytes) else plugin
        local = getattr(connection, "unix_socket", None) or getattr(connection, "_unix_socket", None)
        if name in _CLEAR_TEXT and not (self.verified or local):
            message = (
                f"the server asks for the password in clear text ({name}), which lockkit sends only over verified "
                "TLS (?ssl_ca=...) or a Unix socket"
            )
            raise connection._guard_error(_PLUGIN_CANNOT_LOAD, message)  # noqa: SLF001 - ours


class _Guarded:
    """
    Has a `Guard` check two steps of a driver's login before they are taken, see `lockkit.backends.sql.quirks`.

    With the asyncio drivers these methods return coroutines.
    """

    _guard: Guard

    def _request_authentication(self) -> Any:  # noqa: ANN401 - any driver's
        self._guard.check_greeting(self)
        return super()._request_authentication()  # type: ignore[misc] # the driver's

    def _process_auth(self, plugin_name: bytes, *rest: Any) -> Any:  # noqa: ANN401 - any driver's
        self._guard.check_plugin(self, plugin_name)
        return super()._process_auth(plugin_name, *rest)  # type: ignore[misc] # the driver's

    def _create_ssl_ctx(self, given: Any) -> Any:  # noqa: ANN401 - any driver's
        # PyMySQL makes a context for each connection, which takes 20 ms.
        return super()._create_ssl_ctx(given) if given else self._guard._context  # type: ignore[misc] # noqa: SLF001
