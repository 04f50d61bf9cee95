"""Examines ``etcd:`` URLs: each member of the URL, and the cluster that they belong to."""

from __future__ import annotations

import http.client
import math
import ssl
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.connection import GRANT, RANGE, REVOKE, TXN
from lockkit.backends.etcd.errors import DRIVER_ERRORS, details_of, translate
from lockkit.backends.etcd.options import DEFAULT_PORT, open_cluster
from lockkit.backends.etcd.protobuf import Fields, decode
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import monotonic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockkit.backends.etcd.cluster import Cluster
    from lockkit.doctor.examination import Examination
    from lockkit.url import HostPort, Url

__all__ = ["examine"]

_PAGE = "how-to/check-your-servers.md#etcd"

MEMBERS_MIN = 3
"""The least number of which one may fail."""

VERSION_MIN = (3, 4)

FULL = 0.8
"""Part of the quota from which on it is nearly used up. Compaction and defragmentation take their time."""

MEMBER_SECONDS = 2.0
"""For the answer of one member. Longer waits for members that are down, shorter takes a busy one for down."""

VERSION = Check("etcd-version", Severity.ERROR, "The member lacks calls that lockkit needs.", _PAGE)
NO_LEADER = Check(
    "etcd-no-leader",
    Severity.ERROR,
    "Without a leader no lock can be taken or renewed, and leases are lost at the end of their ttl.",
    _PAGE,
)
MEMBER_DOWN = Check("etcd-member-down", Severity.WARNING, "One member less may fail before locks stand still.", _PAGE)
ALONE = Check(
    "etcd-alone",
    Severity.WARNING,
    "When the member fails, all locks stand still, and leases are lost at the end of their ttl.",
    _PAGE,
)
FEW = Check("etcd-few-members", Severity.WARNING, "When one member fails there is no majority left.", _PAGE)
EVEN = Check(
    "etcd-even-members",
    Severity.WARNING,
    "An even number survives no more failures than one member less would.",
    _PAGE,
)
ONE_NAMED = Check(
    "etcd-one-named",
    Severity.WARNING,
    "When that member is down, clients do not find the others, and lose their leases although the cluster works.",
    _PAGE,
)
NO_SPACE = Check(
    "etcd-no-space", Severity.ERROR, "The cluster refuses writes: no lock can be taken until the alarm is off.", _PAGE
)
CORRUPT = Check("etcd-corrupt", Severity.ERROR, "Members have different data: a lock may be held twice.", _PAGE)
RESTORED = Check(
    "etcd-restored",
    Severity.WARNING,
    "Its revision, which tokens are taken from, may have gone back: storage then refuses new holders as stale. Locks "
    "that were taken after the backup may be held twice.",
    "backends/etcd.md#tokens",
)
QUOTA = Check(
    "etcd-quota", Severity.WARNING, "When the quota is used up the cluster refuses writes: no lock can be taken.", _PAGE
)
NO_TLS = Check(
    "etcd-no-tls", Severity.WARNING, "Whoever sees the network reads the password, and may break any lock.", _PAGE
)
NO_AUTH = Check("etcd-no-auth", Severity.WARNING, "Whoever reaches the cluster may break any lock.", _PAGE)
RIGHTS = Check("etcd-rights", Severity.ERROR, "Locks cannot be taken, renewed or released.", _PAGE)
TTL_RAISED = Check(
    "etcd-ttl-raised",
    Severity.WARNING,
    "When a holder dies, its lock is free later than the ttl says.",
    _PAGE,
)

_ALARMS = {
    "NOSPACE": (
        NO_SPACE,
        "etcdctl compact REVISION, etcdctl defrag --cluster, etcdctl alarm disarm; or a larger --quota-backend-bytes",
    ),
    "CORRUPT": (
        CORRUPT,
        "Restore the corrupt member from the others (etcdctl member remove and add), then etcdctl alarm disarm",
    ),
}


async def examine(examination: Examination) -> None:
    """
    Look at each member of the URL, then ask the cluster as a lock would.

    Raises:
        BackendUnavailable: No member answers.
        ConfigurationError: The URL is wrong, or the login is refused.
    """
    url = examination.url
    cluster = open_cluster(url, examination.options, examination.host)
    try:
        statuses = [(host, await _examine_member(examination, host)) for host in url.hosts]
        answered = [(host, status) for host, status in statuses if status is not None]
        if not answered:
            message = f"no member answers at {url.safe_text}: start them, or look whether the URL is right"
            raise BackendUnavailable(message, backend=url.safe_text)
        leading = [host for host, status in answered if _number(status, 4)]
        if not leading:
            seen = "No member knows a leader."
            mend = "Start members until a majority runs; their logs say whom they do not reach"
            examination.find(NO_LEADER, url.safe_text, seen, mend)
            return
        _examine_log(examination, [status for _, status in answered])
        await _examine_membership(examination, leading[0])
        await _examine_locking(examination, cluster)
    finally:
        await cluster.close()


