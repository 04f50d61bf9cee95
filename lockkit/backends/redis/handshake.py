"""
What lockkit checks on new connections: is it still the same server, does it keep its data, and does it use TLS?

A connection may fail because the server uses TLS and the URL does not, or the other way round. Neither side says so: a
TLS port closes the connection at the first command in plain text; Redis takes the first message of a TLS client for the
beginning of a line, and waits for its end. So lockkit tries the other way, on a separate connection, without
credentials, and only if the server has never answered.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from ssl import SSLError

from lockkit.backend import Host
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import Connection, open_connection
from lockkit.backends.redis.errors import DRIVER_ERRORS
from lockkit.backends.redis.resp import ServerSaid, bulk, pack
from lockkit.runtime import Runtime
from lockkit.units import Instant
from lockkit.validation import plain

log = logging.getLogger("lockkit")

VERSION_MIN = (6, 2)
"""Earlier servers lack ``SET … GET``, by which a grant reads and replaces the last token in one command."""

TLS_SHARE = 0.75
"""Share of the time that a first TLS connection may take. The rest is for this probe; more leaves it too little."""

TLS_SECONDS = 0.5
"""Longest time for a TLS handshake. Longer delays the error of a server that ends connections for another reason."""

_TRUSTING = {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
"""Trust any certificate: nothing secret is sent."""


class Handshake:
    """
    Checks the server behind each new connection.

    All nodes that stand for the same data share one: behind a Sentinel the node changes, which has to be noticed.
    """

    def __init__(
        self,
        host: Host,
        *,
        masters_only: bool = False,
        in_cluster: bool = False,
        votes: bool = False,
        durable: bool = True,
    ) -> None:
        """With `votes`, only a server that tells its run id passes, unless it is `durable`."""
        self._host = host
        self._masters_only = masters_only
        self._in_cluster = in_cluster
        self._votes = votes
        self._durable = durable
        self._known: tuple[str | None, str | None] | None = None
        self._warned = False

    async def __call__(self, connection: Connection, until: Instant) -> None:
        """
        Check the server.

        ServerSaid: It is a replica and must be a master, requires a password, is too old, or is another kind of
        server.
        """
        sections = [pack("INFO", section) for section in ("server", "replication", "memory")]
        replies = await connection.call_many(b"".join(sections), len(sections), until)
        facts: dict[str, str] = {}
        for reply in replies:
            if isinstance(reply, bytes):
                facts.update(info_fields(reply))
            elif isinstance(reply, ServerSaid) and (
                reply.code == "NOAUTH" or (self._votes and reply.code not in {"NOPERM", "ERR"})
            ):
                raise reply
            # Else the user has no right to INFO: then lockkit checks nothing.
        run_id, role = facts.get("run_id"), facts.get("role")
        connection.run_id = bulk(run_id or "")
        if run_id is None and not self._durable:
            message = f"NORUNID INFO: {next(filter(None, map(str, replies)))}" if not facts else "NORUNID no run_id"
            raise ServerSaid(message)
        if refusal := self._refusal(facts):
            raise ServerSaid(refusal)
        self._warn_of_eviction(facts)
        changed = self._known is not None and self._known != (run_id, role)
        if run_id is not None:  # else it is busy with a script and cannot tell, and may be another
            self._known = run_id, role
        if changed:
            log.info("the Redis server has changed (restart or failover): lockkit confirms all leases")
            self._host.confirm_soon()

    def _refusal(self, facts: Mapping[str, str]) -> str:
        version = facts.get("redis_version", "")
        if is_mode("sentinel", facts):
            return "NODATA it is a Sentinel"
        if not self._in_cluster and is_mode("cluster", facts):
            return "INCLUSTER it runs with cluster-enabled"
        if version and version_of(version) < VERSION_MIN:
            return f"TOOOLD it is Redis {version}"
        return "READONLY it is a replica now" if facts.get("role") == "slave" and self._masters_only else ""

    def _warn_of_eviction(self, facts: dict[str, str]) -> None:
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and facts.get("maxmemory", "0") != "0" and not self._warned:
            self._warned = True
            log.warning(
                "the Redis server may evict locks that are held when its memory is full (maxmemory-policy %s): "
                "set maxmemory-policy noeviction, or use a separate server for locks",
                plain(policy, 64),
            )


def version_of(text: str) -> tuple[int, ...]:
    """Read a version: ``7.0.15`` and ``7.2.4-rc1`` alike."""
    return tuple(int(digits or 0) for digits in re.findall(r"(?:^|\.)(\d*)", text))


def is_mode(mode: str, facts: Mapping[str, str]) -> bool:
    """Tell from ``INFO server`` what it is: "sentinel", "cluster"; Valkey names the field differently."""
    return mode in {facts.get("redis_mode"), facts.get("server_mode")}


def info_fields(info: bytes) -> dict[str, str]:
    """Parse the ``name:value`` lines of INFO."""
    lines = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


async def other_form(runtime: Runtime, target: Target, error: BaseException, until: float) -> str | None:
    """Say what is wrong, if the server answers in the other way and the error may come of that."""
    try_tls = target.form == "tcp"
    left_seconds = until - runtime.now()
    if try_tls:
        left_seconds = min(left_seconds, TLS_SECONDS)
    # In plain text a TLS port closes the connection at the first command, or answers with an alert.
    signs = (ConnectionError,) if try_tls else (TimeoutError, SSLError)
    if left_seconds <= 0 or target.form == "unix" or not isinstance(error, signs):
        return None
    if isinstance(error, ConnectionRefusedError):
        return None
    limits = {"socket_timeout": left_seconds, "socket_connect_timeout": left_seconds}
    where = {name: target.arguments[name] for name in ("host", "port")}
    other = Target({**where, **limits, **(_TRUSTING if try_tls else {})}, "tls" if try_tls else "tcp", target.label)
    until = runtime.now() + left_seconds
    try:
        connection = await open_connection(runtime, other, until, log_in=not try_tls)
    except DRIVER_ERRORS:
        return None
    connection.close()
    return "the port answers in TLS" if try_tls else "the port answers in plain text"
