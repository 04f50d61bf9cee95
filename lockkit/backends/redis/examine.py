"""What ``lockkit doctor`` finds at Redis and Valkey: single servers, the master behind Sentinels, and Clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import cast

from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import open_connection
from lockkit.backends.redis.errors import DRIVER_ERRORS, translate
from lockkit.backends.redis.groups import SLOTS_COUNT, ClusterTopology, SentinelTopology
from lockkit.backends.redis.handshake import VERSION_MIN, info_fields, is_mode, version_of
from lockkit.backends.redis.keys import lock_key, side_key
from lockkit.backends.redis.node import RedisNode
from lockkit.backends.redis.options import open_topology
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.doctor import timing
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import BackendUnavailable, LockError

FULL = 0.9
"""Share of a limit from which lockkit warns. Higher warns later, lower warns without need."""

MAJORITY_MIN = 3
"""The least number, of Sentinels or of masters in a Cluster, of which one may fail and a majority is left."""

_SECTIONS = ("server", "clients", "memory", "persistence", "replication", "cluster")

# By severity and page: what can happen to locks.
_RISKS = {
    (Severity.ERROR, "how-to/check-your-servers.md#redis-and-valkey"): {
        "redis-version": "The server lacks commands that lockkit needs: no lock can be taken.",
        "redis-writes-refused": "The server refuses writes because it could not save its data: no lock can be taken or "
        "renewed.",
    },
    (Severity.WARNING, "how-to/check-your-servers.md#redis-and-valkey"): {
        "redis-memory": "When memory is full the server refuses writes: no lock can be taken.",
        "redis-connections": "When no connection is left, clients cannot connect: a holder that reconnects cannot "
        "renew.",
    },
    (Severity.ERROR, "backends/redis.md#what-it-does-not-promise"): {
        "redis-eviction": "When memory is full the server removes locks that are held, and other clients can take "
        "them.",
    },
    (Severity.WARNING, "backends/redis.md#what-it-does-not-promise"): {
        "redis-no-persistence": "A restart of the server frees every lock that is held, and another client can take "
        "it.",
        "redis-snapshots-only": "A crash of the server frees the locks that were taken since the last snapshot, and "
        "brings back released ones.",
        "redis-appendfsync-no": "A crash of the machine loses the locks of about the last half minute: the kernel "
        "decides when to write.",
    },
    (Severity.INFO, "backends/redis.md#what-it-does-not-promise"): {
        "redis-appendfsync-everysec": "A crash of the machine (not of the server alone) may lose the locks of the last "
        "second or two.",
    },
    (Severity.ERROR, "backends/redis.md#url-and-options"): {
        "redis-replica": "The server is a read-only replica: no lock can be taken there.",
        "redis-replicas-missing": "No lock can be taken: every grant is undone because too few replicas acknowledge "
        "it.",
        "redis-cluster-node": "The server is one node of a Cluster and refuses the locks of all slots that it does not "
        "serve.",
        "redis-sentinel-given": "The server is a Sentinel, which keeps no data: no lock can be taken there.",
        "redis-rights": "Locks cannot be taken, renewed or released, or waiters are not woken: the server refuses what "
        "lockkit sends.",
    },
    (Severity.WARNING, "backends/redis.md#url-and-options"): {
        "redis-share-rights": "Read locks and semaphores cannot be used: the server refuses what lockkit sends for "
        "them. Locks work.",
        "redis-no-tls": "Anyone who can read the network traffic learns the password, and can take or break any lock "
        "with it.",
        "redis-no-password": "Anyone who can reach the server can break any lock, or flush them all.",
        "sentinel-one-named": "When that one is down, clients do not find the master although it works.",
    },
    (Severity.INFO, "backends/redis.md#url-and-options"): {
        "redis-hidden": "Some settings could not be read. Without INFO, lockkit also notices a failover later.",
    },
    (Severity.WARNING, "backends/redis.md#tls"): {
        "redis-certificate-unverified": "Anyone between client and server can pose as the server, learn the password, "
        "and take or break any lock with it.",
        "redis-host-unverified": "Anyone who has any certificate of the authority can pose as the server, and learn "
        "the password.",
    },
    (Severity.WARNING, "explanation/what-failover-does.md"): {
        "redis-failover-unguarded": "A master that is cut off goes on granting locks that no replica knows: after the "
        "failover they are granted twice.",
        "redis-replicas-not-all": "A failover may promote a replica that did not have to acknowledge a lock, which is "
        "then granted twice.",
    },
    (Severity.INFO, "explanation/what-failover-does.md"): {
        "redis-failover": "Replication is asynchronous: a promoted replica may not know the newest locks, and grant "
        "them again.",
    },
    (Severity.ERROR, "how-to/check-your-servers.md#sentinel"): {
        "sentinel-quorum-unreachable": "There will never be a failover: when the master fails, locks are unavailable "
        "until an administrator repairs it.",
        "sentinel-disagree": "Clients that ask different Sentinels lock on different servers: a lock is held twice.",
    },
    (Severity.WARNING, "how-to/check-your-servers.md#sentinel"): {
        "sentinel-few": "When one of them fails there is no majority left to agree on a failover: locks stand still "
        "with the master.",
        "sentinel-quorum-low": "A few Sentinels that are cut off from the master start a failover while it works: "
        "needless failovers lose locks.",
        "sentinel-no-replica": "There is no replica to promote: when the master fails, locks are unavailable until an "
        "administrator repairs it.",
        "sentinel-down": "One Sentinel fewer may fail before none names the master or agrees on a failover.",
    },
    (Severity.ERROR, "how-to/check-your-servers.md#cluster"): {
        "cluster-slots-missing": "Locks whose slot no node serves cannot be taken; with cluster-require-full-coverage "
        "no lock can.",
        "cluster-node-down": "The locks of its slots can neither be taken nor renewed.",
    },
    (Severity.WARNING, "how-to/check-your-servers.md#cluster"): {
        "cluster-few-masters": "When a master fails there is no majority left to promote its replica: its locks stand "
        "still.",
        "cluster-no-replica": "When this master fails, the locks of its slots are unavailable until an administrator "
        "repairs it.",
    },
}
CHECKS = {name: Check(name, kind[0], risk, kind[1]) for kind, risks in _RISKS.items() for name, risk in risks.items()}

# What `lockkit.backends.redis.backend` sends, by itself or in its scripts; see the page on it.
_COMMANDS = """
EVALSHA 0000000000000000000000000000000000000000 1 {lock}; SET {lock} x NX PX 1; GET {lock}; MGET {lock} {fence};
SET {fence} x PX 1 GET; EXISTS {lock}; DEL {lock}; PEXPIRE {lock} 1; PTTL {lock}; TIME; RPUSH {queue} x; LPOP {queue};
LPOS {queue} x; LRANGE {queue} 0 1; LREM {queue} 0 x; PUBLISH {channel} x; SUBSCRIBE {channel}; PUBSUB NUMSUB {channel}
"""
_REPLICAS_COMMANDS = "WAIT 1 1"
_REDLOCK_COMMANDS = "MGET {mark}; SET {mark} x"
_SHARE_COMMANDS = """
ZADD {shares} 1 x; ZREM {shares} x; ZSCORE {shares} x; ZCOUNT {shares} 0 1; ZRANGE {shares} 0 1;
ZRANGEBYSCORE {shares} 0 1; LPUSH {queue} x; HSET {leases} x x; HGET {leases} x; HDEL {leases} x; HEXISTS {leases} x;
HKEYS {leases}
"""


class RedisServer(RedisNode):
    """One server as the doctor examines it: by lockkit's connections, so as lockkit will reach it."""

    def __init__(self, examination: Examination, target: Target) -> None:
        super().__init__(examination.runtime, target)
        self.examination = examination
        self.facts: Mapping[str, str] = {}  # what INFO says, after `look`; empty where that is denied
        self.user = str(target.arguments.get("username") or "default")

    def find(self, check: Check | str, seen: str, fix: str) -> None:
        """Note a finding about this server."""
        self.examination.find(CHECKS[check] if isinstance(check, str) else check, self.label, seen, fix)

    async def look(self) -> None:
        """Read INFO."""
        reply = await self.ask("PING")
        # PING is refused too while writes are; what INFO says then is the finding.
        if isinstance(reply, ServerSaid) and reply.code not in {"MISCONF", "NOPERM"}:
            raise translate(reply, self.label) from reply
        facts: dict[str, str] = {}
        for section in _SECTIONS:
            reply = await self.ask("INFO", section)
            if isinstance(reply, bytes):
                facts.update(info_fields(reply))
        self.facts = facts

    async def ask(self, *words: str | int) -> Reply:
        """Run a command that changes nothing. An error reply is a value (`ServerSaid`)."""
        (reply,) = await self.call_many([pack(*words)])
        return reply

    async def setting(self, name: str) -> str | None:
        """Give a setting of the server's; None if this user may not see it, or there is none of that name."""
        reply = await self.ask("CONFIG", "GET", name)
        if not isinstance(reply, list) or len(reply) != 2:  # noqa: PLR2004 - a name and its value
            return None
        return cast("bytes", reply[1]).decode("utf-8", "replace")

    async def clock(self) -> float:
        """Give the server's time of day, seconds since 1970."""
        seconds, micros = cast("list[bytes]", await self.call(pack("TIME"), resend=True))
        return int(seconds) + int(micros) / 1e6

    async def lets_anybody_in(self) -> bool:
        """Tell whether a connection without user and password is served."""
        login = {"username", "password", "credential_provider"}
        arguments = {name: value for name, value in self.target.arguments.items() if name not in login}
        # Not RESP3: the server would already refuse its HELLO, with a different exception.
        anonymous = Target({**arguments, "protocol": 2, "db": 0}, self.target.form, self.label)
        try:
            connection = await open_connection(self._runtime, anonymous)
        except DRIVER_ERRORS:
            return False
        try:
            return not isinstance(await connection.call(pack("PING")), ServerSaid)
        except DRIVER_ERRORS:
            return False
        finally:
            connection.close()


