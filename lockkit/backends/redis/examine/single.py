"""Examines ``redis:``, ``rediss:``, ``valkey:`` and ``unix:`` URLs: one Redis or Valkey server."""

from __future__ import annotations

from lockkit.backends.redis.examine.node import examine_server
from lockkit.backends.redis.examine.server import RedisServer
from lockkit.backends.redis.options import open_topology
from lockkit.doctor.examination import Examination


async def examine(examination: Examination) -> None:
    """Examine the server."""
    topology = open_topology(examination.url, examination.options, examination.host)
    node = await topology.node_for("")
    server = RedisServer(examination.runtime, node.target)
    try:
        await server.look()
        await examine_server(examination, server)
    finally:
        await server.close()
