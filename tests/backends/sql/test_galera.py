"""MariaDB's Galera cluster, whose nodes do not know one another's locks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockkit
from lockkit_tools.servers import MariaServer, require
from lockkit_tools.servers._ports import Ports
from tests.doctor.support import found

PROVIDER = Path("/usr/lib/galera/libgalera_smm.so")

pytestmark = pytest.mark.skipif(
    not (PROVIDER.exists() or os.environ.get("CI")), reason="needs Galera, which Debian installs with MariaDB"
)


@pytest.fixture(scope="module")
def node() -> Iterator[MariaServer]:
    """The first node of a cluster."""
    require("mariadb", local=True)
    ports = Ports()
    port = ports.reserve()
    settings = {
        "wsrep_on": "ON",
        "wsrep_provider": os.fspath(PROVIDER),
        "wsrep_provider_options": f"'base_port={port};gmcast.listen_addr=tcp://127.0.0.1:{port}'",
        "wsrep_cluster_address": "gcomm://",
        "wsrep_node_address": "127.0.0.1",
        "binlog_format": "ROW",
        "innodb_autoinc_lock_mode": "2",
    }
    try:
        with MariaServer(settings=settings) as server:
            yield server
    finally:
        ports.close()


@pytest.mark.parametrize("mode", ["row", "advisory"])
def test_locks_that_only_one_node_knows_are_refused(node: MariaServer, mode: str) -> None:
    """At once, and the message names the mode whose rows the nodes replicate; the doctor says so too."""
    url = f"{node.url}?mode={mode}"
    refused = pytest.raises(lockkit.ConfigurationError, match=r"node of a Galera cluster.* use mode=table")
    with lockkit.connect(url) as client, refused:
        client.lock("x").acquire(timeout=60)
    assert "mysql-galera" in found(url)


def test_lock_table_works_on_a_node(node: MariaServer) -> None:
    """Readers too."""
    with lockkit.connect(node.url) as client:
        with client.lock("x", timeout=60) as lease:
            lease.extend()
            assert lease.confirm()
        with client.rwlock("x", timeout=60).read():
            pass
    assert "mysql-galera" not in found(node.url)
