"""Reads histories in the operation format of Jepsen: EDN or JSON, as a list, or one map after another."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class MalformedHistory(Exception):
    """The text is no history."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call, from its beginning to its end."""

    process: Hashable  # who called
    f: str  # what: ``acquire``, ``release``
    value: Any  # what it gave, or was given
    called: int  # its beginning, as the number of its line
    returned: int | None  # its end, as the number of that line; None: nobody knows whether it happened, or when
    limit: int | None = None  # permits of the semaphore, if the history says it

    def __str__(self) -> str:
        """Say who called what, when, in one line."""
        value = "" if self.value is None else f" {self.value}"
        end = "?" if self.returned is None else self.returned
        return f"process {self.process}: {self.f}{value}, operations {self.called} to {end}"


def read(text: str) -> dict[str, list[Operation]]:
    """
    Put beginnings and ends together, for each lock (key ``lock``; without it there is one, of the empty name).

    Calls that failed are left out: they did not happen. So is what no client did, as Jepsen's nemesis.

    Raises:
        MalformedHistory: It is no history.
    """
    locks: dict[str, list[Operation]] = {}
    begun: dict[tuple[Hashable, str], tuple[int, Mapping[str, Any]]] = {}
    for number, line in _lines(text):
        process, kind, lock = line["process"], line["type"], line.get("lock") or ""
        locks.setdefault(lock, [])
        if kind == "invoke":
            if (process, lock) in begun:
                raise MalformedHistory(f"operation {number}: process {process} has another call that has not ended")
            begun[process, lock] = number, line
        elif kind != "info":  # what began and has no such end stays open
            if (process, lock) not in begun:
                raise MalformedHistory(f"operation {number} ends a call of process {process} that did not begin")
            called, call = begun.pop((process, lock))
            if kind == "ok":
                locks[lock].append(_operation(call, called, line.get("value"), number))
    for (_, lock), (called, call) in begun.items():
        locks[lock].append(_operation(call, called, None, None))
    return locks


def _lines(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(parse(text)):
        if not isinstance(line, dict) or not {"process", "type", "f"} <= line.keys():
            raise MalformedHistory(f"operation {number} has no process, type or f: {line}")
        if line["type"] not in {"invoke", "ok", "fail", "info"}:
            raise MalformedHistory(f"operation {number} has the type {line['type']!r}")
        if line["process"] != "nemesis":
            yield number, line


def _operation(call: Mapping[str, Any], called: int, value: object, returned: int | None) -> Operation:
    value = call.get("value") if value is None else value
    return Operation(call["process"], call["f"], value, called, returned, call.get("limit"))


def parse(text: str) -> list[Any]:
    """
    Read the values of a text in EDN or JSON; keywords are words without their colon, tags are left out.

    Raises:
        MalformedHistory: It is neither.
    """
    try:
        if re.match(r'\s*\[?\s*\{\s*"', text):
            lines = [text] if text.lstrip().startswith("[") else text.splitlines()
            values = [json.loads(line) for line in lines if line.strip()]
        else:
            values = _edn(text)
    except ValueError as error:
        raise MalformedHistory(str(error)) from error
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


_TOKEN = re.compile(r'[\s,]+|;.*|("(?:[^"\\]|\\.)*"|#?\{|[\[\](){}]|[^\s,;"\[\](){}]+)')
_PAIRS = {")": "(", "]": "[", "}": "{"}
_WORDS = {"nil": None, "true": True, "false": False}


def _edn(text: str) -> list[Any]:
    stack: list[tuple[str, list[Any]]] = [("", [])]
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"no EDN at character {at}: {text[at : at + 20]!r}")
        at, token = found.end(), found[1]
        if token in ("(", "[", "{", "#{"):
            stack.append((token, []))
        elif token in _PAIRS:
            opened, values = stack.pop()
            if opened[-1:] != _PAIRS[token] or (opened == "{" and len(values) % 2):
                raise ValueError(f"no EDN: {token} at character {at} closes nothing, or half a pair")
            stack[-1][1].append(dict(zip(values[::2], values[1::2], strict=True)) if opened == "{" else values)
        elif token and not token.startswith("#"):
            stack[-1][1].append(_atom(token))
    if len(stack) > 1:
        raise ValueError(f"no EDN: {stack[-1][0]} is not closed")
    return stack[0][1]


def _atom(token: str) -> Any:  # noqa: ANN401 - whatever the text has
    if token.startswith('"'):
        return json.loads(token, strict=False)
    if token in _WORDS:
        return _WORDS[token]
    for number in (int, float):
        try:
            return number(token.removesuffix("N"))
        except ValueError:
            continue
    return token.removeprefix(":")
