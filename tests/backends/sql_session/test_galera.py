"""MariaDB's Galera cluster, whose nodes do not know one another's locks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lockkit
from lockkit_tools.servers import MariaServer
from tests.backends.sql.galera import galera_node, needs_galera
from tests.backends.sql_session.support import MODES, PATIENCE
from tests.backends.sql_table.support import Connect

pytestmark = [pytest.mark.timeout(180), needs_galera]


@pytest.fixture(scope="module")
def node() -> Iterator[MariaServer]:
    """A node."""
    with galera_node() as server:
        yield server


@pytest.mark.parametrize("mode", MODES)
def test_locks_that_only_one_node_knows_are_refused(node: MariaServer, connect: Connect, mode: str) -> None:
    """At once, and the message names the mode whose rows the nodes replicate."""
    url = f"{node.url}?mode={mode}"
    with pytest.raises(lockkit.ConfigurationError, match=r"node of a Galera cluster.* use mode=table"):
        connect(url).lock("x").acquire(timeout=PATIENCE)


def test_lock_table_works_on_a_node(node: MariaServer, connect: Connect) -> None:
    """Readers too."""
    client = connect(node.url)
    with client.lock("x", timeout=PATIENCE) as lease:
        lease.extend()
        assert lease.confirm()
    with client.rwlock("x", timeout=PATIENCE).read():
        pass