async def examine(examination: Examination) -> None:
    """Examine the servers of a URL."""
    topology = open_topology(examination.url, examination.options, examination.host)
    if isinstance(topology, ClusterTopology):
        await _examine_cluster(examination, topology)
        return
    # Also when the Sentinels cannot be asked about anything else, this says where the master is.
    target = (await topology.node_for("")).target
    if isinstance(topology, SentinelTopology):
        await _examine_sentinels(examination, topology)
    server = RedisServer(examination, target)
    try:
        await server.look()
        await examine_server(server)
    finally:
        await server.close()


# -- one server, whatever it belongs to ------------------------------------------------------------------------------


async def examine_server(server: RedisServer, *, in_cluster: bool = False, votes: bool = False) -> None:
    """Examine one server after `RedisServer.look`."""
    facts = server.facts
    version = facts.get("valkey_version") or facts.get("redis_version")
    if version is not None:
        server.examination.note(f"version of {server.label}", f"{facts.get('server_name', 'redis')} {version}")
    if is_mode("sentinel", facts):
        advice = f"Use redis+sentinel://{server.label}/NAME_OF_THE_MASTER"
        server.find("redis-sentinel-given", "The server runs as a Sentinel.", advice)
        return
    await _examine_access(server)
    if facts:
        _examine_state(server, in_cluster=in_cluster)
    else:
        server.find("redis-hidden", "The user may not run INFO.", f"redis-cli ACL SETUSER {server.user} +info")
    await _examine_persistence(server, votes=votes)
    await _examine_replication(server)
    await _examine_rights(server, marks=votes)
    await server.examination.time(server.label, lambda: server.ask("PING"))
    try:
        offset, doubt = await timing.clock_offset(server.examination.runtime, server.clock)
    except LockError:
        return  # the right to TIME is missing, which is a separate finding
    timing.judge_clock(server.examination, server.label, offset, doubt)


