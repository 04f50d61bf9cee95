"""Examines ``zookeeper:`` URLs: the ensemble, and the session that it grants."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

from kazoo.exceptions import NoAuthError, NoNodeError
from kazoo.protocol.serialization import Exists, GetACL, GetChildren, GetData
from kazoo.security import OPEN_ACL_UNSAFE, Permissions, make_digest_acl_credential

from lockkit.backends.zookeeper.options import DEFAULT_PORT, client_arguments, root_of
from lockkit.backends.zookeeper.session import MILLISECOND, Session
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.doctor.members import judge_members, member_checks
from lockkit.errors import ConfigurationError
from lockkit.url import HostPort

_PAGE = "how-to/check-your-servers.md#zookeeper"

VERSION_MIN = (3, 5)

WORD_SECONDS = 2.0
"""For the answer to a four-letter word. Longer waits for members that are down; shorter reports busy ones as down."""

_error = partial(Check, severity=Severity.ERROR, page=_PAGE)
_warning = partial(Check, severity=Severity.WARNING, page=_PAGE)

VERSION = _error("zookeeper-version", risk="The server lacks requests that lockkit needs.")
SESSION_SHORTENED = _warning(
    "zookeeper-session-shortened",
    risk="Leases are shorter than the ttl asked for: a holder that pauses for less than that loses its lock.",
)
SESSION_LENGTHENED = _warning(
    "zookeeper-session-lengthened", risk="When a holder dies, its lock is free later than after its ttl."
)
_MEMBERS = ALONE, FEW, EVEN, ONE_NAMED = member_checks("zookeeper", _PAGE)
MEMBER_DOWN = _warning("zookeeper-member-down", risk="One fewer member may fail before no lock can be acquired.")
OPEN_ACL = _warning("zookeeper-open-acl", risk="Everybody who reaches the ensemble may delete the nodes of locks.")
RIGHTS = _error("zookeeper-rights", risk="Locks cannot be acquired or released.")
NO_TLS = _warning(
    "zookeeper-no-tls", risk="Everybody who can read the network traffic reads the password, and may break any lock."
)
UNVERIFIED = _warning(
    "zookeeper-unverified", risk="A man in the middle reads the password, and may break any lock or grant one twice."
)
KAZOO_LOCK = _warning(
    "zookeeper-kazoo-lock",
    risk="A Lock of kazoo's does not wait for readers: it may be held while they read.",
    page="backends/zookeeper.md",
)

DIRECTORIES_MAX = 200
"""How many locks are looked at for readers and kazoo's locks. With more, the examination takes seconds."""

_KAZOO_NODE = re.compile(r"[0-9a-f]{32}__lock__-?\d{9,10}")


async def examine(examination: Examination) -> None:
    """Check the session, the access rights and each member of the URL."""
    url, options = examination.url, examination.options
    arguments = client_arguments(url, options)
    session = Session(examination.host, arguments, examination.ttl)
    try:
        await session.connected()
        _check_session(examination, session.granted_seconds)
        await _examine_rights(examination, session, arguments)
        await _examine_kazoo_locks(examination, session)
        members_count = await _members_count(session)
        await examination.time(arguments["hosts"], lambda: session.ask(Exists("/", None)))
    finally:
        session.end_soon()
    if members_count is not None:
        judge_members(examination, _MEMBERS, members_count)
    if options.get("use_ssl"):
        _check_verification(examination, arguments)
        return
    for host in url.hosts:
        _examine_member(examination, host)


def _check_session(examination: Examination, granted: float) -> None:
    ttl = examination.ttl
    examination.note("session timeout", f"{granted:g} s")
    if abs(granted - ttl) <= MILLISECOND:
        return
    finding, bound, word = (SESSION_SHORTENED, "max", "most") if granted < ttl else (SESSION_LENGTHENED, "min", "least")
    seen = f"The ttl is {ttl:g} s, and the ensemble keeps sessions for {granted:g} s at {word}."
    fix = f"Set {bound}SessionTimeout={ttl * 1000:.0f} in zoo.cfg of all members and restart them, or ttl={granted:g}"
    examination.find(finding, examination.url.safe_text, seen, fix)


async def _examine_rights(examination: Examination, session: Session, arguments: Mapping[str, Any]) -> None:
    url, root = examination.url, root_of(examination.url, examination.options["prefix"])
    is_open = arguments["default_acl"] == OPEN_ACL_UNSAFE
    if is_open:
        seen = "lockkit creates nodes with all access rights for everybody."
        fix = f"{url.scheme}://USER:PASSWORD@…, the same for all clients that share the locks, and without acl=open"
        examination.find(OPEN_ACL, url.safe_text, seen, fix)
    granted: list[Any] = []
    try:
        granted, _ = await session.ask(GetACL(root))
    except NoNodeError:
        return
    except ConfigurationError as error:
        if not isinstance(error.__cause__, NoAuthError):
            raise
    if not is_open and granted == OPEN_ACL_UNSAFE:
        seen = f"Everybody has all access rights to {root}."
        fix = f"zkCli.sh: addauth digest USER:PASSWORD, then setAcl -R {root} auth::cdrwa"
        examination.find(OPEN_ACL, url.safe_text, seen, fix)
    if not _may_create(granted, arguments):
        seen = f"This login has no right to create nodes in {root}."
        fix = (
            f"zkCli.sh: setAcl {root} world:anyone:cdrwa, or for the login: auth:USER:PASSWORD:cdrwa; see getAcl {root}"
        )
        examination.find(RIGHTS, url.safe_text, seen, fix)


