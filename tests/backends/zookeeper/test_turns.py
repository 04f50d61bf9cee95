"""Whose turn it is, from one listing of a queue; no server."""

from __future__ import annotations

import random

import pytest

from lockkit.backend import Mode, Request
from lockkit.backends.lock_state import lowest_free
from lockkit.backends.zookeeper.path import (
    READ_MARK,
    blocker,
    contenders,
    held,
    node_prefix,
    slot_mark,
    would_wait,
)
from lockkit.runtime import BlockingRuntime


def node(owner: str, number: int, mode: Mode) -> str:
    """The name of a contender's node."""
    return f"{node_prefix(owner, mode)}{number:010d}"


def queue_of(modes: str) -> list[str]:
    """The nodes of a queue: w writers, r readers, d writers that have become readers, p permits, 0-9 with a slot."""
    children = []
    for number, letter in enumerate(modes):
        mode: Mode = "exclusive" if letter in "wd" else "shared" if letter == "r" else "permit"
        children.append(node(f"o{number}", number, mode))
        if letter == "d":
            children.append(children[-1] + READ_MARK)
        elif letter.isdigit():
            children.append(children[-1] + slot_mark(int(letter)))
    return children


@pytest.mark.parametrize(
    ("modes", "count", "waits"),
    [
        ("", 0, []),
        ("w", 1, [None]),
        ("ww", 1, [None, 0]),
        ("wrwr", 1, [None, 0, 1, 2]),
        ("rw", 1, [None, 0]),
        ("rrwrr", 2, [None, None, 1, 2, 2]),
        ("drwr", 2, [None, None, 1, 2]),
        ("dw", 1, [None, 0]),
    ],
)
def test_who_holds_the_lock_and_whom_the_others_wait_for(modes: str, count: int, waits: list[int | None]) -> None:
    """One writer, or readers up to the first; a reader waits for the nearest writer, a writer for who is before it."""
    queue = contenders(reversed(queue_of(modes)))

    assert [one.owner for one in held(queue)] == [f"o{number}" for number in range(count)]
    assert [found and queue.index(found) for found in (blocker(queue, at) for at in range(len(queue)))] == waits


@pytest.mark.parametrize(("modes", "count"), [("p", 1), ("pp", 1), ("p12p", 3), ("31p", 2)])
def test_first_permit_and_those_with_a_mark_are_held(modes: str, count: int) -> None:
    """Whatever their slots."""
    queue = contenders(reversed(queue_of(modes)))

    assert [one.owner for one in held(queue)] == [f"o{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("modes", "mode", "limit", "expected"),
    [
        ("", "exclusive", 1, False),
        ("r", "exclusive", 1, True),
        ("", "shared", 1, False),
        ("rd", "shared", 1, False),
        ("rw", "shared", 1, True),
        ("", "permit", 1, False),
        ("p", "permit", 1, True),
        ("p", "permit", 2, False),
        ("p1", "permit", 2, True),
        ("p1", "permit", 3, False),
        ("pp", "permit", 2, True),
        ("pp", "permit", 3, False),  # the second may be about to create its mark
    ],
)
def test_who_would_wait(modes: str, mode: Mode, limit: int, *, expected: bool) -> None:
    """What a single try decides before it creates anything."""
    request = Request("x", "o", 30, "{}", queue=False, runtime=BlockingRuntime(), mode=mode, limit=limit)

    assert would_wait(contenders(queue_of(modes)), request) is expected


def test_marks_belong_to_their_nodes() -> None:
    """A mark alone is nobody; the first permit has slot 0 without a mark, and keeps the slot of one that it has."""
    assert contenders([f"{node('a', 1, 'permit')}{slot_mark(3)}", f"{node('b', 2, 'exclusive')}{READ_MARK}"]) == []
    assert [(one.mode, one.slot) for one in contenders(queue_of("p2"))] == [("permit", 0), ("permit", 2)]
    assert [one.slot for one in contenders(queue_of("4p"))] == [4, None]
    assert [one.mode for one in contenders(queue_of("dr"))] == ["shared", "shared"]


class Model:
    """A semaphore and its clients: what the server has, what is on its way, and which slot each client holds."""

    def __init__(self, seed: int) -> None:
        """Begin with an empty directory."""
        self.chance = random.Random(seed)
        self.children: list[str] = []
        self.limits: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        self.marks: list[tuple[str, str, int]] = []
        self.number = 0

    def come(self) -> None:
        """A client joins the queue."""
        if len(self.limits) < 8:
            self.number += 1
            name = node(f"o{self.number}", self.number, "permit")
            self.children.append(name)
            self.limits[name] = self.chance.randint(1, 4)

    def leave(self) -> None:
        """A client leaves, whatever it has."""
        if self.limits:
            name = self.chance.choice([*self.limits])
            del self.limits[name]
            self.slots.pop(name, None)
            self.children = [child for child in self.children if not child.startswith(name)]

    def look(self) -> None:
        """A client lists the queue, and sends its mark if it is its turn."""
        queue = contenders(self.children)
        holders = held(queue)
        position = self.chance.randrange(len(queue) + 1)
        if position == len(holders) < len(queue) and position < self.limits[queue[position].node]:
            self.marks.append(
                (queue[position].node, queue[position - 1].node, lowest_free(one.slot for one in holders))
            )

    def mark(self) -> None:
        """A mark arrives, in any order."""
        if self.marks:
            name, behind, slot = self.marks.pop(self.chance.randrange(len(self.marks)))
            marked = name + slot_mark(slot)
            if name in self.children and behind in self.children and not self.is_marked(name):
                self.children.append(marked)

    def is_marked(self, name: str) -> bool:
        """Whether a client's node has a mark: it sends one only."""
        return sum(child.startswith(name) for child in self.children) > 1

    def check(self) -> None:
        """Nobody holds what another one holds, is granted more than its limit, or gets another slot."""
        for one in held(contenders(self.children)):
            assert one.slot is not None
            if one.node not in self.slots:
                assert one.slot not in self.slots.values()
                assert len(self.slots) < self.limits[one.node]
                self.slots[one.node] = one.slot
            assert self.slots[one.node] == one.slot


@pytest.mark.parametrize("seed", range(30))
def test_permits_in_any_order_of_events(seed: int) -> None:
    """
    No slot is held twice, and none is granted while its limit are held, although others come and leave meanwhile.

    The first one holds its permit from the moment on when it is the first, although it finds out later.
    """
    model = Model(seed)

    for _ in range(400):
        model.chance.choice([model.come, model.leave, model.look, model.look, model.mark, model.mark])()
        model.check()

    assert model.number > 20