async def _examine_access(server: RedisServer) -> None:
    target = server.target
    if target.form == "tcp" and not is_loopback(str(target.arguments["host"])):
        base, plus, driver = server.examination.url.scheme.partition("+")
        scheme = {"redlock": "redlocks"}.get(base, "rediss") + plus + driver
        server.find(
            "redis-no-tls",
            "The connection crosses a network and is not encrypted.",
            f"Set tls-port in redis.conf, and use {scheme}://…",
        )
    unverified = target.unverified(server.examination.runtime.kind)
    if unverified == "certificate":
        server.find(
            "redis-certificate-unverified",
            "The URL has ssl_cert_reqs=none: any certificate is accepted.",
            "Leave it out, and name the authority: ssl_ca_certs=/path/of/ca.pem",
        )
    elif unverified == "host":
        server.find(
            "redis-host-unverified",
            "The URL has ssl_check_hostname=false: a certificate for any host is accepted.",
            "Leave it out, and use the name or address that the server's certificate has",
        )
    if target.form != "unix" and await server.lets_anybody_in():
        server.find(
            "redis-no-password",
            "The user default needs no password.",
            "redis-cli ACL SETUSER default resetpass '>A_PASSWORD', and give it in the URL; or ACL SETUSER default off "
            "and a separate user for the locks",
        )


