"""Locks on etcd: keys, sessions, options, logins, forks, and foreign clients that lock the same keys."""

from __future__ import annotations

import asyncio
import base64
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import etcd3gw
import grpc
import grpc.aio
import pyetcd
import pytest

import lockkit
import lockkit.aio
from lockkit.backend import apart
from lockkit.backends.etcd import backend as etcd
from lockkit.backends.etcd import keys
from lockkit.backends.etcd.backend import EtcdBackend
from lockkit.backends.etcd.cluster import WATCH, CallError
from lockkit.backends.etcd.errors import translate
from lockkit.backends.etcd.keys import Contender
from lockkit.backends.etcd.session import Sessions
from lockkit.engine.settings import drift_margin
from lockkit.runtime import drive, monotonic
from lockkit.testing.face_driver import FACES, FaceDriver
from lockkit.testing.target import Face
from lockkit_tools.servers import EtcdServer, require, wait_until
from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.tls import make_certificates
from tests.backends.etcd.support import (
    WAITING_SECONDS,
    begin,
    calls_of,
    etcdctl_runs,
    leases_of,
    queue_of,
    session_of,
    until_waiting,
)
from tests.backends.support import Connect, play, refuses
from tests.tries import busy, have_time_to_answer, until_renewed

TTL = 3.0
LONG = 120.0
LOGIN = 'grpc_method="Authenticate"'
PATIENCE = 30.0


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdServer]:
    """A member that requires a login, and forgets it after two seconds."""
    require("etcd", local=True)
    with EtcdServer(settings={"auth-token-ttl": "2"}) as member:
        member.enable_auth("se cret")
        yield member


def encoded(text: str) -> str:
    """As the JSON gateway wants bytes."""
    return base64.b64encode(text.encode()).decode()


