"""TLS on databases: the server must prove that it is the host of the URL; and who does not gets no password."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, TypeAlias

import pytest

import lockkit
import lockkit.aio
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import MariaServer, PostgresServer, require
from lockkit_tools.servers.tls import make_certificates

pytestmark = pytest.mark.timeout(180)

SECRET = "s3cret&"  # noqa: S105 - a test server's

Url: TypeAlias = Callable[[str, str, str], str]
"""Makes a URL of a kind of server, a host and options."""


def lock_blocking(url: str) -> None:
    """Take a lock."""
    with lockkit.connect(url) as client, client.lock("x", timeout=PATIENCE):
        pass


def lock_asyncio(url: str) -> None:
    """The same."""

    async def lock() -> None:
        async with await lockkit.aio.connect(url) as client, client.lock("x", timeout=PATIENCE):
            pass

    asyncio.run(lock())


FACES = pytest.mark.parametrize("lock", [lock_blocking, lock_asyncio])


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaServer]:
    """Its certificate is for localhost, and not for 127.0.0.1."""
    require("mariadb", local=True)
    server = MariaServer(tls=True, password=SECRET)
    server.certificate_names = "DNS:localhost"
    with server:
        server.execute("ALTER USER 'lockkit'@'%' REQUIRE SSL")
        yield server


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgresServer]:
    """The same."""
    require("postgresql", local=True)
    server = PostgresServer(tls=True, password=SECRET)
    server.certificate_names = "DNS:localhost"
    with server:
        yield server


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another authority."""
    return make_certificates(tmp_path_factory.mktemp("stranger")).ca


@pytest.fixture
def url(request: pytest.FixtureRequest, stranger: Path) -> Url:
    """The URL of a server under a name."""

    def made(kind: str, host: str, options: str) -> str:
        server: MariaServer | PostgresServer = request.getfixturevalue(kind)
        files = server.certificates
        query = options.format(ca=files.ca, stranger=stranger, cert=files.client, key=files.client_key)
        name = "lockkit" if kind == "mariadb" else "postgres"  # of user and database
        return f"{kind}://{name}:{SECRET.replace('&', '%26')}@{host}:{server.port}/{name}?{query}"

    return made


@FACES
@pytest.mark.parametrize(
    ("kind", "host", "options"),
    [
        ("mariadb", "localhost", "ssl_ca={ca}"),
        ("mariadb", "127.0.0.1", "ssl_ca={ca}&ssl_verify_identity=0"),
        ("mariadb", "127.0.0.1", "ssl_ca={stranger}&ssl_verify_cert=0"),
        ("mariadb", "127.0.0.1", "ssl=1&ssl_verify_cert=0"),
        ("mariadb", "localhost", "ssl_ca={ca}&ssl_cert={cert}&ssl_key={key}"),
        ("postgresql", "localhost", "sslmode=verify-full&sslrootcert={ca}"),
        ("postgresql", "127.0.0.1", "sslmode=verify-ca&sslrootcert={ca}"),
        ("postgresql", "127.0.0.1", "sslmode=require"),
        ("postgresql", "localhost", "sslrootcert={ca}"),
        ("postgresql", "127.0.0.1", "sslmode=require&sslrootcert={ca}"),  # libpq then checks the authority alone
    ],
)
def test_server_is_accepted(url: Url, lock: Callable[[str], None], kind: str, host: str, options: str) -> None:
    """The host of the URL, or whom the URL says not to verify."""
    lock(url(kind, host, options))


@pytest.mark.parametrize(
    ("kind", "host", "options"),
    [
        ("mariadb", "127.0.0.1", "ssl_ca={ca}"),
        ("mariadb", "127.0.0.1", "ssl_ca={ca}&ssl_verify_cert=1"),
        ("mariadb", "localhost", "ssl_ca={stranger}"),
        ("mariadb", "localhost", "ssl_ca={stranger}&ssl_verify_identity=0"),
        ("mariadb", "localhost", "ssl=1"),
        ("mariadb", "localhost", "ssl_verify_cert=1"),
        ("postgresql", "127.0.0.1", "sslmode=verify-full&sslrootcert={ca}"),
        ("postgresql", "127.0.0.1", "sslrootcert={ca}"),
        ("postgresql", "localhost", "sslrootcert={stranger}"),
        ("postgresql", "localhost", "sslmode=verify-ca&sslrootcert={stranger}"),
        ("postgresql", "localhost", "sslmode=require&sslrootcert={stranger}"),  # libpq: as verify-ca
    ],
)
def test_server_is_refused(url: Url, kind: str, host: str, options: str) -> None:
    """Another host than its certificate's, or an authority that is not known."""
    with pytest.raises(lockkit.ConfigurationError, match=r"TLS.*(CERTIFICATE_VERIFY_FAILED|certificate)"):
        lock_blocking(url(kind, host, options))


