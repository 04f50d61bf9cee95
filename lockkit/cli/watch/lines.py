"""What ``lockkit watch`` prints without a terminal: one line for each event, in words or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from lockkit.backend import Holder
from lockkit.cli.inspection import kind_text
from lockkit.cli.output import in_options, say
from lockkit.cli.watch.changes import Change
from lockkit.cli.watch.columns import describe
from lockkit.cli.watch.looking import NAMES_MAX, Failure, Look
from lockkit.validation import plain, shown


class EventLines(Protocol):
    """Prints events, in some form."""

    def changed(self, change: Change, time: float) -> str:
        """Give the line of a change that was seen at a Unix time."""

    def unreachable(self, failure: Failure) -> str:
        """Give the line of the first look without an answer."""

    def reachable(self, time: float) -> str:
        """Give the line of the first answer after that."""


class TextEvents:
    """Events for people."""

    def changed(self, change: Change, time: float) -> str:
        was = "" if change.previous is None else f", before: {_words(change.previous)}"
        return f"{_clock(time)} {change.kind:<10} {_what(change)}: {_words(change.holder)}{was}"

    def unreachable(self, failure: Failure) -> str:
        return f"{_clock(failure.time)} unreachable: {in_options(str(failure.error))}"

    def reachable(self, time: float) -> str:
        return f"{_clock(time)} reachable  again"


class JsonEvents:
    """Events for programs: one JSON object a line."""

    def changed(self, change: Change, time: float) -> str:
        event: dict[str, Any] = {"event": change.kind, "at": time, "name": change.name, "kind": change.of}
        event |= dataclasses.asdict(change.holder)
        if change.previous is not None:
            event["previous"] = dataclasses.asdict(change.previous)
        return _json(event)

    def unreachable(self, failure: Failure) -> str:
        return _json({"event": "unreachable", "at": failure.time, "error": str(failure.error)})

    def reachable(self, time: float) -> str:
        return _json({"event": "reachable", "at": time})


class Printer:
    """Prints what one look after the other brings."""

    def __init__(self, form: EventLines) -> None:
        """Use a form of lines."""
        self._form = form
        self._away = False
        self._cut = False

    def seen(self, look: Look, changes: Sequence[Change]) -> None:
        """Print what a look has changed."""
        if self._away:
            self._print(self._form.reachable(look.time))
        self._away = False
        for change in changes:
            self._print(self._form.changed(change, look.time))
        if look.cut and not self._cut:
            say(f"there are more locks: this shows the first {NAMES_MAX}; give a PATTERN")
        self._cut = look.cut

    def failed(self, failure: Failure) -> None:
        """Print that there is no answer, once."""
        if not self._away:
            self._print(self._form.unreachable(failure))
        self._away = True

    def _print(self, line: str) -> None:
        print(plain(line), flush=True)


def _what(change: Change) -> str:
    name = shown(change.name)
    return name if change.of == "lock" else f"{name} ({kind_text(change.of, change.holder)})"


def _words(holder: Holder) -> str:
    words = [describe(holder)]
    if holder.token is not None:
        words.append(f"token {holder.token}")
    if holder.mode == "shared":
        words.append(holder.mode)
    if holder.remaining is not None:
        words.append(f"{holder.remaining:.1f} s left")
    if holder.waiters:
        words.append(f"{holder.waiters} waiting")
    return ", ".join(words)


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).astimezone().strftime("%H:%M:%S")


def _json(event: dict[str, Any]) -> str:
    return json.dumps({**event, "at": round(event["at"], 3)})
