"""Examines ``etcd:`` URLs: each member of the URL, and the cluster that they belong to."""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from lockkit.backends.etcd import cluster as etcd
from lockkit.backends.etcd import keys
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.cluster import Cluster, Metadata, Method
from lockkit.backends.etcd.errors import DRIVER_ERRORS, details_of, translate
from lockkit.backends.etcd.options import DEFAULT_PORT, FILES, open_cluster
from lockkit.backends.tls import client_context
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.doctor.members import judge_members, member_checks
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import monotonic
from lockkit.url import HostPort

_PAGE = "how-to/check-your-servers.md#etcd"

VERSION_MIN = (3, 4)

NEARLY_FULL = 0.8
"""Share of the quota from which the doctor warns. Larger leaves less time to compact and defragment."""

MEMBER_SECONDS = 2.0
"""Longest wait for one member. Longer waits for members that are down; shorter mistakes a busy one for one."""

_error = partial(Check, severity=Severity.ERROR, page=_PAGE)
_info = partial(Check, severity=Severity.INFO, page=_PAGE)
_warning = partial(Check, severity=Severity.WARNING, page=_PAGE)

VERSION = _error("etcd-version", risk="The member lacks calls that lockkit needs.")
NO_LEADER = _error(
    "etcd-no-leader",
    risk="Without a leader no lock can be acquired or renewed, and leases are lost at the end of their ttl.",
)
MEMBER_DOWN = _warning("etcd-member-down", risk="One member fewer may fail before locking stops.")
_MEMBERS = ALONE, FEW, EVEN, ONE_NAMED = member_checks("etcd", _PAGE)
NO_SPACE = _error("etcd-no-space", risk="The cluster refuses writes: no lock can be acquired until the alarm is off.")
CORRUPT = _error("etcd-corrupt", risk="Members have different data: a lock may be held twice.")
RESTORED = _warning(
    "etcd-restored",
    risk="Its revision, the source of tokens, may have gone back: storage then refuses new holders as stale. Locks "
    "acquired after the backup may be held twice.",
    page="backends/etcd.md#tokens",
)
QUOTA = _warning("etcd-quota", risk="When the quota is used up, the cluster refuses writes: no lock can be acquired.")
NO_COMPACTION = _warning(
    "etcd-no-compaction",
    risk="Each change of a lock stays in the database; when that is full, no lock can be acquired.",
)
NO_TLS = _warning("etcd-no-tls", risk="Anyone who sees the network can read the password, and break any lock.")
NO_AUTH = _warning("etcd-no-auth", risk="Anyone who reaches the cluster can break any lock.")
HIDDEN = _info(
    "etcd-hidden",
    risk="The version, alarms and quota, and whether the cluster was restored from a backup, were not looked at.",
)
RIGHTS = _error("etcd-rights", risk="Locks cannot be acquired, renewed or released.")
NO_RENEWAL = _error("etcd-no-renewal", risk="Leases are lost at the end of their ttl, also while their holders live.")
TTL_RAISED = _warning("etcd-ttl-raised", risk="When a holder dies, its lock becomes free later than after the ttl.")

_FULL = "Run etcdctl compact REVISION, etcdctl defrag --cluster, etcdctl alarm disarm; or raise --quota-backend-bytes"
_REPAIR = "Restore the corrupt member from the others (etcdctl member remove and add), then run etcdctl alarm disarm"
_ALARMS = {"NOSPACE": (NO_SPACE, _FULL), "CORRUPT": (CORRUPT, _REPAIR)}


async def examine(examination: Examination) -> None:
    """Examine each member of the URL, then use the cluster as a lock would."""
    url, where = examination.url, examination.url.safe_text
    cluster = open_cluster(url, examination.options, examination.host)
    statuses: list[rpc.StatusResponse] = []
    leading: list[HostPort] = []
    down: list[str] = []
    try:
        for host in url.hosts:
            try:
                status = await _examine_member(examination, host)
            except BackendUnavailable as error:
                down.append(str(error))
                continue
            if status is not None:
                statuses.append(status)
            # One that keeps its status to itself has checked a login, which takes a leader.
            if status is None or status.leader:
                leading.append(host)
        if len(down) == len(url.hosts):
            raise BackendUnavailable(f"no member of {where} answered: {'; '.join(down)}", backend=where)
        if not leading:
            fix = "Start members until a majority runs; their logs name the members that they cannot reach"
            examination.find(NO_LEADER, where, "No member knows a leader.", fix)
            return
        _examine_log(examination, statuses)
        answer, login = await _ask(examination, leading[0], etcd.MEMBER_LIST, rpc.MemberListRequest())
        judge_members(examination, _MEMBERS, sum(not member.isLearner for member in answer.members))
        if not login and examination.options["cert"] is None:
            fix = (
                "Run etcdctl user add root, user grant-role root root, auth enable; add users with rights to the prefix"
            )
            examination.find(NO_AUTH, where, "The cluster requires no login.", fix)
        await _examine_locking(examination, cluster)
    finally:
        await cluster.close()