class TestMariadb:
    """PyMySQL's names for the options."""

    @FACES
    def test_server_without_tls_is_refused(self, mariadb: MariaServer, lock: Callable[[str], None]) -> None:
        """It may be somebody in between who says so."""
        with Rogue(mysql_greeting(capabilities=0)) as rogue:
            url = f"mariadb://lockkit:{SECRET}@{rogue.address}/lockkit?ssl_ca={mariadb.certificates.ca}"
            with pytest.raises(lockkit.ConfigurationError, match="TLS"):
                lock(url)
        assert SECRET.encode() not in rogue.got
        assert b"lockkit" not in rogue.got

    @FACES
    @pytest.mark.parametrize("greets", [True, False])
    def test_password_is_not_told_in_clear_text(self, lock: Callable[[str], None], *, greets: bool) -> None:
        """To a server that is not verified, whether it greets with that plugin or asks for it later."""
        plugin = b"mysql_clear_password"
        switch = packet(2, b"\xfe" + plugin + b"\0")
        greeting = mysql_greeting(capabilities=0, plugin=plugin if greets else b"mysql_native_password")
        clear = pytest.raises(lockkit.ConfigurationError, match="clear text")
        with Rogue(greeting, switch) as rogue, clear:
            lock(f"mariadb://lockkit:{SECRET}@{rogue.address}/lockkit")
        assert SECRET.encode() not in rogue.got

    def test_connections_share_one_context(self, url: Url) -> None:
        """To make one for each takes as long as twenty statements."""
        named = url("mariadb", "localhost", "ssl_ca={ca}&mode=advisory")
        for each in (named, named.replace("ssl_ca=", "program_name=")):
            with lockkit.connect(each) as client, client.lock("a") as one, client.lock("b") as two:
                contexts = {lease._record.grant.state.session.connection.dbapi.ctx for lease in (one, two)}
                assert len(contexts) == 1

    @pytest.mark.parametrize("option", ["ssl_ca=/nowhere/ca.pem", "ssl=maybe", "ssl_cert=/nowhere/cert.pem"])
    def test_wrong_files_are_refused_where_they_are_given(self, mariadb: MariaServer, option: str) -> None:
        """And not when a lock is wanted."""
        with pytest.raises(lockkit.ConfigurationError, match="ssl"):
            lockkit.connect(f"mariadb://lockkit@{mariadb.address}/lockkit?{option}")


class TestPostgresql:
    """libpq's options."""

    @FACES
    def test_server_without_tls_is_refused(
        self, postgresql: PostgresServer, lock: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A certificate of an authority asks for TLS, also where the environment would do without."""
        monkeypatch.setenv("PGSSLMODE", "prefer")
        with Rogue(b"", b"N") as rogue, pytest.raises(lockkit.ConfigurationError, match="TLS"):
            lock(f"postgresql://lockkit:{SECRET}@{rogue.address}/app?sslrootcert={postgresql.certificates.ca}")
        assert b"lockkit" not in rogue.got

    @FACES
    def test_password_is_not_told_in_clear_text(self, lock: Callable[[str], None]) -> None:
        """To a server that is not verified."""
        clear = pytest.raises(lockkit.ConfigurationError, match="authentication method")
        # No TLS; AuthenticationCleartextPassword.
        with Rogue(b"", b"N", struct.pack("!cii", b"R", 8, 3)) as rogue, clear:
            lock(f"postgresql://lockkit:{SECRET}@{rogue.address}/app")
        assert b"lockkit" in rogue.got
        assert SECRET.encode() not in rogue.got


class Rogue:
    """Somebody at the server's address who wants the password: says its lines one by one, each after what comes."""

    def __init__(self, *lines: bytes) -> None:
        """Say nothing yet."""
        self.got = b""
        self._lines = lines
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(PATIENCE)
                try:
                    self._talk(connection)
                except OSError:  # the client has left
                    continue

    def _talk(self, connection: socket.socket) -> None:
        for number, line in enumerate(self._lines):
            if number:
                self.got += connection.recv(65_536)
            connection.sendall(line)
        while data := connection.recv(65_536):
            self.got += data


def packet(number: int, payload: bytes) -> bytes:
    """Make a packet of MySQL's protocol."""
    return struct.pack("<I", len(payload))[:3] + bytes([number]) + payload


def mysql_greeting(capabilities: int, plugin: bytes = b"mysql_native_password") -> bytes:
    """Greet as MariaDB does: protocol 4.1, with plugins for the login, and what `capabilities` adds."""
    offered = 0x0000_8208 | 0x0008_0000 | capabilities
    return packet(
        0,
        b"\x0a10.11.0-MariaDB\0" + struct.pack("<I", 7) + b"12345678\0" + struct.pack("<H", offered & 0xFFFF)
        + b"\x2d" + struct.pack("<H", 2) + struct.pack("<H", offered >> 16) + bytes([21]) + bytes(10)
        + b"123456789012\0" + plugin + b"\0",
    )  # fmt: skip