def _examine_state(server: RedisServer, *, in_cluster: bool) -> None:
    facts = server.facts
    # Valkey says there which version of Redis it is compatible with.
    version = facts.get("redis_version", "")
    if version and version_of(version) < VERSION_MIN:
        server.find("redis-version", f"The server is Redis {version}.", "Upgrade it to 6.2 or later, or to Valkey.")
    if facts.get("cluster_enabled") == "1" and not in_cluster:
        seen = "The server runs as a node of a Cluster."
        server.find("redis-cluster-node", seen, f"Use redis+cluster://{server.label}")
    limit, used = int(facts.get("maxmemory", 0)), int(facts.get("used_memory", 0))
    policy = facts.get("maxmemory_policy", "noeviction")
    if limit and policy != "noeviction":
        # The volatile-… policies too: locks have an expiry.
        server.find(
            "redis-eviction",
            f"maxmemory is {limit} bytes and maxmemory-policy is {policy}.",
            "redis-cli CONFIG SET maxmemory-policy noeviction, then CONFIG REWRITE; or give the locks a server of "
            "their own",
        )
    if limit and used > FULL * limit:
        advice = f"redis-cli CONFIG SET maxmemory {2 * limit}, then CONFIG REWRITE; or remove data"
        server.find("redis-memory", f"{100 * used // limit} % of maxmemory are used.", advice)
    connected, most = int(facts.get("connected_clients", 0)), int(facts.get("maxclients", 0))
    if most and connected > FULL * most:
        advice = f"redis-cli CONFIG SET maxclients {2 * most}; CLIENT LIST shows the connections"
        server.find("redis-connections", f"{connected} of {most} connections are in use.", advice)


async def _examine_persistence(server: RedisServer, *, votes: bool) -> None:
    facts = server.facts
    save, appendfsync = await server.setting("save"), await server.setting("appendfsync")
    if save is None or appendfsync is None:
        server.find(
            "redis-hidden",
            "The user may not run CONFIG GET: save, appendfsync and min-replicas-to-write were not looked at.",
            f"Run the doctor as a user with the right: redis-cli ACL SETUSER {server.user} '+config|get'",
        )
    # After a failed attempt to save, the server refuses writes (MISCONF).
    snapshot_failed = facts.get("rdb_last_bgsave_status") == "err" and bool(save)
    if snapshot_failed and await server.setting("stop-writes-on-bgsave-error") == "no":
        snapshot_failed = False
    if snapshot_failed or facts.get("aof_last_write_status") == "err":
        what = "snapshot" if snapshot_failed else "write to the append-only file"
        server.find(
            "redis-writes-refused",
            f"The last {what} failed.",
            "Check the server's log: mostly the disk is full, or its directory (CONFIG GET dir) is not writable",
        )
    if votes or not facts:
        return
    if facts.get("aof_enabled") == "1":
        if appendfsync == "no":
            advice = "redis-cli CONFIG SET appendfsync everysec (or always), then CONFIG REWRITE"
            server.find("redis-appendfsync-no", "appendfsync is no.", advice)
        elif appendfsync == "everysec":
            advice = "redis-cli CONFIG SET appendfsync always, then CONFIG REWRITE, if the cost of a flush is bearable"
            server.find("redis-appendfsync-everysec", "appendfsync is everysec.", advice)
        return
    advice = "redis-cli CONFIG SET appendonly yes, then CONFIG REWRITE"
    if save == "":
        server.find("redis-no-persistence", "appendonly is no, and there are no snapshots (save).", advice)
    elif save is not None:
        server.find("redis-snapshots-only", f"appendonly is no, and snapshots are made by: save {save}.", advice)


