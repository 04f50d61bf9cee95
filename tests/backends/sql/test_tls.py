"""TLS on databases: the server must prove that it is the host of the URL; and who does not gets no password."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import pytest

import lockkit
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import MariaServer, PostgresServer, require
from lockkit_tools.servers.tls import make_certificates

SECRET = "s3cret&"  # noqa: S105 - a test server's

Url: TypeAlias = Callable[[str, str, str], str]
"""Makes a URL of a kind of server, a host and options."""


def lock(url: str) -> None:
    """Take a lock."""
    with lockkit.connect(url) as client, client.lock("x", timeout=PATIENCE):
        pass


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
def test_server_is_accepted(url: Url, kind: str, host: str, options: str) -> None:
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
        lock(url(kind, host, options))


@pytest.mark.parametrize("option", ["sslmode=requird", "target_session_attrs=primari", "keepalives=si"])
def test_misspelled_value_is_no_outage(url: Url, option: str) -> None:
    """The driver reads it when it connects."""
    with pytest.raises(lockkit.ConfigurationError, match="does not accept an option of the URL"):
        lock(url("postgresql", "localhost", option))


def test_connections_of_mariadb_share_one_context(url: Url) -> None:
    """To make one for each takes as long as twenty statements."""
    named = url("mariadb", "localhost", "ssl_ca={ca}&mode=advisory")
    with lockkit.connect(named) as client, client.lock("a") as one, client.lock("b") as two:
        contexts = {lease._record.grant.state.session.connection.dbapi.ctx for lease in (one, two)}
        assert len(contexts) == 1


@contextmanager
def rogue(*lines: bytes) -> Iterator[tuple[str, bytearray]]:
    """Be somebody who wants the password: say the lines one by one, each after what comes; give address and take."""
    got = bytearray()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # the client has left
                connection.settimeout(PATIENCE)
                for number, line in enumerate(lines):
                    got.extend(connection.recv(65_536) if number else b"")
                    connection.sendall(line)
                while data := connection.recv(65_536):
                    got.extend(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", got
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def packet(number: int, payload: bytes) -> bytes:
    """Make a packet of MySQL's protocol."""
    return struct.pack("<I", len(payload))[:3] + bytes([number]) + payload


def mysql_greeting(plugin: bytes = b"mysql_native_password") -> bytes:
    """Greet as MariaDB does, without TLS: protocol 4.1, with plugins for the login."""
    offered = 0x0000_8208 | 0x0008_0000
    return packet(
        0,
        b"\x0a10.11.0-MariaDB\0" + struct.pack("<I", 7) + b"12345678\0" + struct.pack("<H", offered & 0xFFFF)
        + b"\x2d" + struct.pack("<H", 2) + struct.pack("<H", offered >> 16) + bytes([21]) + bytes(10)
        + b"123456789012\0" + plugin + b"\0",
    )  # fmt: skip


CLEAR = b"mysql_clear_password"


@pytest.mark.parametrize(
    ("kind", "lines", "options", "message", "told"),
    [
        # It may be somebody in between who says that there is no TLS.
        ("mariadb", [mysql_greeting()], "ssl_ca={ca}", "TLS", False),
        ("postgresql", [b"", b"N"], "sslrootcert={ca}", "TLS", False),
        # It greets with the plugin for clear text, or asks for it later.
        ("mariadb", [mysql_greeting(CLEAR)], "", "clear text", False),
        ("mariadb", [mysql_greeting(), packet(2, b"\xfe" + CLEAR + b"\0")], "", "clear text", True),
        # No TLS; AuthenticationCleartextPassword.
        ("postgresql", [b"", b"N", struct.pack("!cii", b"R", 8, 3)], "", "authentication method", True),
    ],
)
def test_password_is_not_told_to_who_is_not_verified(
    stranger: Path, monkeypatch: pytest.MonkeyPatch, *,
    kind: str, lines: list[bytes], options: str, message: str, told: bool,
) -> None:  # fmt: skip
    """A certificate of an authority asks for TLS, also where the environment would do without. `told`: the user is."""
    monkeypatch.setenv("PGSSLMODE", "prefer")
    with rogue(*lines) as (address, got), pytest.raises(lockkit.ConfigurationError, match=message):
        lock(f"{kind}://lockkit:{SECRET}@{address}/app?{options.format(ca=stranger)}")
    assert SECRET.encode() not in got
    assert (b"lockkit" in got) == told