# -- single members ----------------------------------------------------------------------------------------------------


async def _examine_member(examination: Examination, host: HostPort) -> Fields | None:
    """Ask a member about itself: a request that it answers alone, also without a leader. None if it does not answer."""
    label = f"{host.host}:{host.port or DEFAULT_PORT}"
    if examination.url.base != "etcds" and not is_loopback(host.host):
        seen = "The connection crosses a network and is not encrypted."
        mend = "Start the member with --cert-file, --key-file and --client-cert-auth, and use etcds://…?ca=…"
        examination.find(NO_TLS, label, seen, mend)
    cluster = _only(examination, host)
    try:
        status = await _status(cluster)
    except BackendUnavailable as error:
        examination.find(MEMBER_DOWN, label, f"The member does not answer: {error}.", "Start it, or look at its log.")
        return None
    finally:
        await cluster.close()
    version = "".join(_texts(status, 2))
    examination.note(f"version of {label}", f"etcd {version}")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < VERSION_MIN:
        examination.find(VERSION, label, f"The member is etcd {version}.", "Upgrade it to 3.4 or later.")
    for name, (check, mend) in _ALARMS.items():
        if any(f"alarm:{name}" in text for text in _texts(status, 8)):
            examination.find(check, label, f"The alarm {name} is on.", mend)
    _examine_quota(examination, host, label, status)
    return status


def _examine_log(examination: Examination, statuses: Sequence[Fields]) -> None:
    """
    Compare the revision with the length of the log that the members agree on.

    Each change takes an entry of that log, so it is at least as long as there are revisions; but restoring a backup
    keeps the revision of the data and begins the log anew. Not seen: a copy of the data directories, and a restored
    cluster that has grown old.
    """
    revision = max(_number(header, 3) for status in statuses for header in _messages(status, 1))
    entries = max(_number(status, 5) for status in statuses)
    # The revision of an empty cluster is 1.
    if revision > entries + 1:
        seen = (
            f"The cluster is at revision {revision} after {entries} entries of its log: it was restored from a backup."
        )
        mend = (
            "Raise the marks that storage compares tokens with, or restore with etcdutl snapshot restore "
            "--bump-revision 1000000000 --mark-compacted (etcd 3.5.9 or later); ignore it if that was done"
        )
        examination.find(RESTORED, examination.url.safe_text, seen, mend)


async def _status(cluster: Cluster) -> Fields:
    """Ask a member about itself, without a login if that will do: without a leader nobody can log in."""
    try:
        return await _ask(cluster, "Maintenance/Status", login=False)
    except ConfigurationError:
        return await _ask(cluster, "Maintenance/Status")


def _only(examination: Examination, host: HostPort) -> Cluster:
    """Connect to one member alone."""
    url: Url = replace(examination.url, hosts=(host,))
    return open_cluster(url, examination.options, examination.host)


def _examine_quota(examination: Examination, host: HostPort, label: str, status: Fields) -> None:
    used = _number(status, 3)
    quota = _number(status, 13) or _quota_of_metrics(examination, host)
    if quota and used > FULL * quota:
        seen = f"{100 * used // quota} % of the quota of {quota} bytes are used."
        mend = "etcdctl compact REVISION and etcdctl defrag --cluster; or a larger --quota-backend-bytes"
        examination.find(QUOTA, label, seen, mend)


def _quota_of_metrics(examination: Examination, host: HostPort) -> int:
    """Read the quota from the member's metrics, as before etcd 3.6; 0 where they are not to be had."""
    address = (host.host, host.port or DEFAULT_PORT)
    options = examination.options
    connection: http.client.HTTPConnection
    try:
        if examination.url.base == "etcds":
            context = ssl.create_default_context(cafile=options["ca"])
            if options["cert"] is not None:
                context.load_cert_chain(options["cert"], options["key"])
            connection = http.client.HTTPSConnection(*address, timeout=MEMBER_SECONDS, context=context)
        else:
            connection = http.client.HTTPConnection(*address, timeout=MEMBER_SECONDS)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode("utf-8", "replace")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return 0  # at another port (--listen-metrics-urls), or for others only
    found = next((line for line in text.splitlines() if line.startswith("etcd_server_quota_backend_bytes ")), "")
    return int(float(found.split()[1])) if found else 0


# -- the cluster -------------------------------------------------------------------------------------------------------


