"""Whom lockkit tells the password: over TLS, only a server whose certificate is for the host that was asked for."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

import lockkit
import lockkit.aio
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisNodes, RedisServer, require, wait_until
from lockkit_tools.servers.redis_groups import Sentinel
from lockkit_tools.servers.tls import Certificates, make_certificates
from tests.doctor.support import SECRET, found

WRONG = "certificate for another host"


@pytest.fixture(autouse=True, scope="module")
def _redis() -> None:
    require("redis", local=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of an authority that has signed a certificate for localhost, and none for 127.0.0.1."""
    return make_certificates(tmp_path_factory.mktemp("tls"), names="DNS:localhost")


@pytest.fixture(scope="module")
def server(certificates: Certificates) -> Iterator[RedisServer]:
    """As a man in the middle would have it, for clients that ask for 127.0.0.1."""
    with RedisServer(tls=True, certificates=certificates, password=SECRET) as node:
        yield node


@contextmanager
def one_node_cluster(certificates: Certificates, settings: dict[str, str]) -> Iterator[RedisServer]:
    """Serve all slots from one node, over TLS."""
    settings = {"cluster-enabled": "yes", "tls-cluster": "yes", **settings}
    with RedisServer(tls=True, certificates=certificates, settings=settings) as node:
        with node.connect() as connection:
            connection.call("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: None if "cluster_state:ok" in connection.call_str("CLUSTER", "INFO") else "not formed")
        yield node


class TlsSentinel(Sentinel):
    """A Sentinel that speaks TLS, also with its master."""

    def prepare(self) -> None:
        """Replace the port in plain text."""
        super().prepare()
        path = self.directory / "sentinel.conf"
        own = self._master.certificates
        path.write_text(
            path.read_text().replace(f"port {self.port}\n", f"port 0\ntls-port {self.port}\n", 1)
            + f"tls-cert-file {own.server}\ntls-key-file {own.server_key}\ntls-ca-cert-file {own.ca}\n"
            "tls-auth-clients optional\ntls-replication yes\n"
        )

    def connect(self, *, timeout: float = 5.0) -> Any:  # noqa: ANN401 - as the base class
        """Over TLS."""
        return RedisServer(port=self.port, tls=True, certificates=self._master.certificates).connect(timeout=timeout)


def outcomes(url: str, **options: Any) -> list[str]:
    """Acquire a lock by both APIs; return their errors of configuration."""
    errors = []
    try:
        with lockkit.connect(url, **options) as client, client.lock("x", timeout=PATIENCE):
            pass
    except lockkit.ConfigurationError as error:
        errors.append(str(error))

    async def scenario() -> None:
        async with lockkit.aio.connect(url, **options) as client, client.lock("x", timeout=PATIENCE):
            pass

    try:
        asyncio.run(scenario())
    except lockkit.ConfigurationError as error:
        errors.append(str(error))
    return errors


def assert_refused(errors: Sequence[str], reason: str = WRONG) -> None:
    """Check that both APIs gave this reason, and no password."""
    assert len(errors) == 2
    assert all(reason in error for error in errors), errors
    assert SECRET not in str(errors)


def test_certificate_for_another_host_is_refused(server: RedisServer) -> None:
    """Of the right authority; with the host that it is for, it works; so it does if the URL turns the check off."""
    url = server.url
    assert_refused(outcomes(url))
    assert outcomes(url.replace("127.0.0.1", "localhost")) == []
    assert outcomes(f"{url}&ssl_check_hostname=off") == []
    assert outcomes(url, ssl_check_hostname=False) == []
    bare = url.partition("?")[0]
    assert_refused(outcomes(bare), "ssl_ca_certs")
    assert outcomes(f"{bare}?ssl_cert_reqs=none") == []
    assert outcomes(bare, ssl_cert_reqs="none") == []


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
@pytest.mark.parametrize("content", ["no certificate", None])
def test_file_that_is_no_certificate_is_named(
    server: RedisServer, tmp_path: Path, option: str, content: str | None
) -> None:
    """It is no outage: nothing is tried for as long as a server may be away."""
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_text(content)

    assert_refused(outcomes(f"{server.url.partition('?')[0]}?{option}={path}"), f"cannot use {option}={path} for TLS: ")


def test_server_that_wants_a_certificate_of_the_client(certificates: Certificates) -> None:
    """The message says so; with a certificate the lock is granted."""
    with RedisServer(tls=True, certificates=certificates) as server:
        with server.connect() as connection:
            connection.call("CONFIG", "SET", "tls-auth-clients", "yes")
        url = server.url.replace("127.0.0.1", "localhost")
        assert_refused(outcomes(url), "wants a certificate of the client")
        own = f"ssl_certfile={certificates.server}&ssl_keyfile={certificates.server_key}"
        assert outcomes(f"{url}&{own}") == []


def test_check_that_would_check_nothing_is_refused(server: RedisServer) -> None:
    """Any certificate is accepted, so the names in it mean nothing."""
    with pytest.raises(lockkit.ConfigurationError, match="leave out ssl_check_hostname"):
        lockkit.connect(f"{server.url}&ssl_cert_reqs=none&ssl_check_hostname=true")


def test_redlock_checks_each_node(certificates: Certificates) -> None:
    """As with one node; with a certificate that a majority does not verify, no lock is taken."""
    with RedisNodes(3, make=lambda: RedisServer(tls=True, certificates=certificates, password=SECRET)) as nodes:
        assert_refused(outcomes(nodes.url))
        assert outcomes(nodes.url.replace("127.0.0.1", "localhost")) == []
        assert outcomes(f"{nodes.url}&ssl_check_hostname=no") == []
        assert "redis-host-unverified" in found(f"{nodes.url}&ssl_check_hostname=no")


def test_cluster_nodes_are_checked_by_the_address_in_the_map(certificates: Certificates) -> None:
    """The map has addresses, unless the nodes announce names."""
    with one_node_cluster(certificates, {"cluster-announce-ip": "127.0.0.1"}) as node:
        url = f"rediss+cluster://localhost:{node.port}?{node.tls_query}"
        assert_refused(outcomes(url), "announced host names")
        assert_refused(outcomes(url.replace("localhost", "127.0.0.1")))
        assert outcomes(f"{url}&ssl_check_hostname=no") == []
        assert "redis-host-unverified" in found(f"{url}&ssl_check_hostname=no")
    announced = {"cluster-announce-hostname": "localhost", "cluster-preferred-endpoint-type": "hostname"}
    with one_node_cluster(certificates, announced) as node:
        assert outcomes(f"rediss+cluster://localhost:{node.port}?{node.tls_query}") == []


def test_sentinel_and_master_are_checked(server: RedisServer, certificates: Certificates) -> None:
    """The Sentinel by its address in the URL, the master by the one that the Sentinel tells."""
    del server
    with RedisServer(tls=True, certificates=certificates) as master:
        sentinel = TlsSentinel(master, quorum=1, down_after_ms=1000)
        with sentinel:
            url = f"rediss+sentinel://localhost:{sentinel.port}/mymaster?{master.tls_query}"
            assert_refused(outcomes(url.replace("localhost", "127.0.0.1")), f"127.0.0.1:{sentinel.port} has a cert")
            assert_refused(outcomes(url), f"127.0.0.1:{master.port} has a certificate for another host")
            assert outcomes(f"{url}&ssl_check_hostname=no") == []
            assert "redis-host-unverified" in found(f"{url}&ssl_check_hostname=no")


def test_doctor_names_each_form_that_is_not_verified(server: RedisServer) -> None:
    """One finding for each way to turn it off; none for a URL that verifies."""
    url = server.url.replace("127.0.0.1", "localhost")
    unverified = {"redis-certificate-unverified", "redis-host-unverified"}
    assert unverified & found(url).keys() == set()
    assert unverified & found(f"{url}&ssl_check_hostname=false").keys() == {"redis-host-unverified"}
    assert unverified & found(f"{url}&ssl_cert_reqs=none").keys() == {"redis-certificate-unverified"}


def test_client_of_the_application_that_does_not_verify(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Its own settings count, and a warning says what they mean."""
    ca = str(server.certificates.ca)
    settings: dict[str, Any] = {"port": server.port, "password": SECRET, "ssl": True, "ssl_ca_certs": ca}
    with caplog.at_level(logging.WARNING, logger="lockkit"):
        with lockkit.from_client(redis.Redis(host="localhost", ssl_check_hostname=True, **settings)) as client:
            client.ping()
        assert caplog.records == []
        with lockkit.from_client(redis.Redis(host="127.0.0.1", ssl_check_hostname=False, **settings)) as client:
            client.ping()

        async def scenario() -> None:
            other = redis.asyncio.Redis(host="127.0.0.1", ssl_check_hostname=False, **settings)
            async with lockkit.aio.from_client(other) as client:
                await client.ping()

        asyncio.run(scenario())
    assert [record.getMessage().count("does not verify") for record in caplog.records] == [1, 1]
    assert SECRET not in caplog.text


@pytest.mark.parametrize("scheme", ["rediss", "redlocks"])
def test_tls_context_is_made_once(
    certificates: Certificates, server: RedisServer, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all connections of a client, and again when a file is replaced: certificates are renewed."""
    made: list[object] = []
    make = ssl.create_default_context

    def counted(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        if not kwargs:  # as redis-py; `RedisServer.connect` names the authority
            made.append(1)
        return make(*args, **kwargs)

    monkeypatch.setattr(ssl, "create_default_context", counted)
    ca = tmp_path / "ca.pem"
    ca.write_bytes(certificates.ca.read_bytes())
    url = f"{scheme}://:{SECRET}@localhost:{server.port}/0?ssl_ca_certs={ca}"

    def drop_connections() -> None:
        with server.connect() as connection:
            connection.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    with lockkit.connect(url) as client:
        for _ in range(3):
            with client.lock("x", timeout=PATIENCE):
                pass
            drop_connections()
        assert len(made) == 1
    made.clear()

    async def scenario() -> None:
        async with lockkit.aio.connect(url) as client:
            for _ in range(3):
                async with client.lock("x", timeout=PATIENCE):
                    pass
                drop_connections()
            before = len(made)
            os.utime(ca, (1, 1))
            async with client.lock("x", timeout=PATIENCE):
                pass
            assert (before, len(made)) == (1, 2)

    asyncio.run(scenario())
