"""
One chaos run: client processes contend while servers and clients are killed, frozen and restarted at random.

All choices come from a seed that the run prints; the times of what happens do not, so a seed repeats a kind of run and
not each of its instants.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockkit.backend import Capabilities
from lockkit.errors import LockLost, LockTimeout
from lockkit.testing.target import Face, Target
from lockkit_tools.servers import FaultProxy
from lockkit_tools.servers.base import Server, ServerGroup, Service
from tests.chaos.contender import RELAY, RELAY_STAY_MAX, RELAY_TTL, Part
from tests.chaos.journal import Journal, Verdict, now
from tests.chaos.targets import Entry

NAMES = ("chaos:a", "chaos:b", "chaos:c")
TTLS = (2.0, 3.0)
FACES: tuple[Face, ...] = ("blocking", "asyncio")

CALM_SECONDS = 90.0
"""How long each client may take until it holds a lock, at first and after the last fault. Longer than every ttl, than
the time for which a Redlock node that lost its data does not vote (60 s), and than a new election."""

END_SECONDS = 15.0
"""How long the clients may take to end when they are told to."""

LONGER = 60.0
"""How long a run may go on for a fault that it is to contain, seconds."""

PAUSE = (0.1, 1.0)
FAULT = (0.2, 4.0)
"""Shortest and longest pause between two rounds of faults, and time that a fault lasts, seconds: below and beyond the
ttls."""

FAULTS = ("kill", "freeze")
"""What happens unless the caller says otherwise. There are also partition, cut and clock."""

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
"""What shows a client another time of day, if it is on this machine."""

STEPS = ("+3600", "-3600", "+0")
"""By how much a client's time of day is wrong, seconds."""

LEFT_SECONDS = 2 * RELAY_TTL
"""How long a server may take to forget clients that have ended. Longer than every ttl."""

WAKE_SECONDS = 5.0
"""A waiter that has not been woken so long after the release never was. Longer than a busy machine stalls; shorter than
a waiter sleeps that nobody wakes, which is the rest of `RELAY_TTL`."""

BROKEN = ("errors", "stuck", "overlaps", "disorder", "lost wake-ups", "left behind")
"""The columns that must be 0."""


@dataclass(slots=True)
class Outcome:
    """
    What a run showed.

    Attributes:
        verdict: The witness's.
        done: How often servers and clients were killed, frozen and restarted.
        stuck: Clients that held no lock any more although nothing was wrong, or did not end.
        used: Largest memory (MB), descriptors and threads of a client, by kind: at the beginning, and at the end.
        left: What the servers store more than before, when all have ended.
        grace: See `Entry`.
    """

    verdict: Verdict
    done: Counter[str] = field(default_factory=Counter)
    stuck: int = 0
    used: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    left: int = 0
    grace: float = 0.0

    @property
    def hand_offs(self) -> list[float]:
        """Seconds for which the relay's lock was free, in calm."""
        return self.verdict.hand_offs(RELAY, WAKE_SECONDS, self.grace)

    @property
    def failed(self) -> bool:
        """Whether anything went against a promise."""
        row = self.row()
        return any(row[column] for column in BROKEN)

    def row(self) -> dict[str, int]:
        """The counts, by column."""
        said = self.verdict.said
        return {
            "grants": len(self.verdict.stays),
            "kills": self.done["kill"],
            "freezes": self.done["freeze"],
            "partitions": self.done["partition"],
            "cuts": self.done["cut"],
            "clock steps": self.done["clock"],
            "restarts": self.done["restart"],
            "timeouts": said["timeout"],
            "unavailable": said["unavailable"],
            "lost": said["lost"],
            "errors": said["error"],
            "stuck": self.stuck,
            "overlaps": len(self.verdict.overlaps),
            "disorder": len(self.verdict.disorder),
            "lost wake-ups": sum(seconds > WAKE_SECONDS for seconds in self.hand_offs),
            "left behind": self.left,
        }