async def _examine_membership(examination: Examination, host: HostPort) -> None:
    """Ask a member that knows a leader who the members are, and whether it asks who we are."""
    cluster = _only(examination, host)
    try:
        members = _messages(await _ask(cluster, "Cluster/MemberList"), 2)
        asked = cluster.login.metadata not in {None, ()}
    finally:
        await cluster.close()
    _judge_members(examination, [member for member in members if not _number(member, 5)])
    if not asked and examination.options["cert"] is None:
        mend = (
            "etcdctl user add root, user grant-role root root, auth enable; then users with rights to the prefix only"
        )
        where = examination.url.safe_text
        examination.find(NO_AUTH, where, "The cluster asks nobody for a password.", mend)


async def _examine_locking(examination: Examination, cluster: Cluster) -> None:
    """Ask as a lock would: any member, rights, round trip, lease."""
    url = examination.url
    if examination.has(NO_SPACE) or examination.has(CORRUPT):
        return  # the cluster refuses whatever could write
    prefix = examination.options["prefix"]
    key = f"{prefix}/".encode()
    if await _is_refused(cluster, key):
        seen = f"The user may not read and write below {prefix}/."
        mend = f"etcdctl role grant-permission ROLE readwrite {prefix}/ --prefix=true"
        examination.find(RIGHTS, url.safe_text, seen, mend)
        return
    where = ",".join(str(one) for one in url.hosts)
    look = rpc.RangeRequest(key=key, limit=1)
    await examination.time(where, lambda: cluster.call(RANGE, look, resend=True))
    await _examine_lease(examination, cluster)


def _judge_members(examination: Examination, members: Sequence[Fields]) -> None:
    where, count = examination.url.safe_text, len(members)
    examination.note("members", str(count))
    mend = "Run 3 or 5 members on different machines, and name all of them in the URL"
    if count == 1:
        examination.find(ALONE, where, "The cluster has one member.", mend)
        return
    if count < MEMBERS_MIN:
        examination.find(FEW, where, f"The cluster has {count} members.", mend)
    elif count % 2 == 0:
        examination.find(EVEN, where, f"The cluster has {count} members.", mend)
    if len(examination.url.hosts) == 1:
        examination.find(ONE_NAMED, where, f"The URL names one member of {count}.", "Name all of them in the URL")


async def _is_refused(cluster: Cluster, key: bytes) -> bool:
    """Tell whether the user may not write there, by a transaction that never does: rights are looked at before."""
    never = rpc.Compare(result=rpc.Compare.LESS, target=rpc.Compare.CREATE, key=key, create_revision=0)
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=b""))
    look = rpc.RequestOp(request_range=rpc.RangeRequest(key=key, range_end=key[:-1] + b"0"))
    try:
        await cluster.call(TXN, rpc.TxnRequest(compare=[never], success=[put, look]), resend=True)
    except ConfigurationError as error:
        if "permission denied" in details_of(cast("Exception", error.__cause__)):
            return True
        raise
    return False


async def _examine_lease(examination: Examination, cluster: Cluster) -> None:
    """Ask for a lease of the ttl, as a client does, and give it back: the cluster may grant a longer one."""
    wanted = math.ceil(examination.ttl)
    answer = await cluster.call(GRANT, rpc.LeaseGrantRequest(TTL=wanted), resend=False)
    await cluster.call(REVOKE, rpc.LeaseRevokeRequest(ID=answer.ID), resend=False)
    if wanted < answer.TTL:
        seen = f"The ttl is {examination.ttl:g} s, and the cluster grants leases of {answer.TTL} s at least."
        mend = f"Set ttl={answer.TTL}, or lower --election-timeout of all members: a lease is one and a half of it"
        examination.find(TTL_RAISED, examination.url.safe_text, seen, mend)


# -- calls that the backend does not need ------------------------------------------------------------------------------


async def _ask(cluster: Cluster, method: str, *, login: bool = True) -> Fields:
    """
    Call a method with an empty request, at the member in use.

    Raises:
        BackendUnavailable: No answer.
        ConfigurationError: It is refused.
    """
    link, _ = cluster.link()
    try:
        metadata = await cluster.login.enter(link, monotonic() + MEMBER_SECONDS) if login else None
        call: Any = link.channel.unary_unary(f"/etcdserverpb.{method}")
        answer: bytes = call(b"", timeout=MEMBER_SECONDS, metadata=metadata)
    except DRIVER_ERRORS as error:
        raise translate(error, link.label) from error
    return decode(answer)


def _number(fields: Fields, number: int) -> int:
    value = fields.get(number, [0])[-1]
    assert isinstance(value, int), "it is no number in etcd's description"
    return value


def _texts(fields: Fields, number: int) -> list[str]:
    return [value.decode("utf-8", "replace") for value in fields.get(number, []) if isinstance(value, bytes)]


def _messages(fields: Fields, number: int) -> list[Fields]:
    return [decode(value) for value in fields.get(number, []) if isinstance(value, bytes)]