async def _ask(
    examination: Examination, host: HostPort, method: Method, request: object, *, login: bool = True
) -> tuple[Any, Metadata]:
    """Send a request to one member, once; return the answer and the login."""
    url = replace(examination.url, hosts=(host,))
    cluster = open_cluster(url, examination.options, examination.host)
    connection = cluster.connection()
    try:
        metadata = await cluster.obtain_login(connection, monotonic() + MEMBER_SECONDS) if login else None
        return await connection.call(method, request, MEMBER_SECONDS, metadata), metadata
    except DRIVER_ERRORS as error:
        raise translate(error, connection.label) from error
    finally:
        await cluster.close()


async def _examine_member(examination: Examination, host: HostPort) -> rpc.StatusResponse | None:
    """Ask a member for its status, which most give also without a leader; None: it hides it from all but root."""
    label = f"{host.host}:{host.port or DEFAULT_PORT}"
    if examination.url.base != "etcds" and not is_loopback(host.host):
        password = ", with the password in clear text" if examination.url.password else ""
        seen = f"The connection crosses a network without encryption{password}."
        fix = "Start the member with --cert-file, --key-file and --client-cert-auth, and use etcds://…?ca=…"
        examination.find(NO_TLS, label, seen, fix)
    ask = partial(_ask, examination, host, etcd.STATUS, rpc.StatusRequest())
    try:
        # Without a login if possible: without a leader nobody can log in.
        try:
            status, _ = await ask(login=False)
        except ConfigurationError:
            status, _ = await ask()
    except BackendUnavailable as error:
        examination.find(MEMBER_DOWN, label, f"The member does not answer: {error}.", "Start it, or read its log.")
        raise
    except ConfigurationError as error:
        if not _is_permission(error):
            raise
        seen = "The user may not ask the member for its status."
        examination.find(HIDDEN, label, seen, "Run the doctor as a user with the role root")
        return None
    examination.note(f"version of {label}", f"etcd {status.version}")
    numbers = tuple(int(part) for part in status.version.split(".")[:2] if part.isdigit())
    if numbers and numbers < VERSION_MIN:
        examination.find(VERSION, label, f"The member is etcd {status.version}.", "Upgrade it to 3.4 or later.")
    for name, (check, fix) in _ALARMS.items():
        if any(f"alarm:{name}" in text for text in status.errors):
            examination.find(check, label, f"The alarm {name} is on.", fix)
    _examine_space(examination, host, label, status)
    return cast("rpc.StatusResponse", status)


def _examine_log(examination: Examination, statuses: Sequence[rpc.StatusResponse]) -> None:
    """
    Compare the revision with the length of the raft log.

    Each change takes an entry of the log, so the log has at least as many entries as there are revisions; but restoring
    a backup keeps the revision and starts a new log. This doesn't notice data directories that were copied back, nor a
    restored cluster that has had as many changes since.
    """
    revision = max((status.header.revision for status in statuses), default=0)
    entries = max((status.raftIndex for status in statuses), default=0)
    # The revision of an empty cluster is 1.
    if revision > entries + 1:
        seen = f"The cluster is at revision {revision} after {entries} log entries: it was restored from a backup."
        fix = (
            "Raise the tokens that storage remembers, or restore with etcdutl snapshot restore "
            "--bump-revision 1000000000 --mark-compacted (etcd 3.5.9 or later); ignore it if that was done"
        )
        examination.find(RESTORED, examination.url.safe_text, seen, fix)