class Run:
    """
    One run on one target.

    Args:
        target: What the clients connect to.
        service: Its servers, started; None: there are none to be disturbed.
        directory: For the journal and the clients' output; empty.
        seed: Of all choices.
        limit: How many servers may be away at the same time.
        processes: How many clients; every second one uses asyncio.
        ttls: Of the clients' locks.
        faults: What may happen.
        relay: Measure hand-offs too.
        sides: Proxies in front of the servers, for each half of the clients.
    """

    def __init__(
        self,
        target: Target,
        service: Service | None,
        directory: Path,
        *,
        seed: int,
        limit: int = 1,
        processes: int = 6,
        ttls: tuple[float, ...] = TTLS,
        faults: Sequence[str] = FAULTS,
        relay: bool = False,
        sides: Sequence[Sequence[FaultProxy]] = (),
    ) -> None:
        self._servers = _members(service)
        self._sides = sides
        self._targets = [_behind(side, self._servers, target) for side in sides] or [target]
        self._directory = directory
        self._choose = random.Random(seed)
        self._limit = limit
        self._ttls = ttls
        self._faults = faults
        self._done: Counter[str] = Counter()
        self._journal = Journal(directory / "journal")
        self._errors = (directory / "errors").open("ab")
        with target.connect() as client:
            client.ping()
            self._capabilities: Capabilities = client.capabilities
        self._clients = [self._start_client(number) for number in range(processes)]
        self._relays = [self._start_client(self._choose.randrange(2), relay=True)] if relay else []

    def play(self, seconds: float, *, until: Collection[str] = (), calm: float = 0.0) -> Outcome:
        """
        Disturb for so long, let all recover, go on in calm, end the clients, and judge.

        On a machine that stalls few faults fit into that time: go on, within reason, until those of `until` were done.

        Not before each client has held a lock: chaos is about servers in use. A new set of Redlock nodes of which one
        is away does not vote for a minute (its first start cannot be told from a loss of data), which the run would be
        spent with if a fault came before the first grant.
        """
        try:
            stuck = self._await_grants()
            used = [self._use()]
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0 or (
                left > -LONGER and not all(self._done[what] for what in until)
            ):
                time.sleep(max(0.0, min(left, self._choose.uniform(*PAUSE))))
                self._disturb(min(max(left, 0.5), self._choose.uniform(*FAULT)))
            stuck += self._await_grants()
            time.sleep(calm)
            used.append(self._use())
            (self._directory / "stop").touch()
            stuck += sum(not self._ends(client) for client in self._everybody)
        finally:
            for client in self._everybody:
                client.kill()
                client.wait()
            self._errors.close()
        uses = {kind: [one[kind] for one in used] for kind in used[0]}
        return Outcome(self._journal.judge(), self._done, stuck, uses)

    # -- clients -----------------------------------------------------------------------------------------------------

    @property
    def _everybody(self) -> list[subprocess.Popen[bytes]]:
        return [*self._clients, *self._relays]

    def _start_client(self, number: int, *, relay: bool = False) -> subprocess.Popen[bytes]:
        part = Part(
            self._targets[number // 2 % len(self._targets)],
            FACES[number % 2],
            NAMES,
            self._ttls,
            str(self._journal.path),
            str(self._directory / "stop"),
            self._choose.randrange(2**32),
            relay,
        )
        client = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.chaos.contender"],
            stdin=subprocess.PIPE,
            stderr=self._errors,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                **(self._clock_of(number) if "clock" in self._faults and not relay else {}),
            },
        )
        assert client.stdin is not None
        with client.stdin as pipe:
            pipe.write(pickle.dumps(part))
        return client

    def _clock_of(self, number: int) -> dict[str, str]:
        """Give the environment of a client whose time of day `_disturb` sets."""
        file = self._directory / f"clock-{number}"
        if not file.exists():
            file.write_text("+0")
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def _await_grants(self) -> int:
        """Wait until each client has held a lock; return how many did not come to that."""
        began, waiting = now(), {client.pid for client in self._everybody}
        while waiting and now() < began + CALM_SECONDS * 1e9:
            time.sleep(0.5)
            waiting -= {
                int(stay.client.split(".")[0]) for stay in self._journal.judge().stays if (stay.returned or 0) > began
            }
        return len(waiting)

    def _ends(self, client: subprocess.Popen[bytes]) -> bool:
        """Tell whether a client ends as it should; the errors say how another one did."""
        try:
            client.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            client.send_signal(signal.SIGABRT)  # which makes it write where it is
            client.wait()
        if client.returncode != 0:
            self._errors.write(f"client {client.pid} ended with {client.returncode}\n".encode())
        return client.returncode == 0

    def _use(self) -> dict[str, tuple[int, int, int]]:
        """Look at the largest memory (MB), and the most descriptors and threads, of the clients of each kind."""
        kinds = {"contenders": self._clients, "relay": self._relays}
        found = {kind: [use(client.pid) for client in clients] for kind, clients in kinds.items() if clients}
        return {kind: (max(a), max(b), max(c)) for kind, uses in found.items() for a, b, c in [zip(*uses, strict=True)]}

    # -- faults ------------------------------------------------------------------------------------------------------

    def _disturb(self, seconds: float) -> None:
        """One round of one kind of fault, for so long."""
        what, began = self._choose.choice(self._faults), now()
        if what == "clock":
            for number in self._some_clients():
                (self._directory / f"clock-{number}").write_text(self._choose.choice(STEPS))
                self._done["clock"] += 1
            return
        if what in {"kill", "freeze"}:
            disturbed = self._stop(seconds, killed=what == "kill")
        else:
            disturbed = True
            self._separate(seconds, cut=what == "cut")
        if disturbed:
            self._journal.write("fault", what, began, now())

    def _some_clients(self) -> Sequence[int]:
        return self._choose.sample(range(len(self._clients)), self._choose.randint(1, 2))

    def _separate(self, seconds: float, *, cut: bool) -> None:
        """Cut the connections of one half of the clients, or of both, to some servers; or let nothing through."""
        sides = self._choose.choice([self._sides[:1], self._sides[1:], self._sides])
        count = self._choose.randint(1, len(self._servers))
        proxies = [proxy for side in sides for proxy in self._choose.sample(side, count)]
        self._done["cut" if cut else "partition"] += len(proxies)
        both_ways = self._choose.random() < 0.7
        for proxy in proxies:
            proxy.cut() if cut else proxy.blackhole(to_server=both_ways)
        if not cut:
            time.sleep(seconds)
            for proxy in proxies:
                proxy.heal()

    def _stop(self, seconds: float, *, killed: bool) -> bool:
        """Kill or freeze some servers, or some clients, or both; tell whether there were servers among them."""
        who = self._choose.choice(["servers", "clients", "both"]) if self._servers else "clients"
        servers: Sequence[Server] = ()
        clients: Sequence[int] = ()
        if who != "clients":
            servers = self._choose.sample(self._servers, self._choose.randint(1, self._limit))
        if who != "servers":
            clients = self._some_clients()
        self._done["kill" if killed else "freeze"] += len(servers) + len(clients)
        for server in servers:
            server.kill() if killed else server.pause()
        for number in clients:
            self._clients[number].send_signal(signal.SIGKILL if killed else signal.SIGSTOP)
        if killed and servers and self._capabilities.crash_release == "connection":
            # Such a lock ends with its server, which its holder learns by its deadline: no promise before that.
            seconds = max(*self._ttls, RELAY_STAY_MAX if self._relays else 0) + 0.5
        time.sleep(seconds)
        for number in clients:
            if killed:
                self._clients[number].wait()
                self._clients[number] = self._start_client(number)
                self._done["restart"] += 1
            else:
                self._clients[number].send_signal(signal.SIGCONT)
        for server in servers:
            if killed:
                server.start()
                self._done["restart"] += 1
            else:
                server.resume()
        return bool(servers)


