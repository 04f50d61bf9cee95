"""
Machines that serve, and the network between them and the processes: everything that can happen to a message.

Knows nothing of locks. A request is a function that the node runs when the message arrives; its value or its error
travels back. So a service of one node and a service of several independent ones are simulated by the same means.

==================== =====================================================================================
what happens         how
==================== =====================================================================================
slow messages        `Conditions.latency`, `Conditions.slow`; a slow one is overtaken by later ones, as when its
                     connection was given up; the others arrive in the order in which they were sent
lost request         `Conditions.requests_lost`, `Network.cut`: nothing was done, the caller's time runs out
lost answer          `Conditions.answers_lost`, `Network.cut`: it *was* done, the caller's time runs out
server stopped       `Node.pause`: requests pile up and are run when it goes on, long after their callers left
server down          `Node.stop`: new requests are refused, what it had not run is gone
restart              `Node.start`, with its data or without
==================== =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lockkit.units import Seconds
from lockkit_tools.simulation.clock import Clock
from lockkit_tools.simulation.world import TICK, Process, Waiter, World

T = TypeVar("T")
Answer = tuple[Any, str | None]
"""The value of an operation, or why it was refused."""

WALL_CLOCK_START = 1_700_000_000.0
"""What the nodes' wall clocks show at the start, seconds since 1970 (give or take their offsets)."""


class NoAnswer(Exception):
    """No answer came in time, or the node refused. Whether the request was run is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What happens to messages in general."""

    latency: tuple[float, float] = (0.0002, 0.002)  # time of one message in one direction, from and to, seconds
    requests_lost: float = 0.0  # share, 0 to 1
    answers_lost: float = 0.0  # share, 0 to 1
    slow: float = 0.0  # share of messages that take up to `slow_max` instead
    slow_max: float = 1.0  # longest time of a slow message, seconds


CALM = Conditions()


class Node:
    """A machine that serves."""

    __slots__ = ("_backlog", "clock", "name", "paused", "stopped", "up", "wall_clock", "world")

    def __init__(self, world: World, name: str, *, rate: float = 1.0, wall_offset: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.clock = Clock(rate=rate)  # its monotonic clock, which expiry counts on; goes on while it is paused or down
        self.wall_clock = Clock(rate=rate, offset=WALL_CLOCK_START + wall_offset)  # its time of day, which may jump
        self.up = True
        self.paused = False  # it is stopped (SIGSTOP): what arrives is kept
        self.stopped: list[Callable[[bool], object]] = []  # called when it goes down, with whether its data is lost
        self._backlog: list[tuple[Callable[[], Any], Callable[[Answer], object]]] = []

    def now(self) -> float:
        """What its monotonic clock shows."""
        return self.clock.read(self.world.now)

    def wall_us(self) -> int:
        """Its time of day in µs."""
        return int(self.wall_clock.read(self.world.now) * 1e6)

    def receive(self, operation: Callable[[], Any], reply: Callable[[Answer], object]) -> None:
        """Run a request that has arrived, and answer; later if it is paused."""
        if self.paused:
            self._backlog.append((operation, reply))
        elif not self.up:
            reply((None, f"{self.name} refused the connection"))
        else:
            reply((operation(), None))

    def pause(self) -> None:
        """Stop it, as SIGSTOP does."""
        self.paused = True

    def resume(self) -> None:
        """Let it go on, as SIGCONT does: first with what has piled up."""
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for operation, reply in backlog:
            self.receive(operation, reply)

    def stop(self, *, lose_data: bool = False) -> None:
        """End its service, as SIGKILL does; what it has not run is gone, and with `lose_data` its data too."""
        self.up = False
        self.paused = False
        self._backlog = []
        for function in self.stopped:
            function(lose_data)

    def start(self) -> None:
        """Serve again."""
        self.up = True


class Network:
    """Carries messages between processes and nodes."""

    def __init__(self, world: World, conditions: Conditions = CALM) -> None:
        self.world = world
        self.conditions = conditions  # may be replaced at any time; counts for messages sent from then on
        self.slowest = 0.0  # longest time that any message so far has been under way, or will be, seconds
        self._chance = world.chance("network").random
        self._last_arrival: dict[tuple[str, str, bool], float] = {}
        self._cut_requests: set[tuple[str, str]] = set()
        self._cut_answers: set[tuple[str, str]] = set()

    def cut(self, process: Process, node: Node, *, requests: bool = True, answers: bool = True) -> None:
        """Lose all messages between the two, or those of one direction only."""
        if requests:
            self._cut_requests.add((process.name, node.name))
        if answers:
            self._cut_answers.add((process.name, node.name))

    def heal(self, process: Process, node: Node) -> None:
        """Undo `cut`."""
        self._cut_requests.discard((process.name, node.name))
        self._cut_answers.discard((process.name, node.name))

    async def call(self, process: Process, node: Node, operation: Callable[[], T], timeout: Seconds) -> T:
        """Have a node run an operation, and give its value."""
        waiter = process.waiter(timeout)
        path = (process.name, node.name)
        if path not in self._cut_requests and self._chance() >= self.conditions.requests_lost:
            self._carry((*path, True), node.receive, operation, partial(self._answer, path, waiter))
        answer: Answer | None = await waiter.park()
        if answer is None:
            raise NoAnswer(f"no answer from {node.name} within {timeout:g} s")
        value, refusal = answer
        if refusal is not None:
            raise NoAnswer(refusal)
        result: T = value
        return result

    def push(self, node: Node, process: Process, function: Callable[[], object]) -> None:
        """Send a message from a node to a process, which runs `function` there. It may get lost like an answer."""
        if (process.name, node.name) not in self._cut_answers and self._chance() >= self.conditions.answers_lost:
            self._carry((process.name, node.name, False), process.receive, function)

    def _answer(self, path: tuple[str, str], waiter: Waiter, answer: Answer) -> None:
        """Send an answer back."""
        if path not in self._cut_answers and self._chance() >= self.conditions.answers_lost:
            self._carry((*path, False), waiter.wake, answer)

    def _carry(self, way: tuple[str, str, bool], function: Callable[..., object], *arguments: object) -> None:
        conditions = self.conditions
        first, last = conditions.latency
        now = self.world.now
        if conditions.slow and self._chance() < conditions.slow:
            arrival = now + first + (conditions.slow_max - first) * self._chance()
        else:
            arrival = max(now + first + (last - first) * self._chance(), self._last_arrival.get(way, 0.0) + TICK)
            self._last_arrival[way] = arrival
        self.slowest = max(self.slowest, arrival - now)
        self.world.call_at(arrival, function, *arguments)
