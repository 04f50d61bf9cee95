"""What can be wrong with one Redis or Valkey server, whatever it belongs to."""

from __future__ import annotations

from functools import partial

from lockkit.backends.redis.examine.server import RedisServer, examine_rights
from lockkit.backends.redis.handshake import VERSION_MIN, is_sentinel, version_of
from lockkit.doctor import timing
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import LockError

FULL = 0.9
"""Share of a limit from which lockkit warns. Higher warns later, lower warns without need."""

_PAGE = "how-to/check-your-servers.md#redis-and-valkey"
_LIMITS = "backends/redis.md#what-it-does-not-promise"

_error = partial(Check, severity=Severity.ERROR, page="backends/redis.md#url-and-options")
_warning = partial(Check, severity=Severity.WARNING, page="backends/redis.md#url-and-options")
_info = partial(Check, severity=Severity.INFO, page="backends/redis.md#url-and-options")

VERSION = _error(
    "redis-version", risk="The server lacks commands that lockkit needs: no lock can be taken.", page=_PAGE
)
NO_PERSISTENCE = _warning(
    "redis-no-persistence",
    risk="A restart of the server frees every lock that is held, and another client can take it.",
    page=_LIMITS,
)
SNAPSHOTS_ONLY = _warning(
    "redis-snapshots-only",
    risk="A crash of the server frees the locks that were taken since the last snapshot, and brings back released "
    "ones.",
    page=_LIMITS,
)
APPENDFSYNC_NO = _warning(
    "redis-appendfsync-no",
    risk="A crash of the machine loses the locks of about the last half minute: the kernel decides when to write.",
    page=_LIMITS,
)
APPENDFSYNC_EVERYSEC = _info(
    "redis-appendfsync-everysec",
    risk="A crash of the machine (not of the server alone) may lose the locks of the last second or two.",
    page=_LIMITS,
)
EVICTION = _error(
    "redis-eviction",
    risk="When memory is full the server removes locks that are held, and other clients can take them.",
    page=_LIMITS,
)
MEMORY = _warning(
    "redis-memory", risk="When memory is full the server refuses writes: no lock can be taken.", page=_PAGE
)
CONNECTIONS = _warning(
    "redis-connections",
    risk="When no connection is left, clients cannot connect: a holder that reconnects cannot renew.",
    page=_PAGE,
)
WRITES_REFUSED = _error(
    "redis-writes-refused",
    risk="The server refuses writes because it could not save its data: no lock can be taken or renewed.",
    page=_PAGE,
)
REPLICA = _error("redis-replica", risk="The server is a read-only replica: no lock can be taken there.")
FAILOVER = _info(
    "redis-failover",
    risk="Replication is asynchronous: a promoted replica may not know the newest locks, and grant them again.",
    page="explanation/what-failover-does.md",
)
FAILOVER_UNGUARDED = _warning(
    "redis-failover-unguarded",
    risk="A master that is cut off goes on granting locks that no replica knows: after the failover they are granted "
    "twice.",
    page="explanation/what-failover-does.md",
)
REPLICAS_MISSING = _error(
    "redis-replicas-missing",
    risk="No lock can be taken: every grant is undone because too few replicas acknowledge it.",
)
REPLICAS_NOT_ALL = _warning(
    "redis-replicas-not-all",
    risk="A failover may promote a replica that did not have to acknowledge a lock, which is then granted twice.",
    page="explanation/what-failover-does.md",
)
NO_TLS = _warning(
    "redis-no-tls",
    risk="Anyone who can read the network traffic learns the password, and can take or break any lock with it.",
)
CERTIFICATE_UNVERIFIED = _warning(
    "redis-certificate-unverified",
    risk="Anyone between client and server can pose as the server, learn the password, and take or break any lock "
    "with it.",
    page="backends/redis.md#tls",
)
HOST_UNVERIFIED = _warning(
    "redis-host-unverified",
    risk="Anyone who has any certificate of the authority can pose as the server, and learn the password.",
    page="backends/redis.md#tls",
)
NO_PASSWORD = _warning(
    "redis-no-password", risk="Anyone who can reach the server can break any lock, or flush them all."
)
HIDDEN = _info(
    "redis-hidden", risk="Some settings could not be read. Without INFO, lockkit also notices a failover later."
)
CLUSTER_NODE = _error(
    "redis-cluster-node",
    risk="The server is one node of a Cluster and refuses the locks of all slots that it does not serve.",
)
SENTINEL_GIVEN = _error(
    "redis-sentinel-given", risk="The server is a Sentinel, which keeps no data: no lock can be taken there."
)