def run_on(
    entry: Entry,
    directory: Path,
    seconds: float,
    *,
    seed: int,
    processes: int = 6,
    faults: Sequence[str] = FAULTS,
    relay: bool = False,
    calm: float = 0.0,
) -> Outcome:
    """Start a target, disturb it, and count what is left when all clients have ended."""
    with ExitStack() as exits:
        given = exits.enter_context(entry.service())
        service = given if isinstance(given, Service) else None
        target = entry.target(service, directory)
        names = [*NAMES, *([RELAY] if relay else [])]
        _use_once(target, names, max(entry.ttls))

        def count() -> int:
            with target.connect() as client:
                held = sum(1 + (holder.waiters or 0) for name in names for holder in client.holders(name))
            return held + entry.stored(service or directory)

        before = count()
        faults = [what for what in faults if _possible(what, entry, service)]
        sides = []
        if service is not None and {"partition", "cut"} & {*faults}:
            sides = [[exits.enter_context(FaultProxy(one.host, one.port)) for one in _members(service)] for _ in "ab"]
        outcome = Run(
            target, service, directory, seed=seed, limit=entry.limit, processes=processes, ttls=entry.ttls,
            faults=faults, relay=relay, sides=sides,
        ).play(seconds, calm=calm)  # fmt: skip
        outcome.grace = entry.grace
        outcome.left = _left(count, before)
    return outcome


def _use_once(target: Target, names: Sequence[str], ttl: float) -> None:
    """Have the backend store what it keeps of each lock that two clients have used, one of which had to wait."""
    with target.connect() as first, target.connect() as second:
        for name in names:
            # A client that loses a lock here uses a broken backend, which the run will show.
            with suppress(LockTimeout, LockLost), first.lock(name, ttl=ttl):
                second.lock(name, ttl=ttl).acquire(0.3).release()
            for client in (second, first):
                with suppress(LockLost):
                    client.lock(name, ttl=ttl).acquire(CALM_SECONDS).release()


def _possible(what: str, entry: Entry, service: Service | None) -> bool:
    """Tell whether a fault can be had on a target, and breaks no promise that the backend does not give."""
    if what in entry.never or (what in {"partition", "cut"} and service is None):
        return False
    return what != "clock" or FAKETIME is not None


def _left(count: Callable[[], int], before: int) -> int:
    """Wait until no more is stored than before; return what is left."""
    end = time.monotonic() + LEFT_SECONDS
    while (left := count() - before) > 0 and time.monotonic() < end:
        time.sleep(0.5)
    return max(0, left)


def use(pid: int) -> tuple[int, int, int]:
    """Look at a process: memory (MB), descriptors, threads."""
    process = Path("/proc", str(pid))
    pages = int((process / "statm").read_text().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return memory, len([*(process / "fd").iterdir()]), len([*(process / "task").iterdir()])


def _behind(side: Sequence[FaultProxy], servers: Sequence[Server], target: Target) -> Target:
    """Give the target whose servers are reached through proxies."""
    url = target.url
    for proxy, server in zip(side, servers, strict=True):
        url = url.replace(server.address, proxy.address)
    return replace(target, url=url)


def _members(service: Service | None) -> list[Server]:
    if isinstance(service, ServerGroup):
        return [*service.servers]
    return [service] if isinstance(service, Server) else []
