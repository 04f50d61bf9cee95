"""What a run leaves at a ZooKeeper that the user named."""

from __future__ import annotations

from kazoo.client import KazooClient

from lockkit_tools.servers import ZooKeeperServer, require
from tests.bench.test_command import report


def test_nodes_of_other_libraries_are_removed() -> None:
    """Those of the locks of kazoo, its baseline and tooz, which stay when a lock is released."""
    require("zookeeper", local=True)
    with ZooKeeperServer() as server:
        arguments = ["--workload", "pair", "--face", "sync", "--rounds", "1", "--seconds", "0.01"]
        found = report(server.url, *arguments)

        assert {row["status"] for row in found["workloads"][0]["results"]} == {"ok"}
        client = KazooClient(server.address)
        client.start()
        try:
            assert client.exists("/lockkit-bench") is None
            assert client.get_children("/tooz/locks") == []
        finally:
            client.stop()
            client.close()