async def examine_server(server: RedisServer, *, in_cluster: bool = False, votes: bool = False) -> None:
    """Examine one server after `RedisServer.look`."""
    facts = server.facts
    version = facts.get("valkey_version") or facts.get("redis_version")
    if version is not None:
        server.examination.note(f"version of {server.label}", f"{facts.get('server_name', 'redis')} {version}")
    if is_sentinel(facts):
        server.find(
            SENTINEL_GIVEN, "The server runs as a Sentinel.", f"Use redis+sentinel://{server.label}/NAME_OF_THE_MASTER"
        )
        return
    _examine_access(server)
    if server.target.form != "unix" and await server.lets_anybody_in():
        server.find(
            NO_PASSWORD,
            "The user default needs no password.",
            "redis-cli ACL SETUSER default resetpass '>A_PASSWORD', and give it in the URL; or ACL SETUSER default off "
            "and a separate user for the locks",
        )
    _examine_state(server, in_cluster=in_cluster)
    await _examine_persistence(server, votes=votes)
    await _examine_replication(server)
    await examine_rights(server, marks=votes)
    await server.examination.time(server.label, server.ping)
    try:
        offset, doubt = await timing.clock_offset(server.examination.runtime, server.clock)
    except LockError:
        return  # the right to TIME is missing, which is a separate finding
    timing.judge_clock(server.examination, server.label, offset, doubt)


def _examine_access(server: RedisServer) -> None:
    target = server.target
    if target.form == "tcp" and not is_loopback(str(target.arguments["host"])):
        server.find(
            NO_TLS,
            "The connection crosses a network and is not encrypted.",
            f"Set tls-port in redis.conf, and use {_with_tls(server.examination.url.scheme)}://…",
        )
    unverified = target.unverified(server.examination.runtime.kind)
    if unverified == "certificate":
        server.find(
            CERTIFICATE_UNVERIFIED,
            "The URL has ssl_cert_reqs=none: any certificate is accepted.",
            "Leave it out, and name the authority: ssl_ca_certs=/path/of/ca.pem",
        )
    elif unverified == "host":
        server.find(
            HOST_UNVERIFIED,
            "The URL has ssl_check_hostname=false: a certificate for any host is accepted.",
            "Leave it out, and use the name or address that the server's certificate has",
        )


def _with_tls(scheme: str) -> str:
    base, plus, driver = scheme.partition("+")
    return {"redlock": "redlocks"}.get(base, "rediss") + plus + driver


def _examine_state(server: RedisServer, *, in_cluster: bool) -> None:
    facts, label = server.facts, server.label
    if not facts:
        server.find(
            HIDDEN,
            "The user may not run INFO.",
            f"redis-cli ACL SETUSER {server.target.arguments.get('username') or 'default'} +info",
        )
        return
    # Valkey says there which version of Redis it is compatible with.
    version = facts.get("redis_version", "")
    if version and version_of(version) < VERSION_MIN:
        server.find(VERSION, f"The server is Redis {version}.", "Upgrade it to 6.2 or later, or to Valkey.")
    if facts.get("cluster_enabled") == "1" and not in_cluster:
        server.find(CLUSTER_NODE, "The server runs as a node of a Cluster.", f"Use redis+cluster://{label}")
    _examine_memory(server)
    connected, most = int(facts.get("connected_clients", 0)), int(facts.get("maxclients", 0))
    if most and connected > FULL * most:
        server.find(
            CONNECTIONS,
            f"{connected} of {most} connections are in use.",
            f"redis-cli CONFIG SET maxclients {2 * most}; CLIENT LIST shows the connections",
        )


def _examine_memory(server: RedisServer) -> None:
    facts = server.facts
    limit, used = int(facts.get("maxmemory", 0)), int(facts.get("used_memory", 0))
    policy = facts.get("maxmemory_policy", "noeviction")
    if limit and policy != "noeviction":
        # The volatile-… policies too: locks have an expiry.
        server.find(
            EVICTION,
            f"maxmemory is {limit} bytes and maxmemory-policy is {policy}.",
            "redis-cli CONFIG SET maxmemory-policy noeviction, then CONFIG REWRITE; or give the locks a server of "
            "their own",
        )
    if limit and used > FULL * limit:
        server.find(
            MEMORY,
            f"{100 * used // limit} % of maxmemory are used.",
            f"redis-cli CONFIG SET maxmemory {2 * limit}, then CONFIG REWRITE; or remove data",
        )