async def _examine_replication(server: RedisServer) -> None:
    facts = server.facts
    if not facts:
        return
    if facts.get("role") == "slave":
        master = f"{facts.get('master_host')}:{facts.get('master_port')}"
        advice = f"Give the master's address, {master}, or let Sentinels find it: redis+sentinel://…"
        server.find("redis-replica", f"The server is a replica of {master}.", advice)
        return
    count, wanted = int(facts.get("connected_slaves", 0)), server.examination.options.get("replicas") or 0
    seen = f"The URL asks for replicas={wanted}, and {count} follow the server."
    if wanted > count:
        advice = f"Attach {wanted - count} more (redis-cli -h REPLICA REPLICAOF …), or lower replicas="
        server.find("redis-replicas-missing", seen, advice)
    if 0 < wanted < count:
        server.find("redis-replicas-not-all", seen, f"Name all of them: ?replicas={count}")
    if not count:
        return
    least = await server.setting("min-replicas-to-write")
    # INFO has this field only where the setting is in force.
    guarded = "min_slaves_good_slaves" in facts if least is None else least != "0"
    if guarded or wanted:
        server.find(
            "redis-failover",
            f"Replicas that follow the server: {count}.",
            "Let storage refuse lower tokens (docs: how-to/guard-your-storage.md), or use redlock:// or etcd://",
        )
    else:
        server.find(
            "redis-failover-unguarded",
            f"Replicas that follow the server: {count}; min-replicas-to-write is 0, and the URL has no replicas=.",
            "redis-cli CONFIG SET min-replicas-to-write 1, then CONFIG REWRITE, on master and replicas; "
            f"or ?replicas={count} in the URL",
        )


async def _examine_rights(server: RedisServer, *, marks: bool) -> None:
    """Find commands, keys and channels that the server would refuse, without running any command."""
    options = server.examination.options
    prefix = options["prefix"]
    lock = lock_key(prefix, "x")
    names = {what: side_key(lock, what) for what in ("fence", "queue", "shares", "leases")}
    names |= {"lock": lock, "channel": f"{prefix}:wake:x", "mark": f"{{{prefix}}}:redlock"}
    needed = _COMMANDS + (f";{_REPLICAS_COMMANDS}" if options.get("replicas") else "")
    refusals: dict[str, list[list[str]]] = {}
    tables = {"redis-rights": f"{needed};{_REDLOCK_COMMANDS}"} if marks else {"redis-rights": needed}
    if not marks:
        tables["redis-share-rights"] = _SHARE_COMMANDS
    script = files("lockkit.backends.redis").joinpath("scripts", "rights.lua").read_text("utf-8")
    for check, table in tables.items():
        commands = [[word.format(**names) for word in line.split()] for line in table.split(";")]
        words: list[str | int] = []
        for command in commands:
            words += (len(command), *command)
        reply = await server.ask("EVAL", script, 0, *words)
        if isinstance(reply, ServerSaid):
            if reply.code == "NOPERM":
                await _find_rights(check, server, "The user may not run scripts (EVAL).", ["eval", "evalsha"])
            return
        if isinstance(reply, list):  # before Redis 7 a user cannot be asked about; a missing right shows as an error
            refusals[check] = [commands[cast("int", index) - 1] for index in reply]
    for check, refused in refusals.items():
        if refused:
            shown = ", ".join(" ".join(command[:2]) for command in refused)
            rules = {"pubsub|numsub" if command[0] == "PUBSUB" else command[0].lower() for command in refused}
            await _find_rights(check, server, f"The user may not run: {shown}.", sorted(rules))


async def _find_rights(check: str, server: RedisServer, seen: str, names: Sequence[str]) -> None:
    who = await server.ask("ACL", "WHOAMI")
    user = who.decode() if isinstance(who, bytes) else server.user
    prefix = server.examination.options["prefix"]
    rules = [f"'~{prefix}:*'" if prefix else "'~*'", f"'~{{{prefix}*'", f"'&{prefix}:wake:*'"]
    rules += [f"'+{name}'" for name in names]
    server.find(check, seen, f"redis-cli ACL SETUSER {user} {' '.join(rules)}")


# -- several servers -------------------------------------------------------------------------------------------------


