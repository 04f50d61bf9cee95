"""Asks a backend for the locks of some names and patterns, once or again and again in a thread of its own."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from lockkit.backend import Holder
from lockkit.cli.inspection import break_shown, holders_of
from lockkit.engine.lookup import SPACE_OF, Kind
from lockkit.errors import BackendUnavailable, LockError, Unsupported
from lockkit.runtime import monotonic, wall_clock
from lockkit.sync import Client
from lockkit.units import Instant, Seconds

NAMES_MAX = 1000
"""Locks that are watched at most: each is one question per look. More would make a look last longer than its
interval, and load the server; fewer would not fill a large screen."""

WILDCARDS = re.compile(r"[*?]")


class Sighting(NamedTuple):
    """
    One holder of a lock, as the backend described it.

    Attributes:
        name: The lock.
        holder: What the backend said.
        asked: When it was asked, monotonic clock.
        answered: When the answer was there, monotonic clock.
        kind: What the name stands for.
    """

    name: str
    holder: Holder
    asked: Instant
    answered: Instant
    kind: Kind = "lock"


@dataclass(frozen=True, slots=True)
class Look:
    """
    All that one look saw.

    Attributes:
        sightings: Each holder of each lock.
        at: When it ended, monotonic clock.
        time: The same, Unix time.
        cut: There were more than `NAMES_MAX` locks.
    """

    sightings: Sequence[Sighting]
    at: Instant
    time: float
    cut: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """
    A look without an answer.

    Attributes:
        error: Why.
        at: When it ended, monotonic clock.
        time: The same, Unix time.
    """

    error: BackendUnavailable
    at: Instant
    time: float


class Looker:
    """Finds the locks that the user wants to see."""

    def __init__(self, client: Client, patterns: Sequence[str]) -> None:
        """Ask nothing yet."""
        self._client = client
        self._names = [pattern for pattern in patterns if not WILDCARDS.search(pattern)]
        self._patterns = [pattern for pattern in patterns if WILDCARDS.search(pattern)] if patterns else ["*"]
        self._known: list[tuple[str, Kind]] = []

    def look(self) -> Look:
        """Ask once."""
        chosen, cut = self._choose()
        sightings: list[Sighting] = []
        for name, kind in chosen:
            asked = monotonic()
            holders = holders_of(self._client, name, kind)  # none: it was released since
            answered = monotonic()
            sightings += [Sighting(name, holder, asked, answered, kind) for holder in holders]
        self._known = list(dict.fromkeys((sighting.name, sighting.kind) for sighting in sightings))
        return Look(sightings, monotonic(), wall_clock(), cut)

    def _choose(self) -> tuple[list[tuple[str, Kind]], bool]:
        """Name what to ask for. What was seen before comes first, so that a cut list stays the same."""
        chosen = dict.fromkeys([*((name, kind) for name in self._names for kind in SPACE_OF), *self._known])
        for found in self._listed():
            if found not in chosen:
                if len(chosen) >= NAMES_MAX:
                    return list(chosen), True
                chosen[found] = None
        return list(chosen), False

    def _listed(self) -> Iterator[tuple[str, Kind]]:
        for pattern, kind in product(self._patterns, SPACE_OF):
            matches = re.compile("".join(map(_expression, pattern)), re.DOTALL).fullmatch
            try:
                yield from (
                    (name, kind) for name in self._client.names(WILDCARDS.split(pattern)[0], kind) if matches(name)
                )
            except Unsupported as error:
                message = f"{error} For lockkit watch: give the names of the locks, without * and ?"
                raise Unsupported(message, backend=self._client.url) from error

    def break_lock(self, name: str, owners: Collection[str], permit: int | None = None) -> str:
        """Free a lock, or one permit of a semaphore, unless it has other holders than the user was shown."""
        what = repr(name) if permit is None else f"permit {permit} of {name!r}"
        broken = break_shown(self._client, name, permit, owners)
        if broken is None:
            return f"{what} has another holder by now: not broken"
        return f"broke {what}" if broken else f"nobody held {what} any more"


def _expression(char: str) -> str:
    return {"*": ".*", "?": "."}.get(char, re.escape(char))


class Poller:
    """Looks again and again in a thread: a call to the server may hang, and keys are answered all the same."""

    def __init__(self, looker: Looker, interval: Seconds, notify: Callable[[], None]) -> None:
        """Start nothing yet."""
        self._looker = looker
        self._interval = interval
        self._notify = notify
        self._wanted: deque[tuple[str, Collection[str], int | None]] = deque()
        self._results: deque[Look | Failure | str | BaseException] = deque()
        self._wake = threading.Event()
        self._stopped = False

    def start(self) -> None:
        """Start the thread. It is a daemon: a call that hangs does not keep the process."""
        threading.Thread(target=self._run, name="lockkit-watch", daemon=True).start()

    def stop(self) -> None:
        """Ask for no more looks. One that is under way goes on."""
        self._stopped = True
        self._wake.set()

    def break_lock(self, name: str, owners: Collection[str], permit: int | None = None) -> None:
        """Have a lock or permit freed by the thread: see `Looker.break_lock`. `take` gives what came of it."""
        self._wanted.append((name, owners, permit))
        self._wake.set()

    def take(self) -> Iterator[Look | Failure | str]:
        """Give what has come since."""
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BaseException):
                raise result
            yield result

    def _run(self) -> None:
        try:
            while not self._stopped:
                if self._wake.wait(self._interval):
                    self._wake.clear()
                while self._wanted:
                    self._post(self._break(*self._wanted.popleft()))
                if not self._stopped:
                    self._post(self._look())
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._post(error)

    def _post(self, result: Look | Failure | str | BaseException) -> None:
        self._results.append(result)
        self._notify()

    def _look(self) -> Look | Failure:
        try:
            return self._looker.look()
        except BackendUnavailable as error:
            return Failure(error, monotonic(), wall_clock())

    def _break(self, name: str, owners: Collection[str], permit: int | None) -> str:
        try:
            return self._looker.break_lock(name, owners, permit)
        except LockError as error:
            return f"{name!r} was not broken: {error}"
