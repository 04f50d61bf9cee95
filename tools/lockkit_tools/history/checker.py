"""
Tells whether a history is linearizable.

It is if its calls could have happened one after another, each at an instant between its beginning and its end, so that
the model allows every one.

The search is that of Wing and Gong ("Testing and verifying concurrent objects", 1993), in the form of Lowe ("Testing
for linearizability", 2016): a configuration is which of the calls under way have happened, and the model's state; none
is examined twice; and a call happens just in time, when it or one after it must have happened because it ends. So one
pass through the lines keeps every configuration that explains the history so far. Where none is left, the lines up to
there are the shortest beginning that is not linearizable.

A call without an end may happen at any time after its beginning, or never.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal

from lockkit.runtime import monotonic
from lockkit_tools.history.models import Model, UnknownOperation
from lockkit_tools.history.reading import Operation

CONFIGURATIONS_MAX = 2_000_000
"""How many are examined before the verdict is unknown. More take memory, some hundred bytes each."""

SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a history shows. True only if it is valid."""

    word: Literal["valid", "invalid", "unknown"]  # unknown: the search was too long, or the model does not know a call
    reason: str = ""  # why it is unknown
    # Of an invalid history, the call whose end nothing explains: up to there it is not linearizable.
    failed: Operation | None = None
    concurrent: tuple[Operation, ...] = ()  # the other calls under way at that time
    states: tuple[Hashable, ...] = ()  # of the model, possible just before, without the calls under way

    def __bool__(self) -> bool:
        """Tell whether it is valid."""
        return self.word == "valid"


class _TooLong(Exception):
    pass


def check(
    history: Sequence[Operation],
    model: Model,
    *,
    configurations_max: int = CONFIGURATIONS_MAX,
    seconds_max: float = SECONDS_MAX,
) -> Verdict:
    """
    Judge the calls on one lock.

    Args:
        history: As `lockkit_tools.history.read` gives it, in any order.
        model: What the lock may do.
        configurations_max: How many to examine.
        seconds_max: How long to search.
    """
    search = _Search(model, configurations_max, monotonic() + seconds_max)
    try:
        return search.run(_relevant(history, model))
    except _TooLong:
        reason = f"no answer within {configurations_max:,} configurations and {seconds_max:g} s"
    except UnknownOperation as error:
        reason = str(error)
    return Verdict("unknown", reason)


def _relevant(history: Sequence[Operation], model: Model) -> list[Operation]:
    """
    Leave out acquisitions without an end, where only their own process could release: it makes no further call.

    They can only be in the way: any order with one of them is an order without it too. A run of chaos has hundreds,
    each of which would be tried before every later call.
    """
    return [call for call in history if not (model.owned and call.f == "acquire" and call.returned is None)]


class _Search:
    def __init__(self, model: Model, configurations_left: int, end: float) -> None:
        self._step = model.step
        self._left = configurations_left
        self._end = end
        self._possible: set[tuple[int, Hashable]] = {(0, model.initial)}
        """Bits of the calls that have happened, among those under way; and the state."""
        self._under_way: dict[int, Operation] = {}
        self._open = 0
        """Bits of those without an end."""

    def run(self, history: Sequence[Operation]) -> Verdict:
        events = [(operation.called, False, operation) for operation in history]
        events += [(operation.returned, True, operation) for operation in history if operation.returned is not None]
        events.sort(key=lambda event: event[0])
        free: list[int] = []
        bits: dict[int, int] = {}  # of the calls under way, by their beginnings
        for _, ends, operation in events:
            if not ends:
                bit = heappop(free) if free else 1 << len(bits)
                bits[operation.called] = bit
                self._under_way[bit] = operation
                self._open |= bit if operation.returned is None else 0
                continue
            bit = bits.pop(operation.called)
            before = self._possible
            self._possible = self._after(bit)
            del self._under_way[bit]
            heappush(free, bit)
            if not self._possible:
                states = tuple(dict.fromkeys(state for _, state in before))
                return Verdict("invalid", "", operation, tuple(self._under_way.values()), states)
        return Verdict("valid")

    def _after(self, bit: int) -> set[tuple[int, Hashable]]:
        """
        Give the configurations in which a call that ends now has happened.

        A configuration is left out if fewer of the calls without an end lead to the same one: those can still happen
        later, or never, so whatever comes next, the one with fewer explains it too. The fewest come first.
        """
        found, serial = set[tuple[int, Hashable]](), count()
        least: defaultdict[tuple[int, Hashable], list[int]] = defaultdict(list)
        ahead = [((now & self._open).bit_count(), next(serial), now, state) for now, state in self._possible]
        heapify(ahead)
        while ahead:
            _, _, happened, state = heappop(ahead)
            others, unended = least[happened & ~self._open, state], happened & self._open
            if any(other & unended == other for other in others):
                continue
            others.append(unended)
            if happened & bit:
                found.add((happened & ~bit, state))
                continue
            self._left -= 1
            if self._left < 0 or (self._left % 1024 == 0 and monotonic() > self._end):
                raise _TooLong
            for other, operation in self._under_way.items():
                if not happened & other and (after := self._step(state, operation)) is not None:
                    reached = happened | other
                    heappush(ahead, ((reached & self._open).bit_count(), next(serial), reached, after))
        return found
