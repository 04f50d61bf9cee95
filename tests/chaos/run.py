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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockkit.backend import Capabilities
from lockkit.testing.target import Face, Target
from lockkit_tools.servers.base import Server, ServerGroup, Service
from tests.chaos.contender import Part
from tests.chaos.journal import Journal, Verdict, now

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


@dataclass(slots=True)
class Outcome:
    """
    What a run showed.

    Attributes:
        verdict: The witness's.
        done: How often servers and clients were killed, frozen and restarted.
        stuck: Clients that held no lock any more although nothing was wrong, or did not end.
    """

    verdict: Verdict
    done: Counter[str] = field(default_factory=Counter)
    stuck: int = 0

    @property
    def failed(self) -> bool:
        """Whether anything went against a promise."""
        return bool(self.verdict.overlaps or self.verdict.disorder or self.verdict.said["error"] or self.stuck)

    def row(self) -> dict[str, int]:
        """The counts, by column."""
        said = self.verdict.said
        return {
            "grants": len(self.verdict.stays),
            "kills": self.done["kill"],
            "freezes": self.done["freeze"],
            "restarts": self.done["restart"],
            "timeouts": said["timeout"],
            "unavailable": said["unavailable"],
            "lost": said["lost"],
            "errors": said["error"],
            "stuck": self.stuck,
            "overlaps": len(self.verdict.overlaps),
            "disorder": len(self.verdict.disorder),
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
    ) -> None:
        self._target = target
        self._servers = _members(service)
        self._directory = directory
        self._choose = random.Random(seed)
        self._limit = limit
        self._done: Counter[str] = Counter()
        self._journal = Journal(directory / "journal")
        self._errors = (directory / "errors").open("ab")
        with target.connect() as client:
            client.ping()
            self._capabilities: Capabilities = client.capabilities
        self._clients = [self._start_client(number) for number in range(processes)]

    def play(self, seconds: float, *, until: Collection[str] = ()) -> Outcome:
        """
        Disturb for so long, let all recover, end the clients, and judge.

        On a machine that stalls few faults fit into that time: go on, within reason, until those of `until` were done.

        Not before each client has held a lock: chaos is about servers in use. A new set of Redlock nodes of which one
        is away does not vote for a minute (its first start cannot be told from a loss of data), which the run would be
        spent with if a fault came before the first grant.
        """
        try:
            stuck = self._await_grants()
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0 or (
                left > -LONGER and not all(self._done[what] for what in until)
            ):
                time.sleep(max(0.0, min(left, self._choose.uniform(*PAUSE))))
                self._disturb(min(max(left, 0.5), self._choose.uniform(*FAULT)))
            stuck += self._await_grants()
            (self._directory / "stop").touch()
            stuck += sum(not _ends(client) for client in self._clients)
        finally:
            for client in self._clients:
                client.kill()
                client.wait()
            self._errors.close()
        return Outcome(self._journal.judge(), self._done, stuck)

    # -- clients -----------------------------------------------------------------------------------------------------

    def _start_client(self, number: int) -> subprocess.Popen[bytes]:
        part = Part(
            self._target,
            FACES[number % 2],
            NAMES,
            TTLS,
            str(self._journal.path),
            str(self._directory / "stop"),
            self._choose.randrange(2**32),
        )
        client = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.contender"],
            stdin=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert client.stdin is not None
        with client.stdin as pipe:
            pipe.write(pickle.dumps(part))
        return client

    def _await_grants(self) -> int:
        """Wait until each client has held a lock; return how many did not come to that."""
        began, waiting = now(), {client.pid for client in self._clients}
        while waiting and now() < began + CALM_SECONDS * 1e9:
            time.sleep(0.5)
            waiting -= {
                int(stay.client.split(".")[0]) for stay in self._journal.judge().stays if (stay.returned or 0) > began
            }
        return len(waiting)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _disturb(self, seconds: float) -> None:
        """One round: some servers, or some clients, or both, killed or frozen, for so long."""
        who = self._choose.choice(["servers", "clients", "both"]) if self._servers else "clients"
        servers: Sequence[Server] = ()
        clients: Sequence[int] = ()
        if who != "clients":
            servers = self._choose.sample(self._servers, self._choose.randint(1, self._limit))
        if who != "servers":
            clients = self._choose.sample(range(len(self._clients)), self._choose.randint(1, 2))
        killed = self._choose.random() < 0.5
        self._done["kill" if killed else "freeze"] += len(servers) + len(clients)
        for server in servers:
            server.kill() if killed else server.pause()
        for number in clients:
            self._clients[number].send_signal(signal.SIGKILL if killed else signal.SIGSTOP)
        if killed and servers and self._capabilities.crash_release == "connection":
            # Such a lock ends with its server, which its holder learns by its deadline: no promise before that.
            seconds = max(TTLS) + 0.5
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


def _members(service: Service | None) -> list[Server]:
    if isinstance(service, ServerGroup):
        return [*service.servers]
    return [service] if isinstance(service, Server) else []


def _ends(client: subprocess.Popen[bytes]) -> bool:
    try:
        return client.wait(END_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
