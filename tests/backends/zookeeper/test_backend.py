"""Locks on one ZooKeeper server: layout, options, logins, the application's sessions, and clean-up."""

from __future__ import annotations

import asyncio
import gc
import logging
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import ACL, Id, Permissions, make_digest_acl

import lockkit
import lockkit.aio
from lockkit.backends.zookeeper.backend import ZooKeeperBackend
from lockkit.backends.zookeeper.connection import Connection
from lockkit.backends.zookeeper.errors import connection_failed
from lockkit.backends.zookeeper.nodes import LockNode
from lockkit.backends.zookeeper.options import adopted_arguments
from lockkit.backends.zookeeper.path import contenders, escape_name
from lockkit.runtime import drive
from lockkit.sync import Client
from lockkit_tools.servers import FaultProxy, ZooKeeperServer, require, wait_until
from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.tls import make_certificates
from tests.backends.support import Connect, StubHost, answers, open_backend, refuses
from tests.backends.zookeeper.support import (
    PATIENCE,
    Tree,
    backend_of,
    kazoo_client,
    sessions_of,
)
from tests.tries import beside, busy, until, until_async

LONG = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    """One server, with container nodes that go quickly."""
    require("zookeeper", local=True)
    properties = {"znode.container.checkIntervalMs": "200"}
    with ZooKeeperServer(properties=properties, settings={"maxSessionTimeout": "60000"}) as running:
        yield running


