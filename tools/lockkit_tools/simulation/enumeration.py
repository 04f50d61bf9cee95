"""
Run every schedule of a small case, where the rest of the simulation runs random ones of large cases.

A message takes no time here. When no task can go on, one thing of all that may happen next is chosen: a message that is
under way arrives (those of one connection and direction in order), or one of a limited number of faults strikes. Time
goes on only while nothing is under way. The case is run again from its start for each
sequence of choices (stateless search, as Godefroid's VeriSoft, POPL 1997).

Two things that happen at different machines may be swapped without any difference, so of the sequences that differ by
such swaps only one is run (source-DPOR: Abdulla, Aronis, Jonsson, Sagonas, *Optimal Dynamic Partial Order Reduction*,
POPL 2014, with the sleep sets of Godefroid, LNCS 1032). Not enumerated: the order of the tasks within one process,
which run as in asyncio, first come, first served; and chance, such as the length of a pause between two tries.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from lockkit.units import Instant, Seconds
from lockkit_tools.simulation.network import Network, Node
from lockkit_tools.simulation.world import Process, Task, Waiter, World

FaultKind = Literal["lost", "late", "restarted", "wiped", "paused", "killed"]
"""
``lost``: a message. ``late``: a message, by `Bounds.late` seconds. ``restarted``: a node, with its data; ``wiped``:
without. ``paused``: a process, for `Bounds.pause` seconds. ``killed``: a process.
"""

EVERYWHERE = "everywhere"
NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class Step:
    """What may happen next. The same step has the same words in each run in which it may happen."""

    what: str  # `arrives`, `goes on` (time, when nothing is under way), or a kind of fault
    subject: str  # which message, node or process
    where: str  # the machine at which it makes a difference; `NOWHERE` where a message is lost or late
    way: str = ""  # the connection and direction of a message
    call: str = ""  # the one that the message answers, where it waits for the answers of several nodes

    @property
    def is_fault(self) -> bool:
        """Whether it counts against `Bounds.faults`."""
        return self.what not in {"arrives", "goes on"}

    def commutes(self, other: Step) -> bool:
        """Tell whether swapping the two changes nothing."""
        if self.is_fault and other.is_fault:
            return False  # the first may be the last that is allowed
        if EVERYWHERE in {self.where, other.where} or (self.way and self.way == other.way):
            return False
        if NOWHERE in {self.where, other.where} or self.where != other.where:
            return True
        return bool(self.call) and self.call == other.call  # it goes on once both are there

    def __str__(self) -> str:
        return f"{self.subject} {self.what}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a search goes."""

    faults: int = 0  # how many strike at most in one schedule
    kinds: tuple[FaultKind, ...] = ()  # which ones
    pause: Seconds = 0.0  # how long a paused process stands still
    late: Seconds = 0.0  # how long a late message takes
    reduced: bool = True  # schedules that differ by swaps alone are run once


@dataclass(slots=True)
class _Fork:
    """One choice of the present schedule, and what has been and will be chosen here instead."""

    steps: tuple[Step, ...]
    asleep: set[Step]  # whose schedules are run elsewhere
    wanted: set[Step]
    chosen: Step
    done: set[Step] = field(default_factory=set)

    def go_on(self) -> bool:
        """Choose the next step; False if there is none left."""
        self.done.add(self.chosen)
        left = [step for step in self.steps if step in self.wanted and step not in self.done | self.asleep]
        if left:
            self.chosen = left[0]
        return bool(left)


class _Redundant(Exception):
    """Every continuation of this schedule is run as part of another."""


@dataclass
class Found:
    """What a search found."""

    schedules: int = 0  # how many were run to their end
    cut: int = 0  # how many were left when they turned out to repeat another
    choices: int = 0  # in the longest schedule
    problem: str = ""  # what broke a promise, empty if nothing did; the search ends with it
    trail: list[str] = field(default_factory=list)  # the choices that led there


