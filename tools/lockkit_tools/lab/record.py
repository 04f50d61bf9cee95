"""What happened in a scene of the lab, as the drawings and the verdict need it. All times are true time, seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lockkit.units import Instant

LaneKind = Literal["client", "server", "storage"]

SpanKind = Literal["waits", "holds", "believes", "stopping", "kept", "offered", "paused", "down", "cut", "silent"]
"""
What a stretch of a lane shows.

``waits``: a client waits for the lock. ``holds``: it has a lease that is valid by its own clock. ``believes``: the
lease has ended, and the client has not noticed. ``stopping``: a leader has been told to stop, and its term goes on.
``kept``: a server keeps the lock for a client. ``offered``: it keeps the free lock for the first waiter.
``paused``, ``down``, ``cut``: stopped, crashed, without network. ``silent``: a restarted node does not vote yet.
"""

Tone = Literal["plain", "good", "bad", "fault", "notice"]
"""What a mark is about: a step, a protection that worked, a broken promise, a fault, somebody who learns of it."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One client, server or storage."""

    name: str
    kind: LaneKind
    label: str


@dataclass(slots=True)
class Span:
    """Something that lasts on a lane. `who` is the client that it is about, with its token; `note` says more."""

    lane: str
    kind: SpanKind
    start: float
    end: float
    who: str = ""
    token: int | None = None
    note: str = ""


@dataclass(slots=True)
class Mark:
    """Something that happens at one instant: a line of the story. ``{token:N}`` in `text` stands for a token."""

    at: float
    lane: str
    text: str
    tone: Tone = "plain"


@dataclass(slots=True)
class Message:
    """Something that is under way; `arrives` is None if it is lost. `kind` says what for."""

    source: str
    target: str
    sent: float
    arrives: float | None
    kind: str
    fate: Literal["", "accepted", "refused", "overwrote"] = ""


@dataclass(slots=True)
class Grant:
    """A client was handed the lock."""

    client: str
    token: int | None  # its fencing token; None of a lock that has none
    start: float
    valid_until: float  # its deadline, by its own clock; `inf` of a lock without
    noticed: float | None = None  # when the client itself counted it as over
    how: str = ""  # ``released``, or why it was lost, or "" at the end of the scene

    @property
    def end(self) -> Instant:
        """When the lease ended, whether the client knew or not."""
        return self.valid_until if self.noticed is None else min(self.valid_until, self.noticed)


@dataclass(slots=True)
class Write:
    """A write reached the storage. `number` is the position of its grant among all."""

    at: float
    client: str
    number: int
    token: int | None
    accepted: bool
    overwrote: bool
    late: bool


@dataclass(slots=True)
class Wait:
    """A client asked for the lock; `end` is None if it never got an answer, `granted` tells whether it got the lock."""

    client: str
    start: float
    end: float | None = None
    granted: bool = False


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two clients had valid leases at the same time."""

    start: float
    end: float
    older: str
    newer: str


@dataclass(slots=True)
class Record:
    """Everything that a scene came to; `end` is that of the drawing."""

    lanes: list[Lane] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    dead: dict[str, float] = field(default_factory=dict)
    overlaps: list[Overlap] = field(default_factory=list)
    end: float = 0.0
