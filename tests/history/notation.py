"""A short notation for histories, a search by brute force, and a lock that makes random histories."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lockkit_tools.history import LockModel, Model, Operation, UnknownOperation, read

Fault = Literal["", "second holder", "token goes back", "release by a non-owner"]


def history(text: str) -> list[Operation]:
    """
    Read the calls on one lock.

    ``0:acquire`` process 0 calls, ``2:write:4`` and ``3:cas:[4,5]`` with a value; ``0=`` it returns, ``0=7`` with a
    value; ``0!`` it failed; ``0?`` nobody knows.
    """
    lines = []
    f_of: dict[str, str] = {}
    for word in text.split():
        process = word[: len(word) - len(word.lstrip("0123456789"))]
        mark, rest = word[len(process)], word[len(process) + 1 :]
        f, _, value = rest.partition(":") if mark == ":" else (f_of[process], "", rest)
        f_of[process] = f
        kind = {":": "invoke", "=": "ok", "!": "fail", "?": "info"}[mark]
        lines.append(f"{{:process {process}, :type :{kind}, :f :{f}, :value {value or 'nil'}}}")
    (calls,) = read("\n".join(lines)).values()
    return calls


@dataclass(frozen=True, slots=True)
class Register:
    """The model of the examples that Porcupine and Knossos publish."""

    initial: Hashable = "nil"
    owned: bool = False

    def step(self, state: object, operation: Operation) -> Hashable | None:
        """Read what was written last."""
        if operation.f == "write":
            return int(operation.value)
        if operation.f == "cas":
            old, new = operation.value
            return int(new) if state == old else None
        if operation.f != "read":
            raise UnknownOperation(operation.f)
        return state if operation.value in {None, state} else None


def by_brute_force(calls: Sequence[Operation], model: Model) -> bool:
    """Try every order that keeps a call that ended before the ones that began after its end."""
    return _any_order(model.initial, calls, model)


def _any_order(state: Hashable, left: Sequence[Operation], model: Model) -> bool:
    ends = [call.returned for call in left if call.returned is not None]
    if not ends:
        return True
    for call in left:
        if call.called < min(ends):
            after = model.step(state, call)
            if after is not None and _any_order(after, [other for other in left if other is not call], model):
                return True
    return False


def random_history(seed: int, model: LockModel, fault: Fault = "") -> list[Operation]:
    """Have three callers use a lock that does what `model` says, or breaks it now and then by a fault."""
    return history(" ".join(_words(random.Random(seed), model, fault)))


def _words(choose: random.Random, model: LockModel, fault: Fault) -> Iterator[str]:
    holds: Counter[int] = Counter()
    callers, token, calls = [0, 1, 2], 0, 0
    stages: dict[int, str] = {}
    while calls < 9 or stages:
        index = choose.randrange(3)
        who = callers[index]
        stage = stages.pop(who, "")
        if stage == "":
            if calls == 9:
                continue
            calls += 1
            wrong = fault == "release by a non-owner" and choose.random() < 0.3
            stages[who] = "release" if wrong or (holds[who] and choose.random() < 0.6) else "acquire"
            yield f"{who}:{stages[who]}"
        elif stage.startswith("done"):
            if choose.random() < 0.15:
                callers[index] = max(callers) + 1
                yield f"{who}?"
            else:
                yield f"{who}={stage.removeprefix('done')}"
        elif stage == "release":
            holder = who if holds[who] else next(iter(+holds), None) if fault == "release by a non-owner" else None
            if holder is not None:
                holds[holder] -= 1
                stages[who] = "done"
            else:
                yield f"{who}!"
        elif _free(holds, who, model) or (fault == "second holder" and choose.random() < 0.5):
            token += -1 if fault == "token goes back" and choose.random() < 0.4 else 0 if holds[who] else 1
            holds[who] += 1
            stages[who] = f"done{max(token, 1)}" if model.fenced else "done"
        elif choose.random() < 0.3:
            yield f"{who}!"
        else:
            stages[who] = "acquire"


def _free(holds: Counter[int], who: int, model: LockModel) -> bool:
    held = holds.total()
    return held < model.depth if model.depth > 1 and held == holds[who] else held < model.permits


def random_register_history(seed: int) -> list[Operation]:
    """Have seven callers read, write and compare-and-set one of two values, with any result."""
    choose = random.Random(seed)
    words, calling = list[str](), list[int]()
    for who in range(7):
        f = choose.choice(["read", "write", "cas"])
        value = {"read": "", "write": f":{choose.randint(0, 1)}", "cas": choose.choice([":[0,1]", ":[1,0]"])}[f]
        words.append(f"{who}:{f}{value}")
        calling.append(who)
        while calling and choose.random() < 0.6:
            ended = calling.pop(choose.randrange(len(calling)))
            result = choose.randint(0, 1) if f"{ended}:read" in words else ""
            words.append(f"{ended}={result}" if choose.random() < 0.7 else f"{ended}?")
    return history(" ".join(words))
