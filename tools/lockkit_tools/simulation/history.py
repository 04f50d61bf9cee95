"""
What happened in a simulation, as a list of events that the checker reads.

All times (``at``, ``until``) are true time, seconds. ``client`` is the name of a process, ``owner`` the id of a lease,
``call`` a number for one call of ``acquire``.
"""

from __future__ import annotations

from typing import NamedTuple


class Called(NamedTuple):
    """A client called ``acquire``. `timeout` in seconds of its clock; None: without limit."""

    at: float
    call: int
    client: str
    name: str
    timeout: float | None


class Acquired(NamedTuple):
    """The call returned a lease whose holder may believe in it until `until`."""

    at: float
    call: int
    client: str
    name: str
    owner: str
    token: int
    until: float
    told_wanted: bool


class Failed(NamedTuple):
    """The call raised, or was cancelled."""

    at: float
    call: int
    error: str


class Believed(NamedTuple):
    """The deadline of a lease was moved."""

    at: float
    owner: str
    until: float


class Unheld(NamedTuple):
    """The client itself does not count the lease as held any more; `why` is ``released`` or a reason of loss."""

    at: float
    owner: str
    why: str


class Looked(NamedTuple):
    """The holder asked its lease, by ``check()``, ``held``, ``lost`` or ``remaining()``."""

    at: float
    owner: str
    held: bool


class Told(NamedTuple):
    """``on_lost`` was called."""

    at: float
    owner: str
    reason: str


class Released(NamedTuple):
    """``release()`` returned, or raised: `outcome` is ``ok`` or the name of the error."""

    at: float
    owner: str
    outcome: str


class Dropped(NamedTuple):
    """The holder forgot the lease without releasing it."""

    at: float
    owner: str


class Wrote(NamedTuple):
    """A storage that compares fencing tokens got a write of a holder, and accepted it or not."""

    at: float
    name: str
    token: int
    accepted: bool


class Paused(NamedTuple):
    """A client stopped running."""

    at: float
    client: str


class Resumed(NamedTuple):
    """A client runs again."""

    at: float
    client: str


class Crashed(NamedTuple):
    """A client ended without a word."""

    at: float
    client: str


class Closed(NamedTuple):
    """A client was closed; `calm`: when nothing was wrong with network and server any more."""

    at: float
    client: str
    calm: bool


class Cut(NamedTuple):
    """From here on messages may be lost or late, or the server may not answer."""

    at: float


class Healed(NamedTuple):
    """From here on network and server work, and no old message is under way."""

    at: float


class Granted(NamedTuple):
    """The server gave the lock to an owner, until `until` if nothing else happens."""

    at: float
    client: str
    name: str
    owner: str
    token: int
    until: float


class Kept(NamedTuple):
    """The server changed the end of a lease."""

    at: float
    name: str
    owner: str
    until: float


class Freed(NamedTuple):
    """
    The server ended a lease of `owner` because of a request of `by`.

    `how` is ``released``, ``undone``, ``broken`` (by nobody), ``expired`` (as seen when somebody asked) or ``lost``
    (with the data).
    """

    at: float
    name: str
    owner: str
    by: str
    how: str


class Undone(NamedTuple):
    """The server ran an `abandon` or `release` of an owner, whether there was anything to undo or not."""

    at: float
    owner: str


class DataLost(NamedTuple):
    """The server lost everything, tokens too."""

    at: float


class Quiet(NamedTuple):
    """
    What the server still has: ``(client, owner)`` of who holds a lock, and of who stands in a queue.

    `final`: every ttl has passed since the last client was closed.
    """

    at: float
    final: bool
    holders: tuple[tuple[str, str], ...]
    waiters: tuple[tuple[str, str], ...]


class Stuck(NamedTuple):
    """A task of a client did not come to its end, long after everything was healed."""

    at: float
    client: str
    task: str


class Broken(NamedTuple):
    """A background task of the client ended with an exception, or a call raised one that is not lockkit's."""

    at: float
    task: str
    error: str


class Ended(NamedTuple):
    """The end of the history: without it something is missing."""

    at: float


Event = (
    Acquired | Believed | Broken | Called | Closed | Crashed | Cut | DataLost | Dropped | Ended | Failed
    | Freed | Granted | Healed | Kept | Looked | Paused | Quiet | Released | Resumed | Stuck | Told | Undone
    | Unheld | Wrote
)  # fmt: skip

History = list[Event]


def describe(history: History) -> str:
    """Write a history for people: one event in a line, owners shortened to eight digits."""
    return "\n".join(_line(event) for event in history)


def _line(event: Event) -> str:
    fields = event._asdict()
    at = fields.pop("at")
    words = " ".join(f"{key}={_short(key, value)}" for key, value in fields.items())
    return f"{at:12.6f}  {type(event).__name__:9} {words}"


def _short(key: str, value: object) -> object:
    if key in {"owner", "by"} and isinstance(value, str):
        return value[:8]
    if isinstance(value, tuple):
        return " ".join(f"{client}:{owner[:8]}" for client, owner in value) or "nobody"
    return f"{value:.6f}" if isinstance(value, float) else value
