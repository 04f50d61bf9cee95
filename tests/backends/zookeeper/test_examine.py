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


def test_ensemble() -> None:
    """Silent while all of three members serve; then one is named alone, and one is down."""
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


def test_member_without_a_majority() -> None:
    """It answers that it serves no clients."""
    with ZooKeeperEnsemble(settings=SESSION_LIMITS) as ensemble, ZooKeeperServer(settings=SESSION_LIMITS) as other:
        for member in ensemble.members[:2]:
            member.kill()
        left = ensemble.members[2]
        wait_until(lambda: None if not left.mode() else "it has not noticed yet")

        finding = found(url_of([other, left]))["zookeeper-member-down"]
        assert finding.where == (left.address,)
        assert "majority" in finding.seen


def test_two_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """No better than one; and an even number is no better than one less."""
    with ZooKeeperEnsemble(2, settings=SESSION_LIMITS) as ensemble:
        assert set(found(url_of(ensemble.members))) == {"zookeeper-few-members"}

        monkeypatch.setattr("lockkit.doctor.members.MEMBERS_MIN", 2)
        assert set(found(url_of(ensemble.members))) == {"zookeeper-even-members"}


def test_old_version(server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below what lockkit needs, were that more."""
    monkeypatch.setattr(zookeeper_examine, "VERSION_MIN", (99, 0))

    assert "zookeeper-version" in found(url_of([server]))


def test_server_alone(server: ZooKeeperServer) -> None:
    """No other server can replace it."""
    assert set(found(url_of([server]))) == {"zookeeper-alone"}


def test_open_access_rights(server: ZooKeeperServer) -> None:
    """The default without a login; with one by option, or as left behind by earlier clients."""
    assert set(found(server.url)) == {"zookeeper-alone", "zookeeper-open-acl"}
    login = f"zookeeper://app:{SECRET}@{server.address}"
    assert set(found(login)) == {"zookeeper-alone"}
    assert "acl=open" in found(f"{login}?acl=open")["zookeeper-open-acl"].fix

    with lockkit.connect(f"{login}?acl=open&prefix=former") as client, client.lock("a", timeout=10):
        pass
    assert "setAcl -R /former" in found(f"{login}?prefix=former")["zookeeper-open-acl"].fix


def test_ttl_above_the_longest_session(server: ZooKeeperServer) -> None:
    """The lease is shorter than asked for."""
    finding = found(url_of([server]), ttl=60)["zookeeper-session-shortened"]

    assert "60 s" in finding.seen
    assert "40 s at most" in finding.seen
    assert "maxSessionTimeout=60000" in finding.fix


def test_ttl_below_the_shortest_session(server: ZooKeeperServer) -> None:
    """The lock of a dead holder stays longer than asked for."""
    finding = found(url_of([server]), ttl=2)["zookeeper-session-lengthened"]

    assert "4 s at least" in finding.seen
    assert "minSessionTimeout=2000" in finding.fix


def test_rights_missing(server: ZooKeeperServer) -> None:
    """The directory of the locks belongs to another login."""
    url = url_of([server], prefix="theirs")
    with lockkit.connect(url) as client, client.lock("a", timeout=10):
        pass

    assert "zookeeper-rights" not in found(url)
    assert "/theirs" in found(url_of([server], user="other", prefix="theirs"))["zookeeper-rights"].seen


def test_tls_absent_across_a_network(server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an address that is not this machine's own."""
    monkeypatch.setattr(zookeeper_examine, "is_loopback", lambda host: False)  # noqa: ARG005

    finding = found(url_of([server]))["zookeeper-no-tls"]
    assert finding.where == (server.address,)
    assert "password in clear text" in finding.seen


def test_certificates_not_checked() -> None:
    """Neither by option, nor the host name alone; silent by default."""
    with ZooKeeperServer(tls=True, settings=SESSION_LIMITS) as secure:
        assert "zookeeper-unverified" not in found(secure.url)
        for option in ("verify_certs=0", "check_hostname=0"):
            assert option in found(f"{secure.url}&{option}")["zookeeper-unverified"].fix


def test_nobody_answers(server: ZooKeeperServer) -> None:
    """That is an error, as everywhere, not a finding."""
    with pytest.raises(lockkit.BackendUnavailable):
        examine(f"zookeeper://127.0.0.1:{server.port_for('nobody')}")


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