async def _examine_kazoo_locks(examination: Examination, session: Session) -> None:
    """Look for names that lockkit's readers share with plain locks of kazoo's."""
    root = root_of(examination.url, examination.options["prefix"])
    try:
        directories = await session.ask(GetChildren(root, None))
        for directory in directories[:DIRECTORIES_MAX]:
            nodes = await session.ask(GetChildren(f"{root}/{directory}", None))
            if not any("__rlock__" in node for node in nodes):
                continue
            for node in filter(_KAZOO_NODE.fullmatch, nodes):
                data, _ = await session.ask(GetData(f"{root}/{directory}/{node}", None))
                if not data.startswith(b"{"):  # lockkit's have JSON
                    seen = f"A Lock of kazoo's and a reader use {root}/{directory}."
                    fix = "Use kazoo's WriteLock, or Lock(…, extra_lock_patterns=['__rlock__']), in place of its Lock"
                    examination.find(KAZOO_LOCK, examination.url.safe_text, seen, fix)
                    return
    except (ConfigurationError, NoNodeError):
        return  # no right to look, or nothing there any more


def _may_create(granted: list[Any], arguments: Mapping[str, Any]) -> bool:
    logins = {make_digest_acl_credential(*one[1].split(":", 1)) for one in arguments.get("auth_data", ())}
    # Only the server knows whether an address, a certificate or a Kerberos name is this client's.
    return any(
        acl.perms & Permissions.CREATE
        and (acl.id.scheme not in {"world", "digest"} or acl.id.id in {"anyone", *logins})
        for acl in granted
    )


async def _members_count(session: Session) -> int | None:
    """Count the voting members; 0 for a standalone server, None if this login may not read that."""
    try:
        data, _ = await session.ask(GetData("/zookeeper/config", None))
    except (ConfigurationError, NoNodeError):
        return None
    lines: list[str] = data.decode("utf-8", "replace").splitlines()
    return sum(line.startswith("server.") and ":observer" not in line for line in lines)


def _check_verification(examination: Examination, arguments: Mapping[str, Any]) -> None:
    """Find what of the servers' certificates is not checked."""
    if not arguments.get("verify_certs", True):
        seen = "The servers' certificates are not checked (verify_certs=0)."
        examination.find(UNVERIFIED, examination.url.safe_text, seen, "Use ca=FILE, and remove verify_certs=0")
    elif not arguments["check_hostname"]:
        seen = "A certificate of any host is accepted (check_hostname=0)."
        fix = "Name the hosts as their certificates do, and remove check_hostname=0"
        examination.find(UNVERIFIED, examination.url.safe_text, seen, fix)


def _examine_member(examination: Examination, host: HostPort) -> None:
    """Ask a member, over a separate connection, for its version and whether it serves clients."""
    port = host.port or DEFAULT_PORT
    label = f"{host.host}:{port}"
    if not is_loopback(host.host):
        password = ", with the password in clear text" if examination.url.password else ""
        seen = f"The connection crosses a network and is not encrypted{password}."
        fix = "Set secureClientPort and ssl.keyStore.location in zoo.cfg, and use ?use_ssl=1&ca=… in the URL"
        examination.find(NO_TLS, label, seen, fix)
    try:
        answer = _ask(host.host, port, b"srvr")
    except OSError as error:
        seen = f"The member does not answer ({error})."
        examination.find(MEMBER_DOWN, label, seen, "Start it, or read its log.")
        return
    version = re.search(r"Zookeeper version: (\d+)\.(\d+)([^,\s-]*)", answer)
    if version is None:  # srvr is the one word that is always allowed
        serves = "not currently serving" not in answer
        seen = "The member reports no version." if serves else "The member is not in a majority."
        examination.find(MEMBER_DOWN, label, seen, "Read its log: does it run, and reach the others?")
        return
    examination.note(f"version of {label}", f"ZooKeeper {version[1]}.{version[2]}{version[3]}")
    if (int(version[1]), int(version[2])) < VERSION_MIN:
        seen = f"The member is ZooKeeper {version[1]}.{version[2]}{version[3]}."
        examination.find(VERSION, label, seen, "Upgrade it to 3.5 or later.")


def _ask(host: str, port: int, word: bytes) -> str:
    with socket.create_connection((host, port), WORD_SECONDS) as connection:
        connection.sendall(word)
        answer = b""
        while data := connection.recv(65_536):
            answer += data
    return answer.decode("utf-8", "replace")
