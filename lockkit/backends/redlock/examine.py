"""Examines ``redlock:`` URLs: each node, and whether the nodes fail independently."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from lockkit.backends.redis.examine import RedisServer, examine_server
from lockkit.backends.redis.keys import ttl_milliseconds
from lockkit.backends.redlock.backend import counted, url_targets
from lockkit.backends.redlock.delayed_restart import wait_milliseconds
from lockkit.backends.redlock.nodes import LockKeys
from lockkit.doctor import timing
from lockkit.doctor.addresses import addresses
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import BackendUnavailable, LockError, NoQuorum

_PAGE = "how-to/check-your-servers.md#redlock"
_LIMITS = "backends/redlock.md#what-it-does-not-promise"

_MARK = re.compile(rb"(\S+) (\d+) \d+ (\d+)")
"""See ``admit.lua``: run id, longest ttl, since when, and when it votes."""

NODES_MIN = 3
"""The fewest nodes of which one may fail."""

_error = partial(Check, severity=Severity.ERROR, page=_PAGE)
_warning = partial(Check, severity=Severity.WARNING, page=_PAGE)

FEW = _warning("redlock-few-nodes", risk="When one node fails there is no majority left: no lock can be taken.")
EVEN = _warning(
    "redlock-even-nodes", risk="An even number survives no more failures than one node fewer would, and votes can tie."
)
NODE_DOWN = _error("redlock-node-down", risk="One node fewer may fail before no lock can be taken.")
SAME_SERVER = _error(
    "redlock-same-server",
    risk="One server votes several times: its failure or restart counts as that of several nodes, and a lock is held "
    "twice.",
    page=_LIMITS,
)
SAME_HOST = _warning(
    "redlock-same-host",
    risk="The nodes fail together with their machine: all of their votes are lost, or their data, at once.",
    page=_LIMITS,
)
NOT_DURABLE = _error(
    "redlock-not-durable",
    risk="The URL says durable=on, so the node votes at once after a restart, and may have forgotten locks that are "
    "held.",
    page=_LIMITS,
)
NOT_VOTING = _warning(
    "redlock-node-not-voting",
    risk="Until the node votes again, one node fewer may fail or be restarted: without a majority no lock can be "
    "taken.",
    page="backends/redlock.md#maintenance",
)
RUN_HIDDEN = _error(
    "redlock-run-hidden",
    risk="The node does not vote: a restart, after which it may have forgotten locks that are held, could not be "
    "noticed.",
    page="backends/redlock.md#url-and-options",
)


async def examine(examination: Examination) -> None:
    """Examine each node, and what the nodes have in common."""
    options = examination.options
    targets = url_targets(examination.url, options, examination.runtime.kind)
    _judge_number(examination, len(targets))
    servers = [RedisServer(examination, target) for target in targets]
    try:
        reachable = await _reach(examination, servers)
        for server in reachable:
            await examine_server(server, votes=True)
            if options["durable"]:
                await _examine_durability(server)
            elif "run_id" not in server.facts:
                user = server.target.arguments.get("username") or "default"
                seen = "INFO does not show this user the run_id of the server."
                server.find(
                    RUN_HIDDEN, seen, f"redis-cli ACL SETUSER {user} +info; or durable=on, if no node loses data"
                )
        if not options["durable"]:
            await _examine_votes(examination, reachable)
        _judge_independence(examination, reachable)
        await _compare_clocks(examination, reachable)
    finally:
        for server in servers:
            await server.close()


async def _reach(examination: Examination, servers: Sequence[RedisServer]) -> list[RedisServer]:
    """Ask all nodes; return those that answer."""
    reachable: list[RedisServer] = []
    problems: list[str] = []
    for server in servers:
        try:
            await server.look()
            reachable.append(server)
        except BackendUnavailable as error:
            problems.append(str(error))
            server.find(NODE_DOWN, f"The node does not answer: {error}.", "Start it, or check its log.")
    if len(reachable) <= len(servers) // 2:
        safe_url = examination.url.safe_text
        answered = f"{len(reachable)} of {counted(len(servers))} of {safe_url} answered, which is no majority"
        raise NoQuorum(f"{answered}: {'; '.join(problems)}", backend=safe_url)
    return reachable


def _judge_number(examination: Examination, count: int) -> None:
    where, seen = examination.url.safe_text, f"The URL names {counted(count)}."
    if count < NODES_MIN:
        examination.find(FEW, where, seen, "Use 3 or 5 nodes on different machines.")
    elif count % 2 == 0:
        examination.find(EVEN, where, seen, f"Use {count - 1} or {count + 1} nodes.")


def _judge_independence(examination: Examination, servers: Sequence[RedisServer]) -> None:
    by_run, by_address = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for server in servers:
        if run_id := server.facts.get("run_id"):
            by_run[run_id].append(server.label)
        for address in addresses(str(server.target.arguments["host"])):
            by_address[address].append(server.label)
    twice = [labels for labels in by_run.values() if len(labels) > 1]
    for labels in twice:
        seen = f"{' and '.join(labels)} are one server: they have the same run_id."
        examination.find(SAME_SERVER, labels[0], seen, "Name each server once, and independent ones only.")
    for address, labels in by_address.items():
        if len(labels) > 1 and labels not in twice:
            seen = f"{' and '.join(labels)} have the same address, {address}."
            examination.find(SAME_HOST, labels[0], seen, "Run each node on a separate machine.")


async def _examine_votes(examination: Examination, servers: Sequence[RedisServer]) -> None:
    """Find nodes that do not vote yet after a restart, and say how long to wait between two restarts."""
    key = LockKeys(examination.options["prefix"], "").mark
    marks = {}
    for server in servers:
        reply = await server.ask("MGET", key)
        value = reply[0] if isinstance(reply, list) else None
        marks[server.label] = _MARK.match(value) if isinstance(value, bytes) else None
    known = [mark for mark in marks.values() if mark is not None]
    longest_ms = max([ttl_milliseconds(examination.ttl), *(int(mark[2]) for mark in known)])
    wait_seconds = math.ceil(wait_milliseconds(longest_ms) / 1000)
    examination.note("wait between restarts of two nodes", f"{wait_seconds} s")
    for server in servers if known else ():
        mark, run_id, when = marks[server.label], server.facts.get("run_id", "").encode(), ""
        if mark is None or (run_id and mark[1] != run_id):
            when = f"{wait_seconds} s after the next acquisition"
        else:
            with suppress(LockError):  # the right to TIME is missing, which is a separate finding
                left_seconds = int(mark[3]) / 1e6 - await server.clock()
                when = f"again in {math.ceil(left_seconds)} s" if left_seconds > 0 else ""
        if when:
            seen = f"The node was restarted or has lost its data: it votes {when}."
            server.find(NOT_VOTING, seen, "Restart no other node until the doctor finds none of these")


async def _examine_durability(server: RedisServer) -> None:
    appendfsync, enabled = await server.setting("appendfsync"), server.facts.get("aof_enabled", "1") == "1"
    if not enabled or appendfsync not in {"always", None}:
        server.find(
            NOT_DURABLE,
            f"appendonly is {'yes' if enabled else 'no'}, appendfsync is {appendfsync}.",
            "redis-cli CONFIG SET appendonly yes, CONFIG SET appendfsync always, CONFIG REWRITE; or leave out durable=",
        )


async def _compare_clocks(examination: Examination, servers: Sequence[RedisServer]) -> None:
    offsets = {}
    for server in servers:
        with suppress(LockError):  # as above
            offsets[server.label] = await timing.clock_offset(examination.runtime, server.clock)
    timing.judge_clocks(examination, offsets)
