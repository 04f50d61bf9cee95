"""What lockkit checks on each new connection: is it still the same server, and does it keep its data?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lockkit.backends.redis.resp import ServerSaid, pack

if TYPE_CHECKING:
    from lockkit.backend import Host
    from lockkit.backends.redis.connection import Connection
    from lockkit.units import Instant

__all__ = ["Handshake", "info_fields"]

log = logging.getLogger("lockkit")


class Handshake:
    """
    Checks the server behind each new connection.

    All nodes that stand for the same data share one: behind a Sentinel the node changes, which has to be noticed.
    """

    def __init__(self, host: Host, *, masters_only: bool = False) -> None:
        """
        Know no server yet.

        Args:
            host: Confirms all leases when the server is another one than before.
            masters_only: Refuse a replica (Sentinel may still name a master that was just replaced).
        """
        self._host = host
        self._masters_only = masters_only
        self._run_id: str | None = None
        self._role: str | None = None
        self._warned = False

    async def __call__(self, connection: Connection, until: Instant) -> None:
        """
        Check the server.

        Raises:
            ServerSaid: It is a replica and must be a master, or it requires a password.
        """
        sections = [pack("INFO", section) for section in ("server", "replication", "memory")]
        replies = await self._host.runtime.io(connection.call_many(b"".join(sections), len(sections), until))
        facts: dict[str, str] = {}
        for reply in replies:
            if isinstance(reply, ServerSaid) and reply.code == "NOAUTH":
                raise reply
            # A user without the right to INFO gets an error: then lockkit checks nothing.
            if isinstance(reply, bytes):
                facts.update(info_fields(reply))
        role, run_id = facts.get("role"), facts.get("run_id")
        if role == "slave" and self._masters_only:
            message = "READONLY it is a replica now"
            raise ServerSaid(message)
        self._warn_of_eviction(facts)
        changed = self._run_id is not None and (run_id, role) != (self._run_id, self._role)
        self._run_id, self._role = run_id, role
        if changed:
            log.info("the Redis server has changed (restart or failover): lockkit confirms all leases")
            self._host.confirm_soon()

    def _warn_of_eviction(self, facts: dict[str, str]) -> None:
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and facts.get("maxmemory", "0") != "0" and not self._warned:
            self._warned = True
            log.warning(
                "the Redis server may evict locks that are held when its memory is full (maxmemory-policy %s): "
                "set maxmemory-policy noeviction, or use a separate server for locks",
                policy,
            )


def info_fields(info: bytes) -> dict[str, str]:
    """Parse the ``name:value`` lines of INFO."""
    lines = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}
