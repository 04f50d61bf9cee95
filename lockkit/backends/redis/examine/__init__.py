"""
What ``lockkit doctor`` finds at Redis: single servers (`node`), and Sentinels and Clusters (`groups`).

`server` reaches them, and checks the rights of lockkit's user.
"""

from __future__ import annotations

from lockkit.backends.redis.examine.groups import examine_cluster, examine_sentinels
from lockkit.backends.redis.examine.node import examine_server
from lockkit.backends.redis.examine.server import RedisServer
from lockkit.backends.redis.options import open_topology
from lockkit.doctor.examination import Examination


async def examine(examination: Examination) -> None:
    """Examine the servers of a URL."""
    if examination.url.driver == "sentinel":
        await examine_sentinels(examination)
    elif examination.url.driver == "cluster":
        await examine_cluster(examination)
    else:
        topology = open_topology(examination.url, examination.options, examination.host)
        server = RedisServer(examination, (await topology.node_for("")).target)
        try:
            await server.look()
            await examine_server(server)
        finally:
            await server.close()