class TestLayout:
    """Where a lock is stored, and who holds it."""

    def test_node_is_laid_out_as_kazoo_does(self, server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
        """The owner, kazoo's word and ZooKeeper's number; the token is the transaction that created it."""
        with connect(server.url).lock("seat/12A", ttl=LONG, metadata="here") as lease:
            (node,) = tree.nodes("/lockkit/seat%2F12A")
            assert node == f"{lease.owner}__lock__{node[-10:]}"
            data, stat = tree.client.get(f"/lockkit/seat%2F12A/{node}")
            assert stat.czxid == lease.token
            assert stat.ephemeralOwner
            assert b'"here"' in data

    @pytest.mark.parametrize(
        ("name", "node"),
        [
            ("a/b", "a%2Fb"),
            ("%", "%25"),
            (".", "%2E"),
            ("..", "%2E%2E"),
            ("...", "..."),
            ("\n\x7f", "%0A%7F"),
            ("\U0001f512", "%F0%9F%94%92"),
            ("\ue000\ufffd", "%EE%80%80%EF%BF%BD"),
            ("é 漢", "é 漢"),
        ],
    )
    def test_names_are_escaped_as_zookeeper_needs_it(self, name: str, node: str) -> None:
        """Only what it refuses, so that people can read the others."""
        assert escape_name(name) == node

    @pytest.mark.parametrize(
        ("children", "queue"),
        [
            (
                ["b__lock__-2147483648", "a__lock__2147483647", "not-a-lock", "c__rlock__-2147483647", "x-0000000001"],
                [("a", None), ("b", None), ("c", None)],
            ),
            (
                [
                    "c__permit__-000000001",
                    "d__permit__0000000000",
                    "a__permit__-1000000000",
                    "c__permit__-000000001__slot1",
                    "b__permit__-999999999",
                ],
                [("a", 0), ("b", None), ("c", 1), ("d", None)],
            ),
        ],
        ids=["end", "filled with zeros"],
    )
    def test_numbers_of_the_queue_have_32_bits_with_a_sign(self, children: list[str], queue: list[object]) -> None:
        """Ten characters, of which the sign is one. Other nodes are left out, kazoo's readers are not."""
        assert [(one.owner, one.slot) for one in contenders(children)] == queue

    def test_chroot_and_prefix_say_where(self, server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
        """Missing directories are created; a lock in another directory is another lock."""
        client = connect(f"{server.url}/team/a?prefix=deep/locks")
        with client.lock("x", ttl=LONG):
            assert len(tree.nodes("/team/a/deep/locks/x")) == 1
            with connect(server.url).lock("x", ttl=LONG, timeout=PATIENCE):
                pass

    def test_nodes_of_another_layout(self, server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
        """An older or later lockkit's, or a foreign client's: unknown data hold, and unknown nodes are left alone."""
        client, directory = connect(f"{server.url}?prefix=layouts"), "/layouts/x"
        node = tree.client.create(f"{directory}/{'0' * 32}__lock__", b"\xff\0", sequence=True, makepath=True)
        others = [
            f"{directory}/later",
            f"{node}__later",
            f"{directory}/{'0' * 32}__permit__0000000001__slot{'9' * 5000}",
        ]
        for other in others:
            tree.client.create(other)
        try:
            (holder,) = client.holders("x")
            assert holder.metadata == {"text": "\ufffd\0"}
            assert busy(client.lock("x", ttl=LONG))
            tree.client.delete(node)
            with client.lock("x", ttl=LONG, timeout=PATIENCE) as lease:
                assert lease.confirm()
            assert len(tree.nodes(directory)) == len(others)
        finally:
            tree.client.delete(directory, recursive=True)

    @pytest.mark.parametrize("data", [b"", b"\xff", b"2 1000 text", b"9" * 5000 + b" text", b"{}"])
    def test_note_of_another_layout(self, server: ZooKeeperServer, tree: Tree, connect: Connect, data: bytes) -> None:
        """It counts as none, and is replaced by the next one."""
        client = connect(f"{server.url}?prefix=notes")
        tree.client.create("/notes+note/x", data, makepath=True)
        backend = backend_of(client)
        try:
            with client.lock("x", ttl=LONG, timeout=PATIENCE) as lease:
                assert drive(backend.read_note("x")) is None
                assert drive(backend.write_note(lease._record.grant, "text", LONG))
                note = drive(backend.read_note("x"))
                assert note is not None
                assert note.text == "text"
        finally:
            tree.client.delete("/notes+note/x")


class TestCleanUp:
    """Nothing is left behind, and no directory is missing."""

    def test_directory_of_an_unused_lock_goes_and_comes_again(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect
    ) -> None:
        """The ensemble removes the container; the next acquisition makes it anew."""
        client = connect(server.url)
        for _ in range(2):
            with client.lock("container", ttl=LONG):
                pass
            wait_until(lambda: "still there" if tree.client.exists("/lockkit/container") else None, timeout=PATIENCE)

    def test_without_cleanup_the_directory_stays(self, server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
        """An old Lock object of kazoo's takes it for granted."""
        with connect(f"{server.url}?cleanup=off&prefix=kept").lock("x", ttl=LONG):
            pass
        with connect(f"{server.url}?prefix=kept").lock("y", ttl=LONG):
            pass
        wait_until(lambda: "still there" if tree.client.exists("/kept/y") else None, timeout=PATIENCE)

        assert tree.client.exists("/kept/x")

    def test_node_that_is_created_after_it_was_looked_for_is_removed(self, server: ZooKeeperServer, tree: Tree) -> None:
        """The creation hung in the network when its request was given up; here an operator plays the network."""
        host = StubHost()
        backend = open_backend(server.url, host)
        assert isinstance(backend, ZooKeeperBackend)
        request = host.request("hung", ttl=1.0)
        session = drive(backend._sessions.get(1.0, host.runtime.now() + PATIENCE))
        request.state, request.uncertain = LockNode(session, session.id, request.owner, "/lockkit/hung", b""), True
        drive(backend.abandon(request))

        tree.client.create(f"/lockkit/hung/{request.owner}__lock__", sequence=True, makepath=True)

        tree.until_empty("/lockkit/hung")
        drive(backend.close())


class TestSessionTimeout:
    """The server bounds what a session may last."""

    def test_session_of_a_ttl_that_is_used_no_more_is_ended(
        self, server: ZooKeeperServer, tree: Tree, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A program that computes its ttls keeps no session for each; what is held or waited for stays."""
        client, other = connect(server.url), connect(server.url)
        with client.lock("kept", ttl=20) as lease:
            with other.lock("awaited", ttl=LONG):
                waiting = beside(client.lock("awaited", ttl=21).acquire)
                tree.until_waiting("/lockkit/awaited", 2)
                for ttl in (1, 1.5, 2):
                    client.lock("computed", ttl=ttl).acquire().release()
                monkeypatch.setattr("lockkit.backends.zookeeper.sessions.IDLE_SECONDS", 0.0)
                ended = [session for session in sessions_of(client) if session.requested_seconds < 20]

                client.lock("computed", ttl=5).acquire().release()

                assert len(ended) == 3
                assert sorted(session.requested_seconds for session in sessions_of(client)) == [5, 20, 25]
                wait_until(lambda: "not ended" if any(one.id for one in ended) else None, timeout=PATIENCE)
                assert lease.confirm()
            waiting.result(PATIENCE).release()

    def test_extending_beyond_the_session_is_unsupported(self, server: ZooKeeperServer, connect: Connect) -> None:
        """A node cannot move to another session; the lease stays as it was."""
        client = connect(server.url)
        lease = client.lock("extended", ttl=20, renew=False).acquire(PATIENCE)

        with pytest.raises(lockkit.Unsupported, match=r"'extended'.*40 s.*20 s"):
            lease.extend(40)

        assert 10 < lease.remaining() < 20
        lease.release()

    def test_node_is_removed_though_all_tasks_were_cancelled(self, server: ZooKeeperServer, tree: Tree) -> None:
        """By an application that goes on: its session lives as long as the process."""

        async def cancel() -> None:
            async with lockkit.aio.connect(server.url) as client:
                lease = await client.lock("cancelled", ttl=2, renew=False).acquire(PATIENCE)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                await until_async(lambda: not tree.nodes("/lockkit/cancelled"))
                assert lease.lost

        asyncio.run(cancel())


class TestAdopted:
    """``from_client``."""

    def test_sessions_are_lockkit_s_own(self, server: ZooKeeperServer, tree: Tree) -> None:
        """The application's client stays as it is, started or not; a chroot that is missing is created."""
        with kazoo_client(server.address, timeout=20) as started:
            for chroot, theirs in (("", started), ("/of/theirs", KazooClient(f"{server.address}/of/theirs"))):
                with lockkit.from_client(theirs) as client, client.lock("own", ttl=50, timeout=PATIENCE) as lease:
                    assert client.url == f"zookeeper://{server.address}{chroot}"
                    assert lease.ttl == 50
                    assert len(tree.nodes(f"{chroot}/lockkit/own")) == 1
                assert not theirs.state_listeners
            asyncio.run(self.use(started))
            assert started.connected

    async def use(self, theirs: KazooClient) -> None:
        """The async API takes the same client."""
        async with lockkit.aio.from_client(theirs) as client, client.lock("x", ttl=5) as lease:
            assert await lease.confirm()

    @pytest.mark.parametrize("option", [{"acl": "creator"}, {"auth": "sasl"}, {"use_ssl": True}], ids=str)
    def test_options_without_effect_are_refused(self, option: dict[str, Any]) -> None:
        """A client with other rights than those that the caller asked for would be worse."""
        with pytest.raises(lockkit.ConfigurationError, match=f"the option '?{next(iter(option))}"):
            lockkit.from_client(KazooClient(), **option)

    def test_login_is_the_client_s(self, server: ZooKeeperServer, tree: Tree) -> None:
        """And so are its rights, for nodes, and for directories that are made for them; TLS and SASL are passed on."""
        rights = [make_digest_acl("ada", "s3cret", all=True)]
        login = {"mechanism": "DIGEST-MD5", "username": "ada", "password": "s3cret"}
        with (
            kazoo_client(server.address, auth_data=[("digest", "ada:s3cret")], default_acl=rights) as theirs,
            lockkit.from_client(theirs, prefix="adopted") as client,
            client.lock("x", ttl=5),
        ):
            (node,) = theirs.get_children("/adopted/x")
            assert {theirs.get_acls(path)[0] == rights for path in ("/adopted/x", f"/adopted/x/{node}")} == {True}
            assert tree.client.exists(f"/adopted/x/{node}")
        given = KazooClient(use_ssl=True, ca="ca.pem", check_hostname=True, sasl_options=login)
        passed = adopted_arguments(given, {"acl": None, "auth": "digest"})
        assert {
            "use_ssl": True,
            "ca": "ca.pem",
            "check_hostname": True,
            "sasl_options": login,
        }.items() <= passed.items()


def guarded_server(directory: Path) -> ZooKeeperServer:
    """A server that knows Ada by SASL, to be entered."""
    require("zookeeper", local=True)
    login = directory / "jaas.conf"
    module = "org.apache.zookeeper.server.auth.DigestLoginModule"
    login.write_text(f'Server {{ {module} required user_ada="s3cret"; }};\n')
    properties = {
        "java.security.auth.login.config": str(login),
        "zookeeper.authProvider.1": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
    }
    return ZooKeeperServer(properties=properties)


class TestAccess:
    """Logins, rights and TLS."""

    def test_creator_s_nodes_are_closed_to_others(self, server: ZooKeeperServer, connect: Connect) -> None:
        """With the same login the lock is shared; without, the error says what is missing, and no password."""
        url = f"zookeeper://ada:s3cret@{server.address}?prefix=closed&acl=creator"
        stranger = f"zookeeper://bob:0ther@{server.address}?prefix=closed"
        with connect(url).lock("x", ttl=LONG):
            assert busy(connect(url).lock("x", ttl=LONG))
            refused = connect(stranger)
            with pytest.raises(lockkit.ConfigurationError, match="denies this user") as raised:
                refused.lock("x", ttl=LONG).acquire(timeout=5)
            assert not backend_of(refused)._removals._nodes  # nothing was created, so nothing has to be removed
        assert "0ther" not in f"{raised.value!r} {raised.value.__cause__!r}"

    def test_login_closes_the_nodes_to_others(self, server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
        """Unless the option acl says otherwise."""
        cases: list[tuple[str, dict[str, Any], bool]] = [
            ("ada:s3cret@", {}, False),
            ("", {"auth_data": [("digest", "ada:s3cret")]}, False),
            ("ada:s3cret@", {"acl": "creator"}, False),
            ("ada:s3cret@", {"acl": "open"}, True),
            ("", {}, True),
        ]
        for number, (login, options, is_open) in enumerate(cases):
            client = connect(f"zookeeper://{login}{server.address}?prefix=mine{number}", **options)
            with client.lock("x", ttl=LONG), nullcontext() if is_open else pytest.raises(NoAuthError):
                assert len(tree.nodes(f"/mine{number}/x")) == 1

    def test_list_of_rights(self, server: ZooKeeperServer, connect: Connect) -> None:
        """As text in the URL, or kazoo's objects."""
        digest = make_digest_acl("ada", "s3cret", all=True)
        text = f"digest:{digest.id.id.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}:cdrwa"
        login = f"zookeeper://ada:s3cret@{server.address}"
        clients = connect(f"{login}?prefix=list0&acl={text}"), connect(f"{login}?prefix=list1", acl=[digest])
        with kazoo_client(server.address, auth_data=[("digest", "ada:s3cret")]) as operator:
            for number, client in enumerate(clients):
                with client.lock("x", ttl=LONG):
                    assert operator.get_acls(f"/list{number}/x")[0] == [digest]

    def test_note_that_may_not_be_written(self, server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
        """The holder gets the error: the engine repeats what is only unavailable for as long as the lease is held."""
        tree.client.create("/noted+note", acl=[ACL(Permissions.READ, Id("world", "anyone"))])
        client = connect(f"zookeeper://{server.address}?prefix=noted")

        with (
            client.lock("x", ttl=LONG) as lease,
            pytest.raises(lockkit.ConfigurationError, match="denies this user a right"),
        ):
            drive(backend_of(client).write_note(lease._record.grant, "text", LONG))

    def test_login_by_sasl(self, tmp_path: Path, connect: Connect) -> None:
        """DIGEST-MD5; a wrong password is a ConfigurationError, at once, and without the password."""
        with guarded_server(tmp_path) as guarded:
            client = connect(f"zookeeper://ada:s3cret@{guarded.address}?auth=sasl&acl=creator")
            with client.lock("x", ttl=20) as lease:
                assert lease.confirm()
            wrong = connect(f"zookeeper://ada:wr0ng@{guarded.address}?auth=sasl")
            with pytest.raises(lockkit.ConfigurationError, match="login") as raised:
                wrong.lock("x", ttl=20).acquire(timeout=10)
            assert "wr0ng" not in str(raised.value)
            client.close()

    def test_member_that_fails_during_a_login_by_sasl_is_tried_again(
        self, tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It hangs, or closes the connection before it was shown anything: that does not make the password wrong."""
        with guarded_server(tmp_path) as guarded, FaultProxy(guarded.host, guarded.port) as proxy:
            faults: list[Callable[[], object]] = [proxy.blackhole, proxy.cut]
            log_in = Connection._log_in_by_sasl

            def log_in_or_fail(*arguments: Any) -> None:
                fault = faults.pop() if faults else proxy.heal
                fault()
                try:
                    log_in(*arguments)
                finally:
                    proxy.heal()

            monkeypatch.setattr(Connection, "_log_in_by_sasl", log_in_or_fail)

            client = connect(f"zookeeper://ada:s3cret@{proxy.address}?auth=sasl")
            client.lock("x", ttl=20).acquire(PATIENCE).release()

            assert not faults
            client.close()

    def test_certificates(self, tmp_path: Path) -> None:
        """
        The server's is of a known authority, and for its host unless the URL says otherwise, or it is refused.

        The client has one that the server trusts; and both use TLS, or it looks like a server that refuses clients.
        """
        require("zookeeper", local=True)
        secure = ZooKeeperServer(tls=True)
        secure.certificate_names = "DNS:other.example"
        with secure:
            with lockkit.connect(f"{secure.url}&check_hostname=0") as careless:
                until(lambda: answers(careless.ping))  # its first handshake may take seconds
                with careless.lock("x", ttl=20) as lease:
                    assert lease.confirm()
            made, address = secure.certificates, f"zookeeper://{secure.host}:{secure.port_for('tls')}"
            trusting = f"use_ssl=on&check_hostname=0&ca={made.ca}"
            refuses(f"{address}?use_ssl=on", "not trusted")
            refuses(f"{address}?{trusting}", "certificate of this client.*give certfile and keyfile")
            other = make_certificates(tmp_path)
            pair = f"certfile={other.client}&keyfile={other.client_key}"
            refuses(f"{address}?{trusting}&{pair}", "certificate of this client")
            for one_sided in (address, f"zookeeper://{secure.address}?{trusting}"):
                refuses(one_sided, "only one side use TLS", lockkit.BackendUnavailable)
            refuses(secure.url, "for another host.*check_hostname")

    def test_log_has_no_password_and_no_noise(
        self, proxy: FaultProxy, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Neither kazoo nor lockkit logs the login. lockkit says what an outage means for locks, the rest is DEBUG."""
        caplog.set_level(1)
        caplog.set_level(logging.DEBUG, "lockkit")
        client = connect(f"zookeeper://ada:s3cret@{proxy.address}?prefix=erased")
        lease = client.lock("quiet", ttl=LONG).acquire(PATIENCE)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(lockkit.BackendUnavailable):
            client.ping()
        proxy.heal()
        (session,) = sessions_of(client)
        wait_until(lambda: None if session.usable else "not back", timeout=PATIENCE)
        lease.release()
        client.close()

        assert {record.levelno for record in caplog.records} == {logging.DEBUG}
        assert not [record for record in caplog.records if "s3cret" in record.getMessage()]


class TestBadInput:
    """What is wrong is reported at once."""

    @pytest.mark.parametrize(
        ("url", "problem"),
        [
            ("zookeeper:", "write zookeeper://"),
            ("zookeeper://h/a/../b", "not a ZooKeeper path"),
            ("zookeeper://ada@h", "user and a password"),
            ("zookeeper://ada:p@h1,bob:p@h2", "the same user and password"),
            ("zookeeper://h?prefix=/", "path such as"),
            ("zookeeper://h?prefix=a/./b", "path such as"),
            ("zookeeper://h?prefix=zookeeper", "path such as"),
            ("zookeeper://h?acl=nobody", "creator"),
            ("zookeeper://h?acl=digest:a:b:x", "creator"),
            ("zookeeper://h?auth=magic", "digest, sasl"),
            ("zookeeper://h?auth=sasl", "user and password"),
            ("zookeeper://h?timeout=soon", "timeout"),
            ("zookeeper://h?randomize_hosts=perhaps", "true"),
            ("zookeeper://h?verify_certs=0&check_hostname=maybe", "true"),
            ("zookeeper://h?auth_data=digest:a:b", "auth_data= of connect.. is a list of pairs"),
            ("zookeeper://h?auth=sasl&sasl_options=GSSAPI", "sasl_options= of connect.. is a mapping"),
            ("zookeeper://h?ca=/some/file", "ca is for TLS: add use_ssl=1"),
            ("zookeeper://h?check_hostname=1", "check_hostname is for TLS"),
            ("zookeeper://h?use_ssl=1&verify_certs=0&check_hostname=1", "verify_certs=0 does not check"),
            ("zookeeper://h?use_ssl=1&keyfile=/does/not/exist", "option keyfile cannot be read"),
        ],
    )
    def test_refused_url(self, url: str, problem: str) -> None:
        """Nothing is sent."""
        with pytest.raises(lockkit.ConfigurationError, match=problem):
            lockkit.connect(url)
        with pytest.raises(lockkit.ConfigurationError, match="creator"):
            lockkit.connect("zookeeper://h", acl=5)

    @pytest.mark.parametrize(
        ("login", "options"), [("ada:pw@", {"auth": "sasl"}), ("", {"sasl_options": {"mechanism": "GSSAPI"}})]
    )
    def test_sasl_without_its_package(
        self, monkeypatch: pytest.MonkeyPatch, login: str, options: dict[str, Any]
    ) -> None:
        """Kazoo does not require it. Its thread would end, again and again, as if the server were down."""
        monkeypatch.setitem(sys.modules, "puresasl", None)

        with pytest.raises(lockkit.ConfigurationError, match="pure-sasl"):
            lockkit.connect(f"zookeeper://{login}h", **options)

    def test_certificates_of_no_use(self, tmp_path: Path) -> None:
        """Also those of a client of kazoo's; and nobody is asked for the password of a key at the terminal."""
        made, garbage, locked = make_certificates(tmp_path), tmp_path / "garbage", tmp_path / "locked"
        garbage.write_text("no certificate")
        key = ["-in", str(made.client_key), "-aes256", "-passout", "pass:s3cret", "-out", str(locked)]
        subprocess.run([str(find_program("openssl")), "ec", *key], check=True, capture_output=True)
        for pair in (
            f"certfile={garbage}&keyfile={made.client_key}",
            f"certfile={made.client}",
            f"keyfile={made.client_key}",
            f"certfile={made.client}&keyfile={made.server_key}",
            f"certfile={made.client}&keyfile={locked}",
            f"certfile={made.client}&keyfile={locked}&keyfile_password=wr0ng",
        ):
            with pytest.raises(lockkit.ConfigurationError, match="certfile and keyfile must be a certificate and its"):
                lockkit.connect(f"zookeeper://h?use_ssl=1&{pair}")
        with pytest.raises(lockkit.ConfigurationError, match="option ca must have certificates"):
            lockkit.connect(f"zookeeper://h?use_ssl=1&ca={garbage}")
        lockkit.connect(
            f"zookeeper://h?use_ssl=1&certfile={made.client}&keyfile={locked}&keyfile_password=s3cret"
        ).close()
        theirs = KazooClient("127.0.0.1:1", use_ssl=True, ca=str(garbage))
        with (
            lockkit.from_client(theirs) as client,
            pytest.raises(lockkit.ConfigurationError, match="option ca must have certificates"),
        ):
            client.ping()

    def test_too_many_connections(self, connect: Connect) -> None:
        """The error names the server's limit: a host with many processes reaches it."""
        with ZooKeeperServer(settings={"maxClientCnxns": "1"}) as alone:
            url = f"zookeeper://{alone.address}"
            first = connect(url)
            first.ping()
            with pytest.raises(lockkit.BackendUnavailable, match="maxClientCnxns"):
                connect(url).lock("x", ttl=LONG).acquire(1)
            first.ping()

    def test_directory_that_is_an_ephemeral_node(self, server: ZooKeeperServer, tree: Tree, connect: Connect) -> None:
        """Another client's node is where the lock's directory should be."""
        tree.client.ensure_path("/odd")
        tree.client.create("/odd/x", ephemeral=True)

        with pytest.raises(lockkit.ConfigurationError, match="ephemeral"):
            connect(f"{server.url}?prefix=odd").lock("x", ttl=LONG).acquire(timeout=5)


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "x"), ConnectionResetError(104, "x"), ssl.SSLEOFError(8, "x"), ssl.SSLZeroReturnError()],
)
def test_connection_that_is_closed_at_once_is_told_in_each_of_its_forms(error: Exception) -> None:
    """Which one kazoo gets depends on whether it writes or reads when the member closes."""
    assert "maxClientCnxns" in str(connection_failed(error, "h1:2181"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] x", "certificate of this client"),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] x", "certificate of this client"),
        ("[SSL: WRONG_VERSION_NUMBER] x", "does not use TLS at this port"),
    ],
)
def test_refusals_of_tls_by_other_servers(text: str, problem: str) -> None:
    """Of other versions of Java, and of a port that serves something else."""
    failed = connection_failed(ssl.SSLError(1, text), "h1:2181")
    assert isinstance(failed, lockkit.ConfigurationError)
    assert problem in str(failed)


def test_several_hosts_are_an_ensemble() -> None:
    """Which may lose one; a single server is no ensemble."""
    with lockkit.connect("zookeeper://h1,h2,h3") as ensemble, lockkit.connect("zk://h1") as single:
        assert ensemble.capabilities.survives_node_loss
        assert not single.capabilities.survives_node_loss


def test_client_that_is_dropped_leaves_no_thread(
    server: ZooKeeperServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not closed. Its connection ends with it, and the server ends the session."""
    monkeypatch.setattr("lockkit.engine.renewal.LINGER", 0.1)
    monkeypatch.setattr("lockkit.backends.zookeeper.nodes.LINGER_SECONDS", 0.1)
    with connect(server.url).lock("theirs", ttl=LONG):
        before = {*threading.enumerate()}
        client: Client | None = lockkit.connect(server.url)
        assert client is not None
        # Its threads sleep until something would have been due for its lease.
        with client.lock("ours", ttl=6) as lease:
            # Both nodes are watched.
            lease.extend()
            with pytest.raises(lockkit.LockTimeout):
                client.lock("theirs", ttl=6).acquire(timeout=0.1)
        del lease
        client = None

        def problem() -> str | None:
            gc.collect()
            left = [one for one in threading.enumerate() if one not in before and one.name == "lockkit-zookeeper"]
            return f"{left} are left" if left else None

        wait_until(problem, timeout=PATIENCE)
