"""What belongs to a process says so, instead of what part of it cannot be pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import lockkit
import lockkit.aio

PARTS: dict[str, Callable[[Any], object]] = {
    "client": lambda client: client,
    "lock": lambda client: client.lock("a"),
    "rwlock": lambda client: client.rwlock("a"),
    "semaphore": lambda client: client.semaphore("a", limit=2),
    "locks": lambda client: client.locks(["a", "b"]),
    "election": lambda client: client.election("a"),
    "once": lambda client: client.once("a", keep=60),
}


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("api", [lockkit, lockkit.aio])
def test_nothing_of_a_client_can_be_pickled(api: ModuleType, part: str, duplicate: Callable[[object], object]) -> None:
    """A program that hands one to a process pool learns what to do."""
    made = PARTS[part](api.connect("memory://"))

    with pytest.raises(TypeError, match="cannot be pickled or copied: in the other process, connect"):
        duplicate(made)