class TestKeys:
    """What is stored in etcd."""

    def test_layout_is_that_of_etcdctl(self, server: EtcdServer, connect: Connect) -> None:
        """Prefix, escaped name, id of the lease in hexadecimal; the token is the create_revision."""
        client = connect(prefix="app/locks")

        with client.lock("a/b%é", ttl=LONG) as lease:
            (key,) = queue_of(server, "app/locks/")

            assert key == f"app/locks/a%2Fb%25é/{session_of(server, key):x}"
            assert lease.token == int(server.status()["header"]["revision"])
        assert queue_of(server, "app/locks/") == []

    @pytest.mark.parametrize(
        ("value", "metadata"),
        [(b"\xff\0", {"text": "\ufffd\0"}), (b"2 " + b"0" * 32 + b" {}", {"text": "2 " + "0" * 32 + " {}"})],
        ids=["no text", "another form"],
    )
    def test_values_of_another_layout(
        self, server: EtcdServer, connect: Connect, value: bytes, metadata: object
    ) -> None:
        """An older or later lockkit's, or a foreign client's: they hold the lock, and nothing fails."""
        client, key = connect(prefix="layouts"), encoded("layouts/x/17")
        server.call("/v3/kv/put", key=key, value=base64.b64encode(value).decode())
        try:
            (holder,) = client.holders("x")
            assert holder.metadata == metadata
            assert busy(client.lock("x", ttl=LONG))
        finally:
            server.call("/v3/kv/deleterange", key=key)

    def test_slots_of_another_layout(self, server: EtcdServer, connect: Connect) -> None:
        """Each counts as a permit."""
        client = connect(prefix="slots")
        for name in ("s1x", f"s{'9' * 5000}"):
            server.call("/v3/kv/put", key=encoded(f"slots+sem/pool/{name}"), value=encoded("?"))

        with client.semaphore("pool", limit=3, ttl=LONG) as permit:
            held = drive(client._engine.client.ready().holders(apart("sem", "pool")))
            assert sorted(one.slot is None for one in held) == [False, True, True]
            assert busy(client.semaphore("pool", limit=3, ttl=LONG))
            assert permit.confirm()

    def test_data_of_an_application_is_not_broken(self, server: EtcdServer, connect: Connect) -> None:
        """Keys below a lock's that no client of locks has made are deleted by force only."""
        client = connect(prefix="app")
        lease_id = server.etcdctl("lease", "grant", "600").split()[1]
        server.etcdctl("put", "app/services/web", "kept")
        server.etcdctl("put", f"--lease={lease_id}", "app/leased/0123456789abcdef", "kept")
        lease = client.lock("mine", ttl=LONG, raise_on_lost=False).acquire()

        for name in ("services", "leased"):
            assert busy(client.lock(name))
            with pytest.raises(lockkit.LockError, match=rf"'{name}'.* was not broken.*'app/{name}/.*force=True"):
                client.break_lock(name)
        assert [key.partition("/")[0] for key in queue_of(server, "app/")] == ["app"] * 3
        lease.extend(LONG + 30)  # its key moves to another etcd lease
        assert client.break_lock("mine")
        assert not lease.confirm()
        for name in ("services", "leased"):
            assert client.break_lock(name, force=True)
        assert queue_of(server, "app/") == []

    def test_locks_of_one_ttl_share_a_lease(self, server: EtcdServer, connect: Connect) -> None:
        """Another ttl has another one; closing the client takes a call for each, and leaves none."""
        before = leases_of(server)
        client = connect(prefix="shared ttl")
        leases = [client.lock(name, ttl=LONG).acquire() for name in ("a", "b", "c")]
        leases.append(client.lock("d", ttl=LONG + 1).acquire())
        for _ in range(20):
            client.lock("again", ttl=LONG).acquire().release()

        assert len(leases_of(server) - before) == 2

        calls = calls_of(server)
        client.close()
        assert calls_of(server) - calls == 2
        assert leases_of(server) - before == set()
        assert queue_of(server, "shared ttl/") == []
        assert not any(lease.held for lease in leases)

    def test_many_leases_are_renewed_in_batches(self, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        """They need more operations than one transaction may have."""
        monkeypatch.setattr(keys, "BATCH", 3)
        client = connect()
        leases = [client.lock(f"many {number}", ttl=LONG).acquire(PATIENCE) for number in range(8)]

        until_renewed(*leases, begin=client._engine.confirm_soon)

        assert leases[-1].confirm()
        client.close()

    def test_warning_when_the_cluster_raises_a_short_ttl(self, caplog: pytest.LogCaptureFixture) -> None:
        """The cluster's shortest lease is one and a half election timeouts."""
        settings = {"heartbeat-interval": "200", "election-timeout": "2000"}
        with EtcdServer(settings=settings) as member, lockkit.connect(member.url) as client:
            lease = client.lock("x", ttl=1).acquire()

            assert lease.ttl == 3
            client.lock("y", ttl=1).acquire().release()
            lease.extend()
            assert len(leases_of(member)) == 1  # of either ttl
            lease.release()
        assert [record.levelname for record in caplog.records if "keeps locks for 3 s" in record.getMessage()] == [
            "WARNING"
        ]


class TestDeadlines:
    """What the client believes about the time that is left."""

    def test_lease_of_a_session_that_was_kept_alive_before_has_the_rest(self, connect: Connect) -> None:
        """A second lock of the same ttl shares the session, whose ttl began with the first."""
        client = connect()
        first = client.lock("anchor 1", ttl=60).acquire()
        time.sleep(0.5)
        second = client.lock("anchor 2", ttl=60).acquire()

        left = first.remaining()
        assert second.remaining() - left < 0.1
        first.release()
        second.release()

    def test_old_session_is_kept_alive_before_it_grants(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both for a contender that acquires at once, and for one that has waited."""
        monkeypatch.setattr(keys, "STALE_SHARE", 0.02)
        client, other = connect(), connect()
        leases = [client.lock("old 1", ttl=12, renew=False).acquire()]
        held = other.lock("old 3", ttl=LONG).acquire()
        waiting = begin(client.lock("old 3", ttl=12))
        until_waiting(other, "old 3")

        for has_waited in (False, True):
            time.sleep(0.5)
            began = monotonic()
            if has_waited:
                held.release()
            leases.append(waiting.result(WAITING_SECONDS) if has_waited else client.lock("old 2", ttl=12).acquire())
            assert leases[-1]._record.valid_until >= began + 12 - drift_margin(12)
        for lease in leases:
            lease.release()


def test_grant_whose_time_cannot_be_corrected_stands(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started, which matters to nobody but those who list the holders."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "lockkit-etcd-since":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(etcd, "SINCE_EXACT_SECONDS", -1.0)

    with connect().lock("since", ttl=LONG, timeout=PATIENCE) as lease:
        assert lease.confirm()


class TestForeignClients:
    """Other libraries that lock the same keys, or lend their connection."""

    def test_etcdctl_waits_for_lockkit_and_lockkit_for_etcdctl(self, server: EtcdServer, connect: Connect) -> None:
        """One queue, in order of arrival: lockkit, etcdctl, lockkit, etcdctl."""
        client, behind = connect(), connect()
        lease = client.lock("shared", ttl=LONG).acquire()
        order: list[str] = []
        with etcdctl_runs(server, "lock", "lockkit/shared") as first:
            until_waiting(client, "shared", 1)
            waiting = begin(behind.lock("shared", ttl=LONG))
            until_waiting(client, "shared", 2)
            with etcdctl_runs(server, "lock", "lockkit/shared") as second:
                until_waiting(client, "shared", 3)

                lease.release()
                key = first.stdout.readline().strip()
                order.append(key)
                assert not waiting.done()
                (holder,) = client.holders("shared")
                assert (holder.owner, holder.waiters) == (key.rpartition("/")[2], 2)
                assert holder.token is not None
                assert holder.token > lease.token
                first.terminate()
                assert waiting.result(WAITING_SECONDS).token > holder.token
                waiting.result(WAITING_SECONDS).release()
                assert second.stdout.readline().startswith("lockkit/shared/")
                second.terminate()

    def test_etcdctl_waits_for_our_leader_and_we_for_theirs(
        self, server: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One queue; each sees the other's leader."""
        have_time_to_answer(monkeypatch)
        client = connect()
        contest = client.election("elected", ttl=LONG, value="ours:80")
        ours = contest.campaign(PATIENCE)
        with etcdctl_runs(server, "elect", "lockkit/elected", "theirs:80") as theirs:
            until_waiting(client, "elected", 1)
            assert not ours.must_stop()

            ours.resign()

            key, value = theirs.stdout.readline().strip(), theirs.stdout.readline().strip()
            assert (key.rpartition("/")[0], value) == ("lockkit/elected", "theirs:80")
            leader = contest.leader()
            assert leader is not None
            assert (leader.owner, leader.value) == (key.rpartition("/")[2], "theirs:80")
            assert leader.term is not None
            assert leader.term > ours.token
            with pytest.raises(lockkit.LockTimeout):
                contest.campaign(timeout=0)

        with contest.campaign(PATIENCE) as next_term:
            assert next_term.token > leader.term

    def test_names_are_read_in_pages(
        self, server: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each once however many wait for it, etcdctl's too; not keys that belong to no lock."""
        monkeypatch.setattr("lockkit.backends.etcd.backend.KEYS_PAGE", 2)
        client = connect()
        for key in ("p-", "p-%zz/1", "p-%2f/1", "p-x/1", "p-x/2", "p-x/3", "p-x/4", "p-y-/1", "p-y/1", "p-y/2/3"):
            server.etcdctl("put", f"lockkit/{key}", "a foreign client")
        lease = client.lock("p-own/é", ttl=LONG).acquire()
        try:
            with etcdctl_runs(server, "lock", "lockkit/p-theirs") as theirs:
                assert theirs.stdout.readline()

                assert list(client.names("p-")) == ["p-own/é", "p-theirs", "p-x", "p-y-", "p-y"]
                assert client.break_lock("p-theirs")
                client.lock("p-theirs", ttl=LONG).acquire(PATIENCE).release()
        finally:
            lease.release()
            server.etcdctl("del", "--prefix", "lockkit/p-")

    def test_channel_and_clients_of_others_are_used(self, server: EtcdServer) -> None:
        """In one process with those libraries; their connections stay open."""
        with grpc.insecure_channel(server.address) as channel:
            theirs = pyetcd.client(host=server.host, port=server.port)
            gateway = etcd3gw.client(host=server.host, port=server.port)
            for brought in (channel, theirs, gateway):
                with lockkit.from_client(brought) as client:
                    assert server.address in client.url
                    with client.lock("brought", ttl=LONG):
                        assert len(queue_of(server, "lockkit/brought/")) == 1
            assert theirs.get("nothing")[0] is None
            with lockkit.from_client(channel) as client:
                client.ping()
            theirs.close()

    def test_wrong_channel_is_refused(self, server: EtcdServer) -> None:
        """One for the other API: the message names the right one. Certificates for one: it has its own."""
        with (
            grpc.insecure_channel("127.0.0.1:1") as channel,
            pytest.raises(lockkit.ConfigurationError, match="ca is for"),
        ):
            lockkit.from_client(channel, ca="/some/file")

        async def scenario() -> None:
            async with grpc.aio.insecure_channel(server.address) as channel:
                async with lockkit.aio.from_client(channel) as client, client.lock("aio", ttl=LONG):
                    pass
                with pytest.raises(lockkit.ConfigurationError, match=r"lockkit\.from_client needs a channel of grpc"):
                    lockkit.from_client(channel)
            with (
                grpc.insecure_channel(server.address) as channel,
                pytest.raises(lockkit.ConfigurationError, match=r"grpc\.aio"),
            ):
                lockkit.aio.from_client(channel)

        asyncio.run(scenario())

    # What grpc.aio begins in the other loop.
    @pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
    def test_channel_of_another_event_loop_is_refused(self, server: EtcdServer) -> None:
        """The message says so: a module may make it before the program's loop begins."""

        async def make() -> grpc.aio.Channel:
            return grpc.aio.insecure_channel(server.address)

        async def use(channel: grpc.aio.Channel) -> None:
            async with lockkit.aio.from_client(channel) as client:
                with pytest.raises(lockkit.ConfigurationError, match="another event loop"):
                    await client.lock("x", ttl=LONG).acquire(PATIENCE)

        other = asyncio.new_event_loop()
        channel = other.run_until_complete(make())
        asyncio.run(use(channel))
        other.run_until_complete(channel.close())
        other.close()

    def test_channel_that_the_application_closes_is_an_outage(self, server: EtcdServer) -> None:
        """With both APIs. grpc.aio cancels the calls, which must not look like a cancelled task."""
        with lockkit.from_client(channel := grpc.insecure_channel(server.address)) as client:
            client.ping()
            channel.close()
            with pytest.raises(lockkit.BackendUnavailable):
                client.ping()

        async def scenario() -> None:
            channel = grpc.aio.insecure_channel(server.address)
            async with lockkit.aio.from_client(channel) as client:
                server.pause()
                asking = asyncio.create_task(client.ping())
                await asyncio.sleep(0.2)
                await channel.close()
                server.resume()
                for task in (asking, client.ping()):
                    with pytest.raises(lockkit.BackendUnavailable):
                        await task

        asyncio.run(scenario())


class TestWatch:
    """The stream that wakes waiters."""

    @pytest.mark.parametrize("face", FACES)
    def test_member_that_refuses_watches(self, server: EtcdServer, monkeypatch: pytest.MonkeyPatch, face: Face) -> None:
        """As a proxy may: a waiter looks twice a second, where without a pause it would look hundreds of times."""
        monkeypatch.setattr(WATCH, "path", "/etcdserverpb.Watch/Refused")

        async def body(driver: FaceDriver) -> None:
            holder, client = await driver.connect(), await driver.connect()
            lease = await holder.lock("refused", ttl=LONG).acquire()
            waiting = driver.spawn(client.lock("refused", ttl=LONG).acquire(PATIENCE))
            await driver.until_waiting(client, "refused")
            before = calls_of(server)
            await driver.sleep(1)
            assert calls_of(server) - before <= 40
            await lease.release()
            await (await waiting.result()).release()

        play(face, server.url, body)


def client_with(
    guarded: EtcdServer, connect: Connect, name: str, rights: Mapping[str, str], **options: Any
) -> lockkit.Client:
    """Make a client with a login of its own that has some rights, by the prefix of the keys."""
    as_root = "--user=root:se cret"
    for words in (("role", "add", name), ("user", "add", f"{name}:secret"), ("user", "grant-role", name, name)):
        guarded.etcdctl(as_root, *words)
    for prefix, right in rights.items():
        guarded.etcdctl(as_root, "role", "grant-permission", name, right, prefix, "--prefix=true")
    return connect(f"etcd://{name}:secret@{guarded.address}", **options)


class TestLogin:
    """User, password and certificates."""

    def test_token_that_ran_out_is_renewed(self, guarded: EtcdServer, connect: Connect) -> None:
        """For calls and for the watch; a lease outlives the login."""
        url = f"etcd://root:se%20cret@{guarded.address}"
        holder, waiter = connect(url), connect(url)
        lease = holder.lock("x", ttl=9).acquire()
        waiting = begin(waiter.lock("x", ttl=9))
        time.sleep(2.5)
        until_renewed(lease, begin=holder._engine.confirm_soon)
        assert not waiting.done()
        lease.release()
        assert waiting.result(WAITING_SECONDS).held
        waiting.result(WAITING_SECONDS).release()

    def test_changed_user_costs_one_login_and_no_lease(self, guarded: EtcdServer, connect: Connect) -> None:
        """The token of twenty threads becomes invalid: one thread logs in, the others wait for it."""
        client = client_with(guarded, connect, "changed", {"lockkit/": "readwrite"})
        with ThreadPoolExecutor(20) as pool:
            held = [client.lock(f"held {number}", ttl=9).acquire() for number in range(20)]
            before = calls_of(guarded, LOGIN)
            change_password(guarded, "changed")

            locks = [client.lock(f"work {number}", ttl=LONG) for number in range(20)]
            for lease in pool.map(lambda lock: lock.acquire(PATIENCE), locks):
                lease.release()

            # One of etcdctl, which changed it.
            assert calls_of(guarded, LOGIN) - before <= 4
            until_renewed(*held, begin=client._engine.confirm_soon)
            assert all(lease.confirm() for lease in held)
            client.close()

    def test_rights_of_a_user(self, guarded: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that the page of the backend names suffice: for locks, records of once, semaphores and their caps."""
        have_time_to_answer(monkeypatch)
        rights = {"lockkit/": "readwrite", "lockkit+once": "readwrite", "lockkit+sem/": "readwrite"}
        client = client_with(guarded, connect, "app", rights | {"lockkit+limit": "read"})
        connect(f"etcd://root:se%20cret@{guarded.address}").semaphore("capped", limit=2).set_cap(0)
        with client.rwlock("x", ttl=LONG).write() as lease:
            lease.update("more")
            lease.downgrade()
        with client.once("k", keep=LONG) as attempt:
            attempt.done({})
        client.semaphore("free", limit=2).acquire(PATIENCE).release()
        with pytest.raises(lockkit.LockTimeout, match="set its limit to 0"):
            client.semaphore("capped", limit=2).acquire(0)

    def test_refused_request_costs_no_lease(
        self, guarded: EtcdServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Locks and semaphores share a session, which must live. Later versions of etcd refuse the undoing as well."""
        delete = Sessions.delete_keys

        async def refuse(sessions: Sessions, contenders: Sequence[Contender], answer_by: float) -> None:
            if any(b"+sem/" in one.key for one in contenders):
                raise lockkit.ConfigurationError("it denies this user a right")
            await delete(sessions, contenders, answer_by)

        monkeypatch.setattr(Sessions, "delete_keys", refuse)
        client = client_with(guarded, connect, "weak", {"lockkit/": "readwrite"}, ttl=3 * TTL)
        lease = client.lock("x").acquire(PATIENCE)
        with pytest.raises(lockkit.ConfigurationError, match="denies this user a right"):
            client.semaphore("x", limit=2).acquire(PATIENCE)

        for _ in range(2):
            until_renewed(lease, begin=client._engine.confirm_soon)
        reasons: list[str] = []
        lease.on_lost(lambda _, reason: reasons.append(reason))
        assert client.break_lock("x")  # without the right to leave a mark
        assert not lease.confirm()
        wait_until(lambda: None if reasons == ["gone"] else f"reasons: {reasons}")

    def test_login_that_the_cluster_requires_later(self) -> None:
        """An operator gives all clients user and password, and then turns logins on: no lease is lost."""
        with EtcdServer() as member, lockkit.connect(f"etcd://root:secret@{member.address}") as client:
            lease = client.lock("held", ttl=3 * TTL).acquire(PATIENCE)

            member.enable_auth("secret")

            client.lock("x", ttl=LONG).acquire(PATIENCE).release()
            until_renewed(lease, begin=client._engine.confirm_soon)
            assert lease.confirm()
            lease.release()

    def test_certificates_that_are_replaced(self) -> None:
        """A client that runs for longer than they are valid uses the new ones; without one nothing works."""
        with EtcdServer(tls=True) as member:
            self._replaced_just_now(member)

            async def body(driver: FaceDriver) -> None:
                client = await driver.connect()
                await (await client.lock("x", ttl=LONG).acquire(PATIENCE)).release()
                await driver.call(member.stop)
                make_certificates(member.directory)
                await driver.call(member.start)
                await (await client.lock("x", ttl=LONG).acquire(PATIENCE)).release()

            for face in FACES:
                play(face, member.url, body)

    @staticmethod
    def _replaced_just_now(member: EtcdServer) -> None:
        """Between the removal of the old file and the arrival of the new one, the old one counts."""
        with lockkit.connect(member.url) as client:
            client.ping()
            made = member.certificates
            key = made.client_key.read_bytes()
            made.client_key.unlink()

            backend = client._engine.client.backend
            assert isinstance(backend, EtcdBackend)
            made_anew = backend.cluster._connect(member.address)

            assert not made_anew.is_outdated()
            made.client_key.write_bytes(b"")
            assert not made_anew.is_outdated()
            made.client_key.write_bytes(key + b"\n")
            assert made_anew.is_outdated()
            drive(made_anew.close())

    def test_client_without_what_the_member_asks_for(self, server: EtcdServer, tmp_path: Path) -> None:
        """A certificate that it trusts; and TLS on both sides, which looks like a member that just stops."""
        other = make_certificates(tmp_path)
        with EtcdServer(tls=True) as member:
            trusting = f"etcds://{member.address}?ca={member.certificates.ca}"
            refuses(trusting, "certificate of this client.*give cert and key")
            refuses(f"{trusting}&cert={other.client}&key={other.client_key}", "certificate of this client")
            refuses(f"etcd://{member.address}", "write etcds://", lockkit.BackendUnavailable)
            refuses(f"etcds://{server.address}", r"write etcd://\)", lockkit.BackendUnavailable)

    @pytest.mark.parametrize(
        ("details", "problem"),
        [
            ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "certificate of this client"),
            ("SSLV3_ALERT_BAD_CERTIFICATE", "certificate of this client"),
            ("TLSV1_ALERT_UNKNOWN_CA", "certificate of this client"),
            ("WRONG_VERSION_NUMBER: Invalid certificate verification context", "does not use TLS at this port"),
        ],
    )
    def test_refusals_of_other_servers(self, details: str, problem: str) -> None:
        """By TLS 1.2, and by a port that serves something else."""
        handshake = f"Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: OPENSSL_internal:{details}: OK"
        translated = translate(CallError(handshake, grpc.StatusCode.UNAVAILABLE), "h:2379")
        assert isinstance(translated, lockkit.ConfigurationError)
        assert problem in str(translated)

    def test_certificate_of_another_host(self) -> None:
        """It is refused, though of the right authority, unless the URL says that the members have that name."""
        with OtherHost(tls=True) as member:
            refuses(member.url, "for another host.*server_name")
            refuses(f"{member.url}&server_name=third.example", "for another host")
            with lockkit.connect(f"{member.url}&server_name=other.example") as client:
                client.ping()
            refuses(member.url.replace("ca=", "prefix="), "not trusted.*option ca")


class OtherHost(EtcdServer):
    """A member whose certificate is not for its address."""

    certificate_names = "DNS:other.example"

    def _tls_context(self) -> ssl.SSLContext | None:
        if (context := super()._tls_context()) is not None:
            context.check_hostname = False
        return context


def change_password(guarded: EtcdServer, name: str) -> None:
    """Set the password of a user, which ends all its logins; to the same, so that clients can log in again."""
    subprocess.run(
        [str(find_program("etcdctl")), f"--endpoints={guarded.endpoint}", "--user=root:se cret",
         "user", "passwd", name, "--interactive=false"],
        env={"ETCDCTL_API": "3"}, input="secret\n", text=True, check=True, capture_output=True,
    )  # fmt: skip


class TestOptions:
    """What a URL may contain."""

    @pytest.mark.parametrize(
        ("url", "problem"),
        [
            ("etcd:///x", "name the members"),
            ("etcd://h/path", "has no path"),
            ("etcd://user@h", "no password"),
            ("etcd://a:b@h1,c:d@h2", "the same user and password"),
            ("etcd://h,h:2379", "twice"),
            ("etcd://h?ca=/x", "etcds"),
            ("etcds://h?cert=/x", "belong together"),
            ("etcds://h?ca=/does/not/exist", "cannot be read"),
            ("etcd://h?prefix=a/", "slash"),
            ("etcd://h?prefx=a", "prefix"),
        ],
    )
    def test_wrong_urls_are_refused(self, url: str, problem: str) -> None:
        """When connecting, before anything is sent."""
        with pytest.raises(lockkit.ConfigurationError, match=problem):
            lockkit.connect(url)

    def test_certificates_of_no_use_are_refused(self, tmp_path: Path) -> None:
        """Also those of a client of etcd3gw. gRPC would try again and again, or end the process at an empty file."""
        made, garbage, empty = make_certificates(tmp_path), tmp_path / "garbage", tmp_path / "empty"
        garbage.write_text("no certificate")
        empty.touch()
        pairs = ((empty, made.client_key), (garbage, garbage), (made.client, empty), (made.client, made.server_key))
        for ca in (garbage, empty):
            with pytest.raises(lockkit.ConfigurationError, match="option ca must have certificates"):
                lockkit.connect(f"etcds://h?ca={ca}")
        for cert, key in pairs:
            with pytest.raises(lockkit.ConfigurationError, match="options cert and key must be a certificate and its"):
                lockkit.connect(f"etcds://h?cert={cert}&key={key}")
        with pytest.raises(lockkit.ConfigurationError, match=r"etcds://h:2379 .*option ca must have certificates"):
            lockkit.from_client(etcd3gw.client(host="h", protocol="https", ca_cert=str(garbage)))

    @pytest.mark.parametrize("face", FACES)
    def test_proxy_for_the_web_is_not_used(
        self, server: EtcdServer, monkeypatch: pytest.MonkeyPatch, face: Face
    ) -> None:
        """The environment of most companies names one, and it does not lead to etcd."""
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.port_for('no proxy')}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)

        async def body(driver: FaceDriver) -> None:
            await (await driver.connect()).ping()

        play(face, server.url, body)