class Chooser:
    """The choices of one schedule after the other."""

    def __init__(self, *, reduced: bool) -> None:
        self._reduced = reduced
        self._forks: list[_Fork] = []
        self._depth = 0

    def schedules(self) -> Iterator[None]:
        """Begin one schedule at a time, until each has been run."""
        while True:
            self._depth = 0
            yield
            if self._reduced:
                self._want_reversed_races()
            while self._forks and not self._forks[-1].go_on():
                self._forks.pop()
            if not self._forks:
                return

    def choose(self, steps: Sequence[Step]) -> Step:
        """Take the next step of the present schedule."""
        if self._depth == len(self._forks):
            self._forks.append(self._fork(tuple(steps)))
        fork = self._forks[self._depth]
        assert fork.steps == tuple(steps), "a schedule that is begun again has the same choices"
        self._depth += 1
        return fork.chosen

    def _fork(self, steps: tuple[Step, ...]) -> _Fork:
        asleep: set[Step] = set()
        if self._reduced and self._forks:
            last = self._forks[-1]
            asleep = {step for step in last.asleep | last.done if step != last.chosen and step.commutes(last.chosen)}
        awake = [step for step in steps if step not in asleep]
        if not awake:
            raise _Redundant
        # A fault need not happen in a schedule, so no race tells that it should have: each is tried at once.
        wanted = {step for step in awake if step.is_fault or not self._reduced}
        wanted.update([step for step in awake if not step.is_fault][:1])
        return _Fork(steps, asleep, wanted, next(step for step in awake if step in wanted))

    @property
    def trail(self) -> list[str]:
        """The choices of the present schedule."""
        return [str(fork.chosen) for fork in self._forks[: self._depth]]

    def _want_reversed_races(self) -> None:
        """See to it that of two steps that do not commute, the later one comes first too, where it could have."""
        forks = self._forks[: self._depth]
        before: list[int] = []  # of each step, which ones must precede it: a bit for each
        races: list[tuple[int, int]] = []
        for late, fork in enumerate(forks):
            step, made = fork.chosen, late
            while made and step in forks[made - 1].steps:
                made -= 1  # it was possible so long ago
            follows = 1 << (made - 1) | before[made - 1] if made else 0
            for early in range(late - 1, -1, -1):
                if not follows >> early & 1 and not step.commutes(forks[early].chosen):
                    follows |= 1 << early | before[early]
                    if early >= made:
                        races.append((early, late))
            before.append(follows)
        for early, late in races:
            # What the later one needs, or what merely came between, comes before the earlier one with it.
            moved = [index for index in range(early + 1, late) if not before[index] >> early & 1] + [late]
            bits = sum(1 << index for index in moved)
            first = {forks[index].chosen for index in moved if not before[index] & bits}
            fork = forks[early]
            if first.isdisjoint(fork.wanted | fork.done | fork.asleep):
                fork.wanted.add(next(step for step in fork.steps if step in first))


Clock = dict[str, int]
"""How many steps of each machine may have had an effect here (Fidge's and Mattern's vector clocks)."""


@dataclass(slots=True)
class Message:
    """A message that is under way."""

    number: int  # on its way, from 1
    seen: Clock  # of its sender
    arrive: Callable[[], object]  # what it does
    call: str  # see `Step`


class ChosenNetwork(Network):
    """Keeps messages until they are chosen."""

    world: ChosenWorld

    def __init__(self, world: ChosenWorld) -> None:
        super().__init__(world)
        self.under_way: dict[tuple[str, str], deque[Message]] = {}
        self._sent: Counter[tuple[str, str]] = Counter()

    def _carry(self, way: tuple[str, str, bool], function: Callable[..., object], *arguments: object) -> None:
        process, node, asks = way
        source, target = (process, node) if asks else (node, process)
        # The tasks of one call, which are numbered, each wait for one node.
        waiter = getattr(function, "__self__", None)
        call = waiter.task_name.rstrip("0123456789") if isinstance(waiter, Waiter) else ""
        self._sent[source, target] += 1
        number, seen = self._sent[source, target], dict(self.world.clocks[source])
        message = Message(number, seen, lambda: function(*arguments), call if call.endswith(" ") else "")
        self.under_way.setdefault((source, target), deque()).append(message)

    def heads(self) -> Iterator[tuple[str, str, deque[Message]]]:
        """Give each way with messages: from whom, and to whom."""
        for (source, target), messages in sorted(self.under_way.items()):
            if messages:
                yield source, target, messages