async def _examine_sentinels(examination: Examination, topology: SentinelTopology) -> None:
    """Examine the Sentinels of the URL."""
    views: dict[RedisServer, dict[str, str]] = {}
    for node in topology.sentinels:
        sentinel = RedisServer(examination, node.target)
        view = await _ask_sentinel(sentinel, topology.service_name)
        if view is not None:
            views[sentinel] = view
    await topology.close()
    if len({f"{view['ip']}:{view['port']}" for view in views.values()}) > 1:
        named = "; ".join(f"{server.label} names {view['ip']}:{view['port']}" for server, view in views.items())
        examination.find(
            CHECKS["sentinel-disagree"],
            examination.url.safe_text,
            f"The Sentinels name different masters: {named}.",
            "Check whether they watch the same servers (redis-cli -p PORT SENTINEL CKQUORUM NAME), and SENTINEL RESET "
            "NAME where one does not",
        )
    for server, view in views.items():
        _judge_view(server, view, named_count=len(topology.sentinels))


async def _ask_sentinel(sentinel: RedisServer, name: str) -> dict[str, str] | None:
    """Give what a Sentinel knows of the master; None if it cannot be asked."""
    try:
        reply = await sentinel.ask("SENTINEL", "MASTER", name)
    except BackendUnavailable:
        seen, advice = "The Sentinel does not answer.", "Start it, or remove it from the URL."
    else:
        if not isinstance(reply, ServerSaid):
            words = [word.decode("utf-8", "replace") for word in cast("list[bytes]", reply)]
            return dict(zip(words[::2], words[1::2], strict=True))
        seen = f"The Sentinel refuses to name {name!r} ({reply.code})."
        advice = f"redis-cli -p PORT SENTINEL MONITOR {name} …, or give sentinel_username= and sentinel_password="
    finally:
        await sentinel.close()
    sentinel.find("sentinel-down", seen, advice)
    return None


def _judge_view(server: RedisServer, view: dict[str, str], *, named_count: int) -> None:
    """Judge what one Sentinel knows. What all of them say becomes one finding."""
    name = view["name"]
    count, quorum = int(view["num-other-sentinels"]) + 1, int(view["quorum"])
    majority = count // 2 + 1
    if count < MAJORITY_MIN:
        seen = f"{count} Sentinels watch the master, the least that survives a failure is {MAJORITY_MIN}."
        server.find("sentinel-few", seen, f"Start more, each with: sentinel monitor {name} HOST PORT 2")
    advice = f"redis-cli -p PORT SENTINEL SET {name} quorum {majority}, at each Sentinel"
    if quorum > count:
        seen = f"The quorum is {quorum}, and there are {count} Sentinels."
        server.find("sentinel-quorum-unreachable", seen, advice)
    elif quorum < majority:
        seen = f"The quorum is {quorum}, a majority of the {count} Sentinels is {majority}."
        server.find("sentinel-quorum-low", seen, advice)
    if int(view["num-slaves"]) == 0:
        advice = f"Start one with: replicaof {view['ip']} {view['port']}"
        server.find("sentinel-no-replica", "The master has no replica.", advice)
    if named_count == 1 < count:
        seen = f"The URL names one Sentinel of {count}."
        server.find("sentinel-one-named", seen, "Name all of them: redis+sentinel://host1,host2,host3/NAME")


async def _examine_cluster(examination: Examination, topology: ClusterTopology) -> None:
    """Examine the Cluster by the answers of its nodes, then each master."""
    targets = [node.target for node in await topology.masters()]
    await topology.close()
    if len(targets) < MAJORITY_MIN:
        examination.find(
            CHECKS["cluster-few-masters"],
            examination.url.safe_text,
            f"{len(targets)} masters serve the slots, the least that survives a failure is {MAJORITY_MIN}.",
            "redis-cli --cluster add-node NEW_HOST:PORT HOST:PORT, then redis-cli --cluster rebalance",
        )
    for target in targets:
        server = RedisServer(examination, target)
        try:
            await server.look()
        except BackendUnavailable:
            server.find("cluster-node-down", "The master does not answer.", "Start it, or check its log.")
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
            "cluster-slots-missing",
            f"cluster_state is {info.get('cluster_state')}, and {served} of {SLOTS_COUNT} slots are served.",
            "redis-cli --cluster fix HOST:PORT; redis-cli --cluster check HOST:PORT says which are missing",
        )
    if server.facts.get("connected_slaves") == "0":
        advice = "redis-cli --cluster add-node NEW_HOST:PORT HOST:PORT --cluster-slave"
        server.find("cluster-no-replica", "The master has no replica.", advice)
