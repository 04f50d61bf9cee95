"""Lock names from the arguments of a decorated function: ``@client.lock("stock:{product_id}")``."""

from __future__ import annotations

import inspect
from string import Formatter
from typing import TYPE_CHECKING, Any

from lockkit.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["NameTemplate"]


class NameTemplate:
    """A lock name with ``{parameter}`` fields, bound to one function."""

    __slots__ = ("_fields", "_signature", "_template")

    def __init__(self, template: str, function: Callable[..., Any]) -> None:
        """
        Check the fields against the function's parameters, at decoration and not at the first call.

        Raises:
            ConfigurationError: The function is a generator, or a field names no parameter.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            message = (
                f"lock {template!r} cannot decorate the generator function {function.__qualname__!r}: the lock would "
                "be released before its body runs. Use `with` inside it."
            )
            raise ConfigurationError(message, name=template)
        try:
            fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
        except ValueError as error:
            message = f"lock name {template!r} is no valid format string: {error}. Double literal braces: {{{{ }}}}"
            raise ConfigurationError(message, name=template) from error
        self._template = template
        self._fields = bool(fields) or "{" in template or "}" in template
        self._signature = inspect.signature(function)
        for field in fields:
            parameter = field.split(".")[0].split("[")[0]
            if parameter not in self._signature.parameters:
                message = (
                    f"lock name {template!r} uses {{{field}}}, but {function.__qualname__!r} has no parameter "
                    f"{parameter!r}; it has: {', '.join(self._signature.parameters) or 'none'}"
                )
                raise ConfigurationError(message, name=template)

    def name(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
        """
        Give the name for one call.

        Raises:
            TypeError: The arguments do not fit the function, as calling it would raise.
            ConfigurationError: A field cannot be formatted.
        """
        bound = self._signature.bind(*arguments, **keywords)
        if not self._fields:
            return self._template
        bound.apply_defaults()
        try:
            return self._template.format_map(bound.arguments)
        except (AttributeError, LookupError, ValueError, TypeError) as error:
            message = f"lock name {self._template!r} cannot be formatted with the call's arguments: {error!r}"
            raise ConfigurationError(message, name=self._template) from error
