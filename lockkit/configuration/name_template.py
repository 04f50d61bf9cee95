"""
What the decorator must know about the decorated function: the lock's name for a call, and when a call has ended.

The name comes from the arguments: ``@client.lock("stock:{product_id}")``. Filled in as they are,
``export:{user}:{number}`` would give the same name for ("alice:7", "1") and ("alice", "7:1"), and the second caller of
a ``once`` would get the result of the first. So the character that begins the text between two fields is
percent-encoded in the values.

The end is harder to find: a coroutine function and a generator function return before their body has run, and wrappers,
partials and callable objects hide them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from string import Formatter
from typing import Any, TypeVar

from lockkit.errors import ConfigurationError

R = TypeVar("R")

_LAYERS_MAX = 1000
"""A bound, because an object such as a mock has every attribute, so also an endless chain of ``__wrapped__``."""

_UNFINISHED = (Awaitable, Generator, AsyncGenerator)
_UNFINISHED_AFTER_AWAIT = (Coroutine, Generator, AsyncGenerator)


class NamePattern:
    """
    A template that gives different texts for different values.

    In a value the ``%`` and the first character of each text between two fields are percent-encoded: read from the
    left, a value ends where that character stands for itself. A single field needs none of that, and all other values
    read as they are. A value counts by its text: 7 and "7" are the same, None and "None" too.

    `names` are the fields, without their format; with `plain` each is the name of a parameter, and no more.
    """

    __slots__ = ("_fields", "_special", "_tail", "names", "plain")

    def __init__(self, template: str, *, foreign: bool = False) -> None:
        """Cut the template into its fields and the text between them."""
        try:
            parts = list(Formatter().parse(template))
        except ValueError as error:
            raise ValueError(f"is not a valid format string: {error}. Double literal braces: {{{{ }}}}") from error
        self.names: list[str] = []
        self._fields: list[tuple[str, str]] = []
        text = ""
        for literal, name, spec, conversion in parts:
            text += literal
            if name is not None:
                self.names.append(name)
                how = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                self._fields.append((text, f"{{{name}{how}}}"))
                text = ""
        self._tail = text
        self.plain = all(name.isidentifier() for name in self.names) and not any(
            spec or conversion for *_, spec, conversion in parts
        )
        between = [text for text, _ in self._fields[1:]]
        if not all(between) or any(text[0] == "%" for text in between):
            raise ValueError(
                "has two fields with no text between them, or with text that begins with %: different values would "
                "give the same name. Put another character between them, such as :"
            )
        characters = [re.escape(text[0]) for text in between] + ["%"] * bool(between)
        if foreign:
            characters.append(r"[^A-Za-z0-9_.~-]")
        self._special = re.compile("|".join(characters)) if characters else None

    def fill(self, values: Mapping[str, Any]) -> str:
        """Fill in the values."""
        texts = ((text, field.format_map(values)) for text, field in self._fields)
        if self._special is not None:
            encode = self._special.sub
            texts = ((text, encode(_percent_encoded, value)) for text, value in texts)
        return "".join(text + value for text, value in texts) + self._tail


def _percent_encoded(character: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in character[0].encode("utf-8", "surrogatepass"))


class NameTemplate:
    """
    A lock name with ``{parameter}`` fields, bound to one function, whose name for messages is `label`.

    With `is_coroutine` a call returns a coroutine, and the body runs when that is awaited. With `wraps_coroutine` the
    function is a plain one around a coroutine function (``functools.wraps``): its result shows whether it has run that
    (``asyncio.run``) or returns its coroutine.
    """

    __slots__ = ("_backend", "_fields", "_signature", "_template", "is_coroutine", "label", "wraps_coroutine")

    def __init__(self, template: str, function: Callable[..., Any], *, backend: str | None = None) -> None:
        """Check the fields against the function's parameters when it is decorated, not at the first call."""
        self._template = template
        self._backend = backend
        # Not the repr, which for a partial shows its arguments.
        self.label = getattr(function, "__qualname__", type(function).__qualname__)
        if isinstance(function, staticmethod) or not callable(function):
            message = (
                f"lock {template!r} cannot decorate {self.label!r}, which is a {type(function).__name__} and not a "
                "function: put the lock's decorator below the others, directly above the function"
            )
            raise self._error(message)
        layers = [*_wrapped(function)]
        if any(inspect.isgeneratorfunction(layer) or inspect.isasyncgenfunction(layer) for layer in layers):
            message = (
                f"lock {template!r} cannot decorate the generator function {self.label!r}: the lock would "
                "be released before its body runs. Use `with` inside it"
            )
            raise self._error(message)
        self.is_coroutine = any(map(inspect.iscoroutinefunction, _called(function)))
        self.wraps_coroutine = not self.is_coroutine and any(map(inspect.iscoroutinefunction, layers))
        try:
            self._fields = NamePattern(template)
        except ValueError as error:
            raise self._error(f"lock name {template!r} {error}") from error
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            message = (
                f"lock {template!r} cannot decorate {self.label!r}, whose parameters Python cannot determine: {error}. "
                "Decorate a function that calls it"
            )
            raise self._error(message) from error
        for field in self._fields.names:
            parameter = field.split(".")[0].split("[")[0]
            if parameter not in self._signature.parameters:
                message = (
                    f"lock name {template!r} uses {{{field}}}, but {self.label!r} has no parameter "
                    f"{parameter!r}; it has: {', '.join(self._signature.parameters) or 'none'}"
                )
                raise self._error(message)

    def name(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
        """Return the lock's name for one call."""
        bound = self._signature.bind(*arguments, **keywords)
        if self._fields.names:
            bound.apply_defaults()
        try:
            return self._fields.fill(bound.arguments)
        except (AttributeError, LookupError, ValueError, TypeError) as error:
            message = f"lock name {self._template!r} cannot be formatted with the call's arguments: {error!r}"
            raise self._error(message) from error

    def finished(self, result: R, *, awaited: bool = False) -> R:
        """Return what the function returned; refuse what is unfinished, whose work would run without the lock."""
        if not isinstance(result, _UNFINISHED_AFTER_AWAIT if awaited else _UNFINISHED):
            return result
        _discard(result)
        message = (
            f"{self.label!r} holds lock {self._template!r} and returned an object of type {type(result).__name__}: "
            "its work would run after the lock is released, so lockkit did not run it. Decorate the coroutine function "
            "itself (put the lock's decorator below the others), or use `with` inside the generator"
        )
        raise self._error(message)

    def _error(self, message: str) -> ConfigurationError:
        return ConfigurationError(message, name=self._template, backend=self._backend)


def _called(function: Any) -> Iterator[Any]:  # noqa: ANN401 - any callable
    """Yield a callable and what it calls first: the function of a partial, the ``__call__`` of an object."""
    while True:
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.isroutine(function) or isinstance(function, type) or not callable(function):
            return
        else:
            function = type(function).__call__


def _wrapped(function: Any) -> Iterator[Any]:  # noqa: ANN401 - any callable
    """Yield a callable and everything below it, also what it wraps (``__wrapped__``, as `functools.wraps` sets it)."""
    seen: set[int] = set()
    below = [function]
    while below and len(seen) < _LAYERS_MAX:
        for layer in _called(below.pop()):
            if id(layer) in seen:
                break
            seen.add(id(layer))
            yield layer
            if (wrapped := getattr(layer, "__wrapped__", None)) is not None:
                below.append(wrapped)


def _discard(result: Any) -> None:  # noqa: ANN401 - whatever a function returned
    """Close or cancel an unfinished result, so that it never runs, where that is possible."""
    if isinstance(result, (Coroutine, Generator)):
        result.close()
    elif hasattr(type(result), "_asyncio_future_blocking"):  # as in asyncio.isfuture, without importing asyncio
        result.cancel()
