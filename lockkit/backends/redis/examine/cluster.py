"""Examines ``redis+cluster:`` URLs: the Cluster as a whole, and each of its masters."""

from __future__ import annotations

from typing import cast

from lockkit.backends.redis.cluster import SLOTS_COUNT, ClusterTopology
from lockkit.backends.redis.examine.node import examine_server
from lockkit.backends.redis.examine.server import RedisServer
from lockkit.backends.redis.handshake import info_fields
from lockkit.backends.redis.options import open_topology
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import BackendUnavailable

_PAGE = "how-to/check-your-servers.md#cluster"

MASTERS_MIN = 3
"""The least number of which one may fail and a majority is left to vote for its replica."""

SLOTS_MISSING = Check(
    "cluster-slots-missing",
    Severity.ERROR,
    "Locks whose slot no node serves cannot be taken; with cluster-require-full-coverage no lock can.",
    _PAGE,
)
NODE_DOWN = Check(
    "cluster-node-down",
    Severity.ERROR,
    "The locks of its slots can neither be taken nor renewed.",
    _PAGE,
)
FEW_MASTERS = Check(
    "cluster-few-masters",
    Severity.WARNING,
    "When a master fails there is no majority left to promote its replica: its locks stand still.",
    _PAGE,
)
NO_REPLICA = Check(
    "cluster-no-replica",
    Severity.WARNING,
    "When this master fails, the locks of its slots are unavailable until an administrator repairs it.",
    _PAGE,
)


async def examine(examination: Examination) -> None:
    """Examine the Cluster by the answers of its nodes, then each master."""
    topology = cast("ClusterTopology", open_topology(examination.url, examination.options, examination.host))
    nodes = await topology.masters()
    targets = [node.target for node in nodes]
    await topology.close()
    if len(targets) < MASTERS_MIN:
        examination.find(
            FEW_MASTERS,
            examination.url.safe_text,
            f"{len(targets)} masters serve the slots, the least that survives a failure is {MASTERS_MIN}.",
            "redis-cli --cluster add-node NEW_HOST:PORT HOST:PORT, then redis-cli --cluster rebalance",
        )
    for target in targets:
        server = RedisServer(examination.runtime, target)
        try:
            await server.look()
        except BackendUnavailable:
            examination.find(NODE_DOWN, server.label, "The master does not answer.", "Start it, or check its log.")
        else:
            await _examine_member(examination, server)
            await examine_server(examination, server, in_cluster=True)
        finally:
            await server.close()


async def _examine_member(examination: Examination, server: RedisServer) -> None:
    reply = await server.ask("CLUSTER", "INFO")
    info = info_fields(reply) if isinstance(reply, bytes) else {}
    served = int(info.get("cluster_slots_ok", SLOTS_COUNT))
    if served < SLOTS_COUNT or info.get("cluster_state", "ok") != "ok":
        examination.find(
            SLOTS_MISSING,
            server.label,
            f"cluster_state is {info.get('cluster_state')}, and {served} of {SLOTS_COUNT} slots are served.",
            "redis-cli --cluster fix HOST:PORT; redis-cli --cluster check HOST:PORT says which are missing",
        )
    if server.facts.get("connected_slaves") == "0":
        examination.find(
            NO_REPLICA,
            server.label,
            "The master has no replica.",
            "redis-cli --cluster add-node NEW_HOST:PORT HOST:PORT --cluster-slave",
        )