class ChosenWorld(World):
    """
    A world in which a `Chooser` says what happens next.

    Since of several sequences one is run, that something happens later here proves nothing: only if it is later by the
    clocks, it is so in each of them.
    """

    def __init__(self, chooser: Chooser, bounds: Bounds) -> None:
        super().__init__(1)
        self.network = ChosenNetwork(self)
        self.nodes: list[Node] = []  # that may restart
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)  # of each machine
        self._chooser = chooser
        self._bounds = bounds
        self._faults_left = bounds.faults
        self._waits = 0
        # Timers of one instant fire in the order in which they were made, and tasks run as they became ready.
        self._chance = float

    def _draw(self) -> Task[Any]:
        return self.ready.pop(0)

    def _advance(self, until: Instant) -> bool:
        possible = dict(self._possible(until))
        if not possible:
            return False
        chosen = self._chooser.choose(list(possible))
        self._faults_left -= chosen.is_fault
        possible[chosen]()
        return True

    def _possible(self, until: Instant) -> Iterator[tuple[Step, Callable[[], object]]]:
        heads = list(self.network.heads())
        timers = any(not timer[3].cancelled and timer[0] <= until for timer in self._timers)
        if self._faults_left and (heads or timers):
            for kind in self._bounds.kinds:
                yield from self._faults(kind, heads)
        for source, target, messages in heads:
            yield _step("arrives", source, target, messages[0]), partial(self._arrive, target, messages)
        if timers and not heads:
            self._waits += 1
            yield Step("goes on", f"time {self._waits}", EVERYWHERE), partial(self._go_on, until)

    def _faults(
        self, kind: FaultKind, heads: Sequence[tuple[str, str, deque[Message]]]
    ) -> Iterator[tuple[Step, Callable[[], object]]]:
        if kind == "lost":
            for source, target, messages in heads:
                yield replace(_step(kind, source, target, messages[0]), where=NOWHERE), messages.popleft
        elif kind == "late":
            for source, target, messages in heads:
                step = replace(_step(kind, source, target, messages[0]), where=NOWHERE)
                yield step, partial(self._delay, target, messages)
        elif kind in {"restarted", "wiped"}:
            for node in self.nodes:
                yield Step(kind, node.name, node.name), partial(self._restart, node, lose_data=kind == "wiped")
        else:
            for process in self.processes:
                if not process.dead and not process.paused:
                    strike = process.crash if kind == "killed" else partial(self._pause, process)
                    yield Step(kind, process.name, process.name), strike

    def _arrive(self, target: str, messages: deque[Message]) -> None:
        message = messages.popleft()
        self.see(target, message.seen)
        message.arrive()

    def _delay(self, target: str, messages: deque[Message]) -> None:
        """Have a message arrive later; those behind it overtake it, as on a new connection."""
        self.call_in(self._bounds.late, self._arrive, target, deque([messages.popleft()]))

    def see(self, machine: str, seen: Clock) -> None:
        """Count a step of a machine, and what had happened before it elsewhere."""
        clock = self.clocks[machine]
        for other, count in seen.items():
            clock[other] = max(count, clock.get(other, 0))
        clock[machine] = clock.get(machine, 0) + 1

    def _go_on(self, until: Instant) -> None:
        """Fire the next timer. All machines have seen what was before: time is not swapped with anything."""
        latest = {machine: clock.get(machine, 0) for machine, clock in self.clocks.items()}
        for machine in latest:
            self.see(machine, latest)
        super()._advance(until)

    def _restart(self, node: Node, *, lose_data: bool) -> None:
        self.see(node.name, {})
        node.stop(lose_data=lose_data)
        node.start()

    def _pause(self, process: Process) -> None:
        process.pause()
        self.call_in(self._bounds.pause, process.resume)


def _step(what: str, source: str, target: str, message: Message) -> Step:
    return Step(what, f"message {message.number} from {source} to {target}", target, f"{source} {target}", message.call)


def search(bounds: Bounds, play: Callable[[ChosenWorld], str]) -> Found:
    """
    Run a case by every schedule within the bounds, or up to the first that breaks a promise.

    Args:
        bounds: Of the search.
        play: Makes the case in a new world and runs it; returns what is wrong, empty if nothing is. It must depend on
            nothing but the choices.
    """
    found, chooser = Found(), Chooser(reduced=bounds.reduced)
    for _ in chooser.schedules():
        world = ChosenWorld(chooser, bounds)
        try:
            found.problem = play(world)
        except _Redundant:
            found.cut += 1
        else:
            found.schedules += 1
            found.choices = max(found.choices, len(chooser.trail))
        finally:
            world.end()
        if found.problem:
            found.trail = chooser.trail
            break
    return found
