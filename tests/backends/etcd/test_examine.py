"""The doctor on etcd clusters that each have one problem."""

from __future__ import annotations

import base64
import itertools
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import lockkit
from lockkit.backends.etcd import examine as etcd_examine
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import STATUS
from lockkit.doctor import examine
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import EtcdCluster, EtcdServer, wait_until
from lockkit_tools.servers.binaries import find_program
from tests.doctor.support import SECRET, complaints, found


def url_of(members: Sequence[EtcdServer], *, user: str = "root") -> str:
    """The URL of a client that logs in."""
    return f"etcd://{user}:{SECRET}@{','.join(one.address for one in members)}"


COMPACTED = {"auto-compaction-retention": "1"}


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    """A single member without logins, with slow elections."""
    with EtcdServer(settings={"election-timeout": "2000", **COMPACTED}) as made:
        yield made


def test_cluster() -> None:
    """No finding while all three members run; then the URL names only one, one is down, two are down."""
    with EtcdCluster(settings=COMPACTED) as cluster:
        cluster.members[0].enable_auth(SECRET)
        diagnosis = examine(url_of(cluster.members))
        assert complaints(diagnosis) == []
        assert diagnosis.facts["members"] == "3"
        assert SECRET not in repr(diagnosis)

        assert set(found(url_of(cluster.members[:1]))) == {"etcd-one-named"}

        cluster.followers[0].kill()
        assert "etcd-member-down" in found(url_of(cluster.members))
        # etcd 3.5.30 tells its status only to those who are logged in, and without a leader nobody can log in.
        cluster.leader.etcdctl(f"--user=root:{SECRET}", "auth", "disable")
        cluster.leader.kill()
        left = next(member for member in cluster.members if member.running)
        wait_until(lambda: None if left.metrics()["etcd_server_has_leader"] == "0" else "it still has a leader")
        assert "etcd-no-leader" in found(f"etcd://{left.address}")


def test_single_member_without_logins(server: EtcdServer) -> None:
    """As most test servers are."""
    assert set(found(server.url)) == {"etcd-alone", "etcd-no-auth"}
    # A password in the URL changes nothing.
    assert set(found(url_of([server]))) == {"etcd-alone", "etcd-no-auth"}


