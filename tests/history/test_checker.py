"""The checker: published histories with their verdicts, brute force, its limits, and mistakes that would be noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from lockkit_tools.history import MODELS, Model, Operation, check
from lockkit_tools.history.models import LockModel
from tests.history.notation import Fault, Register, by_brute_force, history, random_history, random_register_history

BUG = "4:write:2 4= 6:read 1:write:4 1= 14:read 14=4 9:write:0 9= 19:read:0 19=0"
PUBLISHED = {
    # porcupine_test.go (MIT): TestRegisterModel and TestZeroDuration; the register is 0 at first.
    "register": (0, "0:write:100 1:read 2:read 2=0 1=100 0=", None),
    "register, read too old": (0, "0:write:200 1:read 1=200 2:read 2=0 0=", 4),
    "no duration": (0, "0:write:100 1:read 2:read 3:read 2=0 3=0 1=100 0=", None),
    "no duration, read too old": (0, "0:write:200 1:read 2:read 1=200 2=200 3:read 3=0 0=", 6),
    # Knossos, README and data/cas-register (EPL); the operation that its tests name, too.
    "crashed write": (0, "0:read 1:write:3 1? 0=3", None),
    "immediate-failure": ("nil", "1:read 101:write:3 101! 1=3", 3),
    "rethink-fail-minimal": ("nil", "0:write:0 0= 1:read 2:write:4 1=3 2= 3:read 3=4", 4),
    "cas-register-bug": ("nil", BUG, None),
    "bad-analysis": (
        "nil",
        f"{BUG.removesuffix('19=0')} 20:write:1 19=0 22:read:3 21:read:2 21=2 22=3",
        14,
    ),
}


@pytest.mark.parametrize(("initial", "text", "failed"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_histories(initial: object, text: str, failed: int | None) -> None:
    """As the checkers that published them say, up to the same operation."""
    verdict = check(history(text), Register(str(initial) if initial == "nil" else 0))

    assert verdict.word == ("valid" if failed is None else "invalid")
    assert bool(verdict) is (failed is None)
    assert (None if verdict.failed is None else verdict.failed.returned) == failed


FAULTS: dict[str, tuple[Fault, ...]] = {
    "mutex": ("second holder",),
    "owner-aware-mutex": ("second holder", "release by a non-owner"),
    "reentrant-mutex": ("second holder", "release by a non-owner"),
    "fenced-mutex": ("second holder", "token goes back", "release by a non-owner"),
    "reentrant-fenced-mutex": ("second holder", "token goes back", "release by a non-owner"),
    "semaphore": ("second holder", "release by a non-owner"),
}
CASES = [(name, fault) for name, faults in FAULTS.items() for fault in ("", *faults)]
SEEDS = range(100)


def model_of(name: str) -> LockModel:
    """Give a model; the semaphore has two permits, of which a second holder is a third."""
    return replace(MODELS[name], permits=2) if name == "semaphore" else MODELS[name]


def test_every_model_is_compared() -> None:
    """None is left out below."""
    assert FAULTS.keys() == MODELS.keys()


@cache
def corpus(name: str, fault: Fault) -> list[tuple[list[Operation], bool]]:
    """Make random histories, each with whether it is linearizable."""
    model = model_of(name)
    histories = [random_history(seed, model, fault) for seed in SEEDS]
    return [(calls, by_brute_force(calls, model)) for calls in histories]


@pytest.mark.parametrize(("name", "fault"), CASES, ids=[f"{name}-{fault or 'right'}" for name, fault in CASES])
def test_same_as_brute_force(name: str, fault: Fault) -> None:
    """On histories of a right lock, which are valid, and of one with a fault."""
    model, words = model_of(name), Counter[str]()
    for seed, (calls, valid) in enumerate(corpus(name, fault)):
        verdict = check(calls, model)

        assert verdict.word == ("valid" if valid else "invalid"), f"seed {seed}: {calls}"
        words[verdict.word] += 1
        if verdict.failed is not None:
            assert verdict.failed.returned is not None
            assert by_brute_force(until(calls, verdict.failed.returned - 1), model), f"seed {seed}: a shorter one"
            assert not by_brute_force(until(calls, verdict.failed.returned), model), f"seed {seed}: a longer one"

    assert words["invalid"] >= 15 if fault else words == {"valid": len(SEEDS)}


def test_same_as_brute_force_on_a_register() -> None:
    """Where calls without an end matter in many ways: what one of them wrote is read, or compared."""
    words = Counter[bool]()
    for seed in range(600):
        calls = random_register_history(seed)
        valid = by_brute_force(calls, Register(0))

        assert bool(check(calls, Register(0))) is valid, f"seed {seed}: {calls}"
        words[valid] += 1

    assert min(words.values()) > 100


def test_any_of_the_calls_without_an_end_may_have_happened() -> None:
    """Here the one that both orders could do without, but only one of them later on; and a release by another."""
    register = "0:write:0 0= 1:write:1 1? 2:cas:[0,1] 2? 3:read 3=1 4:write:5 4= 5:read 5=1"

    assert check(history(register), Register(0))
    assert check(history("0:acquire 0? 1:release 1= 2:acquire 2="), MODELS["mutex"])
    assert not check(history("0:acquire 0? 1:release 1= 2:release 2="), MODELS["mutex"])


def until(calls: Sequence[Operation], last: int) -> list[Operation]:
    """Give the history up to an operation: what ends later has no end."""
    begun = [call for call in calls if call.called <= last]
    return [call if (call.returned or 0) <= last else replace(call, returned=None) for call in begun]


Judge = Callable[[list[Operation], Model], bool]


def _blind(calls: list[Operation], model: Model) -> bool:
    return bool(check([replace(call, called=-1 - number) for number, call in enumerate(calls)], model))


def _at_its_end(calls: list[Operation], model: Model) -> bool:
    state = model.initial
    for call in sorted(calls, key=lambda call: call.returned or 10**9):
        after = None if state is None else model.step(state, call)
        state = state if call.returned is None and after is None else after
    return state is not None


WRONG: dict[str, Judge] = {
    "ignores the order in time": _blind,
    "each call happens at its end": _at_its_end,
    "no end: it did not happen": lambda calls, model: bool(
        check([call for call in calls if call.returned is not None], model)
    ),
    "no end: it happened": lambda calls, model: bool(
        check([replace(call, returned=10**9) if call.returned is None else call for call in calls], model)
    ),
    "anybody may release": lambda calls, model: bool(check(calls, replace(model, owned=False))),  # type: ignore[type-var]
    "tokens are not compared": lambda calls, model: bool(check(calls, replace(model, fenced=False))),  # type: ignore[type-var]
}


@pytest.mark.parametrize("judge", WRONG.values(), ids=WRONG)
def test_wrong_checker_would_be_noticed(judge: Judge) -> None:
    """By a history among those that are compared with brute force."""
    assert any(judge(calls, model_of(name)) != valid for name, fault in CASES for calls, valid in corpus(name, fault))


MANY_WRITES = " ".join(f"{number}:write:{number}" for number in range(14)) + " 99:read 99=99"


def test_search_without_an_answer_is_unknown() -> None:
    """Neither its limit of configurations nor that of time makes it valid."""
    calls = history(MANY_WRITES.replace(" 99:read", "".join(f" {number}?" for number in range(14)) + " 99:read"))
    ended = [replace(call, returned=1000 + call.called) if call.f == "write" else call for call in calls]

    few = check(ended, Register(), configurations_max=100)
    short = check(ended, Register(), seconds_max=0.0)

    assert check(history("0:write:1 0= 99:read 99=1"), Register(), configurations_max=100)
    for verdict in (few, short):
        assert verdict.word == "unknown"
        assert "no answer within" in verdict.reason
        assert not verdict


def test_call_that_the_model_does_not_know_is_unknown() -> None:
    """It may be of another lock service."""
    verdict = check(history("0:acquire 0= 0:renew 0="), MODELS["mutex"])

    assert (verdict.word, verdict.reason) == ("unknown", "'renew' is no operation of a lock")


def test_calls_without_an_end_do_not_multiply() -> None:
    """Of hundreds of killed holders and callers, each is looked at, but not every set of them."""
    killed = " ".join(f"{n}:acquire {n}={n} {n}:release {n}? {n + 500}:acquire {n + 500}?" for n in range(1, 300))
    writes = " ".join(f"{n}:write:{n} {n}?" for n in range(20))
    reads = " ".join(f"50:write:{n} 50= 50:read 50={n}" for n in range(50, 60))

    assert check(history(f"{killed} 999:acquire 999=999"), MODELS["fenced-mutex"], configurations_max=2000)
    assert check(history(f"{writes} {reads} 50:read 50=7"), Register(), configurations_max=2000)