async def _examine_persistence(server: RedisServer, *, votes: bool) -> None:
    facts = server.facts
    save, appendfsync = await server.setting("save"), await server.setting("appendfsync")
    if save is None or appendfsync is None:
        server.find(
            HIDDEN,
            "The user may not run CONFIG GET: save, appendfsync and min-replicas-to-write were not looked at.",
            f"Run the doctor as a user with the right: redis-cli ACL SETUSER "
            f"{server.target.arguments.get('username') or 'default'} '+config|get'",
        )
    await _examine_saving(server, save)
    if votes or not facts:
        return
    if facts.get("aof_enabled") == "1":
        if appendfsync == "no":
            advice = "redis-cli CONFIG SET appendfsync everysec (or always), then CONFIG REWRITE"
            server.find(APPENDFSYNC_NO, "appendfsync is no.", advice)
        elif appendfsync == "everysec":
            advice = "redis-cli CONFIG SET appendfsync always, then CONFIG REWRITE, if the cost of a flush is bearable"
            server.find(APPENDFSYNC_EVERYSEC, "appendfsync is everysec.", advice)
        return
    advice = "redis-cli CONFIG SET appendonly yes, then CONFIG REWRITE"
    if save == "":
        server.find(NO_PERSISTENCE, "appendonly is no, and there are no snapshots (save).", advice)
    elif save is not None:
        server.find(SNAPSHOTS_ONLY, f"appendonly is no, and snapshots are made by: save {save}.", advice)


async def _examine_saving(server: RedisServer, save: str | None) -> None:
    """Check whether the last attempt to save failed: then the server refuses writes (MISCONF)."""
    facts = server.facts
    snapshot_failed = facts.get("rdb_last_bgsave_status") == "err" and bool(save)
    if snapshot_failed and await server.setting("stop-writes-on-bgsave-error") == "no":
        snapshot_failed = False
    if snapshot_failed or facts.get("aof_last_write_status") == "err":
        what = "snapshot" if snapshot_failed else "write to the append-only file"
        server.find(
            WRITES_REFUSED,
            f"The last {what} failed.",
            "Check the server's log: mostly the disk is full, or its directory (CONFIG GET dir) is not writable",
        )


async def _examine_replication(server: RedisServer) -> None:
    facts = server.facts
    if not facts:
        return
    if facts.get("role") == "slave":
        master = f"{facts.get('master_host')}:{facts.get('master_port')}"
        server.find(
            REPLICA,
            f"The server is a replica of {master}.",
            f"Give the master's address, {master}, or let Sentinels find it: redis+sentinel://…",
        )
        return
    replicas_count, wanted = int(facts.get("connected_slaves", 0)), server.examination.options.get("replicas") or 0
    if wanted > replicas_count:
        server.find(
            REPLICAS_MISSING,
            f"The URL asks for replicas={wanted}, and {replicas_count} follow the server.",
            f"Attach {wanted - replicas_count} more (redis-cli -h REPLICA REPLICAOF …), or lower replicas=",
        )
    if 0 < wanted < replicas_count:
        server.find(
            REPLICAS_NOT_ALL,
            f"The URL asks for replicas={wanted}, and {replicas_count} follow the server.",
            f"Name all of them: ?replicas={replicas_count}",
        )
    if not replicas_count:
        return
    least = await server.setting("min-replicas-to-write")
    # INFO has this field only where the setting is in force.
    guarded = "min_slaves_good_slaves" in facts if least is None else least != "0"
    if guarded or wanted:
        server.find(
            FAILOVER,
            f"Replicas that follow the server: {replicas_count}.",
            "Let storage refuse lower tokens (docs: how-to/guard-your-storage.md), or use redlock:// or etcd://",
        )
    else:
        server.find(
            FAILOVER_UNGUARDED,
            f"Replicas that follow the server: {replicas_count}; min-replicas-to-write is 0, and the URL has no "
            "replicas=.",
            "redis-cli CONFIG SET min-replicas-to-write 1, then CONFIG REWRITE, on master and replicas; "
            f"or ?replicas={replicas_count} in the URL",
        )
