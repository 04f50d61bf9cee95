"""Examines Sentinels with the master that they name, and Clusters."""

from __future__ import annotations

from functools import partial
from typing import cast

from lockkit.backends.redis.cluster import SLOTS_COUNT, ClusterTopology
from lockkit.backends.redis.examine.node import examine_server
from lockkit.backends.redis.examine.server import RedisServer, pairs
from lockkit.backends.redis.handshake import info_fields
from lockkit.backends.redis.options import open_topology
from lockkit.backends.redis.resp import ServerSaid
from lockkit.backends.redis.sentinel import SentinelTopology
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import BackendUnavailable

_SENTINEL_PAGE = "how-to/check-your-servers.md#sentinel"

SENTINELS_MIN = 3
"""The least number of which one may fail and a majority is left to agree on a failover."""

_error = partial(Check, severity=Severity.ERROR, page=_SENTINEL_PAGE)
_warning = partial(Check, severity=Severity.WARNING, page=_SENTINEL_PAGE)

FEW = _warning(
    "sentinel-few",
    risk="When one of them fails there is no majority left to agree on a failover: locks stand still with the master.",
)
QUORUM_LOW = _warning(
    "sentinel-quorum-low",
    risk="A few Sentinels that are cut off from the master start a failover while it works: needless failovers lose "
    "locks.",
)
QUORUM_UNREACHABLE = _error(
    "sentinel-quorum-unreachable",
    risk="There will never be a failover: when the master fails, locks are unavailable until an administrator "
    "repairs it.",
)
MASTER_WITHOUT_REPLICA = _warning(
    "sentinel-no-replica",
    risk="There is no replica to promote: when the master fails, locks are unavailable until an administrator "
    "repairs it.",
)
DOWN = _warning(
    "sentinel-down", risk="One Sentinel fewer may fail before none names the master or agrees on a failover."
)
DISAGREE = _error(
    "sentinel-disagree", risk="Clients that ask different Sentinels lock on different servers: a lock is held twice."
)
ONE_NAMED = _warning(
    "sentinel-one-named",
    risk="When that one is down, clients do not find the master although it works.",
    page="backends/redis.md#url-and-options",
)
_CLUSTER_PAGE = "how-to/check-your-servers.md#cluster"

MASTERS_MIN = 3
"""The least number of which one may fail and a majority is left to vote for its replica."""

SLOTS_MISSING = _error(
    "cluster-slots-missing",
    risk="Locks whose slot no node serves cannot be taken; with cluster-require-full-coverage no lock can.",
    page=_CLUSTER_PAGE,
)
NODE_DOWN = _error(
    "cluster-node-down", risk="The locks of its slots can neither be taken nor renewed.", page=_CLUSTER_PAGE
)
FEW_MASTERS = _warning(
    "cluster-few-masters",
    risk="When a master fails there is no majority left to promote its replica: its locks stand still.",
    page=_CLUSTER_PAGE,
)
NO_REPLICA = _warning(
    "cluster-no-replica",
    risk="When this master fails, the locks of its slots are unavailable until an administrator repairs it.",
    page=_CLUSTER_PAGE,
)


async def examine_sentinels(examination: Examination) -> None:
    """Examine the Sentinels of the URL, then the master."""
    topology = cast("SentinelTopology", open_topology(examination.url, examination.options, examination.host))
    # Also when the Sentinels cannot be asked about anything else, this says where the master is.
    master_node = await topology.node_for("")
    name = topology.service_name
    views: dict[RedisServer, dict[str, str]] = {}
    for node in topology.sentinels:
        sentinel = RedisServer(examination, node.target)
        view = await _ask_sentinel(sentinel, name)
        if view is not None:
            views[sentinel] = view
    await topology.close()
    _judge_views(examination, views, named_count=len(topology.sentinels))
    master = RedisServer(examination, master_node.target)
    try:
        await master.look()
        await examine_server(master)
    finally:
        await master.close()


