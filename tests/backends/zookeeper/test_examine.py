"""The doctor on ZooKeeper ensembles, each with one wrong setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit.backends.zookeeper import examine as zookeeper_examine
from lockkit.doctor import examine
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import ZooKeeperEnsemble, ZooKeeperServer, wait_until
from tests.doctor.support import SECRET, complaints, found

SESSION_LIMITS = {"minSessionTimeout": "4000", "maxSessionTimeout": "40000"}


def url_of(members: Sequence[ZooKeeperServer], *, user: str = "app", prefix: str = "lockkit") -> str:
    """The URL of a careful client."""
    return f"zookeeper://{user}:{SECRET}@{','.join(one.address for one in members)}?acl=creator&prefix={prefix}"


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    """A server alone."""
    with ZooKeeperServer(settings=SESSION_LIMITS) as made:
        yield made


def test_ensemble(server: ZooKeeperServer) -> None:
    """Silent while all of three members serve; then one is named alone, one is down, and one has no majority."""
    with ZooKeeperEnsemble(settings=SESSION_LIMITS) as ensemble:
        diagnosis = examine(url_of(ensemble.members))
        assert complaints(diagnosis) == []
        assert diagnosis.facts["members"] == "3"
        assert SECRET not in repr(diagnosis)

        assert set(found(url_of(ensemble.members[:1]))) == {"zookeeper-one-named"}

        down = ensemble.followers[0]
        down.kill()
        finding = found(url_of(ensemble.members))["zookeeper-member-down"]
        assert finding.where == (down.address,)

        left, leader = ensemble.followers[0], ensemble.leader
        leader.kill()
        wait_until(lambda: None if not left.mode() else "it has not noticed yet")
        finding = found(url_of([server, left]))["zookeeper-member-down"]
        assert finding.where == (left.address,)
        assert "majority" in finding.seen


def test_two_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """No better than one; and an even number is no better than one less."""
    with ZooKeeperEnsemble(2, settings=SESSION_LIMITS) as ensemble:
        assert set(found(url_of(ensemble.members))) == {"zookeeper-few-members"}

        monkeypatch.setattr("lockkit.doctor.members.MEMBERS_MIN", 2)
        assert set(found(url_of(ensemble.members))) == {"zookeeper-even-members"}


@pytest.mark.parametrize(
    ("ttl", "check", "seen", "setting"),
    [
        (60, "zookeeper-session-shortened", "40 s at most", "maxSessionTimeout=60000"),
        (2, "zookeeper-session-lengthened", "4 s at least", "minSessionTimeout=2000"),
    ],
)
def test_ttl_outside_of_the_sessions(server: ZooKeeperServer, ttl: float, check: str, seen: str, setting: str) -> None:
    """The lease is shorter than asked for, or the lock of a dead holder stays longer."""
    finding = found(url_of([server]), ttl=ttl)[check]

    assert f"{ttl:g} s" in finding.seen
    assert seen in finding.seen
    assert setting in finding.fix


def test_open_access_rights(server: ZooKeeperServer) -> None:
    """The default without a login; with one by option, or as left behind by earlier clients."""
    assert set(found(server.url)) == {"zookeeper-alone", "zookeeper-open-acl"}
    login = f"zookeeper://app:{SECRET}@{server.address}"
    assert set(found(login)) == {"zookeeper-alone"}
    assert "acl=open" in found(f"{login}?acl=open")["zookeeper-open-acl"].fix

    with lockkit.connect(f"{login}?acl=open&prefix=former") as client, client.lock("a", timeout=10):
        pass
    assert "setAcl -R /former" in found(f"{login}?prefix=former")["zookeeper-open-acl"].fix


def test_rights_missing(server: ZooKeeperServer) -> None:
    """The directory of the locks belongs to another login."""
    url = url_of([server], prefix="theirs")
    with lockkit.connect(url) as client, client.lock("a", timeout=10):
        pass

    assert "zookeeper-rights" not in found(url)
    assert "/theirs" in found(url_of([server], user="other", prefix="theirs"))["zookeeper-rights"].seen


def test_old_server_alone_across_a_network(server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below what lockkit needs, were that more; at an address that is not this machine's own."""
    assert set(found(url_of([server]))) == {"zookeeper-alone"}
    monkeypatch.setattr(zookeeper_examine, "VERSION_MIN", (99, 0))
    monkeypatch.setattr(zookeeper_examine, "is_loopback", lambda host: False)  # noqa: ARG005

    findings = found(url_of([server]))

    assert set(findings) == {"zookeeper-alone", "zookeeper-version", "zookeeper-no-tls"}
    assert findings["zookeeper-no-tls"].where == (server.address,)
    assert "password in clear text" in findings["zookeeper-no-tls"].seen


def test_certificates_not_checked() -> None:
    """Neither by option, nor the host name alone; silent by default."""
    with ZooKeeperServer(tls=True, settings=SESSION_LIMITS) as secure:
        with lockkit.connect(secure.url) as client, client.lock("first handshake", ttl=10):
            assert "zookeeper-unverified" not in found(secure.url)
        for option in ("verify_certs=0", "check_hostname=0"):
            assert option in found(f"{secure.url}&{option}")["zookeeper-unverified"].fix
        with pytest.raises(lockkit.ConfigurationError, match="certificate of this client"):
            found(secure.url.partition("&certfile")[0])


def test_plain_kazoo_lock_beside_readers(server: ZooKeeperServer) -> None:
    """It does not wait for them; WriteLock does."""
    url = f"zookeeper://{server.address}?prefix=mixed"
    kazoo = KazooClient(server.address)
    kazoo.start()
    try:
        with lockkit.connect(url) as client, client.rwlock("prices", ttl=10, timeout=PATIENCE).read():
            with client.lock("other", ttl=10, timeout=PATIENCE):
                assert "zookeeper-kazoo-lock" not in found(url)
            with kazoo.Lock("/mixed/prices", "somebody"):
                assert "/mixed/prices" in found(url)["zookeeper-kazoo-lock"].seen
    finally:
        kazoo.stop()
        kazoo.close()
