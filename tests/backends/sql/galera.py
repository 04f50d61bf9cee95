"""A node of a Galera cluster, for the tests of what such a server can and cannot do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockkit_tools.servers import MariaServer, require
from lockkit_tools.servers._ports import Ports

PROVIDER = Path("/usr/lib/galera/libgalera_smm.so")

needs_galera = pytest.mark.skipif(
    not (PROVIDER.exists() or os.environ.get("CI")), reason="needs Galera, which Debian installs with MariaDB"
)


@contextmanager
def galera_node() -> Iterator[MariaServer]:
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