async def _ask_sentinel(sentinel: RedisServer, name: str) -> dict[str, str] | None:
    """Give what a Sentinel knows of the master; None if it cannot be asked."""
    try:
        reply = await sentinel.ask("SENTINEL", "MASTER", name)
    except BackendUnavailable:
        seen, advice = "The Sentinel does not answer.", "Start it, or remove it from the URL."
    else:
        if not isinstance(reply, ServerSaid):
            return pairs(reply)
        seen = f"The Sentinel refuses to name {name!r} ({reply.code})."
        advice = f"redis-cli -p PORT SENTINEL MONITOR {name} …, or give sentinel_username= and sentinel_password="
    finally:
        await sentinel.close()
    sentinel.find(DOWN, seen, advice)
    return None


def _judge_views(examination: Examination, views: dict[RedisServer, dict[str, str]], *, named_count: int) -> None:
    masters = {f"{view['ip']}:{view['port']}" for view in views.values()}
    if len(masters) > 1:
        named = "; ".join(f"{server.label} names {view['ip']}:{view['port']}" for server, view in views.items())
        examination.find(
            DISAGREE,
            examination.url.safe_text,
            f"The Sentinels name different masters: {named}.",
            "Check whether they watch the same servers (redis-cli -p PORT SENTINEL CKQUORUM NAME), and SENTINEL RESET "
            "NAME where one does not",
        )
    for server, view in views.items():
        _judge_view(server, view, named_count=named_count)


def _judge_view(server: RedisServer, view: dict[str, str], *, named_count: int) -> None:
    """Judge what one Sentinel knows. What all of them say becomes one finding."""
    name = view["name"]
    count, quorum = int(view["num-other-sentinels"]) + 1, int(view["quorum"])
    majority = count // 2 + 1
    if count < SENTINELS_MIN:
        seen = f"{count} Sentinels watch the master, the least that survives a failure is {SENTINELS_MIN}."
        server.find(FEW, seen, f"Start more, each with: sentinel monitor {name} HOST PORT 2")
    if quorum > count:
        seen = f"The quorum is {quorum}, and there are {count} Sentinels."
        advice = f"redis-cli -p PORT SENTINEL SET {name} quorum {majority}, at each Sentinel"
        server.find(QUORUM_UNREACHABLE, seen, advice)
    elif quorum < majority:
        seen = f"The quorum is {quorum}, a majority of the {count} Sentinels is {majority}."
        advice = f"redis-cli -p PORT SENTINEL SET {name} quorum {majority}, at each Sentinel"
        server.find(QUORUM_LOW, seen, advice)
    if int(view["num-slaves"]) == 0:
        advice = f"Start one with: replicaof {view['ip']} {view['port']}"
        server.find(MASTER_WITHOUT_REPLICA, "The master has no replica.", advice)
    if named_count == 1 < count:
        seen = f"The URL names one Sentinel of {count}."
        server.find(ONE_NAMED, seen, "Name all of them: redis+sentinel://host1,host2,host3/NAME")


async def examine_cluster(examination: Examination) -> None:
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
        server = RedisServer(examination, target)
        try:
            await server.look()
        except BackendUnavailable:
            server.find(NODE_DOWN, "The master does not answer.", "Start it, or check its log.")
        else:
            await _examine_member(server)
            await examine_server(server, in_cluster=True)
        finally:
            await server.close()


async def _examine_member(server: RedisServer) -> None:
    reply = await server.ask("CLUSTER", "INFO")
    info = info_fields(reply) if isinstance(reply, bytes) else {}
    served = int(info.get("cluster_slots_ok", SLOTS_COUNT))
    if served < SLOTS_COUNT or info.get("cluster_state", "ok") != "ok":
        server.find(
            SLOTS_MISSING,
            f"cluster_state is {info.get('cluster_state')}, and {served} of {SLOTS_COUNT} slots are served.",
            "redis-cli --cluster fix HOST:PORT; redis-cli --cluster check HOST:PORT says which are missing",
        )
    if server.facts.get("connected_slaves") == "0":
        server.find(
            NO_REPLICA,
            "The master has no replica.",
            "redis-cli --cluster add-node NEW_HOST:PORT HOST:PORT --cluster-slave",
        )
