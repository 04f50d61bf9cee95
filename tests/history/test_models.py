"""What each model of a lock allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockkit_tools.history import MODELS, check
from lockkit_tools.history.models import limited
from tests.history.notation import history

TWO = "0:acquire 0= 1:acquire 1="
IN_TURN = "0:acquire 0=3 1:acquire 0:release 1=5 0="
FOREIGN = "0:acquire 0= 1:release 1="
FREE = "0:release 0="
TWICE = "0:acquire 0=4 0:acquire 0=4"
AGAIN = f"{TWICE} 0:release 0= 0:release 0="
HALF = f"{TWICE} 0:release 0= 1:acquire 1=9"
THRICE = f"{TWICE} 0:acquire 0=4"
BACK = "0:acquire 0=5 0:release 0= 1:acquire 1=4"
SAME = "0:acquire 0=5 0:release 0= 1:acquire 1=5"
WITHOUT = "0:acquire 0=5 0:release 0= 1:acquire 1=0 1:release 1= 0:acquire 0=6"
BACK_OVER = WITHOUT.replace("0=6", "0=5")
OTHER_FENCE = "0:acquire 0=4 0:acquire 0=5"
LATER_FENCE = "0:acquire 0=0 0:acquire 0=5 0:release 0= 0:release 0= 1:acquire 1=5"

ALLOWED = {
    "mutex": (IN_TURN, FOREIGN, BACK, SAME),
    "owner-aware-mutex": (IN_TURN, BACK, SAME),
    "reentrant-mutex": (IN_TURN, AGAIN, BACK, OTHER_FENCE),
    "fenced-mutex": (IN_TURN, WITHOUT),
    "reentrant-fenced-mutex": (IN_TURN, AGAIN, WITHOUT, "0:acquire 0=0 0:acquire 0=5"),
    "semaphore": (IN_TURN, BACK),
}
FORBIDDEN = {
    "mutex": (TWO, FREE, TWICE),
    "owner-aware-mutex": (TWO, FREE, TWICE, FOREIGN),
    "reentrant-mutex": (TWO, FREE, FOREIGN, HALF, THRICE),
    "fenced-mutex": (TWO, FREE, TWICE, FOREIGN, BACK, SAME, BACK_OVER),
    "reentrant-fenced-mutex": (TWO, FREE, FOREIGN, HALF, THRICE, BACK, SAME, BACK_OVER, OTHER_FENCE, LATER_FENCE),
    "semaphore": (TWO, FREE, TWICE, FOREIGN),
}
CASES = [
    (name, text, word)
    for word, table in (("valid", ALLOWED), ("invalid", FORBIDDEN))
    for name, texts in table.items()
    for text in texts
]


@pytest.mark.parametrize(("name", "text", "word"), CASES)
def test_model(name: str, text: str, word: str) -> None:
    """One call after another, so that the model alone decides."""
    assert check(history(text), MODELS[name]).word == word


def test_every_model_has_both() -> None:
    """None is forgotten."""
    assert ALLOWED.keys() == FORBIDDEN.keys() == MODELS.keys()


@pytest.mark.parametrize(("limit", "word"), [(2, "invalid"), (3, "valid")])
def test_limit(limit: int, word: str) -> None:
    """Permits of a semaphore, and holds of a reentrant lock; a limit in the history goes before that of the model."""
    permits = history("0:acquire 0= 1:acquire 1= 0:acquire 0= 1:release 1= 0:release 0=")

    assert check(permits, limited("semaphore", limit)).word == word
    assert check([replace(call, limit=limit) for call in permits], MODELS["semaphore"]).word == word
    assert check(history(THRICE), limited("reentrant-mutex", limit)).word == word
    assert check(history(IN_TURN), limited("mutex", None)).word == "valid"


def test_permits_of_one_process_are_its_own() -> None:
    """Two permits of one caller are not released by another."""
    text = "0:acquire 0= 0:acquire 0= 1:release 1="

    assert check(history(text), limited("semaphore", 2)).word == "invalid"