def _examine_space(examination: Examination, host: HostPort, label: str, status: rpc.StatusResponse) -> None:
    """Look for a database that is nearly full, or grows for ever."""
    metrics = _get(examination, host, "/metrics")
    used, quota = status.dbSize, status.dbSizeQuota or _metric(metrics, "etcd_server_quota_backend_bytes")
    if quota and used > NEARLY_FULL * quota:
        seen = f"{100 * used // quota} % of the quota of {quota} bytes are used."
        fix = "Run etcdctl compact REVISION and etcdctl defrag --cluster; or raise --quota-backend-bytes"
        examination.find(QUOTA, label, seen, fix)
    # It shows no other setting than the flags with which it was started, as a list in JSON.
    retention = r'-auto-compaction-retention(=|", ?")0*[1-9]'
    is_new = _metric(metrics, "etcd_debugging_mvcc_compact_revision") < 0
    if is_new and not re.search(retention, _get(examination, host, "/debug/vars")):
        seen = "It has never been compacted, and was not started with --auto-compaction-retention."
        fix = "Start all members with --auto-compaction-retention=1 (hour); ignore it if a configuration file does"
        examination.find(NO_COMPACTION, label, seen, fix)


def _metric(metrics: str, name: str) -> int:
    """Return a metric of a member; 0 if it is not available."""
    found = re.search(rf"^{name} (\S+)", metrics, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def _get(examination: Examination, host: HostPort, path: str) -> str:
    """Read a page of a member, which needs no login; empty if it is at another port, or not for this client."""
    options = examination.options
    connection = http.client.HTTPConnection(host.host, host.port or DEFAULT_PORT, timeout=MEMBER_SECONDS)
    context = None
    try:
        if examination.url.base == "etcds":  # before connecting: nobody closes the socket of a handshake that was reset
            context = client_context({name: options[name] for name in FILES})
        connection.connect()
        if context is not None:
            connection.sock = context.wrap_socket(connection.sock, server_hostname=options["server_name"] or host.host)
        connection.request("GET", path)
        return connection.getresponse().read().decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    finally:
        connection.close()


async def _examine_locking(examination: Examination, cluster: Cluster) -> None:
    """Use the cluster as a lock would: any member, rights, round trip, and a lease that is renewed and revoked."""
    url, prefix = examination.url, examination.options["prefix"]
    if examination.has(NO_SPACE) or examination.has(CORRUPT):
        return  # the cluster refuses every transaction that could write
    first, behind = keys.beginning_with(f"{prefix}/".encode())
    # A transaction that never writes: etcd checks the rights before.
    never = rpc.Compare(result=rpc.Compare.LESS, target=rpc.Compare.CREATE, key=first, create_revision=0)
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=first, value=b""))
    read = rpc.RequestOp(request_range=rpc.RangeRequest(key=first, range_end=behind))
    try:
        await cluster.call(etcd.TXN, rpc.TxnRequest(compare=[never], success=[put, read]), resend=True)
    except ConfigurationError as error:
        if not _is_permission(error):
            raise
        seen = f"The user may not read and write below {prefix}/."
        fix = f"Run etcdctl role grant-permission ROLE readwrite {prefix}/ --prefix=true"
        examination.find(RIGHTS, url.safe_text, seen, fix)
        return
    ask = rpc.RangeRequest(key=first, limit=1)
    await examination.time(",".join(str(one) for one in url.hosts), lambda: cluster.call(etcd.RANGE, ask, resend=True))
    requested = math.ceil(examination.ttl)
    answer = await cluster.call(etcd.GRANT, rpc.LeaseGrantRequest(TTL=requested), resend=False)
    try:
        await cluster.call(etcd.KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=answer.ID), resend=True)
    except BackendUnavailable as error:
        seen, fix = f"A lease cannot be renewed: {error}.", "Name the members in the URL, and no etcd grpc-proxy"
        examination.find(NO_RENEWAL, url.safe_text, seen, fix)
    await cluster.call(etcd.REVOKE, rpc.LeaseRevokeRequest(ID=answer.ID), resend=False)
    if requested < answer.TTL:
        seen = f"The ttl is {examination.ttl:g} s, and the cluster grants leases of {answer.TTL} s at least."
        fix = f"Set ttl={answer.TTL}, or lower --election-timeout of all members: a lease lasts at least 1.5 of it"
        examination.find(TTL_RAISED, url.safe_text, seen, fix)


def _is_permission(error: ConfigurationError) -> bool:
    """Tell whether a member refused a request for want of a right, rather than of a login."""
    return "permission denied" in details_of(cast("Exception", error.__cause__))
