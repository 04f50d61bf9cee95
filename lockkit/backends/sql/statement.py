"""SQL text with numbered parameters, and the spelling of each driver for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

Parameter: TypeAlias = "str | bytes | int | list[str] | None"

_PARAMETER = re.compile(r"(?<!\$)\$([1-9][0-9]*)")
_SPELLINGS = {"format": "%s", "qmark": "?"}


class Result(NamedTuple):
    """
    What a statement returned.

    Attributes:
        rows: All of them; numbers as int, text as str (as bytes from a column of bytes), NULL as None.
        changed: How many rows it changed, or returned.
        last_id: What ``LAST_INSERT_ID(value)`` was set to, on MariaDB and MySQL.
    """

    rows: Sequence[tuple[Any, ...]]
    changed: int
    last_id: int


class Statement:
    """
    One statement. Made once and used often: connections keep what they prepared by its identity.

    Attributes:
        text: With parameters ``$1``, ``$2``, … in any number and order. ``$$1`` is sent as ``$1``: a parameter of
            what PREPARE prepares. It has no other ``$``.
        packed: The same as bytes.
        once: It is not worth preparing: made for one use.
    """

    __slots__ = ("_compiled", "once", "packed", "text")

    def __init__(self, text: str, *, once: bool = False) -> None:
        self.text = text
        self.once = once
        self.packed = text.encode()
        self._compiled: dict[str, tuple[str, Callable[[Sequence[Any]], Sequence[Any]]]] = {}

    def spelled(self, paramstyle: str) -> tuple[str, Callable[[Sequence[Any]], Sequence[Any]]]:
        """Return the text as a driver wants it, and a function that puts the parameters that it has into its order."""
        found = self._compiled.get(paramstyle)
        if found is None:
            found = self._compiled[paramstyle] = self._compile(paramstyle)
        return found

    def _compile(self, paramstyle: str) -> tuple[str, Callable[[Sequence[Any]], Sequence[Any]]]:
        places = [int(number) - 1 for number in _PARAMETER.findall(self.text)]
        spelling = _SPELLINGS[paramstyle]
        text = self.text if spelling == "?" else self.text.replace("%", "%%")
        text = _PARAMETER.sub(spelling, text).replace("$$", "$")
        count = len(places)
        if places == list(range(count)):
            return text, lambda parameters: tuple(parameters[:count])
        return text, lambda parameters: tuple([parameters[place] for place in places])
