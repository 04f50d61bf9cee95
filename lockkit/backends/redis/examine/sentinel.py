"""Examines ``redis+sentinel:`` URLs: the Sentinels, and the master that they name."""

from __future__ import annotations

from typing import cast

from lockkit.backends.redis.examine.node import examine_server
from lockkit.backends.redis.examine.server import RedisServer, pairs
from lockkit.backends.redis.options import open_topology
from lockkit.backends.redis.resp import ServerSaid
from lockkit.backends.redis.sentinel import SentinelTopology
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import BackendUnavailable

_PAGE = "how-to/check-your-servers.md#sentinel"

SENTINELS_MIN = 3
"""The least number of which one may fail and a majority is left to agree on a failover."""

FEW = Check(
    "sentinel-few",
    Severity.WARNING,
    "When one of them fails there is no majority left to agree on a failover: locks stand still with the master.",
    _PAGE,
)
QUORUM_LOW = Check(
    "sentinel-quorum-low",
    Severity.WARNING,
    "A few Sentinels that are cut off from the master start a failover while it works: needless failovers lose locks.",
    _PAGE,
)
QUORUM_UNREACHABLE = Check(
    "sentinel-quorum-unreachable",
    Severity.ERROR,
    "There will never be a failover: when the master fails, locks are unavailable until an administrator repairs it.",
    _PAGE,
)
NO_REPLICA = Check(
    "sentinel-no-replica",
    Severity.WARNING,
    "There is no replica to promote: when the master fails, locks are unavailable until an administrator repairs it.",
    _PAGE,
)
DOWN = Check(
    "sentinel-down",
    Severity.WARNING,
    "One Sentinel fewer may fail before none names the master or agrees on a failover.",
    _PAGE,
)
DISAGREE = Check(
    "sentinel-disagree",
    Severity.ERROR,
    "Clients that ask different Sentinels lock on different servers: a lock is held twice.",
    _PAGE,
)
ONE_NAMED = Check(
    "sentinel-one-named",
    Severity.WARNING,
    "When that one is down, clients do not find the master although it works.",
    "backends/redis.md#url-and-options",
)


async def examine(examination: Examination) -> None:
    """Examine the Sentinels of the URL, then the master."""
    topology = cast("SentinelTopology", open_topology(examination.url, examination.options, examination.host))
    # Also when the Sentinels cannot be asked about anything else, this says where the master is.
    master_node = await topology.node_for("")
    name = topology.service_name
    views: dict[str, dict[str, str]] = {}
    for node in topology.sentinels:
        view = await _ask(examination, RedisServer(examination.runtime, node.target), name)
        if view is not None:
            views[node.label] = view
    await topology.close()
    _judge(examination, views, named_count=len(topology.sentinels))
    master = RedisServer(examination.runtime, master_node.target)
    try:
        await master.look()
        await examine_server(examination, master)
    finally:
        await master.close()


async def _ask(examination: Examination, sentinel: RedisServer, name: str) -> dict[str, str] | None:
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
    examination.find(DOWN, sentinel.label, seen, advice)
    return None


def _judge(examination: Examination, views: dict[str, dict[str, str]], *, named_count: int) -> None:
    masters = {f"{view['ip']}:{view['port']}" for view in views.values()}
    if len(masters) > 1:
        named = "; ".join(f"{label} names {view['ip']}:{view['port']}" for label, view in views.items())
        examination.find(
            DISAGREE,
            examination.url.safe_text,
            f"The Sentinels name different masters: {named}.",
            "Check whether they watch the same servers (redis-cli -p PORT SENTINEL CKQUORUM NAME), and SENTINEL RESET "
            "NAME where one does not",
        )
    for label, view in views.items():
        _judge_view(examination, label, view, named_count=named_count)


def _judge_view(examination: Examination, label: str, view: dict[str, str], *, named_count: int) -> None:
    """Judge what one Sentinel knows. What all of them say becomes one finding."""
    name = view["name"]
    count, quorum = int(view["num-other-sentinels"]) + 1, int(view["quorum"])
    majority = count // 2 + 1
    if count < SENTINELS_MIN:
        seen = f"{count} Sentinels watch the master, the least that survives a failure is {SENTINELS_MIN}."
        examination.find(FEW, label, seen, f"Start more, each with: sentinel monitor {name} HOST PORT 2")
    if quorum > count:
        seen = f"The quorum is {quorum}, and there are {count} Sentinels."
        advice = f"redis-cli -p PORT SENTINEL SET {name} quorum {majority}, at each Sentinel"
        examination.find(QUORUM_UNREACHABLE, label, seen, advice)
    elif quorum < majority:
        seen = f"The quorum is {quorum}, a majority of the {count} Sentinels is {majority}."
        advice = f"redis-cli -p PORT SENTINEL SET {name} quorum {majority}, at each Sentinel"
        examination.find(QUORUM_LOW, label, seen, advice)
    if int(view["num-slaves"]) == 0:
        advice = f"Start one with: replicaof {view['ip']} {view['port']}"
        examination.find(NO_REPLICA, label, "The master has no replica.", advice)
    if named_count == 1 < count:
        seen = f"The URL names one Sentinel of {count}."
        examination.find(ONE_NAMED, label, seen, "Name all of them: redis+sentinel://host1,host2,host3/NAME")
