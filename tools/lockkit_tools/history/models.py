"""
What a lock may do if one call runs after another: the models that Hazelcast's Jepsen tests have for its locks.

A model's ``step`` is a pure function: a state and an operation give the next state, or None where it is illegal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from lockkit_tools.history.reading import Operation


class UnknownOperation(Exception):
    """A model does not know what a call of the history does."""


class Model(Protocol):
    """
    What `lockkit_tools.history.check` needs.

    Attributes:
        initial: The first state. States can be compared and hashed.
        owned: Whether only the process that acquired can release, so an acquisition can only be in the way of others.
    """

    @property
    def initial(self) -> Hashable: ...
    @property
    def owned(self) -> bool: ...
    def step(self, state: Any, operation: Operation) -> Hashable | None: ...  # noqa: ANN401 - its own


class LockState(NamedTuple):
    """Who holds a lock, once for each hold; the fence of the hold; and the highest fence so far. 0: no fence."""

    holders: tuple[Hashable, ...] = ()
    fence: int = 0
    highest: int = 0


@dataclass(frozen=True, slots=True)
class LockModel:
    """Locks and semaphores."""

    permits: int = 1  # holds at the same time, of any processes; an operation's ``limit`` goes before it
    depth: int = 1  # holds of one process at the same time, where that alone may hold it (reentrant); 1: not reentrant
    owned: bool = True  # a release is of a process that holds it; without that anybody's release will do
    # Fences increase from holder to holder. As in Hazelcast's, an acquisition may come without one (0, nil).
    fenced: bool = False
    initial = LockState()

    def step(self, state: LockState, operation: Operation) -> LockState | None:
        """Give the state after an operation, or None."""
        if operation.f == "acquire":
            return self._acquire(state, operation)
        if operation.f != "release":
            raise UnknownOperation(f"{operation.f!r} is no operation of a lock")
        who = operation.process if self.owned else None
        if who not in state.holders:
            return None
        place = state.holders.index(who)
        holders = state.holders[:place] + state.holders[place + 1 :]
        return state._replace(holders=holders, fence=state.fence if holders else 0)

    def _acquire(self, state: LockState, operation: Operation) -> LockState | None:
        who = operation.process if self.owned else None
        held, fence = state.holders, self._fence(operation)
        if self.depth > 1 and held:
            if held[0] != who or len(held) >= self.depth:
                return None
            if state.fence and fence:
                return state._replace(holders=(*held, who)) if fence == state.fence else None
        elif len(held) >= (operation.limit or self.permits):
            return None
        if fence and fence <= state.highest:
            return None
        # In the order of no time: who holds permits counts, not since when.
        holders = tuple(sorted((*held, who), key=repr))
        return LockState(holders, fence or state.fence, max(fence, state.highest))

    def _fence(self, operation: Operation) -> int:
        value = operation.value
        if isinstance(value, Mapping):  # of Hazelcast's tests: {:client …, :fence …, :uid …}
            value = value.get("fence")
        return value if self.fenced and isinstance(value, int) else 0


def limited(name: str, limit: int | None) -> LockModel:
    """Give a model of `MODELS`, with a limit of permits or of the holds of one process."""
    model = MODELS[name]
    if limit is None:
        return model
    return replace(model, depth=limit) if model.depth > 1 else replace(model, permits=limit)


HOLDS = 2
"""Of a reentrant lock in Hazelcast's tests."""

MODELS: Mapping[str, LockModel] = {
    "mutex": LockModel(owned=False),
    "owner-aware-mutex": LockModel(),
    "reentrant-mutex": LockModel(depth=HOLDS),
    "fenced-mutex": LockModel(fenced=True),
    "reentrant-fenced-mutex": LockModel(depth=HOLDS, fenced=True),
    "semaphore": LockModel(),
}