def test_two_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are no better than one; and an even number is no better than one fewer."""
    with EtcdCluster(2) as cluster:
        assert "etcd-few-members" in found(cluster.url)

        monkeypatch.setattr("lockkit.doctor.members.MEMBERS_MIN", 2)
        assert "etcd-even-members" in found(cluster.url)


def test_corrupt_member(server: EtcdServer) -> None:
    """The alarm that members raise when their data differ."""
    alarm = {"memberID": server.status()["header"]["member_id"], "alarm": "CORRUPT"}
    server.call("/v3/maintenance/alarm", action="ACTIVATE", **alarm)
    try:
        assert "CORRUPT" in found(server.url)["etcd-corrupt"].seen
        with (
            lockkit.connect(server.url) as client,
            pytest.raises(lockkit.BackendUnavailable, match="alarm CORRUPT"),
        ):
            client.lock("x").try_acquire()
    finally:
        server.call("/v3/maintenance/alarm", action="DEACTIVATE", **alarm)


def test_restored_cluster(tmp_path: Path) -> None:
    """Its tokens restart where the backup was made; a mere restart is no finding."""
    with EtcdServer() as server, lockkit.connect(server.url) as client:
        for _ in range(30):
            client.lock("x").acquire().release()
        server.restart()
        assert "etcd-restored" not in found(server.url)
        backup = str(tmp_path / "backup")
        server.etcdctl("snapshot", "save", backup)
        server.stop()
        shutil.rmtree(server.data)
        address = f"--initial-advertise-peer-urls={server.peer_url}"
        server.etcdctl(
            "snapshot", "restore", backup, f"--data-dir={server.directory / 'data'}", f"--name={server.name}",
            f"--initial-cluster={server.name}={server.peer_url}", "--initial-cluster-token=lockkit", address,
        )  # fmt: skip
        server.start()

        assert "restored" in found(server.url)["etcd-restored"].seen


def test_changes_nothing(server: EtcdServer) -> None:
    """It changes neither keys nor revision, and leaves no etcd lease."""
    before = server.etcdctl("get", "", "--prefix", "--write-out=fields")

    examine(server.url)

    after = server.etcdctl("get", "", "--prefix", "--write-out=fields")
    assert [line for line in after.splitlines() if "Raft" not in line] == [
        line for line in before.splitlines() if "Raft" not in line
    ]
    assert server.etcdctl("lease", "list").split()[1] == "0"


def test_ttl_below_the_shortest_lease(server: EtcdServer) -> None:
    """The lock of a dead holder stays longer than its ttl."""
    finding = found(server.url, ttl=2)["etcd-ttl-raised"]

    assert "2 s" in finding.seen
    assert "3 s at least" in finding.seen


def test_quota_and_alarm() -> None:
    """First nearly used up; then used up, with the alarm on."""
    with EtcdServer() as server:
        for number in range(10):
            put(server, number)
        # What was written is in the file when the server has ended.
        server.restart()
        used = int(float(server.metrics()["etcd_mvcc_db_total_size_in_bytes"]))
        server.settings["quota-backend-bytes"] = str(int(used / 0.9))
        server.restart()

        assert "% of the quota" in found(server.url)["etcd-quota"].seen

        with pytest.raises(ConnectionError, match="space exceeded"):
            put_for_ever(server)
        wait_until(lambda: None if "NOSPACE" in server.etcdctl("alarm", "list") else "no alarm")
        assert "NOSPACE" in found(server.url)["etcd-no-space"].seen


def put_for_ever(server: EtcdServer) -> None:
    """Write until that fails."""
    for number in itertools.count(10):
        put(server, number)


def put(server: EtcdServer, number: int) -> None:
    """Write a hundred kilobytes under a new key."""
    key = base64.b64encode(b"%d" % number).decode()
    server.call("/v3/kv/put", key=key, value=base64.b64encode(b"x" * 100_000).decode())


def test_rights_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """First a user may only read, then read and write; the rest is for root, and is not needed for locks."""
    with EtcdServer(settings=COMPACTED) as server:
        server.enable_auth(SECRET)
        as_root = f"--user=root:{SECRET}"
        server.etcdctl(as_root, "role", "add", "app")
        server.etcdctl(as_root, "user", "add", f"app:{SECRET}")
        server.etcdctl(as_root, "user", "grant-role", "app", "app")
        server.etcdctl(as_root, "role", "grant-permission", "app", "read", "lockkit/", "--prefix=true")

        assert "lockkit/" in found(url_of([server], user="app"))["etcd-rights"].seen

        server.etcdctl(as_root, "role", "grant-permission", "app", "readwrite", "lockkit/", "--prefix=true")
        assert set(found(url_of([server], user="app"))) - {"etcd-hidden"} == {"etcd-alone"}

        # etcd 3.5.30 tells its status to root only, and older versions tell everybody. They keep their users to root.
        monkeypatch.setattr(STATUS, "path", "/etcdserverpb.Auth/UserList")
        assert set(found(url_of([server], user="app"))) == {"etcd-alone", "etcd-hidden"}

        with pytest.raises(lockkit.ConfigurationError):
            examine(url_of([server], user="nobody"))


def test_old_member_without_tls(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another machine, with a higher minimum than any version; a client certificate counts as a login."""
    monkeypatch.setattr(etcd_examine, "is_loopback", lambda host: False)  # noqa: ARG005
    with monkeypatch.context() as patch:
        patch.setattr(etcd_examine, "VERSION_MIN", (99, 0))
        assert "etcd-version" in found(server.url)

    assert found(server.url)["etcd-no-tls"].where == (server.address,)
    with_password = server.url.replace("//", f"//app:{SECRET}@")
    assert "password in clear text" in found(with_password)["etcd-no-tls"].seen
    with EtcdServer(tls=True, settings=COMPACTED) as safe:
        assert set(found(safe.url)) == {"etcd-alone"}
        with pytest.raises(lockkit.ConfigurationError, match="certificate of this client"):
            found(f"etcds://{safe.address}?ca={safe.certificates.ca}")


def test_proxy(server: EtcdServer) -> None:
    """Behind etcd's proxy for gRPC a lock is granted, and its lease ends at its deadline."""
    port = server.port_for("proxy")
    command = [str(find_program("etcd")), "grpc-proxy", "start"]
    with subprocess.Popen(
        [*command, f"--endpoints={server.address}", f"--listen-addr=127.0.0.1:{port}"],
        cwd=server.directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as proxy:  # fmt: skip
        try:
            with lockkit.connect(f"etcd://127.0.0.1:{port}") as client:
                lease = client.lock("x", ttl=3).acquire(PATIENCE)
                finding = found(client.url)["etcd-no-renewal"]
                assert "grpc-proxy" in finding.seen
                assert lease.wait_lost(PATIENCE)
        finally:
            proxy.terminate()


def test_nobody_answers(server: EtcdServer) -> None:
    """That is an error, not a finding; it says of each member what is wrong."""
    members = [f"{host}:{server.port_for('nobody')}" for host in ("127.0.0.1", "localhost")]

    with pytest.raises(lockkit.BackendUnavailable) as caught:
        examine(f"etcd://{','.join(members)}")

    for member in members:
        assert f"etcd at {member} cannot be reached" in str(caught.value)


def test_compaction() -> None:
    """Off by default, and by 0. What the doctor cannot see does not matter once it has happened."""
    with EtcdServer(settings={"auto-compaction-retention": "0"}) as server:
        assert "etcd-no-compaction" in found(server.url)

        put(server, 1)
        server.etcdctl("compact", str(server.status()["header"]["revision"]))
        assert "etcd-no-compaction" not in found(server.url)


def test_quota_in_the_status_of_etcd_3_6() -> None:
    """Field 12; field 13 is a message about downgrades."""
    status = rpc.StatusResponse.FromString(bytes.fromhex("60 96 01 6a 00"))

    assert status.dbSizeQuota == 150
